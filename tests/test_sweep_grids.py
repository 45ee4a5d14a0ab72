"""Do the ready-made grids have the cells that they say, and does the benchmark of sweeps compare equals?"""

import json
import re

import pytest

from benchmarks import pages, sampled, sweeps
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


def test_the_small_cells_are_all_different_and_the_largest_shape_comes_first():
    cells = sweeps.small(201)
    assert len(cells) == 201 == len({tuple(cell.items()) for cell in cells})
    depths = [cell["model.depth"] for cell in cells]
    assert depths == [4] * 101 + [2] * 100 == sorted(depths, reverse=True)
    assert {cell["seed"] for cell in cells[:5]} == {cell["seed"] for cell in cells}, "no text comes later"


def test_its_command_line(capsys):
    whole = {"cells": 3, "pairs": 3, "steps": 20, "depth": 12, "small": 200}
    assert sweeps.asked(["--cells=3", "--steps=20"]) == (whole, 20, False)
    assert sweeps.asked(["--quick", "--cells=3"]) == (sweeps.QUICK | {"cells": 3}, sweeps.QUICK_EARLY, True)
    for words, sentence in (
        (["--cells=0"], "'0' is no whole number from 1"),
        (["--small=20"], "--small is 20; it must be above 20"),
    ):
        with pytest.raises(SystemExit):
            sweeps.asked(words)
        assert sentence in capsys.readouterr().err


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


def samples(*held_and_compiled, change=0):
    """Cells that hold so many MiB when so often was compiled; from ``change`` on of another shape."""
    return [
        {"fields": {"model.depth": 4 if i < change else 2}, "bytes": mib * 2**20, "compiled": compiled}
        for i, (mib, compiled) in enumerate(held_and_compiled)
    ]


def test_what_samples_come_to():
    found = sampled.told(samples((100, 7), (120, 7), (126, 7), (123, 9), (122, 9), change=3), "model.depth", 2)
    assert found == {
        "cells": 5, "shapes": 2, "early": 2, "mib_early": 120.0, "mib_most_later": 126.0, "mib_last": 122.0, "growth": 0.05,
        "compilations": 9, "cells_that_compiled": 2, "only_the_first_of_a_shape_compiled": True,
        "mib": [100.0, 120.0, 126.0, 123.0, 122.0],
    }  # fmt: skip
    again = sampled.told(samples((100, 7), (99, 7), (98, 8), (97, 9), change=2), "model.depth", 1)
    assert (again["cells_that_compiled"], again["only_the_first_of_a_shape_compiled"], again["growth"]) == (
        3,
        False,
        -0.01,
    )
    lazy = sampled.told(samples((100, 0), (99, 7), (98, 7)), "model.depth", 1)
    assert not lazy["only_the_first_of_a_shape_compiled"], "the second compiled what the first should have"
    with pytest.raises(ValueError, match="2 cells tell nothing of what comes after 2"):
        sampled.told(samples((1, 1), (1, 1)), "model.depth", 2)


MEASURED = {
    "command": "python -m benchmarks.sweeps --cells=12",
    "machine": {"processor": "Some CPU", "cores": 2},
    "speed": {
        "depth": 12, "steps": 300, "cells": 12, "ratio": 2.5, "ratios": [2.5, 3.0, 2.0],
        "cells_an_hour": {"sweep": 250.4, "one_process_a_run": 100.0},
    },
    "memory": {
        "cells": 200, "shapes": 2, "early": 20, "mib_early": 512.3, "mib_most_later": 520.0, "mib_last": 518.0, "growth": 0.015,
        "cells_that_compiled": 2, "only_the_first_of_a_shape_compiled": True,
    },
}  # fmt: skip


def test_the_page_says_what_was_measured_below_its_mark_and_nothing_twice():
    text = pages.SWEEPS_PAGE.read_text().partition(pages.MEASURED)[0].rstrip("\n") + "\n"
    made = pages.sweeps(text, MEASURED)
    assert made.startswith(text) and pages.sweeps(made, MEASURED) == made and made.endswith("\n")
    for told in (
        "`python -m benchmarks.sweeps --cells=12` measures, here on 2 cores (Some CPU).",
        "| one sweep in one process | 250 |\n| a process for each run | 100 |",
        "That is 2.50 times as many (the median of 3 pairs in turn, 2.00 to 3.00): 12 cells of one shape, 12 blocks, 300 steps.",
        "| after cell 20 | 512 |\n| most later | 520 |\n| after the last | 518 |",
        "That is +1.5 % at most; of the 200 cells only the first of each shape compiled anything.",
    ):
        assert told in made
    more = MEASURED["memory"] | {"cells_that_compiled": 7, "only_the_first_of_a_shape_compiled": False}
    assert "of the 200 cells 7 compiled something, where 2 would do" in pages.sweeps(text, MEASURED | {"memory": more})


def test_a_try_keeps_nothing_and_a_measurement_says_what_was_measured(tmp_path, monkeypatch, capsys):
    from benchmarks import bench

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(sweeps, "compared", lambda cells, pairs, text: {"cells": len(cells), "pairs": pairs})
    monkeypatch.setattr(sweeps, "held", lambda cells, text, early: {"cells": len(cells), "early": early})
    assert sweeps.main(["--quick"]) == 0
    tried = json.loads(capsys.readouterr().out)
    assert tried["speed"]["cells"] == 2 and tried["memory"]["cells"] == 8 and not list(tmp_path.iterdir())
    assert sweeps.main(["--pairs=5"]) == 0
    kept = json.loads((tmp_path / "sweeps.json").read_text())
    assert kept["command"] == "python -m benchmarks.sweeps --cells=12 --pairs=5 --steps=300 --depth=12 --small=200"
    assert kept["speed"]["pairs"] == 5 and kept["memory"]["early"] == 20 and "jax" in kept["versions"]
    assert kept["machine"]["cores"] >= 1 and kept["machine"]["processor"]
