"""E05: how deep can a stack be, and does a near-zero start make the difference? The Transformer part.

python -m experiments.run E05
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import LEAST, Effect, Predicate, effect, rope, share
from experiments.runs import RATE, Runs, ended, number, profile
from experiments.shared.sizes import SEEDS, sized
from experiments.shared.skips import edge
from resjax.sweeps.combine import chain, product

QUESTION = "Which residual schemes train at 12 to 1,000 blocks, and is a near-zero start what makes it possible?"
VARIANTS = ("accelerator",)
SETTINGS = {
    "cpu": "width 16, 256 tokens a step, 600 steps (350 at 1,000 blocks), markov",
    "accelerator": "width 64, 2,048 tokens a step, 2,000 steps, markov",
}
RATES, LOWER, MORE = (3e-3, 1e-2), (1e-3, 3e-3), 3e-2  # the lower ones where depth may ask for them
SHALLOW, SOME, DEEP = 12, 48, 128
THOUSAND = 1000
CUT = (
    "Depths 256 and 512; 48 blocks but for Pre-LN.",
    "At 1,000 blocks only Pre-LN and ReZero, at one rate and for 350 steps: of the other arms C21 is judged up to 128 blocks, and if "
    "ReZero fails at 1,000 blocks, another rate or LayerScale might not (C52 is then undecided).",
    "At 128 blocks Sandwich-LN and the scaled start without norms; more than one rate of ReZero, LayerScale, DeepNorm "
    "and of no norms, more than two (lower ones) of Post-LN. A scheme that fails at the one rate tried decides nothing.",
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
AT_ONE_RATE = {"no norm": LOWER[0], "rezero": RATES[0], "layerscale": RATES[0], "deepnorm": RATES[0]}  # of 128 blocks

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
    "C06/can be stacked": (
        Predicate(
            "share of seeds of Pre-LN that train, at the depth of up to 128 blocks where they are fewest",
            "above",
            0.3,
            other=0.45,
        ),
    ),
    "C06/deeper is better": (
        Predicate("change of Pre-LN's best held-out loss for four times the blocks, in ROPEs", "below", -1.0),
    ),
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
    return sized("cpu-S", model__width=16, model__heads=2, data__length=16, data__batch=16)


def sweep(variant=None):
    if variant:
        streams = {"precision.stream": ["float32", "bfloat16"]}
        rates = {"optimizer.lr": (*LOWER, RATES[-1]), "seed": SEEDS}
        return product({"model.depth": (96, 200, 500, 1000)}, chain(*RESIDUAL.values()), streams, rates)
    seeds, deep = {"seed": SEEDS}, {"model.depth": DEEP}
    few = {"model.depth": THOUSAND, "optimizer.lr": RATES[0], "train.steps": 350, "optimizer.warmup": 35}
    return chain(
        product({"model.depth": (SHALLOW, SOME, DEEP)}, RESIDUAL["pre_ln"], {"optimizer.lr": RATES}, seeds),
        product({"model.depth": SHALLOW}, chain(*_but("pre_ln")), {"optimizer.lr": RATES}, seeds),
        product(deep, RESIDUAL["post_ln"], {"optimizer.lr": LOWER}, seeds),
        product({"model.depth": (SHALLOW, SOME)}, RESIDUAL["pre_ln"], {"optimizer.lr": MORE}, seeds),
        product(deep, RESIDUAL["pre_ln"], {"optimizer.lr": LOWER[0]}, seeds),
        *(product(deep, RESIDUAL[name], {"optimizer.lr": rate}, seeds) for name, rate in AT_ONE_RATE.items()),
        product(few, chain(*(RESIDUAL[name] for name in AT_THOUSAND)), seeds),
    )


def _but(left_out):
    return [fields for name, fields in RESIDUAL.items() if name != left_out]


def keep(variant=None):
    # the ratio at step 30 is for E10's pool
    return {"profiles": (1, 30, "end"), "probes": ("stream_grad", "update_ratio")}


def arm(runs: Runs, name: str) -> Runs:
    return runs.where({"model.norm": "layernorm", "init.out_scale": None, "residual.scale": None} | RESIDUAL[name])


def spread(row) -> float:
    """Largest by smallest stream gradient over the blocks at the last measured step; NaN where none is known."""
    found = profile(row, "end", "stream_grad").ravel()
    if np.isinf(found).any():
        return np.inf
    found = found[np.isfinite(found)]
    if not found.size:
        return np.nan
    return float(found.max() / found.min()) if found.min() > 0 else np.inf


def most_trained(runs: Runs) -> Runs:
    """The runs at the rate at which most seeds train; of several such the one with the lowest loss."""
    parts = runs.split(RATE).values()

    def order(part: Runs) -> tuple[float, float]:
        loss = float(np.mean(part.losses()))
        return -part.trained(), loss if np.isfinite(loss) else np.inf

    return min(parts, key=order)


def trained(runs: Runs) -> Effect:
    """Share of seeds that train."""
    return share([ended(row, "trained") for row in runs.by_seed(SEEDS)])


def most(found: Effect) -> bool:
    return np.nansum(found.values) >= LEAST - 1


def judge(runs, measured):
    streams = runs.split("precision.stream")
    for stream, part in streams.items():
        where = f"{stream} stream" if len(streams) > 1 else ""
        for found in (thousand(part), no_limit(part), *stacked(part)):
            yield replace(found, settings=", ".join(filter(None, (where, found.settings))))
    failed = [row for row in runs if ended(row, "trained") == 0]
    for claim, number_of, bound in (
        ("C13/explosion or vanishing", spread, 1e4),
        ("C13/degraded deep representations", lambda row: number(row, "token_cosine"), 0.98),
    ):
        seen = np.array([number_of(row) for row in failed], float)
        yield Finding(claim, (share(np.where(np.isnan(seen), np.nan, seen > bound)),))


def thousand(runs: Runs) -> Finding:
    """C52: do near-zero starts train at 1,000 blocks?"""
    deepest = runs.where({"model.depth": THOUSAND})
    tried = [name for name in (*AT_THOUSAND, "layerscale") if len(arm(deepest, name))]
    shares = {name: trained(most_trained(arm(deepest, name))) for name in tried}
    name = max((one for one in tried if one != "pre_ln"), key=lambda one: np.nan_to_num(shares[one].mean))
    notes = [f"{one}: {np.nansum(found.values):.0f} of {len(found.values)} seeds" for one, found in shares.items()]
    if shares["pre_ln"].mean >= shares[name].mean:
        notes.append("plain Pre-LN does as well, so that the near-zero start was not needed here")
    one_rate = len(deepest.split(RATE)) == 1 and not most(shares[name])
    cut = "one rate was tried at this depth" if one_rate else ""
    return Finding("C52", (shares[name],), f"{THOUSAND:,} blocks", cut, tuple(notes))


def no_limit(runs: Runs) -> Finding:
    """C21: of all schemes with a skip that train at the least depth, where do the fewest seeds train?"""
    fewest, notes, doubt = share([np.nan]), [], ""
    least = min(runs.split("model.depth"), default=SHALLOW)
    for scheme in RESIDUAL:
        depths = arm(runs, scheme).split("model.depth")
        if not depths or not most(trained(most_trained(depths[least]))):
            notes.append(f"{scheme} does not train at {least} blocks either, so that nothing is said of its depth")
            continue
        for depth, there in depths.items():
            best = most_trained(there)
            found, one_rate = trained(best), len(there.split(RATE)) == 1
            if not all(found.values):
                notes.append(f"{scheme} at {depth} blocks: {dict(best.outcomes())}")
            if not most(found) and one_rate:
                doubt = f"{scheme} fails at {depth} blocks, where one rate was tried"
            else:
                fewest = min(fewest, found, key=lambda one: np.nan_to_num(one.mean, nan=np.inf))
    return Finding("C21", (fewest,), notes=tuple(notes), cut=doubt if most(fewest) else "")


def stacked(runs: Runs) -> Iterator[Finding]:
    """C06: does Pre-LN train at any depth up to 128 blocks, and is deeper better?"""
    depths = {depth: part for depth, part in arm(runs, "pre_ln").split("model.depth").items() if depth <= DEEP}
    shares = [trained(most_trained(part)) for part in depths.values()]
    yield Finding(
        "C06/can be stacked", (min(shares, key=lambda one: np.nan_to_num(one.mean, nan=np.inf), default=share([])),)
    )
    best = {depth: part.best() for depth, part in depths.items()}
    losses = [one.runs.losses(SEEDS) for one in best.values()]
    if len(best) < 2:
        yield Finding("C06/deeper is better", (effect([]),), cut="Pre-LN was trained at one depth of up to 128 blocks")
        return
    unit = rope(losses[0])
    slopes = [float(np.polyfit(np.log(list(best)) / np.log(4), of_seed, 1)[0]) for of_seed in zip(*losses, strict=True)]
    found = effect(np.divide(slopes, unit))
    told = ", ".join(
        f"{np.mean(one.runs.losses()):.3f} at {depth} blocks ({one.value:g})" for depth, one in best.items()
    )
    shallow, deep = best[min(best)], best[max(best)]
    yield Finding(
        "C06/deeper is better",
        (found,),
        notes=(told, f"a ROPE is {unit:.3f} nats"),
        cut=edge(not found.mean < -1, deep, shallow),
    )


def figure(runs, measured):
    """Held-out loss at the best rate by depth and scheme, every seed; where streams were varied, that of the first.

    Crosses at the top edge are losses above it, and runs that left the numbers.
    """
    drawn = Figure(figsize=(9, 4.5), layout="constrained")
    ax = drawn.subplots()
    runs = next(iter(runs.split("precision.stream").values()), runs)
    depths = sorted(runs.split("model.depth"))
    floors = next((row["floors"] for row in runs if row.get("floors")), {})
    top = max(floors.values(), default=np.inf) + 0.25  # where runs have no floors, all is drawn
    for i, name in enumerate(RESIDUAL):
        shift = (i - len(RESIDUAL) / 2) / len(RESIDUAL) * 0.7
        color, marker = f"C{i}", "osv^D<>p"[i % 8]
        for depth, there in arm(runs, name).split("model.depth").items():
            best = there.best().runs
            at = [depths.index(depth) + shift] * len(best)
            losses = np.asarray(best.losses())
            lost = ~(losses <= top)
            ax.plot(
                np.asarray(at)[~lost],
                losses[~lost],
                marker,
                color=color,
                ms=5,
                mfc="none",
                label=name if depth == depths[0] else None,
            )
            ax.plot(
                np.asarray(at)[lost],
                np.full(lost.sum(), 1.0),
                "x",
                color=color,
                transform=ax.get_xaxis_transform(),
                clip_on=False,
            )
    ax.plot([], [], "kx", label="above, or not finite")
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
    if np.isfinite(top):
        ax.set_ylim(top=top)
    ax.set_xlabel("blocks")
    ax.set_ylabel("held-out loss at the best rate, nats per token")
    drawn.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawn
