"""What can a gain be? A constant, a rule of (layer, depth, step), a learned number or vector, or a traced value handed in."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from numbers import Real
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.parameters import constant
from resjax.residual.precision import exact
from resjax.residual.site import Rule, Site

Through = Callable[[jax.Array], jax.Array]
SHAPES = ("scalar", "vector", "first", "none")
OFFSETS = ("none", "scalar", "vector")


@dataclass(frozen=True)
class Learned:
    """A learned gain: one number or one per feature, with a stated start, and an additive term (from 0) if asked.

    Attributes:
      start: first value; a number or a rule of the site.
      shape: 'scalar'; 'vector' (one per feature); 'first' (one per entry of the first feature axis: inside attention, one per
        head); 'none' (no gain, the offset alone).
      offset: also learn what is added after the gain: a 'vector', a 'scalar' or 'none'. True and False are 'vector' and 'none'.
      through: a function of the stored parameter that gives the gain, such as its absolute value; None = the parameter itself.
      root: the parameter is stored divided by the square root of the model's width, and multiplied back where it acts: an optimizer
        whose steps have one size for all parameters moves it faster by that root (nGPT).
    """

    start: float | Rule = 1.0
    shape: Literal["scalar", "vector", "first", "none"] = "vector"
    offset: Literal["none", "scalar", "vector"] | bool = "none"
    through: Through | None = None
    root: bool = False

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"the shape of a learned gain is '{self.shape}', which is none of {', '.join(SHAPES)}")
        if isinstance(self.offset, bool):
            object.__setattr__(self, "offset", "vector" if self.offset else "none")
        if self.offset not in OFFSETS:
            raise ValueError(f"the offset of a learned gain is '{self.offset}', which is none of {', '.join(OFFSETS)}")


@dataclass(frozen=True)
class Knob:
    """A gain read from the traced values that a caller hands in by name: a sweep varies it without a new compilation."""

    name: str


Gain = float | Rule | Learned | Knob


@dataclass(frozen=True)
class Linear:
    """The rule ``last * l / L``: linear in depth, ``last`` at the top (Huang et al. 2016, stochastic depth; right for L = 1)."""

    last: float

    def __call__(self, site: Site) -> Any:
        return self.last * site.l / site.L


@dataclass(frozen=True)
class DepthPower:
    """The rule ``factor * (L / base)^exponent``: by the number of blocks against that of a base model."""

    exponent: float
    base: float = 1.0
    factor: float = 1.0

    def __call__(self, site: Site) -> float:
        return self.factor * (site.L / self.base) ** self.exponent


class LearnedGain(nnx.Module):
    """One :class:`Learned` gain: float32 parameters, which act in float32 (or better) whatever the stream's precision.

    Not only the value needs it (1 + 1e-3 is 1 in bfloat16): the gradient of a gain is a sum over all tokens, which stops
    growing in bfloat16 once a term is below half a unit in its last place.
    """

    def __init__(self, gain: Learned, features: int | tuple[int, ...], site: Site, width: int | None = None):
        features = (features,) if isinstance(features, int) else features
        first = gain.start(site) if callable(gain.start) else gain.start
        self.factor = sqrt(prod(features) if width is None else width) if gain.root else 1.0
        first = first / self.factor
        shapes = {"none": None, "scalar": (), "vector": features, "first": features[:1] + (1,) * (len(features) - 1)}
        self.through = gain.through
        shape, offset = shapes[gain.shape], shapes[str(gain.offset)]
        self.gain = None if shape is None else constant(first, shape, "gain")
        self.offset = None if offset is None else constant(0.0, offset, "gain_offset")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = exact(x)
        if self.gain is not None:
            value = self.gain[...].astype(y.dtype)
            value = value if self.factor == 1.0 else self.factor * value
            y = (value if self.through is None else self.through(value)) * y
        y = y if self.offset is None else y + self.offset[...].astype(y.dtype)
        return y.astype(x.dtype)


def is_rule(gain: Any) -> TypeGuard[Rule]:
    return callable(gain) and not isinstance(gain, Learned | Knob)


def checked(field: str, gain: Any) -> Gain | None:
    """The gain as it is stored: 1 and 1.0 must be one record, since they group runs and key compilations."""
    if isinstance(gain, Real) and not isinstance(gain, bool):
        gain = float(gain)
        if not isfinite(gain) or (field == "drop" and not 0.0 <= gain <= 1.0):
            raise ValueError(f"{field} is {gain}; it must be {'from 0 to 1' if field == 'drop' else 'finite'}")
    elif isinstance(gain, Learned):
        if field in ("scale_eval", "drop"):
            why = "training never sees it" if field == "scale_eval" else "a draw has no gradient"
            raise ValueError(f"{field} cannot be learned: {why}")
    elif not (isinstance(gain, Knob) or callable(gain) or (gain is None and field == "scale_eval")):
        raise ValueError(f"{field} is {gain!r}; a gain is a number, a rule of the site, Learned or Knob")
    return gain


def show(gain: Gain | None) -> str:
    """The gain in an equation: its number, or what it is."""
    match gain:
        case Learned(start, shape, offset, through, _):
            what = "learned offset" if shape == "none" else f"learned {shape} from {show(start)}"
            also = " with offset" if offset == "vector" else " with a scalar offset" if offset == "scalar" else ""
            return what + ("" if shape == "none" else also) + (f", through {named(through)}" if through else "")
        case Knob(name):
            return f"knob {name}"
        case float() | int() | None:
            return f"{gain:g}" if gain is not None else "none"
        case Linear(last):
            return f"{last:g} l/L"
        case DepthPower(exponent, base, factor):
            ratio = "L" if base == 1 else f"(L/{base:g})"
            return f"{factor:g} {ratio}^{exponent:g}" if factor != 1 else f"{ratio}^{exponent:g}"
    return named(gain)


def named(rule: Any) -> str:
    return getattr(rule, "__name__", repr(rule))


def times(gain: Gain, term: str) -> str:
    """The product of a gain and a term in an equation; nothing for a gain of 0."""
    if gain == 1.0:
        return term
    if gain == 0.0:
        return ""
    shown = show(gain)
    return f"{shown} {term}" if isinstance(gain, float) else f"({shown}) {term}"


def evaluate(gain: Gain, site: Site) -> jax.Array | None:
    """The values of a rule on the blocks of ``site`` (float32, one per block); None for gains that need no such numbers."""
    if is_rule(gain):
        return jnp.broadcast_to(jnp.asarray(gain(site), jnp.float32), jnp.shape(site.block))
    return None
