"""How does one branch join the stream? The wrapper around it: norms, gains, dropout, stochastic depth, precision."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.equation import Gain, Knob, Learned, Scheme
from resjax.residual.norms import NormDefaults, build_norm
from resjax.residual.parameters import constant
from resjax.residual.precision import exact
from resjax.residual.site import Site
from resjax.residual.streams import Flow

DROPOUT, DROP_PATH = 0, 1  # one number a use of randomness, folded into the site's key
LEARNABLE = ("in_scale", "scale", "skip", "entry")


class Branch(Protocol):
    """What a connection wraps: a module (batch, ..., width) -> (batch, ..., width) that knows nothing of the scheme."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


Measure = Callable[[Flow], dict[str, jax.Array]]
MeasureBlock = Callable[[Any, Any], dict[str, jax.Array]]


@dataclass(frozen=True)
class Context:
    """What a forward pass is told besides its input.

    Attributes:
      train: training (dropout, stochastic depth, ``scale``) or not (``scale_eval``).
      key: one PRNG key a step; None where nothing is random.
      step: optimizer steps done, for rules that move with training.
      knobs: values of :class:`~resjax.residual.equation.Knob` by name.
      measure: what is measured of each site's :class:`Flow`; None = nothing.
      measure_block: what is measured of the stream (before, after) a block; None = nothing.
      on: traced boolean, whether to measure in this call; the shapes of the results do not depend on it.
      taps: (depth, sites) zeros whose gradient is the squared gradient norm of the stream after each site; None = no taps.
      compute: dtype of the branches.
    """

    train: bool = False
    key: jax.Array | None = None
    step: Any = 0
    knobs: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure | None = None
    measure_block: MeasureBlock | None = None
    on: Any = True
    taps: jax.Array | None = None
    compute: Any = jnp.float32


class LearnedGain(nnx.Module):
    """One :class:`Learned` gain: float32 parameters, which act in float32 (or better) whatever the stream's precision.

    Not only the value needs it (1 + 1e-3 is 1 in bfloat16): the gradient of a gain is a sum over all tokens, which stops
    growing in bfloat16 once a term is below half a unit in its last place.
    """

    def __init__(self, gain: Learned, width: int, site: Site):
        first = gain.start(site) if callable(gain.start) else gain.start
        self.gain = constant(first, () if gain.shape == "scalar" else (width,), "gain")
        self.offset = constant(0.0, (width,), "gain_offset") if gain.offset else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = exact(x)
        y = self.gain[...].astype(y.dtype) * y
        y = y if self.offset is None else y + self.offset[...].astype(y.dtype)
        return y.astype(x.dtype)


class Connection(nnx.Module):
    """One branch and its way into the stream, as ``scheme`` (resolved for this site) says."""

    def __init__(
        self, scheme: Scheme, branch: Branch, width: int, site: Site, norms: NormDefaults, dropout: float = 0.0
    ):
        self.scheme = scheme
        self.branch = branch
        self.dropout = dropout
        self.norm_in = build_norm(scheme.norm_in, width, norms)
        self.norm_out = build_norm(scheme.norm_out, width, norms)
        self.norm_after = build_norm(scheme.norm_after, width, norms)
        learned = {name: getattr(scheme, name) for name in LEARNABLE if isinstance(getattr(scheme, name), Learned)}
        self.gains = nnx.Dict({name: LearnedGain(gain, width, site) for name, gain in learned.items()})

    def __call__(
        self, stream: Any, site: Site, numbers: Mapping[str, jax.Array], entry: Any, context: Context
    ) -> tuple[Any, Flow]:
        """The stream after this site, and what flowed.

        Args:
          stream: the carry's state; for one stream an array (batch, ..., width).
          site: which site, its block possibly traced.
          numbers: values of the gains that are rules, for this block.
          entry: the stream at the block's start, given to the block's last site only.
          context: see :class:`Context`.
        """

        def gain(name: str, x: jax.Array) -> jax.Array | None:
            return self._amplify(name, getattr(self.scheme, name), x, numbers, context)

        def norm(name: str, x: jax.Array) -> jax.Array:
            module = getattr(self, name)
            return x if module is None else module(x)

        carry = self.scheme.carry
        read, memo = carry.read(stream)
        update = self._produce(read, site, gain, norm, context)
        return carry.write(stream, memo, update, gain, norm, entry)

    def _produce(
        self, read: jax.Array, site: Site, gain: Callable, norm: Callable, context: Context
    ) -> jax.Array | None:
        """``drop( scale * N_out( F( in_scale * N_in(u) ) ) )`` in the stream's dtype; None where the scale is 0."""
        use_eval = not context.train and self.scheme.scale_eval is not None
        scale = "scale_eval" if use_eval else "scale"
        if getattr(self.scheme, scale) == 0.0:
            return None
        x = read if self.norm_in is None else self.norm_in(read, context.compute)
        x = gain("in_scale", x.astype(context.compute))
        x = jnp.zeros_like(read, context.compute) if x is None else x
        # Everything after the branch is in the stream's precision: a LayerScale gain of 1e-6 underflows in float16.
        y = norm("norm_out", self.branch(x).astype(read.dtype))
        y = self._drop_features(y, site, context)
        return self._drop_path(gain(scale, y), site, gain, context)

    def _amplify(
        self, name: str, value: Gain | None, x: jax.Array, numbers: Mapping[str, jax.Array], context: Context
    ) -> jax.Array | None:
        """``x`` times the gain called ``name``, in x's dtype; ``x`` itself for the constant 1, None for the constant 0."""
        match value:
            case Learned():
                return self.gains[name](x)
            case Knob(knob):
                if knob not in context.knobs:
                    raise KeyError(
                        f"the scheme reads the knob '{knob}', and the context gives {sorted(context.knobs) or 'none'}"
                    )
                return jnp.asarray(context.knobs[knob]).astype(x.dtype) * x
            case float():
                return x if value == 1.0 else None if value == 0.0 else jnp.asarray(value, x.dtype) * x
        return numbers[name].astype(x.dtype) * x

    def _key(self, site: Site, use: int, context: Context) -> jax.Array:
        if context.key is None:
            raise ValueError("dropout and stochastic depth need a key: give one in the context, or train=False")
        return jax.random.fold_in(jax.random.fold_in(context.key, site.s), use)

    def _drop_features(self, y: jax.Array, site: Site, context: Context) -> jax.Array:
        if not context.train or self.dropout == 0.0:
            return y
        return dropout(self._key(site, DROPOUT, context), y, self.dropout)

    def _drop_path(self, y: jax.Array | None, site: Site, gain: Callable, context: Context) -> jax.Array | None:
        """Stochastic depth (Huang et al. 2016): the whole update of a sample is dropped, kept ones are divided by 1 - rate."""
        if y is None or not context.train or self.scheme.drop == 0.0:
            return y
        keep = 1.0 - gain("drop", jnp.ones((), jnp.float32))
        mask = jax.random.bernoulli(self._key(site, DROP_PATH, context), keep, (y.shape[0],) + (1,) * (y.ndim - 1))
        return jnp.where(mask, y / jnp.where(keep > 0, keep, 1.0).astype(y.dtype), jnp.zeros((), y.dtype))


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Each element dropped with probability ``rate``, the others divided by 1 - rate."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
