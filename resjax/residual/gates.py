"""Which carries do more with the update than add it? Gates, a step on the sphere, an added map of the stream, a projected update."""

from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.norms import NormDefaults
from resjax.residual.parameters import constant, kernel, orthonormal
from resjax.residual.precision import exact, plus
from resjax.residual.site import Site
from resjax.residual.streams import One, OneStream, scaled


def matmul(x: jax.Array, weights: Any) -> jax.Array:
    """(..., in) times a stored kernel (in, out), in x's dtype."""
    return x @ weights[...].astype(x.dtype)


class Gate(Carry):
    """One array, replaced by a mix of itself and the branch's output."""

    gated: ClassVar = True

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, None]:
        return stream, None

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        proposal = jnp.zeros_like(exact(stream)) if update is None else exact(update)
        after = self.mixed(exact(stream), proposal, around.site).astype(stream.dtype)
        return after, Flow(stream, after, None, after, stream, stream)

    def viewed(self, flow: Flow) -> Flow:
        """The update of a gate is what changed, since the branch's output is a proposal only."""
        return flow._replace(update=(exact(flow.after) - exact(flow.before)).astype(flow.before.dtype))

    def mixed(self, stream: jax.Array, proposal: jax.Array, site: Site) -> jax.Array:
        """Both in float32 or better."""
        raise NotImplementedError


@dataclass(frozen=True)
class Highway(CarrySpec):
    """Highway (Srivastava et al. 2015, 1505.00387, from memory): ``H' = T . y + (1 - T) . H``, ``T = sigmoid(H W + b)``.

    b starts negative, so that the carry dominates.
    """

    bias: float = -2.0
    lacks: ClassVar = frozenset({"drop"})  # a proposal that is not there is not a stream that stays
    blockwise: ClassVar = True

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "HighwaySite":
        return HighwaySite(self, width, key)


class HighwaySite(Gate):
    def __init__(self, spec: Highway, width: int, key: jax.Array):
        self.by = kernel(key, width, width, "gate")
        self.bias = constant(spec.bias, (width,), "gate_bias")

    def mixed(self, stream: jax.Array, proposal: jax.Array, site: Site) -> jax.Array:
        gate = jax.nn.sigmoid(matmul(stream, self.by) + self.bias[...].astype(stream.dtype))
        return gate * proposal + (1.0 - gate) * stream


@dataclass(frozen=True)
class GRU(CarrySpec):
    """The GRU gate of GTrXL (Parisotto et al. 2019, 1910.06764), on y = relu(F(N(H))); b starts at 2, near the identity.

    ``r = sigmoid(y W_r + H U_r)``, ``z = sigmoid(y W_z + H U_z - b)``, ``h = tanh(y W_g + (r . H) U_g)``,
    ``H' = (1 - z) . H + z . h``.
    """

    bias: float = 2.0
    lacks: ClassVar = frozenset({"drop"})  # a proposal that is not there is not a stream that stays
    blockwise: ClassVar = True

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "GRUSite":
        return GRUSite(self, width, key)


class GRUSite(Gate):
    def __init__(self, spec: GRU, width: int, key: jax.Array):
        keys = jax.random.split(key, 2)
        self.of_update = kernel(keys[0], width, width, "gate", "gate", "gate")  # W_r, W_z, W_g
        self.of_stream = kernel(keys[1], width, width, "gate", "gate", "gate")  # U_r, U_z, U_g
        self.bias = constant(spec.bias, (width,), "gate_bias")

    def mixed(self, stream: jax.Array, proposal: jax.Array, site: Site) -> jax.Array:
        y = jax.nn.relu(proposal)
        W, U = (w[...].astype(y.dtype) for w in (self.of_update, self.of_stream))
        r = jax.nn.sigmoid(y @ W[:, 0] + stream @ U[:, 0])
        z = jax.nn.sigmoid(y @ W[:, 1] + stream @ U[:, 1] - self.bias[...].astype(y.dtype))
        h = jnp.tanh(y @ W[:, 2] + (r * stream) @ U[:, 2])
        return (1.0 - z) * stream + z * h


def unit(x: jax.Array) -> jax.Array:
    """L2 norm 1 over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


@dataclass(frozen=True)
class Sphere(CarrySpec):
    """nGPT (Loshchilov et al. 2024, 2410.01131): ``H' = unit( H + |a| . (y - H) )``, where y has norm 1 and e is made to.

    a, one number a feature, is stored at 1 / sqrt(width) and acts as 0.05 at the start.
    """

    start: float = 0.05
    lacks: ClassVar = frozenset({"drop"})  # a proposal that is not there is not a stream that stays
    blockwise: ClassVar = True

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "SphereSite":
        return SphereSite(self, width)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return unit(exact(embedded)).astype(embedded.dtype)


class SphereSite(Gate):
    def __init__(self, spec: Sphere, width: int):
        self.effective = spec.start * sqrt(width)  # of a stored 1 / sqrt(width)
        self.rate = constant(1.0 / sqrt(width), (width,), "gain")

    def mixed(self, stream: jax.Array, proposal: jax.Array, site: Site) -> jax.Array:
        rate = jnp.abs(self.rate[...].astype(stream.dtype)) * self.effective
        return unit(stream + rate * (proposal - stream))


@dataclass(frozen=True)
class Shrunk(OneStream):
    """GPAS (Chen et al. 2025, 2506.22049): after the add, ``H' = h - silu(g) * stop_gradient(h)``, g one learned number from 0.

    The value is h (1 - silu(g)); the gradient passes as through the identity. (The released code shares g between the sites of a
    block; here each site has its own.)
    """

    uses: ClassVar = frozenset({"skip"})

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "ShrunkSite":
        return ShrunkSite()


class ShrunkSite(One):
    def __init__(self) -> None:
        self.gate = constant(0.0, (), "gate_bias")

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        joined, flow = super().write(stream, memo, update, around)
        wide = exact(joined)
        after = wide - jax.nn.silu(self.gate[...].astype(wide.dtype)) * jax.lax.stop_gradient(wide)
        after = after.astype(joined.dtype)
        return after, flow._replace(after=after)


@dataclass(frozen=True)
class Orthogonal(OneStream):
    """Orthogonal residual updates (2505.11881, from a secondary source): only the part of y at right angles to H is added.

    ``H' = H + y - <y, H> / (<H, H> + eps) H``, products over the features, in float32.
    """

    eps: float = 1e-6
    uses: ClassVar = frozenset({"skip"})

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "OrthogonalSite":
        return OrthogonalSite(self.eps)


class OrthogonalSite(One):
    def __init__(self, eps: float):
        self.eps = eps

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        if update is not None:
            y, h = exact(update), exact(stream)
            along = jnp.sum(y * h, -1, keepdims=True) / (jnp.sum(h * h, -1, keepdims=True) + self.eps)
            update = (y - along * h).astype(update.dtype)
        return super().write(stream, memo, update, around)


@dataclass(frozen=True)
class LowRank(OneStream):
    """LAuReL-LR (Menghani et al. 2024, 2411.07501): ``H' = H + H A B + y``, A (d, r) with orthonormal columns, B (r, d) from 0."""

    rank: int = 4
    uses: ClassVar = frozenset({"skip"})

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "LowRankSite":
        return LowRankSite(min(self.rank, width), width, key)


class LowRankSite(One):
    def __init__(self, rank: int, width: int, key: jax.Array):
        self.down = orthonormal(key, width, rank, "mixer_dynamic")
        self.up = constant(0.0, (rank, width), "mixer_dynamic")

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        wide = exact(stream)
        low = matmul(matmul(wide, self.down), self.up).astype(stream.dtype)
        kept = plus(low, around.gain("skip", stream))
        after = plus(kept, update)
        return after, Flow(stream, after, kept, update, stream, kept)


@dataclass(frozen=True)
class Weighted(OneStream):
    """LAuReL-RW (Menghani et al. 2024, 2411.07501): ``H' = a y + b H`` with (a, b) = 2 softmax of two learned numbers, from 1, 1.

    The paper bounds the weights by a softmax or sigmoid; the factor 2, which makes the start Pre-LN, is ours.
    """

    uses: ClassVar = frozenset()

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "WeightedSite":
        return WeightedSite()


class WeightedSite(One):
    def __init__(self) -> None:
        self.logits = constant(0.0, (2,), "mixer_static")

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        a, b = 2.0 * jax.nn.softmax(self.logits[...])
        kept, added = scaled(b, stream), None if update is None else scaled(a, update)
        after = plus(kept, added)
        return after, Flow(stream, after, kept, added, stream, kept)
