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
    return [
        {"optimizer.lr": 1e-3, "seed": 0, "train.eval_every": 3},
        {"optimizer.lr": 1e38, "seed": 1},
        {"optimizer.lr": 1e-2, "seed": 2, "health.every": 2, "train.eval_batches": 3},
        {"optimizer.lr": 3e-3, "seed": 0},
        {"optimizer.lr": 3e-2, "seed": 1, "residual.scale": 0.5},
    ]
"""
KEPT = ("--curves", "--profiles=1,5,end")
FIELDS = {"train__steps": STEPS + 10, "optimizer__warmup": 0, "residual__scale": 1.0}


@pytest.fixture(scope="module")
def config(calm, tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "grid.py"
    path.write_text(calm.read_text() + SWEEP)
    return path


def lines(folder):
    return {parse(line)["cell"]: parse(line) for line in (folder / "results.jsonl").read_text().splitlines()}


def swept(config, folder, *options, **fields):
    fields = {name: value for name, value in (FIELDS | fields).items() if name != "residual__scale"}
    assert sweep.main(runs.words(config, folder, *KEPT, *options, **fields)) == 1
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
