"""E18: do the norm and the skip need one another? The two by two of them, and starts that do without a norm.

python -m experiments.run E18
"""

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import Predicate, difference, effect, in_ropes, rope
from experiments.runs import RATE, number
from experiments.shared.benefit import benefit
from experiments.shared.pictures import ink
from experiments.shared.seen import told
from experiments.shared.sizes import RATES4, RATES7, SEEDS, sized
from experiments.shared.skips import (
    FULL,
    MOST,
    NEITHER,
    NO_NORM,
    NO_NORM_PLAIN,
    NO_SKIP,
    arm,
    at_best,
    capped,
    edge,
    endings,
)
from resjax.sweeps.combine import chain, product

QUESTION = "Do norm and skip stabilise only together, and can a start without norms stand in for them?"
VARIANTS = ("accelerator",)
SETTINGS = {"cpu": "cpu-S, markov, gain 0.55", "accelerator": "acc-S, markov, gain 0.55"}
CUT = (
    "Depth 24: both claims are judged at 6 and 12 blocks only; the accelerator grid has it.",
    "ReZero, Fixup and T-Fixup at 6 blocks: whether a start stands in for norms (C14) is judged at 12.",
)
DEPTHS, STARTS_AT = (6, 12), 12
TWO_BY_TWO = {"norm and skip": FULL, "skip alone": NO_NORM, "norm alone": NO_SKIP, "neither": NEITHER}
SINGLES = ("skip alone", "norm alone")
BARE = "skip alone, plain start"
STARTS = {name: {"residual.name": name} for name in ("rezero", "fixup", "tfixup")}
ARMS = TWO_BY_TWO | STARTS | {BARE: NO_NORM_PLAIN}

PREDICATES = {
    "C05": (
        Predicate(
            "loss averaged over the rates, at most that of the start: the better of norm alone and skip alone less both, nats",
            "above", 0.1,
        ),
    ),
    "C14/nothing in its place": (
        Predicate(
            "share of seeds in which leaving norms out costs more than a ROPE of the best loss, or a step of the rates that train",
            "above", **MOST,
        ),
    ),
    "C14/a start made for it in its place": (
        Predicate("best loss of the best start without norms less that of Pre-LN, in ROPEs", "above", 1.0),
    ),
}  # fmt: skip


def get_config(variant=None):
    return sized("acc-S" if variant else "cpu-S")


def sweep(variant=None):
    recipe = {RATE: RATES7 if variant else RATES4, "seed": SEEDS}
    depths = (6, 12, 24) if variant else DEPTHS
    return chain(
        product({"model.depth": depths}, chain(*TWO_BY_TWO.values(), NO_NORM_PLAIN), recipe),
        product({"model.depth": depths if variant else STARTS_AT}, chain(*STARTS.values()), recipe),
    )


def judge(runs, measured):
    for depth, part in runs.split("model.depth").items():
        where = f"{depth} blocks"
        arms = {name: arm(part, fields) for name, fields in ARMS.items()}
        yield together(arms, where)
        best = {name: at_best(there) for name, there in arms.items()}
        losses = {name: one.runs.losses(SEEDS) for name, one in best.items()}
        yield nothing(arms, losses, where)
        if any(len(arms[name]) for name in STARTS):
            yield stands_in(arms, best, losses, where)


def together(arms, where):
    """C05: how much worse the better of the two is without the other, over all rates."""
    means = {name: capped(arms[name]) for name in TWO_BY_TWO}
    single = min(SINGLES, key=lambda name: effect(means[name]).mean)
    notes = [f"the better of the two alone is: {single}"]
    for name in TWO_BY_TWO:
        notes.append(
            f"{name}: mean over the rates {told(effect(means[name]), 'nats')}; M8 {told(effect(arms[name].sensitivity(SEEDS)), 'nats')}"
        )
        notes.append(endings(arms[name], name))
    return Finding("C05", (difference(means[single], means["norm and skip"]),), where, notes=tuple(notes))


def nothing(arms, losses, where):
    """C14: norms left out, and nothing put in their place, a start that shrinks with depth neither."""
    base = losses["norm and skip"]
    unit = rope(base)
    found = benefit(arms["norm and skip"], arms[BARE], unit)
    with_, without = found.best
    notes = (
        f"best loss without norms less that with: {told(found.cost, 'nats')}; a ROPE is {unit:.3g} nats",
        f"best rates {without.value:g} without and {with_.value:g} with norms",
        f"highest rates that train, by seed: {listed(found.rates[1])} without and {listed(found.rates[0])} with norms",
        f"the same from the start of 1/sqrt(2L): {told(difference(losses['skip alone'], base), 'nats')}",
    )
    return Finding("C14/nothing in its place", (found.share,), where, cut=found.cut, notes=notes)


def listed(rates):
    return ", ".join(f"{rate:.2g}" for rate in rates)


def stands_in(arms, best, losses, where):
    """C14: a start that was made to do without norms."""
    base = "norm and skip"
    name = min(STARTS, key=lambda one: np.inf if np.isnan(mean := np.mean(losses[one])) else mean)
    found = in_ropes(losses[name], losses[base])
    notes = [f"the best start is {name}, at rate {best[name].value:g}; Pre-LN is at {best[base].value:g}"]
    for one in STARTS:
        notes.append(
            f"{one}: {told(in_ropes(losses[one], losses[base]), 'ROPEs')}, M8 {told(effect(arms[one].sensitivity(SEEDS)), 'nats')}"
        )
        notes.append(endings(arms[one], one))
    doubt = edge(found.mean > 1, best[name], best[base])
    return Finding("C14/a start made for it in its place", (found,), where, cut=doubt, notes=tuple(notes))


# ------------------------------------------------------------------ the panel

COLOURS = ("#000000", "#e69f00", "#56b4e9", "#999999", "#009e73", "#cc79a7", "#d55e00", "#0072b2")


def figure(runs, measured):
    """Held-out loss over the rate, every seed a dot, a line through the means; what is not finite, or far above the start, is counted at
    the upper end."""
    depths = list(runs.split("model.depth"))
    drawn = Figure(figsize=(3.8 * len(depths) + 2.2, 3.8), layout="constrained")
    axes = np.atleast_1d(drawn.subplots(1, len(depths), sharey=True))
    top = max([start for row in runs if np.isfinite(start := number(row, "first_loss"))], default=1.0) + 0.3
    levels = next((row["floors"] for row in runs if row.get("floors")), {})
    for axis, depth in zip(axes, depths, strict=True):
        part = runs.where({"model.depth": depth})
        for place, (name, fields) in enumerate(ARMS.items()):
            curve(axis, arm(part, fields), name, COLOURS[place], 1 + 0.04 * (place - 3), top)
        for words, value in levels.items():
            axis.axhline(value, color="#777777", lw=0.8, ls="--", zorder=0)
            axis.text(
                0.01, value, words, transform=axis.get_yaxis_transform(), fontsize=7, color="#555555", va="bottom"
            )
        rates = part.split(RATE)
        axis.set(
            xscale="log", xlabel="learning rate", title=f"{depth} blocks", xlim=(min(rates) / 1.6, max(rates) * 1.6)
        )
    axes[0].set_ylim(top=top)
    axes[0].set_ylabel("held-out loss, nats per token")
    handles = {handle.get_label(): handle for axis in axes for handle in axis.get_legend_handles_labels()[0]}
    drawn.legend(handles=list(handles.values()), loc="outside right upper", frameon=False, fontsize=8)
    return drawn


def curve(axis, runs, name, colour, shift, top):
    """One arm up to ``top`` nats; ``shift`` keeps arms apart."""
    seen = {rate * shift: np.asarray(part.losses()) for rate, part in runs.split(RATE).items()}
    shown = {rate: values[values <= top] for rate, values in seen.items()}
    if not seen:
        return
    means = [values.mean() if values.size else np.nan for values in shown.values()]
    axis.plot(list(seen), means, color=colour, lw=1.2, marker="o", ms=3.5, mfc="none", label=name)
    for rate, values in shown.items():
        axis.plot([rate] * len(values), values, ".", color=colour, ms=4, alpha=0.7, label="_seeds")
        if beyond := len(seen[rate]) - len(values):
            words = {
                "transform": axis.get_xaxis_transform(),
                "ha": "center",
                "va": "top",
                "fontsize": 7,
                "color": ink(colour),
            }
            axis.text(rate, 1.0 - 0.04 * (COLOURS.index(colour) % 4), f"{beyond}\u00d7", **words)
