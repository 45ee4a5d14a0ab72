"""Do cells that are trained at once end as one by one, each untouched by the others, on one device and on several?"""

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import runs
from resjax import sweep
from resjax.config.load import load
from resjax.config.validate import resolve
from resjax.errors import Refused
from resjax.sweeps import cells, one, together, worker
from resjax.sweeps.texts import Texts
from resjax.train.numbers import with_numbers
from resjax.train.writers import parse
from runs import ROOT, STEPS

pytestmark = pytest.mark.usefixtures("quick")
SWEEP = """
def sweep():
    cells = [
        {"optimizer.lr": 1e-3, "seed": 0, "train.eval_every": 3},
        {"optimizer.lr": 1e38, "seed": 1},
        {"optimizer.lr": 1e-2, "seed": 2, "health.every": 2, "train.eval_batches": 3},
        {"optimizer.lr": 3e-3, "seed": 0},
        {"optimizer.lr": 3e-2, "seed": 1},
    ]
    return [{"residual.scale": 1.0 - 0.1 * i, **cell} for i, cell in enumerate(cells)]
"""
KEPT = ("--curves", "--profiles=1,5,end", "--no-figures")
FIELDS = {"train__steps": STEPS + 10, "optimizer__warmup": 0}


@pytest.fixture(scope="module")
def config(calm, tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "grid.py"
    path.write_text(calm.read_text() + SWEEP)
    return path


def lines(folder):
    return {parse(line)["cell"]: parse(line) for line in (folder / "results.jsonl").read_text().splitlines()}


def swept(config, folder, *options, **fields):
    assert sweep.main(runs.words(config, folder, *KEPT, *options, **(FIELDS | fields))) == 1
    return lines(folder)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    return swept(config, tmp_path_factory.mktemp("alone") / "sweep", "--together=1")


def close(a, b, where=""):
    """The same, but for rounding in numbers and in what is measured in seconds."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for name in a:
            if name not in ("seconds", "compile_seconds"):
                close(a[name], b[name], f"{where}.{name}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{where}[{i}]")
    elif isinstance(a, float) and not isinstance(b, str):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5, err_msg=where)
    else:
        assert a == b, where


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_cells_at_once_end_as_one_by_one(config, alone, tmp_path, size, capsys):
    """Of five, one leaves the numbers in the middle, one has a gain of its own, and the last group is not full."""
    rows = swept(config, tmp_path / "sweep", f"--together={size}")
    assert "one after another" not in capsys.readouterr().out
    assert rows.keys() == alone.keys() and len(rows) == 5
    for name, row in rows.items():
        counts = row.pop("together", 1)
        close(alone[name], row, str(row["fields"]))
        if row["status"] == "done":
            assert abs(alone[name]["eval_loss"] - row["eval_loss"]) < 1e-5
        assert counts <= size
    bad = next(row for row in rows.values() if row["fields"]["optimizer.lr"] > 1)
    assert bad["status"] == "diverged" and "the first non-finite value is in" in bad["error"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_policies_for_values_that_are_not_finite_are_kept(config, tmp_path, policy):
    fields = {"train__on_nonfinite": policy}
    one_by_one = swept(config, tmp_path / "alone", "--together=1", **fields)
    rows = swept(config, tmp_path / "sweep", "--together=3", **fields)
    assert all(one_by_one[name]["steps"] == row["steps"] for name, row in rows.items())
    assert [row["status"] for row in rows.values()].count("diverged") == 1


KEEP = """
import numpy as np

def look(subject, before):
    embed = np.asarray(subject.model.embed[...])
    after = subject.origin.next_model()
    found = {
        "seen": [subject.step, len(subject.rows), subject.origin.next_rate],
        "moved": None if before is None else float(np.abs(embed - before).max()),
        "moves": None if after is None else float(np.abs(np.asarray(after.embed[...]) - embed).max()),
        "loss": subject.loss,
    }
    return found | {"_memory": embed}

def keep():
    return {"studies": ("update",), "looks": {"steps": (1, 5, "end"), "look": look}}

def sweep():
    cells = [(1e-3, 1.0, 0), (1e38, 0.9, 1), (1e-2, 0.7, 2)]
    return [{"optimizer.lr": rate, "residual.scale": gain, "seed": seed} for rate, gain, seed in cells]
"""


@pytest.fixture(scope="module")
def kept(calm, tmp_path_factory):
    """Three cells at once, of which one leaves the numbers between its first look and its second; and the place of the file."""
    folder = tmp_path_factory.mktemp("kept")
    path = folder / "kept.py"
    path.write_text(calm.read_text() + KEEP)
    return swept(path, folder / "sweep", "--together=3", train__steps=8), path


def test_looks_and_studies_of_cells_at_once_are_those_of_one_by_one(kept, tmp_path):
    rows, path = kept
    alone = swept(path, tmp_path / "alone", "--together=1", train__steps=8)
    assert rows.keys() == alone.keys() and [row["together"] for row in rows.values()] == [3] * 3
    for name, row in rows.items():
        bad = row["status"] == "diverged"
        assert list(row["looks"]) == (["1"] if bad else ["1", "5", "8"]) and row["look"] == "look"
        assert list(row["studies"]) == ([] if bad else ["update"])
        assert bad or (row["looks"]["5"]["moved"] > 0 and row["studies"]["update"]["change"] > 0)
        assert not any("error" in one for one in (*row["looks"].values(), *row["studies"].values()))
        close(alone[name] | {"together": 3}, row, str(row["fields"]))
    assert len({row["looks"]["1"]["loss"] for row in rows.values()}) == 3, "each look saw its own cell"


@pytest.mark.slow
def test_looks_and_studies_change_no_number_of_cells_at_once(kept, tmp_path):
    rows, path = kept
    other = tmp_path / "plain.py"
    other.write_text(path.read_text().replace("def keep", "def kept"))
    for name, row in swept(other, tmp_path / "sweep", "--together=3", train__steps=8).items():
        for key in row.keys() - {"seconds", "compile_seconds"}:
            assert row[key] == rows[name][key], f"{key}: bit for bit, all losses of all steps included"
        assert set(rows[name]) - set(row) == {"studies", "look", "looks"}


FOUR = """
import sys
from resjax.data import markov
markov.TRAIN_SYMBOLS, markov.HELD_OUT_SYMBOLS = 1 << 16, 1 << 14
from resjax.sweeps import together
import jax
made = together.compile_group
def compile_group(*arguments):
    group = made(*arguments)
    state = group.initial(group.put([group.shared.numbers(cell.config) for cell in arguments[0].cells[:4]]), None)
    print("devices of a state:", {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)})
    print("cells on one of them:", {leaf.addressable_shards[0].data.shape[0] for leaf in jax.tree.leaves(state.params)})
    return group
together.compile_group = compile_group
from resjax.sweep import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_cells_at_once_lie_over_the_devices(config, tmp_path):
    """Four devices; of five cells four and then one with three places left free: as by one device one after another."""
    folder, environ = tmp_path / "sweep", runs.environment(flags="--xla_force_host_platform_device_count=4")
    fields = runs.words(config, folder, *KEPT, "--together=4", **FIELDS)
    done = subprocess.run(
        [sys.executable, "-c", FOUR, *fields], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "devices of a state: {4}" in done.stdout and "cells on one of them: {1}" in done.stdout
    alone = subprocess.run(
        [sys.executable, "-c", FOUR, *runs.words(config, tmp_path / "alone", *KEPT, **FIELDS)],
        env=runs.environment(), cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert alone.returncode == 1, alone.stdout + alone.stderr
    rows, before = lines(folder), lines(tmp_path / "alone")
    assert rows.keys() == before.keys()
    for name, row in rows.items():
        assert row.pop("together") in (1, 4)
        close(before[name], row, str(row["fields"]))


# ------------------------------------------------------------------ how many, and which


def built(config, **fields):
    overrides = [(name.replace("__", "."), str(value)) for name, value in (FIELDS | fields).items()]
    settings = [{"optimizer.lr": rate, "seed": seed} for rate in (1e-3, 1e-2) for seed in range(5)]
    return cells.build(str(config), overrides, settings, "cpu")


@pytest.mark.parametrize(
    "count, asked, devices, platform, expected",
    [
        (10, 0, 1, "cpu", 1),
        (10, 0, 4, "cpu", 1),
        (10, 0, 1, "gpu", 10),
        (10, 0, 4, "tpu", 12),
        (10, 1, 1, "gpu", 1),
        (10, 4, 1, "cpu", 4),
        (5, 4, 1, "cpu", 3),
        (10, 3, 1, "gpu", 3),
        (10, 4, 4, "gpu", 4),
        (1, 4, 1, "cpu", 1),
    ],
)
def test_how_many_at_once(config, count, asked, devices, platform, expected):
    assert together.size_for(built(config)[:count], asked, devices, platform) == expected


def test_a_cell_that_wants_several_devices_is_not_put_beside_others(config):
    wide = built(config, mesh__data=2)
    assert together.size_for(wide, 0, 4, "gpu") == 1
    together.check(wide, 0)
    with pytest.raises(Refused, match="contradict one another"):
        together.check(wide, 3)


class Programs:
    def __init__(self, size, each=10):
        self.size, self.bytes = size, each * size


def test_as_many_as_fit_into_memory_are_compiled(monkeypatch):
    tried, said = [], []

    def compile_group(architecture, vocab, size):
        tried.append(size)
        if size > 50:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return Programs(size)

    monkeypatch.setattr(together, "compile_group", compile_group)
    monkeypatch.setattr(together, "memory", lambda: 250)
    assert together.compile_fitting(None, 32, 64, True, said.append).size == 20
    assert tried == [64, 32, 20] and len(said) == 2
    assert together.compile_fitting(None, 32, 40, False, said.append).size == 40
    monkeypatch.setattr(together, "memory", lambda: None)
    assert together.compile_fitting(None, 32, 40, True, said.append).size == together.UNKNOWN


@pytest.fixture
def no_start(monkeypatch):
    """Cells at once fail before their first step; one after another is recorded, not done."""
    monkeypatch.setattr(together, "train", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(together, "compile_fitting", lambda *_: (_ for _ in ()).throw(MemoryError("large")))
    alone = []
    monkeypatch.setattr(one, "train", lambda config, *_: alone.append(config) or {"status": "done"})
    monkeypatch.setattr(worker, "compile_shared", lambda *_: Compiled())
    return alone


class Compiled:
    seconds, stream_dtype = 0.0, "float32"


def test_what_does_not_go_together_goes_one_after_another(config, no_start):
    made, said, under_way = built(config)[:4], [], []
    (group,) = cells.architectures(made)
    trained = worker.Worker(worker.Wanted(), worker.Known(), said.append, 2).train(
        group, made, worker.Signals(), under_way.append
    )
    assert [(cell, row["status"]) for cell, row in trained] == [(cell, "done") for cell in made]
    assert "2 cells at once: MemoryError: large; one after another" in said[0] and len(no_start) == 4
    assert under_way == [[cell] for cell in made]


@pytest.mark.slow
def test_a_stop_in_the_middle_leaves_what_had_ended(config, tmp_path):
    count = []

    def put(group, rows, original=together.Group.put):
        count.append(1)
        if len(count) == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return original(group, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together.Group, "put", put)
        assert sweep.main(runs.words(config, tmp_path / "sweep", "--no-figures", "--together=2", **FIELDS)) == 130
    assert sorted(os.listdir(tmp_path / "sweep")) == ["results.jsonl"]
    kept = lines(tmp_path / "sweep")
    assert 1 <= len(kept) < 5
    assert sweep.main(runs.words(config, tmp_path / "sweep", "--no-figures", "--together=2", **FIELDS)) == 1
    assert len(lines(tmp_path / "sweep")) == 5


# ------------------------------------------------------------------ pairs


def start(config, scheme, seed):
    chosen = resolve(load(str(config), [("residual.name", scheme), ("seed", seed)]), "cpu")
    parts = runs.known(runs.assemble, chosen, 32)
    state = jax.jit(lambda: with_numbers(parts, {"seed": np.uint32(seed)}).start())()
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state.params)}


@pytest.mark.parametrize(
    "other",
    ["post_ln", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sandwich_branch", "rezero", "layerscale"))],
)
def test_arms_of_a_pair_start_from_the_same_draw_and_see_the_same_batches(config, other):
    """Every weight that both have; gains of norms start at 1 whatever the scheme. Another seed gives another draw."""
    one_arm, other_arm = start(config, "pre_ln", 3), start(config, other, 3)
    common = {name for name in one_arm.keys() & other_arm.keys() if one_arm[name].shape == other_arm[name].shape}
    kernels = {name for name in one_arm if one_arm[name].std() > 0}
    assert kernels and kernels <= common
    for name in common:
        assert np.array_equal(one_arm[name], other_arm[name]), name
    again = start(config, "pre_ln", 4)
    assert not any(np.array_equal(one_arm[name], again[name]) for name in kernels)
    texts, batches = Texts(), []
    for scheme in ("pre_ln", other):
        chosen = resolve(load(str(config), [("residual.name", scheme), ("seed", 3)]), "cpu")
        pipeline = texts.pipeline(chosen)
        batches.append([pipeline.batch(i) for i in range(3)] + [pipeline.held_out(0)])
    assert all(np.array_equal(a, b) for a, b in zip(*batches, strict=True))
