"""Which carries keep every earlier output? Attention over depth, and weighted sums of all block outputs.

What is carried is a buffer (rows, batch, ..., width): row 0 the embedding, then one row a site (or a block, where the carry is an
outer one). Rows that are not written yet are never read, so the buffer after a site serves as that before it (``undo``), and a stack
need not store one a layer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.norms import NormDefaults
from resjax.residual.parameters import constant
from resjax.residual.precision import exact, plus
from resjax.residual.site import Site


@jax.custom_vjp
def push(buffer: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """The buffer with ``row`` at ``index``.

    Its transpose leaves the buffer's gradient as it is: what stood in that row before was never read, so no one asks for its gradient,
    and clearing it would copy the whole buffer at every site.
    """
    return jax.lax.dynamic_update_index_in_dim(buffer, row, index, 0)


def _push_forward(buffer: jax.Array, row: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    return push(buffer, row, index), index


def _push_backward(index: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return gradient, jax.lax.dynamic_index_in_dim(gradient, index, 0, keepdims=False), None


push.defvjp(_push_forward, _push_backward)


def opened(embedded: jax.Array, rows: int) -> jax.Array:
    """A buffer of ``rows`` rows, the first one written."""
    return jnp.zeros((rows, *embedded.shape), embedded.dtype).at[0].set(embedded)


def mixed(weights: jax.Array, buffer: jax.Array) -> jax.Array:
    """``sum_j w_j v_j`` over the rows, in float32 or better; weights (rows,) or (rows, batch, ...).

    A product and a sum, which compile to one loop; as a matrix product its gradient would hold another copy of the buffer.
    """
    wide = exact(buffer)
    weights = weights.reshape(*weights.shape, *(1,) * (wide.ndim - weights.ndim)).astype(wide.dtype)
    return jnp.sum(weights * wide, axis=0).astype(buffer.dtype)


def up_to(index: Any, rows: int) -> jax.Array:
    """Which rows there are at ``index``: 0 to index."""
    return jnp.arange(rows) <= jnp.asarray(index, jnp.int32)


def at_row(index: Any, rows: int) -> jax.Array:
    """1 at one row, 0 at the others; float32."""
    return (jnp.arange(rows) == jnp.asarray(index, jnp.int32)).astype(jnp.float32)


class DepthQuery(nnx.Module):
    """Attention over rows: ``a = softmax_j <w, g . v_j / rms(v_j)>``, w from 0 (a mean), g the norm's gain; in float32."""

    def __init__(self, width: int, norms: NormDefaults):
        self.eps = norms.eps
        self.gain = constant(1.0, (width,), "norm_scale")
        self.query = constant(0.0, (width,), "mixer_query")

    def __call__(self, buffer: jax.Array, there: jax.Array) -> jax.Array:
        """The mix of the rows that are ``there`` (rows,)."""
        wide = exact(buffer)
        by = self.gain[...].astype(wide.dtype) * self.query[...].astype(wide.dtype)
        # the norm's denominator goes to the score, so that no normalised copy of the buffer is made
        scores = wide @ by * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + self.eps)
        mask = there.reshape(-1, *(1,) * (scores.ndim - 1))
        return mixed(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=0), buffer)


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
        return ends(stream, jnp.ones(len(stream), bool))


class DepthAttentionSite(Carry):
    def __init__(self, width: int, norms: NormDefaults):
        self.pick = DepthQuery(width, norms)

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, jax.Array]:
        u = self.pick(stream, up_to(site.s, len(stream)))
        return u, u

    def write(self, stream: jax.Array, memo: jax.Array, update: Any, around: Around) -> tuple[Any, Flow]:
        update = jnp.zeros_like(memo) if update is None else update
        return push(stream, update, around.site.s + 1), Flow(memo, memo, None, update, memo, memo)

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

    def length(self, sites: int) -> int:
        """Sites in a group."""
        return -(-sites // self.groups)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, 1 + -(-sites // self.length(sites)))

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module:
        return DepthQuery(width, norms)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return ends(stream, jnp.ones(len(stream), bool))


class BlockDepthAttentionSite(Carry):
    def __init__(self, length: int, width: int, norms: NormDefaults):
        self.length = length
        self.pick = DepthQuery(width, norms)

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, jax.Array]:
        own = (
            site.s + self.length - 1
        ) // self.length  # the own group's row from its second site on, else the row before
        u = self.pick(stream, up_to(own, len(stream)))
        return u, u

    def write(self, stream: jax.Array, memo: jax.Array, update: Any, around: Around) -> tuple[Any, Flow]:
        if update is not None:
            row = around.site.s // self.length + 1
            so_far = jax.lax.dynamic_index_in_dim(stream, row, 0, keepdims=False)
            stream = jax.lax.dynamic_update_index_in_dim(stream, plus(so_far, update), row, 0)
        return stream, Flow(memo, memo, None, update, memo, memo)
