"""Which learning rate is best, and how much does the loss depend on it? Every seed shown, every lost run marked."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from resjax import drawing
from resjax.errors import Refused
from resjax.sweeps.figures import look
from resjax.sweeps.figures.rows import Best, By, best, by_value, grouped, label, some, varying
from resjax.sweeps.figures.sheet import Sheet
from resjax.sweeps.lines import DEPTH, LOSS, NOT_RUN, RATE, SEED, Row, ending, number, value

DODGED, MOST_DODGED = 0.12, 0.7  # of the distance of two values of the grid: between two arms, and of all
ROW = 0.045  # of the axis: a row of marks above the scale
MARK, WIDEST = 0.09, 9.0  # inches, of a mark and of a panel
MOST_TICKS = 9
RING = look.points("o", 13, 1.6, hollow=True)
EDGES = {"smallest": "<", "largest": ">", "only": "D"}
RULE = "Best: lowest mean over the seeds; a rate at which a seed has no finite loss is no candidate."
AT_EDGE = "at the edge of the grid: a better rate may lie beyond"


@drawing.styled
def sensitivity(
    rows: Iterable[Row],
    arms: By | None = None,
    panels: By = (),
    path: str = RATE,
    heading: str = "Loss and learning rate",
    unit: str = "learning rate",
) -> Figure:
    """The held-out loss at the end against the learning rate: a dot a seed, a line through the medians, a ring on the best.

    Above the scale stands, in rows, what has no place on it: runs that are not finite, that failed, and losses far above the first.

    Args:
      rows: lines of results.
      arms, panels: what has a colour, and a panel, of its own; by default all other fields that vary are arms.
      path: the field of numbers above 0 along the axis; ``unit`` is its name there.

    Raises:
      Refused: no runs, values that are no numbers above 0, too many arms or panels.
    """
    rows = some(rows)
    grid = _grid(rows, path)
    arms = [name for name in varying(rows) if name != path] if arms is None else arms
    looks, parts = look.arms(grouped(rows, arms)), grouped(rows, panels)
    places = _places(grid, list(looks))
    low, high = _limits(rows)
    deepest = max(
        (len(lost) for runs in grouped(rows, arms).values() for lost in _above(runs, panels, path, high)), default=0
    )
    band = ROW * (deepest + 0.6) if deepest else 0.0
    sheet = Sheet(list(parts), (min(WIDEST, max(4.4, MARK * len(grid) * len(looks))), 3.1))
    used: set[str] = set()
    edges: list[str] = []
    for axis, (title, part) in zip(sheet.axes, parts.items(), strict=True):
        axis.set_ylim(low, low + (high - low) / (1 - band))
        if band:
            axis.axhspan(high, low + (high - low) / (1 - band), color="#f3f3f3", linewidth=0, zorder=0, label="_above")
        for name, runs in grouped(part, arms).items():
            at = best(runs, path)
            used |= _arm(
                axis, by_value(runs, path), at, looks[name], name, lambda x, name=name: places[name, x], high, band
            )
            edges += _edge(at, ", ".join(filter(None, (title, name))))
        _log_axis(axis, grid)
        axis.set_yticks([tick for tick in axis.get_yticks() if low <= tick <= high])
    handles = [looks[name].handle(look.called(name)) for name in looks]
    handles += [Line2D([], [], color="#333333", label="best", **RING)]
    if any("none:" not in edge for edge in edges):
        handles.append(Line2D([], [], color="#333333", label=AT_EDGE, **look.points(">", 11, hollow=True)))
    handles += [look.end_handle(kind) for kind in look.END_WORDS if kind in used]
    return sheet.finish(
        heading,
        unit,
        "held-out loss at the end (nats per token)",
        handles,
        [*_said(edges), RULE, *_beside(looks, unit)],
    )


def _arm(
    axis: Axes,
    parts: Mapping[Any, Sequence[Row]],
    at: Best,
    arm: look.Arm,
    name: str,
    place: Callable,
    high: float,
    band: float,
) -> set[str]:
    """Dots, line, ring and marks of an arm; returns the kinds of marks."""
    medians, used = [], set()
    for given, runs in parts.items():
        values = np.array([number(row.get(LOSS)) for row in runs])
        medians.append(float(np.median(np.where(np.isfinite(values), values, np.inf))))
        shown = values[np.isfinite(values) & (values <= high)]
        if shown.size:
            axis.plot([place(given)] * len(shown), shown, **_dot(arm, f"_{name}: seeds"))
        for i, kind in enumerate(_lost(runs, high)):
            y = 1 - band + ROW * (i + 0.8)
            style = look.points(look.ENDS[kind], 6, 1.5, color=arm.colour, transform=axis.get_xaxis_transform())
            axis.plot([place(given)], [y], label=f"_{name}: {kind}", **style)
            used.add(kind)
    line = np.array([median if median <= high else np.nan for median in medians])
    xs = [place(given) for given in parts]
    axis.plot(xs, line, color=arm.colour, linestyle=arm.dash, linewidth=1.3, label=look.called(name))
    if at.value is not None:
        y = min(medians[list(parts).index(at.value)], high)
        axis.plot([place(at.value)], [y], color=arm.colour, zorder=4, label=f"_{name}: best", **RING)
        if at.edge:
            style = look.points(EDGES[at.edge], 22, hollow=True, color=arm.colour, clip_on=False, zorder=4)
            axis.plot([place(at.value)], [y], label=f"_{name}: edge", **style)
    return used


def _dot(arm: look.Arm, name: str) -> dict[str, Any]:
    return look.points(arm.marker, 4, 0.4, color=arm.colour, alpha=0.75, markeredgecolor="white", label=name)


def _lost(runs: Iterable[Row], high: float) -> list[str]:
    """What stands above the scale, a mark a run."""
    kinds = []
    for row in runs:
        if ending(row) in NOT_RUN:
            kinds.append("failed")
        elif not np.isfinite(loss := number(row.get(LOSS))):
            kinds.append("nonfinite")
        elif loss > high:
            kinds.append("above")
    return sorted(kinds)


def _above(runs: Sequence[Row], panels: By, path: str, high: float) -> list[list[str]]:
    """The same of every place of an arm."""
    return [_lost(at, high) for part in grouped(runs, panels).values() for at in by_value(part, path).values()]


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """From the lowest loss to the highest that is not far above what runs started with."""
    losses = np.array([number(row.get(LOSS)) for row in rows])
    known = losses[np.isfinite(losses)]
    if not known.size:
        return 0.0, 1.0
    starts = np.array([number(row.get("first_loss")) for row in rows])
    starts = starts[np.isfinite(starts)]
    low, most = float(known.min()), float(starts.max()) if starts.size else np.inf
    inside = known[known <= max(most, low)]
    pad = 0.06 * (float(inside.max()) - low) or 0.05
    return low - pad, float(inside.max()) + pad


def _grid(rows: Sequence[Row], path: str) -> list[float]:
    found = {value(row, path) for row in rows}
    if any(isinstance(one, bool) or not isinstance(one, int | float) or not one > 0 for one in found):
        raise Refused(f"{path} is {', '.join(sorted(map(str, found))[:4])}; a logarithmic axis needs numbers above 0")
    return sorted(found)


def _places(grid: Sequence[float], names: Sequence[str]) -> dict[tuple[str, float], float]:
    """Where an arm's value stands: arms side by side about the value."""
    logs = np.log(np.asarray(grid, float))
    apart = float(np.diff(logs).min()) if len(grid) > 1 else 1.0
    spread = min(MOST_DODGED, DODGED * (len(names) - 1)) * apart
    shifts = np.linspace(-0.5, 0.5, len(names)) * spread if len(names) > 1 else [0.0]
    return {
        (name, given): float(np.exp(at + shift)) if shift else given
        for name, shift in zip(names, shifts, strict=True)
        for given, at in zip(grid, logs, strict=True)
    }


def _log_axis(axis: Axes, grid: Sequence[float], which: str = "x") -> None:
    """Ticks at the values of the grid, or some of them."""
    getattr(axis, f"set_{which}scale")("log")
    of = axis.xaxis if which == "x" else axis.yaxis
    shown = [grid[i] for i in np.unique(np.linspace(0, len(grid) - 1, min(MOST_TICKS, len(grid))).round().astype(int))]
    of.set_major_locator(FixedLocator(shown))
    of.set_minor_locator(NullLocator())
    of.set_major_formatter(FuncFormatter(lambda tick, _: said_number(tick)))
    factor = (min(b / a for a, b in pairwise(grid)) if len(grid) > 1 else 10.0) ** 0.6
    getattr(axis, f"set_{which}lim")(grid[0] / factor, grid[-1] * factor)


def said_number(tick: float) -> str:
    """A number as short as can be: 3e-4, 0.1, 12."""
    if 0 < tick < 0.01:
        mantissa, _, exponent = f"{tick:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{tick:g}"


def _edge(at: Best, name: str) -> list[str]:
    """Words on a best value at the edge; empty where there are values on both sides."""
    name = look.called(name)
    if at.value is None:
        return [f"{name} (none: at every rate a run has no finite loss)"]
    return [f"{name} ({said_number(at.value)}, the {at.edge})"] if at.edge else []


def _beside(arms: Collection[str], what: str) -> list[str]:
    return [f"Arms stand beside one another about each {what} of the grid."] if len(arms) > 1 else []


def _said(edges: Sequence[str]) -> list[str]:
    return [f"Warning: the best rate is at the edge of the grid for {'; '.join(edges)}."] if edges else []


@drawing.styled
def best_rate(
    rows: Iterable[Row], arms: By | None = None, panels: By = (), heading: str = "Best learning rate by depth"
) -> Figure:
    """The learning rate at which each arm is at its best, against depth, with a mark where it is the edge of the grid.

    Small dots: the best rate of each seed alone. An arm that is nowhere whole at a depth (at every rate a seed lost its loss) is marked
    at the top. Grey lines: the rates of the grid.

    Raises:
      Refused: no runs, too many arms or panels.
    """
    rows = some(rows)
    grid, depths = _grid(rows, RATE), _grid(rows, DEPTH)
    arms = [name for name in varying(rows) if name not in (RATE, DEPTH)] if arms is None else arms
    looks, parts = look.arms(grouped(rows, arms)), grouped(rows, panels)
    places, heights = _places(depths, list(looks)), _places(grid, list(looks))
    sheet = Sheet(list(parts))
    edges: list[str] = []
    lost = False
    for axis, (title, part) in zip(sheet.axes, parts.items(), strict=True):
        _log_axis(axis, depths, "x")
        _log_axis(axis, grid, "y")
        for name, runs in grouped(part, arms).items():
            line = []
            for depth, at_depth in by_value(runs, DEPTH).items():
                at, x = best(at_depth), places[name, depth]
                line.append((x, np.nan if at.value is None else heights[name, at.value], at.edge))
                for alone in (best(one) for one in by_value(at_depth, SEED).values()):
                    if alone.value is not None:
                        axis.plot([x], [heights[name, alone.value]], **_dot(looks[name], f"_{name}: seed"))
                edges += _edge(at, ", ".join(filter(None, (title, name, label(at_depth[0], [DEPTH])))))
            lost |= _best_line(axis, line, looks[name], name)
    handles = [looks[name].handle(look.called(name)) for name in looks]
    if len({value(row, SEED) for row in rows}) > 1:
        handles.append(Line2D([], [], color="#888888", label="best of one seed alone", **look.points("o", 4)))
    if any("none:" not in edge for edge in edges):
        handles.append(Line2D([], [], color="#333333", label=AT_EDGE, **look.points("^", 11, hollow=True)))
    if lost:
        handles.append(look.end_handle("nonfinite"))
        handles[-1].set_label("at every rate a seed has no finite loss")
    return sheet.finish(
        heading,
        "depth (blocks)",
        "best learning rate",
        handles,
        [*_said(edges), RULE, *_beside(looks, "depth and rate")],
    )


def _best_line(axis: Axes, line: Sequence[tuple[float, float, str]], arm: look.Arm, name: str) -> bool:
    """The best rates of an arm (place, rate, edge); returns whether it has none somewhere."""
    xs, ys = [x for x, _, _ in line], [y for _, y, _ in line]
    axis.plot(xs, ys, color=arm.colour, linestyle=arm.dash, marker=arm.marker, markersize=7, label=look.called(name))
    for x, y, edge in line:
        if edge:
            marker = {"smallest": "v", "largest": "^", "only": "D"}[edge]
            style = look.points(marker, 15, hollow=True, color=arm.colour, clip_on=False)
            axis.plot([x], [y], label=f"_{name}: edge", **style)
    without = [x for x, y, _ in line if np.isnan(y)]
    if without:
        style = look.points(look.ENDS["nonfinite"], 8, 1.8, color=arm.colour, transform=axis.get_xaxis_transform())
        axis.plot(without, [0.98] * len(without), clip_on=False, label=f"_{name}: none", **style)
    return bool(without)
