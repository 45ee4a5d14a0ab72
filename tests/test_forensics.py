"""Is the first non-finite value named where it is, and nothing that is meant to be infinite?"""

import functools
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import runs
from resjax.checkup import case_of
from resjax.config.tree import assign, default
from resjax.config.validate import resolve
from resjax.errors import Refused
from resjax.health.diagnosis import diagnose
from resjax.health.findings import located
from resjax.health.places import Place, place
from resjax.health.walk import Walk, search
from resjax.residual import CATALOGUE, constant
from resjax.residual.gains import Learned
from resjax.train import evidence
from resjax.train.assemble import assemble
from resjax.train.checkpoint import Checkpoints
from resjax.train.forensics import first_nonfinite
from resjax.train.leaves import named
from resjax.train.rebuild import Again
from resjax.train.state import LossScale, create
from resjax.train.step import Recipe
from runs import run, summary

BLOCK = 7
WRITE = "stack/runs/0/sites/1/branch/write/kernel"
FC_IN = "stack/runs/0/sites/1/branch/fc_in/kernel"
QKV = "stack/runs/0/sites/0/branch/qkv/kernel"
SIZES = {
    "model.depth": 12,
    "model.width": 16,
    "model.heads": 2,
    "model.remat": "none",
    "data.source": "markov",
    "data.length": 8,
    "data.batch": 2,
    "mesh.data": 1,
    "precision.compute": "float32",
    "precision.stream": "float32",
}
SLOW = pytest.mark.slow
FORMS = [  # scan, remat
    ("true", "none"),
    ("false", "full"),
    pytest.param("true", "full", marks=SLOW),
    pytest.param("true", "dots", marks=SLOW),
    pytest.param("false", "none", marks=SLOW),
]


def root(x):
    return jnp.sqrt(x)


def shut(site):
    return jnp.where(site.block == 4, 0.0, 1.0)


# sqrt at 0 in block 4: the forward pass is finite, the gradient of the gain is not
ROOTED = CATALOGUE["pre_ln"].but(name="rooted", scale=Learned(shut, "scalar", through=root))


@functools.cache
def made(scheme=None, **fields):
    config = default()
    for path, value in (SIZES | {name.replace("__", "."): value for name, value in fields.items()}).items():
        assign(config, path, value == "true" if value in ("true", "false") else value)
    # as on an accelerator, where unrolled blocks may be rematerialised too
    parts = assemble(resolve(config, "tpu"), 32, scheme)
    batch = np.random.default_rng(3).integers(0, 32, (config.data.batch, config.data.length + 1)).astype(np.int32)
    return parts, parts.initial(lambda _: batch), batch


def changed(state, path, change):
    """``state`` with one parameter changed."""
    leaves, structure = jax.tree.flatten(state.params)
    number = list(named(state.params)).index(path)
    leaves[number] = change(leaves[number])
    return replace(state, params=jax.tree.unflatten(structure, leaves))


def times(block, factor):
    return lambda kernel: kernel.at[block].multiply(factor)


# ------------------------------------------------------------------ planted in a step


@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_a_nan_in_a_parameter_is_named_as_that_parameter(scan, remat):
    parts, state, batch = made(model__scan=scan, model__remat=remat)
    assert first_nonfinite(parts, state, batch) is None
    first = first_nonfinite(parts, changed(state, WRITE, lambda kernel: kernel.at[BLOCK, 3, 2].set(jnp.nan)), batch)
    assert (first.direction, first.block, first.site, first.part) == ("forward", BLOCK, "mlp", "output")
    assert (first.parameter, first.blocks, first.kind, first.nan) == (f"params/{WRITE}", (BLOCK,), "NaN", 1)
    assert first.size == 12 * 64 * 16 and not first.operation and 0 < first.largest_before < 100
    assert f"parameter params/{WRITE}, block 7 (met in the forward pass, block 7, mlp, output): NaN" in first.sentence()


@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_a_value_in_the_gradient_only_is_named_as_backward(scan, remat):
    parts, state, batch = made(ROOTED, model__scan=scan, model__remat=remat)
    first = first_nonfinite(parts, state, batch)
    assert (first.direction, first.block, first.site, first.part) == ("backward", 4, "mlp", "scale")
    assert first.kind in ("+Inf", "-Inf") and first.operation == "div" and not first.parameter and not first.constant
    assert np.isfinite(first.largest_before)
    assert "the first non-finite value is in the backward pass, block 4, mlp, scale of the update:" in first.sentence()


@pytest.mark.parametrize("scan", ["true", pytest.param("false", marks=SLOW)])
def test_a_nan_in_the_input_is_named_as_input(scan):
    parts, state, batch = made(model__scan=scan)
    used = int(batch[1, 4])
    first = first_nonfinite(parts, changed(state, "embed", lambda table: table.at[used, 3].set(-jnp.inf)), batch)
    assert (first.direction, first.block, first.part, first.kind) == ("forward", None, "embedding", "-Inf")
    assert (first.parameter, first.rows) == ("params/embed", (used,))
    unused = next(token for token in range(32) if token not in batch)
    assert first_nonfinite(parts, changed(state, "embed", lambda t: t.at[unused].set(jnp.nan)), batch) is None


@pytest.mark.parametrize(("scan", "remat"), [FORMS[0], *FORMS[2:]])
def test_a_float16_overflow_is_named_where_it_is_and_not_at_the_next_norm(scan, remat):
    """A11: 66,246 as the output of a feed-forward; bfloat16 holds it."""
    form = {
        "model__scan": scan,
        "model__remat": remat,
        "model__mlp": "relu",
    }  # the cube of gelu's tanh form overflows earlier
    parts, state, batch = made(precision__compute="float16", **form)
    state = changed(state, FC_IN, times(BLOCK, 100.0))
    assert first_nonfinite(parts, state, batch) is None
    far = first_nonfinite(parts, changed(state, WRITE, times(BLOCK, 1e6)), batch)
    factor = 1e6 * 66246 / far.unrounded
    state = changed(state, WRITE, times(BLOCK, factor))
    first = first_nonfinite(parts, state, batch)
    assert (first.direction, first.block, first.site, first.part) == ("forward", BLOCK, "mlp", "output")
    assert (first.operation, first.dtype, first.nan) == ("dot_general", "float16", 0)
    assert first.plus_inf + first.minus_inf == 1 and first.kind in ("+Inf", "-Inf")
    assert first.unrounded == pytest.approx(66246, rel=5e-3) and first.largest_beside <= 65504
    assert 100 < first.largest_before < 65504
    wide, _, _ = made(precision__compute="bfloat16", **form)
    assert first_nonfinite(wide, state, batch) is None


@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_attention_logits_that_overflow(scan, remat):
    """In block 5, not at the masks of -inf of the blocks before."""
    parts, state, batch = made(model__scan=scan, model__remat=remat)
    first = first_nonfinite(parts, changed(state, QKV, lambda k: k.at[5, :, :2].multiply(1e20)), batch)
    assert (first.direction, first.block, first.site, first.part) == ("forward", 5, "attention", "scores")
    assert first.operation == "dot_general" and first.kind in ("+Inf", "-Inf") and first.plus_inf and first.minus_inf


def test_attention_logits_of_1e30_are_finite_as_the_softmax_is():
    parts, state, batch = made()
    first = first_nonfinite(parts, changed(state, QKV, lambda k: k.at[5, :, 0].multiply(1e30)), batch)
    assert first is None or first.direction == "backward"


def test_a_norm_of_the_gradient_that_overflows():
    """No element of the gradient is infinite, but their squares are."""
    parts, state, batch = made()
    first = first_nonfinite(parts, replace(state, loss_scale=LossScale(jnp.float32(1e25), jnp.int32(0))), batch)
    assert (first.direction, first.block, first.part, first.kind) == ("backward", None, "grad_norm", "+Inf")
    assert 1e18 < first.largest_before < 1e27


# no norm, so that what a test puts into the stream is what it adds up
BARE = CATALOGUE["pre_ln"].but(name="bare", norm_in=None, final_norm=None)


def doubling(value):
    """A model of which every feed-forward adds what it reads (positive values, attention adds nothing), from a stream of ``value``."""
    parts, state, batch = made(BARE, model__mlp="relu", model__depth=3)
    unit = jnp.eye(16, 64)
    for path, change in {
        "embed": lambda table: jnp.full_like(table, value),
        "positions": jnp.zeros_like,
        QKV: jnp.zeros_like,
        "stack/runs/0/sites/0/branch/write/kernel": jnp.zeros_like,
        FC_IN: lambda kernel: jnp.broadcast_to(unit, kernel.shape),
        WRITE: lambda kernel: jnp.broadcast_to(unit.T, kernel.shape),
    }.items():
        state = changed(state, path, change)
    return parts, state, batch


def test_a_residual_add_that_overflows_is_named_as_that():
    parts, state, batch = doubling(6e37)  # 1.2e38, 2.4e38, and no more
    first = first_nonfinite(parts, state, batch)
    assert (first.direction, first.block, first.site, first.part) == ("forward", 2, "mlp", "add")
    assert (first.kind, first.operation, first.plus_inf) == ("+Inf", "add", first.size)
    assert first.largest_before == pytest.approx(2.4e38, rel=1e-6)


def test_gradients_of_skip_and_branch_that_overflow_as_they_are_added():
    """Each of them fits; the backward pass adds them where the forward pass reads the stream."""
    parts, state, batch = doubling(2e-38)
    targets = np.arange(32) >= 16
    state = changed(state, "head", lambda head: jnp.zeros_like(head).at[0].set(jnp.where(targets, -5e37, 5e37)))
    batch = np.full_like(batch, 20)  # what is most unlikely
    for scale, over in ((8.0, False), (32.0, True)):
        first = first_nonfinite(parts, replace(state, loss_scale=LossScale(jnp.float32(scale), jnp.int32(0))), batch)
        if over:
            assert (first.direction, first.block, first.site, first.part) == ("backward", 2, "mlp", "add")
            assert first.operation == "add_any" and first.kind in ("+Inf", "-Inf") and first.largest_before > 1.7e38
            assert "in the backward pass, block 2, mlp, residual add:" in first.sentence()
        else:
            assert first is None or first.block != 2


def test_a_norm_that_overflows_is_named_as_that():
    parts, state, batch = made()
    first = first_nonfinite(
        parts, changed(state, "stack/runs/0/sites/1/norm_in/gain", lambda gain: gain.at[5].set(2e38)), batch
    )
    assert (first.direction, first.block, first.site, first.part) == ("forward", 5, "mlp", "norm_in")
    assert (first.operation, first.largest_before) == ("mul", pytest.approx(2e38, rel=1e-6)) and not first.parameter
    first = first_nonfinite(parts, changed(state, "final_norm/gain", lambda gain: gain.at[3].set(2e38)), batch)
    assert (first.direction, first.block, first.part, first.operation) == ("forward", None, "final_norm", "mul")


def test_tokens_that_the_model_does_not_have_are_laid_to_the_batch():
    parts, state, batch = made()
    batch = batch.copy()
    batch[1, 5], batch[0, 3] = 99, -1
    first = first_nonfinite(parts, state, batch)
    assert (first.parameter, first.rows, first.stray, first.part) == ("batch", (1,), (5, 99), "loss")
    assert (
        "the batch, row 1, position 5, where token 99 is none of the model's (met in the forward pass, loss): NaN"
        in (first.sentence())
    )
    # what is not finite before the loss is no fault of the token
    first = first_nonfinite(parts, changed(state, WRITE, times(BLOCK, jnp.inf)), batch)
    assert (first.parameter, first.stray) == (f"params/{WRITE}", None)


class Regression(nnx.Module):
    """A model of floats: one matrix, no blocks."""

    def __init__(self, width):
        self.weights = constant(0.5, (width,), "head")
        self.stack = SimpleNamespace(plan=())

    def objective(self, batch, context, tap=None):
        with jax.named_scope("embedding"):
            h = batch[..., :-1] * self.weights[...]
        with jax.named_scope("loss"):
            return jnp.mean(jnp.square(jnp.sum(h, axis=-1) - batch[..., -1])), {}


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (-np.inf, "-Inf")])
def test_a_batch_of_floats_is_named_as_the_batch(value, kind):
    graphdef, params = nnx.split(Regression(4))
    state = create(params, optax.sgd(0.1), jax.random.key(0), 1.0)
    parts = SimpleNamespace(recipe=Recipe(), graphdef=graphdef, knobs={}, abstract=state, vocab=0)
    batch = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    assert first_nonfinite(parts, state, batch) is None
    batch[[2, 4], 1] = value
    first = first_nonfinite(parts, state, batch)
    assert (first.parameter, first.rows, first.blocks, first.kind) == ("batch", (2, 4), (), kind)
    assert (first.direction, first.part, first.stray) == ("forward", "embedding", None)
    assert (
        "the first non-finite value is in the batch, rows 2, 4 (met in the forward pass, embedding)" in first.sentence()
    )


def test_an_accumulated_batch_is_searched_slice_by_slice():
    parts, state, batch = made(train__accumulate=2)
    assert first_nonfinite(parts, state, batch) is None
    first = first_nonfinite(parts, changed(state, WRITE, times(BLOCK, jnp.inf)), batch)
    assert (first.blocks, first.site) == ((BLOCK,), "mlp")


@pytest.mark.parametrize(
    "name",
    [
        "reversible",
        *(pytest.param(name, marks=SLOW) for name in ("attnres", "mhc", "muddformer", "post_ln", "realformer")),
    ],
)
def test_other_carries_are_searched(name):
    """Those with a backward pass of their own, with loops, with several streams, with more than one run of blocks."""
    parts, state, batch = made(residual__name=name, model__depth=3, model__width=8, model__remat="auto")
    assert first_nonfinite(parts, state, batch) is None
    paths = [path for path in named(state.params) if path.endswith("sites/1/branch/write/kernel")]
    assert paths
    spoilt = changed(state, paths[0], lambda kernel: kernel.at[0].set(jnp.nan))
    first = first_nonfinite(parts, spoilt, batch)
    assert (first.direction, first.site, first.part) == ("forward", "mlp", "output")
    assert first.blocks == (0,) and first.block == 0


# ------------------------------------------------------------------ the search itself


def find(f, *arguments):
    arguments = [jnp.asarray(a) for a in arguments]
    return search(jax.make_jaxpr(f)(*arguments), arguments, [f"x{i}" for i in range(len(arguments))])


def test_what_is_taken_back_is_no_origin():
    x = jnp.array([0.0, 1.0, 2.0])
    assert find(lambda x: jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0)), x).origin is None
    assert find(lambda x: jnp.sum(jnp.exp(jnp.where(x > 0, x, -jnp.inf))), x).origin is None
    assert find(lambda x: jnp.max(jnp.where(x > 0, x, -jnp.inf)), x).origin is None


def test_the_gradient_of_what_is_taken_back_is_one():
    """The where trick: the branch not taken is 0 * inf in the backward pass."""
    x = jnp.array([0.0, 1.0, 2.0])
    found = find(jax.value_and_grad(lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))), x)
    assert found.target == 1 and found.origin.operation in ("div", "mul")


def test_a_row_that_is_masked_altogether_is_named_at_the_softmax():
    def attend(x):
        with jax.named_scope("block_3"), jax.named_scope("site_0_attention"), jax.named_scope("softmax"):
            scores = jnp.where(x > 5, x, -jnp.inf)
            return jnp.sum(jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)))

    origin = find(attend, jnp.array([[1.0, 2.0], [3.0, 9.0]])).origin
    assert (origin.operation, origin.nan, origin.plus, origin.minus) == ("sub", 2, 0, 0)
    assert place(origin.stack) == Place(3, "attention", "softmax")


def test_a_constant_that_spoils_is_named_where_it_enters():
    def f(x):
        gain = jnp.where(jnp.arange(3) == 1, jnp.nan, 1.0)
        with jax.named_scope("block_2"), jax.named_scope("site_1_mlp"), jax.named_scope("scale"):
            return jnp.sum(gain * x)

    origin = find(f, jnp.ones(3)).origin
    assert origin.constant and place(origin.entered) == Place(2, "mlp", "scale")


def test_loops_calls_and_keys():
    """What is no run of blocks is one operation, whatever is inside; random keys and integers are let through."""

    def f(x, key):
        x = x + jax.random.normal(key, x.shape) * 0
        x = jax.lax.fori_loop(0, 3, lambda i, y: y * 10.0, x)
        x = jax.lax.cond(x[0] > 0, lambda y: y, lambda y: jnp.log(y), x)
        return jnp.sum(jax.jit(lambda y: jnp.exp(y))(x))

    assert find(f, jnp.array([-1.0]), jax.random.key(0)).origin.operation == "cond"
    assert find(f, jnp.array([0.01]), jax.random.key(0)).origin is None
    assert find(f, jnp.array([1.0]), jax.random.key(0)).origin.operation == "exp"
    assert find(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: y * 10.0, x), jnp.float32(1)).origin.operation in (
        "scan",
        "while",
    )


def test_the_first_of_two_counts():
    def f(x):
        with jax.named_scope("block_1"):
            y = x / 0
        with jax.named_scope("block_2"):
            return jnp.sum(y + jnp.log(-x))

    assert place(find(f, jnp.ones(2)).origin.stack).block == 1


def test_values_that_are_not_needed_are_let_go():
    walk = Walk()
    program = jax.make_jaxpr(lambda x: jnp.sum(jnp.exp(jnp.sin(x))))(jnp.ones(4))
    held = []
    look = walk._look

    def watching(*arguments):
        seen = look(*arguments)
        held.append(seen)
        return seen

    walk._look = watching
    walk.run(program.jaxpr, [], [walk.input(jnp.ones(4), "x")], "")
    assert [float(jnp.max(seen.value)) for seen in held][-1] == pytest.approx(4 * np.exp(np.sin(1)), rel=1e-6)


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ("jvp(block_7)/site_1_mlp/branch/output", "block 7, mlp, output"),
        (
            "slices/transpose(jvp(blocks_0))/block_3/transpose(jvp(site_0_attention))/scores",
            "block 3, attention, scores",
        ),
        ("jvp(embedding)", "embedding"),
        ("transpose(jvp(blocks_0))/block_3/read", "block 3, reading the stream"),
        ("jit(main)/other", "outside of the model"),
        ("", "outside of the model"),
    ],
)
def test_places_are_told_from_scopes(stack, expected):
    assert str(place(stack)) == expected


# ------------------------------------------------------------------ what a run keeps

BAD = """
import jax.numpy as jnp
from resjax.residual import CATALOGUE

def from_step(first, last, block=1):
    def rule(site):
        at = (site.step >= first) & (site.step <= last) & (site.block == block)
        return jnp.where(at, jnp.nan, 1.0)
    return rule

ONCE = CATALOGUE["pre_ln"].but(name="once", scale=from_step(6, 6))
TWICE = CATALOGUE["pre_ln"].but(name="twice", scale=from_step(6, 7))
ON = CATALOGUE["pre_ln"].but(name="on", scale=from_step(6, 10**6))
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    path = tmp_path_factory.mktemp("schemes") / "bad.py"
    path.write_text(BAD)
    return path


@pytest.mark.usefixtures("quick")
def test_a_run_that_stops_names_the_value_and_the_command(calm, bad, tmp_path, capfd):
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ONCE") == 4
    out = capfd.readouterr().out
    command = f"python -m resjax.replay {folder} --step=7"
    assert "the first non-finite value is in the forward pass, block 1, attention, scale of the update: NaN" in out
    assert out.count(command) == 2
    made = summary(folder)
    assert made["nonfinite"]["first"]["block"] == 1 and made["nonfinite"]["first"]["site"] == "attention"
    assert made["nonfinite"]["replay"] == command
    finding = next(one for one in made["health"]["findings"] if one["kind"] == "non-finite value")
    assert finding["where"] == "forward pass, block 1, attention, scale of the update" and finding["step"] == 7
    assert command in finding["advice"] and command in (folder / "report.html").read_text()
    kept = folder / "nonfinite" / "7"
    assert sorted(path.name for path in kept.iterdir()) == ["batch.npz", "report.json"]  # checkpoint 6 is its state
    # the same command meets it again, and leaves what is there
    before = runs.files(kept)
    assert run(calm, folder, residual__name=f"{bad}:ONCE") == 4
    assert runs.files(kept) == before


@pytest.mark.usefixtures("quick")
def test_skip_mode_keeps_a_few_states(calm, bad, tmp_path, capfd):
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ON", train__on_nonfinite="skip", train__eval_every=0) == 4
    assert "step 7: the loss or the gradient is not finite; the first" in capfd.readouterr().out
    place = folder / "nonfinite"
    assert evidence.steps(place) == [7, 8, 9, 17]
    assert sorted(path.name for path in place.iterdir()) == ["17", "7", "8", "9"]
    assert [(place / str(n) / "state").exists() for n in (7, 8, 9, 17)] == [True, True, True, False]
    assert [int(np.load(place / f"{n}/batch.npz")["tokens"].shape[0]) for n in (7, 17)] == [4, 4]


@pytest.mark.usefixtures("quick")
def test_a_step_that_a_run_went_past_is_the_doctors_first_finding(calm, bad, tmp_path):
    """Also where no probes were recorded of it, and it is not in the summary."""
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ONCE", train__on_nonfinite="skip", train__eval_every=0) == 0
    assert "nonfinite" not in summary(folder)
    found = diagnose(case_of(str(folder), start=False)).findings[0]
    assert (found.kind, found.step) == ("non-finite value", 7)
    assert found.where == "forward pass, block 1, attention, scale of the update" and "went on" in found.reason
    assert f"python -m resjax.replay {folder} --step=7" in found.advice
    assert diagnose(case_of(str(folder), 6, start=False)).findings == []


@pytest.mark.usefixtures("quick")
def test_a_disk_that_is_full_for_the_evidence_stops_no_run(calm, bad, tmp_path, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(evidence, "write_json", full)
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:TWICE", train__on_nonfinite="skip") == 0
    assert "step 7: the state before it could not be kept" in capfd.readouterr().out
    assert not list((folder / "nonfinite").iterdir())


def kept_of(folder, batch, state):
    return evidence.save(folder, 7, batch, {"step": 7}, state, {})


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt, SystemExit, OSError(28, os.strerror(28))], ids=["^C", "exit", "full"]
)
@pytest.mark.parametrize(
    "at", [(np, "savez"), (evidence, "write_json"), (Checkpoints, "_write"), (Path, "rename")], ids=lambda at: at[1]
)
def test_what_comes_in_between_leaves_nothing_half_written(at, fault, tmp_path, monkeypatch):
    """Neither a first time nor over what was there; and the next try is whole."""
    state = create({"w": jnp.arange(3.0)}, optax.sgd(0.1), jax.random.key(0), 1.0)
    state = replace(state, step=jnp.int32(6))
    folder, first, second = tmp_path / "nonfinite", np.zeros((2, 3), np.int32), np.ones((2, 3), np.int32)

    def fails(*_, **__):
        raise fault

    for batch, there in ((first, None), (second, first)):
        with monkeypatch.context() as patch, pytest.raises(fault if isinstance(fault, type) else type(fault)):
            patch.setattr(*at, fails)
            kept_of(folder, batch, state)
        assert [path.name for path in folder.iterdir()] == ([] if there is None else ["7"])
        if there is not None:
            np.testing.assert_array_equal(evidence.load(folder, 7, state, {}).batch, there)
        assert kept_of(folder, batch, state) and [path.name for path in folder.iterdir()] == ["7"]
        found = evidence.load(folder, 7, state, {})
        np.testing.assert_array_equal(found.batch, batch)
        np.testing.assert_array_equal(found.state.params["w"], [0, 1, 2])
        assert not kept_of(folder, batch, state)  # it is there


def test_what_a_kill_has_left_is_no_evidence_and_goes(tmp_path):
    state = create({"w": jnp.arange(3.0)}, optax.sgd(0.1), jax.random.key(0), 1.0)
    left = tmp_path / "7.tmp"
    left.mkdir()
    (left / "batch.npz").write_bytes(b"PK")
    assert evidence.steps(tmp_path) == [] and evidence.load(tmp_path, 7, state, {}) is None
    evidence.clear(tmp_path)
    assert not left.exists()
    # a kill between taking away what was there and putting its successor in its place
    before = tmp_path / "7.before.tmp"
    for folder in (before, left):
        folder.mkdir()
        (folder / "batch.npz").write_bytes(b"PK" + folder.name.encode())
    evidence.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    assert (tmp_path / "7" / "batch.npz").read_bytes().endswith(before.name.encode())
    (tmp_path / "7" / "batch.npz").write_bytes(b"PK")
    with pytest.raises(Refused, match=r"7 cannot be read .* remove it to rebuild the step from a checkpoint"):
        evidence.load(tmp_path, 7, state, {})


@pytest.mark.usefixtures("quick")
def test_after_rollbacks_in_vain_the_last_one_is_kept(calm, bad, tmp_path, capfd):
    """Each try of step 7 has another batch; the replay is of the one that the run stopped at."""
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ONCE", train__on_nonfinite="rollback") == 4
    assert evidence.steps(folder / "nonfinite") == [7] and not (folder / "nonfinite/7/state").exists()
    with np.load(folder / "nonfinite/7/batch.npz") as kept:
        cursor = int(runs.arrays(folder, 6)["cursor"])
        np.testing.assert_array_equal(kept["tokens"], Again.of(folder).pipeline.batch(cursor))
    assert cursor > 6


@pytest.mark.usefixtures("quick")
def test_a_ctrl_c_while_a_step_is_kept_waits_for_it(calm, bad, tmp_path, monkeypatch):
    folder, original = tmp_path / "run", evidence.write_json
    fields = {"residual__name": f"{bad}:ONCE", "train__on_nonfinite": "skip", "train__eval_every": 0}

    def write(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evidence, "write_json", write)
        assert run(calm, folder, **fields) == 130
    assert [path.name for path in (folder / "nonfinite").iterdir()] == ["7"]
    assert sorted(path.name for path in (folder / "nonfinite/7").iterdir()) == ["batch.npz", "report.json", "state"]
    assert run(calm, folder, **fields) == 0 and runs.rows(folder)[-1]["step"] == 20


KILLED = """
import os, signal, sys
import command
from resjax.main import main
from resjax.train import evidence
evidence.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""


def test_a_kill_in_the_middle_leaves_nothing_half_written(calm, bad, tmp_path):
    folder = tmp_path / "run"
    line = runs.words(calm, folder, residual__name=f"{bad}:ONCE", train__on_nonfinite="skip")
    environ = runs.environment()
    environ["PYTHONPATH"] += os.pathsep + str(runs.ROOT / "tests")
    died = runs.command(*line, script=("-c", KILLED), environ=environ)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert evidence.steps(folder / "nonfinite") == [] and list((folder / "nonfinite").iterdir())
    done = runs.command(*line)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (folder / "nonfinite").iterdir()] == ["7"]


def test_a_finding_is_made_where_the_probes_have_none():
    nonfinite = {"step": 3, "where": "the first ... is in the loss", "first": None, "replay": "replay it"}
    health = located({"verdict": "unmeasured", "findings": []}, nonfinite)
    assert health["verdict"] == "findings" and health["findings"][0]["step"] == 3
    assert health["findings"][0]["advice"].startswith("replay it")
    assert located({"verdict": "healthy", "findings": []}, None) == {"verdict": "healthy", "findings": []}
