"""Which normalisations stand around a branch?"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.parameters import constant
from resjax.residual.precision import exact

KINDS = ("layernorm", "rmsnorm", "zero_centred", "unit", "dyt", "derf")
POINTWISE = ("dyt", "derf")  # which stand in the place of every norm, those of queries and keys included
STEEPNESS = 0.5  # alpha of dyt and derf at the start; LLaMA-sized models want less, by width


@dataclass(frozen=True)
class NormDefaults:
    """What the name 'norm' means in a model, and how its norms are made.

    Attributes:
      kind: layernorm, rmsnorm or none.
      eps: added to the variance or mean square.
      gain: learn a gain per feature (from 1).
      bias: learn a bias per feature (from 0); LayerNorm only.
    """

    kind: str = "layernorm"
    eps: float = 1e-6
    gain: bool = True
    bias: bool = False


class Norm(nnx.Module):
    """A normalisation over the last axis, or what is put in the place of one.

    layernorm, rmsnorm; zero_centred: RMSNorm whose stored gain g, from 0, acts as 1 + g (Gemma); unit: L2 norm 1, no gain;
    dyt: gamma . tanh(alpha x) + beta (Zhu et al. 2025, 2503.10622); derf: gamma . erf(alpha x + s) + beta (2512.10938), alpha and s
    one number each.

    Statistics are two-pass in float32 (or better, if the input is): the mean is taken out before squaring, since E[x^2] - E[x]^2
    cancels where the mean is large against the spread (late Pre-LN streams).
    """

    def __init__(self, kind: str, width: int, defaults: NormDefaults):
        if kind not in KINDS:
            raise ValueError(f"the norm '{kind}' is none of {', '.join(KINDS)}")
        self.kind = kind
        self.eps = defaults.eps
        pointwise = kind in POINTWISE
        first = 0.0 if kind == "zero_centred" else 1.0
        self.gain = constant(first, (width,), "norm_scale") if defaults.gain and kind != "unit" else None
        biased = pointwise or (defaults.bias and kind == "layernorm")
        self.bias = constant(0.0, (width,), "norm_bias") if biased else None
        self.steepness = constant(STEEPNESS, (), "gain") if pointwise else None
        self.shift = constant(0.0, (), "gain_offset") if kind == "derf" else None

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """(..., width) -> (..., width) in ``dtype`` (the input's by default)."""
        y = exact(x)
        match self.kind:
            case "layernorm":
                y = y - jnp.mean(y, axis=-1, keepdims=True)
                y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
            case "rmsnorm" | "zero_centred":
                y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
            case "unit":
                y = y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + self.eps**2)
        if self.steepness is not None:
            y = self.steepness[...].astype(y.dtype) * y
            y = jnp.tanh(y) if self.shift is None else jax.lax.erf(y + self.shift[...].astype(y.dtype))
        if self.gain is not None:
            gain = self.gain[...].astype(y.dtype)
            y = y * (1.0 + gain if self.kind == "zero_centred" else gain)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(dtype or x.dtype)


def build_norm(name: str | None, width: int, defaults: NormDefaults) -> Norm | None:
    """The norm called ``name``; 'norm' is the model's own kind. None where there is to be none."""
    kind = defaults.kind if name == "norm" else name
    return None if kind in (None, "none") else Norm(kind, width, defaults)
