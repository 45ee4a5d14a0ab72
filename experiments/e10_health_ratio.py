"""E10: does the ratio of update to stream tell a healthy run? Its band of 0.01 to 0.1 on trial.

python -m experiments.run E10       after the others: their runs are pooled with its own
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments import results
from experiments.experiment import Finding, paths
from experiments.judge import Effect, Predicate, effect, rope, share
from experiments.runs import RATE, SEED, Runs, ended, ending, number, profile, value_of
from experiments.shared.sizes import RATES4, SEEDS, sized
from resjax.config.schema import FIELDS
from resjax.health.metrics import angular_distance
from resjax.sweeps.combine import chain, product

QUESTION = (
    "Does the update ratio soon after the start tell which runs will do well, and does it settle as the article says?"
)
VARIANTS = ("accelerator",)
SETTINGS = {"cpu": "cpu-S, markov", "accelerator": "acc-S, markov"}
OWN = "Pre-LN"
BAND = (0.01, 0.1)
SOON, EARLY, LATE = 30, (1, 10, 30, 100, 300), (0.7, 0.8, 0.9)
MIDDLE = 12  # blocks of the arms that most predicates look at
POOLED = ("E05", "E08")  # that keep the ratio at step 30
CUT = (
    "48 blocks.",
    "Gains 0.1 and 10 of the embedding at 24 blocks; the unscaled start of output matrices at 12 blocks only.",
    "The pool has the runs of E05 and E08; those of E01, E02 and E03 keep no ratio at step 30.",
)
PRE = {"residual.name": "pre_ln"}

PREDICATES = {
    "C74": (
        Predicate("share of the good runs whose median update ratio at step 30 is in 0.01 to 0.1", "above", 0.8, other=0.2),
        Predicate("AUC of 'the median ratio is in the band' for telling good runs (0.5 is chance)", "above", 0.75, other=0.55),
    ),
    "C75": (
        Predicate("how much likelier a run is unstable if some ratio is above 1 at step 30", "above", 0.3, other=0.3),
        Predicate("share of seeds whose best run has a ratio above 1 at step 30, in the task with the most", "below", 0.45, other=0.3),
    ),
    "C76": (
        Predicate("rank correlation over blocks of final update ratio and rise of the loss without the block", "above", 0.7),
        Predicate("share of seeds with a block of ratio below 0.01 that the loss needs (0.02 nats)", "below", 0.45, other=0.3),
        Predicate("share of ReZero runs, all of whose ratios are 0 at the start, that train", "below", 0.45, other=0.3),
    ),
    "C77/most layers": (
        Predicate("share of sites whose ratio is lower at the end than at step 30, and steady by then", "above", 0.8),
    ),
    "C77/the first block": (Predicate("share of the first block's sites that do the same", "above", 0.8, agree=0.0),),
    "C78": (
        Predicate("log odds that a site in the top tenth of final ratios moves more than the median site", "above", float(np.log(2))),
    ),
    "C04": (
        Predicate("median update ratio of the middle half of the blocks at the end", "below", 0.3),
        Predicate("median angular distance over one of them, in units of pi", "below", 0.1),
    ),
    "C15": (
        Predicate("median update ratio of the middle half of the blocks at the end", "below", 0.3),
        Predicate("slope of its logarithm over the logarithm of the depth", "below", 0.0),
    ),
    "C26": (
        Predicate("share of sites whose update points against the stream (cosine below -0.05)", "above", 0.1),
        Predicate("share of sites whose update points along it (cosine above 0.05)", "above", 0.1),
    ),
}  # fmt: skip


def get_config(variant=None):
    return sized("acc-S" if variant else "cpu-S")


def sweep(variant=None):
    grid = {RATE: RATES4, SEED: SEEDS}
    return chain(
        product(PRE, {"model.depth": (6, MIDDLE), "init.embed_gain": (0.1, 1.0, 10.0)}, grid),
        product(PRE, {"model.depth": MIDDLE, "init.out_scale": 1.0}, grid),
        product(PRE, {"model.depth": 24}, grid),
        product({"residual.name": "rezero", "model.depth": MIDDLE, RATE: 1e-2, SEED: SEEDS}),
    )


def drift(subject: Any, before: Any) -> dict[str, Any]:
    """Angular distance of the stream before each block, token by token, from what it was at the look before (M10)."""
    now = np.stack([np.asarray(x) for x in subject.streams()], axis=1)
    found: dict[str, Any] = {"_memory": now}
    if before is not None:
        found["drift"] = [float(angular_distance(one, other)) for one, other in zip(before, now, strict=True)]
    return found


def keep(variant=None):
    steps = 5000 if variant else 600
    return {
        "profiles": (*EARLY, *(round(part * steps) for part in LATE), "end"),
        "probes": ("update_ratio", "update_cosine"),
        "studies": ("ablation", "similarity"),
        "looks": {"steps": (round(0.8 * steps), steps), "look": drift},
    }


def pool(scale: str) -> Iterable[dict[str, Any]]:
    """Median and largest update ratio at step 30 of every run of the other experiments that keeps it, with how it ended."""
    for name, path in paths().items():
        kept = results.PLACE / f"{path.stem}.{scale}.json"
        if name in POOLED and kept.exists():
            for row in results.read(kept).runs:
                ratio = profile(row, SOON, "update_ratio").ravel()
                ratio = ratio[np.isfinite(ratio)]
                if ratio.size:
                    yield {
                        "experiment": name,
                        "task": task(row),
                        "seed": value_of(row, SEED),
                        "outcome": ending(row),
                        "episodes": number(row, "spikes.episodes"),
                        "eval_loss": number(row, "eval_loss"),
                        "median": float(np.median(ratio)),
                        "largest": float(ratio.max()),
                    }


MEASURES = {"pool": pool}


def task(row) -> str:
    """What has to be equal for two final losses to be compared: text, depth and size of a run."""
    fields = ("data.source", "model.depth", "model.width", "data.length", "data.batch", "train.steps")
    return ", ".join(f"{value_of(row, path)}" for path in fields)


def point(row) -> dict[str, Any]:
    """A run of one's own, as those of the pool are."""
    ratio = profile(row, SOON, "update_ratio")
    known = ratio[np.isfinite(ratio)]
    rest = ratio[1:][np.isfinite(ratio[1:])] if len(ratio) > 1 else known
    return {
        "experiment": "E10", "task": task(row), "seed": value_of(row, SEED), "outcome": ending(row),
        "episodes": number(row, "spikes.episodes"), "eval_loss": number(row, "eval_loss"),
        "median": float(np.median(known)) if known.size else np.nan,
        "largest": float(known.max()) if known.size else np.nan,
        "largest later": float(rest.max()) if rest.size else np.nan,
    }  # fmt: skip


def with_excess(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that ran, with each one's excess over the best loss of its task and seed, and whether that is within the task's ROPE."""
    ran = [one for one in points if one["outcome"] not in ("failed", "killed")]
    best: dict[str, dict[int, float]] = {}
    for one in ran:
        of_task = best.setdefault(one["task"], {})
        of_task[one["seed"]] = np.nanmin([of_task.get(one["seed"], np.inf), one["eval_loss"]])
    for one in ran:
        of_task = best[one["task"]]
        one["excess"] = one["eval_loss"] - of_task[one["seed"]]
        one["good"] = bool(one["excess"] <= rope(list(of_task.values())))
        one["unstable"] = one["outcome"] in ("nonfinite", "diverged", "collapsed") or one["episodes"] > 0
    return ran


def auc(scores: list[float], truth: list[bool]) -> float:
    """The probability that a good run has the higher score, ties counting half; NaN where all are alike."""
    good, bad = ([s for s, t in zip(scores, truth, strict=True) if t is want] for want in (True, False))
    if not good or not bad:
        return np.nan
    return float(np.mean([(g > b) + 0.5 * (g == b) for g in good for b in bad]))


def inside(one) -> bool:
    return BAND[0] <= one["median"] <= BAND[1]


def of_seeds(points, number_of) -> Effect:
    return effect([number_of([one for one in points if one["seed"] == seed]) for seed in SEEDS])


def mean_of(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else np.nan


def likelier(points, name: str = "largest") -> float:
    above, below = (mean_of(one["unstable"] for one in points if (one[name] > 1) is want) for want in (True, False))
    return above - below


def on_trial(points, settings: str):
    """C74 and C75 on some runs; one that was gone before step 30 has no ratio to be judged by, and is told."""
    ran = with_excess(points)
    known = [one for one in ran if np.isfinite(one["median"])]
    gone = (
        f"without a ratio at step 30: {len(ran) - len(known)} of {len(ran)} runs; failed or killed: {len(points) - len(ran)}",
    )
    banded = of_seeds(known, lambda some: mean_of(inside(one) for one in some if one["good"]))
    telling = of_seeds(known, lambda some: auc([float(inside(one)) for one in some], [one["good"] for one in some]))
    counts = f"{sum(one['good'] for one in known)} good runs of {len(known)}, {sum(map(inside, known))} in the band"
    yield Finding("C74", (banded, telling), settings, notes=(counts, *gone))
    above = {task: share(large_at_best(known, task)) for task in sorted({one["task"] for one in known})}
    most = max(above, key=lambda task: np.nan_to_num(above[task].mean, nan=-1.0), default="")
    notes = [f"{sum(one['unstable'] for one in known)} unstable runs of {len(known)}", *gone]
    notes.append(
        "best runs with a ratio above 1: " + "; ".join(f"{task}: {found.mean:.0%}" for task, found in above.items())
    )
    if known and all("largest later" in one for one in known):
        later = of_seeds(known, lambda some: likelier(some, "largest later"))
        notes.append(f"without the first block: {later.mean:.2f} [{later.interval.low:.2f}, {later.interval.high:.2f}]")
    calm = (
        "" if any(one["unstable"] for one in known) else "no run was unstable, so that nothing can tell which would be"
    )
    yield Finding("C75", (of_seeds(known, likelier), above.get(most, share([]))), settings, calm, tuple(notes))


def large_at_best(points, task: str) -> list[float]:
    """Of each seed whether the best run of a task has a ratio above 1; NaN where it has no run with a loss."""
    found = []
    for seed in SEEDS:
        mine = [one for one in points if (one["task"], one["seed"]) == (task, seed) and np.isfinite(one["excess"])]
        found.append(float(min(mine, key=lambda one: one["excess"])["largest"] > 1) if mine else np.nan)
    return found


def judge(runs, measured):
    usual = runs.where(PRE | {"init.embed_gain": 1.0, "init.out_scale": None})
    best = usual.where({"model.depth": MIDDLE}).best()
    yield from on_trial([point(row) for row in runs.where(PRE)], OWN)
    if pooled := measured.get("pool"):
        numbers = ("eval_loss", "episodes", "median", "largest")
        points = [dict(row) | {name: number(row, name) for name in numbers} for row in pooled]
        names = " and ".join(sorted({row["experiment"] for row in pooled}))
        yield from on_trial(points, f"all runs of {names}, each beside the best of its text, depth and size")

    seeds = list(best.runs.by_seed(SEEDS))
    rezero = runs.where({"residual.name": "rezero"})
    yield Finding(
        "C76",
        (
            effect([correlation(row) for row in seeds]),
            share([needed(row) for row in seeds]),
            share([ended(row, "trained") for row in rezero.by_seed(SEEDS)]),
        ),
        OWN,
    )
    yield Finding("C77/most layers", (effect([settles(row)[0] for row in seeds]),), OWN)
    yield Finding("C77/the first block", (effect([settles(row)[1] for row in seeds]),), OWN)
    odds = effect([log_odds(usual.where({SEED: seed})) for seed in SEEDS])
    yield Finding("C78", (odds,), OWN, notes=("all Pre-LN runs with the usual start",))

    middle = effect([middle_ratio(row) for row in seeds])
    yield Finding("C04", (middle, effect([middle_angle(row) for row in seeds])), OWN)
    depths = {depth: there.best().runs for depth, there in usual.split("model.depth").items()}
    slopes = []
    for seed in SEEDS:
        ratios = [middle_ratio(next(iter(there.where({SEED: seed})), None)) for there in depths.values()]
        slopes.append(
            float(np.polyfit(np.log(list(depths)), np.log(ratios), 1)[0]) if np.isfinite(ratios).all() else np.nan
        )
    yield Finding("C15", (middle, effect(slopes)), OWN)
    cosines = [profile(row, "end", "update_cosine") if row else np.array([]) for row in seeds]
    yield Finding(
        "C26", tuple(effect([mean_of(sign * one.ravel() > 0.05) for one in cosines]) for sign in (-1, 1)), OWN
    )


def study(row, name: str, figure: str) -> Any:
    return ((row or {}).get("studies") or {}).get(name, {}).get(figure)


def of_blocks(row, step) -> np.ndarray:
    """The largest update ratio of each block's sites."""
    found = profile(row, step, "update_ratio") if row else np.array([])
    return found.max(axis=1) if found.ndim == 2 else found


def correlation(row) -> float:
    ratio, delta = of_blocks(row, "end"), study(row, "ablation", "delta")
    return float(stats.spearmanr(ratio, delta)[0]) if delta and np.ptp(delta) and np.ptp(ratio) else np.nan


def needed(row) -> float:
    """Whether some block is needed by the loss although it hardly moves the stream."""
    ratio, delta = of_blocks(row, "end"), study(row, "ablation", "delta")
    return float(bool(((ratio < BAND[0]) & (np.array(delta) > 0.02)).any())) if delta else np.nan


def settles(row) -> tuple[float, float]:
    """Share of all sites, and of the first block's, whose ratio fell since step 30 and varies by less than a tenth at the end."""
    if row is None:
        return np.nan, np.nan
    last = row["config"].get("train.steps", FIELDS["train.steps"].default)
    parts = [profile(row, step, "update_ratio") for step in (SOON, *(round(part * last) for part in LATE), last)]
    if not all(part.size for part in parts):
        return np.nan, np.nan
    late = np.stack(parts[1:])
    steady = late.std(axis=0) / late.mean(axis=0) < 0.1
    fallen = parts[0] > late[-1]
    return mean_of((fallen & steady).ravel()), mean_of((fallen & steady)[0])


def log_odds(rows: Runs) -> float:
    """How much likelier a block of the top tenth of its run's final ratios is to move more than the run's median block."""
    table = np.full((2, 2), 0.5)  # Haldane's correction
    for row in rows:
        moved = [look["drift"] for look in (row.get("looks") or {}).values() if "drift" in look]
        ratio = of_blocks(row, "end")
        if moved and ratio.size:
            after = np.asarray(moved[-1][1:], float)  # of the stream after each block
            top = ratio >= np.quantile(ratio, 0.9)
            for is_top, moves in zip(top, after > np.median(after), strict=True):
                table[int(is_top), int(moves)] += 1
    return float(np.log(table[1, 1] * table[0, 0] / (table[1, 0] * table[0, 1]))) if table.sum() > 2 else np.nan


def middle_half(values: np.ndarray) -> np.ndarray:
    return values[len(values) // 4 : len(values) - len(values) // 4]


def middle_ratio(row) -> float:
    found = profile(row, "end", "update_ratio") if row else np.array([])
    return float(np.median(middle_half(found))) if found.size else np.nan


def middle_angle(row) -> float:
    angular = study(row, "similarity", "angular")
    return float(np.median(middle_half(np.diagonal(np.array(angular, float), 1)))) if angular else np.nan


def figure(runs, measured):
    drawn = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    usual = runs.where(PRE | {"init.embed_gain": 1.0, "init.out_scale": None, "model.depth": MIDDLE})
    points = with_excess([point(row) for row in runs.where(PRE)])
    left.axvspan(*BAND, color="0.92", zorder=0)
    for name, marker in zip(sorted({one["task"] for one in points}), "osv^D", strict=False):
        for lost in (False, True):
            some = [one for one in points if one["task"] == name and np.isfinite(one["excess"]) != lost]
            if some:
                excess = [3.0 if lost else max(one["excess"], 1e-3) for one in some]
                label = None if lost else f"{name.split(', ')[1]} blocks"
                medians = [one["median"] for one in some]
                left.plot(medians, excess, "x" if lost else marker, ms=4, mfc="none", alpha=0.7, label=label)
    left.set(xscale="log", yscale="log", xlim=(1e-3, 1e2), ylim=(7e-4, 4))
    left.set(xlabel="median update ratio at step 30", ylabel="excess over the best loss, nats")
    if left.get_legend_handles_labels()[0]:
        left.legend(frameon=False, fontsize=8)
    for row in usual.best().runs:
        steps = sorted(map(int, (row.get("profiles") or {})))
        traces = np.array([of_blocks(row, step) for step in steps])
        for block in range(traces.shape[1] if traces.ndim == 2 else 0):
            right.plot(steps, traces[:, block], lw=0.8, color=str(0.75 * block / traces.shape[1]) if block else "C3")
    right.axhspan(*BAND, color="0.92", zorder=0)
    right.set(xscale="log", yscale="log", xlim=(1, 600), ylim=(1e-3, 1e2))
    right.set(xlabel="step", ylabel="update ratio of each block (the first in red)")
    return drawn
