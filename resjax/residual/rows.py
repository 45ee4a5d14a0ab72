"""How is a buffer of earlier outputs written, weighted and searched, without passing over rows that are not there yet?

A buffer is (rows, batch, ..., width): row 0 the embedding, then one row a site (or a block, where the carry is an outer one). What reads
it goes row by row up to the last one there, and hands the buffer on: the gradient then comes back through the reader, which adds its
share row by row to the one array there is. Sums over all rows at once took an array of the buffer's size a reader, and on a CPU 5 to 10
times as long.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from resjax.residual.precision import exact, plus, wide


def opened(embedded: jax.Array, rows: int) -> jax.Array:
    """A buffer of ``rows`` rows, the first one written."""
    return jnp.zeros((rows, *embedded.shape), embedded.dtype).at[0].set(embedded)


@jax.custom_vjp
def push(buffer: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """The buffer with ``row`` at ``index``.

    Its transpose leaves the buffer's gradient as it is: what stood in that row before was never read, so no one asks for its gradient,
    and clearing it would copy the whole buffer at every site.
    """
    return put(buffer, row, index)


def _row_and_rest(index: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The gradients of a buffer and of what went into its row at ``index``."""
    return gradient, row_of(gradient, index), None


push.defvjp(lambda buffer, row, index: (push(buffer, row, index), index), _row_and_rest)


@jax.custom_vjp
def added_to(buffer: jax.Array, update: jax.Array, index: jax.Array) -> jax.Array:
    """The buffer with ``update`` added to the row at ``index``.

    The gradient of the row before is that of the row after, so the buffer's gradient serves as it is; what reading and writing the
    row would give by themselves is one copy of the buffer to clear it there and another to put it back.
    """
    return put(buffer, plus(row_of(buffer, index), update), index)


added_to.defvjp(lambda buffer, update, index: (added_to(buffer, update, index), index), _row_and_rest)


@jax.custom_vjp
def picked(buffer: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One row, and the buffer to be used in its place: the row's gradient is added to the one array there is."""
    return row_of(buffer, index), buffer


picked.defvjp(
    lambda buffer, index: (picked(buffer, index), index),
    lambda index, gradients: (grown(gradients[1], exact(gradients[0]), index), None),
)


@jax.custom_vjp
def mixed(weights: jax.Array, buffer: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``sum_{j <= last} w_cj v_j`` for every c, and the buffer.

    Args:
      weights: (c, rows), or (c, rows, batch, ...) for one a token; of rows after ``last`` they do not matter.
      buffer: (rows, batch, ..., width).
      last: the last row there.

    Returns:
      ``(c, batch, ..., width)``, summed in float32 or better, in the buffer's dtype; and the buffer, to be used in its place.
    """
    start = jnp.zeros((len(weights), *buffer.shape[1:]), wide(buffer.dtype))

    def add(j: jax.Array, sums: jax.Array) -> jax.Array:
        v = exact(row_of(buffer, j))
        return sums + spread(row_of(weights, j, 1), v) * v

    return rows_to(last, buffer, add, start).astype(buffer.dtype), buffer


def _mixed_forward(weights: jax.Array, buffer: jax.Array, last: jax.Array) -> tuple[Any, tuple]:
    return mixed(weights, buffer, last), (weights, buffer, last)


def _mixed_backward(kept: tuple, gradients: tuple) -> tuple[jax.Array, jax.Array, None]:
    weights, buffer, last = kept
    of_sums, of_buffer = exact(gradients[0]), gradients[1]
    letters = "...d,c...d->c..." if weights.ndim > 2 else "...d,c...d->c"

    def add(j: jax.Array, so_far: tuple) -> tuple:
        of_weights, of_buffer = so_far
        v = exact(row_of(buffer, j))
        share = jnp.einsum(letters, v, of_sums, precision="highest").astype(weights.dtype)
        terms = [w * g for w, g in zip(spread(row_of(weights, j, 1), v), of_sums, strict=True)]
        return put(of_weights, share, j, 1), grown(of_buffer, sum(terms[1:], start=terms[0]), j)

    return *rows_to(last, buffer, add, (jnp.zeros_like(weights), of_buffer)), None


mixed.defvjp(_mixed_forward, _mixed_backward)


@jax.custom_vjp
def scored(queries: jax.Array, buffer: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``<q_c, v_j>`` and the mean square of ``v_j`` for every row up to ``last``, 0 for those after it; and the buffer.

    Args:
      queries: (c, width).
      buffer: (rows, batch, ..., width).
      last: the last row there.

    Returns:
      ``(c, rows, batch, ...)`` and ``(rows, batch, ...)``, float32 or better; and the buffer, to be used in its place.
    """
    shape, dtype = buffer.shape[:-1], wide(buffer.dtype)

    def add(j: jax.Array, found: tuple) -> tuple:
        scores, squares = found
        v = exact(row_of(buffer, j))
        score = jnp.einsum("...d,cd->c...", v, queries.astype(dtype), precision="highest")
        square = jnp.einsum("...d,...d->...", v, v, precision="highest") / v.shape[-1]
        return put(scores, score, j, 1), put(squares, square, j)

    start = jnp.zeros((len(queries), *shape), dtype), jnp.zeros(shape, dtype)
    return *rows_to(last, buffer, add, start), buffer


def _scored_forward(queries: jax.Array, buffer: jax.Array, last: jax.Array) -> tuple[Any, tuple]:
    return scored(queries, buffer, last), (queries, buffer, last)


def _scored_backward(kept: tuple, gradients: tuple) -> tuple[jax.Array, jax.Array, None]:
    queries, buffer, last = kept
    of_scores, of_squares, of_buffer = gradients
    wide_queries = queries.astype(of_scores.dtype)

    def add(j: jax.Array, so_far: tuple) -> tuple:
        of_queries, of_buffer = so_far
        v = exact(row_of(buffer, j))
        of_score, of_square = row_of(of_scores, j, 1), row_of(of_squares, j)[..., None]
        terms = [g[..., None] * q for g, q in zip(of_score, wide_queries, strict=True)]
        total = sum(terms, start=2.0 / v.shape[-1] * of_square * v)
        share = jnp.einsum("c...,...d->cd", of_score, v, precision="highest")
        return of_queries + share, grown(of_buffer, total, j)

    start = jnp.zeros_like(wide_queries), of_buffer
    of_queries, of_buffer = rows_to(last, buffer, add, start)
    return of_queries.astype(queries.dtype), of_buffer, None


scored.defvjp(_scored_forward, _scored_backward)


def rows_to(last: jax.Array, buffer: jax.Array, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """``body(j, so_far)`` for the rows 0 to ``last`` of the buffer."""
    count = jnp.minimum(jnp.asarray(last, jnp.int32), len(buffer) - 1) + 1
    return jax.lax.fori_loop(0, count, body, start)


def row_of(x: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def put(x: jax.Array, row: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, row, index, axis)


def grown(x: jax.Array, more: jax.Array, index: jax.Array) -> jax.Array:
    """``x`` with ``more`` added to one row, the sum rounded to x's dtype once."""
    return put(x, (exact(row_of(x, index)) + more).astype(x.dtype), index)


def spread(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Weights (c,), or (c, batch, ...), with axes of size 1 behind to multiply v (batch, ..., width)."""
    return weights.reshape(*weights.shape, *(1,) * (v.ndim + 1 - weights.ndim)).astype(v.dtype)


def at_row(index: Any, rows: int) -> jax.Array:
    """1 at one row, 0 at the others; float32."""
    return (jnp.arange(rows) == jnp.asarray(index, jnp.int32)).astype(jnp.float32)
