"""Are the readers of a buffer of rows what they say, with their hand-written gradients, and blind to rows that are not there?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resjax.residual.parameters import orthonormal
from resjax.residual.rows import added_to, mixed, picked, push, scored

ROWS, BATCH, LENGTH, WIDTH, VIEWS = 5, 2, 3, 4, 2
BUFFER = jax.random.normal(jax.random.key(0), (ROWS, BATCH, LENGTH, WIDTH))
QUERIES = jax.random.normal(jax.random.key(1), (VIEWS, WIDTH))
PER_ROW = jax.random.normal(jax.random.key(2), (VIEWS, ROWS))
PER_TOKEN = jax.random.normal(jax.random.key(3), (VIEWS, ROWS, BATCH, LENGTH))


def there(last: int) -> jax.Array:
    return (jnp.arange(ROWS) <= last).astype(jnp.float32)


def plainly_mixed(weights: jax.Array, buffer: jax.Array, last: int) -> tuple[jax.Array, jax.Array]:
    letters = "cr,rbtd,r->cbtd" if weights.ndim == 2 else "crbt,rbtd,r->cbtd"
    return jnp.einsum(letters, weights, buffer, there(last)), buffer


def plainly_scored(queries: jax.Array, buffer: jax.Array, last: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores = jnp.einsum("cd,rbtd,r->crbt", queries, buffer, there(last))
    return scores, jnp.einsum("rbtd,r->rbt", buffer**2, there(last)) / WIDTH, buffer


@pytest.mark.parametrize("last", (0, 2, ROWS - 1))
@pytest.mark.parametrize(
    ("reader", "plain", "first"),
    (
        pytest.param(mixed, plainly_mixed, PER_ROW, id="mixed"),
        pytest.param(mixed, plainly_mixed, PER_TOKEN, id="mixed by token"),
        pytest.param(scored, plainly_scored, QUERIES, id="scored"),
        pytest.param(scored, plainly_scored, QUERIES[:0], id="squares only"),
    ),
)
def test_readers_and_their_gradients_are_those_of_the_plain_sums(reader, plain, first, last):
    def loss(reader, first, buffer):
        # the buffer that is handed on is used too: its gradient must come through the reader, with the reader's own added
        *found, after = reader(first, buffer, jnp.asarray(last))
        return sum(jnp.sum(jnp.sin(x)) for x in found) + jnp.sum(jnp.cos(after * 1.5))

    np.testing.assert_allclose(
        loss(reader, first, BUFFER), loss(plain, first, BUFFER), rtol=1e-6, err_msg="values differ"
    )
    ours = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)(reader, first, BUFFER)
    theirs = jax.grad(loss, argnums=(1, 2))(plain, first, BUFFER)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reader", (mixed, scored))
def test_a_row_that_is_not_there_is_never_read(reader):
    """Not even a NaN in it: 0 times NaN would be NaN."""
    first = PER_ROW if reader is mixed else QUERIES
    spoilt = BUFFER.at[3:].set(jnp.nan)

    def loss(buffer):
        return sum(jnp.sum(x) for x in reader(first, buffer, jnp.asarray(2))[:-1])

    assert jnp.isfinite(loss(spoilt))
    gradient = jax.grad(loss)(spoilt)
    assert jnp.all(jnp.isfinite(gradient))
    np.testing.assert_array_equal(gradient[3:], 0.0)


def test_half_precision_buffers_are_summed_in_float32_and_rounded_once():
    rows = jnp.concatenate([jnp.ones((1, 1, 1)), jnp.full((256, 1, 1), 2.0**-8)]).astype(jnp.bfloat16)
    (total,), _ = mixed(jnp.ones((1, 257)), rows, jnp.asarray(256))
    assert total.dtype == jnp.bfloat16
    assert float(total.squeeze()) == 2.0  # one by one in bfloat16 it would stay at 1
    scores, squares, buffer = scored(jnp.ones((1, 1)), rows, jnp.asarray(256))
    assert (scores.dtype, squares.dtype, buffer.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)


def test_picking_and_adding_to_a_row_have_the_gradients_of_indexing():
    row = jnp.full((BATCH, LENGTH, WIDTH), 3.0)
    weights = jax.random.normal(jax.random.key(9), BUFFER.shape)

    def ours(buffer, row):
        one, buffer = picked(buffer, jnp.asarray(3))
        return jnp.sum(jnp.sin(one)) + jnp.sum(weights * jnp.cos(added_to(buffer, row, jnp.asarray(2))))

    def plain(buffer, row):
        return jnp.sum(jnp.sin(buffer[3])) + jnp.sum(weights * jnp.cos(buffer.at[2].add(row)))

    np.testing.assert_allclose(ours(BUFFER, row), plain(BUFFER, row), rtol=1e-6)
    for a, b in zip(jax.grad(ours, (0, 1))(BUFFER, row), jax.grad(plain, (0, 1))(BUFFER, row), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_push_gives_its_row_the_gradient_that_stands_there():
    def loss(row):
        return jnp.sum(push(BUFFER, row, jnp.asarray(2)) ** 2)

    row = jnp.full((BATCH, LENGTH, WIDTH), 3.0)
    np.testing.assert_allclose(jax.grad(loss)(row), 6.0)


@pytest.mark.parametrize("columns", (1, 4, 16))
def test_orthonormal_starts_are_orthonormal(columns):
    drawn = orthonormal(jax.random.key(5), 16, columns, "mixer_dynamic")[...]
    np.testing.assert_allclose(drawn.T @ drawn, np.eye(columns), atol=1e-6)


def test_many_orthonormal_starts_at_once_come_to_an_end():
    """A QR decomposition in each block and site waited for ever on a CPU with few cores."""

    def build(key):
        return [orthonormal(jax.random.fold_in(key, i), 16, 4, "mixer_dynamic")[...] for i in range(4)]

    built = jax.jit(jax.vmap(build))(jax.random.split(jax.random.key(0), 24))
    assert all(jnp.all(jnp.isfinite(x)) for x in built)
