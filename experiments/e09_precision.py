"""E09: how many bits of an update survive a low-precision stream, and does the loss notice?

python -m experiments.run E09
"""

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding
from experiments.judge import Predicate, difference, effect, in_ropes, rope, share
from experiments.runs import LOSS, Runs, ended, number, profile, value_of
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
LOUD = 10.0  # C73's factor on the branch
FRAGILE_AT = 24  # blocks
FRAGILE = {
    "no norm": {"model.norm": "none", "init.out_scale": 1.0},
    "gain 10": {"init.gain": 10.0},
}  # may leave float16
CUT = (
    "Depth 6, and rates other than 3e-3.",
    "C73's arm with the rate matched: whether ten times the branch helps in float32 as well is read off the float32 arm instead.",
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
        Predicate("share of it that ten times the branch does not lose itself, beside the same in float32", "above", 0.8),
    ),
    "C73/divided by ten at inference": (
        Predicate("rise of the loss when the branch is divided by ten at inference, in ROPEs", "below", 1.0),
    ),
    "C13/NaN in mixed precision": (
        Predicate(
            "share of float16 runs at 24 blocks that leave the numbers where float32 does not, without norm or of gain 10",
            "above", 0.5, agree=0.0,
        ),
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
    seeds = {"seed": SEEDS}
    loud, scaled = {"residual.scale": LOUD}, {"precision.loss_scale": "dynamic"} if variant else {}
    half = {stream: "float16"} | scaled
    streams = [{stream: usual}, {stream: "bfloat16"}, half]
    return chain(
        product({"model.depth": (12, FRAGILE_AT, 48, 200) if variant else DEPTHS}, streams, seeds),
        product({"init.embed_gain": GAINS}, streams, seeds),
        product({"init.embed_gain": GAINS[-2:]}, loud, streams, seeds),
        product(loud, {"residual.scale_eval": (None, 1.0)}, seeds),
        product({"model.depth": FRAGILE_AT}, list(FRAGILE.values()), [{stream: usual}, half], seeds),
    )


def keep(variant=None):
    return {"profiles": (30, "end"), "probes": ("update_ratio",), "studies": ("rounding",)}


PLAIN = {
    "model.depth": 12, "init.embed_gain": 1.0, "residual.scale": None, "residual.scale_eval": None, "model.norm": "layernorm",
    "init.out_scale": None, "init.gain": 0.55,
}  # fmt: skip


def arm(runs: Runs, rounded: str, fields=(), **more) -> Runs:
    """Runs of one stream: what is not named is as in PLAIN."""
    given = PLAIN | dict(fields) | {path.replace("__", "."): value for path, value in more.items()}
    return Runs(row for row in runs.where(given) if stream_of(row) == rounded)


def losses(runs: Runs) -> list[float]:
    """Of each seed the held-out loss; that of its start where it left the numbers, NaN where it did not run."""
    found = []
    for row in runs.by_seed(SEEDS):
        loss = number(row or {}, LOSS)
        found.append(loss if np.isfinite(loss) or np.isnan(ended(row)) else number(row, "first_loss"))
    return found


def decisive(found):
    """Of effects of which one above 1 is enough, and none may be: the one that decides."""
    known = [one for one in found if np.isfinite(one.interval).all()]
    if over := [one for one in known if one.interval.low > 1]:
        return max(over, key=lambda one: one.interval.low)
    if len(known) < len(found):
        return next(one for one in found if one not in known)
    return max(known, key=lambda one: one.interval.high, default=effect([]))


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

    def rise(name, **fields):
        return in_ropes(losses(arm(runs, name, **fields)), losses(arm(runs, "float32", **fields)))

    rises = {name: {gain: rise(name, init__embed_gain=gain) for gain in GAINS} for name in FORMATS}
    typical = {
        gain: np.nanmedian([np.nanmedian(profile(row, "end", "update_ratio")) for row in exact[gain]]) for gain in GAINS
    }
    inside = [rises["bfloat16"][gain] for gain, ratio in typical.items() if 0.01 <= ratio <= 0.1]
    told = tuple(
        f"gain {gain:g}: median update ratio {typical[gain]:.2g}, loss {rises['bfloat16'][gain].mean:+.2f} ROPEs, "
        f"{dict(arm(runs, 'bfloat16', init__embed_gain=gain).outcomes())}"
        for gain in GAINS
    )
    cut = "" if inside else "no gain of the embedding left the median ratio in 0.01 to 0.1"
    yield Finding("C71/loss", (decisive(inside),), notes=told, cut=cut)

    depths = runs.where({"init.gain": 0.55, "model.norm": "layernorm"}).split("model.depth")
    deep = {depth: rise("bfloat16", model__depth=depth) for depth in depths if depth <= DEPTHS[-1]}
    told = tuple(
        f"{depth} blocks: {found.mean:+.2f} [{found.interval.low:.2f}, {found.interval.high:.2f}]"
        for depth, found in deep.items()
    )
    yield Finding("C72", (decisive(list(deep.values())),), notes=told)
    for name in FORMATS:
        yield louder(runs, name, rises[name])
    yield divided(runs)
    yield leaves_the_numbers(runs)


def louder(runs, name, rises):
    """C73: is what rounding costs won back by ten times the branch, and by that because of the rounding?"""
    hurt = [gain for gain in GAINS[-2:] if rises[gain].interval.low > 1]
    if not hurt:
        cut = "rounding the stream cost no loss in the cells that have this arm"
        return Finding("C73/ten times the branch", (effect([]), effect([])), f"{name} stream", cut)
    base, loud = (
        {
            one: np.asarray(losses(arm(runs, one, init__embed_gain=hurt[0], residual__scale=scale)))
            for one in (name, "float32")
        }
        for scale in (None, LOUD)
    )
    cost = base[name] - base["float32"]
    won = effect(1 - (loud[name] - base["float32"]) / cost)
    own = effect(1 - (loud[name] - loud["float32"]) / cost)
    helps = difference(loud["float32"], base["float32"]).mean
    note = f"gain {hurt[0]:g} of the embedding; in float32 ten times the branch changes the loss by {helps:+.3f} nats"
    return Finding("C73/ten times the branch", (won, own), f"{name} stream", notes=(note,))


def divided(runs):
    """C73: can ten times the branch be taken back at inference?"""
    trained = losses(arm(runs, "float32", residual__scale=LOUD))
    taken = losses(arm(runs, "float32", residual__scale=LOUD, residual__scale_eval=1.0))
    note = f"the ROPE is {rope(trained):.3f} nats"
    return Finding("C73/divided by ten at inference", (in_ropes(taken, trained),), notes=(note,))


def leaves_the_numbers(runs):
    """C13: which float16 runs end NaN whose twins in float32 do not? Of the fragile arms the one with more of them."""

    def ends(rows):
        return np.array([ended(row, "nonfinite") for row in rows.by_seed(SEEDS)])

    hits, told = {}, []
    for name, fields in FRAGILE.items():
        half, whole = (arm(runs, stream, fields, model__depth=FRAGILE_AT) for stream in ("float16", "float32"))
        twin = ends(whole)
        hits[name] = np.where(np.isnan(twin), np.nan, ends(half) * (twin != 1))
        told.append(f"{name}: {dict(half.outcomes())}, in float32 {dict(whole.outcomes())}")
    fine = arm(runs, "float16", model__depth=FRAGILE_AT)
    worst = max(hits, key=lambda name: np.nansum(hits[name]))
    notes = (*told, f"the usual start: {dict(fine.outcomes())}", f"the first predicate is of: {worst}")
    return Finding("C13/NaN in mixed precision", (share(hits[worst]), share(ends(fine))), notes=notes)


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
            rise = difference(*(losses(arm(runs, one, init__embed_gain=gain)) for one in (name, "float32")))
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
