"""What is measured of the residual stream inside the step? Scalars per site and block, from what flowed through a connection.

All statistics are taken in float32 (or better). Shapes: arrays are (batch, ..., width), "token" means every position but the width.
"""

import jax
import jax.numpy as jnp

from resjax.health.record import FORWARD_PROBES
from resjax.residual import Flow
from resjax.residual.precision import exact, rms, rounded


def lengths(x: jax.Array) -> jax.Array:
    """Euclidean length of every token."""
    return jnp.sqrt(jnp.sum(jnp.square(exact(x)), axis=-1))


def ratio(update: jax.Array, stream: jax.Array) -> jax.Array:
    """Token mean of |update| / |stream|."""
    return jnp.mean(lengths(update) / lengths(stream))


def cosine(update: jax.Array, stream: jax.Array) -> jax.Array:
    """Token mean of the cosine between update and stream."""
    return jnp.mean(jnp.sum(exact(update) * exact(stream), axis=-1) / (lengths(update) * lengths(stream)))


def token_cosine(stream: jax.Array) -> jax.Array:
    """Mean cosine between two different tokens of a sample: 0 for orthogonal tokens, 1 for identical ones.

    From the sum of the unit vectors, so linear in the number T of tokens: (|sum|^2 - T) / (T (T - 1)). NaN for a single token.
    """
    tokens = exact(stream).reshape(stream.shape[0], -1, stream.shape[-1])
    count = tokens.shape[1]
    if count == 1:  # rounding would make it plus or minus infinity
        return jnp.full((), jnp.nan, tokens.dtype)
    unit = tokens / lengths(tokens)[..., None]
    return jnp.mean((jnp.sum(jnp.square(jnp.sum(unit, axis=1)), axis=-1) - count) / (count * (count - 1)))


def swallowed(update: jax.Array, kept: jax.Array) -> jax.Array:
    """Share of the non-zero elements of the update that the add, rounded as the stream is, leaves no trace of."""
    total = rounded(exact(kept) + exact(update), kept.dtype)
    moved = update != 0
    return jnp.sum((total == exact(kept)) & moved) / jnp.sum(moved)


def measure(flow: Flow) -> dict[str, jax.Array]:
    """All forward probes of one site, float32 scalars; NaN where the scheme has no such thing (no update, nothing to compare
    it with, no add that could swallow it)."""
    update, kept, beside, after = flow.update, flow.kept, flow.beside, flow.after
    nothing = jnp.float32(jnp.nan)
    probes = dict.fromkeys(FORWARD_PROBES, nothing) | {
        "stream_rms": rms(after),
        "token_cosine": token_cosine(after),
        "stream_max": jnp.max(jnp.abs(exact(after))),
        "finite": jnp.all(jnp.isfinite(after)),
    }
    if update is not None:
        probes |= {
            "update_rms": rms(update),
            "update_max": jnp.max(jnp.abs(exact(update))),
            "finite": probes["finite"] & jnp.all(jnp.isfinite(update)),
        }
        if beside is not None:
            probes |= {"update_ratio": ratio(update, beside), "update_cosine": cosine(update, beside)}
        if kept is not None:
            probes |= {"swallowed": swallowed(update, kept)}
    return {name: jnp.asarray(value, jnp.float32) for name, value in probes.items()}


def measure_block(before: jax.Array, after: jax.Array) -> dict[str, jax.Array]:
    """The probes of a whole block: token mean of |after - before| / |before|."""
    return {"update_ratio_block": jnp.asarray(ratio(exact(after) - exact(before), before), jnp.float32)}
