"""Do committed results come out again? Trains one cell of an experiment anew and compares how it ends.

    python -m experiments.again E18 [E02 ...] [--cell=NAME] [--scale=cpu]

Without --cell it takes the experiment's cell with the fewest steps times blocks; names are in the results. Exit code 1 where the outcome
class is another one, or the held-out loss differs by more than 0.02 nat.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from experiments import results
from experiments.experiment import SCALES, Experiment, named
from experiments.runs import LOSS, Row, Runs, ending, number, value_of
from resjax.config.load import from_file
from resjax.errors import Refused, not_one_of
from resjax.main import answer, listen
from resjax.sweeps import grid
from resjax.sweeps.cells import architectures, build
from resjax.sweeps.texts import Known
from resjax.sweeps.wanted import from_config
from resjax.sweeps.worker import Worker
from resjax.train.session import platform
from resjax.train.signals import Signals

CLOSE = 0.02  # nats per token
ANOTHER = 1


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    if words is None:
        listen()
    parser = argparse.ArgumentParser(prog="python -m experiments.again", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="EXPERIMENT", help="such as E18")
    parser.add_argument("--cell", metavar="NAME", help="which one, such as 7be1658709ef")
    parser.add_argument("--scale", choices=SCALES[1:], default="cpu", help="of which results")
    arguments = parser.parse_args(words)

    def act() -> int:
        code = 0
        for experiment in [named(name) for name in arguments.names]:
            was = chosen(results.read(results.place(experiment, arguments.scale)).runs, experiment, arguments.cell)
            print(f"{experiment.name}, cell {was['cell']}: {grid.text(was['fields'])}", flush=True)
            found = differences(was, trained(experiment, arguments.scale, was))
            print("\n".join(f"  {line}" for line in found.values()))
            code = ANOTHER if {"outcome", "loss"} & set(found) else code
        return code

    return answer(act)


def chosen(runs: Runs, experiment: Experiment, cell: str | None) -> Row:
    """The line of a cell; without a name that of the one that costs least.

    Raises:
      Refused: no such cell, or nothing was trained.
    """
    lines = {row["cell"]: row for row in runs}
    if not lines:
        raise Refused(f"{experiment.name} trains nothing, so there is no cell to train again")
    if cell is None:
        return min(runs, key=lambda row: value_of(row, "train.steps") * value_of(row, "model.depth"))
    if cell not in lines:
        raise not_one_of("--cell", cell, lines)
    return lines[cell]


def trained(experiment: Experiment, scale: str, was: Row) -> Row:
    """The line of the same cell, trained now.

    Raises:
      Refused: the experiment's grid has no such cell any more.
    """
    spec = experiment.spec(scale)
    settings = grid.settings(grid.from_config(experiment.cells(scale), str(experiment.path)), {})
    cells = [cell for cell in build(spec, (), settings, platform()) if cell.name == was["cell"]]
    if not cells:
        raise Refused(f"the grid of {experiment.name} has no cell {was['cell']} any more, or this is another device")
    wanted = from_config(from_file(spec, "keep"), str(experiment.path))
    with Signals("stopping after this step") as signals:
        return Worker(wanted, Known()).one(architectures(cells)[0], cells[0], signals)


def differences(was: Row, now: Row) -> Mapping[str, Any]:
    """Sentences: 'outcome' and 'loss' where they are others, else 'same'."""
    found = {}
    if ending(was) != ending(now):
        found["outcome"] = f"it ended {ending(was)}, and now {ending(now)} {now.get('error') or ''}".rstrip()
    before, after = number(was, LOSS), number(now, LOSS)
    apart = abs(after - before)
    if isnan(before) != isnan(after) or apart > CLOSE:
        found["loss"] = f"its loss was {before:.6g}, and is now {after:.6g}"
    if not found:
        kept = results.DIGITS
        exact = f"{before:.{kept}g}" == f"{after:.{kept}g}"
        how = f"all {kept} digits that are kept" if exact else f"within {apart:.2g} nat"
        found["same"] = f"ends {ending(now)} as before, its loss {after:.6g} the same to {how}"
    return found


if __name__ == "__main__":
    sys.exit(main())
