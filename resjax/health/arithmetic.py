"""What does the precision of the stream lose of an update? What an add stores under a rounding, and the figures that tell loss from bias.

Everything is worked out in float32 (or better) and rounded by ``lax.reduce_precision``: of a pair of casts a compiler keeps nothing.
``kept`` is what the update is added to, ``after`` what the add stored; without ``after``, what rounding to nearest in the dtype of
``kept`` would store. ``kept`` and ``update`` are taken as they are. ``mask``, shaped as the arrays without their width, is True at the
tokens that count. All work inside jit, vmap and scan.

Extreme cases: an update of zeros loses nothing and has no error to speak of: NaN in all shares of it. NaN in an element that counts
makes NaN of the errors (never of ``swallowed``: what is NaN has not stayed as it was). An overflow is an infinite error, and -inf
effective bits; an exact add is an error of 0, and inf bits.
"""

from math import log2

import jax
import jax.numpy as jnp
from jax import lax

from resjax.errors import Refused, not_one_of
from resjax.health.geometry import magnitude, token_mean, visible
from resjax.residual.precision import HALF, exact, rounded

ROUNDINGS = ("nearest", "truncating", "stochastic")


def round_to(
    x: jax.Array, dtype: jax.typing.DTypeLike, rounding: str = "nearest", key: jax.Array | None = None
) -> jax.Array:
    """``x`` rounded to the precision and range of ``dtype``, itself float32 or better.

    Args:
      rounding: nearest (ties to even); truncating (toward zero, so never beyond the largest number); stochastic (up or down at random,
        so that the mean is ``x``; ``key`` is the randomness).

    Infinities and NaN stay. As everywhere in resjax's adds there are no subnormal numbers: below the smallest normal one (6.1e-5 in
    float16) come 0 and nothing else.

    Raises:
      Refused: an unknown rounding; stochastic without a key; another rounding than nearest to a dtype not narrower than float32.
    """
    if rounding not in ROUNDINGS:
        raise not_one_of("rounding", rounding, ROUNDINGS)
    x, dtype = exact(x), jnp.dtype(dtype)
    nearest = rounded(x, dtype)
    if rounding == "nearest":
        return nearest
    if dtype not in HALF:
        raise Refused(f"rounding is '{rounding}', which is for bfloat16 and float16, not {dtype}; there, only nearest")
    info, own, size = jnp.finfo(dtype), jnp.finfo(x.dtype), jnp.abs(x)
    # The power of two at or below |x|: of |x| / 2, so that rounding up does not overflow.
    half = lax.reduce_precision(size / 2, own.nexp, 0)
    power = jnp.where(2 * half > size, half, 2 * half)
    least = 2.0**info.minexp
    spacing = jnp.where(power < least, least, jnp.maximum(power * 2.0**-info.nmant, float(own.tiny)))
    up = jnp.abs(nearest)
    low = jnp.where(up > size, jnp.minimum(jnp.maximum(up - spacing, 0), float(info.max)), up)
    if rounding == "stochastic":
        if key is None:
            raise Refused("rounding is 'stochastic', which needs a key; without one: nearest, truncating")
        high = low + spacing
        drawn = jax.random.uniform(key, x.shape, x.dtype) < (size - low) / spacing
        low = jnp.where(drawn, jnp.where(high > float(info.max), jnp.inf, high), low)
    return jnp.where(jnp.isfinite(x), jnp.copysign(low, x), x)


def added(
    update: jax.Array,
    kept: jax.Array,
    dtype: jax.typing.DTypeLike | None = None,
    rounding: str = "nearest",
    key: jax.Array | None = None,
) -> jax.Array:
    """What an add stores that sums in float32 and rounds once to ``dtype`` (that of ``kept`` by default); see :func:`round_to`."""
    return round_to(exact(kept) + exact(update), kept.dtype if dtype is None else dtype, rounding, key)


# ---- what is lost (M12)


def swallowed(
    update: jax.Array, kept: jax.Array, after: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """Share of the non-zero elements of the update that the add, rounded as the stream is, leaves no trace of."""
    stayed, moved = traceless(update, kept, after)
    if mask is not None:
        stayed, moved = stayed & mask[..., None], moved & mask[..., None]
    return jnp.sum(stayed) / jnp.sum(moved)


def traceless(update: jax.Array, kept: jax.Array, after: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Of which elements of the update the add leaves no trace, and which are not 0; see :func:`swallowed`."""
    total = added(update, kept) if after is None else exact(after)
    moved = update != 0
    return (total == exact(kept)) & moved, moved


def rounding_error(update: jax.Array, kept: jax.Array, after: jax.Array) -> jax.Array:
    """``after`` less the exact sum, element by element.

    As the second half of a two-sum: the larger term first. Exact where ``after`` is the sum rounded to nearest, float32 included; to
    1e-7 of the stream elsewhere.
    """
    update, kept, after = exact(update), exact(kept), exact(after)
    kept_first = jnp.abs(kept) >= jnp.abs(update)
    error = jnp.where(kept_first, (after - kept) - update, (after - update) - kept)
    return jnp.where(jnp.isinf(after) & jnp.isfinite(update) & jnp.isfinite(kept), after, error)


def update_error(
    update: jax.Array, kept: jax.Array, after: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """|(after - kept) - update| / |update| over all elements: the error of the update as the stream has it."""
    error, update, _ = _errors(update, kept, after, mask)
    size = magnitude(update)
    return jnp.where(size == 0, jnp.nan, _size(error) / size)


def effective_bits(
    update: jax.Array, kept: jax.Array, after: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """-log2 of :func:`update_error`: how many bits of the update arrive; 0 where its error is as large as itself."""
    return -jnp.log2(update_error(update, kept, after, mask))


def mean_error(
    update: jax.Array, kept: jax.Array, after: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """Mean of |rounding error / exact sum| over the elements whose sum is not 0: 0.14 % in bfloat16 when it rounds."""
    relative, some = _relative(update, kept, after, mask)
    return token_mean(jnp.abs(relative), some)


def signed_error(
    update: jax.Array, kept: jax.Array, after: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    """The same with its sign, positive away from zero: it tells bias from noise.

    Rounded to nearest or at random it is near 0, within :func:`mean_error` / sqrt(elements). Truncated, it is the whole mean error,
    -0.28 % in bfloat16: each add shrinks the stream, and the error grows as the depth, not as its root.
    """
    return token_mean(*_relative(update, kept, after, mask))


def headroom(x: jax.Array, dtype: jax.typing.DTypeLike | None = None, mask: jax.Array | None = None) -> jax.Array:
    """How often the largest magnitude may double before it passes the largest number of ``dtype`` (its own by default), in bits.

    Negative where it would overflow there (66,246 in float16: -0.016), -inf for an infinity, inf for zeros, NaN with a NaN.
    """
    largest = jnp.max(jnp.abs(visible(x, mask)), initial=0)
    return log2(float(jnp.finfo(x.dtype if dtype is None else dtype).max)) - jnp.log2(largest)


def precision_figures(
    update: jax.Array, kept: jax.Array, after: jax.Array | None = None, mask: jax.Array | None = None
) -> dict[str, jax.Array]:
    """All figures of one add: swallowed, update_error, effective_bits, mean_error, signed_error, and the headroom of what is stored."""
    stored = added(update, kept) if after is None else after
    error = update_error(update, kept, stored, mask)
    return {
        "swallowed": swallowed(update, kept, stored, mask),
        "update_error": error,
        "effective_bits": -jnp.log2(error),
        "mean_error": mean_error(update, kept, stored, mask),
        "signed_error": signed_error(update, kept, stored, mask),
        "headroom": headroom(stored, kept.dtype if after is None else after.dtype, mask),
    }


def _errors(
    update: jax.Array, kept: jax.Array, after: jax.Array | None, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounding error, update and sum, zeros where the mask is False."""
    after = added(update, kept) if after is None else after
    update, kept, after = (visible(part, mask) for part in (update, kept, after))
    return rounding_error(update, kept, after), update, update + kept


def _relative(
    update: jax.Array, kept: jax.Array, after: jax.Array | None, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Rounding error / exact sum, and where that sum is not 0."""
    error, _, total = _errors(update, kept, after, mask)
    some = total != 0
    return error / jnp.where(some, total, 1), some


def _size(error: jax.Array) -> jax.Array:
    """The magnitude, infinite where an element is, NaN only for NaN."""
    infinite = jnp.any(jnp.isinf(error)) & ~jnp.any(jnp.isnan(error))
    return jnp.where(infinite, jnp.inf, magnitude(error))
