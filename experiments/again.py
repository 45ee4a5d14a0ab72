"""Do committed results come out again? Trains one cell of an experiment anew, or measures anew what it measures, and compares.

    python -m experiments.again E18 [E02 ...] [--cell=NAME] [--scale=cpu]

Without --cell it takes the experiment's cell with the fewest steps times blocks (names are in the results), and makes the first row of
each of its measurements. Exit code 1 where the outcome class is another one, the held-out loss differs
by more than 0.02 nat, or a measured number by more than a thousandth of itself.
"""

import argparse
import sys
from collections.abc import Generator, Mapping, Sequence
from math import inf, isnan
from textwrap import shorten
from typing import Any

from experiments import results
from experiments.experiment import SCALES, Experiment, Measured, named
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
from resjax.train.writers import to_json

CLOSE = 0.02  # nats per token
MEASURED, NOTHING = 1e-3, 1e-9  # of a measured number; what is no difference at all
OTHER = "another"
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
            kept = results.read(results.place(experiment, arguments.scale))
            if arguments.cell is None:
                code = max(code, remeasured(experiment, arguments.scale, kept.measured))
                if not kept.runs:
                    continue
            was = chosen(kept.runs, experiment, arguments.cell)
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
        raise Refused(
            f"{experiment.name} trains nothing, so it has no cell '{cell}'; without --cell it is measured again"
        )
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


# ---- what is measured without training


def remeasured(experiment: Experiment, scale: str, kept: Measured) -> int:
    """Makes the first row of each measurement again and tells how it compares; returns the exit code.

    Raises:
      Refused: the experiment measures something else than was kept.
    """
    if set(kept) != set(experiment.measures):
        raise Refused(f"{experiment.name} measures {', '.join(experiment.measures)}, and kept are {', '.join(kept)}")
    code = 0
    for name, rows in kept.items():
        print(f"{experiment.name}, the first row of {name}:", flush=True)
        found = unlike(rows[0], first_row(experiment, name, scale))
        print("\n".join(f"  {line}" for line in found) or f"  the same to all {results.DIGITS} digits that are kept")
        code = ANOTHER if any(line.startswith(OTHER) for line in found) else code
    return code


def first_row(experiment: Experiment, name: str, scale: str) -> dict[str, Any]:
    """The first row that a measurement makes, as it is kept; what makes the others is not run."""
    rows = iter(experiment.measures[name](scale))
    try:
        return results.rounded(to_json(dict(next(rows))))
    finally:
        if isinstance(rows, Generator):
            rows.close()  # now, and not some time: it may hold settings of JAX


def unlike(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence for each field that is not the same; those that begin with ``OTHER`` are no matter of rounding."""
    told = []
    for name in dict.fromkeys([*was, *now]):
        before, after = was.get(name), now.get(name)
        if before == after:
            continue
        if (apart := distance(before, after)) <= MEASURED:
            told.append(
                f"{name} differs by {apart:.2g} of itself" if apart else f"{name} is next to nothing, then as now"
            )
        else:
            told.append(f"{OTHER} {name}: it was {_short(before)}, and is now {_short(after)}")
    return told


def distance(was: Any, now: Any) -> float:
    """The largest difference of two numbers or nested lists of them, relative to the larger; inf of what is no such thing.

    Differences below 1e-9 are none: what ought to be 0 is the rounding of float64.
    """
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return max(map(distance, was, now), default=0.0)
    if was == now:
        return 0.0
    if (
        isinstance(was, bool)
        or isinstance(now, bool)
        or not (isinstance(was, int | float) and isinstance(now, int | float))
    ):
        return inf
    return 0.0 if abs(was - now) < NOTHING else abs(was - now) / max(abs(was), abs(now))


def _short(value: Any) -> str:
    return shorten(str(value), 60, placeholder=" ...")


if __name__ == "__main__":
    sys.exit(main())
