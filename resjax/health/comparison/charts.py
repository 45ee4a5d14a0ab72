"""Which charts does a comparison have? Losses, rates and sizes of runs over their steps, and probes over their depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from resjax.health import figures
from resjax.health.comparison import Comparison
from resjax.health.comparison.side import PROBES, Side
from resjax.health.figure import Figure, along
from resjax.health.report import LOSS_HEIGHT

HEIGHT = 236  # pixels, of a chart over depth
BLOCKS, SHARE = ("block", "block"), ("share of the depth", "depth")  # an axis, and a place on it
OVER_STEPS = (
    ("lr", "Learning rate", "per step", "linear"),
    ("grad_norm", "Gradient norm", "global, before clipping", "log"),
    ("tokens_per_s", "Speed", "tokens a second", "linear"),
)
Chart = dict[str, Any]


def over_steps(comparison: Comparison) -> list[Chart]:
    """Charts over optimizer steps: training loss, held-out loss, then what else was logged."""
    sides = comparison.sides
    levels = dict(comparison.baselines)
    if np.isfinite(comparison.target):
        levels["target"] = comparison.target
    losses = [one for run, side in enumerate(sides) for one in training(run, side)]
    held_out = logged(sides, "eval_loss")
    charts = []
    for name, title, drawn, lines in (
        ("loss", "Training loss", losses, levels),
        ("eval_loss", "Held-out loss", held_out, comparison.baselines),
    ):
        if drawn:
            charts.append(
                figures.chart(name, title, "nats per token", "linear", drawn, lines, wide=True, height=LOSS_HEIGHT)
            )
    for name, title, unit, scale in OVER_STEPS:
        if drawn := logged(sides, name):
            charts.append(figures.chart(name, title, unit, scale, drawn))
    return charts


def logged(sides: Sequence[Side], key: str) -> list[Chart]:
    """A curve for each run that logged it."""
    found = [(run, side.name, *side.case.series(key)) for run, side in enumerate(sides)]
    return [figures.curve(steps, values, name) | {"run": run} for run, name, steps, values in found if len(steps)]


def training(run: int, side: Side) -> list[Chart]:
    """A run's loss: its mean over the last steps, and behind it as logged where that is more restless."""
    steps, loss = side.losses
    if not len(steps):
        return []
    raw = figures.curve(steps, loss, side.name) | {"run": run}
    if side.window == 1 or len(steps) < 2 * side.window:
        return [raw]
    mean = figures.curve(*side.means(), f"{side.name}") | {"run": run, "bad": raw["bad"]}
    return [raw | {"bad": [], "faint": True}, mean]


def by_depth(comparison: Comparison) -> list[tuple[Chart, Figure]]:
    """Charts over depth: of ratios one a kind of site, else one with the sites in order of depth."""
    made = []
    every = {figure.probe: figure for _, _, members in figures.GROUPS for figure in members}
    for probe in PROBES:
        figure = every[probe]
        found = [
            (run, side.name, of) for run, side in enumerate(comparison.sides) if (of := side.profiles().get(probe))
        ]
        kinds = list(dict.fromkeys(site for *_, of in found for site in of))
        for kind in kinds if figure.layout == "split" else [""][: len(found)]:
            lines = [(run, name, {kind: of[kind]} if kind else of) for run, name, of in found if not kind or kind in of]
            made.append((chart(figure, kind, lines), figure))
    return made


def chart(figure: Figure, kind: str, lines: Sequence[tuple[int, str, dict[str, list[float]]]]) -> Chart:
    """One probe of runs, each with its values by site and block; over the share of the depth where depths differ."""
    depths = {len(values) for *_, of in lines for values in of.values()}
    sites = {tuple(of) for *_, of in lines}
    same = len(depths) == 1
    drawn = []
    for run, name, of in lines:
        values = np.array(list(of.values())).T  # (block, site)
        each = values.shape[1]
        places = along(np.arange(values.size) / each, 1 / each, None if same else len(values))
        drawn.append(figures.curve(places, values.reshape(-1), name) | {"run": run})
    title = figure.title + (f", {kind}" if kind else "")
    made = figures.chart(
        f"{figure.probe}-{kind}" if kind else figure.probe,
        title,
        figure.unit,
        figure.scale,
        drawn,
        height=HEIGHT,
        axis=BLOCKS if same else SHARE,
        whole=same and depths != {1},
    )
    if not same:
        return made | {"span": [0, 1]}
    several = len(sites) == 1 and len(next(iter(sites))) > 1
    return made | ({"sites": list(next(iter(sites)))} if several else {})
