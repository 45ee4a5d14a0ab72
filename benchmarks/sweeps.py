"""How many cells an hour does a sweep train, against a process for each run, and does it hold its memory and its programs?

    python -m benchmarks.sweeps [--cells=N] [--pairs=N] [--steps=N] [--depth=N] [--small=N] [--quick]

First the same cells (rates and seeds of one architecture, on the Markov text), in turn: by one sweep, and by one ordinary run after the
other, each a process of its own that compiles anew and saves nothing on the way. Then many small cells of two shapes in one process:
memory after each, and which of them compiled. results/sweeps.json keeps both; `python -m benchmarks.pages` writes them into
docs/sweeps.md. --quick tries all of it with a handful of cells, and keeps nothing.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
SHAPE, SHAPES = "model.depth", (4, 2)  # of the small cells, the largest first
SMALL_STEPS, SMALL_SEEDS = 20, 5
QUICK = {"cells": 2, "pairs": 1, "steps": 10, "depth": 2, "small": 8}
# Cells after which memory is to be flat: by then all texts are read, and the largest shape was there.
EARLY, QUICK_EARLY = 20, 6


def settings(count: int) -> list[dict[str, Any]]:
    """So many cells: rates, then seeds."""
    endless = ({"optimizer.lr": rate, "seed": seed} for seed in itertools.count() for rate in RATES)
    return list(itertools.islice(endless, count))


def small(count: int) -> list[dict[str, Any]]:
    """So many cells of ``SHAPES``, as many of each (the first one more): seeds, then rates, so that few cells read all texts."""
    found: list[dict[str, Any]] = []
    for i, shape in enumerate(SHAPES):
        of_it = (
            {SHAPE: shape, "optimizer.lr": round(1e-3 * 1.05**k, 7), "seed": seed}
            for k in itertools.count()
            for seed in range(SMALL_SEEDS)
        )
        found += itertools.islice(of_it, (count + len(SHAPES) - 1 - i) // len(SHAPES))
    return found


def with_cells(folder: Path, text: str, cells: Sequence[Mapping[str, Any]]) -> Path:
    """A config file of these cells."""
    path = folder / "grid.py"
    path.write_text(f"{text}\n\ndef sweep():\n    return {list(cells)!r}\n")
    return path


def swept(folder: Path, config: Path, cells: Sequence[dict[str, Any]]) -> list[float]:
    """Held-out losses of the cells, by one sweep."""
    path = with_cells(folder, config.read_text(), cells)
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
    """A command of its own, which finds nothing that another one has compiled."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        stdout=subprocess.DEVNULL,
    )


Way = Callable[[Path, Path, Sequence[dict[str, Any]]], list[float]]


def compared(
    cells: Sequence[dict[str, Any]], pairs: int, text: str, ways: Sequence[Way] = (swept, one_process_a_run)
) -> dict[str, Any]:
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


def held(cells: Sequence[dict[str, Any]], text: str, early: int) -> dict[str, Any]:
    """What one process holds and compiles that trains these cells; see :func:`benchmarks.sampled.told`."""
    from benchmarks import sampled  # loads JAX, which is not to lie beside what is timed

    with tempfile.TemporaryDirectory() as place:
        path, out = with_cells(Path(place), text, cells), Path(place) / "samples.json"
        _run("benchmarks.sampled", str(out), f"--config={path}", f"--workdir={Path(place) / 'sweep'}", "--no-figures")
        return sampled.told(read_json(out), SHAPE, early)


def processor() -> str:
    """Its name, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.sweeps", description=__doc__.partition("\n")[0])
    for name, value, what in (
        ("cells", 12, "cells of a round"),
        ("pairs", 3, "rounds of both ways"),
        ("steps", 300, "steps of a cell"),
        ("depth", 12, "blocks"),
        ("small", 200, "small cells in one process"),
    ):
        made.add_argument(f"--{name}", type=_positive, metavar="N", help=f"{what} (default: {value})", default=value)
    made.add_argument("--quick", action="store_true", help="a handful of cells, to see that it works; nothing is kept")
    return made


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1")
    return int(text)


def asked(words: Sequence[str] | None) -> tuple[dict[str, int], int, bool]:
    """The sizes, the cells after which memory is to be flat, and whether it is only tried."""
    made = parser()
    if made.parse_args(words).quick:
        made.set_defaults(**QUICK)
    given = vars(made.parse_args(words))
    quick = given.pop("quick")
    early = QUICK_EARLY if quick else EARLY
    if given["small"] <= early:
        made.error(f"--small is {given['small']}; it must be above {early}, after which memory is looked at")
    return given, early, quick


def main(words: Sequence[str] | None = None) -> int:
    given, early, quick = asked(words)
    load = round(os.getloadavg()[0], 2)
    rates = compared(
        settings(given["cells"]), given["pairs"], CONFIG.format(depth=given["depth"], steps=given["steps"])
    )
    memory = held(small(given["small"]), CONFIG.format(depth=SHAPES[0], steps=SMALL_STEPS), early)
    found = {
        "command": " ".join(["python -m benchmarks.sweeps", *(f"--{name}={value}" for name, value in given.items())]),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "load_before": load},
        "speed": {"depth": given["depth"], "steps": given["steps"], **rates},
        "memory": {"depths": list(SHAPES), "steps": SMALL_STEPS, **memory},
    }
    if quick:
        print(json.dumps(found, indent=1))
    else:
        from benchmarks import bench  # loads JAX

        bench.write("sweeps", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
