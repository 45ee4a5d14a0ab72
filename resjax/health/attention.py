"""How sharp is attention, and how large are the logits that it comes from? Figures of one site, from logits and mask (M13)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from resjax.health.geometry import token_mean
from resjax.residual.precision import exact


def attention_figures(logits: jax.Array, seen: jax.Array | None = None) -> dict[str, jax.Array]:
    """Float32 scalars of attention logits (..., queries, keys), scaled as they enter the softmax; of each head apart by ``jax.vmap``.

    Args:
      seen: which keys a query sees, boolean, broadcast to the logits (causality, padding); None: all. A logit of -inf is a key not
        seen; where hidden logits hold a large negative number instead, ``seen`` has to say so.

    Returns:
      entropy: of the softmax over the keys seen, divided by the log of their number; mean over the queries that see two or more:
        1 for uniform attention, 0 for attention to one key.
      largest_logit: largest magnitude of a logit seen.
      logit_std: root mean square, over the same queries, of the standard deviation over the keys seen; a number added to all logits
        of a query changes neither it nor the entropy.

    What is not seen may hold anything. NaN where there is nothing to tell (every query sees one key at most; for the largest logit:
    none is seen), and with NaN or inf among the logits seen. In float32 whatever comes in.
    """
    logits = exact(logits)
    shown = logits != -jnp.inf
    if seen is not None:
        shown &= seen
    count = jnp.sum(shown, axis=-1, dtype=logits.dtype)
    several = count > 1
    top = jnp.max(jnp.where(shown, logits, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    below = jnp.where(shown, logits - top, 0)
    weights = jnp.where(shown, jnp.exp(below), 0)
    whole = jnp.sum(weights, axis=-1)
    entropy = (jnp.log(whole) - jnp.sum(weights * below, axis=-1) / whole) / jnp.log(count)
    mean = jnp.sum(below, axis=-1, keepdims=True) / count[..., None]
    variance = jnp.sum(jnp.where(shown, jnp.square(below - mean), 0), axis=-1) / count
    largest = jnp.max(jnp.where(shown, jnp.abs(logits), 0), initial=0)
    return {
        "entropy": token_mean(entropy, several),
        "largest_logit": jnp.where(jnp.isposinf(largest) | ~jnp.any(shown), jnp.nan, largest),
        "logit_std": jnp.sqrt(token_mean(variance, several)),
    }


def merged_figures(parts: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """:func:`attention_figures` of all queries at once, from the logits of some at a time: exactly the same, whatever the parts.

    ``parts`` are (..., queries, keys) each, minus infinity where a key is not seen; their keys may differ in number.
    """
    figures = [attention_figures(part) for part in parts]
    shown = [exact(part) != -jnp.inf for part in parts]
    counts = jnp.stack([jnp.sum(jnp.sum(keys, axis=-1) > 1) for keys in shown]).astype(jnp.float32)
    some = jnp.stack([jnp.any(keys) for keys in shown])
    largest = jnp.max(jnp.where(some, jnp.stack([figure["largest_logit"] for figure in figures]), 0))

    def mean(values: list[jax.Array]) -> jax.Array:
        rows = jnp.stack(values)
        return jnp.sum(jnp.where(counts > 0, rows * counts.astype(rows.dtype), 0)) / jnp.sum(counts).astype(rows.dtype)

    return {
        "entropy": mean([figure["entropy"] for figure in figures]),
        "largest_logit": jnp.where(jnp.any(some), largest, jnp.nan),
        "logit_std": jnp.sqrt(mean([jnp.square(figure["logit_std"]) for figure in figures])),
    }
