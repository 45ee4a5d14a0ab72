"""What are the eigenvalues of many symmetric matrices, inside any program? Reflections, then bisection; no LAPACK.

LAPACK's decompositions, called several at once from one program, may wait for ever on the CPU's own thread pool; these are plain array
operations, so they work in scan, under vmap and unrolled, on every device. The first half (:func:`tridiagonal`) leaves 2 n numbers of
a matrix; the second (:func:`eigenvalues`) is a long chain of small operations, which costs the same for one matrix as for a hundred:
wait with it until all are there.
"""

import jax
import jax.numpy as jnp
from jax import lax

from resjax.residual.precision import exact

BISECTIONS = 26  # of an interval as long as the largest eigenvalue: below the roundings of float32
UNROLL = 8  # steps of the chain in one turn of the loop


def tridiagonal(matrix: jax.Array) -> jax.Array:
    """A tridiagonal matrix with the eigenvalues of ``matrix`` (..., n, n), symmetric: (..., 2, n), its diagonal and what is beside it.

    ``beside`` [i] stands between i and i + 1, with a zero at the end. By Householder's reflections (Golub and Van Loan, algorithm
    8.3.1), in float32 or better; NaN anywhere gives NaN.
    """
    matrix = exact(matrix)
    n = matrix.shape[-1]
    index = jnp.arange(n)

    def step(i: jax.Array, carried: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        matrix, diagonal, beside = carried
        column = lax.dynamic_index_in_dim(matrix, i, -1, keepdims=False)
        below = jnp.where(index > i, column, 0)
        first = jnp.where(index == i + 1, column, 0)
        corner = jnp.sum(first, axis=-1, keepdims=True)
        size = jnp.sqrt(jnp.sum(jnp.square(below), axis=-1, keepdims=True))
        image = jnp.where(corner > 0, -size, size)  # what the corner becomes: of the other sign, so nothing cancels
        v = below - jnp.where(index == i + 1, image, 0)
        squared = jnp.sum(jnp.square(v), axis=-1, keepdims=True)
        unit = v * lax.rsqrt(jnp.where(squared > 0, squared, 1))
        applied = jnp.einsum("...ij,...j->...i", matrix, unit, precision=lax.Precision.HIGHEST)
        along = jnp.sum(applied * unit, axis=-1, keepdims=True)
        turned = applied - along * unit
        matrix = matrix - 2 * (unit[..., :, None] * turned[..., None, :] + turned[..., :, None] * unit[..., None, :])
        there = index == i
        diagonal = jnp.where(there, jnp.sum(jnp.where(there, column, 0), axis=-1, keepdims=True), diagonal)
        return matrix, diagonal, jnp.where(there, image, beside)

    nothing = jnp.zeros(matrix.shape[:-1], matrix.dtype)
    _, diagonal, beside = lax.fori_loop(0, n, step, (matrix, nothing, nothing))
    return jnp.stack([diagonal, beside], axis=-2)


def eigenvalues(form: jax.Array) -> jax.Array:
    """The eigenvalues (..., n) in increasing order of the tridiagonal matrices ``form`` (..., 2, n) that :func:`tridiagonal` gives.

    By bisection on the number of negative pivots (Golub and Van Loan, 8.4.1), to 2^-26 of the largest magnitude, and never more exact
    than n roundings of it. NaN where a matrix has one.
    """
    diagonal, beside = form[..., 0, :], form[..., 1, :]
    n = diagonal.shape[-1]
    before = jnp.concatenate([jnp.zeros_like(beside[..., :1]), beside[..., :-1]], axis=-1)
    # every eigenvalue lies in a circle about an element of the diagonal (Gershgorin)
    reach = jnp.max(jnp.abs(diagonal) + jnp.abs(beside) + jnp.abs(before), axis=-1, keepdims=True)
    least = jnp.square(reach * jnp.finfo(form.dtype).eps) + jnp.finfo(form.dtype).tiny
    rows = (jnp.moveaxis(diagonal, -1, 0)[..., None], jnp.moveaxis(jnp.square(before), -1, 0)[..., None])
    wanted = jnp.arange(n)

    def below(x: jax.Array) -> jax.Array:
        """How many eigenvalues are below each of ``x``."""

        def pivot(carried: tuple[jax.Array, jax.Array], row: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
            last, count = carried
            own, coupling = row
            now = own - x - coupling / last
            now = jnp.where(jnp.abs(now) < least, -least, now)
            return (now, count + (now < 0).astype(count.dtype)), None

        start = (jnp.ones_like(x), jnp.zeros(x.shape, wanted.dtype))
        return lax.scan(pivot, start, rows, unroll=UNROLL)[0][1]

    def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        above = below(middle) <= wanted
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    ends = (jnp.broadcast_to(-reach, diagonal.shape), jnp.broadcast_to(reach, diagonal.shape))
    low, high = lax.fori_loop(0, BISECTIONS + 1, halve, ends)
    known = jnp.all(jnp.isfinite(form), axis=(-2, -1))[..., None]
    return jnp.where(known, (low + high) / 2, jnp.nan)
