"""How does propagation look? One SVG file that needs nothing else: a block of panels a scheme, a line a depth, theory dashed."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from resjax import drawing
from resjax.drawing import plain
from resjax.propagation.closed import Curve
from resjax.propagation.result import Depth, Study

WIDTH, HEIGHT, ROWS, COLUMNS = 14.0, 6.2, 2, 4  # inches, of one scheme; panels
POINTS = 240  # of a line; also kept are its ends, largest and smallest value
THEORY: dict[str, Any] = {"mean field": "--", "identity path alone": ":", "norm on the trunk": "-."}
BOUNDS = "#9a9a9a"


@dataclass(frozen=True)
class Panel:
    """One quantity over the depth.

    Attributes:
      probe, title, unit: what is drawn.
      site: position of the site in a block, or None for all sites in order.
      start: what of the ends stands at depth 0.
      log: logarithmic axis.
    """

    probe: str
    title: str
    unit: str
    site: int | None = None
    start: str | None = None
    log: bool = False


def panels(sites: Sequence[str]) -> list[Panel]:
    ratios = [
        Panel("update_ratio", f"Update/stream, {name}", "|update| / |stream|", i, log=True)
        for i, name in enumerate(sites)
    ]
    return [
        Panel("stream_rms", "Stream RMS", "per element", start="embed_rms", log=True),
        *ratios,
        Panel("token_cosine", "Token cosine", "between tokens of a sequence", start="embed_token_cosine"),
        Panel(
            "token_cosine_centred", "Token cosine, centred", "about the mean token", start="embed_token_cosine_centred"
        ),
        Panel(
            "participation_ratio", "Participation ratio", "directions of the tokens", start="embed_participation_ratio"
        ),
        Panel("stream_grad", "Gradient at the stream", "norm of dLoss/dstream", start="embed_grad", log=True),
    ]


@drawing.styled
def svg(studies: Sequence[Study], title: str) -> bytes:
    """The figure as an SVG file; the same studies give the same bytes."""
    figure = Figure(figsize=(WIDTH, HEIGHT * len(studies)))
    blocks = figure.subfigures(len(studies), 1, squeeze=False)[:, 0]
    for block, study in zip(blocks, studies, strict=True):
        draw(block, study)
    return drawing.svg(figure, title)


def draw(block: Any, study: Study) -> None:
    """The panels of one scheme, and its legend in the last place."""
    grid = block.subplots(ROWS, COLUMNS, squeeze=False)
    block.subplots_adjust(left=0.06, right=0.985, top=0.87, bottom=0.09, wspace=0.32, hspace=0.42)
    block.suptitle(plain(heading(study)), x=0.06, y=0.98, ha="left", fontsize=11, fontweight="bold")
    axes = list(grid.flat)
    colours = drawing.steps_colours(len(study.depths))
    shown = panels(study.depths[0].sites)
    used: set[str] = set()
    for axis, panel in zip(axes, shown, strict=False):
        used |= fill(axis, panel, study.depths, colours)
    for axis in axes[len(shown) :]:
        axis.axis("off")
    legend(axes[-1], study, colours, used)


def heading(study: Study) -> str:
    return f"{study.case.name}: {textwrap.shorten(study.case.parts.scheme.equation, 150, placeholder=' ...')}"


def fill(axis: Axes, panel: Panel, depths: Sequence[Depth], colours: Sequence[Any]) -> set[str]:
    """Draw one panel; returns the kinds of theory that are in it."""
    used: set[str] = set()
    heights: list[np.ndarray] = []
    bands = [one for one in depths[-1].theory if one.drawn == "band" and one.quantity == panel.probe]
    if len(bands) == 2:
        x = places(depths[-1], panel.site, False)
        low, high = (one.values.reshape(-1) for one in bands)
        keep = thinned(high)
        axis.fill_between(x[keep], low[keep], high[keep], color=BOUNDS, alpha=0.25, linewidth=0)
        used.add("bounds")
    for depth, colour in zip(depths, colours, strict=True):
        start = panel.start is not None
        x = places(depth, panel.site, start)
        mean, low, high = (line(depth, panel, name) for name in ("mean", "low", "high"))
        keep = thinned(mean)
        axis.fill_between(x[keep], low[keep], high[keep], color=colour, alpha=0.2, linewidth=0)
        axis.plot(x[keep], mean[keep], color=colour, linewidth=1.5)
        heights += [mean, low, high]
        mark_broken(axis, depth, panel, x, colour)
        for curve in drawn(depth, panel.probe):
            y = positive(of_site(curve.values, panel.site), panel.log)
            if not np.isfinite(y).any():
                continue
            keep = thinned(y)
            along = places(depth, panel.site, False)
            axis.plot(along[keep], y[keep], THEORY[curve.name], color="black", alpha=0.75, linewidth=0.9)
            heights.append(y)
            used.add(curve.name)
    still = all((of_site(depth.profiles[panel.probe].mean, panel.site) == 0).all() for depth in depths)
    limits(axis, panel, heights, "0 at every depth" if still else "nothing to draw")
    axis.set_title(panel.title, loc="left")
    axis.set_ylabel(panel.unit)
    axis.set_xlabel("share of the depth")
    axis.set_xlim(0, 1)
    return used


def drawn(depth: Depth, probe: str) -> list[Curve]:
    """The theory of one quantity that is drawn as a line; what mean field says too is drawn once."""
    found = [one for one in depth.theory if one.drawn == "line" and one.quantity == probe]
    both = any(one.name == "mean field" for one in found)
    return [one for one in found if not (both and one.name == "norm on the trunk")]


def of_site(values: np.ndarray, site: int | None) -> np.ndarray:
    return values.reshape(-1) if site is None else values[:, site]


def places(depth: Depth, site: int | None, start: bool) -> np.ndarray:
    """Where along the depth, from 0 to 1, each value stands: a site at its end."""
    count = len(depth.sites)
    ends = np.arange(1, depth.depth * count + 1).reshape(depth.depth, count) / (depth.depth * count)
    x = of_site(ends, site)
    return np.concatenate([[0.0], x]) if start else x


def line(depth: Depth, panel: Panel, name: str) -> np.ndarray:
    """Mean, low or high along the depth, NaN where it cannot be drawn."""
    values = of_site(getattr(depth.profiles[panel.probe], name), panel.site)
    if panel.start is not None:
        values = np.concatenate([[float(getattr(depth.ends[panel.start], name))], values])
    return positive(values, panel.log)


def positive(values: np.ndarray, log: bool) -> np.ndarray:
    known = np.isfinite(values) & ((values > 0) | (not log))
    return np.where(known, values, np.nan)


def thinned(values: np.ndarray) -> np.ndarray:
    """Indices of about ``POINTS`` points of a line, its extremes among them."""
    keep = np.round(np.linspace(0, len(values) - 1, min(POINTS, len(values)))).astype(int)
    known = np.isfinite(values)
    if known.any():
        extremes = [int(np.nanargmin(values)), int(np.nanargmax(values)), int(np.flatnonzero(known)[-1])]
        keep = np.concatenate([keep, extremes])
    return np.unique(keep)


def limits(axis: Axes, panel: Panel, heights: list[np.ndarray], empty: str) -> None:
    """A logarithmic axis where there is anything to show on one, never so narrow that rounding fills it."""
    known = np.concatenate([one[np.isfinite(one)] for one in heights])
    if not known.size:
        axis.text(0.5, 0.5, empty, transform=axis.transAxes, ha="center", color=drawing.FAINT)
        axis.set_yticks([])
        return
    low, high = float(known.min()), float(known.max())
    if panel.log:
        pad = max(1.15, 1.6 / (high / low) ** 0.5)
        axis.set_yscale("log")
        axis.set_ylim(low / pad, high * pad)
        drawing.log_ticks(axis.yaxis, low, high)
        return
    least = 0.1 if panel.probe.startswith("token_cosine") else 1.0
    pad = max(0.05 * (high - low), (least - (high - low)) / 2)
    axis.set_ylim(low - pad, high + pad)


def mark_broken(axis: Axes, depth: Depth, panel: Panel, x: np.ndarray, colour: Any) -> None:
    """A cross where the first value is not finite; its block in words."""
    direction = "backward" if panel.probe == "stream_grad" else "forward"
    for row in depth.nonfinite:
        if row["direction"] != direction:
            continue
        at = (row["block"] + 1) / depth.depth
        axis.plot([at], [0.97], "x", color=colour, transform=axis.get_xaxis_transform(), clip_on=False)
        axis.text(
            at,
            0.9,
            f" not finite: block {row['block']}",
            color=colour,
            transform=axis.get_xaxis_transform(),
            fontsize=7,
        )


def legend(axis: Axes, study: Study, colours: Sequence[Any], used: set[str]) -> None:
    """Which line is what, and what the numbers are of."""
    handles: list[Any] = [
        Line2D([], [], color=colour, label=f"{depth.depth} blocks")
        for depth, colour in zip(study.depths, colours, strict=True)
    ]
    seeds = len(study.case.seeds)
    if seeds > 1:
        handles.append(Patch(color="#888888", alpha=0.3, label=f"smallest to largest of {seeds} seeds"))
    names = {"mean field": "mean-field theory"}
    handles += [
        Line2D([], [], color="black", linestyle=style, linewidth=0.9, label=f"theory: {names.get(name, name)}")
        for name, style in THEORY.items()
        if name in used
    ]
    if "bounds" in used:
        handles.append(
            Patch(color=BOUNDS, alpha=0.3, label=f"bounds of Xiong et al. 2020, {study.depths[-1].depth} blocks")
        )
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.05, 1.08), frameon=False, fontsize=8, ncols=1)
    said = [*study.notes]
    if study.depths[-1].no_mean_field:
        said.append(f"no mean-field theory: {study.depths[-1].no_mean_field}")
    text = "\n".join(textwrap.fill(plain(one), 56) for one in said)
    axis.text(-0.03, -0.12, text, transform=axis.transAxes, fontsize=7, color=drawing.NOTE, va="bottom")
