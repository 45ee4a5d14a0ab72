"""How many directions do the tokens of a stream span, and how alike are they about their mean? Scalars of one array.

Shapes: (batch, ..., width) -> (); "token" means every position but the width. Covariances are taken over all tokens of the batch, about
their common mean; in float32 (or better). A stream whose tokens differ by less than rounding has no such geometry: NaN.
"""

import jax
import jax.numpy as jnp

from resjax.health.probes import token_cosine
from resjax.residual.precision import exact

NAMES = ("token_cosine_centred", "participation_ratio", "stable_rank")
RESIDUE = 1e-6  # of a token's length: what float32 leaves of tokens that are one and the same
SQUARINGS = (
    8  # the covariance to the power 256: the largest eigenvalue to 1 % of a spectrum whose edge is as dense as noise's
)


def geometry(stream: jax.Array) -> dict[str, jax.Array]:
    """All of ``NAMES``, float32 scalars."""
    centred = about_mean(stream)
    covariance = gram(centred)
    probes = token_cosine(centred), participation_ratio(covariance), stable_rank(covariance)
    return {name: jnp.asarray(value, jnp.float32) for name, value in zip(NAMES, probes, strict=True)}


def about_mean(stream: jax.Array) -> jax.Array:
    """The stream without the mean token, its largest element 1; NaN where nothing but rounding is left."""
    tokens = exact(stream)
    over = tuple(range(tokens.ndim - 1))
    centred = tokens - jnp.mean(tokens, axis=over, keepdims=True)
    most = jnp.max(jnp.abs(centred))
    return jnp.where(most > RESIDUE * jnp.max(jnp.abs(tokens)), centred / most, jnp.nan)


def gram(centred: jax.Array) -> jax.Array:
    """The covariance of features, or the Gram matrix of tokens where that is smaller (the same eigenvalues); of trace 1."""
    tokens = centred.reshape(-1, centred.shape[-1])
    few, many = (tokens.T, tokens) if len(tokens) >= tokens.shape[1] else (tokens, tokens.T)
    product = jnp.matmul(few, many, precision="highest")
    return product / jnp.trace(product)


def participation_ratio(covariance: jax.Array) -> jax.Array:
    """``(sum lambda)^2 / sum lambda^2`` of the eigenvalues: as many as there are equal ones."""
    return jnp.square(jnp.trace(covariance)) / jnp.sum(jnp.square(covariance))


def stable_rank(covariance: jax.Array) -> jax.Array:
    """``sum lambda / max lambda``. The largest by powers (no decomposition, which some CPU libraries cannot do in a scan):
    ``sum lambda^257 / sum lambda^256``, never above the truth.
    """
    power = covariance
    for _ in range(SQUARINGS):
        power = jnp.matmul(power, power, precision="highest")
        power = power / jnp.trace(power)
    return jnp.trace(covariance) / jnp.sum(covariance * power)
