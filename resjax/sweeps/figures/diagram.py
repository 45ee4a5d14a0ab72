"""Where in the plane of learning rate and depth do runs train, and how do the others end? A field a cell, a part of it a seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib.patheffects
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from resjax import drawing
from resjax.sweeps.figures import look
from resjax.sweeps.figures.rates import said_number
from resjax.sweeps.figures.rows import By, grouped, some, varying
from resjax.sweeps.figures.sheet import COLUMNS, Sheet
from resjax.sweeps.lines import CLASSES, DEPTH, RATE, SEED, Row, ending, number, value

PART = 0.23  # inches, of a run
BESIDE = 0.45  # inches, for a number beside a line of fields
ALIKE = 1e-3  # relative: numbers of a line that differ by less are one
SMALLEST, GAP = 0.5, 0.04  # inches, of a field; of a field, around it
UNKNOWN = ("?", "#ffffff", "black")  # an ending of another name
HALO: Any = [matplotlib.patheffects.withStroke(linewidth=2.2, foreground="white")]


@drawing.styled
def phase(
    rows: Iterable[Row],
    panels: By | None = None,
    x: str = RATE,
    y: str = DEPTH,
    contour: Callable[[Row], float] | None = None,
    levels: Sequence[float] | None = None,
    contoured: str = "",
    heading: str = "Outcomes by learning rate and depth",
    labels: tuple[str, str] = ("learning rate", "depth (blocks)"),
    side_by_side: int = COLUMNS,
) -> Figure:
    """Outcome classes over two fields; each run of a field has its colour and letter, seeds ascending from left to right.

    What was not run is left white.

    Args:
      rows: lines of results.
      panels: what has a panel of its own; by default all other fields that vary.
      x, y: fields along the axes; ``labels`` are their names there.
      contour: a number of a run, of which lines of equal mean over the seeds are drawn, at ``levels``; where it does not depend on ``x``,
        it is written beside each line of fields instead.
      contoured: what that number is.
      side_by_side: panels in a row of them.

    Raises:
      Refused: no runs, too many panels.
    """
    rows = some(rows)
    panels = [name for name in varying(rows) if name not in (x, y)] if panels is None else panels
    columns, lines = (sorted({value(row, path) for row in rows}) for path in (x, y))
    parts = grouped(rows, panels)
    fields = {title: _fields(part, x, y, columns, lines) for title, part in parts.items()}
    most = max(len(runs) for found in fields.values() for runs in found.values())
    stacked = _stacked(most)
    wide, high = (max(SMALLEST, PART * count + 0.04) for count in (max(stacked, default=1), len(stacked)))
    shape = len(lines), len(columns)
    heights = [_heights(found, contour, shape) for found in fields.values()] if contour is not None else []
    beside = bool(heights) and all(map(_of_lines, heights))
    size = max(2.4, wide * len(columns)), max(1.2, high * len(lines))
    sheet = Sheet(list(parts), size, columns=side_by_side, beside=BESIDE if beside else 0.0)
    skipped = False
    for i, (axis, found) in enumerate(zip(sheet.axes, fields.values(), strict=True)):
        for (column, line), runs in found.items():
            _field(axis, column, line, runs)
        if beside:
            _beside(axis, heights[i])
        elif heights:
            skipped |= not _contours(axis, heights[i], levels)
        axis.set_xlim(-0.5, len(columns) - 0.5)
        axis.set_ylim(-0.5, len(lines) - 0.5)
        axis.set_xticks(range(len(columns)), [_said(one) for one in columns])
        axis.set_yticks(range(len(lines)), [_said(one) for one in lines])
        axis.grid(False)
    there = {ending(row) for row in rows}
    handles: list[Any] = [
        Patch(facecolor=look.CLASS_LOOK[name][1], edgecolor="#555555", label=f"{look.CLASS_LOOK[name][0]}  {name}")
        for name in CLASSES
        if name in there
    ]
    handles += [
        Patch(facecolor="white", edgecolor="#555555", label=f"?  {name}") for name in sorted(there - set(CLASSES))
    ]
    notes = []
    if beside and contoured:
        notes.append(f"Beside each line: {contoured}, the mean over the seeds.")
    elif contour is not None and contoured:
        handles.append(Line2D([], [], color="black", linewidth=1.2, label=contoured))
        if skipped:
            notes.append(
                f"Lines of equal {contoured} need two values of both fields, all with a number that is not one everywhere."
            )
    seeds = sorted({value(row, SEED) for row in rows})
    if most > 1:
        notes.append(f"A field has a part for each seed ({', '.join(map(str, seeds))}), from left to right, then down.")
    return sheet.finish(heading, *labels, handles, notes)


def _fields(
    rows: Sequence[Row], x: str, y: str, columns: Sequence[Any], lines: Sequence[Any]
) -> dict[tuple[int, int], list[Row]]:
    """The runs by column and line, seeds ascending."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: value(row, SEED)):
        found.setdefault((columns.index(value(row, x)), lines.index(value(row, y))), []).append(row)
    return found


def _stacked(count: int) -> list[int]:
    """How many runs stand in each row of a field."""
    high = 1 if count <= 3 else 2 if count <= 8 else 3 if count <= 15 else round(count**0.5)
    return [count // high + (i < count % high) for i in range(high)]


def _field(axis: Axes, column: int, line: int, runs: Sequence[Row]) -> None:
    rest = list(runs)
    stacked = _stacked(len(runs))
    size = 1 - 2 * GAP
    for i, count in enumerate(stacked):
        for j in range(count):
            end = ending(rest.pop(0))
            letter, colour, ink = look.CLASS_LOOK.get(end, UNKNOWN)
            left = column - size / 2 + j * size / count
            low = line + size / 2 - (i + 1) * size / len(stacked)
            part = Rectangle(
                (left, low), size / count, size / len(stacked), facecolor=colour, edgecolor="white", linewidth=0.7
            )
            part.set_label(f"_{end}")
            axis.add_patch(part)
            middle = (left + size / count / 2, low + size / len(stacked) / 2)
            axis.text(*middle, letter, ha="center", va="center", color=ink, fontsize=7.5, fontweight="bold")


def _heights(
    found: Mapping[tuple[int, int], Sequence[Row]], of: Callable[[Row], float], shape: tuple[int, int]
) -> np.ndarray:
    """(lines, columns): the mean over the seeds; NaN where nothing is known."""
    heights = np.full(shape, np.nan)
    for (column, line), runs in found.items():
        known = [one for one in (number(of(row)) for row in runs) if np.isfinite(one)]
        heights[line, column] = np.mean(known) if known else np.nan
    return heights


def _of_lines(heights: np.ndarray) -> bool:
    """Whether there are numbers, and those of each line are one, so that no line of equal number goes through the plane."""
    known = [line[np.isfinite(line)] for line in heights]
    return any(map(len, known)) and all(np.ptp(line) <= ALIKE * np.abs(line).max() for line in known if len(line))


def _beside(axis: Axes, heights: np.ndarray) -> None:
    """Write the number of each line of fields to its right."""
    for i, line in enumerate(heights):
        if np.isfinite(line).any():
            axis.text(1.02, i, f"{np.nanmean(line):.2g}", transform=axis.get_yaxis_transform(), va="center", fontsize=8)


def _contours(axis: Axes, heights: np.ndarray, levels: Sequence[float] | None) -> bool:
    """Draw lines of equal number; False where there is nothing to draw them through."""
    cells = np.isfinite(heights)
    whole = cells[:-1, :-1] & cells[1:, :-1] & cells[:-1, 1:] & cells[1:, 1:]
    low, high = (np.nanmin(heights), np.nanmax(heights)) if cells.any() else (np.nan, np.nan)
    if not whole.any() or not low < high:
        return False
    wanted = np.linspace(low, high, 6)[1:-1] if levels is None else [level for level in levels if low < level < high]
    if not len(wanted):
        return False
    masked = np.ma.masked_invalid(heights)
    drawn = axis.contour(masked, levels=sorted(wanted), colors="black", linewidths=1.2)
    drawn.set(path_effects=HALO)
    for words in axis.clabel(drawn, fmt=lambda level: f"{level:.3g}", fontsize=8):
        words.set_path_effects(HALO)
    return True


def _said(given: Any) -> str:
    return said_number(float(given)) if isinstance(given, int | float) else str(given)


def at_first_step(probe: str) -> Callable[[Row], float]:
    """The number of a probe after the last site, at the first step whose profile is kept; for ``contour``."""

    def of(row: Row) -> float:
        kept = row.get("profiles") or {}
        found: Any = kept[min(kept, key=int)].get(probe) if kept else None
        while isinstance(found, list) and found:
            found = found[-1]
        return number(found)

    return of
