"""Is what the step reports of its residual stream true? Probes against NumPy, taps against explicit gradients."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kit import KINDS, TOKENS, fast, functional, largest_difference, make, perturbed, relative, stack, variables
from resjax.block import Layer
from resjax.branches import MLP, Attention
from resjax.health import metrics, probes
from resjax.models.lm import LM, loss
from resjax.residual import CATALOGUE, Blocks, Context, Flow, Knob, Where
from resjax.stack import Stack
from resjax.train.optimizer import build
from resjax.train.schedule import schedule
from resjax.train.state import create
from resjax.train.step import Recipe, block_norms, make_step

PRE, POST = CATALOGUE["pre_ln"], CATALOGUE["post_ln"]
RANGES = PRE.but(Where(None, Blocks(0, 0)), skip=0.0).but(Where("mlp", Blocks(2)), scale=0.1)
BATCH = jnp.asarray(TOKENS)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def real(width: int) -> Any:
    def branch(kind: str, key: jax.Array) -> nnx.Module:
        return Attention(width, 2, key=key) if kind == "attention" else MLP(width, 2 * width, key=key)

    return branch


# ---- each probe is its formula, in NumPy, one token and one pair of tokens at a time


def lengths(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(x**2, axis=-1))


def by_hand(flow: dict[str, np.ndarray | None], dtype: Any) -> dict[str, float]:
    """All probes of one site from float64 copies of what flowed."""
    after, update, kept = flow["after"], flow["update"], flow["kept"]
    samples, count = after.shape[:2]
    cosines = [
        after[b, i] @ after[b, j] / lengths(after[b, i]) / lengths(after[b, j])
        for b in range(samples)
        for i in range(count)
        for j in range(count)
        if i != j
    ]
    want = dict.fromkeys(probes.FORWARD_PROBES, np.nan) | {
        "stream_rms": np.sqrt(np.mean(after**2)),
        "token_cosine": np.mean(cosines),
        "stream_max": np.max(np.abs(after)),
        "finite": float(np.all(np.isfinite(after))),
    }
    if update is not None:
        want |= {"update_rms": np.sqrt(np.mean(update**2)), "update_max": np.max(np.abs(update))}
    if update is not None and kept is not None:
        joined = (kept + update).astype(dtype).astype(np.float64)
        moved = update != 0
        want |= {
            "update_ratio": np.mean(lengths(update) / lengths(kept)),
            "update_cosine": np.mean(np.sum(update * kept, -1) / lengths(update) / lengths(kept)),
            "swallowed": np.mean(joined[moved] == kept[moved]) if moved.any() else np.nan,
        }
    return want


def all_of(flow: Flow) -> dict[str, jax.Array]:
    nothing = jnp.full_like(flow.after, jnp.nan)
    return probes.measure(flow) | {k: nothing if v is None else v for k, v in flow._asdict().items()}


CASES = {
    "pre_ln": (PRE, "float32"),
    "post_ln": (POST, "bfloat16"),
    "deepnorm": (CATALOGUE["deepnorm"], "float32"),
    "plain": (CATALOGUE["plain"], "float32"),
    "ranges": (RANGES, "bfloat16"),
    "entry": (POST.but(Where("mlp"), entry=0.5), "float32"),
    "no_update": (PRE.but(Where("attention"), scale=0.0), "float16"),
}


@pytest.mark.parametrize(("scheme", "dtype"), CASES.values(), ids=CASES.keys())
def test_probes_are_their_formulas(scheme, dtype):
    """M1, M4, M12 and the sizes; NaN where nothing is kept, or nothing added, and nowhere else."""
    model = make(scheme, depth=3, stream=dtype)
    context = Context(measure=all_of, measure_block=probes.measure_block, compute=jnp.dtype(dtype))
    _, got = fast(lambda m: m(BATCH, context))(model)
    got = {name: np.asarray(value).astype(np.float64) for name, value in got.items()}
    for block in range(3):
        for i, kind in enumerate(KINDS):
            flow = {name: got[name][block, i] for name in Flow._fields}
            flow = {name: None if np.isnan(value).all() else value for name, value in flow.items()}
            resolved = scheme.resolve(kind, block, 30)
            assert (flow["kept"] is None) == (resolved.skip == 0 and resolved.entry == 0)
            assert (flow["update"] is None) == (resolved.scale == 0)
            for name, want in by_hand(flow, getattr(ml_dtypes, dtype, dtype)).items():
                # a product of two halves may enter a probe before it is rounded to be stored
                error = {"rel": 1e-5 if dtype == "float32" else 1e-3, "abs": 1e-6, "nan_ok": True}
                assert got[name][block, i] == pytest.approx(want, **error), (block, kind, name)
        before, after = got["before"][block, 0], got["after"][block, -1]
        want = np.mean(lengths(after - before) / lengths(before))
        assert got["update_ratio_block"][block] == pytest.approx(want, rel=1e-5)
    assert {got[name].shape for name in probes.FORWARD_PROBES} == {(3, 2)}


def test_both_ends():
    model = make(PRE, depth=1)
    _, got = fast(lambda m: m(BATCH, Context(measure=all_of)))(model)
    embedded = np.asarray(model.embed[...], np.float64)[TOKENS] + np.asarray(model.positions[...], np.float64)
    assert float(got["embed_rms"]) == pytest.approx(np.sqrt(np.mean(embedded**2)), rel=1e-6)
    final = model.final_norm(got["after"][-1, -1])
    assert float(got["final_rms"]) == pytest.approx(float(jnp.sqrt(jnp.mean(final**2))), rel=1e-6)
    assert all(value.dtype == jnp.float32 for value in got.values())


def test_growth_of_a_token_from_ratio_and_cosine():
    """M4: g^2 = 1 + r^2 + 2 r a, for the only token of the only sample; the mean over pairs of tokens is then NaN."""
    model = perturbed(lambda: stack(PRE, real(8), 4, 8))
    _, got = fast(lambda m, h: m(h, Context(measure=all_of)))(model, jnp.asarray(normal(1, 1, 8)))
    growth = lengths(np.asarray(got["after"]))[..., 0, 0] / lengths(np.asarray(got["before"]))[..., 0, 0]
    r, a = np.asarray(got["update_ratio"]), np.asarray(got["update_cosine"])
    np.testing.assert_allclose(growth**2, 1 + r**2 + 2 * r * a, rtol=1e-5)
    assert np.isnan(got["token_cosine"]).all()


@pytest.mark.parametrize(
    ("tokens", "want", "error"),
    [
        (np.tile(normal(1, 1, 16), (2, 5, 1)), 1.0, 1e-6),
        (np.eye(8)[None, :6] * 3, 0.0, 1e-6),
        (np.stack([np.eye(4)[:1], -np.eye(4)[:1]], axis=1), -1.0, 1e-6),
        (normal(4, 64, 256), 0.0, 2 / np.sqrt(256)),
        (np.concatenate([normal(1, 1, 16)] * 2 + [1e6 * normal(1, 1, 16)], axis=1), 1.0, 1e-6),
    ],
    ids=["identical", "orthogonal", "opposite", "gaussian", "lengths_do_not_count"],
)
def test_token_cosine_of_known_tokens(tokens, want, error):
    """M1, X50."""
    assert float(metrics.token_cosine(jnp.asarray(tokens, jnp.float32))) == pytest.approx(want, abs=error)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_swallowed_counts_what_the_add_loses(dtype):
    """M12: of the elements of the update that are not zero; compiled, where two casts would be taken out."""
    kept = jnp.asarray(normal(4, 4000), dtype)
    update = jnp.asarray(normal(4, 4000, seed=1) * 0.003, dtype).at[:, ::4].set(0)
    want = np.asarray(total_of(kept, update)) == np.asarray(kept)
    want = want[np.asarray(update) != 0].mean()
    assert float(jax.jit(metrics.swallowed)(update, kept)) == pytest.approx(want, abs=1e-7)
    assert want == (0.0 if dtype == jnp.float32 else pytest.approx(want)) and (want > 0.01 or dtype == jnp.float32)
    assert np.isnan(metrics.swallowed(jnp.zeros_like(update), kept)), "nothing to lose is not nothing lost"


def total_of(kept: jax.Array, update: jax.Array) -> np.ndarray:
    exact = np.asarray(kept).astype(np.float64) + np.asarray(update).astype(np.float64)
    return exact.astype(np.asarray(kept).dtype)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("planted", [np.nan, np.inf])
def test_the_first_site_that_is_not_finite(planted, scan):
    """All sites before are 1, it and those above are 0."""
    model = make(PRE, depth=4, scan=scan)
    kernel = model.stack.runs[0].sites[1].branch.write.kernel
    kernel[...] = kernel[...].at[2, 0, 0].set(planted)
    _, got = fast(lambda m: m(BATCH, Context(measure=probes.measure)))(model)
    np.testing.assert_array_equal(got["finite"].reshape(-1), [1, 1, 1, 1, 1, 0, 0, 0])


def test_an_overflow_of_float16_shows_where_it_begins():
    """A11: an MLP whose output passes 65 504 in block 2; the sites below show their headroom."""
    model = make(PRE, depth=4, stream="float16")
    kernel = model.stack.runs[0].sites[1].branch.write.kernel
    kernel[...] = kernel[...].at[2].multiply(4e4)

    def run(dtype: Any) -> dict[str, np.ndarray]:
        context = Context(measure=probes.measure, compute=dtype)
        return {k: np.asarray(v).reshape(-1) for k, v in fast(lambda m: m(BATCH, context)[1])(model).items()}

    half = run(jnp.float16)
    np.testing.assert_array_equal(half["finite"], [1, 1, 1, 1, 1, 0, 0, 0])
    assert half["update_max"][5] == np.inf and np.all(half["stream_max"][:5] < 100)


# ---- off, and not in the way


def test_steps_that_do_not_measure_report_zeros_and_branch_around_the_cost():
    model = make(PRE, depth=3)

    def run(m: LM, on: jax.Array) -> tuple[jax.Array, dict]:
        return m(BATCH, Context(measure=probes.measure, measure_block=probes.measure_block, on=on))

    step = fast(run)
    logits, got = step(model, jnp.asarray(True))
    quiet_logits, quiet = step(model, jnp.asarray(False))
    assert jax.tree.map(jnp.shape, quiet) == jax.tree.map(jnp.shape, got)
    assert all(not v.any() for v in quiet.values()) and all(v.any() for k, v in got.items() if k != "swallowed")
    np.testing.assert_array_equal(logits, quiet_logits)
    assert step._cache_size() == 1

    # Whatever is measured stands in the branches of a cond: outside of them there are a few operations a site more.
    def work(f: Any, *arguments: Any) -> dict[str, int]:
        found: dict[str, int] = {}

        def walk(jaxpr: Any) -> None:
            for eqn in jaxpr.eqns:
                found[eqn.primitive.name] = found.get(eqn.primitive.name, 0) + 1
                for value in eqn.params.values():
                    if eqn.primitive.name != "cond" and hasattr(getattr(value, "jaxpr", value), "eqns"):
                        walk(getattr(value, "jaxpr", value))

        walk(jax.make_jaxpr(f)(*arguments).jaxpr)
        return found

    plain = work(lambda m: m(BATCH, Context())[0], model)
    with_probes = work(run, model, jnp.asarray(False))
    assert with_probes["cond"] == 4  # two sites and a block in the loop, the ends
    arithmetic = ("mul", "add", "div", "reduce_sum", "reduce_max", "sqrt", "is_finite", "abs", "dot_general")
    assert {k: plain.get(k) for k in arithmetic} == {k: with_probes.get(k) for k in arithmetic}


def loss_of(model: LM, context: Context, taps: Any = None, embed: Any = None) -> tuple[jax.Array, dict]:
    logits, got = model(BATCH, dataclasses.replace(context, taps=taps), embed)
    return functional(logits), got


@pytest.mark.parametrize("name", ["pre_ln", "rezero"])
def test_gradients_do_not_know_of_probes(name):
    """The same with and without; also where a probe has no derivative, as at an update of zero."""
    model = make(name, depth=2)
    if name == "rezero":
        model.stack.runs[0].sites[0].gains["scale"].gain[...] = jnp.zeros(2)
    measured = Context(measure=probes.measure, measure_block=probes.measure_block)
    grads = [fast(jax.grad(lambda m, c=c: loss_of(m, c)[0]))(model) for c in (measured, Context())]
    assert largest_difference(*grads) < 1e-6
    of_probes = fast(jax.grad(lambda m: sum(jnp.sum(v) for v in loss_of(m, measured)[1].values())))(model)
    assert not any(np.any(v) for v in jax.tree.leaves(of_probes))


# ---- taps


def explicit(model: LM, scheme: Any) -> np.ndarray:
    """Gradient norms at every point of the stream: a zero is added there, and the loss differentiated by it."""
    depth = model.stack.depth
    embedded = model.embed[...][BATCH] + model.positions[...]

    def run(zeros: jax.Array) -> jax.Array:
        h = embedded + zeros[0]
        for block in range(depth):
            entry, connections = h, model.stack.block(block).sites
            for i, (connection, site) in enumerate(zip(connections, model.stack.places(block), strict=True)):
                h, _ = connection(h, site, {}, entry if i else None, Context())
                h = h + zeros[1 + 2 * block + i]
        final = h if model.final_norm is None else model.final_norm(h)
        return functional(model.logits(final))

    grads = fast(jax.grad(run))(jnp.zeros((1 + 2 * depth, *embedded.shape)))
    return np.sqrt(np.sum(np.asarray(grads, np.float64) ** 2, axis=(1, 2, 3)))


WAYS = [
    (PRE, {}),
    (PRE, {"scan": False}),
    (POST.but(Where("mlp"), entry=0.5), {"remat": "dots"}),
    (RANGES, {"scan": False, "remat": "full"}),
    (RANGES, {"remat": "full"}),
]


@pytest.mark.parametrize(("scheme", "way"), WAYS)
def test_taps_are_gradient_norms(scheme, way):
    model = make(scheme, depth=3, **way)
    gradient = fast(jax.grad(lambda taps, m, on: loss_of(m, Context(on=on), *taps)[0], argnums=(0, 1)))
    taps = (jnp.zeros((3, 2)), jnp.float32(0))
    (sites, embed), grads = gradient(taps, model, jnp.asarray(True))
    want = explicit(make(scheme, depth=3), scheme)
    assert relative(np.sqrt(sites).reshape(-1), want[1:]) < 1e-5
    assert np.sqrt(float(embed)) == pytest.approx(want[0], rel=1e-5)
    assert want.min() > 1e-3

    (sites, embed), same = gradient(taps, model, jnp.asarray(False))
    assert not sites.any() and not embed
    assert largest_difference(same, grads) == 0.0
    assert gradient._cache_size() == 1


def test_taps_do_not_change_gradients_nor_low_precision_streams():
    taps = (jnp.zeros((2, 2)), jnp.float32(0))
    model = make(PRE, depth=2, stream="bfloat16")
    untapped = fast(jax.grad(lambda m: loss_of(m, Context())[0]))(model)
    squares, tapped = fast(jax.grad(lambda t, m: loss_of(m, Context(), *t)[0], argnums=(0, 1)))(taps, model)
    assert largest_difference(tapped, untapped) < 1e-6
    assert all(s.dtype == jnp.float32 and np.all(s > 0) for s in squares)


# ---- knobs, blocks


def test_a_knob_turns_without_a_new_program():
    model = make(PRE.but(scale=Knob("c"), drop=Knob("p")), depth=2)
    run = fast(lambda m, c, p: m(BATCH, Context(knobs={"c": c, "p": p}))[0])
    for value in (0.25, 1.0, -2.0):
        got = run(model, jnp.float32(value), jnp.float32(0))
        assert relative(got, fast(lambda m: m(BATCH, Context())[0])(make(PRE.but(scale=value), depth=2))) < 1e-6
    assert run._cache_size() == 1


def test_scale_outside_training():
    """'Multiply by 10 in training, shrink at inference': two schemes in one record."""
    both = make(PRE.but(scale=10.0, scale_eval=0.1), depth=2)
    for train, value in ((True, 10.0), (False, 0.1)):
        got = fast(lambda m, train=train: m(BATCH, Context(train=train))[0])(both)
        want = fast(lambda m: m(BATCH, Context())[0])(make(PRE.but(scale=value), depth=2))
        assert relative(got, want) < 1e-6


def test_one_block_to_look_into():
    model: Stack = perturbed(lambda: stack(RANGES, real(8), 4, 8))
    h = jnp.asarray(normal(2, 3, 8))
    out, got = fast(lambda m, h: m(h, Context(measure=all_of)))(model, h)
    for index in range(4):
        block = model.block(index)
        h, _, _ = fast(lambda b, h, i=index: b(h, Layer(i, [{}, {}], None), Context()))(block, h)
        assert relative(h, got["after"][index, -1]) < 1e-5
        run = next(r for r, plan in enumerate(model.plan) if plan.first <= index < plan.first + plan.length)
        stored = model.runs[run]
        for mine, theirs in zip(variables(block), variables(stored), strict=True):
            assert mine.role == theirs.role and mine.shape == theirs.shape[1:]
            assert theirs.get_metadata()["stacked"] and not mine.get_metadata()["stacked"]
            np.testing.assert_array_equal(mine[...], theirs[index - model.plan[run].first])
    assert relative(h, out) < 1e-5
    for index in (4, -1):
        with pytest.raises(IndexError, match=f"block {index} is not one of"):
            model.block(index)


# ---- the step


def test_norms_of_the_gradients_of_blocks():
    """In the order of the blocks, also where there are more than ten runs."""
    alternating = PRE
    for block in range(0, 12, 2):
        alternating = alternating.but(Where(None, Blocks(block, block)), skip=0.5)
    for scheme, runs in ((alternating, 12), (RANGES, 3)):
        grads = make(scheme, depth=12)
        assert len(grads.stack.plan) == runs
        blocks = [
            np.concatenate([np.asarray(v[...]).reshape(-1) for v in variables(grads.stack.block(i))]) for i in range(12)
        ]
        np.testing.assert_allclose(fast(block_norms)(nnx.state(grads)), [np.linalg.norm(b) for b in blocks], rtol=1e-5)


def test_what_a_step_reports_does_not_depend_on_slices_or_loss_scale():
    model = make(PRE, depth=2)
    graphdef, params = nnx.split(model)
    config = SimpleNamespace(name="sgd", lr=0.1, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0)
    optimizer = build(config, 10, params)
    batch = jnp.asarray(np.concatenate([TOKENS, TOKENS[:, :1]], axis=1))
    seen = []
    for recipe, scale in ((Recipe(), 1.0), (Recipe(accumulate=2, scaled=True), 1024.0)):
        step = fast(make_step(graphdef, optimizer, schedule("constant", 0.1, 0, 10), recipe))
        seen.append(step(create(params, optimizer, jax.random.key(0), scale), batch, jnp.asarray(True)))
    (state, metrics, got), (state_2, metrics_2, got_2) = seen
    for name in ("loss", "grad_norm"):
        assert float(metrics_2[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    for name in ("stream_grad", "param_grad_block", "embed_grad", "stream_max", "update_ratio", "update_ratio_block"):
        assert relative(got_2[name], got[name]) < 1e-5, name
    assert largest_difference(state_2.params, state.params) < 1e-5

    def whole(m: LM, taps: jax.Array) -> jax.Array:
        return loss(m(batch[:, :-1], Context(taps=taps))[0], batch[:, 1:])

    grads, squares = fast(jax.grad(whole, argnums=(0, 1)))(model, jnp.zeros((2, 2)))
    np.testing.assert_allclose(got["stream_grad"], np.sqrt(squares), rtol=1e-5)
    np.testing.assert_allclose(got["param_grad_block"], block_norms(nnx.state(grads)), rtol=1e-5)
