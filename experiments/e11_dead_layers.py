"""E11: are there dead layers after training, why, and does treating them help?

python -m experiments.run E11
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import Predicate, effect, in_ropes, rope
from experiments.runs import Runs, profile
from experiments.shared.sizes import SEEDS, sized
from resjax.health.studies.decoding import accuracies, divided, labelled
from resjax.sweeps.combine import chain, product

QUESTION = (
    "Which blocks of a trained stack does the loss not need, why do deep updates shrink, and what do remedies change?"
)
VARIANTS = ("accelerator",)
DEPTH, STEPS = 24, 1500
SETTINGS = {
    "cpu": "cpu-S with 1,500 steps, markov, 24 blocks, rate 3e-3",
    "accelerator": "acc-M, stdlib, 24 and 48 blocks, rate 1e-3",
}
CUT = (
    "12 blocks.",
    "Rates other than 3e-3: a treatment is compared with Pre-LN at a shared rate only.",
    "Post-LN, LayerScale: in the figure and in C45, of no primary predicate of C79.",
)
PRE = {"residual.name": "pre_ln"}
POST = {"residual.name": "post_ln"}
TREATMENTS = {
    "LNS": {"residual.name": "lns"},
    "norm on the branch's output": {"residual.name": "sandwich_branch"},
    "longer warm-up": PRE | {"optimizer.warmup": 450},
}
OTHERS = {
    "post_ln": POST,
    "layerscale": {"residual.name": "layerscale"},
    "pre_ln, no scaled start": PRE | {"init.out_scale": 1.0},
}
EARLY = (1, 2, 3)  # before which blocks the first layers' work is read

PREDICATES = {
    "C79/there are dead layers": (
        Predicate("share of dead blocks in the second half of a trained Pre-LN stack", "above", 0.1),
    ),
    "C79/treating them helps": (
        Predicate("change of the share of dead blocks by the treatment with the best loss", "below", -0.01),
        Predicate("change of the loss by it, in ROPEs", "below", -1.0),
    ),
    "C45/because the norm compresses": (
        Predicate("share of the fall of update ratios over depth that the growth of the trunk explains", "below", 0.8),
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
    arms = chain(PRE, *TREATMENTS.values(), *OTHERS.values())
    return product({"model.depth": (DEPTH, 48) if variant else DEPTH}, arms, {"seed": SEEDS})


def early(subject: Any, before: Any) -> dict[str, Any]:
    """What can be read off the stream before blocks 1 to 3: mean accuracy of a straight map to the next token (M5)."""
    if subject.config.residual.name not in (PRE["residual.name"], POST["residual.name"]):
        return {}
    sequences = subject.batches.reshape(-1, subject.batches.shape[-1])
    parts, following = divided(*sequences.shape), labelled(sequences)[3:4]
    seen = [
        np.concatenate([np.asarray(x, np.float32)[i, :, 1:] for x in subject.streams(EARLY)]) for i in range(len(EARLY))
    ]
    return {"next token": float(np.mean([accuracies(one, following, parts) for one in seen]))}


def keep(variant=None):
    every = 1000 if variant else 150
    return {
        "curves": True,
        "profiles": ("end",),
        "probes": ("update_ratio", "update_rms", "stream_rms"),
        "studies": ("ablation", "similarity"),
        "looks": {"steps": tuple(range(every, (20_000 if variant else STEPS) + 1, every)), "look": early},
    }


def arm(runs: Runs, fields: dict) -> Runs:
    usual = {"init.out_scale": None, "optimizer.warmup": (150, 2000)}
    return runs.where(usual | fields)


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


def first_reaching(row, target: float) -> float:
    """The first look at which the first layers are as good as ``target``; NaN where they never are."""
    looks = (row or {}).get("looks") or {}
    return min((int(step) for step, found in looks.items() if found.get("next token", 0) >= target), default=np.nan)


def last_look(row) -> float:
    looks = (row or {}).get("looks") or {}
    return looks[max(looks, key=int)].get("next token", np.nan) if looks else np.nan


def judge(runs, measured):
    base = arm(runs, PRE)
    alive = effect([dead(row) for row in base.by_seed(SEEDS)])
    yield Finding("C79/there are dead layers", (alive,))

    treated = {name: arm(runs, fields) for name, fields in TREATMENTS.items()}
    change = {name: in_ropes(there.losses(SEEDS), base.losses(SEEDS)) for name, there in treated.items()}
    share = {name: effect([dead(row) for row in there.by_seed(SEEDS)]) for name, there in treated.items()}
    best = min(change, key=lambda name: np.nan_to_num(change[name].mean, nan=np.inf))
    less = effect(np.subtract(share[best].values, alive.values))
    told = tuple(f"{name}: dead {share[name].mean:.0%}, loss {change[name].mean:+.2f} ROPEs" for name in treated)
    unit = f"the ROPE is {rope(base.losses(SEEDS)):.3f} nats; the best loss is that of {best}"
    yield Finding("C79/treating them helps", (less, change[best]), notes=(unit, *told))

    yield Finding("C45/because the norm compresses", (effect([explained(row) for row in base.by_seed(SEEDS)]),))
    multiples = []
    for pre, post in zip(base.by_seed(SEEDS), arm(runs, POST).by_seed(SEEDS), strict=True):
        target = 0.9 * min(last_look(pre), last_look(post))
        multiples.append(first_reaching(pre, target) / first_reaching(post, target))
    note = "steps to nine tenths of the accuracy that both reach, of a straight map from the stream before blocks 1 to 3 to the next token"
    yield Finding("C45/shallow layers learn slower", (effect(multiples),), notes=(note,))


def figure(runs, measured):
    arms = {"pre_ln": PRE} | TREATMENTS | OTHERS
    drawn = Figure(figsize=(2.6 * len(arms), 3.4), layout="constrained")
    for ax, (name, fields) in zip(drawn.subplots(1, len(arms), sharey=True), arms.items(), strict=True):
        rows = [
            ((row or {}).get("studies") or {}).get("ablation", {}).get("delta")
            for row in arm(runs, fields).by_seed(SEEDS)
        ]
        known = [row for row in rows if row]
        for row in known:
            ax.plot(np.arange(len(row)), np.maximum(row, 1e-4), ".", ms=3, color="C0")
        if known:
            ax.plot(np.arange(len(known[0])), np.maximum(np.median(known, axis=0), 1e-4), color="C0", lw=1)
        ax.axhline(0.002, color="0.6", lw=0.8, ls="--")
        ax.set(yscale="log", ylim=(8e-5, 5), xlabel="block", title=f"{name}\n{len(known)} of {len(rows)} runs")
    drawn.axes[0].set_ylabel("rise of the loss without the block, nats")
    return drawn
