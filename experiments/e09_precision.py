"""E09: how many bits of an update survive a low-precision stream, and does the loss notice?

python -m experiments.run E09
"""

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import Predicate, difference, effect, in_ropes, rope, share
from experiments.runs import Runs, ended, profile, value_of
from experiments.shared.sizes import SEEDS, sized
from resjax.sweeps.combine import chain, product

QUESTION = "What does a stream in half precision lose of its updates, and what does the loss lose?"
VARIANTS = ("accelerator",)
SETTINGS = {
    "cpu": "cpu-S, markov, rate 3e-3, only the adds rounded (emulated)",
    "accelerator": "acc-S, markov, native streams with a dynamic loss scale",
}
GAINS = (1.0, 10.0, 100.0, 1000.0)  # of the embedding: they set the trunk against its updates
DEPTHS = (12, 24, 48)
FORMATS = {"bfloat16": 7, "float16": 10}  # stored bits of the mantissa
STREAMS = ("float32", "bfloat16")
LOUD = 10.0  # C73's factor on the branch
CUT = (
    "Depth 6, and rates other than 3e-3.",
    "C73's arm with the rate matched: that ten times the branch helps in float32 as well is read off the float32 arm instead.",
)

PREDICATES = {
    "C71/bits in bfloat16": (
        Predicate("share of sites with a trunk 10 to 100 times the update that lose over a tenth of it", "above", 0.9),
    ),
    "C71/bits in float16": (
        Predicate("share of sites with a trunk 10 to 100 times the update that lose over a tenth of it", "above", 0.9),
    ),
    "C71/loss": (
        Predicate("rise of the loss under a bfloat16 stream whose updates are 10 to 100 times smaller, in ROPEs", "above", 1.0, other=1.0),
    ),
    "C72": (Predicate("largest rise of the loss under a bfloat16 stream at 12 to 48 blocks, in ROPEs", "above", 1.0, other=1.0),),
    "C73/ten times the branch": (
        Predicate("share of the loss lost to rounding that ten times the branch wins back", "above", 0.8),
    ),
    "C73/divided by ten at inference": (
        Predicate("rise of the loss when the branch is divided by ten at inference, in ROPEs", "below", 1.0),
    ),
    "C13/NaN in mixed precision": (
        Predicate("share of float16 runs at 24 blocks without norm, or of gain 10, that leave the numbers", "above", 0.5, agree=0.0),
        Predicate("share of float16 Pre-LN runs at the usual start that do", "below", 0.5),
    ),
}  # fmt: skip


def get_config(variant=None):
    config = sized("acc-S" if variant else "cpu-S")
    config.health.groups = ("forward", "backward", "precision")
    return config


def sweep(variant=None):
    stream = "precision.stream" if variant else "precision.rounding"
    usual = "float32" if variant else "none"
    formats, seeds = {stream: [usual, *FORMATS]}, {"seed": SEEDS}
    loud = {"residual.scale": LOUD}
    half = {stream: "float16"} | ({"precision.loss_scale": "dynamic"} if variant else {})
    depths = (12, 48, 200) if variant else DEPTHS
    return chain(
        product({"model.depth": depths}, formats, seeds),
        product({"init.embed_gain": GAINS}, formats, seeds),
        product({"init.embed_gain": GAINS[-2:]}, loud, {stream: [usual, "bfloat16"]}, seeds),
        product(loud, {"residual.scale_eval": (None, 1.0)}, seeds),
        product(
            half, {"model.depth": 24}, chain({"model.norm": "none", "init.out_scale": 1.0}, {"init.gain": 10.0}), seeds
        ),
    )


def keep(variant=None):
    return {"profiles": (30, "end"), "probes": ("update_ratio",), "studies": ("rounding",)}


PLAIN = {
    "model.depth": 12, "init.embed_gain": 1.0, "residual.scale": None, "residual.scale_eval": None, "model.norm": "layernorm",
    "init.out_scale": None, "init.gain": 0.55,
}  # fmt: skip


def arm(runs: Runs, rounded: str, **fields) -> Runs:
    """Runs of one stream: what is not named is as in PLAIN."""
    given = PLAIN | {path.replace("__", "."): value for path, value in fields.items()}
    emulated = [row for row in runs.where(given) if stream_of(row) == rounded]
    return Runs(emulated)


def stream_of(row) -> str:
    """'float32', 'bfloat16' or 'float16', emulated or native."""
    emulated, native = value_of(row, "precision.rounding"), value_of(row, "precision.stream")
    return emulated if emulated != "none" else "float32" if native == "auto" else native


def lost(row, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Of every site of a trained model its update ratio, and the share of the update that a stream of that format would lose."""
    bits = np.asarray(
        (row.get("studies") or {}).get("rounding", {}).get("formats", {}).get(name, {}).get("effective_bits", []), float
    )
    ratios = profile(row, "end", "update_ratio")
    return (ratios.ravel(), 2.0 ** -bits.ravel()) if bits.size == ratios.size else (np.array([]), np.array([]))


def judge(runs, measured):
    exact = {gain: arm(runs, "float32", init__embed_gain=gain) for gain in GAINS}
    for name in FORMATS:
        shares = []
        for seed in SEEDS:
            pairs = [lost(row, name) for there in exact.values() for row in there.where({"seed": seed})]
            ratios, errors = (np.concatenate([pair[i] for pair in pairs]) if pairs else np.array([]) for i in (0, 1))
            inside = (ratios >= 0.01) & (ratios <= 0.1)
            shares.append(float(np.mean(errors[inside] > 0.1)) if inside.any() else np.nan)
        yield Finding(
            f"C71/bits in {name}",
            (effect(shares),),
            notes=("sites of all gains of the embedding, at the end of training",),
        )

    rises = {
        gain: in_ropes(arm(runs, "bfloat16", init__embed_gain=gain).losses(SEEDS), exact[gain].losses(SEEDS))
        for gain in GAINS
    }
    typical = {
        gain: np.nanmedian([np.nanmedian(profile(row, "end", "update_ratio")) for row in exact[gain]]) for gain in GAINS
    }
    inside = {gain: rises[gain] for gain, ratio in typical.items() if 0.01 <= ratio <= 0.1}
    told = tuple(
        f"gain {gain:g}: median update ratio {typical[gain]:.2g}, loss {rises[gain].mean:+.2f} ROPEs, "
        f"{dict(arm(runs, 'bfloat16', init__embed_gain=gain).outcomes())}"
        for gain in GAINS
    )
    worst = max(inside.values(), key=lambda found: found.mean, default=effect([]))
    yield Finding(
        "C71/loss",
        (worst,),
        notes=told,
        cut="" if inside else "no gain of the embedding left the median ratio in 0.01 to 0.1",
    )

    deep = {
        depth: in_ropes(
            arm(runs, "bfloat16", model__depth=depth).losses(SEEDS),
            arm(runs, "float32", model__depth=depth).losses(SEEDS),
        )
        for depth in runs.where({"init.gain": 0.55, "model.norm": "layernorm"}).split("model.depth")
    }
    told = tuple(
        f"{depth} blocks: {found.mean:+.2f} [{found.interval.low:.2f}, {found.interval.high:.2f}]"
        for depth, found in deep.items()
    )
    yield Finding("C72", (max(deep.values(), key=lambda found: found.mean),), notes=told)
    yield from louder(runs, exact, rises)

    bad = [
        *arm(runs, "float16", model__depth=24, model__norm="none", init__out_scale=1.0),
        *arm(runs, "float16", model__depth=24, init__gain=10.0),
    ]
    fine = arm(runs, "float16", model__depth=24)
    yield Finding(
        "C13/NaN in mixed precision",
        tuple(share([ended(row, "nonfinite") for row in rows]) for rows in (bad, fine)),
        notes=(f"{dict(Runs(bad).outcomes())} and {dict(fine.outcomes())}",),
    )


def louder(runs, exact, rises):
    """C73: is what rounding costs won back by ten times the branch, and can it be taken back at inference?"""
    hurt = [gain for gain in GAINS[-2:] if rises[gain].interval.low > 1]
    won, notes = effect([]), ()
    if hurt:
        base, loud = (
            {name: arm(runs, name, init__embed_gain=hurt[0], residual__scale=scale).losses(SEEDS) for name in STREAMS}
            for scale in (None, LOUD)
        )
        costs = [difference(arms["bfloat16"], arms["float32"]).values for arms in (base, loud)]
        won = effect([1 - still / before for before, still in zip(*costs, strict=True)])
        helps = difference(loud["float32"], base["float32"]).mean
        notes = (
            f"gain {hurt[0]:g} of the embedding; in float32 ten times the branch changes the loss by {helps:+.3f} nats",
        )
    cut = "" if hurt else "rounding the stream cost no loss in the cells that have this arm"
    yield Finding("C73/ten times the branch", (won,), notes=notes, cut=cut)

    trained = arm(runs, "float32", residual__scale=LOUD).losses(SEEDS)
    divided = arm(runs, "float32", residual__scale=LOUD, residual__scale_eval=1.0).losses(SEEDS)
    notes = (f"the ROPE is {rope(trained):.3f} nats",)
    yield Finding("C73/divided by ten at inference", (in_ropes(divided, trained),), notes=notes)


def figure(runs, measured):
    drawn = Figure(figsize=(9, 4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    ratio = np.geomspace(1e-5, 1, 100)
    for (name, bits), color in zip(FORMATS.items(), ("C0", "C1"), strict=True):
        # rounding to a spacing of 2^-bits: uniform error of that width, against an update of this ratio
        left.plot(
            ratio, np.log2(ratio * np.sqrt(12)) + bits + 0.5, color=color, lw=1, label=f"{name}, uniform rounding error"
        )
        for row in runs:
            if stream_of(row) == "float32":
                x, e = lost(row, name)
                left.plot(x, -np.log2(e), ".", color=color, ms=2, alpha=0.5)
    left.axvspan(0.01, 0.1, color="0.92", zorder=0)
    left.set(
        xscale="log", xlabel="update / trunk", ylabel="effective bits of the update", xlim=(1e-5, 1), ylim=(-1, 12)
    )
    left.legend(frameon=False, fontsize=8)
    for gain, marker in zip(GAINS, "osv^", strict=True):
        for name, color in zip(FORMATS, ("C0", "C1"), strict=True):
            rise = difference(
                arm(runs, name, init__embed_gain=gain).losses(SEEDS),
                arm(runs, "float32", init__embed_gain=gain).losses(SEEDS),
            )
            right.plot(
                [gain] * len(rise.values),
                rise.values,
                marker,
                color=color,
                mfc="none",
                label=name if gain == 1 else None,
            )
    right.axhline(0, color="0.6", lw=0.8)
    right.set(
        xscale="log",
        xlabel="gain of the embedding",
        xlim=(GAINS[0] / 2, GAINS[-1] * 2),
        ylabel="loss less that of float32, nats per token",
    )
    right.legend(frameon=False, fontsize=8)
    return drawn
