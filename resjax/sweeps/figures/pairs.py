"""How much do arms differ from a baseline? Every seed a dot, the mean with its interval, and shaded what counts as no difference."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from resjax import drawing
from resjax.errors import Refused
from resjax.sweeps.figures import look
from resjax.sweeps.figures.sheet import Sheet

LINE, WIDE = 0.42, 4.6  # inches, of an arm and of a panel
SEEDS, MIDDLE = (0.0, 0.36), -0.2  # of a line, from its middle: where the seeds of an arm stand, and their mean
FAR = 20.0  # times the rope and the usual seed, from which on the axis is logarithmic outside the rope
DOT, MEAN, ROPE = "#0072b2", "#000000", "#f2c14e"


@dataclass(frozen=True)
class Difference:
    """Differences of an arm from its baseline, paired by seed.

    Attributes:
      name: of the arm.
      values: one a seed, in order; NaN where one side is not known.
      interval: bounds for the mean; NaN where there are none.
      rope: half width within which a difference is none; None = not said.
      panel: which panel it stands in.
    """

    name: str
    values: tuple[float, ...]
    interval: tuple[float, float]
    rope: float | None = None
    panel: str = ""

    @property
    def known(self) -> np.ndarray:
        """The values that are finite."""
        row = np.asarray(self.values, np.float64)
        return row[np.isfinite(row)]


@drawing.styled
def paired(
    differences: Iterable[Difference],
    unit: str = "held-out loss less the baseline's (nats per token)",
    heading: str = "Paired differences",
) -> Figure:
    """A line an arm, from top to bottom: seeds as dots, mean and interval, rope; at its right the same in numbers.

    Seeds without a value stand as crosses at the right margin, one each.

    Raises:
      Refused: no differences, one without seeds, an arm twice in one panel, too many panels.
    """
    found = list(differences)
    if not found:
        raise Refused("there are no differences to draw")
    parts: dict[str, list[Difference]] = {}
    for one in found:
        if not one.values:
            raise Refused(f"the difference '{one.name}' has no seeds")
        if any(other.name == one.name for other in parts.get(one.panel, ())):
            raise Refused(
                f"there are two differences '{one.name}' in one panel; give them names of their own, or panels"
            )
        parts.setdefault(one.panel, []).append(one)
    most = max(map(len, parts.values()))
    left = max(len(one.name) for one in found) * 0.075
    sheet = Sheet(list(parts), (WIDE, max(1.1, LINE * most + 0.2)), 1 if left > 2 else 2, beside=1.75, before=left)
    bent = _bent(found)
    for axis, part in zip(sheet.axes, parts.values(), strict=True):
        _panel(axis, part, bent)
        axis.set_ylim(most - 0.4, -0.6)
    for axis in sheet.axes:
        axis.set_xlim(*_limits(found, bent))
    handles: list[Any] = [
        Line2D([], [], color=DOT, marker="o", markersize=5, linestyle="", label="a seed"),
        Line2D([], [], color=MEAN, marker="D", markersize=6, linewidth=2, label="mean, with its interval"),
    ]
    if any(one.rope for one in found):
        handles.append(Patch(color=ROPE, alpha=0.45, label="counts as no difference"))
    if any(len(one.known) < len(one.values) for one in found):
        handles.append(
            Line2D([], [], color=DOT, marker="x", markersize=6, linestyle="", label="a seed without a value")
        )
    notes = [f"The axis is logarithmic beyond ±{bent:.3g}."] if bent else []
    return sheet.finish(heading, unit, "", handles, notes)


def _panel(axis: Axes, part: list[Difference], bent: float) -> None:
    if bent:
        axis.set_xscale("symlog", linthresh=bent)
        decades = [10.0**k for k in range(-4, 5) if 10.0**k >= bent]
        axis.xaxis.set_major_locator(FixedLocator([*(-one for one in decades), 0.0, *decades]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axis.axvline(0, color="#333333", linewidth=1, zorder=1)
    axis.set_yticks(range(len(part)), [drawing.plain(one.name) for one in part])
    axis.grid(False, axis="y")
    for i, one in enumerate(part):
        if one.rope:
            axis.fill_betweenx([i - 0.45, i + 0.45], -one.rope, one.rope, color=ROPE, alpha=0.45, linewidth=0, zorder=0)
        count = len(one.values)
        heights = i + (np.linspace(*SEEDS, count) if count > 1 else np.full(1, np.mean(SEEDS)))
        values = np.asarray(one.values, np.float64)
        known = np.isfinite(values)
        dot = look.points("o", 5, 0.5, color=DOT, alpha=0.85, markeredgecolor="white", label=f"_{one.name}: seeds")
        axis.plot(values[known], heights[known], **dot)
        if lost := int((~known).sum()):
            style = look.points("x", 6, 1.5, color=DOT, clip_on=False, transform=axis.get_yaxis_transform())
            axis.plot([0.985] * lost, heights[~known], label=f"_{one.name}: lost", **style)
        said = "no value"
        if known.any():
            mean = float(values[known].mean())
            said = f"{mean:+.3g}"
            if np.isfinite(one.interval).all():
                axis.plot(
                    one.interval,
                    [i + MIDDLE] * 2,
                    color=MEAN,
                    linewidth=2,
                    solid_capstyle="butt",
                    label=f"_{one.name}: interval",
                )
                said += f" [{one.interval[0]:+.3g}, {one.interval[1]:+.3g}]"
            axis.plot(
                [mean],
                [i + MIDDLE],
                color=MEAN,
                marker="D",
                markersize=6,
                linestyle="",
                label=f"_{one.name}: mean",
                zorder=4,
            )
        words = f"{said}\n{int(known.sum())} of {count} seeds" if lost else said
        axis.text(1.02, i, words, transform=axis.get_yaxis_transform(), va="center", fontsize=8)


def _all(found: list[Difference]) -> np.ndarray:
    values = np.concatenate([np.r_[one.known, one.interval, one.rope or 0.0, -(one.rope or 0.0)] for one in found])
    return values[np.isfinite(values)]


def _bent(found: list[Difference]) -> float:
    """Where the axis turns logarithmic, so that one lost seed does not hide what the others say; 0 where it does not."""
    known = np.abs(np.concatenate([one.known for one in found]))
    if not known.size:
        return 0.0
    usual = max(float(np.median(known)), max(one.rope or 0.0 for one in found))
    return usual if 0 < usual * FAR < float(known.max()) else 0.0


def _limits(found: list[Difference], bent: float) -> tuple[float, float]:
    values = _all(found)
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    if bent:
        return (1.8 * low if -low > bent else 1.2 * low - 0.2 * bent), (
            1.8 * high if high > bent else 1.2 * high + 0.2 * bent
        )
    pad = 0.1 * (high - low) or 0.01
    return low - pad, high + pad
