"""What is causal self-attention, as a branch? (B, T, D) -> (B, T, D), no norm and no skip inside."""

from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.branches.linear import Linear
from resjax.residual import Norm, NormDefaults
from resjax.residual.precision import exact

QUERY_BLOCKS, SMALLEST_BLOCK = 4, 64  # of causal attention: blocks of queries, at least so long


At = Callable[[str, jax.Array], jax.Array]


class Attention(nnx.Module):
    """Causal multi-head softmax attention.

    Points at which a scheme may act: 'q', 'k', 'v' (B, T, H, C) after the projections; 'q_turned', 'k_turned' (B, T, H, C) after
    the model's own query and key norms and rotary positions; 'scores' (B, H, T, T) scaled, before the mask; 'heads' (B, T, H, C)
    mixed values; 'pre_o' (B, T, D) the same, joined, before the output matrix.

    Args:
      width: D, of the stream.
      heads: H; the head size is D / H.
      rope: rotary positions on queries and keys (Su et al. 2021, 2104.09864), pairs (i, i + half).
      qk_norm: RMSNorm of each head's queries and keys, with a gain shared by the heads (as Gemma 3); or a kind of norm.
      fused: queries, keys and values from one product, stored (D, 3, D); else from three, stored (D, D) each. Same functions.
      bias: biases on all four maps.
      eps: of the query and key norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rope: bool = False,
        qk_norm: bool | str = False,
        fused: bool = True,
        bias: bool = False,
        eps: float = 1e-6,
        key: jax.Array,
    ):
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}")
        if rope and width // heads % 2:
            raise ValueError(f"rotary positions turn pairs of features, and the head size {width // heads} is odd")
        self.heads, self.rope, self.fused = heads, rope, fused
        k_in, k_out = jax.random.split(key)
        if fused:
            self.qkv = Linear(width, width, "q", "k", "v", bias=bias, key=k_in)
        else:
            k_q, k_k, k_v = jax.random.split(k_in, 3)
            self.q = Linear(width, width, "q", bias=bias, key=k_q)
            self.k = Linear(width, width, "k", bias=bias, key=k_k)
            self.v = Linear(width, width, "v", bias=bias, key=k_v)
        self.write = Linear(width, width, "write", bias=bias, key=k_out)
        norms = NormDefaults("rmsnorm", eps)
        kind = "rmsnorm" if qk_norm is True else qk_norm
        self.norm_q = Norm(kind, width // heads, norms) if kind else None
        self.norm_k = Norm(kind, width // heads, norms) if kind else None

    views = True  # takes queries', keys' and values' inputs apart, too

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        """The points and their feature shapes."""
        width = self.write.kernel.shape[-1]
        head = (self.heads, width // self.heads)
        points = dict.fromkeys(("q", "k", "v", "q_turned", "k_turned", "heads"), head)
        return points | {"scores": (), "pre_o": (width,)}

    def __call__(self, x: jax.Array | dict[str, jax.Array], at: At | None = None) -> jax.Array:
        """``x`` is one input, or a dict of those of the queries, keys and values; ``at(name, array)`` is called at every point."""
        at = at or unchanged
        with jax.named_scope("queries_keys_values"):
            q, k, v = (at(name, part) for name, part in zip("qkv", self._project(x), strict=True))
            q, k = (a if norm is None else norm(a) for a, norm in ((q, self.norm_q), (k, self.norm_k)))
            if self.rope:
                q, k = rotate(q), rotate(k)
            q, k = at("q_turned", q), at("k_turned", k)
            batch, length, heads, size = q.shape
            q, k, v = (a.swapaxes(1, 2) for a in (q / jnp.asarray(sqrt(size), q.dtype), k, v))
        mixed = attend(q, k, v, at).swapaxes(1, 2)
        with jax.named_scope("output"):
            return self.write(at("pre_o", at("heads", mixed).reshape(batch, length, heads * size)))

    def _project(self, x: jax.Array | dict[str, jax.Array]) -> list[jax.Array]:
        """Queries, keys and values, (B, T, H, C) each."""
        if isinstance(x, dict):
            maps: list[Any] = [self.qkv.part(i) for i in range(3)] if self.fused else [self.q, self.k, self.v]
            parts = [linear(x[name]) for name, linear in zip("qkv", maps, strict=True)]
        elif self.fused:
            qkv = self.qkv(x)
            parts = [qkv[:, :, i] for i in range(3)]
        else:
            parts = [self.q(x), self.k(x), self.v(x)]
        return [part.reshape(*part.shape[:2], self.heads, -1) for part in parts]


def unchanged(name: str, x: jax.Array) -> jax.Array:
    """What stands at the points inside a branch if nothing does."""
    return x


def attend(q: jax.Array, k: jax.Array, v: jax.Array, at: At = unchanged) -> jax.Array:
    """Causal softmax attention, (B, H, T, C) each -> (B, H, T, C); queries come scaled. Softmax in float32.

    Queries go in up to four blocks, each of which sees the keys up to its own end only, and the sum of the weights divides the
    result, not the weights: 12 % off the whole step at 12 x 256, length 256, on a CPU (measured in one run with the plain form).
    """
    length = q.shape[2]
    look = getattr(at, "look", None)
    if getattr(at, "whole_scores", False):  # something stands at 'scores', and wants them whole
        return _attend_block(q, k, v, 0, length, at, look)
    count = max(1, min(QUERY_BLOCKS, length // SMALLEST_BLOCK))
    bounds = list(pairwise([length * i // count for i in range(count + 1)]))
    if look is not None:  # they are worked out once more, in the steps that measure, so that others keep nothing for it
        look("scores", lambda q, k: [shown(scores_of(q, k, *block), *block) for block in bounds], q, k)
    return jnp.concatenate([_attend_block(q, k, v, *block) for block in bounds], axis=2)


def scores_of(q: jax.Array, k: jax.Array, first: int, end: int) -> jax.Array:
    """The scores (B, H, end - first, end) of the queries from ``first`` to before ``end`` with the keys before ``end``."""
    # float16 ends at 65,504, and a score may pass that
    out = jnp.float32 if q.dtype == jnp.float16 else None
    return exact(jnp.einsum("bhqc,bhkc->bhqk", q[:, :, first:end], k[:, :, :end], preferred_element_type=out))


def shown(scores: jax.Array, first: int, end: int) -> jax.Array:
    """The same with minus infinity where a key comes after the query."""
    visible = jnp.arange(end) <= jnp.arange(first, end)[:, None]
    return jnp.where(visible, scores, -jnp.inf)


def _attend_block(
    q: jax.Array, k: jax.Array, v: jax.Array, first: int, end: int, at: At = unchanged, look: Any = None
) -> jax.Array:
    """The queries from ``first`` to before ``end``, on the keys before ``end``."""
    # of float16: values summed over many keys before the division may pass 65,504
    out = jnp.float32 if v.dtype == jnp.float16 else None
    with jax.named_scope("scores"):
        scores = at("scores", scores_of(q, k, first, end))
    with jax.named_scope("softmax"):
        scores = shown(scores, first, end)
        if look is not None:
            look("scores", lambda scores: [scores], scores)
        weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    with jax.named_scope("values"):
        mixed = exact(jnp.einsum("bhqk,bhkc->bhqc", weights.astype(v.dtype), v[:, :, :end], preferred_element_type=out))
        return (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(v.dtype)


def rotate(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary positions for (B, T, H, C), C even: pair i of position t is turned by the angle t * base^(-2 i / C)."""
    length, size = x.shape[1], x.shape[-1]
    first, second = jnp.split(exact(x), 2, axis=-1)
    positions, pairs = jnp.arange(length, dtype=first.dtype), jnp.arange(0, size, 2, dtype=first.dtype)
    angles = (positions[:, None] * base ** (-pairs / size))[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)
