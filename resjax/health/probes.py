"""What is measured of the residual stream inside the step? Scalars per site and block, from what flowed through a connection.

All statistics are taken in float32 (or better). Shapes: arrays are (batch, ..., width), "token" means every position but the width.
"""

import jax
import jax.numpy as jnp

from resjax.health.arithmetic import swallowed
from resjax.health.geometry import cosine, ratio, token_cosine
from resjax.health.record import FORWARD_PROBES
from resjax.residual import Flow
from resjax.residual.precision import exact, rms


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
