"""Do the ready-made grids have the cells that they say, and does the benchmark of sweeps compare equals?"""

import re

import pytest

from benchmarks import sweeps
from resjax import sweep
from resjax.config.load import load
from runs import ROOT

GRIDS = sorted(path.stem for path in (ROOT / "configs").glob("grid_*.py"))


@pytest.mark.parametrize("name", GRIDS)
def test_a_ready_made_grid_has_the_cells_that_its_header_says(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = f"configs/{name}.py"
    text = (ROOT / path).read_text()
    said = int(re.search(r"(\d+) cells", text.partition("\n")[0])[1])
    commands = re.findall(r"^    python -m resjax\.sweep (.*)$", text, re.MULTILINE)
    assert len(commands) == 2 and all(f"--config={path}" in command for command in commands)
    assert [command.endswith("--dry-run") for command in commands] == [False, True]
    words = [*commands[0].split(), "--dry-run", f"--workdir={tmp_path / 'none'}"]  # with what the first one asks for
    assert sweep.main(words) == 0
    out = capsys.readouterr().out
    assert f"{said} cells, 0 of them finished" in out and re.search(r"^time: about \d+ \w+", out, re.MULTILINE)
    assert "refused" not in out and "note:" not in out, "no cell contradicts itself or is another one"
    assert load(f"{path}:accelerator").model.width == 1024


def test_there_are_the_grids_of_the_article():
    assert GRIDS == ["grid_between", "grid_depth", "grid_stability"]


# ------------------------------------------------------------------ the benchmark


def test_the_cells_of_the_benchmark_are_all_different():
    cells = sweeps.settings(7)
    assert len(cells) == 7 == len({tuple(cell.items()) for cell in cells})
    assert cells[0] == {"optimizer.lr": 1e-3, "seed": 0} and cells[6]["seed"] == 2


def test_its_command_line(capsys):
    assert vars(sweeps.parser().parse_args(["--cells=3", "--steps=20"])) == {
        "cells": 3, "pairs": 3, "steps": 20, "depth": 12,
    }  # fmt: skip
    with pytest.raises(SystemExit):
        sweeps.parser().parse_args(["--cells=0"])
    assert "'0' is no whole number from 1" in capsys.readouterr().err


def test_rounds_alternate_and_ratios_are_of_pairs(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(sweeps.time, "monotonic", lambda: now[0])

    def way(name, seconds, loss=2.0):
        def go(folder, config, cells):
            assert folder.is_dir() and config.read_text() == "text"
            order.append(name)
            now[0] += seconds
            return [loss] * len(cells)

        return go

    cells = sweeps.settings(4)
    found = sweeps.compared(cells, 3, "text", (way("sweep", 10.0), way("runs", 40.0)))
    assert order == ["sweep", "runs", "runs", "sweep", "sweep", "runs"]
    assert found["ratio"] == 4.0 and found["cells_an_hour"] == {"sweep": 1440.0, "one_process_a_run": 360.0}
    with pytest.raises(ValueError, match="they train other things"):
        sweeps.compared(cells, 1, "text", (way("sweep", 1.0), way("runs", 1.0, loss=2.1)))
