"""Which carries have a whole block, its skips included, as their branch? Sums of all block outputs, anchors, blocks left out."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.norms import Norm, NormDefaults
from resjax.residual.parameters import constant, kernel
from resjax.residual.precision import exact
from resjax.residual.rows import at_row, mixed, opened, picked, push, scored
from resjax.residual.site import Site


class Rows(Carry):
    """A block's place in a buffer of block outputs: what it reads is a mix, what it adds is one row. Its memo is the buffer."""

    def write(self, stream: jax.Array, memo: Any, update: Any, around: Around) -> tuple[Any, Flow]:
        return push(memo, update, around.site.s + 1), Flow(update, update, None, update, update, update)

    def undo(self, stream: jax.Array, update: jax.Array | None, site: Site) -> jax.Array:
        return stream


class Row(nnx.Module):
    """Weights of all rows, one-hot at row ``index`` at the start; those of later rows are never used."""

    def __init__(self, rows: int, index: Any):
        self.weights = constant(at_row(index, rows), (rows,), "mixer_static")

    def __call__(self, buffer: jax.Array, last: Any) -> jax.Array:
        """The weighted sum of the rows up to ``last``."""
        return mixed(self.weights[...][None], buffer, last)[0][0]


@dataclass(frozen=True)
class Dense(CarrySpec):
    """DenseFormer (Pagliardini et al. 2024, 2402.02622): the input of a block is a weighted sum of all earlier block outputs.

    ``Y_i = sum_{j<=i} a_ij X_j``, X_0 = e, X_i = block_i(Y_(i-1)), skips included; a_ii = 1 and the rest 0 at the start. Close is row L.
    The embedding's own row (i = 0) is the constant 1.
    """

    undoable: ClassVar = True
    rows: ClassVar = True
    carries: ClassVar = "the outputs of all blocks"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "DenseBlock":
        return DenseBlock(site)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, sites + 1)

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module:
        return Row(sites + 1, sites)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return ends(stream, len(stream) - 1)


class DenseBlock(Rows):
    def __init__(self, site: Site):
        self.row = Row(site.M + 1, site.s)

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, jax.Array]:
        weights = jnp.where(site.s == 0, at_row(0, len(stream)), self.row.weights[...])
        (mix,), buffer = mixed(weights[None], stream, site.s)
        return mix, buffer


@dataclass(frozen=True)
class Anchored(CarrySpec):
    """x0 mixing (modded-nanoGPT, nanochat): before every block ``x = a x + b x0``, x0 the normalised embedding, (a, b) from (1, 0)."""

    carries: ClassVar = "one stream and the embedding"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "AnchoredBlock":
        return AnchoredBlock()

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> tuple[jax.Array, jax.Array]:
        wide = exact(embedded)
        x0 = (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)).astype(embedded.dtype)
        return x0, x0

    def close(self, ends: Any, stream: Any) -> jax.Array:
        return stream[0]


class AnchoredBlock(Carry):
    def __init__(self) -> None:
        self.keep = constant(1.0, (), "mixer_static")
        self.anchor = constant(0.0, (), "mixer_static")

    def read(self, stream: Any, site: Site) -> tuple[jax.Array, None]:
        x, x0 = (exact(part) for part in stream)
        mix = self.keep[...].astype(x.dtype) * x + self.anchor[...].astype(x.dtype) * x0
        return mix.astype(stream[0].dtype), None

    def write(self, stream: Any, memo: None, update: Any, around: Around) -> tuple[Any, Flow]:
        return (update, stream[1]), Flow(stream[0], update, None, update, stream[0], stream[0])


@dataclass(frozen=True)
class Ladder(CarrySpec):
    """U-shaped skips (modded-nanoGPT 2025): blocks of the upper half add ``w`` times the output of their mirror in the lower half.

    Block i (from 0) of L with i >= L - L // 2 reads ``x + w_i X_(L-1-i)``, X_j the output of block j, w from 1.
    """

    undoable: ClassVar = True
    rows: ClassVar = True
    carries: ClassVar = "the outputs of all blocks"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "LadderBlock":
        return LadderBlock()

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, sites + 1)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return stream[-1]


class LadderBlock(Rows):
    def __init__(self) -> None:
        self.weight = constant(1.0, (), "mixer_static")

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, jax.Array]:
        upper = jnp.asarray(site.s) >= site.M - site.M // 2
        below, buffer = picked(stream, site.s)
        mirror, buffer = picked(buffer, jnp.where(upper, site.M - site.s, 0))
        weight = jnp.where(upper, self.weight[...], 0.0)
        return (exact(below) + weight.astype(exact(below).dtype) * exact(mirror)).astype(stream.dtype), buffer


@dataclass(frozen=True)
class Dropped(CarrySpec):
    """LayerDrop (Fan et al. 2019, 1909.11556): in training, a whole block is left out with ``rate``; no rescale.

    One draw for all samples that are worked through at once: under accumulation each part of a batch draws its own. The block is
    computed all the same, so nothing is saved.
    """

    rate: float = 0.2

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "DroppedBlock":
        return DroppedBlock(self.rate)


class DroppedBlock(Carry):
    def __init__(self, rate: float):
        self.rate = rate

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, None]:
        return stream, None

    def write(self, stream: jax.Array, memo: None, update: Any, around: Around) -> tuple[Any, Flow]:
        after = jnp.where(around.coin(1.0 - self.rate), update, stream)
        return after, Flow(stream, after, None, update, stream, stream)


# ---- several views of the outputs, one each for queries, keys and values


VIEWS = ("q", "k", "v")


@dataclass(frozen=True)
class Mudd(CarrySpec):
    """MUDDFormer (Xiao et al. 2025, 2502.12170): four token-dependent mixes of all block outputs, for queries, keys, values and skip.

    After block i, ``w_c = W2_c gelu(W1 rms(X_i)) + a_c`` over the rows up to i, for c = q, k, v, r; block i + 1 reads them, and the
    skip starts from r. W2 = 0 and a one-hot at the last row: Pre-LN at the start. The hidden size is the same in all blocks here,
    4 (L + 2) rounded up to 64 (the paper's grows with the block), and the feed-forward's width does not grow with depth.
    ``ppn``: rows are normalised before the mix, a = 0, the skip is ``X_i + N(mix_r)`` with the norm's gain from 1e-3.
    """

    ppn: bool = False
    views: ClassVar = VIEWS
    undoable: ClassVar = True
    own_norms: ClassVar = True
    rows: ClassVar = True
    carries: ClassVar = "the outputs of all blocks"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "MuddBlock":
        return MuddBlock(self.ppn, ("r", *VIEWS), site.M + 1, site.s, width, norms, key)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, sites + 1)

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module:
        return MuddBlock(self.ppn, ("r",), sites + 1, sites, width, norms, key)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return ends.views(stream, len(stream) - 1)[0]["r"]


class MuddBlock(Rows):
    def __init__(
        self, ppn: bool, names: tuple[str, ...], rows: int, index: Any, width: int, norms: NormDefaults, key: jax.Array
    ):
        self.names, self.ppn = names, ppn
        hidden = 64 * -(-4 * (rows + 1) // 64)
        self.norm = Norm("rmsnorm", width, NormDefaults("rmsnorm", norms.eps, gain=False))
        self.inner = kernel(key, width, hidden, "mixer_dynamic")
        self.outer = constant(0.0, (hidden, len(names) * rows), "mixer_dynamic")
        self.static = constant(0.0 if ppn else at_row(index, rows), (len(names), rows), "mixer_static")
        # the norms of the ppn form: one on what is mixed, one on what is added to the skip, which starts small
        self.small = constant(1e-3, (width,), "norm_scale") if ppn else None

    def read(self, stream: jax.Array, site: Site) -> tuple[dict[str, jax.Array], jax.Array]:
        return self.views(stream, site.s)

    def views(self, stream: jax.Array, index: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        """The mixes of the rows up to ``index`` by name, and the buffer."""
        rows = len(stream)
        last, stream = picked(stream, index)
        last = exact(last)
        hidden = jax.nn.gelu(self.norm(last) @ self.inner[...].astype(last.dtype))
        dynamic = hidden @ self.outer[...].astype(last.dtype)  # (batch, ..., names * rows)
        dynamic = jnp.moveaxis(dynamic.reshape(*dynamic.shape[:-1], len(self.names), rows), (-2, -1), (0, 1))
        static = jnp.expand_dims(self.static[...], tuple(range(2, dynamic.ndim)))
        weights = dynamic + static.astype(dynamic.dtype)
        if self.ppn:  # of a row's norm, which has no gain, only the denominator: it goes to the weight
            _, squares, stream = scored(jnp.zeros((0, stream.shape[-1])), stream, index)
            weights = weights * jax.lax.rsqrt(squares + self.norm.eps)
        found, stream = mixed(weights, stream, index)
        mixes = dict(zip(self.names, found, strict=True))
        if self.small is not None:
            mix = self.small[...].astype(last.dtype) * self.norm(exact(mixes["r"]))
            mixes["r"] = (last + mix).astype(stream.dtype)
        return mixes, stream


@dataclass(frozen=True)
class DepthCross(CarrySpec):
    """DeepCrossAttention (Heddes et al. 2025, 2502.06785): queries, keys, values and skip are four weighted sums of all block outputs.

    Rows are what each block added, v_0 = e; ``u_c = sum_j (b_cj + relu(<w_c, v_j>)) v_j`` (the input-dependent form), b all ones and
    w = 0, which is Pre-LN at the start. Close is one more sum.
    """

    views: ClassVar = VIEWS
    undoable: ClassVar = True
    rows: ClassVar = True
    carries: ClassVar = "the updates of all blocks"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "DepthCrossBlock":
        return DepthCrossBlock(("r", *VIEWS), site.M + 1, width)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return opened(embedded, sites + 1)

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module:
        return DepthCrossBlock(("r",), sites + 1, width)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return ends.views(stream, len(stream) - 1)[0]["r"]


class DepthCrossBlock(Rows):
    def __init__(self, names: tuple[str, ...], rows: int, width: int):
        self.names = names
        self.static = constant(1.0, (len(names), rows), "mixer_static")
        self.query = constant(0.0, (len(names), width), "mixer_query")

    def read(self, stream: jax.Array, site: Site) -> tuple[dict[str, jax.Array], tuple]:
        views, buffer = self.views(stream, site.s)
        return views, (views["r"], buffer)

    def write(self, stream: jax.Array, memo: tuple, update: Any, around: Around) -> tuple[Any, Flow]:
        skip, buffer = memo
        added = (exact(update) - exact(skip)).astype(stream.dtype)  # of the block's output, what it added to its skip
        return push(buffer, added, around.site.s + 1), Flow(skip, update, None, added, skip, skip)

    def views(self, stream: jax.Array, index: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        """The mixes of the rows up to ``index`` by name, and the buffer."""
        scores, _, stream = scored(self.query[...], stream, index)
        static = jnp.expand_dims(self.static[...].astype(scores.dtype), tuple(range(2, scores.ndim)))
        found, stream = mixed(static + jax.nn.relu(scores), stream, index)
        return dict(zip(self.names, found, strict=True)), stream
