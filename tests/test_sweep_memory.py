"""Does a sweep hold no more than its largest cell needs, and compile each shape once, however many cells there are?"""

import subprocess
import sys

import numpy as np
import pytest

import runs
from benchmarks.sampled import STATM, told
from resjax import data
from resjax.data import Pipeline, markov
from resjax.sweeps import texts
from resjax.train.writers import read_json

BARE = {"train__steps": 4, "health__groups": "none"}
COMMAND = """
import sys
from resjax.data import markov
markov.TRAIN_SYMBOLS, markov.HELD_OUT_SYMBOLS = 1 << 16, 1 << 14
from benchmarks import sampled
sys.exit(sampled.main())
"""
where_linux_says_it = pytest.mark.skipif(
    not STATM.exists(), reason="reads the memory of the process where Linux says it"
)


def samples(config, folder, *grid):
    """What a sweep in a process of its own held and had compiled after each cell."""
    out = folder / "samples.json"
    words = [str(out), *runs.words(config, folder / "sweep", "--no-figures", *grid, **BARE)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env=runs.environment(),
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_json(out)


def several(count, first=0):
    return ",".join(map(str, range(first, first + count)))


@pytest.mark.slow
@where_linux_says_it
def test_memory_is_flat_over_200_cells_and_a_shape_is_compiled_once(calm, tmp_path):
    """At most 1 % more after the first 20 cells, which have read all 20 texts: 18 KB a cell, less than its weights and moments."""
    rates = ",".join(f"{1e-3 * (1 + i)}" for i in range(10))
    grid = ("--grid", "model.depth=2", "--grid", f"optimizer.lr={rates}", "--grid", f"seed={several(20)}")
    found = told(seen := samples(calm, tmp_path, *grid), "model.depth", 20)
    assert (found["cells"], found["shapes"]) == (200, 1) and {sample["status"] for sample in seen} == {"done"}
    assert found["only_the_first_of_a_shape_compiled"], [sample["compiled"] for sample in seen]
    assert found["growth"] < 0.01, f"MiB after each cell: {found['mib']}"


@pytest.mark.slow
@where_linux_says_it
def test_memory_is_flat_over_cells_of_two_shapes_and_each_is_compiled_once(calm, tmp_path):
    """As the grid has them, each cell is of another shape than the one before. At most 2 % more after the first 20 of 60, all of the
    larger shape: the programs of the smaller take what those of the larger gave back, but for what the allocator leaves between."""
    rates = ",".join(f"{1e-3 * (1 + i)}" for i in range(6))
    grid = ("--grid", f"optimizer.lr={rates}", "--grid", f"seed={several(5)}", "--grid", "model.depth=3,1")
    found = told(seen := samples(calm, tmp_path, *grid), "model.depth", 20)
    assert [sample["fields"]["model.depth"] for sample in seen] == [3] * 30 + [1] * 30
    assert {sample["status"] for sample in seen} == {"done"}
    assert found["only_the_first_of_a_shape_compiled"], [sample["compiled"] for sample in seen]
    assert found["growth"] < 0.02, f"MiB after each cell: {found['mib']}"


@pytest.mark.slow
@where_linux_says_it
def test_memory_is_that_of_the_largest_cell_whatever_was_trained_before(calm, tmp_path):
    """A33: twelve depths in one process, the largest first: at most 20 % more after the last than after the second."""
    seen = samples(calm, tmp_path, "--grid", f"model.depth=12,{several(11, first=1)}")
    found = told(seen, "model.depth", 2)
    assert (found["cells"], found["shapes"], found["only_the_first_of_a_shape_compiled"]) == (12, 12, True)
    assert found["mib_last"] < 1.2 * found["mib_early"], f"MiB after each cell: {found['mib']}"


# ------------------------------------------------------------------ texts


def test_batches_that_are_kept_have_one_limit_for_all_seeds(monkeypatch):
    """And are those of a pipeline that keeps nothing, whichever are asked for again."""
    monkeypatch.setattr(markov, "TRAIN_SYMBOLS", 1 << 12)
    monkeypatch.setattr(markov, "HELD_OUT_SYMBOLS", 1 << 10)
    corpus, drawn, draw = data.load("markov", None, 0), [], Pipeline.batch
    size = draw(Pipeline(corpus, 8, 4, 0), 0).nbytes
    monkeypatch.setattr(texts, "KEPT_BYTES", 3 * size)
    monkeypatch.setattr(Pipeline, "batch", lambda self, i: (drawn.append((self.seed, i)), draw(self, i))[1])
    kept = texts.Texts()
    pipelines = [kept._pipeline(corpus, 8, 4, seed) for seed in range(4)]
    for seed, i in ((0, 0), (0, 0), (1, 0), (2, 0), (0, 0), (3, 0), (1, 0), (0, 0)):
        np.testing.assert_array_equal(pipelines[seed].batch(i), draw(Pipeline(corpus, 8, 4, seed), i))
        assert kept._batches.bytes <= 3 * size
    assert drawn == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 0)], "the one that was asked for longest ago goes first"
    np.testing.assert_array_equal(pipelines[0].held_out(0), Pipeline(corpus, 8, 4, 0).held_out(0))
    monkeypatch.setattr(texts, "KEPT_BYTES", size - 1)
    small = texts.Texts()
    assert small._pipeline(corpus, 8, 4, 0).batch(5).nbytes == size and small._batches.bytes == 0, (
        "too large to be kept"
    )
