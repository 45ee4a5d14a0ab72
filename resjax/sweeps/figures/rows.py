"""Which lines of a sweep does a figure draw together? Arms, values of a field, and where an arm is at its best."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from resjax.config.field import show
from resjax.errors import Refused
from resjax.sweeps.lines import LOSS, RATE, SEED, Row, ending, number, value

By = Sequence[str] | Callable[[Row], str]
"""What makes an arm or a panel: fields, whose values name it; or a function from a line to a name."""


def varying(rows: Iterable[Row]) -> list[str]:
    """The fields of the grid in which runs differ, but the seed, in the order in which they are named."""
    rows = list(rows)
    named = dict.fromkeys(path for row in rows for path in row.get("fields", {}))
    return [path for path in named if path != SEED and len({value(row, path) for row in rows}) > 1]


def label(row: Row, paths: Sequence[str]) -> str:
    """The values of some fields, as a legend says them: 'post_ln, gain 0.55'."""
    words = []
    for path in paths:
        said = show(value(row, path)).strip("'")
        words.append(said if path == "residual.name" else f"{path.partition('.')[2] or path} {said}")
    return ", ".join(words)


def grouped(rows: Iterable[Row], by: By) -> dict[str, list[Row]]:
    """The lines by what makes an arm, in the order in which they come; without fields all are one, named ''."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row) if callable(by) else label(row, by), []).append(row)
    return groups


def by_value(rows: Iterable[Row], path: str) -> dict[Any, list[Row]]:
    """The lines by the value of a field, ascending; within one by seed."""
    groups: dict[Any, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (value(row, path), value(row, SEED))):
        groups.setdefault(value(row, path), []).append(row)
    return groups


@dataclass(frozen=True)
class Best:
    """The value of a field at which an arm is at its best.

    Attributes:
      value: of the field; None where at every value a run lost its loss.
      edge: 'smallest' or 'largest' value of the grid, or 'only' one; empty where there are others on both sides.
    """

    value: Any
    edge: str


def best(rows: Iterable[Row], path: str = RATE, of: str = LOSS) -> Best:
    """Where the mean over the seeds is the lowest; a value at which a run has no finite number is no candidate."""
    parts = by_value(rows, path)
    means = {given: float(np.mean([number(row.get(of)) for row in part])) for given, part in parts.items()}
    finite = {given: mean for given, mean in means.items() if np.isfinite(mean)}
    if not finite:
        return Best(None, "")
    chosen = min(finite, key=lambda given: finite[given])
    first, last = min(parts), max(parts)
    edge = "only" if first == last else {first: "smallest", last: "largest"}.get(chosen, "")
    return Best(chosen, edge)


def counted(rows: Iterable[Row], classes: Sequence[str]) -> str:
    """How many runs ended in each of some classes: '2 failed, 1 killed'; empty of none."""
    found = Counter(map(ending, rows))
    return ", ".join(f"{found[name]} {name}" for name in classes if found[name])


def some(rows: Iterable[Row]) -> list[Row]:
    """The lines as a list.

    Raises:
      Refused: there are none.
    """
    found = list(rows)
    if not found:
        raise Refused("there are no runs to draw: the sweep has no lines, or none with the fields that were asked for")
    return found
