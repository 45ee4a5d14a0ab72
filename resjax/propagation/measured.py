"""What does a network at its start do to a batch, forward and backward? Compiled once a network; weights and tokens by seed.

Nothing is trained: step 0, in training (dropout and stochastic depth draw), the loss that training would minimise on random tokens.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax.health.geometry import token_cosine
from resjax.health.probes import measure, narrowed
from resjax.health.spectra import participation_ratio, stable_rank
from resjax.models.lm import KINDS
from resjax.propagation.cases import Case
from resjax.residual import Context, Flow, Rule, Site, evaluate
from resjax.residual.gains import is_rule
from resjax.residual.scheme import GAINS
from resjax.train.assemble import quick_start
from resjax.train.numbers import with_numbers

# of one array, about the mean over all its tokens; see :func:`geometry`
GEOMETRY = ("token_cosine_centred", "participation_ratio", "stable_rank")
# (block, site); the last is measured on the way back
SITE = ("stream_rms", "update_rms", "update_ratio", "update_cosine", "token_cosine", *GEOMETRY, "finite", "stream_grad")
ENDS = ("embed_rms", "embed_token_cosine", *(f"embed_{name}" for name in GEOMETRY), "final_rms", "embed_grad", "loss")
TOKENS_KEY = 0x70726F70  # apart from the seeds of other draws


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured of one network.

    Attributes:
      sites: by name of ``SITE``, (seeds, depth, sites) float32.
      ends: by name of ``ENDS``, (seeds,).
      compile_seconds, seconds: to trace and compile; to draw and run, all seeds.
    """

    sites: dict[str, np.ndarray]
    ends: dict[str, np.ndarray]
    compile_seconds: float
    seconds: float


def measured(case: Case, tokens: Iterable[np.ndarray] | None = None) -> Measured:
    """Compile and run ``case`` under each of its seeds, on ``tokens``, a batch (batch, length + 1) a seed; None = random ones."""
    return measured_at(case, [{}], tokens)[0]


def measured_at(
    case: Case, settings: Sequence[Mapping[str, float]], tokens: Iterable[np.ndarray] | None = None
) -> list[Measured]:
    """The same under each of several settings of the numbers ``init.*``, all by one program; each has the weights of the others but for
    their size, and the same tokens.

    Args:
      settings: values by field, the same fields in each.
    """
    began = time.monotonic()
    draw, run = _programs(case, tuple(settings[0]))
    compile_seconds = time.monotonic() - began
    seen = list(batches(case) if tokens is None else tokens)
    made = []
    for setting in settings:
        began, found = time.monotonic(), []
        for seed, batch in zip(case.seeds, seen, strict=True):
            numbers = {"seed": np.uint32(seed)} | {name: np.float32(value) for name, value in setting.items()}
            params = draw(numbers, batch)
            found.append(jax.device_get(run(params, numbers["seed"], batch)))
            del params
        together = {name: np.stack([row[name] for row in found]) for name in found[0]}
        sites, ends = ({name: together[name] for name in names} for names in (SITE, ENDS))
        made.append(Measured(sites, ends, compile_seconds, time.monotonic() - began))
    return made


def batches(case: Case) -> Iterator[np.ndarray]:
    """(batch, length + 1) tokens a seed, each drawn evenly from the vocabulary."""
    for seed in case.seeds:
        draws = np.random.default_rng([TOKENS_KEY, seed])
        yield draws.integers(0, case.parts.vocab, (case.batch, case.length + 1)).astype(np.int32)


def _programs(case: Case, names: tuple[str, ...] = ()) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(numbers, batch) -> weights, and (weights, seed, batch) -> numbers; compiled. ``numbers`` are the seed and those of ``names``."""
    parts = case.parts

    def draw(numbers: dict[str, jax.Array], batch: jax.Array) -> Any:
        tokens = batch[:, :-1] if parts.scheme.calibrate else None
        return with_numbers(parts, numbers).start(tokens).params

    def run(params: Any, seed: jax.Array, batch: jax.Array) -> dict[str, jax.Array]:
        model = nnx.merge(parts.graphdef, params)
        key = jax.random.fold_in(with_numbers(parts, {"seed": seed}).key(), 0)  # that of the first step
        scale = parts.loss_scale().scale

        def loss(taps: dict[str, jax.Array]) -> tuple[jax.Array, tuple]:
            context = Context(
                train=True,
                key=key,
                step=jnp.int32(0),
                measure=_measure,
                taps=taps["sites"],
                compute=jnp.dtype(parts.compute),
            )
            value, probes = model.objective(batch, context, taps["embed"])
            return value * scale, (value, probes)

        taps = {"sites": jnp.zeros((model.stack.depth, len(model.stack.kinds)), jnp.float32), "embed": jnp.float32(0)}
        squares, (value, probes) = jax.grad(loss, has_aux=True)(taps)
        start = model.embedded(batch[:, :-1], Context())
        start_probes = geometry(start) | {"token_cosine": jnp.asarray(token_cosine(start), jnp.float32)}
        return probes | {
            "stream_grad": jnp.sqrt(squares["sites"]) / scale,
            "embed_grad": jnp.sqrt(squares["embed"]) / scale,
            "loss": value,
            **{f"embed_{name}": number for name, number in start_probes.items()},
        }

    seed, batch = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((case.batch, case.length + 1), jnp.int32)
    numbers = {"seed": seed} | {name: jax.ShapeDtypeStruct((), jnp.float32) for name in names}
    params = parts.abstract.params
    drawn = jax.jit(draw, compiler_options=quick_start(params)).lower(numbers, batch).compile()
    return drawn, jax.jit(run).lower(params, seed, batch).compile()


def geometry(stream: jax.Array) -> dict[str, jax.Array]:
    """How alike the tokens of (batch, ..., width) are about their common mean, and how many directions they span; float32 scalars.

    As :mod:`resjax.health.geometry` and :mod:`resjax.health.spectra` have it: tokens that are the same but for rounding have no cosine
    (NaN) and span nothing (0).
    """
    rows = stream.reshape(-1, stream.shape[-1])
    values = token_cosine(stream, centre=True), participation_ratio(rows), stable_rank(rows)
    return narrowed(dict(zip(GEOMETRY, values, strict=True)))


def _measure(flow: Flow) -> dict[str, jax.Array]:
    """The forward probes of one site that a profile shows."""
    probes = measure(flow) | geometry(flow.after)
    return {name: probes[name] for name in SITE if name in probes}


def moving(case: Case) -> list[str]:
    """The gains that move with training: of these the profile has the values at step 0."""
    scheme = case.parts.scheme
    found: list[str] = []
    kinds = scheme.sites(KINDS)
    for run in scheme.runs(KINDS, case.depth):
        for pos, resolved in enumerate(run.sites):
            site = Site(kinds[pos], pos, len(kinds), case.depth)
            for name in GAINS:
                gain = getattr(resolved, name)
                if name not in (*found, "scale_eval") and is_rule(gain) and _moves(gain, site, run.first):
                    found.append(name)
    return found


def _moves(rule: Rule, site: Site, block: int) -> bool:
    blocks = jnp.float32([block])
    early, later, late = (np.asarray(evaluate(rule, site.on(blocks, jnp.float32(step)))) for step in (0, 1, 1e6))
    return not (np.array_equal(early, later) and np.array_equal(early, late))
