"""Which carries keep every earlier output? Attention over depth, and weighted sums of all block outputs.

What is carried is a buffer of rows (see :mod:`resjax.residual.rows`). Rows that are not written yet are never read, so the buffer
after a site serves as that before it (``undo``), and a stack need not store one a layer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.carry import Around, Carry, CarrySpec, Flow, Unmoved
from resjax.residual.norms import NormDefaults
from resjax.residual.parameters import constant
from resjax.residual.precision import exact
from resjax.residual.rows import added_to, mixed, opened, push, scored
from resjax.residual.site import Site


class DepthQuery(nnx.Module):
    """Attention over rows: ``a = softmax_j <w, g . v_j / rms(v_j)>``, w from 0 (a mean), g the norm's gain; in float32."""

    def __init__(self, width: int, norms: NormDefaults):
        self.eps = norms.eps
        self.gain = constant(1.0, (width,), "norm_scale")
        self.query = constant(0.0, (width,), "mixer_query")

    def __call__(self, buffer: jax.Array, last: Any) -> tuple[jax.Array, jax.Array]:
        """The mix of the rows up to ``last``, and the buffer."""
        by = (exact(self.gain[...]) * exact(self.query[...]))[None]
        # the norm's denominator goes to the score, so that no normalised copy of the buffer is made
        (dots,), squares, buffer = scored(by, buffer, last)
        there = jnp.arange(len(buffer)) <= jnp.asarray(last, jnp.int32)
        scores = dots * jax.lax.rsqrt(squares + self.eps)
        mask = there.reshape(-1, *(1,) * (scores.ndim - 1))
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=0)
        (mix,), buffer = mixed(weights[None], buffer, last)
        return mix, buffer


@dataclass(frozen=True)
class DepthAttention(CarrySpec):
    """Attention Residuals (Kimi team 2026, 2603.15031): a site reads a softmax-weighted sum of all earlier outputs; no other skip.

    ``u_s = sum_{j<s} a_j v_j``, v_0 = e, v_s = F(N(u_s)); the query is of the site, not of the token. Close is one more read.
    """

    undoable: ClassVar = True
    own_norms: ClassVar = True
    rows: ClassVar = True
    carries: ClassVar = "the outputs of all sites"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "DepthAttentionSite":
        return DepthAttentionSite(width, norms)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, sites + 1)

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module:
        return DepthQuery(width, norms)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return ends(stream, len(stream) - 1)[0]


class DepthAttentionSite(Carry):
    def __init__(self, width: int, norms: NormDefaults):
        self.pick = DepthQuery(width, norms)

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, tuple]:
        u, buffer = self.pick(stream, site.s)
        return u, (u, buffer)

    def write(self, stream: jax.Array, memo: tuple, update: Any, around: Around) -> tuple[Any, Flow]:
        u, buffer = memo
        update = jnp.zeros_like(u) if update is None else update
        return push(buffer, update, around.site.s + 1), Flow(u, u, None, update, u, u)

    def viewed(self, flow: Flow) -> Flow:
        return Unmoved(*flow)

    def undo(self, stream: jax.Array, update: jax.Array | None, site: Site) -> jax.Array:
        return stream


@dataclass(frozen=True)
class BlockDepthAttention(CarrySpec):
    """Attention Residuals in groups (2603.15031): sources are the sums of finished groups of sites, and the sum so far of one's own.

    The first site of a group sees no sum of its own group (a zero row would take weight). ``groups`` counts groups of ceil(M / groups)
    consecutive sites; a boundary may fall between attention and feed-forward.
    """

    groups: int = 8
    own_norms: ClassVar = True
    rows: ClassVar = True
    carries: ClassVar = "the sums of groups of sites"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "BlockDepthAttentionSite":
        return BlockDepthAttentionSite(self.length(site.M), width, norms)

    @property
    def whole_from(self) -> int:
        return 2 * self.groups + 1  # groups of three sites: sums, and a boundary between attention and feed-forward

    def length(self, sites: int) -> int:
        """Sites in a group."""
        return -(-sites // self.groups)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, 1 + -(-sites // self.length(sites)))

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module:
        return DepthQuery(width, norms)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return ends(stream, len(stream) - 1)[0]


class BlockDepthAttentionSite(Carry):
    def __init__(self, length: int, width: int, norms: NormDefaults):
        self.length = length
        self.pick = DepthQuery(width, norms)

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, tuple]:
        # the own group's row from its second site on, else the row before
        u, buffer = self.pick(stream, (site.s + self.length - 1) // self.length)
        return u, (u, buffer)

    def write(self, stream: jax.Array, memo: tuple, update: Any, around: Around) -> tuple[Any, Flow]:
        u, buffer = memo
        if update is not None:
            buffer = added_to(buffer, update, around.site.s // self.length + 1)
        return buffer, Flow(u, u, None, update, u, u)

    def viewed(self, flow: Flow) -> Flow:
        return Unmoved(*flow)
