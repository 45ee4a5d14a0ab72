"""Do the metrics say what they claim? Known cases, exact properties, what is extreme; outside and inside jit and scan.

X.. are the exact and analytic properties, A.. reports of what went wrong elsewhere, M.. the formulas.
"""

import functools
from collections.abc import Callable
from math import acos, atan, comb, e, log, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kit import fast
from resjax.errors import Refused
from resjax.health import geometry, spectra
from resjax.health.metrics import (
    angular_distance,
    attention_figures,
    block_influence,
    centred,
    cka,
    collapse,
    composite_norm,
    cosine,
    effective_rank,
    growth,
    lengths,
    participation_ratio,
    ranks,
    ranks_on_host,
    ratio,
    ratio_frobenius,
    residual_norm,
    stable_rank,
    token_cosine,
)
from ways import normal, scanned


def inside(f: Callable) -> Callable:
    """``f`` in a scan in a compiled program."""
    return scanned(f, fast)


# ---- tokens (M1, M2)


def test_tokens_of_which_the_answer_is_known():
    """X50: 0 for orthonormal tokens, 1 for identical ones, 0 +- 1 / sqrt(d) for Gaussian ones."""
    mean_cosine = inside(token_cosine)
    assert float(mean_cosine(jnp.eye(8)[None])) == pytest.approx(0, abs=1e-6)
    assert float(mean_cosine(jnp.tile(normal(1, 1, 16), (2, 5, 1)))) == pytest.approx(1, abs=1e-6)
    assert abs(float(mean_cosine(normal(2, 64, 256)))) < 1 / 16
    pairs = inside(jax.vmap(lambda pair: token_cosine(pair[None])))(normal(4000, 2, 256))
    assert abs(np.mean(pairs)) < 4 / 16 / sqrt(4000)
    assert np.std(pairs) == pytest.approx(1 / 16, rel=0.05)
    of_centred = inside(lambda x: token_cosine(x, centre=True))
    offset = normal(2, 64, 256) + 10 * normal(256, seed=1)
    assert float(mean_cosine(offset)) > 0.9 and abs(float(of_centred(offset))) < 1 / 16


def test_centred_token_cosine_is_its_formula():
    """M1c, over all pairs of tokens of a sample, the mean over samples and tokens taken off."""
    x = normal(3, 5, 8) + 1
    left = x - x.mean((0, 1))
    unit = left / np.linalg.norm(left, axis=-1, keepdims=True)
    products = np.einsum("bid,bjd->bij", unit, unit)
    want = np.mean([products[b][~np.eye(5, dtype=bool)].mean() for b in range(3)])
    assert float(token_cosine(jnp.asarray(x), centre=True)) == pytest.approx(want, abs=1e-6)


def test_a_common_offset_is_no_residual():
    """X50: res(X + 1 v^T) = res(X); the mean of its rows is zero."""
    x, v = normal(2, 32, 16), 3 * normal(16, seed=1)
    left = inside(centred)(x)
    np.testing.assert_allclose(left, inside(centred)(x + v), atol=3e-6)
    np.testing.assert_allclose(left, x - x.mean(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(np.mean(left, axis=1), 0, atol=1e-6)


def test_residual_norms_are_their_formulas():
    """M2, and the composite norm of Dong et al.; whatever the scale."""
    x = normal(2, 6, 4) + 1
    left = x - x.mean(1, keepdims=True)
    frobenius = np.linalg.norm(left, axis=(1, 2)) / np.linalg.norm(x, axis=(1, 2))
    size = lambda a: np.sqrt(np.abs(a).sum(1).max(1) * np.abs(a).sum(2).max(1))  # noqa: E731
    np.testing.assert_allclose(composite_norm(jnp.asarray(x)), size(x), rtol=1e-6)
    for scale in (1, 1e-25, 1e25):
        np.testing.assert_allclose(residual_norm(jnp.asarray(x * scale)), frobenius, rtol=1e-5)
        got = residual_norm(jnp.asarray(x * scale), norm="composite")
        np.testing.assert_allclose(got, size(left) / size(x), rtol=1e-5)


def test_a_norm_that_there_is_not():
    with pytest.raises(Refused, match="norm is 'spectral'"):
        residual_norm(jnp.ones((2, 3)), norm="spectral")


def test_a_massive_token_does_not_spoil_the_residual_of_the_others():
    x = normal(1, 64, 16)
    x[0, 0] *= 1e4
    want = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(centred(jnp.asarray(x))[0, 1:], want[0, 1:], atol=1e-4)


# ---- updates (M4, M10)


def test_growth_of_every_token_from_ratio_and_cosine():
    """M4: g^2 = 1 + r^2 + 2 r a."""
    h, u = normal(64, 16), normal(64, 16, seed=1) * np.geomspace(1e-3, 10, 64, dtype=np.float32)[:, None]
    r, a, g = (inside(jax.vmap(f))(*pair) for f, pair in ((ratio, (u, h)), (cosine, (u, h)), (growth, (h, h + u))))
    np.testing.assert_allclose(g**2, 1 + r**2 + 2 * r * a, rtol=1e-5)
    assert r.shape == (64,) and np.ptp(a) > 0.5
    want = np.linalg.norm(u.astype(np.float64)) / np.linalg.norm(h.astype(np.float64))
    assert float(inside(ratio_frobenius)(u, h)) == pytest.approx(want, rel=1e-5)
    assert float(inside(ratio)(u, h)) == pytest.approx(float(np.mean(r)), rel=1e-5)


@pytest.mark.parametrize(
    ("r", "wanted"),
    [(0.1, (1.0050, 0.0317, 0.0050)), (0.3, (1.0440, 0.0928, 0.0422)), (1, (1.414, 0.25, 0.293)), (1e-3, None)],
)
def test_an_orthogonal_update(r, wanted):
    """X38: growth sqrt(1 + r^2), angular distance arctan(r) / pi, block influence 1 - 1 / sqrt(1 + r^2); small ones too."""
    h = normal(3, 7, 16)
    u = normal(3, 7, 16, seed=1)
    u = u - h * np.sum(u * h, -1, keepdims=True) / np.sum(h * h, -1, keepdims=True)
    after = h + r * u * np.linalg.norm(h, axis=-1, keepdims=True) / np.linalg.norm(u, axis=-1, keepdims=True)
    got = [float(inside(f)(h, after)) for f in (growth, angular_distance, block_influence)]
    assert got == pytest.approx([sqrt(1 + r * r), atan(r) / pi, 1 - 1 / sqrt(1 + r * r)], rel=1e-3)
    if wanted:
        assert got == pytest.approx(wanted, abs=5e-4)


def test_ends_of_the_angular_distance():
    a = normal(2, 5, 8)
    of = fast(lambda a, b: (angular_distance(a, b), block_influence(a, b)))
    assert [float(v) for v in of(a, 3 * a)] == pytest.approx([0, 0], abs=1e-7)
    assert [float(v) for v in of(a, -a)] == pytest.approx([1, 2], abs=1e-6)
    assert np.isnan(of(a, 0 * a)).all()
    layers = np.stack([a, -a])
    pairs = fast(jax.vmap(jax.vmap(angular_distance, (None, 0)), (0, None)))(layers, layers)
    np.testing.assert_allclose(pairs, [[0, 1], [1, 0]], atol=1e-6)


def test_ratios_where_the_stream_is_zero():
    zero, one = jnp.zeros((1, 2, 4)), jnp.ones((1, 2, 4))
    assert float(ratio(one, zero)) == np.inf and np.isnan(ratio(zero, zero)) and float(ratio(zero, one)) == 0
    assert float(ratio_frobenius(one, zero)) == np.inf and np.isnan(cosine(zero, one))


def test_equal_branches_on_a_stream():
    """X39: r_l = sqrt(v_b / (v_0 + l v_b)), 1 / sqrt(l + 1) for equal variances, below 0.1 only from l = 100."""
    h, ratios = normal(2, 4, 4096), []
    for l in range(103):
        u = normal(2, 4, 4096, seed=1 + l)
        if l in (0, 1, 3, 24, 98, 101):
            ratios.append(float(inside(ratio)(u, h)))
            assert ratios[-1] == pytest.approx(1 / sqrt(l + 1), rel=0.02)
        h = h + u
    assert ratios[-2] > 0.1 > ratios[-1]


# X39: depth, (attention, MLP) of the first blocks and of the last one, at GPT-2's start; see below.
GPT2 = [(12, [(0.39, 2.37), (0.34, 0.87), (0.30, 0.64)], (0.16, 0.26)), (24, [(0.28, 1.75)], (0.12, 0.18))]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "first", "last"), GPT2)
def test_update_ratios_of_gpt2_at_the_start(depth, first, last):
    """X39: width 768, 128 tokens, std 0.02, embeddings and positions 0.02, what writes divided by sqrt(2 L); 2 draws, 10 %."""
    width, length, heads = 768, 128, 12
    matrix = lambda *shape: 0.02 * rng.standard_normal(shape, np.float32)  # noqa: E731
    normed = lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)  # noqa: E731
    hidden = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    draws = []
    for draw in range(2):
        rng, rows = np.random.default_rng(draw), []
        h = matrix(length, width) + matrix(length, width)
        for _ in range(depth):
            q, k, v = ((normed(h) @ matrix(width, width)).reshape(length, heads, -1).swapaxes(0, 1) for _ in "qkv")
            weights = np.exp(q @ k.swapaxes(1, 2) / sqrt(width // heads) + hidden)
            mixed = weights / weights.sum(-1, keepdims=True) @ v
            u = mixed.swapaxes(0, 1).reshape(length, width) @ matrix(width, width) / np.float32(sqrt(2 * depth))
            pair = [float(ratio(jnp.asarray(u), jnp.asarray(h)))]
            h = h + u
            inner = normed(h) @ matrix(width, 4 * width)
            gelu = inner * (1 + np.tanh(sqrt(2 / pi) * (inner + 0.044715 * inner**3))) / 2
            u = gelu @ matrix(4 * width, width) / np.float32(sqrt(2 * depth))
            rows.append((*pair, float(ratio(jnp.asarray(u), jnp.asarray(h)))))
            h = h + u
        draws.append(rows)
    got = np.mean(draws, axis=0)
    np.testing.assert_allclose([*got[: len(first)], got[-1]], [*first, last], rtol=0.1)


# ---- directions (M3, M11)


def test_ranks_of_which_the_answer_is_known():
    """X49: d for the identity, 1 for one direction; by the definition for a known spectrum."""
    of = inside(lambda x: ranks(x, centre=False))
    for d in (8, 64):
        got = of(jnp.eye(d))
        assert [float(got[k]) for k in spectra.RANKS] == pytest.approx([d, d, d, 0], rel=1e-4, abs=1e-5)
        one = of(np.outer(normal(d), normal(2 * d, seed=1)))
        assert [float(one[k]) for k in spectra.RANKS] == pytest.approx([1, 1, 1, 1 - 1 / d], rel=1e-4)
    singular = np.array([4.0, 2, 1, 1])
    p = singular / 8
    rotations = [np.linalg.qr(normal(n, n, seed=n))[0] for n in (4, 9)]
    x = (rotations[0] * singular) @ rotations[1][:4]
    for matrix in (x, x.T, 1e-20 * x, 1e20 * x):
        got = of(matrix.astype(np.float32))
        assert float(got["effective_rank"]) == pytest.approx(e ** -np.sum(p * np.log(p)), rel=1e-4)
        assert float(got["stable_rank"]) == pytest.approx(22 / 16, rel=1e-4)
        assert float(got["participation_ratio"]) == pytest.approx(22**2 / (256 + 16 + 1 + 1), rel=1e-4)


@pytest.mark.parametrize("shape", [(2, 96, 64), (2, 40, 256), (200, 64), (3, 2, 5, 12)])
def test_ranks_inside_a_program_and_on_the_host_agree(shape):
    x = normal(*shape) * np.geomspace(1, 0.3, shape[-1], dtype=np.float32) + np.float32(0.3)
    mask = np.random.default_rng(1).random(shape[:-1]) < 0.8
    for centre in (True, False):
        got = fast(lambda x, m, c=centre: ranks(x, m, c))(x, mask)
        want = ranks_on_host(x, mask, centre)
        for name in spectra.RANKS:
            assert got[name].shape == want[name].shape == shape[:-2]
            error = 0.01 if name == "stable_rank" else 2e-3
            np.testing.assert_allclose(got[name], want[name], rtol=error, atol=error, err_msg=name)
            assert name != "stable_rank" or np.all(got[name] > want[name] * (1 - 1e-4)), "from above"
    for name, alone in (("participation_ratio", participation_ratio), ("stable_rank", stable_rank)):
        np.testing.assert_allclose(fast(alone)(x, mask), ranks_on_host(x, mask)[name], rtol=0.01)
    np.testing.assert_allclose(fast(effective_rank)(x, mask), ranks_on_host(x, mask)["effective_rank"], rtol=2e-3)


def test_largest_eigenvalue_without_a_gap():
    """Within 1 % where all but the first nearly equal it, from below; and of many nearly equal ones."""
    largest = fast(spectra.largest_eigenvalue)
    for n in (16, 256):
        turn = np.linalg.qr(normal(n, n))[0]
        for values in (
            np.linspace(1, 0.99, n),
            np.linspace(1, 0, n),
            np.r_[1, np.full(n - 1, 0.999)],
            np.r_[1.0, np.zeros(n - 1)],
        ):
            matrix = (turn * values.astype(np.float32)) @ turn.T
            assert 0.985 < float(largest(matrix)) < 1 + 1e-5


@pytest.mark.parametrize("where", ["program", "host"])
def test_a_collapse_score_that_can_say_no_collapse(where):
    """A19: over the attainable rank, and centred."""

    def score(x: np.ndarray, mask: np.ndarray | None = None) -> float:
        if where == "host":
            return float(ranks_on_host(np.asarray(x, np.float32), mask)["collapse"])
        return float(fast(collapse)(jnp.asarray(x, jnp.float32), mask))

    opposite = np.eye(2, 768)[:1] * [[1], [-1]]
    assert score(opposite) == pytest.approx(0, abs=1e-6)
    assert score(opposite + 5) == pytest.approx(0, abs=1e-5)
    for n in (4, 64):
        assert -1e-4 < score(normal(n, 768)) < 0.015
    assert score(normal(1024, 768)) == pytest.approx(0.12, abs=0.01)
    assert score(np.tile(normal(1, 768), (8, 1))) == 1
    assert score(np.tile(normal(1, 768), (8, 1)) * (1 + 5e-8 * normal(8, 768, seed=1))) == 1, "rounding is no rank"
    assert score(np.outer(normal(8), normal(768))) == pytest.approx(1 - 1 / 7, abs=1e-3)
    padded = np.concatenate([normal(8, 768), np.full((4, 768), np.nan), np.zeros((20, 768))])
    assert score(padded, np.arange(32) < 8) == pytest.approx(score(normal(8, 768)), abs=1e-5)


def test_cka():
    """X49: 1 for a rotation and a factor, whatever the offset; small for independent streams; with more tokens than width and less."""
    similarity = inside(cka)
    for tokens, width in ((200, 16), (10, 64)):
        x = normal(2, tokens // 2, width)
        turn = np.linalg.qr(normal(width, width, seed=2))[0].astype(np.float32)
        assert float(similarity(x, 3 * x @ turn + 7)) == pytest.approx(1, abs=1e-5)
        other = normal(2, tokens // 2, width, seed=1)
        want = width / (tokens + width)
        assert float(similarity(x, other)) == pytest.approx(want, rel=0.3)
    x, y = (a - a.mean(0) for a in (normal(50, 4).astype(np.float64), normal(50, 6, seed=1).astype(np.float64)))
    y[:, :4] += x
    want = np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    for scale in (1, 1e-15, 1e15):
        assert float(similarity(np.float32(x * scale), np.float32(y))) == pytest.approx(want, rel=1e-4)


# ---- attention (M13)


def test_attention_from_logits():
    """Uniform and sharp attention, and the definition on random causal logits; what is not seen does not count."""
    figures = inside(attention_figures)
    uniform = figures(jnp.full((2, 4, 8, 8), 3.0))
    assert [float(v) for v in uniform.values()] == pytest.approx([1, 3, 0], abs=1e-6)
    sharp = figures(jnp.broadcast_to(500 * jnp.eye(8), (2, 4, 8, 8)))
    assert [float(v) for v in sharp.values()] == pytest.approx([0, 500, 500 * sqrt(7) / 8], rel=1e-5)

    logits = 3 * normal(2, 4, 8, 8)
    causal = np.tril(np.ones((8, 8), bool))
    entropies, variances, largest = [], [], 0.0
    for at in np.ndindex(2, 4, 8):
        row = logits[at][: at[2] + 1].astype(np.float64)
        largest = max(largest, np.abs(row).max())
        if len(row) > 1:
            p = np.exp(row) / np.exp(row).sum()
            entropies.append(-np.sum(p * np.log(p)) / log(len(row)))
            variances.append(row.var())
    want = [np.mean(entropies), largest, sqrt(np.mean(variances))]
    spoilt = np.where(causal, logits, np.nan)
    for given in (spoilt, np.where(causal, logits, -3e38)):
        assert [float(v) for v in figures(given, causal).values()] == pytest.approx(want, rel=1e-5)
    got = figures(np.where(causal, logits, -np.inf))
    assert [float(v) for v in got.values()] == pytest.approx(want, rel=1e-5)
    moved = figures(spoilt + 50, causal)
    assert [float(moved[k]) for k in ("entropy", "logit_std")] == pytest.approx([want[0], want[2]], rel=1e-4)
    keys = np.arange(8) < 5  # padding: keys and queries
    cut = figures(logits[..., :5, :5], causal[:5, :5])
    padded = figures(spoilt, causal & keys & keys[:, None])
    assert [float(v) for v in padded.values()] == pytest.approx([float(v) for v in cut.values()], rel=1e-5)


def test_attention_with_nothing_to_tell():
    figures = fast(attention_figures)
    one = figures(jnp.full((1, 3, 1), 2.0))
    assert np.isnan([one["entropy"], one["logit_std"]]).all() and float(one["largest_logit"]) == 2
    assert np.isnan([*figures(jnp.ones((3, 3)), jnp.zeros((3, 3), bool)).values()]).all()
    for bad in (np.nan, np.inf):
        assert np.isnan([*figures(np.where(np.eye(3), bad, 1.0).astype(np.float32)).values()]).all()
    of_half = jax.eval_shape(attention_figures, jnp.zeros((4, 8, 8), jnp.bfloat16))
    assert {v.dtype for v in of_half.values()} == {jnp.dtype("float32")}


def test_the_reshaped_mask_of_several_axes():
    """Pictures: tokens on two axes."""
    x, mask = normal(2, 3, 4, 8), np.random.default_rng(0).random((2, 3, 4)) < 0.7
    flat = (jnp.asarray(x.reshape(2, 12, 8)), jnp.asarray(mask.reshape(2, 12)))
    for centre in (False, True):
        want = token_cosine(*flat, centre=centre)
        assert float(token_cosine(jnp.asarray(x), jnp.asarray(mask), centre)) == pytest.approx(float(want), abs=1e-7)
    np.testing.assert_allclose(lengths(jnp.asarray(x)), np.linalg.norm(x, axis=-1), rtol=1e-6)
    assert float(geometry.token_mean(jnp.asarray(x[..., 0]), mask)) == pytest.approx(x[..., 0][mask].mean(), rel=1e-5)


# ---- networks in which tokens become alike


def aligned(layers: int) -> list[float]:
    """Cosine between two tokens after each layer of He's ReLU MLP without skips, from 0."""
    c, theory = 0.0, []
    for _ in range(layers):
        c = (sqrt(1 - c * c) + (pi - acos(c)) * c) / pi
        theory.append(c)
    return theory


def test_tokens_align_in_an_mlp_without_skips():
    """X20: He's ReLU MLP maps cosine c to (sqrt(1 - c^2) + (pi - arccos c) c) / pi; no attention is needed.

    64 draws of width 256, 0.03.
    """
    theory = aligned(10)
    assert [theory[i] for i in (0, 3, 6, 9)] == pytest.approx([0.318, 0.681, 0.809, 0.872], abs=6e-4)
    rng, draws, width, got = np.random.default_rng(0), 64, 256, []
    h = np.broadcast_to(16 * np.eye(8, width, dtype=np.float32), (draws, 8, width))
    for _ in range(10):
        weights = rng.standard_normal((draws, width, width), np.float32) * np.float32(sqrt(2 / width))
        h = np.maximum(h @ weights, 0)
        got.append(float(token_cosine(jnp.asarray(h))))
    np.testing.assert_allclose(got, theory, atol=0.03)
    assert np.all(np.diff(got) > 0)


def test_uniform_attention_leaves_no_residual():
    """X21: after one layer without a skip."""
    x, matrix = normal(2, 16, 8) + 1, normal(8, 8, seed=1)
    uniform = np.full((16, 16), 1 / 16, np.float32)

    def layer(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = jnp.matmul(uniform, x) @ matrix
        return residual_norm(after), collapse(after)

    left, score = inside(layer)(x)
    assert np.all(left < 1e-6) and np.all(score == 1)
    assert np.all(residual_norm(jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)) == 0)


def test_averaging_narrows_every_coordinate():
    """X22: max - min of P X is at most tau(P) times that of X, tau = 1 - min_ij sum_k min(P_ik, P_jk), for any row-stochastic P."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(200):
        rows = int(rng.integers(2, 12))
        weights = rng.dirichlet(np.full(rows, 10 ** rng.uniform(-1.5, 1)), size=rows)
        x = rng.normal(size=(rows, 5))
        tau = 1 - np.minimum(weights[:, None], weights[None]).sum(-1).min()
        narrowed = np.ptp(weights @ x, axis=0) / np.ptp(x, axis=0)
        assert np.all(narrowed <= tau + 1e-12)
        shares.append(narrowed.max() / tau if tau > 0 else 0)
    assert max(shares) > 0.9, "a bound that is nearly reached"


def test_frozen_attention_is_a_sum_over_paths():
    """X23: H^L paths without a skip, (1 + H)^L with it, C(L, l) H^l of length l; 8 and 27 for two heads and three layers."""
    rng, heads, depth, tokens, width = np.random.default_rng(0), 2, 3, 5, 4
    mixing = rng.dirichlet(np.ones(tokens), size=(depth, heads, tokens))
    values = rng.normal(size=(depth, heads, width, width)) / 2
    x = rng.normal(size=(tokens, width))

    for skip in (False, True):
        direct, paths = x, [(0, x)]
        for l in range(depth):
            steps = [lambda h, l=l, i=i: mixing[l, i] @ h @ values[l, i] for i in range(heads)]
            direct = sum((step(direct) for step in steps), start=direct if skip else 0 * direct)
            longer = [(count + 1, step(h)) for count, h in paths for step in steps]
            paths = (paths if skip else []) + longer
        assert len(paths) == (27 if skip else 8)
        np.testing.assert_allclose(sum(h for _, h in paths), direct, atol=1e-13)
        found = np.bincount([count for count, _ in paths], minlength=4).tolist()
        assert found == ([comb(depth, l) * heads**l for l in range(4)] if skip else [0, 0, 0, 8])
    assert found == [1, 6, 12, 8]


def test_attention_alone_collapses_by_cubes():
    """X24: for small weights ||res|| in the composite norm falls as the cube from layer to layer (Dong et al.), to round-off."""
    rng, tokens, width = np.random.default_rng(0), 8, 16
    x, left = rng.normal(size=(tokens, width)), []
    with jax.enable_x64(True):
        for layer in range(4):
            query_key = rng.normal(size=(width, width)) * 0.02
            value = rng.normal(size=(width, width)) / sqrt(width)
            logits = x @ query_key @ x.T
            weights = np.exp(logits - logits.max(1, keepdims=True))
            before = float(composite_norm(centred(jnp.asarray(x))))
            x = weights / weights.sum(1, keepdims=True) @ x @ value
            after = float(composite_norm(centred(jnp.asarray(x))))
            # 4 gamma beta: gamma at most sqrt(tokens), beta of the norms of both matrices
            beta = np.abs(query_key).sum(0).max() * float(composite_norm(jnp.asarray(value)))
            assert after <= 4 * sqrt(tokens) * beta * before**3 or after < 1e-14 * np.abs(x).max()
            left.append(float(residual_norm(jnp.asarray(x), norm="composite")))
            if layer and left[-1] > 1e-14:
                assert log(left[-1]) / log(left[-2]) > 2.9
    assert left[0] < 0.5 and left[1] < 1e-3 and left[2] < 1e-11 and left[3] < 1e-14


def test_paths_of_a_residual_net():
    """X53: lengths are Binomial(S, 1/2): mean 12 and SD 2.45 at 24 sub-layers; without one branch exactly half the paths are left."""

    of_length = functools.reduce(np.convolve, [[1, 1]] * 24)
    mean = np.sum(np.arange(25) * of_length) / 2**24
    spread = sqrt(np.sum((np.arange(25) - mean) ** 2 * of_length) / 2**24)
    assert (mean, spread) == (12, pytest.approx(2.45, abs=1e-3))
    # each branch is its input, so that the output counts the paths
    on = jnp.concatenate([jnp.ones((1, 24)), 1 - jnp.eye(24)])
    count = fast(jax.vmap(lambda on: lax.scan(lambda h, o: (h + o * h, None), jnp.float32(1), on)[0]))
    np.testing.assert_array_equal(count(on), [2**24] + 24 * [2**23])


def test_reductions_over_the_width_in_one_pass_are_those_one_by_one():
    """Arrays of several shapes and dtypes; NaN and infinities go where they belong and nowhere else."""
    x, y = jnp.asarray(normal(2, 3, 8)), jnp.asarray(normal(4, 2, 3, 8, seed=1))
    spoilt = x.at[0, 1, 2].set(jnp.nan).at[1, 0, 0].set(-jnp.inf)
    terms = {
        "squares": ("sum", x**2),
        "size": ("max", jnp.abs(x)),
        "of streams": ("sum", y),
        "count": ("sum", (x > 0).astype(jnp.int32)),
        "half": ("max", jnp.abs(x).astype(jnp.bfloat16)),
        "spoilt": ("sum", spoilt),
        "spoilt size": ("max", jnp.abs(spoilt)),
    }
    arrays = {name: array for name, (_, array) in terms.items()}
    found = inside(lambda arrays: geometry.over_width({name: (terms[name][0], x) for name, x in arrays.items()}))(
        arrays
    )
    assert set(found) == set(terms)
    for name, (kind, array) in terms.items():
        want = getattr(np, kind)(np.asarray(array, np.float64 if name != "count" else np.int32), axis=-1)
        assert found[name].dtype == (jnp.int32 if name == "count" else jnp.float32)
        np.testing.assert_allclose(np.asarray(found[name], np.float64), want, rtol=1e-5, err_msg=name)
    assert np.isnan(found["spoilt size"]).sum() == np.isinf(found["spoilt size"]).sum() == 1
