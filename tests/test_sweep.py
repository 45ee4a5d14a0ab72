"""Does a sweep train what ordinary runs would, with one program an architecture, and lose nothing to faults and signals?"""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import runs
from kit import fast
from resjax import data, sweep
from resjax.config.load import load
from resjax.config.validate import resolve
from resjax.data import Floors
from resjax.errors import Refused
from resjax.sweeps import cells, grid, one, shared, texts
from resjax.sweeps.outcome import outcome
from resjax.train.assemble import assemble
from resjax.train.leaves import tree_hash
from resjax.train.numbers import TRACEABLE, with_numbers
from resjax.train.program import compile_programs, held_out_loss
from resjax.train.schedule import NAMES as SCHEDULES
from resjax.train.schedule import schedule
from resjax.train.writers import parse
from runs import ROOT, at_batch, files, summary

pytestmark = pytest.mark.usefixtures("quick")
STEPS = 6
BARE = {"train__steps": STEPS, "health__groups": "none"}
LR_AND_SEED = ("--grid", "optimizer.lr=1e-3,1e-2", "--grid", "seed=0,1")


@pytest.fixture(scope="module")
def config(calm):
    return calm


def words(config, workdir, *options, **fields):
    fields = {"train__steps": STEPS, "train__eval_every": 4} | fields
    return runs.words(config, workdir, "--no-figures", *options, **fields)


def swept(config, workdir, *options, **fields):
    """The command in this process."""
    return sweep.main(words(config, workdir, *options, **fields))


def with_sweep(config, folder, body):
    path = folder / "swept.py"
    path.write_text(config.read_text() + f"\ndef sweep():\n    {body}\n")
    return path


def lines(folder):
    return [parse(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def numbers(row):
    """A line without what is measured in seconds."""
    return {name: value for name, value in row.items() if name not in ("seconds", "compile_seconds")}


def by_fields(rows):
    return {json.dumps(row["fields"], sort_keys=True): numbers(row) for row in rows}


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    """A finished sweep of 2 rates and 2 seeds, with how often its step was traced and programs were compiled."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        count_calls(patch, counts)
        assert swept(config, folder, *LR_AND_SEED) == 0
    return folder, counts


def count_calls(patch, counts):
    """Count, from here on, traces of a step and compilations by a sweep."""

    def counted(name, original):
        def call(*arguments, **options):
            counts[name] = counts.get(name, 0) + 1
            return original(*arguments, **options)

        return call

    patch.setattr(shared, "make_step", counted("traces", shared.make_step))
    patch.setattr(jax.stages.Lowered, "compile", counted("compilations", jax.stages.Lowered.compile))


# ------------------------------------------------------------------ the numbers are those of ordinary runs


def ordinary(config, folder, **fields):
    fields = {"train__steps": STEPS, "train__eval_every": 4} | fields
    assert runs.run(config, folder, **fields) == 0
    return summary(folder)


def ordinary_losses(config, **fields):
    """Of the steps and of the evaluation at the end, by the programs of an ordinary run."""
    fields = BARE | fields
    chosen = load(str(config), [(name.replace("__", "."), str(value)) for name, value in fields.items()])
    parts = assemble(resolve(chosen, "cpu"), 32)
    programs, corpus = compile_programs(parts, parts.abstract), data.load("markov", None, chosen.seed)
    pipeline, state = data.Pipeline(corpus, 16, 4, chosen.seed), parts.initial()
    losses = []
    for i in range(STEPS):
        state, metrics, _ = programs.step(state, programs.batch(pipeline.batch(i)), np.asarray(False))
        losses.append(float(metrics["loss"]))
    return losses, held_out_loss(programs.evaluation, state.params, state.step, pipeline, 2, programs.rows)


@pytest.mark.parametrize("lr, seed", [(1e-3, 0), (1e-2, 1)])
def test_a_cell_has_the_numbers_of_the_ordinary_run_of_its_configuration(done, config, tmp_path, lr, seed):
    """Rate and seed are values of the sweep's program and constants of the run's: float32 rounding may differ."""
    (row,) = [row for row in lines(done[0]) if row["fields"] == {"optimizer.lr": lr, "seed": seed}]
    run = ordinary(config, tmp_path / "run", optimizer__lr=lr, seed=seed)
    assert row["status"] == "done" and row["steps"] == run["steps"] == STEPS
    for name in ("train_loss", "eval_loss"):
        np.testing.assert_allclose(row[name], run[name], rtol=3e-7)
    assert row["baselines"] == run["baselines"]
    assert row["health"]["verdict"] == run["health"]["verdict"]
    assert row["floors"]["trigram"] < row["floors"]["bigram"] < row["floors"]["unigram"]


ADAMW = {
    "optimizer.weight_decay": (0.1, 0.3),
    "optimizer.clip": (0.5, 1.5),
    "optimizer.b1": (0.8, None),
    "optimizer.b2": (0.9, 0.99),
    "optimizer.eps": (1e-8, 1e-3),
    "init.gain": (0.3, 1.0),
    "init.out_scale": (0.2, 0.5),
    "init.embed_gain": (1.0, 10.0),
    "optimizer.warmup": (0, 3),
    "precision.rounding": ("none", "float16"),
    "residual.scale": (0.3, 1.0),
    "residual.mlp.skip": (0.5, -1.5),
    "residual.scale_eval": (0.2, 2.0),
}


@pytest.mark.parametrize(
    "values, more",
    [
        (ADAMW, {}),
        pytest.param(
            {"optimizer.momentum": (0.5, 0.95), "init.std": (0.02, 0.2)},
            {"optimizer__name": "sgd", "init__kind": "std"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"optimizer.momentum": (0.5, None), "optimizer.b1": (0.8, 0.9)},
            {"optimizer__name": "muon"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adamw", "sgd", "muon"],
)
def test_other_numbers_are_values_of_one_program_too(config, tmp_path, values, more):
    """Each changes the losses, and all together give those of an ordinary run; the last value of a pair is the other one."""
    first, last = ({path: pair[i] for path, pair in values.items()} for i in (0, 1))
    settings = [first, *(first | {path: last[path]} for path in values), last]
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        count_calls(patch, counts)
        assert swept(with_sweep(config, tmp_path, f"return {settings}"), tmp_path / "sweep", **BARE, **more) == 0
    assert counts == {"traces": 1, "compilations": 3}
    rows = lines(tmp_path / "sweep")
    assert [row["fields"] for row in rows] == settings
    assert len({row["eval_loss"] for row in rows}) == len(rows)
    losses, held_out = ordinary_losses(
        config, **more, **{path.replace(".", "__"): value for path, value in last.items()}
    )
    np.testing.assert_allclose(rows[-1]["train_loss"], np.mean(losses), rtol=2e-6)
    np.testing.assert_allclose(rows[-1]["eval_loss"], held_out, rtol=2e-6)


def test_a_traced_seed_gives_the_bits_of_a_constant(config):
    """The state before the first step, for the largest seed."""
    parts = assemble(resolve(load(str(config), [("seed", 2**32 - 1)]), "cpu"), 32)
    got = fast(lambda values: with_numbers(parts, values).start())({"seed": np.uint32(2**32 - 1)})
    assert tree_hash(got) == tree_hash(fast(parts.start)())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_traced_warmup_rises_as_a_constant_one(name, warmup):
    traced = jax.jit(lambda warmup, t: schedule(name, 3e-3, warmup, 20)(t))
    for t in range(0, 20, 3):
        np.testing.assert_allclose(traced(np.float32(warmup), t), schedule(name, 3e-3, warmup, 20)(t), rtol=3e-7)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_traced_rate_moves_as_a_constant_one(name):
    traced = jax.jit(lambda lr, t: schedule(name, lr, 3, 20)(t))
    for t in range(0, 20, 3):
        np.testing.assert_allclose(traced(np.float32(3e-3), t), schedule(name, 3e-3, 3, 20)(t), rtol=3e-7)


def test_numbers_that_can_be_values_are_fields(config):
    assert set(TRACEABLE) <= set(grid.FIELDS)


# ------------------------------------------------------------------ programs


def test_cells_of_one_architecture_share_one_compiled_program(done):
    """Four cells: the step is traced once; start, step and evaluation are compiled once each."""
    assert done[1] == {"traces": 1, "compilations": 3}


def test_an_architecture_is_compiled_once_and_a_text_is_read_once(config, tmp_path, monkeypatch):
    counts, reads = {}, []
    count_calls(monkeypatch, counts)
    load_text = data.load
    monkeypatch.setattr(texts.data, "load", lambda *arguments: (reads.append(arguments), load_text(*arguments))[1])
    options = ("--grid", "model.depth=1,2", "--grid", "optimizer.lr=1e-3,1e-2", "--grid", "seed=0,1")
    assert swept(config, tmp_path / "sweep", *options, train__steps=2) == 0
    assert counts == {"traces": 2, "compilations": 6}
    assert sorted(seed for _, _, seed in reads) == [0, 1]
    assert [row["fields"]["model.depth"] for row in lines(tmp_path / "sweep")] == [1] * 4 + [2] * 4


def settings(**fields):
    return [dict(zip(fields, values, strict=True)) for values in grid.product(*fields.values())]


def groups(config, *cases, **overrides):
    overrides = [(path.replace("__", "."), value) for path, value in overrides.items()]
    made = cells.build(str(config), overrides, [dict(case) for case in cases], "cpu")
    return [(len(group.cells), group.traced) for group in cells.architectures(made)]


def over(path, *values):
    return [{path: value} for value in values]


@pytest.mark.parametrize(
    "cases, overrides, expected",
    [
        (over("optimizer.weight_decay", 0.0, 0.1, 0.2), {}, [1, 2]),
        (over("optimizer.clip", 0.0, 1.0, 2.0), {}, [1, 2]),
        (over("optimizer.momentum", 0.0, 0.5, 0.9), {"optimizer__name": "sgd"}, [1, 2]),
        (over("residual.scale", 0.0, 0.5, 1.0), {}, [1, 2]),
        (over("residual.scale", None, 0.5, 1.0), {}, [1, 2]),
        (over("residual.scale", 0.5, 1.0), {"residual__scale_kind": "vector"}, [1, 1]),
        (over("residual.skip", 0.5, 1.0), {"residual__name": "post_ln"}, [2]),
        (over("optimizer.b2", None, 0.9), {}, [2]),
        (over("init.out_scale", None, 0.9), {}, [1, 1]),
        (over("optimizer.lr", 0.0, 1e-3), {}, [2]),
        (over("train.steps", 5, 10), {}, [1, 1]),
        (over("optimizer.schedule", "linear", "cosine"), {}, [1, 1]),
        (over("model.width", 8, 16), {}, [1, 1]),
        (over("train.eval_batches", 1, 2), {}, [2]),
        (over("residual.name", "pre_ln", "post_ln"), {}, [1, 1]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_an_architecture_is(config, cases, overrides, expected):
    assert [count for count, _ in groups(config, *cases, **overrides)] == expected


def test_only_what_varies_is_a_value(config):
    cases = settings(**{"optimizer.lr": [1e-3, 1e-2], "model.depth": [1, 2]})
    assert groups(config, *cases) == [(2, ("optimizer.lr",))] * 2
    assert groups(config, *settings(seed=[0, 1])) == [(2, ())]
    assert groups(config, {"model.depth": 1, "optimizer.lr": 1e-3}, {"model.depth": 2, "optimizer.lr": 1e-2}) == [
        (1, ()),
        (1, ()),
    ]


# ------------------------------------------------------------------ going on, and faults


def copied(done, folder):
    shutil.copytree(done[0], folder)
    return folder


def test_finished_cells_are_skipped_and_only_new_ones_are_trained(done, config, tmp_path, monkeypatch):
    folder = copied(done, tmp_path / "sweep")
    before = files(folder)
    with monkeypatch.context() as patch:
        patch.setattr(one, "train", lambda *_: pytest.fail("trained again"))
        patch.setattr(texts.data, "load", lambda *_: pytest.fail("read again"))
        assert swept(config, folder, *LR_AND_SEED) == 0
    assert files(folder) == before
    assert swept(config, folder, "--grid", "optimizer.lr=1e-3,1e-2,3e-2", "--grid", "seed=0,1") == 0
    rows = lines(folder)
    assert rows[:4] == lines(done[0])
    assert [row["fields"] for row in rows[4:]] == [{"optimizer.lr": 3e-2, "seed": seed} for seed in (0, 1)]


def test_the_order_and_the_way_a_cell_is_said_do_not_matter(done, config, tmp_path, monkeypatch):
    folder = copied(done, tmp_path / "sweep")
    monkeypatch.setattr(one, "train", lambda *_: pytest.fail("trained again"))
    same = ("--grid", "seed=1,0", "--grid", "optimizer.lr=0.01,.001")
    assert swept(config, folder, *same, train__keep=1, train__save_every=0) == 0


def test_after_ctrl_c_the_rest_is_trained_and_all_is_as_without_it(done, config, tmp_path, capsys):
    folder = tmp_path / "sweep"
    with at_batch(2 * STEPS + 3, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert swept(config, folder, *LR_AND_SEED) == 130
    assert "2 of 4 cells finished" in capsys.readouterr().out
    assert by_fields(lines(folder)) == by_fields(lines(done[0])[:2])
    assert swept(config, folder, *LR_AND_SEED) == 0
    assert by_fields(lines(folder)) == by_fields(lines(done[0]))


def test_sigterm_has_its_own_exit_code(config, tmp_path):
    with at_batch(1, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert swept(config, tmp_path / "sweep", *LR_AND_SEED) == 143
    assert lines(tmp_path / "sweep") == []


def test_a_line_that_a_kill_cut_off_is_dropped_and_its_cell_trained_again(done, config, tmp_path):
    folder = copied(done, tmp_path / "sweep")
    whole = (folder / "results.jsonl").read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    (folder / "results.jsonl").write_bytes(whole[: -len(last) // 2])
    assert swept(config, folder, *LR_AND_SEED) == 0
    assert (folder / "results.jsonl").read_bytes().startswith(whole[: -len(last)])
    assert by_fields(lines(folder)) == by_fields(lines(done[0])) and len(lines(folder)) == 4


def test_what_fails_is_marked_with_its_sentence_and_stops_no_other(config, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    train, options = one.train, ("--grid", "model.heads=2,3", "--grid", "optimizer.lr=1,2,3")

    def faulty(config, *more):
        if config.optimizer.lr == 2:
            raise RuntimeError("out of\nmemory")
        return train(config, *more)

    with monkeypatch.context() as patch:
        patch.setattr(one, "train", faulty)
        assert swept(config, folder, *options) == 1
    found = {tuple(row["fields"].values()): (row["status"], row["error"]) for row in lines(folder)}
    refusal = "model.width is 8, which model.heads=3 does not divide; the nearest are 6 or 9"
    assert found == {
        (2, 1): ("done", None),
        (2, 2): ("failed", "RuntimeError: out of memory"),
        (2, 3): ("done", None),
    } | {(3, rate): ("failed", refusal) for rate in (1, 2, 3)}
    assert "6 cells: 2 done, 4 failed" in capsys.readouterr().out
    assert swept(config, folder, *options) == 1  # what failed is tried again, the others are not
    assert [row["fields"]["model.heads"] for row in lines(folder)[6:]] == [2], "a refusal is on record once"
    assert lines(folder)[-1]["status"] == "done"


def test_a_program_that_does_not_compile_fails_its_cells_once(config, tmp_path, monkeypatch):
    tries = []

    def compile_shared(architecture, vocab):
        tries.append(architecture)
        if architecture.cells[0].config.model.depth == 1:
            raise MemoryError("too large")
        return shared.compile_shared(architecture, vocab)

    monkeypatch.setattr("resjax.sweeps.worker.compile_shared", compile_shared)
    options = ("--grid", "model.depth=1,2", "--grid", "seed=0,1")
    assert swept(config, tmp_path / "sweep", *options, train__steps=2) == 1
    rows = lines(tmp_path / "sweep")
    assert [row["status"] for row in rows] == ["failed"] * 2 + ["done"] * 2 and len(tries) == 2
    assert rows[1]["error"] == "MemoryError: too large"


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_cell_that_leaves_the_numbers_is_marked_and_not_tried_again(config, tmp_path, policy, monkeypatch):
    folder = tmp_path / "sweep"
    options = ("--grid", "optimizer.lr=1e-3,1e38")
    more = {"train__on_nonfinite": policy, "train__steps": 40, "optimizer__warmup": 0, "train__log_every": 3}
    assert swept(config, folder, *options, **more) == 1
    good, bad = lines(folder)
    assert (good["status"], bad["status"], bad["outcome"]) == ("done", "diverged", "nonfinite")
    assert bad["error"].startswith("step ") and "not finite" in bad["error"]
    assert ("the first non-finite value is in the forward pass" in bad["error"]) == (policy == "stop")
    assert bad["eval_loss"] is None and bad["last_loss"] == "nan" and bad["steps"] < 40
    monkeypatch.setattr(one, "train", lambda *_: pytest.fail("trained again"))
    assert swept(config, folder, *options, **more) == 1
    assert len(lines(folder)) == 2


def test_a_text_that_has_changed_is_refused_cell_by_cell(config, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    source = f"files:{text}"
    assert swept(config, tmp_path / "sweep", "--grid", "seed=0,1", data__source=source, train__steps=2) == 0
    text.write_text("the rest is silence\n" * 800)
    assert swept(config, tmp_path / "sweep", "--grid", "seed=0,1,2", data__source=source, train__steps=2) == 1
    last = lines(tmp_path / "sweep")[-1]
    assert last["status"] == "failed" and "has changed since cell" in last["error"]


def test_a_cell_that_is_listed_twice_is_trained_once(config, tmp_path, capsys):
    options = ("--grid", "optimizer.lr=1e-3,0.001", "--grid", "train.keep=1,2")
    assert swept(config, tmp_path / "sweep", *options, train__steps=2) == 0
    assert "3 of 4 cells are the same run as another" in capsys.readouterr().out
    assert len(lines(tmp_path / "sweep")) == 1


def test_one_sweep_at_a_time(done, config, tmp_path, capsys):
    folder = copied(done, tmp_path / "sweep")
    with sweep_locks(folder):
        assert swept(config, folder, *LR_AND_SEED) == 2
    assert "another process is training in" in capsys.readouterr().err


def sweep_locks(folder):
    from resjax.train.runfolder import RunFolder

    held = RunFolder(folder)
    held.lock()
    return held


def test_a_folder_that_holds_something_else_is_refused(config, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    before = files(tmp_path)
    assert swept(config, tmp_path, *LR_AND_SEED) == 2
    assert "holds other files and no sweep" in capsys.readouterr().err
    assert files(tmp_path) == before
    (tmp_path / "results.jsonl").write_text('{"loss": 1}\n')
    assert swept(config, tmp_path, *LR_AND_SEED) == 2
    assert "line 1 of" in capsys.readouterr().err


# ------------------------------------------------------------------ what a line holds


def test_a_line_says_what_was_run_and_how_it_ended(done):
    row = lines(done[0])[0]
    assert row["config"]["train.steps"] == STEPS and row["config"]["data.source"] == "markov"
    assert row["fields"] == {"optimizer.lr": 1e-3, "seed": 0}
    assert row["error"] is None and row["outcome"] == "partial" and row["corpus"]["source"] == "markov"
    assert row["first_loss"] > row["eval_loss"] > row["floors"]["trigram"]
    assert -1 <= row["token_cosine"] <= 1 and row["seconds"] > 0 and "curve" not in row
    assert sorted(os.listdir(done[0])) == ["results.jsonl"]
    assert row["compile_seconds"] > 0 and lines(done[0])[1]["compile_seconds"] == 0


def test_curves_are_kept_on_request_and_change_no_number(done, config, tmp_path):
    folder = copied(done, tmp_path / "sweep")
    assert swept(config, folder, "--curves", *LR_AND_SEED) == 0  # the lines without curves do not do
    before, after = by_fields(lines(folder)[:4]), by_fields(lines(folder)[4:])
    for key, row in after.items():
        curve = row.pop("curve")
        assert row == before[key]
        assert [one["step"] for one in curve if "loss" in one] == list(range(1, STEPS + 1))
        assert [one["step"] for one in curve if "eval_loss" in one] == [4, STEPS]
        assert curve[-1]["eval_loss"] == row["eval_loss"] and curve[0]["loss"] == row["first_loss"]
    assert swept(config, folder, "--curves", *LR_AND_SEED) == 0
    assert len(lines(folder)) == 8


def test_profiles_are_kept_on_request_and_change_no_number(done, config, tmp_path):
    """Of steps that the cadence measures and of others; a step beyond the end is the end."""
    folder = copied(done, tmp_path / "sweep")
    assert swept(config, folder, "--profiles=1,2,end,900", *LR_AND_SEED) == 0
    before, after = by_fields(lines(folder)[:4]), by_fields(lines(folder)[4:])
    for key, row in after.items():
        profiles = row.pop("profiles")
        assert row == before[key] and set(profiles) == {"1", "2", str(STEPS)}
        assert np.shape(profiles["2"]["update_ratio"]) == (2, 2) and np.shape(profiles["1"]["param_grad_block"]) == (2,)
        assert profiles[str(STEPS)]["token_cosine"][-1][-1] == pytest.approx(row["token_cosine"], rel=1e-3)
        assert profiles["1"]["stream_rms"] != profiles["2"]["stream_rms"]
    assert swept(config, folder, "--profiles=2,end", *LR_AND_SEED) == 0 and len(lines(folder)) == 8
    assert swept(config, folder, "--profiles=3", *LR_AND_SEED) == 0 and len(lines(folder)) == 12


@pytest.mark.parametrize("given", ["", "0", "1,,2", "-1", "last", "1.5"])
def test_profiles_of_no_step_are_refused(config, tmp_path, capfd, given):
    assert swept(config, tmp_path / "sweep", f"--profiles={given}", *LR_AND_SEED) == 2
    assert "--profiles has" in capfd.readouterr().err and not (tmp_path / "sweep").exists()


FLOORS = Floors(2.8, 2.3, 1.8)


@pytest.mark.parametrize(
    "losses, cosine, expected",
    [
        ([3.5, float("nan")], 0.1, "nonfinite"),
        ([3.5, 2.0, 3.6], 0.1, "diverged"),
        ([3.5, 2.81], 0.99, "collapsed"),
        ([3.5, 2.81], 0.5, "partial"),
        ([3.5, 2.81], None, "partial"),
        ([3.5, 2.28], 0.99, "bigram"),
        ([3.5, 2.26], 0.1, "trained"),
        ([3.5, 2.5], 0.1, "partial"),
        ([3.0, *[9.0] * 30, *[2.0] * 3], 0.1, "trained"),
    ],
)
def test_outcomes(losses, cosine, expected):
    assert outcome(losses, FLOORS, cosine) == expected


def test_without_floors_only_numbers_tell():
    assert outcome([3.5, 2.0], None, 0.1) is None and outcome([3.0, 3.1], None, 0.1) == "diverged"


# ------------------------------------------------------------------ the grid


def listed(capsys, path, folder, *options, **fields):
    """The settings of the cells, by a dry run."""
    assert swept(path, folder / "none", "--dry-run", *options, **fields) == 0
    assert not (folder / "none").exists()
    out = capsys.readouterr().out.splitlines()
    return [line.split(maxsplit=1)[1] for line in out if line.startswith("  ")], out


@pytest.mark.parametrize(
    "body, options, expected",
    [
        ("return {'optimizer.lr': [1e-3, 0.01], 'seed': range(2)}", (), ["0.001 0", "0.001 1", "0.01 0", "0.01 1"]),
        ("return {'optimizer.lr': ['1e-3', 1], 'seed': 3}", (), ["0.001 3", "1.0 3"]),
        ("return [{'seed': 1, 'optimizer.lr': 1e-3}, {'seed': [4, 5]}]", (), ["1 0.001", "4", "5"]),
        ("yield {'seed': 1}\n    yield {'seed': 2}", (), ["1", "2"]),
        ("return {'optimizer.lr': [1e-3], 'seed': [0, 1]}", ("--grid", "seed=7"), ["0.001 7"]),
        ("return {'optimizer.lr': [1e-3], 'seed': [0, 1]}", ("--config.seed=7",), ["0.001"]),
        ("return {'seed': [0]}", ("--grid", "data.length=4,8"), ["0 4", "0 8"]),
        ("return {'health.groups': [('forward',), 'none']}", (), ["forward", "none"]),
    ],
)
def test_a_config_says_its_own_grid_and_the_command_line_replaces_its_fields(
    config, tmp_path, capsys, body, options, expected
):
    cells, _ = listed(capsys, with_sweep(config, tmp_path, body), tmp_path, *options)
    values = [" ".join(setting.split("=")[1] for setting in cell.split() if "=" in setting) for cell in cells]
    assert values == expected


def test_a_value_with_a_comma_stands_in_quotes():
    values = grid.from_flags(['residual.at="0:skip=0,scale=2",1:scale=0.5'])
    assert values == {"residual.at": ["0:skip=0,scale=2", "1:scale=0.5"]}


def test_a_dry_run_tells_what_there_is_to_compile(done, config, tmp_path, capsys):
    options = (*LR_AND_SEED, "--grid", "model.depth=1,2")
    folder = copied(done, tmp_path / "sweep")
    before = files(folder)
    assert swept(config, folder, "--dry-run", *options) == 0
    out = capsys.readouterr().out
    assert "8 cells, 4 of them finished; 1 architecture to compile (3 programs" in out
    assert "architecture 2 of 2" in out and "values of its programs: seed, optimizer.lr" in out
    assert out.count("(finished)") == 4 and files(folder) == before


@pytest.mark.parametrize(
    "options, sentence",
    [
        (("--grid", "optimizer.rl=1"), "there is no field 'optimizer.rl'; did you mean 'optimizer.lr'?"),
        (("--grid", "optimizer.lr=1e-3,fast"), "optimizer.lr is 'fast'; it must be a number (float), 0 or above"),
        (("--grid", "optimizer.lr"), "--grid is 'optimizer.lr', without values"),
        (("--grid", "optimizer.lr="), "--grid optimizer.lr is ''; give values"),
        (("--grid", "optimizer.lr=1,,2"), "--grid optimizer.lr is '1,,2'; give values"),
        (("--grid", "seed=1", "--grid", "seed=2"), "--grid names seed twice"),
        (("--grid", "=1"), "--grid is '=1', without a field"),
        (("--grid", "lr=1,2"), "there is no field 'lr'; did you mean 'optimizer.lr'?"),
        (("--grid", "seed=[0,1]"), "--grid seed is '[0,1]'; give the values without brackets: --grid seed=0,1"),
        (
            ("--grid", "optimizer.lr=1e-3", "seed=0,1"),
            "'seed=0,1' is no option of this command; did you mean --grid seed",
        ),
        (("--grid", "residual.name=preln,post_ln"), "residual.name is 'preln', which is none of"),
        (("--grid", "data.source=markov,markof"), "did you mean 'markov'?"),
        (("--grid", "data.source=markov,files:"), "with nothing after the colon; write files:PATH"),
        (("--grid", "seed=1", "--ray="), "--ray is empty"),
        (("--grid", "seed=1", "--config.seed=2"), "--grid seed and --config.seed contradict one another"),
        ((), "there is nothing to sweep over"),
        (("--grid", "seed=1", "--config.model.dept=2"), "did you mean 'model.depth'?"),
        (("--grid", "seed=1", "--girds=2"), "'--girds=2' is no option of this command; did you mean --grid=2?"),
        (("--grid", "seed=1", "--scale=huge"), "invalid choice: 'huge'"),
        (("--grid", "seed=1", "--scale=accelerator"), "has no variant of that name: none at all"),
        (("--grid", "seed=1", "--config.model.heads=3"), "model.width is 8, which model.heads=3 does not divide"),
        (("--grid", "seed=1,2", "--config.train.on_nonfinite=rollback"), "a sweep saves no states to go back to"),
    ],
)
def test_bad_input_is_told_in_one_sentence_and_leaves_nothing(config, tmp_path, capsys, options, sentence):
    assert swept(config, tmp_path / "sweep", *options) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "body, sentence",
    [
        ("return {}", "it must return a dict of fields"),
        ("return 3", "it must return a dict of fields"),
        ("return {'seed': []}", "seed has no values"),
        ("return {'sede': [1]}", "did you mean 'seed'?"),
        ("return {'seed': ['x']}", "seed is 'x'; it must be a whole number"),
        ("return {'seed': [1 / 0]}", "ZeroDivisionError"),
    ],
)
def test_a_faulty_sweep_function_is_told_in_one_sentence(config, tmp_path, capsys, body, sentence):
    path = with_sweep(config, tmp_path, body)
    assert swept(path, tmp_path / "sweep") == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "swept.py" in captured.err and captured.err.count("\n") == 1


def test_no_config_and_no_such_file(tmp_path, capsys):
    assert sweep.main(["--grid=seed=1"]) == 2
    assert "--config is missing" in capsys.readouterr().err
    assert sweep.main([f"--config={tmp_path}/none.py", "--grid=seed=1"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_scales(tmp_path, capsys):
    path = str(ROOT / "configs" / "deep_preln.py")
    assert sweep.scaled(path, "accelerator") == f"{path}:accelerator" and sweep.scaled(path, "cpu") == path
    with pytest.raises(Refused, match="contradict"):
        sweep.scaled(f"{path}:accelerator", "cpu")
    assert sweep.folder(path, [], None) == "sweeps/deep_preln"
    assert (
        sweep.folder(f"{path}:accelerator", [("seed", "1")], "smoke")
        == "sweeps/deep_preln-accelerator,seed=1,scale=smoke"
    )
    small = load(path, [("optimizer.lr", 1.0)], finish=grid.shrink)
    assert (small.model.depth, small.model.width, small.model.heads, small.train.steps) == (4, 16, 2, 60)
    # also what a grid sets, or a grid of depths to 1,000 would not be small; cells that become the same run are one
    grown = [{"model.depth": depth, "optimizer.warmup": 450} for depth in (3, 5, 1000)]
    made = cells.build(path, [("train.steps", 600)], grown, "cpu", grid.shrink)
    assert [(cell.config.model.depth, cell.config.optimizer.warmup) for cell in made] == [(3, 60), (4, 60)]


def test_a_users_own_scheme_is_part_of_a_cell(config, tmp_path):
    path = tmp_path / "mine.py"
    text = "from resjax.residual import CATALOGUE\nMINE = CATALOGUE['pre_ln'].but(name='mine', scale={})\n"
    names = []
    for scale in (0.5, 0.25, 0.5):
        path.write_text(text.format(scale))
        (cell,) = cells.build(str(config), [("residual.name", f"{path}:MINE")], [{"seed": 0}], "cpu")
        names.append(cell.name)
    assert names[0] == names[2] != names[1]


def test_help_loads_no_jax():
    code = (
        "import sys\nfrom resjax.sweep import main\ntry:\n    main(['--help'])\nexcept SystemExit as stop:\n"
        "    assert stop.code == 0\nassert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=runs.environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for option in ("--grid", "--workdir", "--scale", "--curves", "--profiles", "--studies", "keep()", "--dry-run"):
        assert option in done.stdout
