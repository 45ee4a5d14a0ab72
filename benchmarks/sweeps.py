"""How many cells an hour does a sweep train, against a process for each run?

    python -m benchmarks.sweeps [--cells=N] [--pairs=N] [--steps=N] [--depth=N]

The same cells (rates and seeds of one architecture, on the Markov text), in turn: by one sweep, and by one ordinary run after the
other, each a process of its own that compiles anew and saves nothing on the way. results/sweeps.json keeps both and their ratio.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resjax.train.writers import read_json, read_metrics

ROOT = Path(__file__).resolve().parent.parent
RATES = (1e-3, 3e-3, 1e-2)
CONFIG = """from resjax.config import default


def get_config():
    config = default()
    config.data.source, config.data.length, config.data.batch = "markov", 32, 16
    config.model.depth, config.model.width, config.model.heads = {depth}, 32, 4
    config.train.steps, config.train.eval_every, config.train.eval_batches = {steps}, 0, 8
    config.train.save_every = 0
    return config
"""


def settings(count: int) -> list[dict[str, Any]]:
    """So many cells: rates, then seeds."""
    endless = ({"optimizer.lr": rate, "seed": seed} for seed in itertools.count() for rate in RATES)
    return list(itertools.islice(endless, count))


def swept(folder: Path, config: Path, cells: Sequence[dict[str, Any]]) -> list[float]:
    """Held-out losses of the cells, by one sweep."""
    path = folder / "grid.py"
    path.write_text(f"{config.read_text()}\n\ndef sweep():\n    return {list(cells)!r}\n")
    _run("resjax.sweep", f"--config={path}", f"--workdir={folder / 'sweep'}", "--no-figures")
    rows = {tuple(row["fields"].values()): row["eval_loss"] for row in read_metrics(folder / "sweep" / "results.jsonl")}
    return [rows[tuple(cell.values())] for cell in cells]


def one_process_a_run(folder: Path, config: Path, cells: Sequence[dict[str, Any]]) -> list[float]:
    """The same by ordinary runs."""
    losses = []
    for i, cell in enumerate(cells):
        flags = [f"--config.{path}={value}" for path, value in cell.items()]
        _run("resjax.main", f"--config={config}", f"--workdir={folder / str(i)}", *flags)
        losses.append(read_json(folder / str(i) / "summary.json")["eval_loss"])
    return losses


def _run(module: str, *words: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)


Way = Callable[[Path, Path, Sequence[dict[str, Any]]], list[float]]


def compared(
    cells: Sequence[dict[str, Any]], pairs: int, text: str, ways: Sequence[Way] = (swept, one_process_a_run)
) -> dict:
    """Cells an hour both ways, the median of the ratios of pairs, and the largest difference of a loss.

    Raises:
      ValueError: the losses are not the same.
    """
    rows, apart = [], 0.0
    for i in range(pairs):
        took, losses = {}, {}
        for way in ways if i % 2 == 0 else reversed(ways):
            with tempfile.TemporaryDirectory() as place:
                config = Path(place) / "one.py"
                config.write_text(text)
                began = time.monotonic()
                losses[way] = way(Path(place), config, cells)
                took[way] = time.monotonic() - began
        first, second = ways
        apart = max(apart, *(abs(a - b) for a, b in zip(losses[first], losses[second], strict=True)))
        if not apart < 1e-3:
            raise ValueError(f"a loss of the sweep is {apart} nats from that of the run: they train other things")
        rows.append((took[first], took[second]))
    return {
        "cells": len(cells),
        "cells_an_hour": {
            "sweep": round(3600 * len(cells) / statistics.median(a for a, _ in rows), 1),
            "one_process_a_run": round(3600 * len(cells) / statistics.median(b for _, b in rows), 1),
        },
        "ratio": round(statistics.median(b / a for a, b in rows), 3),
        "ratios": [round(b / a, 3) for a, b in rows],
        "largest_difference_nats": apart,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.sweeps", description=__doc__.partition("\n")[0])
    for name, value, what in (
        ("cells", 12, "cells of a round"),
        ("pairs", 3, "rounds of both ways"),
        ("steps", 300, "steps of a cell"),
        ("depth", 12, "blocks"),
    ):
        made.add_argument(f"--{name}", type=_positive, default=value, metavar="N", help=f"{what} (default: {value})")
    return made


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1")
    return int(text)


def main(words: Sequence[str] | None = None) -> int:
    given = parser().parse_args(words)
    text = CONFIG.format(depth=given.depth, steps=given.steps)
    found = compared(settings(given.cells), given.pairs, text)
    from benchmarks import bench  # loads JAX

    command = " ".join(["python -m benchmarks.sweeps", *(f"--{name}={value}" for name, value in vars(given).items())])
    bench.write(
        "sweeps", {"command": command, "cores": os.cpu_count(), "depth": given.depth, "steps": given.steps, **found}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
