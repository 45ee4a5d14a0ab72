"""Which carries add the update to one stream, or to two of them?"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.norms import NormDefaults, build_norm
from resjax.residual.precision import exact, plus, total
from resjax.residual.site import Site


@dataclass(frozen=True)
class OneStream(CarrySpec):
    """``H' = N_after( skip * H + entry * H_block + y )``; ``entry`` acts at a block's last site only."""

    uses: ClassVar = frozenset({"skip", "entry", "norm_after", "keep_normed"})
    blockwise: ClassVar = True

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "One":
        return One()


class One(Carry):
    """One array (batch, ..., width)."""

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, None]:
        return stream, None

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[jax.Array, Flow]:
        base = stream if around.base is None else around.base
        entry = None if around.entry is None else around.gain("entry", around.entry)
        kept = total(around.gain("skip", base), entry)
        joined = total(kept, update)
        after = around.norm("norm_after", jnp.zeros_like(stream) if joined is None else joined)
        return after, Flow(stream, after, kept, update, stream, kept)


@dataclass(frozen=True)
class Dual(CarrySpec):
    """ResiDual (Xie et al. 2023, 2304.14802): a Post-LN stream that branches read, and a sum of all updates beside it.

    ``x' = N_after(x + y)``, ``d' = d + share * y``; open x = e, d = share * e; close ``alpha * x + N(d)``.
    """

    share: float = 1.0
    alpha: float = 1.0
    own_norms: ClassVar = True
    uses: ClassVar = frozenset({"norm_after"})
    carries: ClassVar = "a Post-LN stream and the sum of all updates"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "DualSite":
        return DualSite(self)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> tuple[jax.Array, jax.Array]:
        return embedded, scaled(self.share, embedded)

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module | None:
        return build_norm("norm", width, norms)

    def close(self, ends: Any, stream: Any) -> jax.Array:
        post, dual = stream
        return plus(scaled(self.alpha, post), dual if ends is None else ends(dual))


class DualSite(Carry):
    def __init__(self, spec: Dual):
        self.spec = spec

    def read(self, stream: Any, site: Site) -> tuple[jax.Array, None]:
        return stream[0], None

    def write(self, stream: Any, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        post, dual = stream
        after = around.norm("norm_after", plus(post, update))
        dual = dual if update is None else plus(dual, scaled(self.spec.share, update))
        return (after, dual), Flow(post, after, post, update, post, post)


@dataclass(frozen=True)
class Siamese(CarrySpec):
    """SiameseNorm (2026, 2602.08064, from a secondary source): a Post-LN stream X and a Pre-LN stream Y, read together.

    ``u = X + N_Y(Y)``, ``X' = N_after(X + y / sqrt(l + 1))``, ``Y' = Y + y``; open X = Y = e; close ``X + N(Y)``. l counts blocks
    from 1 here; whether the paper counts so, and blocks or sites, is not verified.
    """

    own_norms: ClassVar = True
    uses: ClassVar = frozenset({"norm_after"})
    carries: ClassVar = "a Post-LN stream and a Pre-LN stream"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "SiameseSite":
        return SiameseSite(width, norms)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> tuple[jax.Array, jax.Array]:
        return embedded, embedded

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module | None:
        return build_norm("norm", width, norms)

    def close(self, ends: Any, stream: Any) -> jax.Array:
        post, pre = stream
        return plus(post, pre if ends is None else ends(pre))


class SiameseSite(Carry):
    def __init__(self, width: int, norms: NormDefaults):
        self.norm_pre = build_norm("norm", width, norms)

    def read(self, stream: Any, site: Site) -> tuple[jax.Array, None]:
        post, pre = stream
        return plus(post, pre if self.norm_pre is None else self.norm_pre(pre)), None

    def write(self, stream: Any, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        post, pre = stream
        share = None if update is None else scaled(1.0 / jnp.sqrt(jnp.float32(around.site.l + 1)), update)
        read, _ = self.read(stream, around.site)
        after = around.norm("norm_after", plus(post, share))
        return (after, plus(pre, update)), Flow(post, after, post, share, read, post)


def scaled(factor: Any, x: jax.Array) -> jax.Array:
    """``factor * x`` in float32 or better, in x's dtype."""
    if isinstance(factor, float) and factor == 1.0:
        return x
    wide = exact(x)
    return (jnp.asarray(factor, wide.dtype) * wide).astype(x.dtype)
