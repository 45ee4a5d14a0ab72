"""Is what watching tells of a foreign model true, and is the model left as it is? Probes against NumPy, under every transformation."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kit import fast
from resjax import watch
from resjax.errors import Refused
from resjax.health.probes import measure_precision, measure_tokens
from resjax.health.record import FORWARD_PROBES
from resjax.health.spectra import ranks_on_host
from resjax.residual import Flow
from test_probes import by_hand, lengths

DEPTH, BATCH, TIME, WIDTH = 3, 2, 5, 8
SITES = ("attention", "mlp")
PLAN = watch.Plan(DEPTH, SITES)
Weights = dict[str, jax.Array]


def weights(dtype: str = "float32", scale: float = 1.0) -> Weights:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        s: (0.4 * scale * jax.random.normal(k, (DEPTH, WIDTH, WIDTH))).astype(dtype)
        for s, k in zip(SITES, keys, strict=True)
    }


def inputs(dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(9), (BATCH, TIME, WIDTH)).astype(dtype)


def block(h: jax.Array, w: Weights, i: Any) -> jax.Array:
    h = watch.add(h, jnp.tanh(h @ w["attention"]), block=i, site="attention")
    return watch.add(h, jax.nn.relu(h @ w["mlp"]), block=i, site="mlp")


def plainly(h: jax.Array, w: Weights, i: Any) -> jax.Array:
    h = h + jnp.tanh(h @ w["attention"])
    return h + jax.nn.relu(h @ w["mlp"])


def unrolled(of: Any, w: Weights, x: jax.Array) -> jax.Array:
    for i in range(DEPTH):
        x = of(x, jax.tree.map(lambda leaf, i=i: leaf[i], w), i)
    return x


def scanned(of: Any, w: Weights, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, row: (of(h, *row), None), x, (w, jnp.arange(DEPTH)))[0]


def a_sample_at_a_time(of: Any, w: Weights, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda one: scanned(of, w, one))(x)


def nnx_scanned(of: Any, w: Weights, x: jax.Array) -> jax.Array:
    return nnx.scan(lambda h, w, i: of(h, w, i), in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(x, w, jnp.arange(DEPTH))


# One jitted block for all traces, as a decorator makes it.
JITTED = {of: jax.jit(of, static_argnums=2) for of in (block, plainly)}
WAYS = {
    "unrolled": unrolled,
    "scan": scanned,
    "jit inside": lambda of, w, x: unrolled(JITTED[of], w, x),
    "checkpoint": lambda of, w, x: unrolled(jax.checkpoint(of, static_argnums=2), w, x),
    "checkpoint in scan": lambda of, w, x: scanned(jax.checkpoint(of), w, x),
    "nnx.remat in scan": lambda of, w, x: scanned(nnx.remat(of), w, x),
    "nnx.scan": nnx_scanned,
    "vmap over samples": a_sample_at_a_time,
    "cond": lambda of, w, x: jax.lax.cond(x[0, 0, 0] < 9, partial(unrolled, of), lambda w, x: x, w, x),
}


def loss(out: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(out.astype(jnp.float32)) * jnp.arange(WIDTH, dtype=jnp.float32))


def gradient(way: Any, of: Any = block) -> Any:
    def f(w: Weights, taps: watch.Taps, x: jax.Array) -> tuple:
        with watch.into(taps):
            out = way(of, w, x)
        return loss(out), out

    return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)


def kept_by_hand(w: Weights, x: jax.Array) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Stream before, update and after of each add in order, float64 copies; and the gradient by a zero after each add."""

    def run(zeros: jax.Array) -> tuple[jax.Array, list]:
        h, place, flows = x, iter(zeros), []
        for i in range(DEPTH):
            for name, f in zip(SITES, (jnp.tanh, jax.nn.relu), strict=True):
                update = f(h @ w[name][i])
                flows.append({"kept": h, "update": update, "after": h + update})
                h = flows[-1]["after"] + next(place)
        return loss(h), flows

    grads, flows = fast(jax.grad(run, has_aux=True))(jnp.zeros((2 * DEPTH, *x.shape), x.dtype))
    return [{k: np.asarray(v).astype(np.float64) for k, v in flow.items()} for flow in flows], np.asarray(grads)


@functools.cache
def oracle(dtype: str = "float32", scale: float = 1.0) -> dict[str, np.ndarray]:
    """All site probes of the model in this precision, in NumPy."""
    flows, grads = kept_by_hand(weights(dtype, scale), inputs(dtype))
    rows = [by_hand(flow, np.dtype(getattr(ml_dtypes, dtype, dtype))) for flow in flows]
    norms = np.sqrt(np.sum(grads.astype(np.float64) ** 2, axis=(1, 2, 3)))
    found = {name: np.array([row[name] for row in rows]) for name in FORWARD_PROBES} | {"stream_grad": norms}
    return {name: values.reshape(DEPTH, len(SITES)) for name, values in found.items()}


def check(found: dict[str, np.ndarray], want: dict[str, np.ndarray], error: float = 2e-5) -> None:
    for name, values in want.items():
        np.testing.assert_allclose(found[name], values, rtol=error, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_probes_are_their_formulas_and_the_model_is_as_it_was(way):
    """Loss, outputs and gradients bit for bit as those of plain adds; all probes as NumPy has them."""
    w, x = weights(), inputs()
    f = gradient(WAYS[way])
    (value, out), (grads, taps) = jax.jit(f)(w, PLAN.taps(), x)
    check(watch.row(taps), oracle())
    (plain_value, plain_out), (plain_grads, _) = jax.jit(gradient(WAYS[way], plainly))(w, PLAN.taps(), x)
    for a, b in zip(
        jax.tree.leaves((value, out, grads)), jax.tree.leaves((plain_value, plain_out, plain_grads)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert watch.stream_dtype(taps) == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_stream_of_low_precision(dtype):
    w, x = weights(dtype, 0.02), inputs(dtype)
    _, (_, taps) = fast(gradient(scanned))(w, PLAN.taps(), x)
    found = watch.row(taps)
    assert watch.stream_dtype(taps) == dtype
    assert found["swallowed"].max() > 0.02
    found["swallowed"], want = np.zeros(1), oracle(dtype, 0.02) | {"swallowed": np.zeros(1)}
    check(found, want, 3e-2)


def test_the_rest_of_the_probes():
    """The whole block, both ends, and a stream that is no plain sum (Post-LN, a gate)."""
    w, x = weights(), inputs()
    plan = watch.Plan(2, ("post", "gate"))
    normed = lambda h: h / jnp.sqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True))  # noqa: E731

    def model(w: Weights, x: jax.Array) -> tuple[jax.Array, list]:
        h, seen = watch.embedded(x), [x]
        for i in range(2):
            update = jnp.tanh(h @ w["mlp"][i])
            after = watch.joined(normed(h + update), kept=h, update=update, block=i, site="post")
            gated = watch.change(after, 0.5 * after + 0.5 * jnp.sin(after), block=i, site="gate")
            seen += [update, after, gated]
            h = watch.block(h, gated, block=i)
        return watch.final(normed(h)), seen

    def f(taps: watch.Taps, w: Weights) -> tuple[jax.Array, list]:
        with watch.into(taps):
            out, seen = model(w, x)
        return loss(out), [out, *seen]

    taps, seen = fast(jax.grad(f, has_aux=True))(plan.taps(), w)
    found, (out, h, *flows) = watch.row(taps), [np.asarray(one, np.float64) for one in seen]
    assert found["embed_rms"] == pytest.approx(np.sqrt(np.mean(h**2)))
    assert found["final_rms"] == pytest.approx(np.sqrt(np.mean(out**2)))
    by_input = fast(jax.grad(lambda x: loss(model(w, x)[0])))(x)
    assert found["embed_grad"] == pytest.approx(float(jnp.linalg.norm(by_input)), rel=1e-5)
    for i in range(2):
        update, after, gated = flows[3 * i : 3 * i + 3]
        assert found["update_ratio"][i, 0] == pytest.approx(np.mean(lengths(update) / lengths(h)), rel=1e-5)
        assert found["stream_rms"][i, 0] == pytest.approx(1.0, rel=1e-5), "after the norm"
        assert found["update_ratio"][i, 1] == pytest.approx(np.mean(lengths(gated - after) / lengths(after)), rel=1e-5)
        assert found["update_ratio_block"][i] == pytest.approx(np.mean(lengths(gated - h) / lengths(h)), rel=1e-5)
        h = gated
    assert np.isnan(found["swallowed"][:, 1]).all() and np.isfinite(found["swallowed"][:, 0]).all()


def test_more_groups():
    """'tokens', 'ranks' and 'precision' as resjax's own step has them, beside the rest."""
    w, x = weights(), inputs()
    plan = watch.Plan(DEPTH, SITES, groups=("tokens", "ranks", "precision"))
    found = watch.row(fast(gradient(scanned))(w, plan.taps(), x)[1][1])
    check(found, oracle())
    for number, flow in enumerate(kept_by_hand(w, x)[0]):
        place = divmod(number, len(SITES))
        kept, update, after = (jnp.asarray(flow[name], jnp.float32) for name in ("kept", "update", "after"))
        own = Flow(kept, after, kept, update, kept, kept)
        for name, want in {**measure_tokens(own), **measure_precision(own)}.items():
            if name in ("token_cosine_centred", "residual_frobenius", "residual_composite", "growth", "headroom"):
                assert found[name][place] == pytest.approx(float(want), rel=1e-4, abs=1e-6), name
            assert np.isfinite(found[name][place])
        assert found["growth"][place] == pytest.approx(
            np.mean(lengths(flow["after"]) / lengths(flow["kept"])), rel=1e-5
        )
        centred = flow["after"] - flow["after"].mean(axis=1, keepdims=True)
        want = ranks_on_host(centred.reshape(-1, WIDTH), centre=False)
        for name, value in want.items():
            if name != "collapse":
                assert found[name][place] == pytest.approx(value, rel=3e-3), name
        attainable = min(WIDTH, BATCH * (TIME - 1))
        assert found["rank_collapse"][place] == pytest.approx(1 - want["effective_rank"] / attainable, abs=3e-3)
        ratio = np.linalg.norm(flow["update"]) / np.linalg.norm(flow["kept"])
        assert found["update_ratio_frobenius"][place] == pytest.approx(ratio, rel=1e-5)
    with pytest.raises(Refused, match="groups is 'token', which is none of tokens, ranks, precision; did you mean"):
        watch.Plan(2, groups=("token",))
    with pytest.raises(
        Refused, match="groups has 'attention', which an add cannot tell: the softmax is inside the branch"
    ):
        watch.Plan(2, groups=("attention",))


def test_outside_of_a_context_an_add_is_an_add():
    w, x = weights(), inputs()
    for of, plain in ((unrolled, partial(unrolled, plainly)), (scanned, partial(scanned, plainly))):
        assert str(jax.make_jaxpr(partial(of, block))(w, x)) == str(jax.make_jaxpr(plain)(w, x))
    assert (
        watch.embedded(x) is watch.final(x) is watch.block(x, x, block=0) is watch.change(x, x, block=0, site="a") is x
    )

    def f(w: Weights, taps: watch.Taps) -> jax.Array:
        with watch.into(taps):
            return unrolled(block, w, x)

    jaxpr = str(jax.make_jaxpr(lambda w: f(w, PLAN.taps()))(w))
    assert "cond" not in jaxpr, "nothing is measured where nothing is differentiated by the taps"


def test_traces_do_not_leak_into_one_another():
    """A jitted function inside is traced anew for each context and outside; what it was traced with before is left behind."""
    w, x = weights(), inputs()
    inner = jax.jit(partial(scanned, block))
    quiet, plain = inner(w, x), str(jax.make_jaxpr(inner)(w, x))
    found = [
        watch.row(fast(jax.grad(lambda taps, w=w: loss_in(taps, inner, w, x)))(plan.taps()))
        for plan in (PLAN, watch.Plan(DEPTH, SITES[::-1]), PLAN)
    ]
    for name in FORWARD_PROBES:
        np.testing.assert_array_equal(found[0][name], found[1][name][:, ::-1])
        np.testing.assert_array_equal(found[0][name], found[2][name])
    np.testing.assert_array_equal(quiet, inner(w, x))
    assert str(jax.make_jaxpr(inner)(w, x)) == plain
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(lambda taps: loss_in(taps, partial(unrolled, block), w, x)))(PLAN.taps())


def loss_in(taps: watch.Taps, f: Any, *arguments: Any) -> jax.Array:
    with watch.into(taps):
        return loss(f(*arguments))


def test_contexts_within_one_another_and_errors_in_them():
    """The inner one hears, then the outer one again; after an error nobody does."""
    x = inputs()
    plan = watch.Plan(1, ("a",))
    add = lambda h, scale: watch.add(h, scale * h, block=0, site="a")  # noqa: E731

    def f(outer: watch.Taps, inner: watch.Taps) -> jax.Array:
        with watch.into(outer):
            with watch.into(inner):
                h = add(x, 0.5)
            return loss(add(h, 0.25))

    outer, inner = (watch.row(taps) for taps in fast(jax.grad(f, argnums=(0, 1)))(plan.taps(), plan.taps()))
    assert outer["update_ratio"][0, 0] == 0.25 and inner["update_ratio"][0, 0] == 0.5

    with pytest.raises(ZeroDivisionError):
        jax.grad(lambda taps: loss_in(taps, lambda: 1 / 0))(plan.taps())
    assert str(jax.make_jaxpr(add)(x, 1.0)) == str(jax.make_jaxpr(lambda h, scale: h + scale * h)(x, 1.0))


def test_cadence_is_data():
    """Off: no probes, the same numbers, the same program."""
    w, x = weights(), inputs()
    step = jax.jit(gradient(scanned))
    (on_value, _), (on_grads, found) = step(w, PLAN.taps(), x)
    (off_value, _), (off_grads, nothing) = step(w, PLAN.taps(on=False), x)
    assert step._cache_size() == 1 and watch.row(found) and watch.row(nothing) == {}
    np.testing.assert_array_equal(on_value, off_value)
    jax.tree.map(np.testing.assert_array_equal, on_grads, off_grads)
    inside = fast(lambda on: gradient(scanned)(w, PLAN.taps(on), x)[1][1])
    assert watch.row(inside(True)) and watch.row(inside(False)) == {}


def test_an_infinite_value_is_located():
    w = weights()
    w["mlp"] = w["mlp"].at[1].set(jnp.inf)
    found = watch.row(fast(gradient(scanned))(w, PLAN.taps(), inputs())[1][1])
    np.testing.assert_array_equal(found["finite"], [[1, 1], [1, 0], [0, 0]])


def test_vmap_over_blocks_keeps_them_apart():
    """Blocks that are run side by side, each on a stream of its own."""
    w, x = weights(), jax.random.normal(jax.random.key(3), (DEPTH, BATCH, TIME, WIDTH))

    def f(taps: watch.Taps) -> jax.Array:
        with watch.into(taps):
            return loss(jax.vmap(block)(x, w, jnp.arange(DEPTH)))

    found = watch.row(fast(jax.grad(f))(PLAN.taps()))
    for i in range(DEPTH):
        after = x[i] + jnp.tanh(x[i] @ w["attention"][i])
        assert found["stream_rms"][i, 0] == pytest.approx(float(jnp.sqrt(jnp.mean(after**2))), rel=1e-5)


# ---- what is refused, each in one sentence


def one_pass(body: Any, plan: watch.Plan = PLAN) -> watch.Taps:
    return fast(jax.grad(lambda taps: loss_in(taps, body)))(plan.taps())


def test_a_forgotten_add_is_told():
    x, w = inputs(), weights()
    some = lambda: unrolled(lambda h, w, i: block(h, w, i) if i != 1 else plainly(h, w, i), w, x)  # noqa: E731
    with pytest.raises(
        Refused, match=r"'attention' of block 1 was not passed .* the plan has 3 blocks with attention, mlp"
    ):
        watch.row(one_pass(some))
    found = watch.row(one_pass(some), partial=True)
    assert np.isnan(found["stream_rms"][1]).all() and np.isfinite(found["stream_rms"][[0, 2]]).all()
    with pytest.raises(Refused, match=r"no add reported: call watch.add inside watch.into"):
        watch.row(one_pass(lambda: unrolled(plainly, w, x)))
    with pytest.raises(Refused, match="'attention' of block 0 was not passed"):
        watch.row(
            one_pass(lambda: jax.lax.stop_gradient(unrolled(block, w, x)) + watch.add(x, x, block=2, site="attention"))
        )


def test_names_that_repeat_are_told():
    x, w = inputs(), weights()
    with pytest.raises(Refused, match="'mlp' of block 0 was passed 2 times in one step"):
        watch.row(one_pass(lambda: watch.add(unrolled(block, w, x), x, block=0, site="mlp")))
    with pytest.raises(Refused, match="'attention' of block 2 was passed 2 times"):
        wrong = (jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), w), jnp.arange(DEPTH + 1))
        watch.row(one_pass(lambda: jax.lax.scan(lambda h, row: (block(h, *row), None), x, wrong)[0]))
    with pytest.raises(Refused, match=r"watch.final was passed 2 times"):
        watch.row(one_pass(lambda: watch.final(watch.final(unrolled(block, w, x)))))
    with pytest.raises(Refused, match="names 'a' twice"):
        watch.Plan(2, ("a", "b", "a"))


def test_a_gradient_that_was_scaled_is_told():
    found = one_pass(lambda: unrolled(block, weights(), inputs()))
    with pytest.raises(Refused, match=r"passed 0\.5 times: hand over the gradient of the taps as jax\.grad gives it"):
        watch.row(jax.tree.map(lambda leaf: 0.5 * leaf, found))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: watch.add(x, x, block=3, site="mlp"), "block is 3, and the plan has 3: 0 to 2"),
        (lambda x: watch.add(x, x, block=-1, site="mlp"), "block is -1"),
        (lambda x: watch.add(x, x, block=0.5, site="mlp"), r"block is 0\.5, and has to be a whole number"),
        (lambda x: watch.add(x, x, block=0, site="mpl"), "none of attention, mlp; did you mean 'mlp'"),
        (lambda x: watch.add(jnp.int32(1), jnp.int32(1), block=0, site="mlp"), r"the stream is int32\[\]"),
    ],
)
def test_calls_that_do_not_fit_the_plan(call, words):
    with pytest.raises(Refused, match=words):
        jax.eval_shape(jax.grad(lambda taps: loss_in(taps, lambda: call(inputs()))), PLAN.taps())


def test_what_is_no_taps_and_no_plan():
    with pytest.raises(Refused, match=r"was given a int, and takes taps"), watch.into(3):
        pass
    with pytest.raises(Refused, match="of type dict"):
        watch.row({})
    with pytest.raises(Refused, match="inside a traced function"):
        jax.jit(lambda taps: watch.row(taps)["stream_rms"])(PLAN.taps())
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(Refused, match="blocks is"):
            watch.Plan(wrong)
    with pytest.raises(Refused, match="one or more names"):
        watch.Plan(2, ())
    assert watch.Plan(2, "block") == watch.Plan(2, ["block"])


def test_a_plan_is_found():
    w, x = weights(), inputs()
    assert watch.find(lambda w: loss(unrolled(JITTED[block], w, x)), w) == PLAN
    with pytest.raises(Refused, match=r"the number of a block is traced .* give watch\.Plan"):
        watch.find(partial(scanned, block), w, x)
    with pytest.raises(Refused, match=r"no watch\.add in it"):
        watch.find(partial(unrolled, plainly), w, x)
    assert watch.find(lambda: unrolled(JITTED[block], w, x)) == PLAN, "also of what was traced before"


# ---- without a context


def test_the_functional_variant_is_the_same():
    w, x = weights(), inputs()

    def body(h: jax.Array, row: tuple) -> tuple:
        w, taps = row
        h, attention = watch.site(h, jnp.tanh(h @ w["attention"]), taps["attention"])
        h, mlp = watch.site(h, jax.nn.relu(h @ w["mlp"]), taps["mlp"])
        return h, {"attention": attention, "mlp": mlp}

    def f(w: Weights, taps: Weights) -> tuple:
        out, rows = jax.lax.scan(body, x, (w, taps))
        return loss(out), rows

    zeros = {site: jnp.zeros(DEPTH) for site in SITES}
    (value, rows), (grads, taps) = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(w, zeros)
    check(watch.rows(rows, taps), oracle())
    (want, _), (plain, _) = jax.jit(gradient(scanned, plainly))(w, PLAN.taps(), x)
    np.testing.assert_array_equal(value, want)
    jax.tree.map(np.testing.assert_array_equal, grads, plain)
    listed = {site: [{k: v[i] for k, v in rows[site].items()} for i in range(DEPTH)] for site in SITES}
    np.testing.assert_array_equal(watch.rows(listed)["update_ratio"], watch.rows(rows)["update_ratio"])
    with pytest.raises(Refused, match="taps are given for mlp, and rows for attention, mlp"):
        watch.rows(rows, {"mlp": taps["mlp"]})
    with pytest.raises(Refused, match=r"not those of watch\.site: loss"):
        watch.rows({"mlp": {"loss": jnp.zeros(3)}})
    with pytest.raises(Refused, match="as many blocks at each site"):
        watch.rows({"attention": rows["attention"], "mlp": {k: v[:2] for k, v in rows["mlp"].items()}})


def test_plain_arrays():
    w, x = weights(), inputs()
    flows, grads = kept_by_hand(w, x)
    by_site = {
        name: {site: np.stack([f[key] for f in flows[i::2]]).astype(np.float32) for i, site in enumerate(SITES)}
        for name, key in (("before", "kept"), ("update", "update"), ("after", "after"))
    }
    by_site["grads"] = {site: np.asarray(grads[i::2]) for i, site in enumerate(SITES)}
    found = watch.from_arrays(**by_site)
    check(found, oracle())
    before, after = by_site["before"]["attention"], by_site["after"]["mlp"]
    want = np.mean(lengths(after - before) / lengths(before), axis=(1, 2))
    np.testing.assert_allclose(found["update_ratio_block"], want, rtol=1e-5)
    one = watch.from_arrays(before, by_site["update"]["attention"])
    assert one["update_ratio"].shape == (DEPTH, 1) and "stream_grad" not in one
    np.testing.assert_allclose(one["update_ratio"][:, 0], found["update_ratio"][:, 0], rtol=1e-6)
    with pytest.raises(Refused, match=r"update has the shape \(2, 2, 5, 8\), and before has \(3, 2, 5, 8\)"):
        watch.from_arrays(before, before[:2])
    with pytest.raises(Refused, match="update has the sites mlp, and before has attention"):
        watch.from_arrays({"attention": before}, {"mlp": before})
    with pytest.raises(Refused, match="has to be"):
        watch.from_arrays(np.zeros(3), np.zeros(3))


def test_gradient_norms_of_blocks():
    w = weights()
    want = [np.sqrt(sum(np.sum(np.square(leaf[i])) for leaf in w.values())) for i in range(DEPTH)]
    listed = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(DEPTH)]
    for given in (w, listed):
        np.testing.assert_allclose(jax.jit(watch.gradient_norms)(given), want, rtol=1e-6)
