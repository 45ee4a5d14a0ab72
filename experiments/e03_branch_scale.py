"""E03: what does the scale of the branches do that a learning rate does not, and does on or off tell what lies between?"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.experiment import Finding, Measured
from experiments.judge import Effect, Interval, Predicate, difference, effect, in_ropes, share
from experiments.parts.e03_exact_null import EXACT, ROUNDED, compared
from experiments.runs import LOSS, RATE, SEED, Runs, ended, losses_of, number
from experiments.shared.pictures import Panels
from experiments.shared.rates import (
    by_seed,
    loss_at,
    lost,
    open_above,
    reached,
    seen_at_end,
    spikes,
    steps_above,
    unsigned,
)
from experiments.shared.sizes import RATES4, RATES7, SEEDS, SIZES, WARMUP, sized
from resjax.health.studies import STUDIES
from resjax.sweeps.combine import chain, product

QUESTION = "Does the scale of residual branches do anything that a learning rate does not, and does on or off tell what lies between?"
FILE = "experiments/parts/e03_schemes.py"
NORMS: Mapping[str, Mapping[str, Any]] = {
    "Pre-LN": {"residual.name": "pre_ln", "model.norm": "layernorm"},
    "Post-LN": {"residual.name": "post_ln", "model.norm": "layernorm"},
    "no norm": {"residual.name": "pre_ln", "model.norm": "none"},
}
PRE = NORMS["Pre-LN"]
MATCHED = {0.3: f"{FILE}:MATCHED_03", 0.1: f"{FILE}:MATCHED_01"}
MOVED = {0.25: f"{FILE}:MOVED_25", 0.5: f"{FILE}:MOVED_50", 0.75: f"{FILE}:MOVED_75"}
GATES = (0.0, 0.1, 0.3)  # where a learned gate starts
BETWEEN = (0.03, 0.1, 0.3)
RESCUERS = (0.5, 0.3, 0.1)
RATES, SHARED = (3e-3, 1e-2, 3e-2), 3e-3
HIGH = (3e-2, 1e-1)  # at which stacks without Pre-LN may need rescue
DEEP = 48  # blocks from which C49 speaks of a deep model
SHALLOW = "the claim is of 48 blocks and more, which the accelerator grid has"
FLOOR = -1.0  # of R^2: how far below 0 says nothing more

PREDICATES = {
    "C49": (
        Predicate("steps of the rates' grid by which the highest trained rate is above that of scale 1", "above", 0.5),
        Predicate("spike score at the best scale of 0.1 to 0.5 less that at 1, % of steps", "below", 0.1),
    ),
    "C50": (
        Predicate("loss at a scale below 0.1 less that at 1, each at its best rate, ROPEs", "above", 1.0),
        Predicate("effective depth there less that at 1, blocks", "below", 0.0),
    ),
    "C51": (
        Predicate("share of untrained runs that a smaller scale rescues, by Wilson's interval", "above", 0.3, other=0.1),
        Predicate("the same share by its mean alone", "above", 0.5, other=0.1),
    ),
    "C82": (
        Predicate("loss at scale 0.3 less that at 1, each at its best rate, ROPEs", "inside", 1.0),
        Predicate("share by which steps to the target differ, in the direction seen", "above", 0.2),
        Predicate("difference of the sensitivity to the rate (M8), in the direction seen, nat", "above", 0.01),
    ),
    "C82/rate matched": tuple(
        Predicate(f"loss at scale {scale} with matched rate and start less that at 1, ROPEs", "inside", 1.0)
        for scale in MATCHED
    ),
    "C82/exact null": (
        Predicate("largest difference of the loss over 50 steps, scales 1/2, 1/4, 1/8 matched, nat", "below", 1e-9),
    ),
    **{
        f"C81/{what}": (Predicate(f"R² (at least -1) of a straight line between {ends}", "below", 0.5),)
        for what, ends in (
            ("scale", "scale 0 and 1, at 0.03, 0.1, 0.3"),
            ("moved norm", "Pre-LN and Post-LN, with 25, 50, 75 % of the blocks moved"),
            ("learnable gate", "a gate held at 0 and at 1, of gates that start at 0, 0.1, 0.3"),
        )
    },
}  # fmt: skip
SETTINGS = {
    "cpu": "cpu-S, markov, gain 0.55",
    "accelerator": "acc-S and acc-M, markov, gain 0.55",
}
CUT = (
    "Depths 24 and 48: C49, which speaks of 48 blocks and more, stays undecided, and all else is said of 12 blocks.",
    "Scales 0.01, 0.5 and 3: C51 tries 0.3 and 0.1 of its three.",
    "The rate 1e-3 everywhere; 1e-1 of Pre-LN but at scale 0.03; rates below 3e-2 of Post-LN and no norm but at scale 1.",
    "Matched arms but for 0.3 and 0.1 of Pre-LN at 1e-2; moved norms and gates at 3e-3 only.",
)
VARIANTS = ("accelerator",)


def get_config(variant: str | None = None) -> Any:
    config = sized("acc-S" if variant else "cpu-S")
    config.train.log_every, config.health.groups = config.train.steps // 60, ("forward",)
    return config


def sweep(variant: str | None = None) -> list[dict[str, Any]]:
    return _accelerator() if variant else _cpu()


def _cpu() -> list[dict[str, Any]]:
    seeds, brittle = {"seed": SEEDS}, [NORMS["Post-LN"], NORMS["no norm"]]
    return chain(
        product(PRE, {"residual.scale": [0.0, *BETWEEN, 1.0]}, {RATE: RATES}, seeds),
        product(PRE, {"residual.scale": 0.03, RATE: 1e-1}, seeds),
        product(NORMS["Post-LN"], {"residual.scale": 1.0, RATE: SHARED}, seeds),
        product(brittle, {"residual.scale": 1.0, RATE: (1e-2, *HIGH)}, seeds),
        product(brittle, {"residual.scale": [0.1, 0.3], RATE: HIGH}, seeds),
        product({"residual.name": list(MATCHED.values()), RATE: 1e-2}, seeds),
        _between({RATE: SHARED}, seeds),
    )


def _accelerator() -> list[dict[str, Any]]:
    depths, few, rest = {"model.depth": [12, 24, 48, 96]}, {"seed": SEEDS[:3]}, {"seed": SEEDS[3:]}
    scales, main = {"residual.scale": [0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 3.0]}, {"residual.scale": [0.1, 0.3, 1.0]}
    norms, rates = list(NORMS.values()), {RATE: RATES7}
    size = SIZES["acc-M"]
    large = size | {"model.depth": 48, "optimizer.warmup": round(WARMUP * size["train.steps"]), "train.log_every": 320}
    ends = {"seed": SEEDS, RATE: (3e-3, 1e-2)}
    return chain(
        product(depths, norms, scales, rates, few),
        product(depths, norms, main, rates, rest),
        product(depths, PRE, {"residual.scale": [0.0, 0.01, 0.03]}, rates, {"seed": SEEDS}),
        product(depths, {"residual.name": list(MATCHED.values())}, rates, {"seed": SEEDS}),
        _between(depths, ends),
        product(large, PRE, main, {RATE: RATES4}, few),
    )


def _between(*grids: Any) -> list[dict[str, Any]]:
    """Norms moved in a part of the blocks, and learned gates on Pre-LN."""
    gates = {"residual.scale_kind": "scalar", "residual.scale": GATES}
    return chain(product({"residual.name": list(MOVED.values())}, *grids), product(PRE, gates, *grids))


def keep(variant: str | None = None) -> dict[str, Any]:
    return {"curves": True, "looks": {"steps": ("end",), "look": effective_depth}}


def effective_depth(subject: Any, before: Any) -> dict[str, Any]:
    """M15 of the cells that C50 compares; nothing of the others."""
    residual, model = subject.config.residual, subject.config.model
    plain = residual.name == "pre_ln" and model.norm != "none" and residual.scale_kind is None
    if not plain or residual.scale is None or not (0 < residual.scale < 0.1 or residual.scale == 1):
        return {}
    return {"effective_depth": STUDIES["ablation"].run(subject)["effective_depth"]}


MEASURES = {"exact null": lambda scale: compared(*((SEEDS[:1], 5) if scale == "smoke" else ()))}


# ------------------------------------------------------------------ what was found


def judge(runs: Runs, measured: Measured) -> Iterator[Finding]:
    yield _exact(measured["exact null"])
    for width, of_size in runs.split("model.width").items():
        for depth, part in of_size.split("model.depth").items():
            where = f"{depth} blocks" + (f", width {width}" if len(runs.split("model.width")) > 1 else "")
            for found in _at(part, depth):
                yield replace(found, settings=", ".join(filter(None, (where, found.settings))))


def _at(runs: Runs, depth: int) -> Iterator[Finding]:
    scaled = {name: plain(runs.where(fields)) for name, fields in NORMS.items()}
    for name, part in scaled.items():
        if len(part):
            yield _more_stable(name, part, depth)
    yield _rescued(scaled)
    pre = scaled["Pre-LN"].split("residual.scale")
    if {0.3, 1.0} <= set(pre):
        yield _third(pre[0.3], pre[1.0])
    small = [scale for scale in pre if 0 < scale < 0.1]
    if small and 1.0 in pre:
        yield _too_small(pre[min(small)], pre[1.0], min(small))
    found = {scale: runs.where({"residual.name": name}) for scale, name in MATCHED.items()}
    if all(map(len, found.values())):
        yield _matched(found, pre[1.0])
    yield from _between_ends(runs, pre, scaled["Post-LN"])


def plain(runs: Runs) -> Runs:
    """Those whose scale is a number that was given, not a learned gate."""
    return Runs(row for row in runs.where({"residual.scale_kind": None}) if scale_of(row) is not None)


def scale_of(row: Mapping[str, Any]) -> float | None:
    return row["fields"].get("residual.scale")


def _exact(rows: Any) -> Finding:
    """The null of the comparison, by the optimizer's algebra, and how float32 hides it."""

    def largest(arm: str, scales: tuple[float, ...]) -> list[float]:
        found: dict[int, float] = {}
        for row in rows:
            if row["arm"] == arm and row["scale"] in scales:
                found[row["seed"]] = max(found.get(row["seed"], 0.0), row["largest"])
        return [found[seed] for seed in sorted(found)]

    told = [
        f"{words} {max(largest(arm, scales)):.2g} nat"
        for words, arm, scales in (
            ("at 0.3 and 0.1, which round, the largest difference is", "matched", ROUNDED),
            ("a start of scale 1 that is rounded otherwise makes", "one rounding", (1.0,)),
            ("0.3 at a shared rate makes", "shared rate", ROUNDED),
        )
        if largest(arm, scales)
    ]
    return Finding("C82/exact null", (effect(largest("matched", EXACT)),), notes=tuple(told), construction=True)


def _more_stable(norm: str, part: Runs, depth: int) -> Finding:
    scales = part.split("residual.scale")
    tried = {scale: runs for scale, runs in scales.items() if 0.1 <= scale <= 0.5}
    best = max(tried, key=lambda scale: (tried[scale].highest_rate(), scale))
    seeds, one = scales[1.0].seeds, scales[1.0]
    scores = [by_seed(arm, lambda row: spikes(row, "score"), seeds) for arm in (tried[best], one)]
    edge = open_above(one) and depth >= DEEP
    cut = SHALLOW if depth < DEEP else "scale 1 is trained at the last rate of the grid" if edge else ""
    effects = (effect(steps_above(tried[best], one, seeds)), difference(*scores))
    rates = f"highest trained rate {tried[best].highest_rate():g} at scale {best:g}, {one.highest_rate():g} at 1"
    return Finding("C49", effects, norm, cut, (rates, *lost(part)))


def _too_small(small: Runs, one: Runs, scale: float) -> Finding:
    at, of = small.best(), one.best()
    seeds = of.runs.seeds
    depths = [[seen_at_end(row or {}, "effective_depth") for row in best.runs.by_seed(seeds)] for best in (at, of)]
    effects = (in_ropes(at.runs.losses(seeds), of.runs.losses(seeds)), difference(*depths))
    beyond = at.edge and at.value == max(small.split(RATE))
    notes = (f"scale {scale:g}; best rates {at.value:g} and {of.value:g}", *_at_shared(small, one), *lost(small, one))
    return Finding("C50", effects, cut=f"scale {scale:g}: {at.edge}" if beyond else "", notes=notes)


def _rescued(scaled: Mapping[str, Runs]) -> Finding:
    """Over norms and rates: of the runs that are not trained at scale 1, how many a smaller scale trains, and a smaller rate does."""
    hits: dict[int, list[float]] = {seed: [] for part in scaled.values() for seed in part.seeds}
    both: list[tuple[float, float]] = []  # by scale, by rate, where both were tried
    for part in scaled.values():
        ends = {(scale_of(row), row["fields"][RATE], row["fields"][SEED]): ended(row, "trained") for row in part}
        for (scale, rate, seed), trained in ends.items():
            if scale != 1.0 or trained != 0:
                continue
            for factor in (one for one in RESCUERS if (one, rate, seed) in ends):
                hits[seed].append(ends[factor, rate, seed])
                lower = [r for (s, r, i) in ends if s == 1.0 and i == seed and abs(np.log(r / (rate * factor))) < 0.15]
                both += [(hits[seed][-1], ends[1.0, one, seed]) for one in lower]
    each = [float(np.mean(found)) if found else np.nan for found in hits.values()]
    every = [hit for found in hits.values() for hit in found]
    mean = float(np.mean(every)) if every else np.nan
    by_scale, by_rate = np.mean(both, axis=0) if both else (np.nan, np.nan)
    same = "equivalent to a cut of the rate" if abs(by_scale - by_rate) <= 0.1 else "no equivalent of a cut of the rate"
    notes = [f"{len(every)} pairs of an untrained run at scale 1 and the same with a smaller scale"]
    if both:
        notes.append(
            f"where both were tried, the scale rescues {by_scale:.2f} and the rate divided alike {by_rate:.2f}: {same}"
        )
    effects = Effect(tuple(each), share(every).interval), Effect(tuple(each), Interval(mean, mean))
    return Finding(
        "C51", effects, "norms and rates pooled", "" if every else "no run at scale 1 was untrained", tuple(notes)
    )


def _third(third: Runs, one: Runs) -> Finding:
    at, of = third.best(), one.best()
    seeds = of.runs.seeds
    targets = [loss_at(row or {}, 0.5) for row in of.runs.by_seed(seeds)]
    mine, theirs = (
        np.array([reached(row or {}, target) for row, target in zip(best.runs.by_seed(seeds), targets, strict=True)])
        for best in (at, of)
    )
    effects = (
        in_ropes(at.runs.losses(seeds), of.runs.losses(seeds)),
        unsigned(effect(mine / theirs - 1)),
        unsigned(difference(third.sensitivity(seeds), one.sensitivity(seeds))),
    )
    notes = (
        f"best rates {at.value:g} at 0.3 and {of.value:g} at 1{''.join(f'; {edge}' for edge in {at.edge, of.edge} - {''})}",
        f"steps to the loss of scale 1 at half its run: {_listed(mine)} and {_listed(theirs)}",
        *_at_shared(third, one), *lost(third, one),
    )  # fmt: skip
    return Finding("C82", effects, notes=notes)


def _matched(found: Mapping[float, Runs], one: Runs) -> Finding:
    rates = set.intersection(*(set(part.split(RATE)) for part in found.values()), set(one.split(RATE)))
    rate = min(rates, key=lambda rate: float(np.mean(one.where({RATE: rate}).losses())))
    base = one.where({RATE: rate})
    arms = {scale: part.where({RATE: rate}) for scale, part in found.items()}
    apart = {scale: _apart(part, base) for scale, part in arms.items()}
    effects = tuple(in_ropes(part.losses(base.seeds), base.losses()) for part in arms.values())
    told = ", ".join(f"{value:.2g} nat at {scale:g}" for scale, value in apart.items())
    label = "the curves coincide: an LR re-parametrisation" if max(apart.values()) < 1e-3 else (
        "they part by more than 1e-3 nat, which float32 does by itself in so many steps: see the exact null"
    )  # fmt: skip
    return Finding(
        "C82/rate matched", effects, f"rate {rate:g}", "", (f"largest difference on the way {told}; {label}",)
    )


def _apart(part: Runs, base: Runs) -> float:
    """The largest difference of two arms' training losses at any logged step of any seed; inf where one has no curve."""
    found = 0.0
    for row, other in zip(part.by_seed(base.seeds), base.by_seed(), strict=True):
        mine, theirs = losses_of(row or {})[1], losses_of(other or {})[1]
        same = len(mine) and len(mine) == len(theirs)
        found = max(found, float(np.abs(mine - theirs).max()) if same else np.inf)
    return found


def _between_ends(runs: Runs, pre: Mapping[float, Runs], post: Runs) -> Iterator[Finding]:
    def at_best(scale: float) -> list[float]:
        return pre[scale].best().runs.losses(SEEDS)

    def shared(part: Runs) -> list[float]:
        return part.where({RATE: SHARED}).losses(SEEDS)

    if {0.0, *BETWEEN, 1.0} <= set(pre):
        straight = line({scale: at_best(scale) for scale in BETWEEN}, at_best(0.0), at_best(1.0))
        again = line({scale: shared(pre[scale]) for scale in BETWEEN}, shared(pre[0.0]), shared(pre[1.0]))
        yield Finding(
            "C81/scale", (straight,), "best rate each", notes=(f"at the rate {SHARED:g}: {_listed(again.values)}",)
        )
    moved = {share: runs.where({"residual.name": name}) for share, name in MOVED.items()}
    if all(map(len, moved.values())):
        ends = shared(pre[1.0]), shared(post.where({"residual.scale": 1.0}))
        found = line({share: shared(part) for share, part in moved.items()}, *ends)
        yield Finding("C81/moved norm", (found,), f"rate {SHARED:g}", notes=lost(*moved.values()))
    gated = runs.where(PRE | {"residual.scale_kind": "scalar"}).split("residual.scale")
    if gated:
        found = line({start: shared(part) for start, part in gated.items()}, shared(pre[0.0]), shared(pre[1.0]))
        yield Finding("C81/learnable gate", (found,), f"rate {SHARED:g}", notes=lost(*gated.values()))


def line(between: Mapping[float, list[float]], off: list[float], on: list[float]) -> Effect:
    """R² of each seed's straight line from ``off`` at 0 to ``on`` at 1, over the values in between, as predictor of their losses.

    Not below -1: how much worse than their own mean it is says no more.
    """
    x = np.array(list(between))[:, None]
    seen, first, last = np.array(list(between.values())), np.array(off), np.array(on)
    missed = np.square(seen - (first + x * (last - first))).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 1 - missed / np.square(seen - seen.mean(axis=0)).sum(axis=0)
    return effect(np.where(np.isnan(found), np.nan, np.maximum(found, FLOOR)))


def _at_shared(part: Runs, one: Runs) -> tuple[str, ...]:
    mine, theirs = part.where({RATE: SHARED}), one.where({RATE: SHARED})
    if not len(mine) or not len(theirs):
        return ()
    found = in_ropes(mine.losses(theirs.seeds), theirs.losses())
    return (f"at the shared rate {SHARED:g} the loss differs by {found.mean:.3g} ROPEs",)


def _listed(values: Any) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


# ------------------------------------------------------------------ the panel


def figure(runs: Runs, measured: Measured) -> Any:
    """Panel 5: the loss at the end over the scale, in three conventions; matched, it is one level."""
    starts = [start for row in runs if np.isfinite(start := number(row, "first_loss"))]
    shown, start = list(runs.split("model.depth")), max(starts, default=np.inf)
    panels = Panels([f"{name}, {depth} blocks" for depth in shown for name in NORMS], len(NORMS), top=start)
    axes = iter(panels.axes)
    for depth in shown:
        there = runs.where({"model.depth": depth, "model.width": min(runs.split("model.width"))})
        for name, fields in NORMS.items():
            axis, scales = next(axes), plain(there.where(fields)).split("residual.scale")
            axis.set_xscale("symlog", linthresh=0.01, linscale=0.4)
            axis.set_xticks([0, *BETWEEN, 1], ["0", *map(str, BETWEEN), "1"])
            everywhere = set.intersection(*(set(part.split(RATE)) for part in scales.values())) if scales else {SHARED}
            shared = min(everywhere, default=SHARED)
            axis.set_title(f"{axis.get_title()}, rate {shared:g}", fontsize=10)
            found = {
                "the same rate at all scales (see titles)": {
                    scale: part.where({RATE: shared}) for scale, part in scales.items()
                },
                "best rate of each scale": {scale: part.best().runs for scale, part in scales.items()},
            }
            if name == "Pre-LN":
                one = scales.get(1.0)
                rate = one.best().value if one else SHARED
                arms = {scale: there.where({"residual.name": matched}) for scale, matched in MATCHED.items()}
                rates = set.intersection(*(set(arm.split(RATE)) for arm in arms.values())) if arms else set()
                at = rate if rate in rates else max(rates, default=SHARED)
                found[f"matched: rate {at:g} / scale, start / scale"] = {
                    scale: arm.where({RATE: at}) for scale, arm in arms.items()
                }
            for i, (label, parts) in enumerate(found.items()):
                panels.dots(
                    axis, {x: [number(row, LOSS) for row in part] for x, part in parts.items() if part}, i, label
                )
    panels.floors(runs)
    return panels.finish(
        "Loss at the end and scale of the branches", "scale of the branches (0 = off)", "held-out loss, nat per token"
    )
