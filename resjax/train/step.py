"""What does one optimizer step do? One compiled program: gradient, accumulation, probes, update, and never a non-finite one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from resjax.health.probes import finished, measure_block, measuring, merged, observing
from resjax.residual import Context
from resjax.residual.connection import measured
from resjax.train import roles
from resjax.train.optimizer import apply_updates, at_step, clip_scale, is_on
from resjax.train.project import project
from resjax.train.state import LossScale, TrainState

GROWTH_INTERVAL = 2000  # finite steps after which a dynamic loss scale doubles: the usual rule of mixed precision
LARGEST_SCALE = 2.0**24
SQUARES = "role_squares"  # of the gradient of one slice, until all slices are done


@dataclass(frozen=True)
class Recipe:
    """The static choices of a step.

    Attributes:
      accumulate: slices that the batch is processed in, one after the other.
      compute: dtype of the branches and the head.
      clip: largest norm of the gradient; 0 = no clipping. The one number here that may be traced: it is then in use.
      stop: a non-finite loss or gradient halts the run (else the step is passed over).
      scaled: the loss is multiplied by a scale, which is divided out of the gradient.
      dynamic_scale: the loss scale moves by itself; an overflow then only halves it.
      forward, backward: whether there are the probes of these groups.
      more: which other groups of probes there are; see :data:`resjax.health.record.MORE_PROBES`.
      project: by weight role, the axis along which matrices are held to norm 1.
      moved: also measure which share of the parameters a step changes: 1 or nearly so in float32.
    """

    accumulate: int = 1
    compute: str = "float32"
    clip: float | jax.Array = 0.0
    stop: bool = True
    scaled: bool = False
    dynamic_scale: bool = False
    forward: bool = True
    backward: bool = True
    more: frozenset[str] = frozenset()
    project: Mapping[str, str] = field(default_factory=dict)
    moved: bool = False

    @property
    def groups(self) -> frozenset[str]:
        """All groups of probes that there are."""
        return self.more | {name for name in ("forward", "backward") if getattr(self, name)}


Step = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array], dict[str, jax.Array]]]
Gradient = Callable[[TrainState, jax.Array, jax.Array], tuple[jax.Array, jax.Array, nnx.State, dict[str, jax.Array]]]


def make_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    recipe: Recipe,
    knobs: Mapping[str, jax.Array] | None = None,
    alone: bool = True,
) -> Step:
    """The function ``(state, batch (B, T + 1), on) -> (state, metrics, probes)``, to be jitted.

    ``on`` is a traced boolean: whether probes are measured in this step (zeros otherwise). Metrics are float32 scalars: loss, grad_norm
    (before clipping), lr, finite, loss_scale. The returned state is the old one wherever the loss or the gradient is not finite.
    ``knobs`` are the values of the scheme's knobs, by name. Not ``alone``: to be mapped over many states with one ``on``, which a
    halted state then does not turn off (were it another one for each, all steps would measure).
    """

    gradient = make_gradient(graphdef, recipe, knobs)

    def step(state: TrainState, batch: jax.Array, on: jax.Array) -> tuple[TrainState, dict, dict]:
        on = on & ~state.halted if alone else on
        value, norm, grads, probes = gradient(state, batch, on)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        applied = finite & ~state.halted

        def update(grads: nnx.State, opt_state: Any, params: nnx.State) -> tuple[nnx.State, Any]:
            if is_on(recipe.clip):
                factor = clip_scale(norm, recipe.clip)
                grads = jax.tree.map(lambda g: g * factor, grads)
            updates, opt_state = optimizer.update(grads, at_step(opt_state, state.step), params)
            return project(apply_updates(params, updates), recipe.project), opt_state

        def stepped(applied: jax.Array, grads: nnx.State, opt_state: Any, params: nnx.State) -> tuple[nnx.State, Any]:
            # a branch, not a select of every leaf: that would hold old and new state side by side
            keep = lambda _, opt_state, params: (params, opt_state)  # noqa: E731
            return jax.lax.cond(applied, update, keep, grads, opt_state, params)

        of_slices = probes.pop(SQUARES, jnp.float32(jnp.nan))

        def watched(grads: nnx.State, opt_state: Any, params: nnx.State) -> dict[str, jax.Array]:
            new, _ = stepped(applied, grads, opt_state, params)  # once more, so that the step itself can write in place
            return parameter_probes(recipe, of_slices, grads, params, new)

        before = (grads, state.opt_state, state.params)
        found = measured(Context(on=on), watched, *before)
        probes |= found
        params, opt_state = stepped(once(applied, found), *before)
        scaler, overflow_is_normal = _rescaled(state.loss_scale, finite, recipe)
        halted = state.halted | (~finite & ~overflow_is_normal & recipe.stop)
        skipped = jnp.where(finite, 0, state.skipped + jnp.where(overflow_is_normal, 0, 1))
        new = TrainState(
            params=params,
            opt_state=opt_state,
            step=state.step + jnp.where(halted, 0, 1),
            cursor=state.cursor + jnp.where(halted, 0, 1),
            key=state.key,
            # a state that has halted stays as it is, whatever is tried on it
            loss_scale=jax.tree.map(lambda old, now: jnp.where(state.halted, old, now), state.loss_scale, scaler),
            halted=halted,
            skipped=jnp.where(state.halted, state.skipped, skipped),
        )
        metrics = {
            "loss": value.astype(jnp.float32),
            "grad_norm": norm,
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            "finite": applied,
            "halted": halted,
            "skipped": new.skipped,
            "loss_scale": state.loss_scale.scale,
        }
        return new, metrics, probes

    return step


def make_gradient(graphdef: nnx.GraphDef, recipe: Recipe, knobs: Mapping[str, jax.Array] | None = None) -> Gradient:
    """The function ``(state, batch (B, T + 1), on) -> (loss, norm, gradient, probes)``: what a step does before its update.

    The gradient is in float32, the loss scale divided out, not clipped; ``norm`` is its norm.
    """

    def slice_loss(
        params: nnx.State, taps: dict, tokens: jax.Array, key: jax.Array, state: TrainState, on: jax.Array
    ) -> Any:
        model = nnx.merge(graphdef, params)
        context = Context(
            train=True,
            key=key,
            step=state.step,
            knobs=knobs or {},
            measure=measuring(recipe.groups),
            measure_block=measure_block if recipe.forward else None,
            observers=observing(recipe.groups),
            on=on,
            taps=taps.get("sites"),
            compute=jnp.dtype(recipe.compute),
        )
        value, probes = model.objective(tokens, context, taps.get("embed"))
        return value * state.loss_scale.scale, (value, finished(probes, context))

    gradient = jax.grad(slice_loss, argnums=(0, 1), has_aux=True)

    def scaled_gradient(state: TrainState, batch: jax.Array, on: jax.Array) -> tuple:
        stack = nnx.merge(graphdef, state.params).stack
        taps = {}
        if recipe.backward:
            taps = {"sites": jnp.zeros((stack.depth, len(stack.kinds)), jnp.float32), "embed": jnp.float32(0)}
        key = jax.random.fold_in(state.key, state.step)

        def one(tokens: jax.Array, key: jax.Array) -> tuple:
            (grads, squares), (value, probes) = gradient(state.params, taps, tokens, key, state, on)
            if "optimizer" in recipe.more and recipe.accumulate > 1:
                probes |= measured(Context(on=on), lambda g: {SQUARES: roles.squares(g)}, grads)
            return grads, squares, value, probes

        grads, squares, value, probes = accumulated(one, state.params, batch, key, recipe.accumulate)
        inverse = 1.0 / state.loss_scale.scale
        with jax.named_scope("grad_norm"):
            # In float32 whatever the parameters are: in float16 squares are soon infinite or 0, and so is the inverse of a large
            # scale.
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            if recipe.scaled:
                grads = jax.tree.map(lambda g: g * inverse, grads)
            norm = optax.tree.norm(grads)
        if recipe.backward:
            probes |= {
                "stream_grad": jnp.sqrt(squares["sites"]) * inverse,
                "embed_grad": jnp.sqrt(squares["embed"]) * inverse,
                "param_grad_block": jax.lax.cond(on, block_norms, lambda _: jnp.zeros(stack.depth, jnp.float32), grads),
            }
        if SQUARES in probes:
            probes[SQUARES] *= inverse**2
        return value, norm, grads, probes

    return scaled_gradient


def accumulated(
    one: Callable[[jax.Array, jax.Array], tuple], params: nnx.State, batch: jax.Array, key: jax.Array, count: int
) -> tuple:
    """``one(tokens, key) -> (gradients, squared taps, loss, probes)`` over ``count`` slices of the batch, one after the other.

    Every slice's loss is a mean over the slice, so gradients and losses are averaged (gradients in float32), and the squared norm of
    the whole batch's gradient at the stream is the sum over slices by count^2. Probes are merged as each wants it.
    """
    if count == 1:
        return one(batch, key)

    def add(total: nnx.State, slice_: tuple[jax.Array, jax.Array]) -> tuple[nnx.State, tuple]:
        grads, *rest = one(*slice_)
        return jax.tree.map(lambda sum_, g: sum_ + g.astype(jnp.float32), total, grads), tuple(rest)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    # every count-th row: consecutive ones would lie on a part of the devices
    slices = batch.reshape(batch.shape[0] // count, count, *batch.shape[1:]).swapaxes(0, 1)
    with jax.named_scope("slices"):
        total, (squares, values, rows) = jax.lax.scan(add, zeros, (slices, jax.random.split(key, count)))
    return (
        jax.tree.map(lambda g: g / count, total),
        jax.tree.map(lambda s: jnp.sum(s, axis=0) / count**2, squares),
        jnp.mean(values),
        {name: merged(name, row) for name, row in rows.items()},
    )


def _rescaled(scaler: LossScale, finite: jax.Array, recipe: Recipe) -> tuple[LossScale, jax.Array]:
    """The next loss scale, and whether a non-finite gradient was only an overflow that a smaller scale may cure."""
    if not recipe.dynamic_scale:
        return scaler, jnp.asarray(False)
    grown = (scaler.good + 1) % GROWTH_INTERVAL == 0
    larger = jnp.where(grown, jnp.minimum(scaler.scale * 2, LARGEST_SCALE), scaler.scale)
    scale = jnp.where(finite, larger, jnp.maximum(scaler.scale / 2, 1.0))
    return LossScale(scale, jnp.where(finite, scaler.good + 1, 0)), scaler.scale > 1.0


def block_norms(grads: nnx.State) -> jax.Array:
    """Norm of the gradient of each block's parameters, (depth,) float32."""

    def squares(leaf: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(1, leaf.ndim)))

    runs = grads["stack"]["runs"]
    return jnp.sqrt(jnp.concatenate([sum(map(squares, jax.tree.leaves(runs[i]))) for i in sorted(runs)]))


def once(flag: jax.Array, found: Mapping[str, jax.Array]) -> jax.Array:
    """``flag``, once ``found`` is worked out.

    XLA orders by what reads what: a conditional that reads the parameters, and one that could write to them in place but does not
    wait for the first, cost a copy of the parameters in every step.
    """
    for values in found.values():
        flag &= jnp.all(jnp.isnan(values) | (values >= -jnp.inf))  # whatever they are
    return flag


def parameter_probes(
    recipe: Recipe, of_slices: jax.Array, grads: nnx.State, params: nnx.State, new: nnx.State
) -> dict[str, jax.Array]:
    """What is measured of the gradient by block and role, and of the parameters before and after a step.

    ``of_slices``: the mean squared norms of the gradients of slices, (block, role); NaN without slices.
    """
    probes: dict[str, jax.Array] = {}
    if "roles" in recipe.more:
        probes |= {"role_grad": jnp.sqrt(roles.squares(grads)), "role_rms": roles.sizes(params)}
    if "optimizer" in recipe.more:
        probes |= {"role_signal": roles.signal(of_slices, roles.squares(grads), recipe.accumulate)}
        probes |= roles.changes(new, params)
    return probes | ({"moved": share_moved(new, params)} if recipe.moved else {})


def share_moved(new: nnx.State, old: nnx.State) -> jax.Array:
    """Share of the parameter elements that are not what they were: near 0 where bfloat16 parameters swallow their updates."""
    pairs = list(zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    return jnp.float32(sum(jnp.sum(a != b) for a, b in pairs) / sum(a.size for a, _ in pairs))


def make_evaluation(
    graphdef: nnx.GraphDef, compute: str, knobs: Mapping[str, jax.Array] | None = None
) -> Callable[[nnx.State, jax.Array, jax.Array], jax.Array]:
    """The function ``(params, batch (B, T + 1), step) -> loss``: mean nats per token of one held-out batch, nothing random."""

    def evaluate(params: nnx.State, batch: jax.Array, step: jax.Array) -> jax.Array:
        context = Context(step=step, knobs=knobs or {}, compute=jnp.dtype(compute))
        return nnx.merge(graphdef, params).objective(batch, context)[0]

    return evaluate
