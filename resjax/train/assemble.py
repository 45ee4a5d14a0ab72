"""How does a config become the parts of a run: model, optimizer, step? Nothing here reads or writes a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from resjax.calibrate import calibrate
from resjax.config.scheme import scheme as scheme_of
from resjax.errors import Refused
from resjax.health.record import MORE_PROBES
from resjax.models.lm import LM, Shape
from resjax.residual import Context, Init, NormDefaults, Scheme
from resjax.residual.parameters import is_variable
from resjax.scale.mesh import make_mesh
from resjax.train import optimizer as optimizers
from resjax.train.project import project
from resjax.train.schedule import schedule
from resjax.train.state import LossScale, TrainState, cast, create, first_loss_scale
from resjax.train.step import Recipe

FIRST_DYNAMIC_SCALE = 2.0**15
DOTS_TOKENS = 512  # on a CPU, keeping the products pays from about here (measured, see benchmarks/README.md)
# Drawing the weights is compiled for one use: on a CPU, optimizing that program takes 5 s, and pays from about here
# (in parameters).
QUICK, QUICK_BELOW = {"xla_backend_optimization_level": 0}, 30e6
SAVED_SHARE = 0.3  # of an accelerator's memory that kept products may take


@dataclass(frozen=True)
class Parts:
    """A run, assembled.

    Attributes:
      config: as it was given.
      scheme: the residual scheme, overrides folded in.
      graphdef: the model without its arrays.
      abstract: shapes, dtypes and roles of the state.
      optimizer, schedule, recipe: see their modules.
      mesh: the devices.
      remat: the checkpoint policy that 'auto' stood for.
      compute, stream: dtypes of the branches and of the stream.
      vocab: tokens that the model knows.
      knobs: values of the scheme's knobs by name; a scheme has some only where a program varies them (numbers.py).
    """

    config: Any
    scheme: Scheme
    graphdef: nnx.GraphDef
    abstract: TrainState
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    recipe: Recipe
    mesh: Mesh
    remat: str
    compute: str
    stream: str
    vocab: int
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def initial(self, batch: Callable[[int], np.ndarray] | None = None) -> TrainState:
        """The state before the first step; a function of the config alone, whatever the devices, but for schemes that start from
        data: those see the first batch.
        """
        return jax.jit(self.start, compiler_options=quick_start(self.abstract.params))(self.seen(batch))

    def start(self, tokens: jax.Array | None = None) -> TrainState:
        """:meth:`initial` as a function to be compiled; ``tokens`` as :meth:`seen` gives them."""
        return _initial(self.config, self.scheme, self.shape, self.optimizer, tokens, self.knobs)

    def seen(self, batch: Callable[[int], np.ndarray] | None) -> jax.Array | None:
        """The tokens (B, T) that the start depends on; None for most schemes."""
        if not self.scheme.calibrate:
            return None
        if batch is None:
            raise ValueError(f"'{self.scheme.name}' starts from data: give it the batches")
        return jnp.asarray(batch(0)[:, :-1])

    def key(self) -> jax.Array:
        """The random key of the run's steps."""
        return _keys(self.config)[1]

    def loss_scale(self) -> LossScale:
        """The loss scale before the first step."""
        return first_loss_scale(_first_scale(self.config))

    @property
    def shape(self) -> Shape:
        return model_shape(self.config, self.vocab, self.remat, self.stream)


def assemble(config: Any, vocab: int, scheme: Scheme | None = None) -> Parts:
    """All parts of the run that ``config`` (validated and resolved) describes, on data with ``vocab`` tokens.

    ``scheme`` stands in the place of the one that ``config`` names, if given.
    """
    scheme = scheme or scheme_of(config)
    compute, stream = config.precision.compute, config.precision.stream
    vocab = config.model.vocab or vocab
    rows = config.data.batch // config.train.accumulate
    mesh = make_mesh(config.mesh.data, rows)
    remat = choose_remat(config, rows // mesh.size, compute) if config.model.remat == "auto" else config.model.remat
    shape = model_shape(config, vocab, remat, stream)

    try:
        abstract_model = jax.eval_shape(lambda: _model(config, scheme, shape, jax.random.key(0)))
    except ValueError as error:  # what a scheme asks of these branches and sizes, and they do not have
        raise Refused(f"residual.name is '{config.residual.name}': {error}") from None
    graphdef, params = nnx.split(abstract_model)
    optimizer, rate = update_rule(config, scheme, params)
    abstract = jax.eval_shape(lambda: _initial(config, scheme, shape, optimizer))
    recipe = Recipe(
        accumulate=config.train.accumulate,
        compute=compute,
        clip=config.optimizer.clip or 0.0,
        stop=config.train.on_nonfinite != "skip",
        scaled=config.precision.loss_scale is not None,
        dynamic_scale=config.precision.loss_scale == "dynamic",
        forward="forward" in config.health.groups,
        backward="backward" in config.health.groups,
        more=frozenset(config.health.groups).intersection(MORE_PROBES),
        project=scheme.project,
        moved=config.precision.param != "float32" and bool(config.health.groups),
    )
    return Parts(config, scheme, graphdef, abstract, optimizer, rate, recipe, mesh, remat, compute, stream, vocab)


def update_rule(config: Any, scheme: Scheme, params: Any) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer and its learning rate by step; ``params`` may be abstract."""
    section, steps = config.optimizer, config.train.steps
    roles = {role for leaf in jax.tree.leaves(params, is_leaf=is_variable) for role in leaf.role}
    if section.gain_lr != 1.0 and "gain" not in roles:
        raise Refused(
            f"optimizer.gain_lr is {section.gain_lr:g}, which has no effect: '{config.residual.name}' has no learned gain"
        )
    rate = schedule(section.schedule, section.lr, section.warmup, steps)
    return optimizers.build(section, steps, params, scheme.optim, config.model.depth), rate


def quick_start(params: Any) -> dict[str, Any] | None:
    """Compiler options for the program that draws the weights."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return QUICK if jax.default_backend() == "cpu" and count < QUICK_BELOW else None


def model_shape(config: Any, vocab: int, remat: str, stream: str) -> Shape:
    """The model's options from the config."""
    model = config.model
    return Shape(
        vocab=vocab,
        length=config.data.length,
        depth=model.depth,
        width=model.width,
        heads=model.heads,
        mlp=model.mlp,
        mlp_ratio=model.mlp_ratio,
        norms=NormDefaults(model.norm, model.norm_eps, model.norm_gain, model.bias),
        positions=model.positions,
        tied=model.tied,
        bias=model.bias,
        qk_norm=model.qk_norm,
        dropout=model.dropout,
        scan=model.scan,
        remat=remat,
        stream=stream,
        rounding=config.precision.rounding,
    )


def choose_remat(config: Any, rows: int, compute: str) -> str:
    """What 'auto' stands for: keep the products of weights where that is cheap, else compute whole blocks again.

    On a CPU by tokens at once, from measurements; on an accelerator by the memory that the kept products would take.
    """
    model, tokens = config.model, rows * config.data.length
    if jax.default_backend() == "cpu" and not model.scan:
        return "none"  # unrolled, the CPU's compiler merges what is computed again with what was kept
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return "dots" if tokens >= DOTS_TOKENS else "full"
    hidden = model.mlp_ratio * (2 if model.mlp == "swiglu" else 1)
    kept = (
        tokens * model.depth * model.width * (5 + hidden) * jnp.dtype(compute).itemsize
    )  # q, k, v, two writes, hidden
    return "dots" if kept < SAVED_SHARE * stats["bytes_limit"] else "full"


def _model(config: Any, scheme: Scheme, shape: Shape, key: jax.Array) -> LM:
    start = config.init
    return LM(shape, scheme, Init(start.kind, start.std, start.gain, start.out_scale, start.embed_gain), key=key)


def _initial(
    config: Any,
    scheme: Scheme,
    shape: Shape,
    optimizer: optax.GradientTransformation,
    tokens: jax.Array | None = None,
    knobs: Mapping[str, Any] = MappingProxyType({}),
) -> TrainState:
    weights, run = _keys(config)
    model = _model(config, scheme, shape, weights)
    if tokens is not None:
        model.stack = calibrate(model.stack, model.embedded(tokens, Context()), knobs)
    _, params = nnx.split(model)
    params = project(cast(params, config.precision.param), scheme.project)
    return create(params, optimizer, run, _first_scale(config))


def _keys(config: Any) -> tuple[jax.Array, jax.Array]:
    """For the weights, and for the steps."""
    weights, steps = jax.random.split(jax.random.key(config.seed))
    return weights, steps


def _first_scale(config: Any) -> float:
    scale = config.precision.loss_scale
    return FIRST_DYNAMIC_SCALE if scale == "dynamic" else scale or 1.0
