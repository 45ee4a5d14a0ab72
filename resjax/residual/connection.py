"""How does one branch join the stream? The wrapper around it: norms, gains, dropout, stochastic depth, precision."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.carry import Around, Flow
from resjax.residual.gains import Gain, Knob, Learned, LearnedGain
from resjax.residual.inside import Points, Side
from resjax.residual.norms import NormDefaults, build_norm
from resjax.residual.parameters import Init, start
from resjax.residual.scheme import Scheme
from resjax.residual.site import Site
from resjax.residual.streams import scaled

DROPOUT, DROP_PATH, COIN = 0, 1, 3  # one number a use of randomness, folded into the site's key (2: see models)
LEARNABLE = ("in_scale", "scale", "skip", "entry")


class Branch(Protocol):
    """What a connection wraps: a module (batch, ..., width) -> (batch, ..., width) that knows nothing of the scheme.

    A branch may also have ``slots`` and take ``at``, and then a scheme may act inside it; see :mod:`resjax.residual.inside`. One that
    takes a dict of views 'q', 'k', 'v' as its input says so by ``views``.
    """

    def __call__(self, x: Any) -> jax.Array: ...


Measure = Callable[[Flow], dict[str, jax.Array]]
MeasureBlock = Callable[[Any, Any], dict[str, jax.Array]]


@dataclass(frozen=True)
class Observer:
    """What is measured of what stands at one point inside branches; NaN at sites whose branch has no such point.

    Attributes:
      point: its name.
      names: of the results, float32 scalars.
      measure: the arrays at the point, one after the other (a branch may work through them in parts) -> results by name.
    """

    point: str
    names: tuple[str, ...]
    measure: Callable[[Sequence[jax.Array]], dict[str, jax.Array]]

    def nothing(self) -> dict[str, jax.Array]:
        return dict.fromkeys(self.names, jnp.float32(jnp.nan))


@dataclass(frozen=True)
class Context:
    """What a forward pass is told besides its input.

    Attributes:
      train: training (dropout, stochastic depth, ``scale``) or not (``scale_eval``).
      key: one PRNG key a step; None where nothing is random.
      step: optimizer steps done, for rules that move with training.
      knobs: values of :class:`~resjax.residual.gains.Knob` by name.
      measure: what is measured of each site's :class:`Flow`; None = nothing.
      measure_block: what is measured of the stream (before, after) a block; None = nothing.
      observers: what is measured inside branches.
      on: traced boolean, whether to measure in this call; the shapes of the results do not depend on it.
      taps: (depth, sites) zeros whose gradient is the squared gradient norm of the stream after each site; None = no taps.
      compute: dtype of the branches.
      side: what earlier blocks hand to the branches of this one, by point.
      keep: (depth, sites) factors on what each site adds, for studies: 0 takes its update away; None = all of it.
      store: what becomes of an array that a site writes to the stream, given it and the site's number (-1: the embedding), for
        studies of precision; None = it is stored as it is. What a norm after the add reads goes through it too.
    """

    train: bool = False
    key: jax.Array | None = None
    step: Any = 0
    knobs: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure | None = None
    measure_block: MeasureBlock | None = None
    observers: tuple[Observer, ...] = ()
    on: Any = True
    taps: jax.Array | None = None
    compute: Any = jnp.float32
    side: Side = field(default_factory=dict)
    keep: jax.Array | None = None
    store: Callable[[jax.Array, Any], jax.Array] | None = None


class Connection(nnx.Module):
    """One branch and its way into the stream, as ``scheme`` (resolved for this site) says."""

    def __init__(
        self,
        scheme: Scheme,
        branch: Branch,
        width: int,
        site: Site,
        norms: NormDefaults,
        dropout: float = 0.0,
        *,
        key: jax.Array,
        views: tuple[str, ...] = (),
    ):
        self.scheme = scheme
        self.branch = branch
        self.dropout = dropout
        # one norm a view, where the branch reads several mixes of the stream
        built = partial(build_norm, scheme.norm_in, width, norms)
        self.norm_in = nnx.Dict({view: built() for view in views}) if views and scheme.norm_in else built()
        self.norm_out = build_norm(scheme.norm_out, width, norms)
        self.norm_after = build_norm(scheme.norm_after, width, norms)
        learned = {name: getattr(scheme, name) for name in LEARNABLE if isinstance(getattr(scheme, name), Learned)}
        self.gains = nnx.Dict({name: LearnedGain(gain, width, site) for name, gain in learned.items()})
        self.carry = scheme.carry.build(width, site, norms, key)
        start(self.carry, Init(), site, scheme.init)
        slots = getattr(branch, "slots", {})
        inside = {name: one for name, one in scheme.inside.items() if name in slots}
        share = {name: one for name, one in scheme.share.items() if name in slots}
        self.points = Points(inside, share, slots, width, site, norms) if inside or share else None

    def __call__(
        self, stream: Any, site: Site, numbers: Mapping[str, jax.Array], entry: Any, context: Context
    ) -> tuple[Any, Flow]:
        """The stream after this site, and what flowed.

        Args:
          stream: what is carried; for one stream an array (batch, ..., width).
          site: which site, its block possibly traced.
          numbers: values of the gains that are rules, for this block.
          entry: the stream at the block's start, given to the block's last site only.
          context: see :class:`Context`.
        """
        update, memo, _ = self.produce(stream, site, numbers, context)
        return self.write(stream, memo, update, site, numbers, entry, context)

    def produce(
        self,
        stream: Any,
        site: Site,
        numbers: Mapping[str, jax.Array],
        context: Context,
        views: Any = None,
        seen: dict[str, jax.Array] | None = None,
    ) -> tuple[jax.Array | None, Any, Side]:
        """The update, what ``write`` wants to know of how it came about, and what the branch hands to other blocks.

        ``drop( scale * N_out( F( in_scale * N_in(u) ) ) )`` in the stream's dtype; None where the scale is 0. ``views``, if given,
        is read in place of u. ``seen``, if given, fills with what the context's observers measure.
        """
        if seen is not None:
            on = jnp.asarray(context.on)
            for observer in context.observers:  # filled in below where the branch has the point and is called
                seen |= {name: jnp.where(on, value, 0) for name, value in observer.nothing().items()}
        gain = partial(self._amplify, numbers=numbers, context=context)
        with jax.named_scope("read"):
            read, memo = self.carry.read(stream, site)
        use_eval = not context.train and self.scheme.scale_eval is not None
        scale = "scale_eval" if use_eval else "scale"
        with jax.named_scope("norm_in"):
            normed = self._normed(read, None) if self.scheme.keep_normed else None
        if getattr(self.scheme, scale) == 0.0:
            return None, (memo, normed), {}

        def enter(x: jax.Array, view: str | None) -> jax.Array:
            with jax.named_scope("norm_in"):
                x = self._normed(x, view, context.compute) if normed is None else normed
                amplified = gain("in_scale", x.astype(context.compute))
                return jnp.zeros_like(x, context.compute) if amplified is None else amplified

        x = enter(read, None) if views is None else {view: enter(x, view) for view, x in views.items()}
        handed: Side = {}
        with jax.named_scope("branch"):
            look = self._looking(context, seen)
            if self.points is None and look is None:
                y = self.branch(x)
            else:
                at, handed = (unchanged, handed) if self.points is None else self.points.on(context.side)
                y = self.branch(x, at if look is None else observed(at, look))  # type: ignore[call-arg]
        # Everything after the branch is in the stream's precision: a LayerScale gain of 1e-6 underflows in float16.
        with jax.named_scope("norm_out"):
            y = y.astype(read.dtype)
            y = y if self.norm_out is None else self.norm_out(y)
        with jax.named_scope("scale"):
            y = self._drop_features(y, site, context)
            return self._drop_path(gain(scale, y), site, gain, context), (memo, normed), handed

    def write(
        self,
        stream: Any,
        memo: Any,
        update: jax.Array | None,
        site: Site,
        numbers: Mapping[str, jax.Array],
        entry: Any,
        context: Context,
    ) -> tuple[Any, Flow]:
        """The stream with the update in it, and what flowed."""
        memo, normed = memo
        keep = None if context.keep is None else context.keep[site.block, site.pos]
        if keep is not None and update is not None and not self.carry.gated:
            update = faded(keep, update)

        def norm(name: str, x: jax.Array) -> jax.Array:
            module = getattr(self, name)
            with jax.named_scope(name):
                return x if module is None else module(x if context.store is None else context.store(x, site.s))

        gain = partial(self._amplify, numbers=numbers, context=context)
        around = Around(gain, norm, entry, site, partial(coin, site.s, context), normed)
        with jax.named_scope("add"):
            after, flow = self.carry.write(stream, memo, update, around)
            if keep is not None and self.carry.gated:
                after = jnp.where(keep == 1, after, stream + faded(keep, after - stream))
                flow = flow._replace(after=after)
            return stored(after, site.s, context), flow._replace(after=stored(flow.after, site.s, context))

    def _looking(self, context: Context, seen: dict[str, jax.Array] | None) -> Callable[..., None] | None:
        """What the branch calls where it is observed, with the point's name and how its arrays are made, and of what; None where
        nobody looks.
        """
        slots = getattr(self.branch, "slots", {})
        here = [observer for observer in context.observers if observer.point in slots]
        if seen is None or not here:
            return None

        def look(name: str, make: Callable[..., Sequence[jax.Array]], *of: Any) -> None:
            if wanted := [observer.measure for observer in here if observer.point == name]:

                def measure(*arrays: Any) -> dict[str, jax.Array]:
                    parts = make(*arrays)
                    return {key: value for one in wanted for key, value in one(parts).items()}

                seen.update(measured(context, measure, *of))

        return look

    def _normed(self, x: jax.Array, view: str | None, dtype: Any = None) -> jax.Array:
        module: Any = self.norm_in
        if view is not None and module is not None:
            module = module[view]
        return x if module is None else module(x, dtype)

    def _amplify(
        self, name: str, x: jax.Array, *, numbers: Mapping[str, jax.Array], context: Context
    ) -> jax.Array | None:
        """``x`` times the gain called ``name``, rounded once to x's dtype; ``x`` itself for the constant 1, None for the constant 0."""
        value: Gain | None = getattr(self.scheme, name)
        match value:
            case Learned():
                return self.gains[name](x)
            case Knob(knob):
                if knob not in context.knobs:
                    raise KeyError(
                        f"the scheme reads the knob '{knob}', and the context gives {sorted(context.knobs) or 'none'}"
                    )
                return scaled(context.knobs[knob], x)
            case float():
                return None if value == 0.0 else scaled(value, x)
        return scaled(numbers[name], x)

    def _drop_features(self, y: jax.Array, site: Site, context: Context) -> jax.Array:
        if not context.train or self.dropout == 0.0:
            return y
        return dropout(key_of(site.s, DROPOUT, context), y, self.dropout)

    def _drop_path(self, y: jax.Array | None, site: Site, gain: Callable, context: Context) -> jax.Array | None:
        """Stochastic depth (Huang et al. 2016): the whole update of a sample is dropped, kept ones are divided by 1 - rate."""
        if y is None or not context.train or self.scheme.drop == 0.0:
            return y
        keep = 1.0 - gain("drop", jnp.ones((), jnp.float32))
        mask = jax.random.bernoulli(key_of(site.s, DROP_PATH, context), keep, (y.shape[0],) + (1,) * (y.ndim - 1))
        return jnp.where(mask, y / jnp.where(keep > 0, keep, 1.0).astype(y.dtype), jnp.zeros((), y.dtype))


def faded(keep: jax.Array, update: jax.Array) -> jax.Array:
    """``keep * update``; zeros where ``keep`` is 0, whatever the update is."""
    return jnp.where(keep == 0, jnp.zeros((), update.dtype), keep.astype(update.dtype) * update)


def stored(stream: Any, number: Any, context: Context) -> Any:
    """What is kept of what was written at site ``number``; see :class:`Context`."""
    if context.store is None:
        return stream
    store = context.store
    return jax.tree.map(lambda part: store(part, number), stream)


def unchanged(name: str, x: jax.Array) -> jax.Array:
    """What stands at the points inside a branch if nothing does."""
    return x


def observed(at: Callable[..., jax.Array], look: Callable[..., None]) -> Callable[..., jax.Array]:
    """``at`` for a branch that is observed: it also has ``look``, and ``whole_scores`` as before."""

    def both(name: str, x: jax.Array) -> jax.Array:
        return at(name, x)

    both.look, both.whole_scores = look, getattr(at, "whole_scores", False)  # type: ignore[attr-defined]
    return both


def measured(context: Context, measure: Callable[..., dict[str, jax.Array]], *arrays: Any) -> dict[str, jax.Array]:
    """``measure(*arrays)`` in the steps that measure, zeros in the others; never differentiated, never paid for in other steps."""
    arrays = jax.lax.stop_gradient(arrays)
    shapes = jax.eval_shape(measure, *arrays)
    return jax.lax.cond(
        jnp.asarray(context.on),
        measure,
        lambda *_: {name: jnp.zeros(value.shape, value.dtype) for name, value in shapes.items()},
        *arrays,
    )


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Each element dropped with probability ``rate``, the others divided by 1 - rate."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


def key_of(number: Any, use: int, context: Context) -> jax.Array:
    """The random key of site ``number`` (from 0) for one use of chance."""
    if context.key is None:
        raise ValueError("dropout, stochastic depth and LayerDrop need a key: give one in the context, or train=False")
    return jax.random.fold_in(jax.random.fold_in(context.key, number), use)


def coin(number: Any, context: Context, probability: float) -> jax.Array:
    """One boolean for all samples, drawn at site ``number``; True outside training."""
    return jax.random.bernoulli(key_of(number, COIN, context), probability) if context.train else jnp.asarray(True)
