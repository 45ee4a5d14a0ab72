"""How do experiments draw numbers of runs over a value? Every seed a dot, a line through the medians, lost runs above the scale."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.runs import Runs

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000", "#808080")
MARKERS = "osD^vP<>"
DASHES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")
FLOORS = {"unigram": "H1, symbol frequencies", "bigram": "H2, given one symbol", "trigram": "H3, given two"}


READABLE = 6.0  # contrast of words on white, with something to spare for pages that turn it round


def ink(colour: str) -> str:
    """A colour for words: darkened until they can be read on white."""
    rgb = np.array(to_rgb(colour))
    while 1.05 / (_light(rgb) + 0.05) < READABLE:
        rgb = 0.95 * rgb
    red, green, blue = rgb
    return to_hex((red, green, blue))


def _light(rgb: np.ndarray) -> float:
    """Relative luminance (WCAG 2)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


class Panels:
    """A figure of panels that share their scale.

    Args:
      titles: of the panels.
      columns: panels side by side.
      top: largest value that is drawn at its place.
    """

    def __init__(
        self, titles: Sequence[str], columns: int, size: tuple[float, float] = (3.6, 3.0), top: float = np.inf
    ):
        rows = -(-len(titles) // columns)
        self.figure = Figure(figsize=(size[0] * columns + 0.6, size[1] * rows + 1.3), layout="constrained")
        grid = self.figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        self.axes: list[Axes] = list(grid.flat)[: len(titles)]
        for axis in list(grid.flat)[len(titles) :]:
            axis.set_visible(False)
        for axis, title in zip(self.axes, titles, strict=True):
            axis.set_title(title, fontsize=10)
            axis.grid(color="#e4e4e4")
            axis.set_axisbelow(True)
        self.handles: dict[str, Line2D] = {}
        self.columns, self.top = columns, top

    def dots(self, axis: Axes, found: Mapping[float, Sequence[float]], place: int, label: str) -> None:
        """Values by seed over x; those that are not finite or too large are counted at the panel's upper end."""
        look: dict[str, Any] = {"color": HUES[place % len(HUES)], "marker": MARKERS[place % len(MARKERS)]}
        xs, found = sorted(found), {x: [one if one <= self.top else np.nan for one in row] for x, row in found.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a value of lost runs only has no median
            medians = [np.nanmedian(np.where(np.isfinite(found[x]), found[x], np.nan)) for x in xs]
        axis.plot(xs, medians, color=look["color"], linewidth=1.3, alpha=0.8)
        for x in xs:
            values = np.asarray(found[x], float)
            known = values[np.isfinite(values)]
            axis.plot([x] * len(known), known, linestyle="", markersize=4, alpha=0.75, **look)
            if gone := len(values) - len(known):
                axis.text(
                    x, 0.98 - 0.06 * place, f"{gone}×", color=ink(look["color"]), transform=axis.get_xaxis_transform(),
                    ha="center", va="top", fontsize=9,
                )  # fmt: skip
                self.handles["lost"] = Line2D(
                    [], [], linestyle="", label="n×: so many seeds have no loss, or one above their start"
                )
        self.handles.setdefault(label, Line2D([], [], label=label, markersize=5, **look))

    def floors(self, runs: Runs) -> None:
        """The entropies of the source, where they are known."""
        known: dict[str, float] = next((row["floors"] for row in runs if row.get("floors")), {})
        for (name, words), dash in zip(FLOORS.items(), DASHES, strict=True):
            if name in known:
                for axis in self.axes:
                    axis.axhline(known[name], color="#666666", linewidth=0.9, linestyle=dash)
                self.handles[words] = Line2D([], [], color="#666666", linewidth=0.9, linestyle=dash, label=words)

    def finish(self, heading: str, x: str, y: str) -> Figure:
        """With words: heading, axes, legend."""
        self.figure.suptitle(heading, fontsize=12)
        for axis in self.axes[-self.columns :]:
            axis.set_xlabel(x)
        self.figure.supylabel(y, fontsize=10)
        self.figure.legend(
            handles=list(self.handles.values()), loc="outside lower center", ncols=3, fontsize=8, frameon=False
        )
        return self.figure
