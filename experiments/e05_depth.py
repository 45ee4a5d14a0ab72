"""E05: how deep can a stack be, and does a near-zero start make the difference? The Transformer part.

python -m experiments.run E05
"""

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import Predicate, effect, share
from experiments.runs import Runs, ended, number, profile
from experiments.shared.sizes import SEEDS, sized
from resjax.sweeps.combine import chain, product

QUESTION = "Which residual schemes train at 12 to 1,000 blocks, and is a near-zero start what makes it possible?"
VARIANTS = ("accelerator",)
SETTINGS = {
    "cpu": "width 16, 128 tokens a step, 600 steps, markov",
    "accelerator": "width 64, 2,048 tokens a step, 2,000 steps, markov",
}
RATES, LOWER = (3e-3, 1e-2), (1e-3, 3e-3)  # the lower ones where depth may ask for them
SHALLOW, SOME, DEEP = 12, 48, 128
THOUSAND = 1000
CUT = (
    "Depths 256 and 512; 48 blocks but for Pre-LN.",
    "At 1,000 blocks only Pre-LN and ReZero, at one rate and for 500 steps: of the other arms C21 is judged up to 128 blocks, and if "
    "ReZero fails at 1,000 blocks, another rate or LayerScale might not (C52 is then undecided).",
    "At 128 blocks a second rate of ReZero, LayerScale and DeepNorm; Sandwich-LN and the scaled start without norms.",
    "Half precision at 1,000 blocks (the accelerator scale has it).",
    "CNN and MLP: C21 is judged for Transformers alone.",
)
RESIDUAL = {
    "pre_ln": {"residual.name": "pre_ln"},
    "post_ln": {"residual.name": "post_ln"},
    "no norm": {"residual.name": "pre_ln", "model.norm": "none", "init.out_scale": 1.0},
    "no norm, scaled start": {"residual.name": "pre_ln", "model.norm": "none"},
    "rezero": {"residual.name": "rezero"},
    "layerscale": {"residual.name": "layerscale", "residual.scale": 1e-4},
    "deepnorm": {"residual.name": "deepnorm"},
    "sandwich_branch": {"residual.name": "sandwich_branch"},
}
AT_THOUSAND = ("pre_ln", "rezero")
BRITTLE, STURDY = ("post_ln", "no norm"), ("rezero", "layerscale", "deepnorm")  # arms beside Pre-LN at 128 blocks

PREDICATES = {
    "C52": (
        Predicate(
            "share of seeds at 1,000 blocks that train under the better of ReZero and LayerScale",
            "above",
            0.3,
            other=0.45,
        ),
    ),
    "C21": (
        Predicate(
            "share of seeds that train at the best rate, of the scheme with a skip and the depth where they are fewest",
            "above",
            0.3,
            other=0.45,
        ),
    ),
    "C06": (Predicate("change of Pre-LN's best held-out loss for four times the blocks, nats", "below", 0.0),),
    "C13/explosion or vanishing": (
        Predicate(
            "share of the runs that did not train whose stream gradient spreads over more than 1e4 from block to block",
            "above",
            0.0,
            other=0.05,
            agree=0.0,
        ),
    ),
    "C13/degraded deep representations": (
        Predicate(
            "share of the runs that did not train whose tokens have all become the same",
            "above",
            0.0,
            other=0.05,
            agree=0.0,
        ),
    ),
}


def get_config(variant=None):
    if variant:
        return sized(
            "acc-S",
            model__width=64,
            model__heads=4,
            data__length=64,
            data__batch=32,
            train__steps=2000,
            model__remat="full",
        )
    return sized("cpu-S", model__width=16, model__heads=2, data__length=16, data__batch=8)


def sweep(variant=None):
    if variant:
        streams = {"precision.stream": ["float32", "bfloat16"]}
        rates = {"optimizer.lr": (1e-3, 3e-3, 1e-2), "seed": SEEDS}
        return product({"model.depth": (96, 200, 500, 1000)}, chain(*RESIDUAL.values()), streams, rates)
    seeds, deep = {"seed": SEEDS}, {"model.depth": DEEP}
    few = {"model.depth": THOUSAND, "optimizer.lr": RATES[0], "train.steps": 500, "optimizer.warmup": 50}
    return chain(
        product({"model.depth": (SHALLOW, SOME, DEEP)}, RESIDUAL["pre_ln"], {"optimizer.lr": RATES}, seeds),
        product({"model.depth": SHALLOW}, chain(*_but("pre_ln")), {"optimizer.lr": RATES}, seeds),
        product(deep, chain(*(RESIDUAL[name] for name in BRITTLE)), {"optimizer.lr": LOWER}, seeds),
        product(deep, chain(*(RESIDUAL[name] for name in STURDY)), {"optimizer.lr": RATES[0]}, seeds),
        product(few, chain(*(RESIDUAL[name] for name in AT_THOUSAND)), seeds),
    )


def _but(left_out):
    return [fields for name, fields in RESIDUAL.items() if name != left_out]


def keep(variant=None):
    return {"profiles": (1, "end"), "probes": ("stream_grad",)}


def arm(runs: Runs, name: str) -> Runs:
    return runs.where({"model.norm": "layernorm", "init.out_scale": None, "residual.scale": None} | RESIDUAL[name])


def spread(row) -> float:
    """Largest by smallest stream gradient over the blocks at the last measured step; NaN where none is known."""
    found = profile(row, "end", "stream_grad").ravel()
    found = found[np.isfinite(found)]
    if not found.size:
        return np.nan
    return float(found.max() / found.min()) if found.min() > 0 else np.inf


def judge(runs, measured):
    deepest = runs.where({"model.depth": THOUSAND})
    tried = [name for name in (*AT_THOUSAND, "layerscale") if len(arm(deepest, name))]
    shares = {name: share([ended(row, "trained") for row in arm(deepest, name).best().runs]) for name in tried}
    name = max((one for one in tried if one != "pre_ln"), key=lambda one: np.nan_to_num(shares[one].mean))
    notes = [f"{one}: {np.nansum(found.values):.0f} of {len(found.values)} seeds" for one, found in shares.items()]
    if shares["pre_ln"].mean >= shares[name].mean:
        notes.append("plain Pre-LN does as well, so that the near-zero start was not needed here")
    one_rate = len(deepest.split("optimizer.lr")) == 1 and not all(shares[name].values)
    yield Finding(
        "C52", (shares[name],), notes=tuple(notes), cut="one rate was tried at this depth" if one_rate else ""
    )

    fewest, lost, doubt = share([np.nan]), [], ""
    for scheme in RESIDUAL:
        for depth, there in arm(runs, scheme).split("model.depth").items():
            best = there.best().runs
            trained = share([ended(row, "trained") for row in best])
            one_rate = len(there.split("optimizer.lr")) == 1
            if not all(trained.values):
                lost.append(f"{scheme} at {depth} blocks: {dict(best.outcomes())}")
                doubt = f"{scheme} fails at {depth} blocks, where one rate was tried" if one_rate else doubt
            if all(trained.values) or not one_rate:
                fewest = min(fewest, trained, key=lambda found: np.nan_to_num(found.mean, nan=np.inf))
    yield Finding("C21", (fewest,), notes=tuple(lost), cut=doubt if all(fewest.values) else "")

    depths = {depth: there.best() for depth, there in arm(runs, "pre_ln").split("model.depth").items() if depth <= DEEP}
    slopes = [
        float(np.polyfit(np.log(list(depths)) / np.log(4), losses, 1)[0])
        for losses in zip(*(best.runs.losses(SEEDS) for best in depths.values()), strict=True)
    ]
    told = ", ".join(
        f"{np.mean(best.runs.losses()):.3f} at {depth} blocks ({best.value:g})" for depth, best in depths.items()
    )
    yield Finding("C06", (effect(slopes),), notes=(told,))

    failed = [row for row in runs if ended(row, "trained") == 0]
    yield Finding("C13/explosion or vanishing", (share([spread(row) > 1e4 for row in failed]),))
    same = [number(row, "token_cosine") > 0.98 for row in failed]
    yield Finding("C13/degraded deep representations", (share(same),))


def figure(runs, measured):
    drawn = Figure(figsize=(9, 4.5), layout="constrained")
    ax = drawn.subplots()
    depths = sorted(runs.split("model.depth"))
    for i, name in enumerate(RESIDUAL):
        shift = (i - len(RESIDUAL) / 2) / len(RESIDUAL) * 0.7
        color, marker = f"C{i}", "osv^D<>p"[i % 8]
        for depth, there in arm(runs, name).split("model.depth").items():
            best = there.best().runs
            at = [depths.index(depth) + shift] * len(best)
            losses = np.asarray(best.losses())
            lost = ~np.isfinite(losses)
            ax.plot(
                np.asarray(at)[~lost],
                losses[~lost],
                marker,
                color=color,
                ms=5,
                mfc="none",
                label=name if depth == SHALLOW else None,
            )
            ax.plot(
                np.asarray(at)[lost],
                np.full(lost.sum(), 1.0),
                "x",
                color=color,
                transform=ax.get_xaxis_transform(),
                clip_on=False,
            )
    floors = next((row["floors"] for row in runs if row.get("floors")), {})
    for label, value in floors.items():
        ax.axhline(value, color="0.6", lw=0.8, ls="--")
        ax.annotate(
            label,
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    ax.set_xlabel("blocks")
    ax.set_ylabel("held-out loss at the best rate, nats per token")
    drawn.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawn
