"""E11: are there dead layers after training, why, and does treating them help?

python -m experiments.run E11
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import AGREEING, Predicate, effect, in_ropes, rope
from experiments.runs import RATE, number, profile
from experiments.shared.sizes import SEEDS, sized
from experiments.shared.skips import at_best, edge
from resjax.health.studies.decoding import accuracies, divided, labelled
from resjax.sweeps.combine import chain, product

QUESTION = (
    "Which blocks of a trained stack does the loss not need, why do deep updates shrink, and what do remedies change?"
)
VARIANTS = ("accelerator",)
DEPTH, STEPS = 24, 1000
RATES, SHARED = {"cpu": (3e-3, 1e-2, 3e-2), "accelerator": (3e-4, 1e-3, 3e-3)}, {"cpu": 3e-3, "accelerator": 1e-3}
SETTINGS = {
    "cpu": "cpu-S with 1,000 steps, markov",
    "accelerator": "acc-M, stdlib",
}
CUT = (
    "12 blocks.",
    "LayerScale, and Pre-LN whose output matrices start at full size: no primary predicate names them.",
    "Post-LN at rates other than 3e-3: C45 compares how soon first layers are of use at that rate, if both arms train there.",
)
USUAL, LONGER = (100, 2000), (300, 6000)  # steps of warm-up, by scale
PRE = {"residual.name": "pre_ln", "optimizer.warmup": USUAL}
POST = {"residual.name": "post_ln"}
TREATMENTS = {
    "LNS": {"residual.name": "lns"},
    "norm on the branch's output": {"residual.name": "sandwich_branch"},
    "longer warm-up": {"residual.name": "pre_ln", "optimizer.warmup": LONGER},
}
FEWEST = 0.05  # share of dead blocks below which there is nothing to treat
EARLY = (1, 2, 3)  # before which blocks the first layers' work is read
LOOKS = {
    "cpu": (20, STEPS),
    "accelerator": (200, 20_000),
}  # first and last step of looks, each at most a sixth after the one before

PREDICATES = {
    "C79/there are dead layers": (
        Predicate("share of dead blocks in the second half of a trained Pre-LN stack at its best rate", "above", 0.1),
    ),
    "C79/treating them helps": (
        Predicate(
            "change of the share of dead blocks by the treatment with the best loss, each at its best rate",
            "below",
            -0.01,
        ),
        Predicate("change of the loss by it, in ROPEs", "below", -1.0),
    ),
    "C45/because the norm compresses": (
        Predicate(
            "share of the fall of update ratios over depth that the growth of the trunk explains",
            "below",
            0.2,
            other=0.8,
        ),
    ),
    "C45/shallow layers learn slower": (
        Predicate("steps that the first layers need under Pre-LN, as a multiple of those under Post-LN", "above", 1.2),
    ),
}


def get_config(variant=None):
    if variant:
        return sized("acc-M", data__source="stdlib", model__depth=DEPTH, optimizer__lr=1e-3)
    return sized("cpu-S", model__depth=DEPTH, train__steps=STEPS)


def sweep(variant=None):
    scale = variant or "cpu"
    place = list(RATES).index(scale)

    def warmed(fields):
        return {name: value[place] if name == "optimizer.warmup" else value for name, value in fields.items()}

    depths, seeds = {"model.depth": (DEPTH, 48) if variant else DEPTH}, {"seed": SEEDS}
    arms = [warmed(fields) for fields in (PRE, *TREATMENTS.values())]
    return chain(
        product(depths, arms, {RATE: RATES[scale]}, seeds),
        product(depths, POST, {RATE: SHARED[scale]}, seeds),
    )


def early(subject: Any, before: Any) -> dict[str, Any]:
    """What can be read off the stream before blocks 1 to 3: mean accuracy of a straight map to the next token (M5)."""
    config = subject.config
    pre = config.residual.name == "pre_ln" and config.optimizer.warmup in USUAL
    if not (pre or config.residual.name == "post_ln") or config.optimizer.lr not in SHARED.values():
        return {}
    sequences = subject.batches.reshape(-1, subject.batches.shape[-1])
    parts, following = divided(*sequences.shape), labelled(sequences)[3:4]
    seen = [
        np.concatenate([np.asarray(x, np.float32)[i, :, 1:] for x in subject.streams(EARLY)]) for i in range(len(EARLY))
    ]
    return {"next token": float(np.mean([accuracies(one, following, parts) for one in seen]))}


def keep(variant=None):
    first, last = LOOKS[variant or "cpu"]
    steps = np.geomspace(first, last, 1 + int(np.ceil(np.log(last / first) / np.log(7 / 6))))
    return {
        "curves": True,
        "profiles": ("end",),
        "probes": ("update_ratio", "update_rms", "stream_rms"),
        "studies": ("ablation", "similarity"),
        "looks": {"steps": tuple(sorted({round(step) for step in steps})), "look": early},
    }


def dead(row) -> float:
    """Share of the second half's blocks that are dead (M15)."""
    found = ((row or {}).get("studies") or {}).get("ablation", {}).get("dead")
    return float(np.mean(found[len(found) // 2 :])) if found else np.nan


def explained(row) -> float:
    """How much of the fall of log update ratio over log depth is the rise of the log stream; the rest is smaller updates."""
    ratio, stream = (profile(row, "end", name) for name in ("update_ratio", "stream_rms"))
    if not ratio.size or not (ratio > 0).all() or not (stream > 0).all():
        return np.nan
    depth = np.log(np.arange(1, ratio.size + 1))
    fall, growth = (np.polyfit(depth, np.log(one.ravel()), 1)[0] for one in (ratio, stream))
    return float(-growth / fall) if fall < 0 else np.nan


def learnt(row) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the looks and the accuracy there."""
    looks = (row or {}).get("looks") or {}
    steps = sorted((step for step in looks if "next token" in looks[step]), key=int)
    return np.array(steps, float), np.array([number(looks[step], "next token") for step in steps])


def first_reaching(row, target: float) -> float:
    """The step at which the first layers come to ``target``, between two looks on a straight line over log steps; NaN where never."""
    steps, seen = learnt(row)
    there = np.flatnonzero(seen >= target)
    if not len(there):
        return np.nan
    at = there[0]
    if at == 0:
        return float(steps[0])
    share = (target - seen[at - 1]) / (seen[at] - seen[at - 1])
    return float(np.exp(np.interp(share, (0, 1), np.log(steps[at - 1 : at + 1]))))


def judge(runs, measured):
    for depth, part in runs.split("model.depth").items():
        where = f"{depth} blocks"
        yield from dead_layers(part, where)
        at = SHARED["accelerator" if part.split("data.source").keys() == {"stdlib"} else "cpu"]
        yield shallow(part.where({RATE: at}), f"{where}, rate {at:g}")


def dead_layers(runs, where):
    """C79, and why updates shrink over depth: of every arm at its best rate."""
    base = at_best(runs.where(PRE))
    treated = {name: at_best(runs.where(fields)) for name, fields in TREATMENTS.items()}
    alive = effect([dead(row) for row in base.runs.by_seed(SEEDS)])
    losses = base.runs.losses(SEEDS)
    rate = f"best rate of Pre-LN: {base.value:g}"
    yield Finding("C79/there are dead layers", (alive,), where, notes=(rate,))

    change = {name: in_ropes(one.runs.losses(SEEDS), losses) for name, one in treated.items()}
    share = {name: effect([dead(row) for row in one.runs.by_seed(SEEDS)]) for name, one in treated.items()}
    best = min(change, key=lambda name: np.nan_to_num(change[name].mean, nan=np.inf))
    less = effect(np.subtract(share[best].values, alive.values))
    told = tuple(
        f"{name}: dead {share[name].mean:.0%}, loss {change[name].mean:+.2f} ROPEs, at rate {one.value:g}"
        for name, one in treated.items()
    )
    unit = f"the ROPE is {rope(losses):.3f} nats; the best loss of the treatments is that of {best}"
    none = (
        ""
        if alive.mean >= FEWEST
        else f"Pre-LN has {alive.mean:.0%} dead blocks there, so that there is nothing to treat"
    )
    doubt = edge(not change[best].mean < -1, treated[best], base)
    yield Finding("C79/treating them helps", (less, change[best]), where, none or doubt, (unit, rate, *told))

    yield Finding(
        "C45/because the norm compresses", (effect([explained(row) for row in base.runs.by_seed(SEEDS)]),), where
    )


def shallow(runs, where):
    """C45: how soon the first layers are of use, at a rate at which both arms train."""
    pre, post = (runs.where(fields) for fields in (PRE, POST))
    multiples = []
    for one, other in zip(pre.by_seed(SEEDS), post.by_seed(SEEDS), strict=True):
        ends = [seen[-1] if len(seen := learnt(row)[1]) else np.nan for row in (one, other)]
        multiples.append(first_reaching(one, 0.9 * min(ends)) / first_reaching(other, 0.9 * min(ends)))
    note = "steps to nine tenths of the accuracy that both reach, of a straight map from the stream before blocks 1 to 3 to the next token"
    lost = [name for name, arm in (("Pre-LN", pre), ("Post-LN", post)) if not arm.trained() >= AGREEING]
    cut = f"{' and '.join(lost)} does not train there, so that there is nothing to reach" if lost else ""
    return Finding("C45/shallow layers learn slower", (effect(multiples),), where, cut, (note,))


def figure(runs, measured):
    """What the loss is worth without each block, of every arm at its best rate: every seed a dot, a line through the medians."""
    arms = {"pre_ln": PRE} | TREATMENTS | {"post_ln": POST}
    depths = list(runs.split("model.depth"))
    drawn = Figure(figsize=(2.6 * len(arms) + 0.4, 3.0 * len(depths) + 0.4), layout="constrained")
    axes = drawn.subplots(len(depths), len(arms), sharey=True, squeeze=False)
    for line, depth in zip(axes, depths, strict=True):
        for ax, (name, fields) in zip(line, arms.items(), strict=True):
            best = at_best(runs.where({"model.depth": depth} | fields))
            rows = [
                ((row or {}).get("studies") or {}).get("ablation", {}).get("delta") for row in best.runs.by_seed(SEEDS)
            ]
            known = [row for row in rows if row]
            for row in known:
                ax.plot(np.arange(len(row)), np.maximum(row, 1e-4), ".", ms=3, color="C0")
            if known:
                ax.plot(np.arange(len(known[0])), np.maximum(np.median(known, axis=0), 1e-4), color="C0", lw=1)
            ax.axhline(0.002, color="0.6", lw=0.8, ls="--")
            title = f"{name}, rate {best.value:g}\n{len(known)} of {len(rows)} runs"
            ax.set(yscale="log", ylim=(8e-5, 5), xlabel="block")
            ax.set_title(title, fontsize=9)
        line[0].set_ylabel("rise of the loss without the block, nats")
    return drawn
