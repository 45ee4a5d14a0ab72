"""How does a probe go with depth, and how does that change in training? A panel an arm, a colour a step, a line a run."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from resjax import drawing
from resjax.errors import Refused, not_one_of
from resjax.health.figures import CLAIMED_BAND as BAND
from resjax.health.figures import GROUPS
from resjax.sweeps.figures import look
from resjax.sweeps.figures.rows import By, grouped, some, varying
from resjax.sweeps.figures.sheet import Sheet
from resjax.sweeps.lines import Row, ending, number

KNOWN = {figure.probe: figure for _, _, figures in GROUPS for figure in figures}
COLUMNS = ("attention", "mlp")  # of a probe by block and site, in this order
DASHES = look.DASHES
PAD = 0.06  # of the axis, above and below the values


@drawing.styled
def profiles(
    rows: Iterable[Row],
    probe: str,
    steps: Sequence[int] | None = None,
    panels: By | None = None,
    log: bool | None = None,
    heading: str = "",
    said: str = "",
) -> Figure:
    """A probe by depth at some steps of training, from light (early) to dark (late); dashes tell kinds of sites apart.

    A value that is not finite is a cross at the top margin, one that a logarithmic axis has no place for a bar at the bottom. A step is
    drawn for the runs that kept it; those that kept none of the steps are counted below.

    Args:
      rows: lines of results.
      probe: such as 'update_ratio'.
      steps: by default all that a run kept.
      panels: what has a panel of its own; by default all fields that vary.
      log: logarithmic axis; by default as in a run's report.
      said: a sentence below, such as which runs these are.

    Raises:
      Refused: no runs, no such probe or step in them, too many panels.
    """
    rows = some(rows)
    kept = [row.get("profiles") or {} for row in rows]
    names = list(dict.fromkeys(name for one in kept for probes in one.values() for name in probes))
    if not names:
        raise Refused("no run has kept profiles by depth; sweep with --profiles=1,30,end")
    if probe not in names:
        raise not_one_of("the probe", probe, names)
    there = sorted(set().union(*(_kept(row, probe) for row in rows)))
    if unknown := [step for step in steps or () if step not in there]:
        raise Refused(f"no run has kept {probe} at step {unknown[0]}; there are {', '.join(map(str, there))}")
    steps = there if steps is None else sorted(steps)
    known = KNOWN.get(probe)
    log = (known is not None and known.scale == "log") if log is None else log
    colours = dict(zip(steps, drawing.steps_colours(len(steps)), strict=True))
    parts = grouped(rows, varying(rows) if panels is None else panels)
    sheet = Sheet(list(parts))
    low, high = _limits([_lines(row, probe, step)[1] for row in rows for step in steps], log)
    banded = known is not None and known.band and low < BAND[1] and high > BAND[0]
    marked: set[str] = set()
    kinds: dict[str, Any] = {}
    for axis, part in zip(sheet.axes, parts.values(), strict=True):
        if log:
            axis.set_yscale("log")
            drawing.log_ticks(axis.yaxis, low, high)
        axis.set_ylim(low, high)
        if not any(_kept(row, probe) & set(steps) for row in part):
            axis.text(0.5, 0.5, "no profiles", transform=axis.transAxes, ha="center", color=drawing.FAINT)
            axis.set_xticks([])
        for row in part:
            for step in steps:
                marked |= _draw(axis, row, probe, step, log, colours[step], kinds)
        if banded:
            axis.axhspan(*BAND, color="#888888", alpha=0.1, linewidth=0, zorder=0, label="_band")
    handles = [Line2D([], [], color=colour, linewidth=2, label=f"step {step}") for step, colour in colours.items()]
    if len(kinds) > 1:
        handles += [Line2D([], [], color="#333333", linestyle=dash, label=name) for name, dash in kinds.items()]
    words = {"nonfinite": "not finite", "without": "0 or below, no place on the axis"}
    ends = {"nonfinite": "x", "without": "|"}
    handles += [
        Line2D([], [], color="#333333", linestyle="", marker=ends[kind], label=words[kind])
        for kind in words
        if kind in marked
    ]
    title, unit = (known.title, f"{known.axis} ({known.unit})") if known else (probe, probe)
    notes = [*filter(None, [said]), *_notes(rows, probe, steps, known, banded)]
    return sheet.finish(heading or f"{title} by depth", "block", unit, handles, notes)


def _kept(row: Row, probe: str) -> set[int]:
    """The steps at which the run has the probe."""
    return {int(step) for step, probes in (row.get("profiles") or {}).items() if probe in probes}


def _lines(row: Row, probe: str, step: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Where the values stand (lines, points), the values, and what each line is; blocks are numbered from 0, a site stands in its block."""
    given = (row.get("profiles") or {}).get(str(step), {}).get(probe)
    if given is None:
        return np.zeros((0, 0)), np.zeros((0, 0)), []
    values = np.asarray(given, object)
    values = np.array([number(one) for one in values.reshape(-1)], float).reshape(len(values), -1)
    blocks, sites = values.shape
    places = np.arange(blocks)[:, None] + np.arange(sites)[None, :] / sites
    known = KNOWN.get(probe)
    if sites == 1 or (known is not None and known.layout == "stream"):
        return places.reshape(1, -1), values.reshape(1, -1), ["all sites"]
    names = list(COLUMNS) if sites == len(COLUMNS) else [f"column {i + 1}" for i in range(sites)]
    return places.T, values.T, names


def _draw(axis: Axes, row: Row, probe: str, step: int, log: bool, colour: Any, kinds: dict[str, Any]) -> set[str]:
    """The lines of a run at a step; returns the kinds of marks."""
    marked = set()
    for x, y, name in zip(*_lines(row, probe, step), strict=True):
        dash = kinds.setdefault(name, DASHES[len(kinds) % len(DASHES)])
        inside = np.where(np.isfinite(y) & ((y > 0) | (not log)), y, np.nan)
        dot: dict[str, Any] = {"marker": "o", "markersize": 3} if len(x) <= 2 else {}
        axis.plot(x, inside, color=colour, linestyle=dash, linewidth=1.1, alpha=0.85, label=f"step {step}", **dot)
        beyond = {"nonfinite": (np.isinf(y), 0.97, "x"), "without": (np.isfinite(y) & np.isnan(inside), 0.02, "|")}
        for kind, (where, height, marker) in beyond.items():
            if where.any():
                style = look.points(marker, 5, color=colour, transform=axis.get_xaxis_transform(), label=f"_{kind}")
                axis.plot(x[where], [height] * int(where.sum()), **style)
                marked.add(kind)
    return marked


def _limits(values: Sequence[np.ndarray], log: bool) -> tuple[float, float]:
    found = np.concatenate([one.reshape(-1) for one in values])
    found = found[np.isfinite(found) & ((found > 0) | (not log))]
    if not found.size:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low, high = float(found.min()), float(found.max())
    if log:
        pad = max((high / low) ** PAD, 1.15)
        return low / pad, high * pad
    pad = PAD * (high - low) or 0.05 * max(1.0, abs(high))
    return low - pad, high + pad


def _notes(rows: Sequence[Row], probe: str, steps: Sequence[int], known: Any, banded: bool) -> list[str]:
    notes = [known.what] if known else []
    if banded:
        notes.append("Shaded: 0.01 to 0.1, the band that is often claimed to be healthy.")
    kept = [_kept(row, probe) for row in rows]
    early = sum(bool(one) and max(one) < steps[-1] for one in kept)
    if early:
        notes.append(f"{early} of {len(rows)} runs have profiles of earlier steps than {steps[-1]} only.")
    if missing := [row for row, one in zip(rows, kept, strict=True) if not one & set(steps)]:
        ends = ", ".join(sorted({ending(row) for row in missing}))
        notes.append(f"{len(missing)} of {len(rows)} runs have none of these steps ({ends}).")
    return notes
