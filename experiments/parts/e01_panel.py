"""What did the broken networks learn, and what became of their tokens? The panel of E01."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.runs import Best, losses_of, number, profile

COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#cc79a7", "#000000", "#777777", "#8b4513", "#009e73")
FLOORS = {
    "uniform": "ln V, guessing", "unigram": "H1, frequencies", "symmetric": "symmetric table", "bigram": "H2, one back",
    "trigram": "H3, two back",
}  # fmt: skip
BY_DEPTH = ("Pre-LN", "no skip")
TIMES: dict[str, tuple[int | str, str]] = {"at the start": (1, "-"), "after training": ("end", ":")}


def panel(arms: Mapping[str, Best], levels: Mapping[str, Any]) -> Figure:
    """Left: the loss of every seed of an arm at its best rate, means of three logged ones, over the floors of the source. Right: the
    cosine between tokens, and what is left of them beside their mean, after each sub-layer.

    A run that left the numbers ends where it did; how many ended how is in the legend.

    Args:
      arms: where each is at its best.
      levels: the floors, nats.
    """
    drawn = Figure(figsize=(12.5, 5.0), layout="constrained")
    left, middle, right = drawn.subplots(1, 3, width_ratios=(1.7, 1, 1))
    colours = dict(zip(arms, COLOURS, strict=False))
    for name, best in arms.items():
        for row in best.runs:
            left.plot(*smooth(*losses_of(row)), color=colours[name], lw=0.9, alpha=0.8)
        ended = ", ".join(f"{count} {end}" for end, count in best.runs.outcomes().items())
        left.plot(
            [], [], color=colours[name], label=f"{name} ({best.value:g}: {ended})" if ended else f"{name} (no runs)"
        )
    for name, words in FLOORS.items():
        if np.isfinite(value := number(levels, name)):
            left.axhline(value, color="#555555", lw=0.8, ls="--", zorder=0)
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            left.annotate(words, (1, value), fontsize=7, color="#555555", **place)
    left.set(xlabel="step", ylabel="training loss, nats per token", title="What was learned")
    for axis, probe, words in (
        (middle, "token_cosine", "cosine between tokens"),
        (right, "residual_frobenius", "|res X| / |X|"),
    ):
        for name in BY_DEPTH:
            for row in arms[name].runs:
                for step, style in TIMES.values():
                    values = profile(row, step, probe).ravel()
                    axis.plot(np.arange(1, values.size + 1), values, style, color=colours[name], lw=0.9, alpha=0.8)
        axis.set(xlabel="sub-layer", ylabel=words, title=f"{words} by depth")
    right.set_yscale("log")
    for words, (_, style) in TIMES.items():
        middle.plot([], [], style, color="#555555", label=words)
    middle.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    drawn.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return drawn


def smooth(steps: np.ndarray, losses: np.ndarray, window: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Means of ``window`` logged losses, at the last of them."""
    if len(losses) < window:
        return steps, losses
    return steps[window - 1 :], np.convolve(losses, np.full(window, 1 / window), "valid")
