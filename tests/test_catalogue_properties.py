"""Do the analytic properties hold that tell the schemes of the catalogue apart: growth, gradients, mixing, what moves with the step?

X.. are properties of starts, norms and streams; A.. are reports of what went wrong elsewhere; the pattern over depth at the start
is that of a table of measured norms. Where a number is random, the seed is fixed.
"""

import dataclasses
import functools
from math import log, sqrt
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import (
    EVALUATION,
    KINDS,
    TOKENS,
    abstract,
    by_role,
    fast,
    forward,
    functional,
    make,
    perturbed,
    relative,
    stack,
    start,
)
from resjax.branches import MLP, Attention
from resjax.config import default
from resjax.config.scheme import scheme as scheme_of
from resjax.config.validate import resolve
from resjax.errors import Refused
from resjax.health.geometry import token_cosine
from resjax.residual import (
    CATALOGUE,
    Context,
    DepthPower,
    Frozen,
    Init,
    InitRule,
    Knob,
    Norm,
    NormDefaults,
    OptRule,
    Site,
)
from resjax.residual.entries.placement import MATRICES, XAVIER
from resjax.residual.entries.scaling import one_over_sqrt_sites
from resjax.residual.hyper import Fractions, Hyper
from resjax.residual.scheme import GAINS
from resjax.stack import Stack
from resjax.train.assemble import assemble
from resjax.train.optimizer import apply_updates, build, listing
from resjax.train.schedule import schedule
from resjax.train.state import create
from resjax.train.step import Recipe, make_evaluation, make_step
from test_catalogue import ALL, shared
from test_properties import EXACT, POST, PRE, XIONG, Bias, Matrix, Zeros, draws, normal, ones, real, seen
from test_schemes import assert_std, parts_of

UNGAINED = NormDefaults("layernorm", gain=False)
PLAINLY: dict[str, Any] = dict(norms=UNGAINED, init=XIONG)
RELU = Init("gain", gain=2**0.25, out_scale=1.0)  # a branch of two matrices with a ReLU between keeps the variance
SGD = SimpleNamespace(name="sgd", lr=0.1, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0, momentum=0.0)


# ---- token geometry: attention that is a mean over tokens


class Mean(nnx.Module):
    """A branch that gives every token the mean of all, through one matrix: uniform attention."""

    def __init__(self, width: int, key: jax.Array):
        self.inner = Matrix(width, key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.inner(jnp.mean(x, axis=-2, keepdims=True)), x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, "norm"])
@pytest.mark.parametrize("squared", [1.0, 1 / 12])
def test_tokens_align_by_uniform_attention(norm, squared):
    """X18, X19: p and q, the mean of the Gram matrix over all pairs and its diagonal, by their recursions. 32 tokens, 12 layers."""
    n, depth, d = 32, 12, 256
    scheme = PRE.but(norm_in=norm, scale=sqrt(squared))

    def cosine(model: Stack, key: jax.Array) -> jax.Array:
        h = jax.random.normal(jax.random.fold_in(key, 1), (1, n, d))
        return token_cosine(model(h, Context())[0])

    build_ = lambda key: stack(scheme, lambda kind, k: Mean(d, k), depth, d, ("attention",), **PLAINLY, key=key)  # noqa: E731
    got = draws(16, build_, cosine).mean()
    p, q = 1 / n, 1.0
    for _ in range(depth):
        added = squared * p / (1.0 if norm is None else q)
        p, q = p + added, q + added
    want = (n * p - q) / ((n - 1) * q)
    assert got == pytest.approx(want, abs=0.02)
    known = {(None, 1.0): 0.992, (None, 1 / 12): 0.048, ("norm", 1.0): 0.844}
    assert want == pytest.approx(known.get((norm, squared), want), abs=1e-3)


# ---- what becomes of the stream's path and of the gradient


@pytest.mark.parametrize("name", ["post_ln", "pre_ln"])
def test_the_identity_path_and_the_shares_of_the_branches(name):
    """X31: with branches of variance 1 that have nothing in common the skip's own gain is 2^(-S/2) under Post-LN, and the last
    branch has half of the variance; under Pre-LN the gain is 1 / sqrt(S + 1), and each branch has 1 / (S + 1).

    Embedding, branches (constants, so that the gradient takes the skip alone) and cotangent are orthogonal, of mean 0 and RMS 1.
    """
    sites, d = 24, 64
    directions = np.linalg.qr(np.concatenate([np.ones((d, 1)), normal(d, sites + 2)], axis=1))[0].T[1:] * sqrt(d)
    model = stack(name, lambda kind, key: Bias(d), sites, d, ("mlp",), norms=EXACT)
    model.runs[0].sites[0].branch.b[...] = jnp.asarray(directions[:sites], jnp.float32)
    h, g = (jnp.asarray(directions[i], jnp.float32).reshape(1, 1, d) for i in (sites, sites + 1))
    last = Norm("layernorm", d, EXACT) if name == "pre_ln" else lambda x: x

    @fast
    def run(model: Stack, h: jax.Array) -> Any:
        def whole(h: jax.Array) -> Any:
            out, got = model(h, Context(measure=lambda flow: {"sum": flow.kept + flow.update}))
            return last(out), got["sum"]

        _, back, sums = jax.vjp(whole, h, has_aux=True)
        return back(g)[0], sums

    gradient, sums = run(model, h)
    top = np.asarray(sums, np.float64)[-1].reshape(d)
    shares = np.square(directions[:sites] @ top) / d / np.sum(top**2)
    np.testing.assert_allclose(
        shares[-1] if name == "post_ln" else shares, 0.5 if name == "post_ln" else 1 / 25, rtol=1e-4
    )
    gain = np.linalg.norm(gradient) / np.linalg.norm(g)
    assert gain == pytest.approx(2.0**-12 if name == "post_ln" else 0.2, rel=1e-4)


@pytest.mark.slow
def test_the_whole_jacobian_of_post_ln_keeps_its_size():
    """X31: though the skip's own path is 2^(-12) at 24 sites, branch and skip together pass (1 + 1) / 2 of the square a site."""
    sites, d = 24, 256

    def passed(model: Stack, key: jax.Array) -> jax.Array:
        h, g = jax.random.normal(jax.random.fold_in(key, 1), (2, 1, 16, d))
        _, back = jax.vjp(lambda h: model(h, Context())[0], h)
        return jnp.mean(jnp.square(back(g)[0])) / jnp.mean(jnp.square(g))

    build_ = lambda key: stack(POST, lambda kind, k: Matrix(d, k), sites, d, ("mlp",), **PLAINLY, key=key)  # noqa: E731
    # of order S / d: what each norm takes out, less; and what 1 / variance is above 1 in the mean, more
    assert draws(32, build_, passed).mean() == pytest.approx(1.0, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre_ln", "post_ln"])
def test_a_small_change_of_all_weights(name):
    """X32: the output's squared change grows as ln S under Pre-LN, as S under Post-LN. Derivative; geometric mean of 16 draws."""
    d, counts = 64, (8, 16, 32, 64)
    final = Norm("layernorm", d, UNGAINED) if name == "pre_ln" else lambda x: x

    def change(model: Stack, key: jax.Array) -> jax.Array:
        h = jax.random.normal(jax.random.fold_in(key, 1), (1, 4, d))
        leaves, tree = jax.tree.flatten(model)
        keys = jax.random.split(jax.random.fold_in(key, 2), len(leaves))
        moves = [jnp.std(w) * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys, strict=True)]
        run = lambda *leaves: final(jax.tree.unflatten(tree, leaves)(h, Context())[0])  # noqa: E731
        return jnp.mean(jnp.square(jax.jvp(run, tuple(leaves), tuple(moves))[1]))

    means = []
    for sites in counts:
        build_ = lambda key, sites=sites: stack(  # noqa: E731
            name, real(d, mlp="relu"), sites, d, ("mlp",), norms=UNGAINED, init=RELU, key=key
        )
        means.append(np.exp(np.log(draws(16, build_, change)).mean()))
    slope = np.polyfit(np.log(counts), np.log(means), 1)[0]
    if name == "pre_ln":
        ratios = np.array(means) / np.log(np.array(counts) + 1)
        assert ratios.max() / ratios.min() < 1.25 and slope < 0.5, ratios
    else:
        assert slope == pytest.approx(1.0, abs=0.2), means


@pytest.mark.slow
@pytest.mark.parametrize("mlp", ["relu", "gelu"])
def test_growth_under_lns(mlp):
    """X34: rms^2 = v_0 + v_b H_S with a homogeneous branch, which a GELU is not. 32 draws, 5 %."""
    d, depth = 128, 24

    def squares(model: Stack, key: jax.Array) -> jax.Array:
        h = jax.random.normal(jax.random.fold_in(key, 1), (1, 16, d))
        _, got = model(
            h, Context(measure=lambda flow: {k: jnp.mean(jnp.square(getattr(flow, k))) for k in ("update", "after")})
        )
        return jnp.stack([got["update"][0, 0], got["after"][-1, 0]])

    narrow = dict(norms=UNGAINED, init=RELU)
    build_ = lambda key: stack("lns", real(d, hidden=d, mlp=mlp), depth, d, ("mlp",), **narrow, key=key)  # noqa: E731
    first, last = draws(32, build_, squares).mean(0)
    want = 1 + first * np.sum(1 / np.arange(1, depth + 1))
    assert (last == pytest.approx(want, rel=0.05)) == (mlp == "relu"), (last, want)
    assert mlp != "relu" or first == pytest.approx(1, rel=0.05)


# ---- the pattern over depth at the start: RMS of the stream, gradient norm of each block

XAVIERS = Frozen(dict.fromkeys(MATRICES, XAVIER))
PATTERNS = {
    "pre_ln": PRE.but(init=XAVIERS),
    "gpt2_init": CATALOGUE["gpt2_init"].but(init=Frozen({**XAVIERS, "write": InitRule(one_over_sqrt_sites, "xavier")})),
    "post_ln": POST.but(init=XAVIERS),
    "deepnorm": CATALOGUE["deepnorm"],
    "keel": CATALOGUE["keel"].but(init=XAVIERS),
    "sandwich_branch": CATALOGUE["sandwich_branch"].but(init=XAVIERS),
    "olmo2": CATALOGUE["olmo2"].but(init=XAVIERS),
    "olmo2, no query-key norm": CATALOGUE["olmo2"].but(init=XAVIERS, inside=Frozen()),
    "lns": CATALOGUE["lns"].but(init=XAVIERS),
    "completep": CATALOGUE["completep"].but(init=XAVIERS, scale=DepthPower(-1.0, 2.0)),
    "depth_mup": CATALOGUE["depth_mup"].but(init=XAVIERS, scale=DepthPower(-0.5)),
    "plain": CATALOGUE["plain"].but(init=XAVIERS),
}


@functools.cache
def pattern(name: str, embedding: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """After and of each of 24 blocks: RMS of the stream, gradient norm; root mean squares of 4 draws.

    Width 64, 4 heads, 4 samples of 32 tokens, normal embeddings, norms without gain, a last norm and a fixed head of 32 classes.
    """
    d, depth, classes = 64, 24, 32
    final = Norm("layernorm", d, UNGAINED)
    head = jnp.asarray(normal(d, classes, seed=1) / sqrt(d))
    wanted = jnp.asarray(np.random.default_rng(2).integers(0, classes, (4, 32)))

    def figures(model: Stack, key: jax.Array) -> jax.Array:
        h = embedding * jax.random.normal(jax.random.fold_in(key, 1), (4, 32, d))

        def loss(model: Stack) -> tuple[jax.Array, jax.Array]:
            out, got = model(h, Context(measure=lambda flow: {"square": jnp.mean(jnp.square(flow.after))}))
            chances = jax.nn.log_softmax(final(out) @ head)
            return -jnp.mean(jnp.take_along_axis(chances, wanted[..., None], -1)), got["square"][:, -1]

        grads, squares = jax.grad(loss, has_aux=True)(model)
        runs = [
            sum(jnp.sum(jnp.square(leaf), range(1, leaf.ndim)) for leaf in jax.tree.leaves(run)) for run in grads.runs
        ]
        return jnp.stack([squares, jnp.concatenate(runs)])

    build_ = lambda key: stack(PATTERNS[name], real(d, 4), depth, d, norms=UNGAINED, key=key)  # noqa: E731
    rms, gradient = np.sqrt(draws(4, build_, figures).mean(0))
    return rms, gradient


def spread(values: np.ndarray) -> float:
    """The largest over the smallest."""
    return float(np.max(values) / np.min(values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "growth", "heaviness"),
    [  # RMS after the last block over that after the first; gradient of the first block over that of the last
        ("pre_ln", (3.3, 4.5), (2.8, 5.5)),
        ("gpt2_init", (1.05, 1.2), (1.0, 1.4)),
        ("post_ln", (0.999, 1.001), (0.5, 2.5)),
        ("deepnorm", (0.999, 1.001), (0.9, 1.1)),
        ("keel", (0.999, 1.001), (30, 55)),
        ("sandwich_branch", (3.5, 4.6), (3.5, 6.5)),
        ("olmo2", (3.5, 4.6), (3.0, 6.5)),
        ("olmo2, no query-key norm", (3.5, 4.6), (40, 1000)),
        ("lns", (1.3, 1.55), (5.5, 10)),
        ("completep", (1.0, 1.06), (0.95, 1.15)),
        ("depth_mup", (1.1, 1.3), (1.1, 1.5)),
        ("plain", (0.7, 1.2), (0.0, np.inf)),
    ],
)
def test_the_pattern_over_depth(name, growth, heaviness):
    """11.5.6 and 7, table 11.6: which streams grow, which gradients are heavy at the bottom and which are flat."""
    rms, gradient = pattern(name)
    assert growth[0] < rms[-1] / rms[0] < growth[1], rms
    assert heaviness[0] < gradient[0] / gradient[-1] < heaviness[1], gradient
    if name in ("deepnorm", "completep", "gpt2_init", "depth_mup"):
        assert spread(gradient) < (1.15 if name in ("deepnorm", "completep") else 1.5), gradient
    if name in ("post_ln", "deepnorm"):
        np.testing.assert_allclose(rms, 1, atol=1e-3)
    if name == "keel":  # the first block, whose skip has no factor, and all others alike
        assert spread(gradient[1:]) < 1.15, gradient
    if name in ("pre_ln", "sandwich_branch", "olmo2"):  # the square grows by the same in each block
        assert spread(np.diff(rms[::6] ** 2)) < 2, np.diff(rms[::6] ** 2)
        assert np.all(np.diff(gradient[::6]) < 0), gradient
    if name == "plain":
        assert np.all(rms < 0.7), "the branch alone, which is smaller than what it reads"


@pytest.mark.slow
def test_the_patterns_beside_one_another():
    """Table 11.6: gradients differ by 20 and more between schemes; query-key norms repair OLMo 2's first blocks, and not the last."""
    first = {name: pattern(name)[1][0] for name in PATTERNS}
    middle = {name: np.median(pattern(name)[1]) for name in PATTERNS}
    assert first["olmo2, no query-key norm"] > 10 * first["olmo2"]
    assert first["olmo2"] == pytest.approx(first["sandwich_branch"], rel=0.3)
    ends = [pattern(name)[1][-1] for name in ("olmo2", "olmo2, no query-key norm")]
    assert ends[1] == pytest.approx(ends[0], rel=0.5)
    low_to_high = ("keel", "completep", "depth_mup", "pre_ln", "post_ln")
    assert np.all(np.diff([middle[name] for name in low_to_high]) > 0), middle
    assert middle["completep"] == pytest.approx(middle["deepnorm"], rel=0.15)
    assert middle["post_ln"] > 20 * middle["keel"] and middle["post_ln"] > 10 * middle["deepnorm"]
    assert middle["lns"] < 0.6 * middle["pre_ln"]
    rms = {name: pattern(name)[0][-1] for name in PATTERNS}
    order = ("plain", "post_ln", "completep", "gpt2_init", "depth_mup", "lns", "pre_ln", "sandwich_branch")
    assert np.all(np.diff([rms[name] for name in order]) > 0), rms


@pytest.mark.slow
def test_a_scaled_start_wants_embeddings_that_are_not_small():
    """Table 11.6, last line: with embeddings of RMS 0.02 GPT-2's start is no longer flat, and Pre-LN's gradients change little."""
    rms, gradient = pattern("gpt2_init", 0.02)
    assert rms[-1] > 5 * rms[0] and gradient[0] > 3 * gradient[-1]
    small, usual = pattern("pre_ln", 0.02)[1], pattern("pre_ln")[1]
    assert small[-1] == pytest.approx(usual[-1], rel=0.3)


# ---- DenseFormer, Hyper-Connections, doubly stochastic mixing, the sphere


def test_denseformer_is_the_plain_net_at_the_start_bit_for_bit():
    """X42."""
    theirs, ours = shared("denseformer", depth=4)
    np.testing.assert_array_equal(forward(theirs), forward(ours))


@pytest.mark.parametrize("depth", [1, 4, 48])
def test_denseformer_uses_so_many_weights(depth):
    """X42: L (L + 3) / 2, so 1,224 at 48 blocks: those that have a gradient."""
    model = perturbed(lambda: stack("denseformer", lambda kind, key: Bias(4), depth, 4), out_scale=0.1)
    h = jnp.asarray(normal(1, 2, 4))
    grads = fast(jax.grad(lambda m, h: functional(m(h, Context())[0])))(model, h)
    weights = by_role(grads)["mixer_static"]
    assert sum(np.count_nonzero(v) for v in weights) == depth * (depth + 3) // 2
    assert depth != 48 or depth * (depth + 3) // 2 == 1224


def test_hyper_connections_are_pre_ln_at_the_start():
    """X43: in float32 to 1e-6, with an eps that does not count (the sum of 4 equal streams is 4 times the stream)."""
    theirs, ours = shared("hyper_connections", depth=4, norms=NormDefaults("layernorm", 1e-12))
    assert relative(forward(theirs), forward(ours)) < 1e-6


@pytest.mark.parametrize("dynamic", [False, True])
def test_where_hyper_connections_start(dynamic):
    """X43: a is one-hot at s mod n, s the site from 0; R the identity, b ones. The norms would hide another a."""
    model = stack(PRE.but(carry=Hyper(4, dynamic)), ones, 3, 8)
    for pos, site in enumerate(model.runs[0].sites):
        carry = site.carry
        np.testing.assert_array_equal(carry.pick[...], np.eye(4)[(2 * np.arange(3) + pos) % 4])
        np.testing.assert_array_equal(carry.mix[...], np.broadcast_to(np.eye(4), (3, 4, 4)))
        np.testing.assert_array_equal(carry.spread[...], np.ones((3, 4)))


def test_one_stream_of_hyper_connections_is_pre_ln_to_the_last_bit():
    """X43, A13: with n = 1 the matrix [[0, b], [a, R]] is [[0, 1], [1, 1]] at every site."""
    scheme = CATALOGUE["hyper_connections"].but(carry=Hyper(1), init=Frozen())
    theirs, ours = start(scheme, seed=3, depth=4), start("pre_ln", seed=3, depth=4)
    for site in theirs.stack.runs[0].sites:
        for block in range(4):
            a, R, b = (np.asarray(v[...])[block] for v in (site.carry.pick, site.carry.mix, site.carry.spread))
            np.testing.assert_array_equal(np.block([[np.zeros((1, 1)), b[None]], [a[:, None], R]]), [[0, 1], [1, 1]])
    np.testing.assert_array_equal(forward(theirs), forward(ours))


@pytest.mark.parametrize("spec", [Hyper(4), Hyper(4, dynamic=True), Fractions(4)])
def test_what_is_mixed_is_what_goes_on(spec):
    """A13: branches of zeros and a permutation: the streams come out permuted; and the loss has a gradient by the mixing matrix."""
    scheme = PRE.but(carry=spec)
    model = stack(scheme, lambda kind, key: Zeros(), 1, 8, ("mlp",))
    carry = model.runs[0].sites[0].carry
    order = np.array([1, 2, 3, 0])  # not its own inverse: a transposition would show
    carry.mix[...] = jnp.asarray(np.eye(4)[order].T)[None]  # R_ji: from j to i, S'_i = S_order(i)
    block = model.block(0).sites[0]
    whole = isinstance(spec, Fractions)
    streams = jnp.asarray(normal(2, 3, 8) if whole else normal(4, 2, 3, 8))

    def run(block: Any) -> jax.Array:
        return block(streams, Site("mlp", 0, 1, 1), {}, None, EVALUATION)[0]

    out = fast(run)(block)
    if whole:
        np.testing.assert_array_equal(out, np.concatenate([np.split(streams, 4, -1)[i] for i in order], axis=-1))
    else:
        np.testing.assert_array_equal(out, streams[order])
    gradient = fast(jax.grad(lambda block: functional(run(block))))(block).carry.mix[...]
    assert np.all(np.abs(gradient) > 1e-3)


@pytest.mark.parametrize(("name", "tolerance"), [("mhc_lite", 1e-5), ("mhc", 2e-2)])
def test_mixing_on_the_manifold_keeps_the_mean_of_the_streams(name, tolerance):
    """X44: at each site and over all of them: rows and columns of the product sum to 1, its spectral norm is at most 1.

    20 Sinkhorn steps leave the sums over what goes out of a stream near 1 only.
    """
    model = make(name, depth=4)
    streams = jnp.asarray(normal(4, 2, 6, 8))
    product = np.broadcast_to(np.eye(4), (2, 6, 4, 4))

    @jax.jit
    def site_of(connection: Any, streams: jax.Array) -> Any:
        _, A, _ = connection.carry.weights(streams, Site("mlp", 0, 2, 4))
        _, memo = connection.carry.read(streams, Site("mlp", 0, 2, 4))
        return A, connection.carry.write(streams, memo, None, None)[0]

    for block in range(4):
        for connection in model.stack.block(block).sites:
            A, after = site_of(connection, streams)
            assert np.max(np.abs(after - streams)) > 0.5 * np.max(np.abs(streams - np.mean(streams, 0))), "it mixes"
            np.testing.assert_allclose(np.mean(after, 0), np.mean(streams, 0), atol=tolerance)
            product = np.moveaxis(np.asarray(A, np.float64), (0, 1), (-2, -1)) @ product
            streams = after
    np.testing.assert_allclose(product.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(product.sum(-2), 1, atol=tolerance)
    assert product.min() >= 0 and np.linalg.norm(product, 2, (-2, -1)).max() <= 1 + tolerance


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rates_on_the_sphere(sign):
    """X45: |h| = 1 after each update; a = 0 is the identity; a = 1 with F along v gives v; a acts by its magnitude."""
    d, depth = 8, 3
    model = perturbed(lambda: stack("ngpt", lambda kind, key: Fitting(d), depth, d))
    v = np.asarray(model.runs[0].sites[1].branch.b[...])[-1]
    h = jnp.asarray(normal(2, 5, d)) * 3
    run = fast(lambda m, h: m(h, Context(measure=seen)))
    out, got = run(model, h)
    np.testing.assert_allclose(np.linalg.norm(got["after"], axis=-1), 1, atol=1e-6)
    assert np.min(np.abs(got["after"] - got["before"]).max(-1)) > 1e-3
    for rate, want in (
        (0.0, h / np.linalg.norm(h, axis=-1, keepdims=True)),
        (1.0, np.broadcast_to(v / np.linalg.norm(v), h.shape)),
    ):
        for site in model.runs[0].sites:
            site.carry.rate[...] = jnp.full((depth, d), sign * rate / (0.05 * sqrt(d)))
        out, _ = run(model, h)
        np.testing.assert_allclose(out, want, atol=2e-6)


class Fitting(Bias):
    """A bias that announces what the sphere's scheme acts on, and lets it act on nothing."""

    slots: ClassVar = {"q_turned": (1,), "k_turned": (1,), "fc_in": (1,)}

    def __call__(self, x: jax.Array, at: Any = None) -> jax.Array:
        return super().__call__(x)


# ---- what moves with the step, and what is random, in training and in evaluation


@pytest.mark.parametrize("name", ["prores", "branchnorm"])
def test_the_schedule_is_the_same_in_training_and_evaluation(name):
    """11.5.12: same step, same a, by what a branch of ones adds; the step is traced, and one program serves all."""
    depth = 3
    model = stack(name, ones, depth, 4)
    h = jnp.asarray(normal(1, 2, 4))
    traces = []
    programs = []
    for train in (True, False):

        def run(step: jax.Array, train: bool = train) -> jax.Array:
            traces.append(train)
            context = Context(
                train=train, step=step, key=jax.random.key(0), measure=lambda flow: {"u": flow.update[0, 0, 0]}
            )
            return model(h, context)[1]["u"]

        programs.append(fast(run))
    block = np.arange(1, depth + 1)[:, None]
    for step in (0, 1, 700, 1500, 3999, 10_000):
        want = np.minimum(step / (1000 * block), 1) if name == "prores" else np.minimum((step + 1) / 4000, 1) * block**0
        for program in programs:
            np.testing.assert_allclose(program(jnp.int32(step)), np.broadcast_to(want, (depth, 2)), rtol=1e-6)
    assert traces == [True, False]


@pytest.mark.parametrize("name", ["prores", "branchnorm", "stochastic_depth"])
def test_the_step_and_the_evaluation_see_the_same_number_of_steps(name):
    """11.5.12: the loss that the step reports is that of the evaluation of the same weights at the same step.

    Of stochastic depth it is another one, whose evaluation is Pre-LN's with all its branches.
    """
    model = make(name, depth=2, out_scale=0.3)
    graphdef, params = nnx.split(model)
    tx = build(SGD, 4, params)
    state = create(params, tx, jax.random.key(0), 1.0)
    step = fast(make_step(graphdef, tx, schedule("constant", 0.1, 0, 4), Recipe()))
    evaluation = fast(make_evaluation(graphdef, "float32"))
    batch = jnp.asarray(np.concatenate([TOKENS, TOKENS[:, :1]], axis=1))
    found = {}
    for at in (3, 1500):
        _, metrics, _ = step(dataclasses.replace(state, step=jnp.int32(at)), batch, jnp.asarray(False))
        found[at] = float(metrics["loss"]), float(evaluation(params, batch, jnp.int32(at)))
    if name == "stochastic_depth":
        assert abs(found[3][0] - found[3][1]) > 1e-4 and found[3][1] == found[1500][1]
        plain = nnx.merge(nnx.split(make("pre_ln", depth=2, out_scale=0.3))[0], params)
        assert found[3][1] == pytest.approx(float(fast(lambda m: m.objective(batch, EVALUATION)[0])(plain)), rel=1e-6)
    else:
        for trained, evaluated in found.values():
            assert trained == pytest.approx(evaluated, rel=1e-6)
        assert abs(found[3][1] - found[1500][1]) > 1e-3


@pytest.mark.parametrize("depth", [1, 3])
def test_a_block_that_is_left_out_is_left_out_whole(depth):
    """11.5.12, A31 for LayerDrop: one coin a block, on with 0.8 also at depth 1, nothing rescaled; in evaluation all are on."""
    model = stack("layer_drop", ones, depth, 1)
    run = jax.jit(jax.vmap(lambda key: model(jnp.zeros((2, 3, 1)), Context(train=True, key=key))[0].reshape(-1)))
    out = np.asarray(run(jax.random.split(jax.random.key(0), 4000)))
    assert np.all(out == out[:, :1]), "one coin for the batch"
    assert set(np.unique(out)) == {2.0 * i for i in range(depth + 1)}, "attention and MLP go together"
    assert out.mean() == pytest.approx(0.8 * 2 * depth, rel=0.02)
    assert np.all(model(jnp.zeros((2, 3, 1)), Context(key=jax.random.key(0)))[0] == 2.0 * depth)


# ---- rules by role, by block, by depth


@pytest.mark.parametrize("name", ["deepnorm", "subln", "tfixup", "ds_init", "b2t", "fixup", "skipinit"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_start_by_role_reaches_the_value_in_every_layout(name, fused):
    """A3 and its kind: each single matrix has the standard deviation of its role and block, fused with others or not."""
    depth, d, hidden = 6, 48, 96

    def branch(kind: str, key: jax.Array) -> nnx.Module:
        return Attention(d, 4, fused=fused, key=key) if kind == "attention" else MLP(d, hidden, "swiglu", key=key)

    init = Init("gain", gain=0.5, out_scale=0.25)
    parts = parts_of(fast(lambda: stack(name, branch, depth, d, init=init))())
    block = np.arange(1, depth + 1)
    gains = {  # of q and k; of v and fc_in; of what writes
        "deepnorm": (1.0, 48**-0.25, 48**-0.25),
        "subln": (1.0, sqrt(log(12)), sqrt(log(12))),
        "tfixup": (1.0, 54**-0.25, 54**-0.25),
        "ds_init": (block**-0.5,) * 3,
        "b2t": (6**-0.5,) * 3,
        "fixup": (12**-0.5, 12**-0.5, 0.0),
        "skipinit": (sqrt(2.0),) * 3,
    }[name]
    assert {role: len(v) for role, v in parts.items()} == {"q": 1, "k": 1, "v": 1, "write": 2, "fc_in": 2}
    for role, values in parts.items():
        gain = np.broadcast_to(gains[{"q": 0, "k": 0, "write": 2}.get(role, 1)], depth)
        for value in values:
            fan_in, fan_out = value.shape[1:]
            base = {"skipinit": fan_in**-0.5, "b2t": 0.5 * fan_in**-0.5, "fixup": (2 / fan_in) ** 0.5}
            std = base.get(name, sqrt(2 / (fan_in + fan_out))) * gain
            if not std.any():
                assert not value.any()
                continue
            assert_std([value / (std / std[0])[:, None, None]], std[0], 0.03)
            np.testing.assert_allclose(np.std(value, axis=(1, 2)), std, rtol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rezero", "skipinit"])
def test_gates_at_128_blocks_and_after_one_step(name):
    """A14: the identity; every gate has a gradient and no branch has; after one step no gate is 0; gates are float32 and do not decay."""
    model = start(name, depth=128, width=8)
    h = jnp.asarray(normal(2, 6, 8))
    np.testing.assert_array_equal(fast(lambda m, h: m.stack(h, EVALUATION)[0])(model, h), h)
    grads = fast(jax.grad(lambda m: functional(m(jnp.asarray(TOKENS), EVALUATION)[0])))(model)
    found = by_role(grads.stack)
    assert sum(v.size for v in found.pop("gain")) == 256
    assert not any(v.any() for values in found.values() for v in values)
    params, gradients = nnx.state(model), nnx.state(grads)
    config = SimpleNamespace(**(vars(SGD) | {"weight_decay": 0.5}))
    moved = {}
    for factor in (1.0, 0.125):
        tx = build(config, 4, params, {"gain": OptRule(lr=factor)}, 128)
        updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
        moved[factor] = np.concatenate([v.ravel() for v in by_role(apply_updates(params, updates))["gain"]])
    assert moved[1.0].dtype == np.float32 and np.all(moved[1.0] != 0)
    np.testing.assert_array_equal(moved[0.125], moved[1.0] / 8)
    want = -0.1 * np.concatenate([v.ravel() for v in by_role(gradients)["gain"]])
    np.testing.assert_allclose(moved[1.0], want, rtol=1e-6)


def test_numbers_of_fixup_move_by_a_tenth():
    """A14: by the scheme's own rule, under SGD; weights move as ever."""
    params = nnx.state(make("fixup", depth=2))
    gradients = jax.tree.map(jnp.ones_like, params)
    tx = build(SGD, 4, params, ALL["fixup"].optim, 2)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    for role, values in by_role(updates).items():
        rate = 0.01 if role in ("gain", "gain_offset") else 0.1
        assert all(np.allclose(v, -rate, rtol=1e-6) for v in values), role


def gain_rate(name: str, factor: float) -> Any:
    config = default()
    config.residual.name, config.optimizer.gain_lr, config.model.depth = name, factor, 2
    return config


@pytest.mark.parametrize(("name", "usual"), [("rezero", 1.0), ("skipinit", 1.0), ("fixup", 0.1)])
def test_the_rate_of_gains_has_a_factor_in_the_config(name, usual):
    """A14: on the gains alone, beside the factor of the scheme itself."""
    config = gain_rate(name, 0.125)
    rules = scheme_of(config).optim
    found = {
        role: row.lr for row in listing(nnx.state(abstract(ALL[name], depth=2)), rules) for role in row.role.split(",")
    }
    assert found["gain"] == usual / 8 and found["write"] == found["q"] == 1.0


def test_a_factor_on_gains_that_there_are_not_is_refused():
    with pytest.raises(Refused, match=r"optimizer\.gain_lr is 0\.1, which has no effect: 'pre_ln' has no learned gain"):
        assemble(resolve(gain_rate("pre_ln", 0.1), "cpu"), 11)


@pytest.mark.parametrize(("name", "kind"), [("pre_ln", "rmsnorm"), ("dyt", "dyt"), ("derf", "derf")])
def test_norms_of_queries_and_keys_are_replaced_with_the_others(name, kind):
    """variants.md 5.16."""
    with_norms, without = (abstract(ALL[name], qk_norm=on).stack.runs[0].sites[0].branch for on in (True, False))
    assert with_norms.norm_q.kind == with_norms.norm_k.kind == kind
    assert without.norm_q is None


@pytest.mark.parametrize("name", ALL)
def test_rules_are_finite_at_any_depth(name):
    """A31 and its kind: gains, starts and optimizer factors at 1, 2, 7 and 1,000 blocks, first and last block, first and late steps."""
    checked = 0
    for depth in (1, 2, 7, 1000):
        for run in ALL[name].runs(KINDS, depth):
            blocks = jnp.asarray([run.first, run.first + run.length - 1], jnp.float32)
            for pos, scheme in enumerate(run.sites):
                for step in (0.0, 1e6):
                    site = Site(KINDS[pos], pos, len(run.sites), depth, blocks, jnp.float32(step))
                    values = {field: getattr(scheme, field) for field in GAINS}
                    values |= {role: rule.gain for role, rule in scheme.init.items()}
                    values |= {
                        (role, k): getattr(rule, k) for role, rule in scheme.optim.items() for k in ("lr", "eps")
                    }
                    for what, value in values.items():
                        value = getattr(value, "start", value)  # of what is learned
                        if value is None or isinstance(value, Knob):
                            continue
                        number = np.asarray(value(site) if callable(value) else value)
                        assert np.all(np.isfinite(number)) and np.all(number >= 0), (what, depth)
                        checked += 1
    assert checked >= 4 * 2 * 5
