"""How do the tokens of a stream lie to one another, and how far does an update move them? Lengths, angles, what is left of the mean.

A token is every position but the width. Arrays are (batch, ..., width); functions of matrices take (..., rows, width), rows usually
the tokens of one sequence, and give one value a matrix. All work inside jit, vmap and scan, and in float32 or better whatever comes
in. ``mask``, shaped as the array without its width, is True at the tokens that count; padding may hold anything, NaN included.

Extreme cases, unless a function says otherwise: NaN or an infinity in a token that counts makes NaN of the result it enters; no token
that counts gives NaN; a token of zeros has no direction, and what needs one is NaN. Lengths of 1.8e19 and more overflow float32.
"""

from collections.abc import Mapping
from math import pi

import jax
import jax.numpy as jnp

from resjax.errors import not_one_of
from resjax.residual.precision import exact

# Rows that differ by less than this many roundings of their dtype (as RMS, of the RMS of all) are told to be the same: what differs
# would be noise, and noise has full rank.
NOISE = 2.0
RESIDUAL_NORMS = ("frobenius", "composite")


def squares(x: jax.Array) -> jax.Array:
    """Sum of squares of every token."""
    return jnp.sum(jnp.square(exact(x)), axis=-1)


def lengths(x: jax.Array) -> jax.Array:
    """Euclidean length of every token."""
    return jnp.sqrt(squares(x))


def directions(x: jax.Array) -> jax.Array:
    """Every token divided by its length; NaN where that is 0."""
    return exact(x) / lengths(x)[..., None]


def visible(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """``x`` in float32 or better, with zeros for the tokens that do not count."""
    return exact(x) if mask is None else jnp.where(mask[..., None], exact(x), 0)


def over_width(terms: Mapping[str, tuple[str, jax.Array]]) -> dict[str, jax.Array]:
    """Sums and largest values over the width of several arrays (..., width), in one pass for all of one shape.

    A CPU reduces one number after the other, whatever stands beside it: eight reductions together take it less than half the time.

    Args:
      terms: by name, 'sum' or 'max' and the array, floats or whole numbers; the largest of magnitudes, that is, of nothing below 0.

    Returns:
      By name, one value a token, (...); NaN where an element is.
    """
    found: dict[str, jax.Array] = {}
    for shape in {array.shape: None for _, array in terms.values()}:
        names = [name for name, (_, array) in terms.items() if array.shape == shape]
        kinds = tuple(terms[name][0] for name in names)
        arrays = tuple(
            exact(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for _, x in map(terms.__getitem__, names)
        )

        def together(
            a: tuple[jax.Array, ...], b: tuple[jax.Array, ...], kinds: tuple[str, ...] = kinds
        ) -> tuple[jax.Array, ...]:
            return tuple(jnp.maximum(x, y) if kind == "max" else x + y for kind, x, y in zip(kinds, a, b, strict=True))

        zeros = tuple(jnp.zeros((), array.dtype) for array in arrays)
        found |= zip(names, jax.lax.reduce(arrays, zeros, together, (len(shape) - 1,)), strict=True)
    return found


def token_mean(values: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean of one value a token over the tokens that count."""
    if mask is None:
        return jnp.mean(values)
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask, dtype=values.dtype)


def magnitude(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Root of the sum of squares over ``axis`` (None: over all); squares neither overflow nor vanish."""
    x = exact(x)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    return jnp.squeeze(unit, axis) * jnp.sqrt(jnp.sum(jnp.square(x / unit), axis=axis))


# ---- an update beside the stream that it is added to (M4)


def ratio(update: jax.Array, stream: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Token mean of |update| / |stream|. A stream of zeros makes it infinite, and NaN where the update is zero too."""
    return token_mean(lengths(update) / lengths(stream), mask)


def ratio_frobenius(update: jax.Array, stream: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """|update| / |stream|, each the root of the sum of squares over all tokens: long tokens count more than in :func:`ratio`."""
    return magnitude(visible(update, mask)) / magnitude(visible(stream, mask))


def cosine(update: jax.Array, stream: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Token mean of the cosine between update and stream."""
    return token_mean(jnp.sum(exact(update) * exact(stream), axis=-1) / (lengths(update) * lengths(stream)), mask)


def growth(before: jax.Array, after: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Token mean of |after| / |before|. Of one token, with after = before + update: growth^2 = 1 + r^2 + 2 r a, from its ratio
    r and its cosine a."""
    return ratio(after, before, mask)


# ---- two streams of the same tokens (M10)


def angular_distance(a: jax.Array, b: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Token mean of arccos(cos(a, b)) / pi: 0 for the same direction, 1/2 for orthogonal ones, 1 for opposite ones.

    The distance of Gromov et al. 2024 (2403.17887), from the chords of the unit vectors (Kahan): an arccos in float32 cannot tell
    angles below 3e-4 apart; this is right to some 1e-7. Between all pairs of layers: two ``jax.vmap``.
    """
    a, b = directions(a), directions(b)
    return token_mean(2 / pi * jnp.arctan2(lengths(a - b), lengths(a + b)), mask)


def block_influence(a: jax.Array, b: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """1 - token mean of cos(a, b) (ShortGPT, Men et al. 2024, 2403.03853), as half the squared chord: right for small angles too."""
    return token_mean(jnp.square(lengths(directions(a) - directions(b))) / 2, mask)


# ---- tokens beside one another (M1, M2)


def token_cosine(stream: jax.Array, mask: jax.Array | None = None, centre: bool = False) -> jax.Array:
    """Mean cosine between two different tokens of a sample: 0 for orthogonal tokens, 1 for identical ones.

    From the sum of the unit vectors, so linear in the number T of tokens: (|sum|^2 - T) / (T (T - 1)). NaN for a single token; with
    a mask, samples with fewer than two tokens that count are left out of the mean over samples.

    ``centre`` takes the mean over all tokens of all samples off first (M1c): a common offset raises the plain cosine and loses no
    information. Tokens that are the same but for rounding then have no direction left: NaN; so has one that is the mean.
    """
    tokens = exact(stream).reshape(stream.shape[0], -1, stream.shape[-1])
    here = None if mask is None else mask.reshape(tokens.shape[:2])
    if centre:
        rows, counts = stream.reshape(-1, stream.shape[-1]), None if here is None else here.reshape(-1)
        left = centred(rows, counts)
        tokens = jnp.where(alike(rows, left, counts), jnp.nan, left).reshape(tokens.shape)
    unit = tokens / lengths(tokens)[..., None]
    if here is None:
        return mean_cosine(unit)
    if tokens.shape[1] < 2:
        return jnp.full((), jnp.nan, tokens.dtype)
    counted = jnp.sum(here, axis=1, dtype=tokens.dtype)
    squared = jnp.sum(jnp.square(jnp.sum(jnp.where(here[..., None], unit, 0), axis=1)), axis=-1)
    return token_mean((squared - counted) / (counted * (counted - 1)), counted > 1)


def mean_cosine(unit: jax.Array) -> jax.Array:
    """:func:`token_cosine` of tokens whose directions (batch, tokens, width) are known, all of which count."""
    count = unit.shape[1]
    if count < 2:  # rounding would make it plus or minus infinity
        return jnp.full((), jnp.nan, unit.dtype)
    return jnp.mean((jnp.sum(jnp.square(jnp.sum(unit, axis=1)), axis=-1) - count) / (count * (count - 1)))


def centred(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """res(X): every row less the mean of the rows, (..., rows, width); zeros where the mask is False.

    Identical rows give zeros exactly: the shortest row is taken off first, which is exact there and costs no precision elsewhere.
    """
    x = visible(x, mask)
    if not x.shape[-2]:
        return x
    size = lengths(x) if mask is None else jnp.where(mask, lengths(x), jnp.inf)
    shortest = jnp.argmin(size, axis=-1)[..., None, None]
    apart = x - jnp.take_along_axis(x, shortest, axis=-2)
    if mask is None:
        return apart - jnp.mean(apart, axis=-2, keepdims=True)
    count = jnp.sum(mask, axis=-1, dtype=x.dtype)[..., None, None]
    mean = jnp.sum(visible(apart, mask), axis=-2, keepdims=True) / count
    return visible(apart - mean, mask)


def alike(x: jax.Array, left: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Whether the rows of ``x`` (..., rows, width) are the same but for rounding, ``left`` being :func:`centred` of them.

    That is, |res(X)| <= 2 eps |X| in Frobenius norm, eps that of the dtype of ``x``: 2e-7 in float32, 2 % in bfloat16. False where
    something is NaN.
    """
    every = (-2, -1)
    return magnitude(left, every) <= NOISE * float(jnp.finfo(x.dtype).eps) * magnitude(visible(x, mask), every)


def residual_norm(x: jax.Array, mask: jax.Array | None = None, norm: str = "frobenius") -> jax.Array:
    """||res(X)|| / ||X|| of every matrix (..., rows, width): how far the rows are from all being the same, res(X) = :func:`centred`.

    Args:
      norm: frobenius, or composite: sqrt(largest column sum of magnitudes * largest row sum), the ||.||_{1,inf} of Dong et al.
        2021 (2103.03404) in their code. The mean is the nearest common row in the Frobenius norm only.

    Identical rows, one row, and rows of zeros give 0. With the noise of rounding left in: 1e-7 in float32 is nothing.
    """
    if norm not in RESIDUAL_NORMS:
        raise not_one_of("norm", norm, RESIDUAL_NORMS)
    left, whole = (
        magnitude(part, (-2, -1)) if norm == "frobenius" else composite_norm(part)
        for part in (centred(x, mask), visible(x, mask))
    )
    relative = jnp.where(whole == 0, 0, left / whole)
    return jnp.where(number_of_rows(x, mask) > 0, relative, jnp.nan)


def composite_norm(x: jax.Array) -> jax.Array:
    """sqrt(||X||_1 ||X||_inf) of every matrix (..., rows, width): the largest column sum and the largest row sum of magnitudes."""
    size = jnp.abs(exact(x))
    columns, rows = (jnp.max(jnp.sum(size, axis=axis), axis=-1, initial=0) for axis in (-2, -1))
    return jnp.sqrt(columns) * jnp.sqrt(rows)


def number_of_rows(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """How many rows of every matrix (..., rows, width) count, as a float."""
    dtype = exact(x).dtype
    if mask is None:
        return jnp.full(x.shape[:-2], x.shape[-2], dtype)
    return jnp.sum(mask, axis=-1, dtype=dtype)
