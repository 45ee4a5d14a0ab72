"""How did the losses go? Over the steps, a line a run, a colour an arm, above the floors of the source."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from resjax import drawing
from resjax.errors import Refused, not_one_of
from resjax.health.shrink import thin
from resjax.sweeps.figures import look
from resjax.sweeps.figures.rows import By, counted, grouped, some, varying
from resjax.sweeps.figures.sheet import Sheet
from resjax.sweeps.lines import CLASSES, NOT_RUN, Row, ending, number

KINDS = {"loss": "training loss", "eval_loss": "held-out loss"}
POINTS = 240  # of a line
SMOOTHED, FEW_STEPS = 0.02, 100  # share of the run that a mean is taken over, where there are more steps than that
FEW_RUNS = 6  # in a panel, up to which the single steps are shown too
FLOORS = ("unigram", "bigram", "trigram")
FLOOR = "#555555"
APART = 0.045  # of the axis, between the names of two floors
FLOOR_NAMES = 0.6  # inches, right of a panel


@drawing.styled
def losses(
    rows: Iterable[Row],
    arms: By | None = None,
    panels: By = (),
    kind: str = "loss",
    heading: str = "Losses over the steps",
) -> Figure:
    """The losses of runs whose lines keep them, nats per token; of many steps their running mean.

    A line ends where its run does, with a mark if that was not the end of training or if the run diverged. Runs without a line
    (failed, killed) are counted below.

    Args:
      rows: lines of results.
      arms, panels: what has a colour, and a panel, of its own; by default all fields that vary are arms.
      kind: 'loss' (of training steps) or 'eval_loss' (held out).

    Raises:
      Refused: no runs, none with curves, too many arms or panels.
    """
    rows = some(rows)
    if kind not in KINDS:
        raise not_one_of("the kind of loss", kind, KINDS)
    if not any(len(curve(row, kind)[0]) for row in rows):
        raise Refused(f"no run has kept its {KINDS[kind]} over the steps; sweep with --curves")
    arms = varying(rows) if arms is None else arms
    looks, parts = look.arms(grouped(rows, arms)), grouped(rows, panels)
    longest = max(len(curve(row, kind)[0]) for row in rows)
    window = max(1, round(SMOOTHED * longest)) if longest > FEW_STEPS else 1
    sheet = Sheet(list(parts), (5.6, 3.8), 2, FLOOR_NAMES)
    low, high = _limits(rows, kind, window)
    ends: set[str] = set()
    for axis, part in zip(sheet.axes, parts.values(), strict=True):
        axis.set_ylim(low, high)
        for name, runs in grouped(part, arms).items():
            for row in runs:
                ends |= _run(axis, row, kind, looks[name], name, window, len(part) <= FEW_RUNS)
        axis.set_xlim(0, None)
        _floors(axis, part)
    drawn = {name for name, runs in grouped(rows, arms).items() if any(len(curve(row, kind)[0]) for row in runs)}
    handles = [looks[name].handle(look.called(name)) for name in looks if name in drawn]
    handles += [look.end_handle(name) for name in look.END_WORDS if name in ends]
    return sheet.finish(heading, "step", f"{KINDS[kind]} (nats per token)", handles, _notes(rows, arms, kind, window))


def curve(row: Row, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of one kind, as far as the run came; NaN where a loss is not finite."""
    points = [(point["step"], number(point[kind])) for point in row.get("curve") or () if kind in point]
    values = np.array([loss for _, loss in points], np.float64)
    return np.array([step for step, _ in points], int), np.where(np.isfinite(values), values, np.nan)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and those before it, ``window`` in all; NaN where the value itself is."""
    known = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(one)]) for one in (np.where(known, values, 0.0), known))
    first = np.maximum(np.arange(len(values)) + 1 - window, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums[1:] - sums[first]) / (counts[1:] - counts[first])
    return np.where(known, means, np.nan)


def _run(axis: Axes, row: Row, kind: str, arm: look.Arm, name: str, window: int, single: bool) -> set[str]:
    """Draw one run; returns the kinds of ends that are marked."""
    steps, values = curve(row, kind)
    if not len(steps):
        return set()
    means = smoothed(values, window)
    if single and window > 1:
        _line(axis, steps, values, color=arm.colour, alpha=0.22, linewidth=0.6, label="_single steps")
    _line(axis, steps, means, color=arm.colour, linestyle=arm.dash, linewidth=1.3, alpha=0.9, label=look.called(name))
    _markers(axis, steps, means, arm)
    marked = set()
    low, high = axis.get_ylim()
    if np.nanmax(means, initial=low) > high:
        first = int(np.argmax(np.where(np.isfinite(means), means, -np.inf) > high))
        _mark(axis, "above", steps[first], high, arm.colour)
        marked.add("above")
    end = ending(row)
    if end in ("nonfinite", "diverged", *NOT_RUN):
        known = np.flatnonzero(np.isfinite(means))
        last = int(known[-1]) if len(known) else 0
        kind_of_end = "failed" if end in NOT_RUN else end
        _mark(axis, kind_of_end, steps[last], min(means[last], high) if len(known) else high, arm.colour)
        marked.add(kind_of_end)
    return marked


def _line(axis: Axes, steps: np.ndarray, values: np.ndarray, **look: Any) -> None:
    """A line that breaks where a value is not known; no extreme is lost."""
    if not np.isfinite(values).any():
        return
    if len(steps) > POINTS and np.isfinite(values).all():
        steps, values = thin(steps, values, POINTS)
    axis.plot(steps, values, **look)


def _markers(axis: Axes, steps: np.ndarray, values: np.ndarray, arm: look.Arm) -> None:
    """Some points of a line, so that arms differ in grey too."""
    places = np.unique(np.linspace(0, len(steps) - 1, 7).round().astype(int)[1:-1])
    axis.plot(
        steps[places], values[places], color=arm.colour, linestyle="", marker=arm.marker, markersize=4, label="_markers"
    )


def _mark(axis: Axes, kind: str, step: float, height: float, colour: str) -> None:
    style = look.points(look.ENDS[kind], 8, 1.8, clip_on=False, zorder=5)
    axis.plot([step], [height], color=colour, label=f"_{kind}", **style)


def _limits(rows: Sequence[Row], kind: str, window: int) -> tuple[float, float]:
    """From the lowest loss or floor to a little above the highest first one: what is far above does not flatten the rest."""
    lines = [smoothed(curve(row, kind)[1], window) for row in rows]
    known = [line[np.isfinite(line)] for line in lines]
    levels = [floor for row in rows for floor in floors(row).values()]
    found = np.concatenate([*known, levels])
    if not found.size:
        return 0.0, 1.0
    first = [line[0] for line in known if line.size]
    low, top = float(found.min()), max([*first, *levels])
    if float(found.max()) < top + 0.25 * (top - low):
        top = float(found.max())
    pad = 0.05 * (top - low) or 0.05
    return low - pad, top + pad


def floors(row: Row) -> dict[str, float]:
    """What can be known of the source: ln V, and the entropies of its law, or counted n-gram baselines where no law is known."""
    counted_, law = row.get("baselines") or {}, row.get("floors") or {}
    found = {"ln V": number(counted_.get("uniform"))}
    found |= {name: number(law.get(name, counted_.get(name))) for name in FLOORS}
    return {name: level for name, level in found.items() if np.isfinite(level)}


def _floors(axis: Axes, rows: Sequence[Row]) -> None:
    """Dashed lines with their names; a band where the runs' texts, drawn by seed, differ."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, level in floors(row).items():
            found.setdefault(name, []).append(level)
    low, high = axis.get_ylim()
    taken = -np.inf
    for name, levels in sorted(found.items(), key=lambda pair: np.mean(pair[1])):
        mean = float(np.mean(levels))
        axis.axhline(mean, color=FLOOR, linestyle=(0, (4, 3)), linewidth=0.9, zorder=1, label=f"_{name}")
        if max(levels) - min(levels) > 0.002 * (high - low):
            axis.axhspan(min(levels), max(levels), color=FLOOR, alpha=0.12, linewidth=0, zorder=0)
        taken = max((mean - low) / (high - low), taken + APART)
        axis.text(1.01, taken, name, transform=axis.transAxes, va="center", fontsize=8, color=FLOOR)


def _notes(rows: Sequence[Row], arms: By, kind: str, window: int) -> list[str]:
    notes = [f"Every value is the mean of {window} logged steps, that one and those before it."] if window > 1 else []
    if missing := [row for row in rows if not len(curve(row, kind)[0])]:
        told = [f"{look.called(name)}: {counted(runs, CLASSES)}" for name, runs in grouped(missing, arms).items()]
        reasons = list(dict.fromkeys(str(row["error"]) for row in missing if row.get("error")))
        notes.append(f"Runs without a line: {', '.join(told)}{f' ({reasons[0]})' if reasons else ''}.")
    if any(not row.get("floors") and row.get("baselines") for row in rows):
        notes.append(
            "The law of the source is not known: unigram, bigram and trigram are models counted on its training text."
        )
    return notes
