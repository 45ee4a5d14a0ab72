"""Do an experiment, or go on with it: train its grid, measure the rest, keep the results, say the verdicts.

    python -m experiments.run E18 [E02 ...] [--scale=cpu|smoke|accelerator] [--workers=N] [--dry-run [--measure]]

What is under way lies in sweeps/; stopped and given again it goes on. At scale smoke everything runs small and with one seed, to see
that it runs, and judge and figure are tried on made-up runs, or where nothing is trained on what was measured: nothing is kept beside
what is under way, and no verdict is given.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import frozen, rehearsal, results, source
from experiments.experiment import SCALES, Experiment, named
from resjax import sweep
from resjax.errors import Refused
from resjax.main import answer, listen
from resjax.sweeps import grid
from resjax.sweeps.cells import build
from resjax.sweeps.results import Results
from resjax.train.runfolder import RunFolder
from resjax.train.session import platform
from resjax.train.writers import to_json, write_bytes, write_json

SOME_FAILED = 1
WORK = Path("sweeps")
ONE_SEED = "seed=0"
PLATFORMS = ("cpu", "gpu", "tpu")


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    if words is None:
        listen()
    parser = argparse.ArgumentParser(prog="python -m experiments.run", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="EXPERIMENT", help="such as E18")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="how large its runs are")
    parser.add_argument(
        "--workers", metavar="N", help="processes that train its cells; see python -m resjax.sweep --help"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the cells and how long they will take")
    parser.add_argument("--measure", action="store_true", help="with --dry-run: time some steps first")
    parser.add_argument("--workdir", type=Path, default=WORK, metavar="DIR", help="what is under way (default: sweeps)")
    arguments = parser.parse_args(words)
    planned = ["--dry-run"] * arguments.dry_run + ["--measure"] * arguments.measure

    def act() -> int:
        if planned == ["--measure"]:
            raise Refused("--measure goes with --dry-run; what is trained is timed by itself")
        code = 0
        for experiment in [named(name) for name in arguments.names]:
            code = run(experiment, arguments.scale, arguments.workdir, planned, arguments.workers)
            if code not in (0, SOME_FAILED):
                return code
        return code

    return answer(act)


def run(
    experiment: Experiment, scale: str, workdir: Path, planned: Sequence[str] = (), workers: str | None = None
) -> int:
    """One experiment; returns the exit code of its sweep, which gets ``workers`` as it stands.

    Args:
      planned: what the sweep is told so that it trains nothing, such as --dry-run; nothing is measured then, either.

    Raises:
      Refused: it is not as frozen.
    """
    smoke = scale == "smoke"
    if not smoke and not planned:
        frozen.check(experiment)
    here = workdir / f"{experiment.stem}.{scale}"
    print(f"{experiment.name}: {experiment.question}")
    trains = bool(experiment.cells(scale))
    if smoke and trains and not planned:
        rehearsal.check(experiment)
        print(f"judge and figure do their work on runs that are made up: {', '.join(rehearsal.ENDS)}")
    code = 0
    if trains:
        options = [f"--config={experiment.spec(scale)}", f"--workdir={here / 'cells'}"]
        options += ["--scale=smoke", "--grid", ONE_SEED] if smoke else []
        options += [f"--workers={workers}"] if workers is not None else []
        code = sweep.main([*options, *planned])
    if planned or code not in (0, SOME_FAILED):
        return code
    measured = {
        name: measure(here / "measured" / f"{name}.json", experiment, name, scale) for name in experiment.measures
    }
    rows = trained(experiment, scale, here / "cells") if trains else []
    kept = here / "results.json" if smoke else results.place(experiment, scale)
    results.write(kept, results.made_by(experiment, scale, frozen.digest()), rows, measured)
    if not (smoke and trains):  # small runs of one seed lack what a judge needs; small measurements do not
        found = results.read(kept)
        settled = experiment.settle(found.runs, found.measured, scale)
        drawing = experiment.picture(found.runs, found.measured, results.digest(found))
        write_bytes(kept.with_suffix(".svg"), drawing)
        print(
            "judge and figure do their work on what was measured" if smoke else "\n".join(one.told() for one in settled)
        )
    print(f"everything is in {kept}")
    return code


def trained(experiment: Experiment, scale: str, folder: Path) -> list[Mapping[str, Any]]:
    """The lines of the grid's cells, in its order; what an earlier grid left in the folder is no part of it."""
    lines, smoke = Results(RunFolder(folder)).rows, scale == "smoke"
    cells = grid.from_config(experiment.cells(scale), str(experiment.path))
    settings = grid.settings(cells, grid.from_flags([ONE_SEED]) if smoke else {})
    for where in dict.fromkeys((platform(), *PLATFORMS)):  # of workers, it may be another than of this process
        made = build(experiment.spec(scale), (), settings, where, grid.shrink if smoke else None)
        if all(cell.name in lines for cell in made):
            return [lines[cell.name] for cell in made]
    raise Refused(f"'{folder}' lacks cells of {experiment.name}; give the command again")


def measure(path: Path, experiment: Experiment, name: str, scale: str) -> list[dict[str, Any]]:
    """The rows of a measurement, made once; made anew where the code that makes them is another than that which made these."""
    code = source.digest(experiment, name)
    try:
        known = json.loads(path.read_text())
        if known["code"] == code:
            return known["rows"]
        print(f"measuring {name} anew: its code has changed since it was measured")
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):  # cut off, or of a version that did not say what made it
        print(f"measuring {name} anew: '{path}' does not say which code made it")
    rows = to_json([dict(row) for row in experiment.measures[name](scale)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"code": code, "rows": rows})
    return json.loads(path.read_text())["rows"]


if __name__ == "__main__":
    sys.exit(main())
