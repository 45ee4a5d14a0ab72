"""Do the exact and analytic properties hold that papers and bug reports of residual networks turn on?

X.. are the properties of floating point, norms, starts and growth; A.. are reports of what went wrong elsewhere.
"""

import functools
import time
from collections.abc import Iterator
from math import e, log, sqrt
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import (
    EVALUATION,
    SMALL,
    TOKENS,
    by_role,
    fast,
    functional,
    largest_difference,
    make,
    perturbed,
    relative,
    stack,
    start,
    variables,
)
from resjax.block import STREAM
from resjax.branches import MLP, Attention
from resjax.health import probes
from resjax.models.lm import LM, Shape, loss
from resjax.residual import (
    CATALOGUE,
    Context,
    Flow,
    Frozen,
    Init,
    InitRule,
    Learned,
    Linear,
    Norm,
    NormDefaults,
    Site,
    constant,
    evaluate,
    kernel,
)
from resjax.residual.entries.scaling import deepnorm_alpha, deepnorm_beta
from resjax.residual.precision import total
from resjax.stack import Stack
from resjax.train.optimizer import build
from resjax.train.schedule import schedule
from resjax.train.state import create
from resjax.train.step import Recipe, make_step
from ways import scanned

PRE, POST = CATALOGUE["pre_ln"], CATALOGUE["post_ln"]
BARE = PRE.but(norm_in=None)
EXACT = NormDefaults("layernorm", eps=0.0, gain=False)


class Bias(nnx.Module):
    """A branch that adds the same vector to every token."""

    def __init__(self, width: int, value: float = 0.0):
        self.b = constant(value, (width,), "bias")

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.b[...].astype(x.dtype), x.shape)


class Matrix(nnx.Module):
    """A branch that is one matrix."""

    def __init__(self, width: int, key: jax.Array):
        self.w = kernel(key, width, width, "write")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...].astype(x.dtype)


class Ones(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.ones_like(x)


class Zeros(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)


def ones(kind: str, key: jax.Array) -> Ones:
    return Ones()


def real(width: int, heads: int = 2, hidden: int | None = None, mlp: str = "gelu") -> Any:
    """Attention and MLP."""

    def branch(kind: str, key: jax.Array) -> nnx.Module:
        if kind == "attention":
            return Attention(width, heads, key=key)
        return MLP(width, hidden or 4 * width, mlp, key=key)

    return branch


def seen(flow: Flow) -> dict[str, jax.Array]:
    """Everything, as (depth, sites, batch, tokens, width); zeros where there is none."""
    return {k: jnp.zeros_like(flow.after) if v is None else v for k, v in flow._asdict().items()}


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# ---- floating point: the add


def test_half_precision_adds_about_100():
    """X01 to X03, X54: what float16 and bfloat16 make of a small update on a large stream."""
    for add in (total, jax.jit(total), scanned(total)):

        def sum_of(dtype, a, b, add=add):
            return float(add(jnp.asarray(a, dtype), jnp.asarray(b, dtype)))

        assert sum_of(jnp.float16, 100, 0.1) == 100.125
        assert sum_of(jnp.bfloat16, 100, 0.1) == 100.0
        assert [sum_of(jnp.float16, 100, u) for u in (0.03125, 0.0313)] == [100.0, 100.0625]
        assert [sum_of(jnp.bfloat16, 100, u) for u in (0.25, 0.26)] == [100.0, 100.5]
        assert [sum_of(jnp.float16, 65504, u) for u in (15, 16)] == [65504.0, float("inf")]


@pytest.mark.parametrize(("dtype", "end"), [(jnp.bfloat16, 256.0), (jnp.float16, 2048.0)])
def test_counting_by_one_stops(dtype, end):
    """X05."""
    one = jnp.ones((), dtype)
    last, _ = jax.jit(lambda: jax.lax.scan(lambda h, _: (total(h, one), None), jnp.zeros((), dtype), length=3000))()
    assert float(last) == end


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_larger_stream_does_not_cure_swallowing(dtype):
    """X07: powers of two change no rounding."""
    x, u = (jnp.asarray(normal(1000, seed=i) * s, dtype) for i, s in ((0, 1.0), (1, 0.01)))
    scale = jnp.asarray(8.0, dtype)
    np.testing.assert_array_equal(jax.jit(total)(x * scale, u * scale), total(x, u) * scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_add_rounds_to_nearest_even(dtype):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=10_000) * 10.0 ** rng.uniform(-3, 3, 10_000), dtype) for _ in range(2))
    want = jnp.asarray(np.asarray(a, np.float64) + np.asarray(b, np.float64)).astype(dtype)
    for add in (total, jax.jit(total)):
        np.testing.assert_array_equal(add(a, b), want)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("stream", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
def test_64_adds_of_an_update_that_bfloat16_swallows(stream, compute, scan):
    """A1: 1 and 64 times 2^-9 make 1.125 in float32 and 1 in bfloat16, add by add, compiled; and the probe says so."""
    model = stack(BARE, lambda kind, key: Bias(4, 2.0**-9), 32 if scan else 4, 4, scan=scan)
    context = Context(compute=compute, measure=lambda flow: seen(flow) | {"p": probes.measure(flow)["swallowed"]})
    out, got = jax.jit(lambda m, h: m(h, context))(model, jnp.ones((1, 2, 4), stream))
    adds = np.arange(1, 2 * model.depth + 1)
    want = 1 + adds * 2.0**-9 if stream == jnp.float32 else np.ones(len(adds))
    after = np.asarray(got["after"], np.float64).reshape(len(adds), -1)
    np.testing.assert_array_equal(after, np.broadcast_to(want[:, None], after.shape))
    assert np.unique(np.asarray(out, np.float64)).tolist() == [want[-1]]
    assert np.unique(got["p"]).tolist() == [0.0 if stream == jnp.float32 else 1.0]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, inner programs included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize(
    ("compute", "stream"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")]
)
def test_the_program_says_the_dtype_of_the_stream_at_every_site(compute, stream):
    """A1: the name 'stream' stands at all 2 x 24 adds, with the dtype that the stream has there."""
    for scan in (True, False):
        model = jax.eval_shape(
            lambda scan=scan: LM(
                Shape(**(SMALL | dict(depth=24, stream=stream, scan=scan))), PRE, Init(), key=jax.random.key(0)
            )
        )
        program = jax.make_jaxpr(lambda m: m(jnp.asarray(TOKENS), Context(compute=jnp.dtype(compute)))[0])(model)
        named = [eqn for eqn in equations(program) if eqn.primitive.name == "name" and eqn.params["name"] == STREAM]
        assert len(named) == (2 if scan else 48)
        assert {str(eqn.outvars[0].aval.dtype) for eqn in named} == {stream}


def test_the_add_does_not_round_one_way():
    """A10: 72 adds of N(0, 1) in bfloat16. Rounding keeps the norm to 4 in 10 000, truncation would lose 9 %."""
    width, depth = 4096, 36
    model = stack(BARE, lambda kind, key: Bias(width), depth, width)
    for i, connection in enumerate(model.runs[0].sites):
        connection.branch.b[...] = jnp.asarray(normal(depth, width, seed=1 + i))
    h = jnp.asarray(normal(1, 1, width), jnp.bfloat16)
    context = Context(compute=jnp.bfloat16, measure=seen)
    out, got = jax.jit(lambda m, h: m(h, context))(model, h)
    before, update, after = (np.asarray(got[k], np.float64).reshape(72, -1) for k in ("before", "update", "after"))
    np.testing.assert_array_equal(after[:-1], before[1:])

    exact = before + update
    signed = np.sum((after - exact) * np.sign(exact), axis=1) / np.sum(np.abs(exact), axis=1)
    assert abs(np.mean(signed)) < 5e-5
    truncated = np.asarray(exact, np.float32)
    truncated = (truncated.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    one_way = np.sum((truncated - exact) * np.sign(exact), axis=1) / np.sum(np.abs(exact), axis=1)
    assert np.mean(one_way) == pytest.approx(-0.0026, abs=5e-4), "the measure tells truncation from rounding"
    want = np.asarray(h, np.float64).reshape(-1) + update.sum(0)
    assert np.linalg.norm(np.asarray(out, np.float64)) / np.linalg.norm(want) == pytest.approx(0.9996, abs=1e-3)


# ---- norms


@pytest.mark.parametrize(("kind", "zeros"), [("layernorm", 2), ("rmsnorm", 1), ("unit", 1)])
def test_jacobian_of_a_norm(kind, zeros):
    """X09: 1/sigma in all directions but the mean and the token itself."""
    d = 12
    with jax.enable_x64(True):
        norm = Norm(kind, d, EXACT)
        x = normal(d, dtype=np.float64) * 3 + 1
        values = np.linalg.svd(np.asarray(jax.jacrev(norm)(jnp.asarray(x))), compute_uv=False)
    size = {"layernorm": np.std(x), "rmsnorm": sqrt(np.mean(x**2)), "unit": np.linalg.norm(x)}[kind]
    np.testing.assert_allclose(values, [1 / size] * (d - zeros) + [0.0] * zeros, atol=1e-9)


def test_the_norm_before_a_branch_takes_out_the_scale():
    """X10: F(N(c x)) = F(N(x)), so the gradient with respect to x is orthogonal to x."""
    with jax.enable_x64(True):
        norm, branch = Norm("layernorm", 8, EXACT), perturbed(lambda: MLP(8, 16, key=jax.random.key(0)))
        x, g = (jnp.asarray(normal(3, 8, seed=i, dtype=np.float64)) for i in (0, 1))
        run = fast(lambda x: jax.value_and_grad(lambda x: jnp.sum(g * branch(norm(x))))(x))
        (value, gradient), (same, _) = run(x), run(3.7 * x)
    assert float(same) == pytest.approx(float(value), rel=1e-12)
    np.testing.assert_allclose(np.sum(np.asarray(x) * np.asarray(gradient), axis=-1), 0, atol=1e-10)
    assert np.all(np.linalg.norm(gradient, axis=-1) > 0.01)


def test_a_norm_of_large_numbers_with_a_small_spread():
    """A27: two passes, so that no variance is negative."""
    norm = jax.jit(Norm("layernorm", 4, NormDefaults()))
    got = norm(jnp.asarray([[40000.0, 40001.0, 40002.0, 40003.0]]))
    np.testing.assert_allclose(got, [[-1.3416, -0.4472, 0.4472, 1.3416]], atol=1e-3)
    np.testing.assert_array_equal(norm(jnp.full((2, 4), 1234.567)), np.zeros((2, 4)))
    wide = jax.jit(Norm("layernorm", 4096, NormDefaults()))(jnp.asarray(2000 + normal(1, 4096)))
    assert np.var(wide) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "unit"])
def test_norms_of_zeros_and_of_half_precision(kind):
    norm = jax.jit(Norm(kind, 8, NormDefaults(gain=False)), static_argnames="dtype")
    assert not norm(jnp.zeros((2, 8))).any()
    assert np.isfinite(jax.grad(lambda x: jnp.sum(norm(x)))(jnp.zeros((2, 8)))).all()
    x = normal(4, 8) * 300
    for dtype in (jnp.bfloat16, jnp.float16):  # the sum of squares is beyond float16, the statistics are not in float16
        y = norm(jnp.asarray(x, dtype))
        assert y.dtype == dtype and relative(y, norm(jnp.asarray(x))) < 0.02
        assert norm(jnp.asarray(x, dtype), dtype=jnp.float32).dtype == jnp.float32


# ---- blocks whose branches are zero, and streams


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["pre_ln", "rezero", "layerscale", "scaled", "sandwich_branch"])
def test_zero_branches_leave_the_stream_alone(name, dtype):
    """A8: bit for bit over 64 blocks, so there is an untouched path. Real branches, whose last matrices are zero."""
    model = perturbed(lambda: stack(name, real(8), 64, 8), out_scale=0.0)
    h = jnp.asarray(normal(2, 3, 8), dtype)
    out, _ = fast(lambda m, h: m(h, Context(compute=jnp.dtype(dtype))))(model, h)
    np.testing.assert_array_equal(out, h)


@pytest.mark.parametrize("name", ["post_ln", "sandwich_trunk"])
def test_zero_branches_under_a_norm_of_the_trunk(name):
    """A8: LN(x) after the first site, and the same from then on."""
    model = stack(name, lambda kind, key: Zeros(), 8, 8)
    h = jnp.asarray(normal(2, 3, 8)) * 5 + 2
    _, got = fast(lambda m, h: m(h, Context(measure=seen)))(model, h)
    want = (h - h.mean(-1, keepdims=True)) / np.std(h, axis=-1, keepdims=True)
    np.testing.assert_allclose(got["after"], np.broadcast_to(want, (8, 2, 2, 3, 8)), atol=1e-5)


def test_tokens_of_post_ln_have_mean_0_and_rms_1():
    """X11: after every site, whatever the weights."""
    with jax.enable_x64(True):
        model = make("post_ln", out_scale=10.0, norms=EXACT, stream="float64")
        context = Context(measure=seen, compute=jnp.float64)
        after = np.asarray(fast(lambda m: m(jnp.asarray(TOKENS), context)[1]["after"])(model))
    np.testing.assert_allclose(np.mean(after, axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.mean(after**2, axis=-1)), 1, atol=1e-6)


def test_updates_telescope():
    """X40: the last stream is the first and all updates; each site begins where the one before it ended."""
    with jax.enable_x64(True):
        model = make("pre_ln", stream="float64")
        context = Context(measure=seen, compute=jnp.float64)
        _, got = fast(lambda m: m(jnp.asarray(TOKENS), context))(model)
    sites = {k: np.asarray(v).reshape(-1, *v.shape[2:]) for k, v in got.items() if k in Flow._fields}
    np.testing.assert_array_equal(sites["before"][1:], sites["after"][:-1])
    np.testing.assert_array_equal(sites["kept"], sites["before"])
    assert relative(sites["before"][0] + sites["update"].sum(0), sites["after"][-1]) < 1e-12


def test_norms_on_branches_make_their_scale_irrelevant():
    """X33: branch weights 8 times as large change nothing under an output norm, and Pre-LN a lot."""

    def last(name: str, factor: float) -> np.ndarray:
        with jax.enable_x64(True):
            model = perturbed(lambda: stack(name, real(64), 4, 64, norms=EXACT), out_scale=factor)
            h = jnp.asarray(normal(8, 8, 64, dtype=np.float64))
            return np.asarray(fast(lambda m, h: m(h, Context(compute=jnp.float64))[0])(model, h))

    sandwich = last("sandwich_branch", 1.0)
    assert relative(last("sandwich_branch", 8.0), sandwich) < 1e-12
    assert np.mean(sandwich**2) == pytest.approx(1 + 8, rel=0.1), "q_0 and one for each of 8 sites"
    assert np.mean(last("pre_ln", 8.0) ** 2) > 20 * np.mean(last("pre_ln", 1.0) ** 2)


def test_pre_ln_knows_only_branches_relative_to_the_embedding():
    """X35: embedding and branches 8 times as large give the same logits; branches alone do not."""

    def logits(embedding: float, branches: float) -> np.ndarray:
        with jax.enable_x64(True):
            model = make("pre_ln", out_scale=branches, norms=EXACT, stream="float64", positions="none")
            model.embed[...] = model.embed[...] * embedding
            return np.asarray(fast(lambda m: m(jnp.asarray(TOKENS), Context(compute=jnp.float64))[0])(model))

    assert relative(logits(8.0, 8.0), logits(1.0, 1.0)) < 1e-12
    assert relative(logits(1.0, 8.0), logits(1.0, 1.0)) > 0.1


# ---- starts


def test_rezero_at_its_start():
    """X25: the identity, Jacobian I, no gradient for branch weights, and dL/da = <dL/dx, F(x)>."""
    model = fast(lambda: stack("rezero", real(4), 2, 4))()
    h, g = jnp.asarray(normal(1, 3, 4)), jnp.asarray(normal(1, 3, 4, seed=1))

    @fast
    def run(model: Stack, h: jax.Array, g: jax.Array) -> Any:
        out, back = jax.vjp(lambda m, h: m(h, Context())[0], model, h)
        branches = [[jnp.sum(g * site.branch(h)) for site in model.block(i).sites] for i in range(2)]
        return out, *back(g), branches

    out, grads, to_input, branches = run(model, h, g)
    np.testing.assert_array_equal(out, h)
    np.testing.assert_array_equal(to_input, g)
    assert not any(v.any() for role, values in by_role(grads).items() for v in values if role != "gain")
    gains = np.stack([site.gains["scale"].gain[...] for site in grads.runs[0].sites], axis=1)
    np.testing.assert_allclose(gains, branches, rtol=1e-5)
    assert np.min(np.abs(branches)) > 1e-3


def test_zero_output_matrices_at_the_start():
    """X26: the identity; inner weights have no gradient, output matrices have one. The head is no output matrix."""
    model = start(PRE, Init(out_scale=0.0), depth=2)
    h = jnp.asarray(normal(2, 3, 8))
    np.testing.assert_array_equal(fast(lambda m, h: m.stack(h, Context())[0])(model, h), h)
    grads = fast(jax.grad(lambda m: functional(m(jnp.asarray(TOKENS), Context())[0])))(model)
    for role, values in by_role(grads.stack).items():
        assert all(v.any() for v in values) if role == "write" else not any(v.any() for v in values), role
    assert all(v.any() for v in by_role([grads.embed, grads.head])["head"])


def with_gains(model: Any, value: float) -> Any:
    for variable in variables(model):
        if variable.role == ("gain",):
            variable[...] = jnp.full(variable.shape, value)
    return model


@pytest.mark.parametrize("value", [1e-4, 0.3])
def test_layerscale_is_its_gain_times_the_branch(value):
    """X27: the update is lambda F; the gain's gradient, sum_t F dL/dh, does not know lambda; |u| / |F| = lambda."""
    model = with_gains(perturbed(lambda: stack("layerscale", real(8), 1, 8, kinds=("mlp",))), value)
    h, g = jnp.asarray(normal(2, 3, 8)), jnp.asarray(normal(2, 3, 8, seed=1))
    (_, got), back = jax.vjp(jax.jit(lambda m: m(h, Context(measure=seen))), model)
    connection = model.block(0).sites[0]
    branch = connection.branch(connection.norm_in(h))
    assert relative(got["update"][0, 0], np.float32(value) * branch) < 1e-6
    (grads,) = back((g, jax.tree.map(jnp.zeros_like, got)))
    assert relative(grads.runs[0].sites[0].gains["scale"].gain[0], jnp.sum(branch * g, (0, 1))) < 1e-5
    assert np.linalg.norm(got["update"]) / np.linalg.norm(branch) == pytest.approx(value, rel=1e-5)


def test_layerscale_shows_in_the_update_ratio():
    """A4: with gains of 1e-4 the ratio at the first site is 1e-4 of plain Pre-LN's, and of that order elsewhere."""
    context = Context(measure=probes.measure)
    ratios = []
    for name in ("layerscale", "pre_ln"):
        model = with_gains(make(name), 1e-4)
        ratios.append(fast(lambda m: m(jnp.asarray(TOKENS), context)[1]["update_ratio"])(model))
    assert float(ratios[0][0, 0] / ratios[1][0, 0]) == pytest.approx(1e-4, rel=1e-3)
    assert np.all(ratios[0] < 1e-3) and np.all(ratios[0] > 1e-5)


@pytest.mark.parametrize("depth", [6, 12, 100, 1000])
def test_deepnorm_bounds_the_first_update(depth):
    """X28: 2 N (2 beta^2) / alpha^2 = 1 at every depth."""
    site = Site("mlp", 1, 2, depth)
    assert 2 * depth * 2 * deepnorm_beta(site) ** 2 / deepnorm_alpha(site) ** 2 == pytest.approx(1, abs=1e-12)


def test_deepnorm_is_post_ln_with_a_small_branch():
    """X29: LN(alpha x + F) = LN(x + F / alpha) without an eps."""
    with jax.enable_x64(True):
        alpha = float(np.float32(deepnorm_alpha(Site("mlp", 1, 2, 4))))
        results = []
        for scheme in (CATALOGUE["deepnorm"], POST.but(scale=1 / alpha)):
            model = make(scheme, norms=EXACT, stream="float64")
            results.append(fast(lambda m: m(jnp.asarray(TOKENS), Context(compute=jnp.float64))[0])(model))
    assert relative(*results) < 1e-12


# ---- randomness


@functools.cache
def updates_of(train: bool) -> Any:
    """Compiled once a model: (model, h, key) -> what was added at every site."""
    return fast(lambda m, h, key: m(h, Context(train=train, key=key, measure=seen))[1]["update"])


def masks(model: Stack, h: Any, key: Any, train: bool = True) -> np.ndarray:
    """The updates of all sites in order."""
    got = updates_of(train)(model, jnp.asarray(h, jnp.float32), key)
    return np.asarray(got).reshape(-1, *np.shape(h))


def distinct(rows: np.ndarray) -> bool:
    return len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("scan", [True, False])
def test_dropout_masks_differ_and_repeat(scan):
    """A15: twelve sites, twelve masks; others in another step; the same from the same key; none outside training."""
    model = stack(BARE, ones, 6, 8, dropout=0.5, scan=scan)
    h, key = np.zeros((2, 4, 8)), jax.random.key(3)
    first, second = (masks(model, h, jax.random.fold_in(key, step)) for step in (0, 1))
    assert np.unique(first).tolist() == [0.0, 2.0]
    assert 0.4 < np.mean(first == 2.0) < 0.6
    assert distinct(np.concatenate([first, second]))
    np.testing.assert_array_equal(masks(model, h, jax.random.fold_in(key, 0)), first)
    np.testing.assert_array_equal(masks(model, h, None, train=False), np.ones_like(first))
    other = masks(stack(BARE, ones, 6, 8, dropout=0.5, scan=not scan), h, jax.random.fold_in(key, 0))
    np.testing.assert_array_equal(other, first)


def test_paths_are_dropped_by_sample_and_differ():
    """A15 for stochastic depth: whole samples, one draw a sample and site, kept ones divided by 1 - rate."""
    model = stack(BARE.but(drop=0.25), ones, 6, 2)
    h, key = np.zeros((64, 3, 2)), jax.random.key(3)
    first = masks(model, h, key)
    np.testing.assert_allclose(np.unique(first), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_array_equal(first, np.broadcast_to(first[:, :, :1, :1], first.shape))
    assert distinct(first) and 0.7 < np.mean(first > 0) < 0.8
    assert distinct(np.concatenate([first, masks(model, h, jax.random.key(4))]))
    np.testing.assert_array_equal(masks(model, h, key), first)
    np.testing.assert_array_equal(masks(model, h, None, train=False), np.ones_like(first))


def test_dropout_and_stochastic_depth_draw_apart():
    model = stack(BARE.but(drop=0.5), ones, 1, 1, dropout=0.5)
    first = masks(model, np.zeros((4000, 1, 1)), jax.random.key(0))
    assert np.unique(first).tolist() == [0.0, 4.0]
    assert np.mean(first == 4.0) == pytest.approx(0.25, abs=0.02)


def test_the_embedding_is_dropped_too_and_needs_a_key():
    model = make("pre_ln", dropout=0.5, positions="none", depth=1)
    tokens = np.zeros((2, 6), np.int32)

    def first(train, key=None):
        context = Context(train=train, key=key, measure=seen)
        return np.asarray(fast(lambda m: m(jnp.asarray(tokens), context)[1]["before"])(model))[0, 0]

    plain, dropped = first(False), first(True, jax.random.key(0))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], 2 * plain[kept], rtol=1e-6)
    assert 0.3 < kept.mean() < 0.7 and not (kept == kept[:1, :1]).all()
    for dropout in (0.5, 0.0):
        model = make(PRE.but(drop=0.1), dropout=dropout, depth=1)
        with pytest.raises(ValueError, match="key"):
            model(jnp.asarray(tokens), Context(train=True))


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_linear_rule_of_stochastic_depth(depth):
    """A31: no division by zero at depth 1; monotone; the last rate is the one asked for."""
    rates = evaluate(Linear(0.5), Site("mlp", 1, 2, depth, jnp.arange(depth, dtype=jnp.float32)))
    np.testing.assert_allclose(rates, 0.5 * np.arange(1, depth + 1) / depth, rtol=1e-6)


def test_stochastic_depth_keeps_the_mean():
    """A31: 10 000 samples of a branch that is one."""
    model = stack(BARE.but(drop=Linear(0.5)), ones, 1, 1, kinds=("mlp",))
    updates = masks(model, np.zeros((10_000, 1, 1)), jax.random.key(1))
    assert updates.mean() == pytest.approx(1.0, abs=0.02)
    assert np.unique(updates).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("rate", [1.0, Linear(1.0)])
def test_a_branch_that_is_always_dropped(rate):
    """A31: the identity, and finite gradients."""
    model = stack(BARE.but(drop=rate), lambda kind, key: Bias(4, 1.0), 1, 4)
    h = jnp.asarray(normal(2, 3, 4))
    run = jax.jit(lambda m, h: m(h, Context(train=True, key=jax.random.key(0)))[0])
    np.testing.assert_array_equal(run(model, h), h)
    grads = jax.grad(lambda m: jnp.sum(run(m, h)))(model)
    assert [v[...].tolist() for v in variables(grads)] == [[[0.0] * 4]] * 2


# ---- training: programs, gradients


def test_probes_leave_the_state_alone_and_compile_once():
    """A17: 20 steps, probes on in every third: one program, and a state of the same shape all along."""
    model = make("pre_ln", depth=2)
    graphdef, params = nnx.split(model)
    config = SimpleNamespace(name="sgd", lr=0.1, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0)
    optimizer = build(config, 20, params)
    state = create(params, optimizer, jax.random.key(0), 1.0)
    traces = []

    def counted(*arguments):
        traces.append(1)
        return make_step(graphdef, optimizer, schedule("constant", 0.1, 0, 20), Recipe())(*arguments)

    step = fast(counted)
    structure = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    batch = np.concatenate([TOKENS, TOKENS[:, :1]], axis=1)
    losses = []
    for i in range(20):
        state, metrics, seen = step(state, jnp.asarray(batch), jnp.asarray(i % 3 == 0))
        losses.append(float(metrics["loss"]))
        assert bool(np.any(seen["stream_rms"])) == bool(np.any(seen["stream_grad"])) == (i % 3 == 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == structure
    assert len(traces) == 1
    assert losses[-1] < losses[0] - 0.1


def test_the_stream_in_front_of_the_final_norm_is_the_raw_one():
    """A18: its RMS grows up to the last block; what the final norm makes of it is a series of its own."""
    model = start("pre_ln", Init(gain=1.0, out_scale=1.0), depth=8, width=32)
    context = Context(measure=probes.measure)
    got = fast(lambda m: m(jnp.asarray(TOKENS), context)[1])(model)
    profile = np.asarray(got["stream_rms"]).reshape(-1)
    assert np.all(np.diff(profile) > 0)
    assert float(got["final_rms"]) == pytest.approx(1.0, abs=0.01)
    assert abs(profile[-1] - 1.0) > 0.05


def test_compile_time_does_not_grow_with_depth():
    """A34: 64 scanned blocks compile in less than twice the time of 4, from a program of the same length."""

    def traced(depth: int, remat: str = "none") -> Any:
        model = make("pre_ln", depth=depth, remat=remat)
        return fast(jax.grad(lambda m: functional(m(jnp.asarray(TOKENS), Context())[0]))).trace(model)

    def seconds(depth: int) -> float:
        began = time.perf_counter()
        traced(depth).lower().compile()
        return time.perf_counter() - began

    for remat in ("none", "full", "dots"):
        assert len({len(list(equations(traced(depth, remat).jaxpr))) for depth in (4, 64)}) == 1
    seconds(3)
    for _ in range(3):  # another process may slow any one of them down
        if (ratio := seconds(64) / seconds(4)) < 2:
            break
    assert ratio < 2


def test_rematerialisation_saves_memory():
    """A36: what is kept for the backward pass of a scanned stack, by the compiled program, in arrays like the stream."""
    tokens, kept = jnp.zeros((8, 64), jnp.int32), []
    for remat in ("full", "dots", "none"):
        model = make("pre_ln", depth=8, width=16, length=64, remat=remat)
        gradient = fast(jax.grad(lambda m: functional(m(tokens, Context())[0])))
        kept.append(gradient.lower(model).compile().memory_analysis().temp_size_in_bytes / (8 * 64 * 16 * 4))
    assert kept[0] < 0.7 * kept[1] and kept[1] < 0.7 * kept[2], kept


GRID = [(scan, remat, dropout) for dropout in (0.0, 0.3) for scan in (True, False) for remat in ("none", "full")]


def test_remat_scan_and_dropout_all_go_together():
    """A35: gradients know nothing of scan or remat, also with dropout: masks come from the site's number."""
    h, g = jnp.asarray(normal(2, 4, 8)), jnp.asarray(normal(2, 4, 8, seed=1))
    key = jax.random.key(0, impl="rbg")  # compiles faster than threefry
    branch = lambda kind, key: MLP(8, 8, "relu", key=key)  # noqa: E731
    evaluated, first = [], {}
    for scan, remat, dropout in [*GRID, (True, "dots", 0.3), (False, "dots", 0.3)]:
        model = perturbed(lambda: stack(PRE.but(drop=0.2), branch, 2, 8, dropout=dropout, scan=scan, remat=remat))  # noqa: B023
        grads = fast(jax.grad(lambda m: jnp.sum(g * m(h, Context(train=True, key=key))[0])))(model)
        expected = first.setdefault(dropout, grads)
        assert largest_difference(grads, expected) < (1e-6 if scan else 1e-5), (scan, remat, dropout)
        if dropout:
            evaluated.append(fast(lambda m: m(h, EVALUATION)[0])(model))
    assert largest_difference(first[0.0], first[0.3]) > 0.1
    assert max(relative(one, evaluated[0]) for one in evaluated) < 1e-6


def test_an_evaluation_after_training_is_not_random():
    model = make(PRE.but(drop=0.5), depth=1, dropout=0.5)
    with_key, without = (
        fast(lambda m, c=c: m(jnp.asarray(TOKENS), c)[0])(model) for c in (Context(key=jax.random.key(1)), Context())
    )
    np.testing.assert_array_equal(with_key, without)


# ---- growth of the stream and of gradients, by many draws


def draws(count: int, build: Any, f: Any) -> np.ndarray:
    """``f(module)`` of ``count`` starts, one array."""
    return np.asarray(fast(jax.vmap(lambda key: f(build(key), key)))(jax.random.split(jax.random.key(0), count)))


XIONG = Init("gain", gain=1.0, out_scale=1.0)
RELU = dict(norms=NormDefaults("layernorm", 1e-6, gain=False), init=XIONG)


@pytest.mark.slow
def test_post_ln_before_its_norm():
    """X12: E|x + FFN(x)|^2 = 1.5 d for a normalised x and a ReLU FFN with Xavier weights. 64 draws, 3 %."""
    d = 512

    def sum_of(model: Stack, key: jax.Array) -> jax.Array:
        h = Norm("layernorm", d, EXACT)(jax.random.normal(jax.random.fold_in(key, 1), (1, 8, d)))
        _, got = model(h, Context(measure=lambda flow: {"sum": jnp.mean(jnp.square(flow.kept + flow.update))}))
        return got["sum"][0, 0]

    means = draws(64, lambda key: stack(POST, real(d, hidden=d, mlp="relu"), 1, d, ("mlp",), **RELU, key=key), sum_of)
    assert means.mean() == pytest.approx(1.5, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64])
def test_pre_ln_grows_between_its_bounds(tokens):
    """X13: (1 + l/2) d <= E|x_l|^2 <= (1 + 3l/2) d with uniform attention; one token attains the upper bound."""
    d, depth = 64, 24
    scheme = PRE.but(init=Frozen({"q": InitRule(0.0)}))

    def squares(model: Stack, key: jax.Array) -> jax.Array:
        h = jax.random.normal(jax.random.fold_in(key, 1), (1, tokens, d))
        _, got = model(h, Context(measure=lambda flow: {"square": jnp.mean(jnp.square(flow.after))}))
        return got["square"][:, 1]

    build_ = lambda key: stack(scheme, real(d, hidden=d, mlp="relu"), depth, d, **RELU, key=key)  # noqa: E731
    mean = draws(64, build_, squares).mean(0)
    l = np.arange(1, depth + 1)
    if tokens == 1:
        np.testing.assert_allclose(mean, 1 + 1.5 * l, rtol=0.08)
    else:
        assert np.all(mean > (1 + l / 2) * 0.97) and np.all(mean < 1 + 1.5 * l)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "slope", "tolerance"), [("pre_ln", -0.5, 0.07), ("post_ln", 0.0, 0.15)])
def test_gradient_of_the_last_matrix_against_depth(name, slope, tolerance):
    """X14: falls as 1 / sqrt(L) under Pre-LN, not at all under Post-LN. 16 seeds, L = 4 to 32."""
    depths = (4, 8, 16, 32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 17)), jnp.int32)

    def norm(model: LM, key: jax.Array) -> jax.Array:
        grads = jax.grad(lambda m: loss(m(tokens[:, :-1], Context())[0], tokens[:, 1:]))(model)
        return jnp.linalg.norm(grads.stack.runs[0].sites[1].branch.write.kernel[-1])

    def model(depth: int, key: jax.Array) -> LM:
        shape = Shape(32, 16, depth, 64, 4, "relu", 1.0, RELU["norms"], positions="none")
        return LM(shape, CATALOGUE[name], XIONG, key=key)

    norms = [draws(16, lambda key, depth=depth: model(depth, key), norm).mean() for depth in depths]
    assert np.polyfit(np.log(depths), np.log(norms), 1)[0] == pytest.approx(slope, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre_ln", "post_ln"])
def test_first_loss(name):
    """X15: ln V + g^2 / 2 with g = std sqrt(d), at any depth. 16 seeds, 5 %."""
    vocab, d, std = 95, 128, 0.2
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab, (8, 17)), jnp.int32)
    want = log(vocab) + std**2 * d / 2
    for depth in (2, 8):
        shape = Shape(vocab, 16, depth, d, 4, norms=NormDefaults("layernorm", gain=False))
        losses = draws(
            64 if name == "post_ln" else 16,
            lambda key, shape=shape: LM(shape, CATALOGUE[name], Init("std", std=std), key=key),
            lambda m, key: loss(m(tokens[:, :-1], Context())[0], tokens[:, 1:]),
        )
        assert losses.mean() == pytest.approx(want, rel=0.05), depth


@pytest.mark.slow
@pytest.mark.parametrize("s", [1 / sqrt(12), 0.3, 0.1])
def test_variance_without_a_norm(s):
    """X16: (1 + s^2)^S for branches of unit gain and scale s; for s = 1/sqrt(S) that is near e. 16 draws, 10 %."""
    d, sites = 128, 12

    def ratio(model: Stack, key: jax.Array) -> jax.Array:
        h = jax.random.normal(jax.random.fold_in(key, 1), (1, 8, d))
        return jnp.mean(jnp.square(model(h, Context())[0])) / jnp.mean(jnp.square(h))

    scheme = BARE.but(scale=s)
    build_ = lambda key: stack(scheme, lambda kind, k: Matrix(d, k), sites, d, ("mlp",), init=XIONG, key=key)  # noqa: E731
    want = (1 + s**2) ** sites
    assert draws(16, build_, ratio).mean() == pytest.approx(want, rel=0.1)
    assert s != 1 / sqrt(12) or want == pytest.approx(e, rel=0.05)


@pytest.mark.slow
def test_scaled_output_matrices_keep_the_final_variance():
    """X17: with 1 / sqrt(2 L) on what writes to the stream, the final RMS does not depend on L. 3 %."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 95, (4, 32)), jnp.int32)
    finals = []
    for depth in (12, 24):
        shape = Shape(95, 32, depth, 64, 4, norms=NormDefaults("layernorm", gain=False), positions="none")
        context = Context(measure=lambda flow: {"square": jnp.mean(jnp.square(flow.after))})
        squares = draws(
            16,
            lambda key, shape=shape: LM(shape, PRE, Init("gain", gain=0.55), key=key),
            lambda m, key, context=context: m(tokens, context)[1]["square"],
        ).mean(0)
        finals.append(sqrt(squares[-1, -1]))
        assert np.all(np.diff(squares.reshape(-1)) > 0)
    assert finals[1] == pytest.approx(finals[0], rel=0.03)


def test_learned_numbers_by_hand():
    """X46: ReZero has one number a site, LayerScale 2 L d, an output norm 2 L d more (twice that with biases)."""

    def count(name: str, **norms: Any) -> int:
        shape = Shape(**(SMALL | {"norms": NormDefaults(**norms)}))
        return sum(
            v.size for v in variables(jax.eval_shape(lambda: LM(shape, CATALOGUE[name], Init(), key=jax.random.key(0))))
        )

    depth, d = SMALL["depth"], SMALL["width"]
    norms = (2 * depth + 1) * d
    assert count("pre_ln") - count("rezero") == norms - 2 * depth
    assert count("layerscale") - count("pre_ln") == 2 * depth * d
    assert count("sandwich_branch", kind="rmsnorm") - count("pre_ln", kind="rmsnorm") == 2 * depth * d
    assert count("sandwich_branch", bias=True) - count("pre_ln", bias=True) == 4 * depth * d


def test_learned_gains_are_float32_and_move_in_it():
    """Stored in float32 under a bfloat16 stream: 1 + 1e-3 is 1 in bfloat16."""
    model = with_gains(make(PRE.but(skip=Learned(1.0, "scalar")), depth=1, stream="bfloat16"), 1.0 + 1e-3)
    gains = [v for v in variables(model) if v.role == ("gain",)]
    assert {v.dtype for v in gains} == {jnp.dtype("float32")}
    assert all(float(v[...].reshape(-1)[0]) != 1.0 for v in gains)
    assert model.shape.stream == "bfloat16"


def test_gradients_that_are_sums_over_tokens_are_summed_in_float32():
    """A bfloat16 sum of equal terms stops at 256 of them; here are 4,096. Embedding, positions, biases, gains."""
    tokens = jnp.zeros((16, 256), jnp.int32)
    scheme = PRE.but(scale=Learned(0.1, "scalar"), skip=Learned(1.0, "vector", offset=True))
    shape = {"depth": 1, "vocab": 2, "length": 256, "bias": True}

    def gradient(stream: str) -> dict[str, np.ndarray]:
        model = make(scheme, stream=stream, **shape)
        context = Context(compute=jnp.dtype(stream))
        weights = jnp.asarray(np.random.default_rng(1).normal(size=shape["vocab"]), jnp.float32)
        grads = fast(jax.grad(lambda m: jnp.sum(m(tokens, context)[0] @ weights)))(model)
        return {role: np.concatenate([v.ravel() for v in values]) for role, values in by_role(grads).items()}

    want, got = gradient("float32"), gradient("bfloat16")
    for role in ("emb", "pos", "bias", "gain", "gain_offset"):
        assert np.linalg.norm(got[role] - want[role]) < 0.05 * np.linalg.norm(want[role]), role
