"""What may happen at named points inside a branch? Norms and gains there, and values that pass from block to block.

A branch that allows it announces its points: it has ``slots``, a mapping from names to feature shapes, and calls ``x = at(name, x)``
at each. The connection owns what stands there, so the branch knows nothing of the scheme.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.gains import Learned, LearnedGain, show, times
from resjax.residual.norms import NormDefaults, build_norm
from resjax.residual.parameters import constant
from resjax.residual.precision import exact
from resjax.residual.site import Site

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Inside:
    """A norm and a gain at one point of a branch: ``x' = times * gain * N(x)``.

    Attributes:
      norm: its name, or None; 'norm' is the model's own kind.
      whole: normalise over all feature axes at once; else over the last one, with one gain for all entries of the others.
      gain: a number or :class:`Learned`; its features are the point's.
      gain_of: use the gain that stands at another point instead.
      times: a constant from the point's feature shape and the width, or None.
    """

    norm: str | None = None
    whole: bool = False
    gain: float | Learned = 1.0
    gain_of: str | None = None
    times: Callable[[Shape, int], float] | None = None

    def formula(self, name: str) -> str:
        """As shown by listings, such as ``q: rmsnorm(q)``."""
        text = f"{self.norm}({name})" if self.norm else name
        if self.gain != 1.0:
            text = f"({show(self.gain)}) {text}"
        if self.gain_of:
            text = f"(gain of {self.gain_of}) {text}"
        return text


class InsideSite(nnx.Module):
    """What an :class:`Inside` puts at one point."""

    def __init__(self, spec: Inside, shape: Shape, width: int, site: Site, norms: NormDefaults):
        self.whole, self.axes = spec.whole, len(shape)
        self.norm = build_norm(spec.norm, prod(shape) if spec.whole else shape[-1], norms)
        self.gain = LearnedGain(spec.gain, shape, site, width) if isinstance(spec.gain, Learned) else None
        factor = 1.0 if spec.times is None else spec.times(shape, width)
        self.times = factor if isinstance(spec.gain, Learned) else factor * spec.gain

    def __call__(self, x: jax.Array, gain: LearnedGain | None, seen: Mapping[str, jax.Array]) -> jax.Array:
        if self.norm is not None:
            flat = x.reshape(*x.shape[: x.ndim - self.axes], -1) if self.whole else x
            x = self.norm(flat).reshape(x.shape)
        x = x if gain is None else gain(x)
        return x if self.times == 1.0 else jnp.asarray(self.times, x.dtype) * x


@dataclass(frozen=True)
class Shaped:
    """Shaped attention (He et al. 2023, 2302.10322), at the point 'heads': ``alpha v + beta softmax(.) v - gamma C v``.

    C is the causal mean, which softmax is where the scores are 0; alpha, beta, gamma are learned, one each a head, from 1. So attention
    whose queries start at 0 starts as the identity.
    """

    gain_of: None = None

    def formula(self, name: str) -> str:
        return f"alpha v + beta {name} - gamma mean(v)"


class ShapedSite(nnx.Module):
    def __init__(self, shape: Shape):
        self.gain = None
        self.alpha, self.beta, self.gamma = (constant(1.0, (shape[0], 1), "gain") for _ in range(3))

    def __call__(self, x: jax.Array, gain: LearnedGain | None, seen: Mapping[str, jax.Array]) -> jax.Array:
        v, mixed = exact(seen["v"]), exact(x)  # (B, T, H, C)
        count = jnp.arange(1, v.shape[1] + 1, dtype=v.dtype).reshape(-1, 1, 1)
        mean = jnp.cumsum(v, axis=1) / count
        alpha, beta, gamma = (gain[...].astype(v.dtype) for gain in (self.alpha, self.beta, self.gamma))
        return (alpha * v + beta * mixed - gamma * mean).astype(x.dtype)


@dataclass(frozen=True)
class First:
    """What the first block had at this point comes back in all later ones: ``x' = of_first * x_1 + own * x``.

    Both gains are numbers or :class:`Learned` scalars. The first block is left as it is.
    """

    of_first: float | Learned = 0.5
    own: float | Learned = 0.5

    def formula(self, name: str) -> str:
        return " + ".join(term for term in (times(self.of_first, f"{name}_1"), times(self.own, name)) if term)


@dataclass(frozen=True)
class Chain:
    """What the block before had at this point, after its own sum, is added: ``x'_l = x_l + x'_(l-1)``."""

    def formula(self, name: str) -> str:
        return f"{name} + previous {name}"


@dataclass(frozen=True)
class Keep:
    """The first block under :class:`First` or :class:`Chain`: nothing changes, the value is handed on."""

    def formula(self, name: str) -> str:
        return f"{name}, kept"


Share = First | Chain | Keep
Side = dict[str, jax.Array]


class Sharing(nnx.Module):
    """One side channel at one site."""

    def __init__(self, spec: Share, site: Site):
        self.spec = spec
        gains = {"of_first": spec.of_first, "own": spec.own} if isinstance(spec, First) else {}
        self.gains = nnx.Dict({k: LearnedGain(g, (), site) for k, g in gains.items() if isinstance(g, Learned)})

    def __call__(self, x: jax.Array, other: jax.Array | None) -> jax.Array:
        match self.spec:
            case First(of_first, own):
                terms = (self._times("of_first", of_first, other), self._times("own", own, x))
                first, *more = [term for term in terms if term is not None]
                return first + more[0] if more else first
            case Chain():
                assert other is not None
                return x + other
        return x

    def _times(self, name: str, gain: float | Learned, x: jax.Array | None) -> jax.Array | None:
        assert x is not None, "the first block hands nothing on"
        if isinstance(gain, Learned):
            return self.gains[name](x)
        return None if gain == 0.0 else x if gain == 1.0 else jnp.asarray(gain, x.dtype) * x


class Points(nnx.Module):
    """All points of one branch at which something stands.

    Raises:
      ValueError: the branch announces no such point.
    """

    def __init__(
        self,
        inside: Mapping[str, Inside | Shaped],
        share: Mapping[str, Share],
        slots: Mapping[str, Shape],
        width: int,
        site: Site,
        norms: NormDefaults,
    ):
        self.gain_of = {name: spec.gain_of or name for name, spec in inside.items()}
        self.inside = nnx.Dict(
            {
                name: ShapedSite(slots[name])
                if isinstance(one, Shaped)
                else InsideSite(one, slots[name], width, site, norms)
                for name, one in inside.items()
            }
        )
        self.share = nnx.Dict({name: Sharing(one, site) for name, one in share.items()})

    def on(self, side: Side) -> tuple[Callable[..., jax.Array], Side]:
        """What the branch calls at its points, given what came from other blocks; and a dict that fills with what it hands on."""
        handed: Side = {}
        seen: dict[str, jax.Array] = {}

        def at(name: str, x: jax.Array) -> jax.Array:
            if name in self.share:
                x = handed[name] = self.share[name](x, side.get(name))
            if name in self.inside:
                x = self.inside[name](x, self.inside[self.gain_of[name]].gain, seen)
            seen[name] = x
            return x

        at.whole_scores = "scores" in self.share or "scores" in self.inside  # type: ignore[attr-defined]
        return at, handed
