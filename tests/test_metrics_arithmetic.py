"""Do the figures of a low-precision add say what is lost, and which way? Outside and inside jit and scan.

X.. are the exact and analytic properties, A.. reports of what went wrong elsewhere, M.. the formulas.
"""

from math import log2, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from resjax.errors import Refused
from resjax.health.metrics import (
    added,
    effective_bits,
    headroom,
    mean_error,
    precision_figures,
    round_to,
    rounding_error,
    signed_error,
    swallowed,
    update_error,
)
from resjax.residual.precision import plus
from ways import both_ways, normal

HALF = {"bfloat16": 7, "float16": 10}  # stored bits of the mantissa


# ---- what an add stores


@both_ways
def test_sums_about_100_and_at_the_end_of_float16(way):
    """X01, X02, X03, X54."""

    def sums(dtype: str, stream: float, *updates: float) -> list[float]:
        update = jnp.asarray(updates, dtype)
        return np.asarray(way(added)(update, jnp.full_like(update, stream))).tolist()

    assert float(jnp.float16(0.1)) == 0.0999755859375
    assert sums("float16", 100, 0.1, 0.03125, -0.03125, 0.0313) == [100.125, 100, 100, 100.0625]
    assert sums("bfloat16", 100, 0.1, 0.25, -0.25, 0.26) == [100, 100, 100, 100.5]
    assert sums("float16", 65504, 15, 16, 32) == [65504, np.inf, np.inf]
    lost = lambda dtype, u: float(way(swallowed)(jnp.full((1, 4), u, dtype), jnp.full((1, 4), 100, dtype)))  # noqa: E731
    assert [lost("float16", u) for u in (0.03125, 0.0313)] == [1, 0]
    assert [lost("bfloat16", u) for u in (0.25, 0.26)] == [1, 0]


def stream_add(update: np.ndarray, stream: np.ndarray) -> jax.Array:
    """The add of a connection."""
    return plus(jnp.asarray(stream), jnp.asarray(update))


def every(dtype: str) -> np.ndarray:
    """Every finite number of a half precision."""
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    return numbers[np.isfinite(numbers.astype(np.float32))]


@both_ways
@pytest.mark.parametrize("add", [stream_add, added], ids=["stream", "figures"])
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.03125), ("bfloat16", 0.25)])
def test_what_a_stream_of_100_swallows(dtype, bound, add, way):
    """X03, of all updates that there are: lost if, and only if, at most half the spacing at 100; the model's own add, and the figures'."""
    update = every(dtype)
    size = np.abs(update.astype(np.float32))
    after = np.asarray(way(add)(update, np.full_like(update, 100))).astype(np.float32)
    np.testing.assert_array_equal(after == 100, size <= bound)
    assert sorted({*after[(size > bound) & (size <= 2 * bound)]}) == [100 - 2 * bound, 100 + 2 * bound]


@both_ways
@pytest.mark.parametrize("add", [stream_add, added], ids=["stream", "figures"])
def test_where_float16_ends(add, way):
    """X54, of all updates that there are: 65,504 + u is infinite if, and only if, it reaches 65,520."""
    update = every("float16")
    after = np.asarray(way(add)(update, np.full_like(update, 65504))).astype(np.float32)
    np.testing.assert_array_equal(np.isinf(after), update >= 16)
    assert {*after[(update >= 0) & (update < 16)]} == {65504}


@both_ways
@pytest.mark.parametrize(("dtype", "at"), [("float16", 3e-4), ("bfloat16", 3e-3)])
def test_share_swallowed_at_a_ratio(dtype, at, way):
    """X04: all kept above 2^-(p+1), all lost up to 2^-(p+2), in between log2(2^-(p+1) / ratio); 2e5 samples, 0.01."""
    rng = np.random.default_rng(0)
    stream = jnp.asarray(2 ** rng.uniform(-3, 3, 200_000) * rng.choice([-1, 1], 200_000), dtype)
    sign = rng.choice([-1, 1], 200_000).astype(np.float32)

    def lost(size: float) -> float:
        return float(way(swallowed)(stream.astype(jnp.float32) * sign * size, stream))

    edge = 2.0 ** -(HALF[dtype] + 1)
    assert (lost(edge * 1.001), lost(edge / 2)) == (0, 1)
    assert lost(at) == pytest.approx(log2(edge / at), abs=0.01)


@pytest.mark.parametrize(("dtype", "end"), [("bfloat16", 256), ("float16", 2048)])
def test_counting_by_one_stops(dtype, end):
    """X05."""
    one = jnp.ones((), dtype)
    count = jax.jit(lambda: lax.scan(lambda h, _: (added(one, h).astype(dtype), None), 0 * one, length=3000)[0])()
    assert float(count) == end
    count = jnp.asarray(end - 5, dtype)
    for _ in range(10):
        count = added(one, count).astype(dtype)
    assert float(count) == end


@pytest.mark.parametrize("way", ["plain", "scan"])
def test_a_thousandth_added_to_one(way):
    """X06: 1 for ever when rounded to nearest; at random, the mean of 100 runs is that of the exact sum within 3 SE."""
    steps = 1000 if way == "scan" else 30
    thousandth = jnp.bfloat16(0.001)

    def step(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        nearest = added(jnp.full(1, thousandth), h[:1], "bfloat16")
        return jnp.concatenate([nearest, added(jnp.full(100, thousandth), h[1:], "bfloat16", "stochastic", key)]), None

    h, keys = jnp.ones(101), jax.random.split(jax.random.key(0), steps)
    if way == "scan":
        h = jax.jit(lambda h: lax.scan(step, h, keys)[0])(h)
    else:
        for key in keys:
            h, _ = step(h, key)
    h = np.asarray(h, np.float64)
    assert h[0] == 1
    want = 1 + steps * float(thousandth)
    assert steps == 30 or want == pytest.approx(1.99945, abs=1e-5)
    assert abs(h[1:].mean() - want) < 3 * h[1:].std() / 10
    assert h[1:].std() > 0.005


@both_ways
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rounding", ["nearest", "truncating", "stochastic"])
def test_a_power_of_two_changes_no_rounding(rounding, dtype, way):
    """X07, of all powers that keep float16 within its normal numbers: so that a larger stream does not cure swallowing."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], (2, 1000))
    x, u = (
        jnp.asarray(s * 2 ** rng.uniform(*of, 1000), dtype) for s, of in zip(signs, ((0, 2), (-11, -3)), strict=True)
    )
    add = way(lambda u, x: added(u, x, None, rounding, jax.random.key(0)))
    want = np.asarray(add(u, x))
    assert np.any(want == np.asarray(x, np.float32)) or rounding == "stochastic"
    for k in (-3, -2, -1, 1, 2, 3, 6, 9, 13):
        factor = jnp.asarray(2.0**k, dtype)
        np.testing.assert_array_equal(add(u * factor, x * factor), want * 2.0**k)


@both_ways
@pytest.mark.parametrize(
    ("dtype", "errors", "lost"),
    [("float16", (0.002, 0.021, 0.21), None), ("bfloat16", (0.017, 0.166, 0.80), (0.018, 0.174, 0.776))],
)
def test_error_of_an_update_in_half_precision(dtype, errors, lost, way):
    """X08: Gaussian stream and update at RMS ratios of 0.1, 0.01, 0.001; 10 %."""
    figures = way(precision_figures)
    for i, r in enumerate((0.1, 0.01, 0.001)):
        got = figures(jnp.asarray(r * normal(4, 50_000, seed=1), dtype), jnp.asarray(normal(4, 50_000), dtype))
        assert float(got["update_error"]) == pytest.approx(errors[i], rel=0.1)
        assert float(got["effective_bits"]) == pytest.approx(-log2(errors[i]), abs=0.15)
        if lost:
            assert float(got["swallowed"]) == pytest.approx(lost[i], rel=0.1)


WAYS_TO_ROUND = ("nearest", "stochastic", "truncating")


@both_ways
def test_rounding_one_way_shows_in_the_sign(way):
    """A10: a single add of N(0, 1) to bfloat16: nothing if rounded, -0.28 % if truncated."""

    def figures(u: jax.Array, h: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        stored = [added(u, h, None, rounding, jax.random.key(0)) for rounding in WAYS_TO_ROUND]
        return [(signed_error(u, h, after), mean_error(u, h, after)) for after in stored]

    got = np.asarray(
        way(figures)(jnp.asarray(normal(1, 4, 4096, seed=1)), jnp.asarray(normal(1, 4, 4096), jnp.bfloat16))
    )
    np.testing.assert_allclose(got[:, 0], [0, 0, -0.0028], atol=1e-4)
    np.testing.assert_allclose(got[:, 1], [0.0014, 0.0019, 0.0028], atol=1e-4)
    assert got[2, 0] == pytest.approx(-got[2, 1], rel=1e-6)


def test_rounding_one_way_wears_the_stream_down():
    """A10: after 72 adds of bfloat16 N(0, 1), d = 4,096, the norm is 0.9996 of that of the sum, or 0.913 truncated."""
    updates = jnp.asarray(normal(72, 1, 1, 4096, seed=1), jnp.bfloat16)
    first, keys = jnp.asarray(normal(1, 1, 4096), jnp.bfloat16), jax.random.split(jax.random.key(0), 72)
    exact = np.linalg.norm(np.asarray(updates, np.float64).sum(axis=0) + np.asarray(first, np.float64))
    for rounding, norm in zip(WAYS_TO_ROUND, (0.9996, 1.0, 0.913), strict=True):

        def step(h: jax.Array, x: tuple, rounding: str = rounding) -> tuple[jax.Array, tuple]:
            u, key = x
            after = added(u, h, None, rounding, key).astype(h.dtype)
            return after, (signed_error(u, h, after), mean_error(u, h, after))

        h, (signed, mean) = jax.jit(lambda step=step: lax.scan(step, first, (updates, keys)))()
        assert np.linalg.norm(np.asarray(h, np.float64)) / exact == pytest.approx(norm, abs=3e-3), rounding
        bias = np.abs(signed) / mean
        assert np.all(bias > 0.99) if rounding == "truncating" else np.all(bias < 0.1), rounding


@both_ways
def test_headroom(way):
    """A11: 66,246 is beyond float16 and far below the end of bfloat16, and it shows before the add that overflows."""
    x = jnp.asarray([[[1.0, -66246.0]]])
    in_half = lambda x: headroom(x, "float16")  # noqa: E731
    assert float(way(in_half)(x)) == pytest.approx(log2(65504 / 66246), abs=1e-5)
    assert float(way(in_half)(x / 4)) == pytest.approx(2 + log2(65504 / 66246), abs=1e-5)
    assert float(way(headroom)(x.astype(jnp.bfloat16))) > 100
    assert float(way(headroom)(x.astype(jnp.float16))) == -np.inf
    overflow = way(precision_figures)(jnp.full((1, 2), 800, jnp.float16), jnp.full((1, 2), 65000, jnp.float16))
    assert float(overflow["headroom"]) == -np.inf == float(overflow["effective_bits"])
    assert float(overflow["update_error"]) == np.inf == float(overflow["signed_error"])


# ---- rounding itself


def truncated(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> the same with the mantissa cut off; normal numbers."""
    mask = np.uint32((0xFFFFFFFF << (23 - HALF[dtype])) & 0xFFFFFFFF)
    return (np.asarray(x, np.float32).view(np.uint32) & mask).view(np.float32)


@both_ways
@pytest.mark.parametrize("dtype", HALF)
def test_rounding_against_numpy(dtype, way):
    """Nearest is the cast, truncating the cut mantissa, stochastic one of the two neighbours and right in the mean."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=20_000) * 2.0 ** rng.integers(-9, 12, 20_000)).astype(np.float32)
    x = x[np.abs(x) > 1e-4]  # of float16's normal numbers
    np.testing.assert_array_equal(way(lambda x: round_to(x, dtype))(x), x.astype(dtype).astype(np.float32))
    low = truncated(x, dtype)
    np.testing.assert_array_equal(way(lambda x: round_to(x, dtype, "truncating"))(x), low)
    drawn = np.asarray(way(lambda x: round_to(x, dtype, "stochastic", jax.random.key(0)))(x), np.float64)
    step = np.ldexp(1.0, np.frexp(x)[1] - 1 - HALF[dtype]) * np.sign(x)
    assert np.all((drawn == low) | (drawn == low + step))
    error = (drawn - x) / step
    assert abs(error.mean()) < 4 * error.std() / sqrt(len(x)) and error.std() > 0.3
    exact = way(lambda x: round_to(x, dtype, "stochastic", jax.random.key(0)))(low)
    np.testing.assert_array_equal(exact, low)


@pytest.mark.parametrize("rounding", ["nearest", "truncating", "stochastic"])
def test_rounding_of_what_is_no_ordinary_number(rounding):
    round_ = jax.jit(lambda x: round_to(x, "float16", rounding, jax.random.key(0)))
    x = jnp.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65510, 1e6, -1e6, 3e38, 2e-5, -1e-30])
    got = np.asarray(round_(x))
    np.testing.assert_array_equal(got[:6], [0, 0, np.inf, -np.inf, np.nan, 65504])
    assert np.signbit(got[1])
    largest = 65504 if rounding == "truncating" else np.inf
    np.testing.assert_array_equal(got[7:10], [largest, -largest, largest])
    assert got[6] in ((65504, np.inf) if rounding == "stochastic" else (65504,))
    assert set(np.abs(got[10:])) <= {0.0, 2.0**-14 if rounding == "stochastic" else 0.0}
    many = np.asarray(round_(jnp.full(100_000, 2e-5)), np.float64)
    assert many.mean() == pytest.approx(2e-5 if rounding == "stochastic" else 0, rel=0.02)


def test_roundings_that_are_refused():
    x = jnp.ones(3)
    with pytest.raises(Refused, match=r"rounding is 'trunc'.*did you mean 'truncating'"):
        round_to(x, "bfloat16", "trunc")
    with pytest.raises(Refused, match="needs a key"):
        round_to(x, "bfloat16", "stochastic")
    with pytest.raises(Refused, match="not float32"):
        round_to(x, "float32", "truncating")


@both_ways
@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 100.0])
def test_rounding_error_of_a_float32_add(scale, way):
    h, u = normal(1000), scale * normal(1000, seed=1)
    after = h + u
    want = after.astype(np.float64) - (h.astype(np.float64) + u)
    np.testing.assert_allclose(way(rounding_error)(u, h, after), want, rtol=1e-7, atol=3e-16)  # float64 rounds too
    assert float(way(update_error)(u, h)) == pytest.approx(np.linalg.norm(want) / np.linalg.norm(u), rel=1e-5)


def test_an_exact_add_and_figures_of_no_update():
    one, two = jnp.ones((2, 3, 4)), jnp.full((2, 3, 4), 2.0)
    exact = precision_figures(one, two)
    assert (float(exact["update_error"]), float(exact["effective_bits"]), float(exact["swallowed"])) == (0, np.inf, 0)
    nothing = precision_figures(0 * one, two)
    assert np.isnan([nothing[k] for k in ("swallowed", "update_error", "effective_bits")]).all()
    assert float(nothing["signed_error"]) == 0
    assert float(effective_bits(one, two, two)) == 0, "an update lost altogether is an error as large as itself"
