"""Which carries have n streams, mixed at every site? Hyper-Connections, their kin, and alternating updates.

u = sum_i r_i S_i,    S'_i = sum_j A_ij S_j + b_i y
"""

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.norms import Norm, NormDefaults
from resjax.residual.parameters import constant, drawn, kernel
from resjax.residual.precision import exact, plus
from resjax.residual.site import Site
from resjax.residual.streams import scaled


def apart(streams: jax.Array) -> list[jax.Array]:
    """The streams (n, batch, ..., width) one by one; their gradients are joined by one concatenation, not by n padded sums."""
    return [jnp.squeeze(part, 0) for part in jnp.split(streams, len(streams))]


def weighted(weights: jax.Array, streams: jax.Array | list[jax.Array]) -> jax.Array:
    """``sum_j w_j S_j``, in float32 or better; weights (n,), or (n, batch, ...) for one a token; streams (n, batch, ..., width).

    Written out term by term: a sum over the leading axis is a slow loop on a CPU (30 times as slow, with its gradient 7 times).
    """
    parts = apart(streams) if isinstance(streams, jax.Array) else streams
    terms = [per_token(w, exact(part)) * exact(part) for w, part in zip(weights, parts, strict=True)]
    return sum(terms[1:], start=terms[0]).astype(parts[0].dtype)


def remixed(weights: jax.Array, streams: jax.Array | list[jax.Array]) -> list[jax.Array]:
    """``sum_j A_ij S_j`` for all i; weights (n, n), or (n, n, batch, ...) for one matrix a token."""
    parts = apart(streams) if isinstance(streams, jax.Array) else streams
    return [weighted(row, parts) for row in weights]


def per_token(weight: jax.Array, stream: jax.Array) -> jax.Array:
    """A number, or one a token (batch, ...), with axes of size 1 behind to multiply a stream (batch, ..., width)."""
    return weight.reshape(*weight.shape, *(1,) * (stream.ndim - weight.ndim)).astype(stream.dtype)


def copies(embedded: jax.Array, n: int) -> jax.Array:
    return jnp.broadcast_to(embedded, (n, *embedded.shape))


class Mixed(Carry):
    """A site of n streams, given its weights; the rest is the same for all of this kind."""

    def weights(self, streams: jax.Array, site: Site) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``(r (n,), A (n, n) as [to, from], b (n,))``, each with the tokens' axes behind where it depends on them."""
        raise NotImplementedError

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, Any]:
        r, A, b = self.weights(stream, site)
        return weighted(r, stream), (A, b)

    def write(self, stream: jax.Array, memo: Any, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        A, b = memo
        parts = remixed(A, stream)
        if update is None:
            kept = jnp.stack(parts)
            return kept, Flow(stream, kept, kept, None, stream, kept)
        shares = [scaled(per_token(share, exact(update)), update) for share in b]
        after = jnp.stack([plus(part, share) for part, share in zip(parts, shares, strict=True)])
        return after, Flow(stream, after, parts, shares, stream, parts)  # lists: only probes want them as one array

    def viewed(self, flow: Flow) -> Flow:
        """The streams before and after as the one array that close would make of them; what is kept and added as one each."""
        before, after = (jnp.sum(exact(x), axis=0).astype(x.dtype) for x in (flow.before, flow.after))
        kept = jnp.stack(flow.kept)
        update = None if flow.update is None else jnp.stack(flow.update)
        return flow._replace(before=before, after=after, kept=kept, update=update, read=before, beside=kept)


@dataclass(frozen=True)
class Hyper(CarrySpec):
    """Hyper-Connections (Zhu et al. 2024, 2409.19606): n streams, weights static or also dependent on the token.

    Static: ``u = sum_i a_i S_i``, ``S'_i = sum_j R_ji S_j + b_i y``; open n copies, close their sum. At the start a is one-hot at
    s mod n, R the identity and b all ones, so that the model is Pre-LN.
    """

    n: int = 4
    dynamic: bool = False

    own_norms: ClassVar = True

    @property
    def carries(self) -> str:  # type: ignore[override]
        return f"{self.n} streams"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "HyperSite":
        return HyperSite(self, width, site, norms)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return copies(embedded, self.n)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return weighted(jnp.ones(self.n), stream)


class HyperSite(Mixed):
    """The weights of one site; dynamic ones add ``s * tanh(N(S) W)``, W from 0, s from 0.01."""

    def __init__(self, spec: Hyper, width: int, site: Site, norms: NormDefaults):
        n = spec.n
        here = jax.nn.one_hot(jnp.asarray(site.s, jnp.int32) % n, n)
        self.pick = constant(here, (n,), "mixer_static")
        self.mix = constant(jnp.eye(n), (n, n), "mixer_static")
        self.spread = constant(1.0, (n,), "mixer_static")
        self.norm = Norm("layernorm", width, NormDefaults("layernorm", norms.eps)) if spec.dynamic else None
        if spec.dynamic:
            self.pick_by = constant(0.0, (width,), "mixer_dynamic")
            self.mix_by = constant(0.0, (width, n), "mixer_dynamic")
            self.spread_by = constant(0.0, (width,), "mixer_dynamic")
            self.pick_scale = constant(0.01, (), "mixer_static")
            self.spread_scale = constant(0.01, (), "mixer_static")

    def weights(self, streams: jax.Array, site: Site) -> tuple[jax.Array, jax.Array, jax.Array]:
        pick, mix, spread = self.pick[...], self.mix[...].T, self.spread[...]
        if self.norm is None:
            return pick, mix, spread
        x = self.norm(exact(streams))  # (n, batch, ..., width)
        over = tuple(range(1, x.ndim - 1))  # the tokens' axes, for numbers that do not depend on them
        pick = jnp.expand_dims(pick, over) + self.pick_scale[...] * jnp.tanh(x @ self.pick_by[...].astype(x.dtype))
        spread = jnp.expand_dims(spread, over) + self.spread_scale[...] * jnp.tanh(
            x @ self.spread_by[...].astype(x.dtype)
        )
        by = jnp.moveaxis(x @ self.mix_by[...].astype(x.dtype), -1, 0)  # (to, from, batch, ...)
        mix = jnp.expand_dims(mix, tuple(axis + 1 for axis in over)) + self.pick_scale[...] * jnp.tanh(by)
        return pick, mix, spread


@dataclass(frozen=True)
class Manifold(CarrySpec):
    """Manifold-constrained Hyper-Connections (Xie et al. 2025, 2512.24880): streams are mixed by doubly stochastic matrices.

    ``logits = alpha_k * (rms(vec(S)) phi_k) + b_k`` for read, write and mix; ``r = sigmoid``, ``b = 2 sigmoid``, and
    A is 20 Sinkhorn steps of exp(logits), the rows last: the weights that come into a stream sum to 1 exactly, those that leave it
    nearly. ``lite`` (2601.05732): A is a softmax-weighted sum of all n! permutations, exactly doubly stochastic.
    """

    n: int = 4
    lite: bool = False
    steps: int = 20

    own_norms: ClassVar = True

    @property
    def carries(self) -> str:  # type: ignore[override]
        return f"{self.n} streams"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "ManifoldSite":
        return ManifoldSite(self, width, norms, key)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return copies(embedded, self.n)

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        return weighted(jnp.ones(self.n), stream)


class ManifoldSite(Mixed):
    def __init__(self, spec: Manifold, width: int, norms: NormDefaults, key: jax.Array):
        n = spec.n
        self.n, self.lite, self.steps = n, spec.lite, spec.steps
        mixes = len(arrangements(n)) if spec.lite else n * n
        self.norm = Norm("rmsnorm", n * width, NormDefaults("rmsnorm", norms.eps, gain=False))
        self.by = kernel(key, n * width, 2 * n + mixes, "mixer_dynamic")
        self.bias = constant(0.0, (2 * n + mixes,), "mixer_static")
        self.scales = constant(0.01, (3,), "mixer_static")

    def weights(self, streams: jax.Array, site: Site) -> tuple[jax.Array, jax.Array, jax.Array]:
        n = self.n
        flat = jnp.moveaxis(exact(streams), 0, -2)
        x = self.norm(flat.reshape(*flat.shape[:-2], -1))
        counts = np.array([n, n, self.bias.shape[-1] - 2 * n])
        scales = jnp.repeat(self.scales[...], counts, total_repeat_length=int(counts.sum()))
        logits = jnp.moveaxis(scales * (x @ self.by[...].astype(x.dtype)) + self.bias[...], -1, 0)
        read, write, mix = jnp.split(logits, (n, 2 * n))
        if self.lite:
            A = jnp.einsum("pij,p...->ij...", jnp.asarray(arrangements(n), x.dtype), jax.nn.softmax(mix, axis=0))
        else:
            A = sinkhorn(mix.reshape(n, n, *mix.shape[1:]), self.steps)
        return jax.nn.sigmoid(read), A, 2.0 * jax.nn.sigmoid(write)


@cache
def arrangements(n: int) -> np.ndarray:
    """All n! permutation matrices, (n!, n, n)."""
    return np.stack([np.eye(n)[list(order)] for order in permutations(range(n))])


def sinkhorn(logits: jax.Array, steps: int) -> jax.Array:
    """The doubly stochastic matrix near exp(logits) (n, n, ...): columns then rows divided by their sums, ``steps`` times.

    Rows (the second axis summed) come last and sum to 1 exactly. Not stored for the backward pass but computed again.
    """

    def total(m: jax.Array, axis: int) -> jax.Array:  # term by term, as in weighted
        parts = jnp.split(m, m.shape[axis], axis)
        return sum(parts[1:], start=parts[0])

    def step(m: jax.Array, _: None) -> tuple[jax.Array, None]:
        m = m / total(m, 0)
        return m / total(m, 1), None

    def balanced(logits: jax.Array) -> jax.Array:
        m = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=(0, 1), keepdims=True)))
        return jax.lax.scan(step, m, None, length=steps)[0]

    return jax.checkpoint(balanced, prevent_cse=False)(logits)


@dataclass(frozen=True)
class Fractions(CarrySpec):
    """Frac-Connections (Zhu et al. 2025, 2503.14125): the width is split in m streams of width / m, mixed as in Hyper-Connections.

    ``u = concat_i sum_j Y_ji S_j``, ``S'_i = sum_j A_ji S_j + b_i y_i``; at the start Y = A = I and b = 1, which is Pre-LN.
    """

    m: int = 4
    blockwise: ClassVar = True

    @property
    def carries(self) -> str:  # type: ignore[override]
        return f"one stream in {self.m} fractions"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "FractionsSite":
        return FractionsSite(self.m)

    def refuse(self, kinds: tuple[str, ...], width: int) -> None:
        if width % self.m:
            raise ValueError(f"width {width} is not divisible by the {self.m} fractions of the stream")


class FractionsSite(Carry):
    def __init__(self, m: int):
        self.m = m
        self.pick = constant(jnp.eye(m), (m, m), "mixer_static")
        self.mix = constant(jnp.eye(m), (m, m), "mixer_static")
        self.spread = constant(1.0, (m,), "mixer_static")

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, None]:
        return self._mixed(self.pick[...].T, stream), None

    def write(self, stream: jax.Array, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        kept = self._mixed(self.mix[...].T, stream)
        added = None
        if update is not None:
            each = jnp.repeat(self.spread[...], update.shape[-1] // self.m)
            added = scaled(each, update)
        after = plus(kept, added)
        return after, Flow(stream, after, kept, added, stream, kept)

    def _mixed(self, matrix: jax.Array, stream: jax.Array) -> jax.Array:
        return jnp.concatenate(remixed(matrix, jnp.split(stream, self.m, axis=-1)), axis=-1)


@dataclass(frozen=True)
class AltUp(CarrySpec):
    """Alternating updates (Baykal et al. 2023, 2301.13310), as in Gemma 3n: K streams, of which a block sees the first only.

    Predict ``x^_i = x_i + sum_j p_ij x_j``, run the block on x^_0 to z, correct ``x_i = x^_i + (1 + c_i) (z - x^_0)``. Coefficients are
    small linear maps of ``tanh(router(rms(x)) / d)``, of x_0 to predict and of z to correct, held within 120. Streams 1 on open as
    learned projections of the embedding with its RMS, and close through projections of their own, with the first's RMS, in a mean.
    """

    n: int = 4

    own_norms: ClassVar = True

    @property
    def carries(self) -> str:  # type: ignore[override]
        return f"{self.n} streams"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "AltUpBlock":
        return AltUpBlock(self.n, width, norms, key)

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> "AltUpEnds":
        return AltUpEnds(self.n, width, key)

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> jax.Array:
        return jnp.stack([embedded, *ends.projected(ends.into[...], [embedded] * (self.n - 1), embedded)])

    def close(self, ends: Any, stream: jax.Array) -> jax.Array:
        parts = [stream[0], *ends.projected(ends.out_of[...], list(stream[1:]), stream[0])]
        return weighted(jnp.full(self.n, 1.0 / self.n), parts)


class AltUpEnds(nnx.Module):
    def __init__(self, n: int, width: int, key: jax.Array):
        keys = jax.random.split(key)
        names = ("mixer_dynamic",) * (n - 1)
        self.into = kernel(keys[0], width, width, *names)
        self.out_of = kernel(keys[1], width, width, *names)

    def projected(self, kernels: jax.Array, parts: list[jax.Array], like: jax.Array) -> list[jax.Array]:
        """Each part through its own kernel, brought to the RMS that ``like`` has at the token."""
        kernels = kernels if kernels.ndim == 3 else kernels[:, None]
        found = []
        for i, part in enumerate(parts):
            y = exact(part) @ kernels[:, i].astype(exact(part).dtype)
            found.append((y * root(exact(like)) / jnp.maximum(root(y), 1e-5)).astype(like.dtype))
        return found


def root(x: jax.Array) -> jax.Array:
    """Root mean square of the last axis."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))


class AltUpBlock(Carry):
    LARGEST = 120.0

    def __init__(self, n: int, width: int, norms: NormDefaults, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.n = n
        self.norm = Norm("rmsnorm", width, NormDefaults("rmsnorm", norms.eps))
        self.router = kernel(keys[0], width, n, "mixer_dynamic")
        self.predict = drawn(keys[1], 1e-4, (n, n * n), "mixer_static")
        self.correct = drawn(keys[2], 1e-2, (n, n), "mixer_static")

    def modalities(self, x: jax.Array) -> jax.Array:
        """(batch, ..., width) -> (batch, ..., n)."""
        return jnp.tanh(self.norm(x) / x.shape[-1] @ self.router[...].astype(x.dtype))

    def read(self, stream: jax.Array, site: Site) -> tuple[jax.Array, jax.Array]:
        x = exact(stream)
        by = self.predict[...].clip(-self.LARGEST, self.LARGEST).astype(x.dtype)
        p = jnp.moveaxis(self.modalities(x[0]) @ by, -1, 0).reshape(self.n, self.n, *x.shape[1:-1])
        predicted = (x + jnp.stack(remixed(p, x))).astype(stream.dtype)
        return predicted[0], predicted

    def write(self, stream: jax.Array, memo: jax.Array, update: Any, around: Around) -> tuple[Any, Flow]:
        z = exact(update)
        by = self.correct[...].clip(-self.LARGEST, self.LARGEST).astype(z.dtype)
        c = 1.0 + jnp.moveaxis(self.modalities(z) @ by, -1, 0)
        after = (exact(memo) + c[..., None] * (z - exact(memo[0]))).astype(stream.dtype)
        return after, Flow(memo[0], after[0], None, update, memo[0], memo[0])
