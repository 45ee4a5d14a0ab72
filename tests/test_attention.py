"""Does attention in blocks of queries equal the plain form, at every length and in every precision?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit import fast
from resjax.branches.attention import attend


def plain(q, k, v):
    """Scores of all pairs, a mask, a softmax: float64 NumPy."""
    scores = np.einsum("bhqc,bhkc->bhqk", q, k)
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkc->bhqc", weights / weights.sum(-1, keepdims=True), v)


def inputs(length, scale=1.0):
    return [np.random.default_rng(i).normal(size=(2, 2, length, 4)) * scale for i in range(3)]


@pytest.mark.parametrize("length", [1, 63, 128, 200, 256, 300])
def test_blocks_of_queries_equal_the_plain_form(length):
    q, k, v = inputs(length)
    got = attend(*(jnp.asarray(a, jnp.float32) for a in (q, k, v)))
    np.testing.assert_allclose(got, plain(q, k, v), rtol=0, atol=4e-6)  # outputs reach 3: some units in the last place


@pytest.mark.parametrize("length", [5, 200])
def test_no_token_sees_a_later_one(length):
    q, k, v = (jnp.asarray(a, jnp.float32) for a in inputs(length))
    seen = jax.jacrev(lambda v: attend(q, k, v)[0, 0, :, 0].astype(jnp.float32))(v)[:, 0, 0, :, 0]
    assert np.all(np.triu(seen, 1) == 0.0)
    assert np.all(np.tril(seen)[np.tril_indices(length)] > 0.0)


def test_large_scores_do_not_overflow():
    q, k, v = inputs(130, scale=60.0)
    got = attend(*(jnp.asarray(a, jnp.float32) for a in (q, k, v)))
    np.testing.assert_allclose(got, plain(q, k, v), rtol=0, atol=0.05)
    gradient = jax.grad(lambda q: jnp.sum(jnp.sin(attend(q, jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)))))
    assert np.all(np.isfinite(gradient(jnp.asarray(q, jnp.float32))))


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 0.05), (jnp.float16, 0.007)])
def test_half_precision_keeps_its_dtype(dtype, error):
    """Errors stay at a few units in the last place of outputs that reach 3 (2^-8 and 2^-11 relative), as in the plain form."""
    q, k, v = inputs(256)
    got = attend(*(jnp.asarray(a, dtype) for a in (q, k, v)))
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), plain(q, k, v), rtol=0, atol=error)


@pytest.mark.parametrize("length", [8, 700])
def test_float16_does_not_overflow_on_the_way(length):
    """Scores beyond 65,504, and equal weights on so many keys that their values do not sum in float16."""
    signs = np.sign(np.random.default_rng(0).normal(size=(1, 1, length, 64)))
    like = signs * (60.0 if length == 8 else 0.0)  # each query scores 64 x 3,600 on its own key
    q, k, v = (jnp.asarray(a, jnp.float16) for a in (like, like, np.full((1, 1, length, 4), 100.0)))

    def both(q, k, v):
        got, pull = jax.vjp(attend, q, k, v)
        return got, pull(jnp.ones_like(got))

    got, gradients = fast(both)(q, k, v)
    np.testing.assert_allclose(got.astype(jnp.float32), 100.0, rtol=2e-3)
    assert got.dtype == jnp.float16
    for gradient in gradients:
        assert gradient.dtype == jnp.float16 and bool(jnp.all(jnp.isfinite(gradient)))
