"""Is what the groups of probes report true? Each probe against NumPy on what flowed, by scheme; extremes; whole steps."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import runs
from kit import TOKENS, fast, largest_difference, make, relative, variables
from resjax.branches import Attention
from resjax.config.schema import HEALTH_GROUPS
from resjax.config.tree import assign, default
from resjax.config.validate import resolve
from resjax.health import probes
from resjax.health.attention import attention_figures, merged_figures
from resjax.health.record import MORE_PROBES, ROLE_PROBES, HealthRecord
from resjax.health.spectra import ranks_on_host
from resjax.health.tridiagonal import eigenvalues, tridiagonal
from resjax.residual import CATALOGUE, Context, Flow, Observer
from resjax.residual.entries import FORMS
from resjax.train import roles
from resjax.train.assemble import assemble
from resjax.train.optimizer import build
from resjax.train.schedule import schedule
from resjax.train.state import create
from resjax.train.step import Recipe, make_step

BATCH = jnp.asarray(TOKENS)
ALL = frozenset(MORE_PROBES)
SITES = [name for group, names in MORE_PROBES.items() if group not in ("roles", "optimizer") for name in names]
SCHEMES = ("pre_ln", "post_ln", "attnres", "reversible", "ngpt", "highway", "parallel", "hyper_connections:dynamic")

QUICK = ("pre_ln", "attnres", "hyper_connections:dynamic")


def scheme_of(name):
    base, _, form = name.partition(":")
    return FORMS[base][form] if form else CATALOGUE[base]


class Logits(Observer):
    """The logits themselves; NaN of the same shape where there are none."""

    def nothing(self):
        return {"logits": jnp.full((2, 2, 6, 6), jnp.nan)}


LOGITS = Logits("scores", ("logits",), lambda parts: {"logits": parts[0]})


def captured(flow: Flow):
    nothing = jnp.full_like(flow.after, jnp.nan)
    taken = {name: nothing if value is None else value for name, value in flow._asdict().items()}
    return probes.measuring(ALL)(flow) | taken


def all_probes(model, on=True, tokens=BATCH, observers=(LOGITS, probes.ATTENTION), measure=captured):
    context = Context(measure=measure, observers=observers, on=on)
    logits, got = model(tokens, context)
    return logits, probes.finished(got, context)


# ---- each probe is its formula


def size(x):
    return np.sqrt(np.sum(x**2, axis=-1))


def tokens_by_hand(flow):
    after, update, beside = flow["after"], flow["update"], flow["beside"]
    left = after - after.mean(axis=(0, 1))
    pairs = [
        left[b, i] @ left[b, j] / size(left[b, i]) / size(left[b, j])
        for b in range(len(left))
        for i in range(left.shape[1])
        for j in range(left.shape[1])
        if i != j
    ]
    norm = np.linalg.norm
    composite = lambda x: np.sqrt(np.abs(x).sum(0).max() * np.abs(x).sum(1).max())  # noqa: E731
    of_own = after - after.mean(axis=1, keepdims=True)
    return {
        "token_cosine_centred": np.mean(pairs),
        "residual_frobenius": np.mean([norm(r) / norm(x) for r, x in zip(of_own, after, strict=True)]),
        "residual_composite": np.mean([composite(r) / composite(x) for r, x in zip(of_own, after, strict=True)]),
        "growth": np.mean(size(after) / size(flow["before"])),
        "update_ratio_frobenius": norm(update) / norm(beside),
    }


def ranks_by_hand(flow):
    after = flow["after"]
    rows = (after - after.mean(axis=1, keepdims=True)).reshape(-1, after.shape[-1])
    s = np.linalg.svd(rows, compute_uv=False)
    share = s / s.sum()
    effective = np.exp(-np.sum(share * np.log(share)))
    return {
        "effective_rank": effective,
        "stable_rank": np.sum(s**2) / s[0] ** 2,
        "participation_ratio": np.sum(s**2) ** 2 / np.sum(s**4),
        "rank_collapse": 1 - effective / min(len(after) * (after.shape[1] - 1), after.shape[2]),
    }


def precision_by_hand(flow, dtype):
    kept, update = flow["kept"], flow["update"]
    stored = (kept + update).astype(dtype).astype(np.float64)
    error = stored - (kept + update)
    return {
        "update_error": np.linalg.norm(error) / np.linalg.norm(update),
        "effective_bits": -np.log2(np.linalg.norm(error) / np.linalg.norm(update)),
        "mean_error": np.mean(np.abs(error / (kept + update))),
        "signed_error": np.mean(error / (kept + update)),
        "headroom": np.log2(float(ml_dtypes.finfo(dtype).max)) - np.log2(np.abs(stored).max()),
    }


def attention_by_hand(logits):
    """One query at a time."""
    entropies, variances = [], []
    for rows in logits.reshape(-1, *logits.shape[-2:]):
        for query, row in enumerate(rows):
            seen = row[: query + 1]
            if query:
                p = np.exp(seen - seen.max()) / np.exp(seen - seen.max()).sum()
                entropies.append(-np.sum(p * np.log(p)) / np.log(len(seen)))
                variances.append(np.var(seen))
    largest = np.abs(logits[np.isfinite(logits)]).max()
    return {
        "attention_entropy": np.mean(entropies),
        "attention_largest_logit": largest,
        "attention_logit_std": np.sqrt(np.mean(variances)),
    }


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_probes_are_their_formulas(name):
    """M1c, M2, M3, M4, M12, M13 from float64 copies of what flowed; NaN exactly where the scheme has no such thing."""
    scheme, dtype = scheme_of(name), "bfloat16" if name == "post_ln" else "float32"
    _, got = fast(all_probes)(make(scheme, depth=2, stream=dtype))
    got = {key: np.asarray(value).astype(np.float64) for key, value in got.items()}
    sites = got["growth"].shape[1]
    assert {got[key].shape for key in SITES} == {(2, sites)}
    for block in range(2):
        for i in range(sites):
            flow = {key: got[key][block, i] for key in Flow._fields}
            want = tokens_by_hand(flow) | ranks_by_hand(flow) | dict.fromkeys(MORE_PROBES["attention"], np.nan)
            want |= precision_by_hand(flow, getattr(ml_dtypes, dtype, np.dtype(dtype)))
            if i == 0:
                want |= attention_by_hand(got["logits"][block, 0])
            if name == "attnres":
                want["growth"] = np.nan
            none_added = name in ("attnres", "ngpt", "highway")
            assert np.isnan(flow["kept"]).all() == none_added
            for key in SITES:
                near = {"rel": 1e-4 if dtype == "float32" else 0.02, "abs": 1e-6, "nan_ok": True}
                if key in ("mean_error", "signed_error", "update_error") and dtype == "float32":
                    near |= {"rel": 0.02, "abs": 1e-10}  # its own rounding is what is measured
                if key == "stable_rank":
                    near |= {"rel": 1e-3}
                if key == "effective_bits":
                    near |= {"rel": 1e-2}
                assert got[key][block, i] == pytest.approx(want[key], **near), (block, i, key)


def alike(got, want, key):
    """From two programs; in float32 what is lost by rounding is of one size, not the same."""
    near = {"rtol": 2e-4, "atol": 1e-6}
    if key == "signed_error":
        near = {"atol": 2e-8}
    elif "error" in key or "bits" in key:
        near = {"rtol": 0.03 if "bits" in key else 0.5}
    np.testing.assert_allclose(got[key], want[key], err_msg=key, **near)


def test_groups_have_their_names_everywhere():
    assert ("forward", "backward", *MORE_PROBES) == HEALTH_GROUPS
    assert {*SITES, *ROLE_PROBES} == {name for names in MORE_PROBES.values() for name in names}
    assert probes.measuring({"backward", "attention", "roles"}) is None and probes.observing({"tokens"}) == ()
    assert probes.measuring({"forward", "backward"}) is probes.measure


@pytest.mark.parametrize("way", [{"scan": False}, {"remat": "full"}], ids=str)
def test_probes_do_not_depend_on_how_the_stack_runs(way):
    _, want = fast(all_probes)(make("pre_ln", depth=2))
    _, got = fast(all_probes)(make("pre_ln", depth=2, **way))
    for key in SITES:
        alike(got, want, key)


def test_several_batches_at_once():
    """Under vmap, as a sweep may run it, the predicate included."""
    model = make("pre_ln", depth=2)
    run = lambda tokens, on: all_probes(model, on, tokens, (probes.ATTENTION,), probes.measuring(ALL))[1]  # noqa: E731
    both = jnp.stack([BATCH, BATCH[:, ::-1]])
    got = fast(jax.vmap(run))(both, jnp.asarray([True, False]))
    want = fast(run)(both[0], jnp.asarray(True))
    for key in SITES:
        alike({key: got[key][0]}, want, key)
        assert not np.any(got[key][1])


# ---- attention in parts


def test_attention_in_query_blocks_is_attention():
    """Queries that go in two blocks give the figures of the whole, whatever stands at the point."""
    attention = Attention(8, 2, key=jax.random.key(0))
    x = 4 * jax.random.normal(jax.random.key(1), (2, 130, 8))
    parts, whole = [], []
    at = lambda name, array: array  # noqa: E731
    for taken, all_scores in ((parts, False), (whole, True)):
        at = SimpleNamespace(look=lambda name, make, *of, taken=taken: taken.extend(make(*of)), whole_scores=all_scores)
        call = lambda name, array: array  # noqa: E731
        call.look, call.whole_scores = at.look, at.whole_scores
        attention(x, call)
    assert [part.shape[-2:] for part in parts] == [(65, 65), (65, 130)] and whole[0].shape[-2:] == (130, 130)
    got, want = merged_figures(parts), attention_figures(whole[0])
    for key in want:
        assert float(got[key]) == pytest.approx(float(want[key]), rel=1e-5), key
    assert 0 < float(want["entropy"]) < 1


def test_what_a_scheme_does_to_the_scores_is_seen():
    """RealFormer adds the scores of the block before: twice the same block, twice the logits."""
    model = make("realformer", depth=2)
    for run in model.stack.runs:
        run.sites[0].branch.qkv.kernel[...] = 1e-3 * jnp.ones_like(run.sites[0].branch.qkv.kernel[...]).at[:, 0, 0].set(
            1
        )
    _, got = fast(all_probes)(model)
    logits = np.asarray(got["logits"])[:, 0]
    for block in range(2):
        for key, want in attention_by_hand(logits[block].astype(np.float64)).items():
            assert float(got[key][block, 0]) == pytest.approx(want, rel=1e-4), key


# ---- eigenvalues without LAPACK


@pytest.mark.parametrize("n", [1, 2, 3, 16, 40])
def test_eigenvalues(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(3, 2 * n, n)) * np.linspace(0.01, 1, n)
    grams = np.einsum("bij,bik->bjk", x, x)
    got = jax.jit(lambda g: eigenvalues(tridiagonal(g)))(jnp.asarray(grams, jnp.float32))
    want = np.linalg.eigvalsh(grams)
    np.testing.assert_allclose(got, want, atol=2e-6 * want.max())


def test_eigenvalues_of_extremes():
    run = jax.jit(lambda g: eigenvalues(tridiagonal(g)))
    same = np.full((4, 4), 0.25, np.float32)
    for matrix, want in ((np.zeros((4, 4)), [0, 0, 0, 0]), (np.eye(4), [1, 1, 1, 1]), (same, [0, 0, 0, 1])):
        np.testing.assert_allclose(run(jnp.asarray(matrix, jnp.float32)), want, atol=1e-6)
    assert np.isnan(run(jnp.asarray(same).at[1, 2].set(jnp.nan))).all()
    swapped = (
        np.diag([0.0, -3.0, 2.0, 0.0]).astype(np.float32)
        + np.eye(4, k=1, dtype=np.float32)
        + np.eye(4, k=-1, dtype=np.float32)
    )
    np.testing.assert_allclose(run(jnp.asarray(swapped)), np.linalg.eigvalsh(swapped), atol=1e-6)


# ---- extremes


def site_probes(stream, update):
    """All groups of a site, of a stream to which an update is added."""
    after = stream + update
    got = probes.measuring(ALL)(Flow(stream, after, stream, update, stream, stream))
    return {key: float(value) for key, value in probes.finished(got, Context()).items()}


def test_extremes():
    rng = np.random.default_rng(0)
    usual = jnp.asarray(rng.normal(size=(2, 5, 4)), jnp.float32)
    small = 0.1 * usual[:, ::-1]
    row = jnp.asarray([0.3, -0.7, 1.1, 0.2], jnp.float32)

    same = site_probes(jnp.tile(row, (2, 5, 1)), jnp.tile(small[0, 0], (2, 5, 1)))
    assert same["residual_frobenius"] == same["residual_composite"] == 0
    assert np.isnan(same["token_cosine_centred"])
    assert (
        same["effective_rank"] == same["stable_rank"] == same["participation_ratio"] == 0 and same["rank_collapse"] == 1
    )

    apart = jnp.tile(usual[:, :1], (1, 5, 1))  # the tokens of each sequence the same, the sequences not
    collapsed = site_probes(apart, 0 * apart)
    assert collapsed["effective_rank"] == 0 and collapsed["rank_collapse"] == 1 and collapsed["residual_frobenius"] == 0
    assert collapsed["growth"] == 1 and collapsed["update_ratio_frobenius"] == 0
    assert all(np.isnan(collapsed[key]) for key in ("update_error", "effective_bits"))

    one = site_probes(usual[:1, :1], small[:1, :1])
    assert one["effective_rank"] == 0 and np.isnan(one["rank_collapse"]) and one["residual_frobenius"] == 0
    assert one["growth"] == pytest.approx(
        float(size(np.asarray(usual + small))[0, 0] / size(np.asarray(usual))[0, 0]), rel=1e-6
    )

    zero = site_probes(0 * usual, small)
    assert zero["growth"] == zero["update_ratio_frobenius"] == np.inf
    assert zero["update_error"] == 0 and zero["effective_bits"] == np.inf
    nothing = site_probes(0 * usual, 0 * usual)
    assert nothing["effective_rank"] == 0 and nothing["headroom"] == np.inf and np.isnan(nothing["growth"])

    broken = site_probes(usual.at[0, 2].set(jnp.nan), small)
    assert all(np.isnan(value) for value in broken.values())


def test_an_add_that_truncates_shows_its_bias():
    """A10: rounded to nearest the bias is noise; cut off, it is the whole error, and negative."""
    rng = np.random.default_rng(1)
    kept = jnp.asarray(rng.normal(size=(2, 64, 64)), jnp.bfloat16)
    update = (0.1 * jnp.asarray(rng.normal(size=kept.shape), jnp.float32)).astype(jnp.bfloat16)
    exact = np.asarray(kept, np.float32) + np.asarray(update, np.float32)
    cut = jnp.asarray((exact.view(np.uint32) & 0xFFFF0000).view(np.float32), jnp.bfloat16)
    measure = jax.jit(lambda after: probes.measure_precision(Flow(kept, after, kept, update, kept, kept)))
    truncated, rounded = measure(cut), measure(jnp.asarray(exact).astype(jnp.bfloat16))
    assert float(truncated["signed_error"]) == pytest.approx(-float(truncated["mean_error"]), rel=1e-5)
    assert abs(float(rounded["signed_error"])) < 0.05 * float(rounded["mean_error"])
    assert 0.002 < float(truncated["mean_error"]) < 0.003
    normed = measure(3 * cut)  # what follows a norm is not what the add stored
    assert float(normed["signed_error"]) == float(rounded["signed_error"])


# ---- the step


def step_of(scheme, recipe, scale=1.0, graph=None, **shape):
    """One step of plain gradient descent from a model away from its start: state before, state after, metrics, probes."""
    model = make(scheme, depth=2, **shape)
    graphdef, params = nnx.split(model)
    config = SimpleNamespace(name="sgd", lr=0.1, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0)
    for field in ("b1", "b2", "eps", "momentum"):
        setattr(config, field, None)
    optimizer = build(config, 10, params)
    batch = jnp.asarray(np.concatenate([TOKENS, TOKENS[:, :1]], axis=1))
    state = create(params, optimizer, jax.random.key(0), scale)
    step = fast(make_step(graphdef, optimizer, schedule("constant", 0.1, 0, 10), recipe))
    return model, state, batch, step


@pytest.fixture(scope="module")
def sliced():
    """A step on two slices with everything on, and one with it off, from the same program."""
    model, state, batch, step = step_of("pre_ln", Recipe(accumulate=2, scaled=True, more=ALL), 64.0)
    return model, state, batch, step(state, batch, jnp.asarray(True)), step(state, batch, jnp.asarray(False)), step


def gradient_of(model, batch):
    graphdef, params = nnx.split(model)
    return fast(jax.grad(lambda p: nnx.merge(graphdef, p).objective(batch, Context(train=True))[0]))(params)


def parts_by_role(tree):
    """(block, role) -> all elements of its weights, by the blocks' own leaves."""
    found = {}
    for run in tree.stack.runs:
        for leaf in variables(run):
            for i, role in enumerate(leaf.role):
                part = leaf[...] if len(leaf.role) == 1 else leaf[..., i, :]
                for block in range(len(part)):
                    found.setdefault((block, role), []).append(np.asarray(part[block], np.float64).reshape(-1))
    return {key: np.concatenate(values) for key, values in found.items()}


def test_roles_and_optimizer_are_their_formulas(sliced):
    model, state, batch, (new, metrics, got), _, _ = sliced
    graphdef, _ = nnx.split(model)
    names = roles.block_roles(state.params)
    assert names == ("q", "k", "v", "write", "fc_in", "norm_scale", "norm_bias")[: len(names)]
    slices = [parts_by_role(nnx.merge(graphdef, gradient_of(model, batch[i : i + 1]))) for i in range(2)]
    old, now = parts_by_role(model), parts_by_role(nnx.merge(graphdef, new.params))
    for block in range(2):
        for i, role in enumerate(names):
            key = (block, role)
            whole = (slices[0][key] + slices[1][key]) / 2
            squared, of_slices = np.sum(whole**2), np.mean([np.sum(one[key] ** 2) for one in slices])
            want = {
                "role_grad": np.sqrt(squared),
                "role_rms": np.sqrt(np.mean(old[key] ** 2)),
                "role_change": np.linalg.norm(now[key] - old[key]) / np.linalg.norm(old[key]),
                "role_moved": np.mean(now[key] != old[key]),
                # McCandlish et al. 2018, (A.1): |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b), with b = 1 and B = 2
                "role_signal": (2 * squared - of_slices) / squared,
            }
            for name in ROLE_PROBES:
                assert float(got[name][block, i]) == pytest.approx(want[name], rel=1e-3, abs=1e-6), (key, name)
    assert np.all(np.asarray(got["role_moved"]) > 0.9) and metrics["finite"]


def test_slices_are_merged_as_each_probe_wants_it(sliced):
    """Against the forward passes of the slices, each by itself."""
    model, _, batch, (_, _, got), _, _ = sliced
    run = fast(lambda tokens: all_probes(model, True, tokens, (probes.ATTENTION,), probes.measuring(ALL))[1])
    rows = {
        key: np.stack(pair).astype(np.float64) for key, pair in zip_probes(run(batch[:1, :-1]), run(batch[1:, :-1]))
    }
    square = lambda x: np.sqrt(np.mean(x**2, axis=0))  # noqa: E731
    want = {key: rows[key].mean(axis=0) for key in SITES}
    want |= {key: square(rows[key]) for key in ("update_ratio_frobenius", "update_error", "attention_logit_std")}
    want |= {
        "headroom": rows["headroom"].min(axis=0),
        "attention_largest_logit": rows["attention_largest_logit"].max(axis=0),
    }
    want["effective_bits"] = -np.log2(want["update_error"])
    for key in SITES:
        alike(got, want, key)

    # of the whole batch where that is a mean, an extreme or a root mean square over it
    whole = run(batch[:, :-1])
    for key in ("residual_frobenius", "residual_composite", "growth", "headroom", *MORE_PROBES["attention"]):
        np.testing.assert_allclose(got[key], whole[key], rtol=1e-4, err_msg=key)


def zip_probes(first, second):
    return ((key, (first[key], second[key])) for key in SITES)


def test_measuring_changes_nothing(sliced):
    """The same program on and off: the same loss and weights, bit for bit; zeros where nothing is measured; one program."""
    _, _, _, (new, metrics, got), (quiet, quiet_metrics, nothing), step = sliced
    assert metrics["loss"] == quiet_metrics["loss"] and metrics["grad_norm"] == quiet_metrics["grad_norm"]
    assert largest_difference(new.params, quiet.params) == 0
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, nothing)
    assert not any(np.any(value) for value in nothing.values()) and step._cache_size() == 1


@pytest.mark.parametrize(
    "groups, param, most", [("", "float32", 0), ("roles", "float32", 0), ("all", "float32", 1), ("", "bfloat16", 1)]
)
def test_looking_at_the_parameters_costs_steps_that_do_not_measure_no_copy_of_them(groups, param, most):
    """They are updated in place. In measuring steps they are there before and after, once more. Reading them anywhere else copied
    parameters and both moments in every step, 8 % of its time at 128 blocks."""
    config = default()
    fields = {"model.depth": 8, "model.width": 64, "health.groups": groups or ("forward",), "precision.param": param}
    for path, value in fields.items():
        assign(config, path, value)
    config = resolve(config, jax.default_backend())
    parts = assemble(config, 256)
    batch = np.zeros((2, 17), np.int32)
    state = parts.initial(lambda _: batch)
    step = make_step(parts.graphdef, parts.optimizer, parts.schedule, parts.recipe)
    program = jax.jit(step, donate_argnums=0).lower(state, batch, False).compile().as_text()
    copied = [
        np.prod([int(n) for n in sizes.split(",")]) for sizes in re.findall(r"= \w+\[8,([\d,]+)\]\S* copy\(", program)
    ]
    weights = sum(leaf[0].size for leaf in jax.tree.leaves(state.params["stack"]))
    assert sum(size for size in copied if size >= 64 * 64) <= most * weights


@pytest.mark.parametrize("name", ["pre_ln", "reversible"])
def test_the_loss_is_that_without_probes(name):
    """Another program, the same numbers; in the pass that takes updates back too."""
    results = []
    for recipe in (Recipe(forward=False, backward=False), Recipe(more=ALL)):
        _, state, batch, step = step_of(name, recipe)
        results.append(step(state, batch, jnp.asarray(True)))
    (bare, bare_metrics, none), (new, metrics, got) = results
    assert metrics["loss"] == bare_metrics["loss"] and not none
    assert relative(metrics["grad_norm"], bare_metrics["grad_norm"]) < 1e-6
    assert largest_difference(new.params, bare.params) < 1e-6
    assert np.isnan(got["role_signal"]).all(), "one slice tells nothing of noise"
    assert np.isfinite(got["attention_entropy"][:, 0]).all() and np.isnan(got["attention_entropy"][:, 1]).all()


def test_a_group_that_is_off_is_not_in_the_program(monkeypatch):
    """Nothing of it is even traced."""

    def never(*_):
        raise AssertionError("traced")

    for module, names in (
        (probes, ("growth", "residual_norm", "residual_form", "ranks_of_forms", "precision_figures", "merged_figures")),
        (roles, ("squares", "sizes", "changes", "signal")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, never)
    for name in ("pre_ln", "reversible", "parallel"):
        _, state, batch, step = step_of(name, Recipe(accumulate=2))
        jax.eval_shape(step, state, batch, jnp.asarray(True))
    _, state, batch, step = step_of("pre_ln", Recipe(more=frozenset({"tokens"})))
    with pytest.raises(AssertionError, match="traced"):
        jax.eval_shape(step, state, batch, jnp.asarray(True))


def test_signal_of_known_slices():
    """Slices that agree are all signal; orthogonal ones of equal size are all noise."""
    value = jnp.asarray([4.0])
    assert float(roles.signal(value, value, 4)[0]) == 1
    assert float(roles.signal(4 * value, value, 4)[0]) == 0
    assert np.isnan(roles.signal(value, value, 1)).all() and np.isnan(roles.signal(0 * value, 0 * value, 4)).all()


def test_signal_is_the_noise_scale_of_gaussian_gradients():
    """McCandlish et al. 2018: gradients G + N(0, S) a sample, so B_simple = tr(S) / |G|^2."""
    rng = np.random.default_rng(0)
    true, noise, slices, rows, draws = 0.1, 1.0, 4, 8, 400
    samples = true + noise * rng.normal(size=(draws, slices, rows, 50))
    of_slices = np.mean(np.sum(samples.mean(axis=2) ** 2, axis=-1), axis=1)
    of_batch = np.sum(samples.mean(axis=(1, 2)) ** 2, axis=-1)
    share = np.asarray(roles.signal(jnp.asarray(of_slices), jnp.asarray(of_batch), slices))
    s = np.mean(share * of_batch) / np.mean(of_batch)
    assert slices * rows * (1 - s) / s == pytest.approx(noise**2 / true**2, rel=0.1)


def test_ranks_are_those_of_the_host():
    """The same as the singular values give, for a stream whose sequences have a common token each."""
    rng = np.random.default_rng(2)
    stream = rng.normal(size=(3, 7, 12)).astype(np.float32) @ np.diag(np.geomspace(0.05, 1, 12)).astype(np.float32)
    left = stream - stream.mean(axis=1, keepdims=True)
    offset = stream + 100 * rng.normal(size=(3, 1, 12)).astype(np.float32)
    want = ranks_on_host(left.reshape(-1, 12), centre=False)
    got = site_probes(jnp.asarray(offset), jnp.zeros_like(offset))
    for name in ("effective_rank", "stable_rank", "participation_ratio"):
        assert got[name] == pytest.approx(float(want[name]), rel=1e-3), name


# ---- a run


@pytest.mark.usefixtures("quick")
def test_a_run_with_all_groups(calm, tmp_path):
    """Recorded in every measured step, with the roles' names, and shown; a run that goes on may measure less."""
    fields = {"health__groups": "all", "train__accumulate": 2, "train__steps": 6, "train__eval_every": 0}
    assert runs.run(calm, tmp_path / "run", **fields) == 0
    record = HealthRecord.load(tmp_path / "run" / "health")
    assert not record.notes and record.steps.tolist() == [1, 3, 6]
    assert record.roles[:5] == ("q", "k", "v", "write", "fc_in")
    for name in SITES:
        assert record[name].shape == (3, 2, 2)
    for name in ROLE_PROBES:
        assert record[name].shape == (3, 2, len(record.roles)) and np.isfinite(record[name]).any()
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(title in page for title in ("Effective rank", "Entropy of attention", "Signal in the gradient"))
