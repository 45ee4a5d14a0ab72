"""E08: what does a larger standard deviation of the initial weights do, and does it depend on depth?

python -m experiments.run E08

Without training: loss and stream by depth. Trained: a small grid, Adam and SGD, with the literal std 0.02 to 0.2 and with the gains
std x sqrt(768) that these are at width 768.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Finding, Measured, Rows
from experiments.judge import LEAST, Predicate, effect, rope, share
from experiments.runs import Runs, ending, number, profile
from experiments.shared import starts
from experiments.shared.benefit import benefit
from experiments.shared.seen import counted, told
from experiments.shared.sizes import RATES4, SEEDS, sized
from experiments.shared.skips import MOST, at_best
from resjax.health.studies import Subject
from resjax.health.studies.update import update
from resjax.propagation.measured import measured_at
from resjax.residual import KERNEL_ROLES
from resjax.residual.parameters import is_variable
from resjax.sweeps.combine import chain, product

QUESTION = "Does a tenfold initial standard deviation harm a network only when it is deep?"
DEPTHS, SHALLOW, DEEP, SMOKE_DEPTHS = (4, 8, 16, 24, 48), (4, 8), (24, 48), (4, 24)
FEW, MANY = 4, 24  # blocks of trained networks
SMALL, LARGE = {"std": 0.02, "gain": 0.554}, {"std": 0.2, "gain": 5.54}
STDS = (0.02, 0.05, 0.1, 0.2)
MIDDLE = {"std": 0.1, "gain": 0.554}  # at which a stream of width 64 grows enough to tell how
NORMS: dict[str, dict[str, Any]] = {
    "Pre-LN": {"residual.name": "pre_ln"},
    "Post-LN": {"residual.name": "post_ln"},
    "no norms": {"residual.name": "pre_ln", "model.norm": "none"},
}
WIDTH, SYMBOLS = 64, 32
ONE, SCALED = "1", "1/sqrt(2L)"  # factors on what writes to the stream
RATES, SGD_RATE, MORE_RATES = (1e-3, 3e-3), 0.1, RATES4
DEAD = ("collapsed", "partial", "diverged", "nonfinite")
RUNAWAY = ("diverged", "nonfinite")
UPDATES = (
    Predicate("relative change of the weights over steps 2 to 10, large start over small", "above", 3.0),
    Predicate("change of the logits by one step after the first, large start over small", "above", 3.0),
)
ZONE = (
    Predicate(
        "share of runs from the large start that end collapsed, diverged, or worse than the bigram's loss", "above", 0.5
    ),
)
OPTIMIZERS = {"Adam": ("adamw", RATES[1]), "SGD": ("sgd", SGD_RATE)}
PREDICATES = {
    "C67": (
        Predicate(
            "rise of the excess initial loss of the large start from 4 and 8 blocks to 24 and 48, nats", "above", 0.2
        ),
        Predicate("excess initial loss of the large start over the small one at 4 and 8 blocks, nats", "below", 0.05),
        Predicate("excess at 4 blocks as a share of that at 24", "below", 0.5),
    ),
    **{f"C68/first updates, {name}": UPDATES for name in OPTIMIZERS},
    **{f"C68/dead zone, {name}": ZONE for name in OPTIMIZERS},
    "C65/variances grow": (
        Predicate("fit of a rising line to Pre-LN's mean square by block, R^2 (below 0 if it falls)", "above", 0.98),
        Predicate("fit of a rising exponential to the mean square without norms by block, R^2", "above", 0.98),
    ),
    "C65/runs away": (
        Predicate("share of runs of 24 blocks without norms that diverge or end non-finite", "above", 0.5),
    ),
    "C66/variance": (
        Predicate("mean square of the last stream at 48 blocks over that at 4, with 1/sqrt(2L)", "below", 1.1),
        Predicate("the same without that factor", "above", 2.0),
    ),
    "C66/benefit": (
        Predicate(
            "share of seeds in which 1/sqrt(2L) lowers the loss by a ROPE, each at its best rate, or lets a higher rate train",
            "above",
            **MOST,
        ),
    ),
    "C69": (Predicate("share of seeds whose best std at 4 blocks is four times that at 24 or more", "above", **MOST),),
    "C11": (
        Predicate("doublings of the stream's mean square over 24 blocks without norms, at the start", "above", 1.0),
        Predicate("the same after training, less that of Post-LN", "above", 0.0),
    ),
    "C13/odd branch scales": (Predicate("largest update beside its stream in 24 blocks at the start", "above", 10.0),),
}
CUT = (
    "starts at widths 32, 128 and 256 and depths 2 and 32: no predicate names them",
    "trained depths 8, 12, 16 and 20: C68 and C69 are judged between 4 and 24 blocks",
    "SGD at one rate: C68 for SGD says nothing of other rates",
    "a dead zone is judged by how runs end; attention entropy and gradients, the protocol's other sign of one, are not",
    "the literal setting of C67 and C68, width 768 with a vocabulary of words, is for the accelerator; here its gains stand for it",
)
SETTINGS = {"cpu": "starts at width 64, 256 random tokens; trained cpu-S, 300 steps, markov", "accelerator": "acc-S"}
VARIANTS = ("accelerator",)


def get_config(variant: str | None = None) -> Any:
    if variant == "accelerator":
        return sized(
            "acc-S", model__width=768, model__heads=12, train__steps=2000, health__groups=("forward", "attention")
        )
    return sized("cpu-S", train__steps=300, health__groups=("forward", "attention"))


def sweep(variant: str | None = None) -> list[dict[str, Any]]:
    depths = [FEW, MANY, 48] if variant else [FEW, MANY]
    plain = {"residual.name": "pre_ln", "init.out_scale": 1.0, "seed": SEEDS}
    adam = plain | {"optimizer.name": "adamw", "optimizer.lr": RATES}
    sgd = plain | {
        "optimizer.name": "sgd",
        "optimizer.lr": SGD_RATE,
        "optimizer.b1": None,
        "optimizer.b2": None,
        "optimizer.eps": None,
    }
    gain = {"init.kind": "gain", "init.gain": [SMALL["gain"], LARGE["gain"]]}
    small, deep = {"init.kind": "gain", "init.gain": SMALL["gain"]}, {"model.depth": MANY}
    return chain(
        product({"model.depth": depths}, {"init.kind": "std", "init.std": STDS}, adam | {"optimizer.lr": MORE_RATES}),
        product({"model.depth": depths}, {"init.kind": "std", "init.std": [SMALL["std"], LARGE["std"]]}, sgd),
        *(product({"model.depth": depths}, gain, optimizer) for optimizer in (adam, sgd)),
        product(deep, small, adam, {"optimizer.lr": MORE_RATES}),
        product(deep, small, adam, {"optimizer.lr": MORE_RATES, "init.out_scale": None}),
        product(deep, gain, adam, {"optimizer.lr": RATES[0], "model.norm": "none"}),
        product(deep, small, adam, {"optimizer.lr": RATES[0], "residual.name": "post_ln"}),
    )


def keep(variant: str | None = None) -> dict[str, Any]:
    looks = {"steps": (1, 10), "look": first_steps}
    return {
        "profiles": (30, "end"),
        "probes": ("stream_rms", "update_ratio"),
        "looks": looks,
    }  # at step 30 for E10's pool


def first_steps(subject: Subject, before: Any) -> dict[str, Any]:
    """How far one more step moves the logits (M18), and how far the matrices have moved since the look before."""
    leaves = jax.tree.leaves(subject.model, is_leaf=is_variable)
    weights = np.concatenate([np.asarray(v[...]).ravel() for v in leaves if set(v.role) & set(KERNEL_ROLES)])
    moved = None if before is None else float(np.linalg.norm(weights - before) / np.linalg.norm(before))
    return {"moved": moved, "change": float(update(subject)["change"]), "_memory": weights}


# ---- before training


def at_start(scale: str) -> Iterator[dict[str, Any]]:
    """Loss, growth of the stream and sizes of updates, by norms, kind and size of the start, depth and seed."""
    for norms in NORMS:
        for kind in ("std", "gain"):
            for depth in SMOKE_DEPTHS if scale == "smoke" else DEPTHS:
                fields = NORMS[norms] | {"init.kind": kind, "model.width": WIDTH, "model.depth": depth}
                config = sized("cpu-S", **{path.replace(".", "__"): value for path, value in fields.items()})
                case = starts.case(config, starts.seeds(scale))
                sizes = STDS if kind == "std" else (SMALL[kind], LARGE[kind])
                outs = {ONE: 1.0} if kind == "std" else {ONE: 1.0, SCALED: (2 * depth) ** -0.5}
                labels = [(size, out) for size in sizes for out in outs]
                settings = [{f"init.{kind}": size, "init.out_scale": outs[out]} for size, out in labels]
                for (size, out), found in zip(labels, measured_at(case, settings), strict=True):
                    row = {"norms": norms, "kind": kind, "size": size, "out": out, "depth": depth}
                    for i, seed in enumerate(case.seeds):
                        yield row | {"seed": seed} | figures(found.sites, found.ends, i)


def figures(sites: dict[str, np.ndarray], ends: dict[str, np.ndarray], i: int) -> dict[str, float]:
    """The numbers of one seed."""
    with np.errstate(all="ignore"):
        squares = np.square(np.append(ends["embed_rms"][i], sites["stream_rms"][i, :, -1]).astype(np.float64))
        blocks, way = np.arange(len(squares)), np.sign(squares[-1] - squares[0])
        return {
            "loss": float(ends["loss"][i]),
            "last": float(squares[-1]),
            "doublings": float(np.log2(squares[-1] / squares[0])),
            "ratio": float(np.max(sites["update_ratio"][i])),
            "line": way * starts.straightness(blocks, squares[None])[0],
            "exponential": way * starts.straightness(blocks, np.log(squares)[None])[0],
        }


MEASURES = {"starts": at_start}


# ---- verdicts


def judge(runs: Runs, measured: Measured) -> Iterator[Finding]:
    rows = measured["starts"]
    yield from of_first_loss(rows)
    yield from of_first_steps(runs)

    def at(
        name: str, norms: str, kind: str = "gain", out: str = ONE, depth: int = MANY, sizes: Any = SMALL
    ) -> np.ndarray:
        return starts.values(rows, name, norms=norms, kind=kind, out=out, depth=depth, size=sizes[kind])

    for kind in SMALL:
        lines = [
            effect(at(name, norms, kind, sizes=MIDDLE))
            for name, norms in (("line", "Pre-LN"), ("exponential", "no norms"))
        ]
        yield Finding("C65/variances grow", tuple(lines), f"{kind} {MIDDLE[kind]}, 24 blocks at the start")
        updates = at("ratio", "Pre-LN", kind, sizes=LARGE)
        small, few = (
            np.nanmean(at("ratio", "Pre-LN", kind, **other)) for other in ({}, {"sizes": LARGE, "depth": FEW})
        )
        notes = (f"at {kind} {SMALL[kind]} it is {small:.3g}; in {FEW} blocks at {kind} {LARGE[kind]} {few:.3g}",)
        yield Finding("C13/odd branch scales", (effect(updates),), f"Pre-LN, {kind} {LARGE[kind]}", notes=notes)
    bare = runs.where({"model.norm": "none", "model.depth": MANY})
    for sizes in (SMALL, LARGE):
        part = bare.where({"init.gain": sizes["gain"]})
        where = f"gain {sizes['gain']}, rate {RATES[0]:g}"
        away = share([ending(row) in RUNAWAY for row in part])
        yield Finding("C65/runs away", (away,), where, unfinished(part), notes=(ends(part),))
    grown = [
        at("last", "Pre-LN", out=out, depth=DEEP[-1]) / at("last", "Pre-LN", out=out, depth=FEW)
        for out in (SCALED, ONE)
    ]
    yield Finding("C66/variance", tuple(map(effect, grown)), "gain 0.554, at the start")
    yield of_scaled_outputs(runs)
    yield of_best_std(runs)
    trained = [
        doublings(part) for part in (bare.where({"init.gain": SMALL["gain"]}), runs.where({"residual.name": "post_ln"}))
    ]
    after = effect(np.subtract(*trained))
    for kind in SMALL:
        start = effect(at("doublings", "no norms", kind, sizes=MIDDLE))
        yield Finding("C11", (start, after), f"start {kind} {MIDDLE[kind]}, trained gain 0.554")


def of_first_loss(rows: Rows) -> Iterator[Finding]:
    """C67: one finding for each placement of norms and each meaning of 0.02 and 0.2."""
    for norms in NORMS:
        for kind in SMALL:
            losses = [
                starts.table(rows, "loss", "depth", DEPTHS, norms=norms, kind=kind, out=ONE, size=sizes[kind])
                for sizes in (LARGE, SMALL)
            ]
            excess = losses[0] - losses[1]
            at = {depth: excess[:, i] for i, depth in enumerate(DEPTHS)}
            low, high = (np.mean([at[depth] for depth in depths], axis=0) for depths in (SHALLOW, DEEP))
            expected = np.subtract(*(first_loss(kind, sizes[kind]) for sizes in (LARGE, SMALL)))
            slopes = starts.slopes(DEPTHS, excess)
            notes = []
            if np.isfinite(slopes).any():
                notes.append(f"slope of the excess on the depth {np.nanmean(slopes):.2g} nats a block")
            if norms != "no norms":
                notes.append(
                    f"by theory the excess is {expected:.3g} nats at any depth, and at 24 blocks it is {at[24].mean():.3g}"
                )
            if lost := int((~np.isfinite(excess)).any(axis=1).sum()):
                notes.append(f"{lost} of {len(excess)} seeds have a loss that is not finite at some depth")
            with np.errstate(all="ignore"):
                effects = effect(high - low), effect(low), effect(at[FEW] / at[MANY])
            yield Finding("C67", effects, f"{norms}, {kind} {SMALL[kind]} to {LARGE[kind]}", notes=tuple(notes))


def first_loss(kind: str, size: float) -> float:
    """Expected initial loss behind a final norm: logits are Gaussian of SD g, whatever the depth. ln V + g^2 / 2 for small g."""
    g = size * np.sqrt(WIDTH) if kind == "std" else size
    logits = g * np.random.default_rng(0).normal(size=(20_000, SYMBOLS))
    top = logits.max(axis=1)
    return float(np.mean(top + np.log(np.exp(logits - top[:, None]).sum(axis=1))))


def of_first_steps(runs: Runs) -> Iterator[Finding]:
    """C68: for each optimizer and each meaning of 0.02 and 0.2, at 24 blocks."""
    for name, (optimizer, rate) in OPTIMIZERS.items():
        for kind in SMALL:
            fields = {"residual.name": "pre_ln", "model.norm": "layernorm", "model.depth": MANY, "init.kind": kind}
            fields |= {"optimizer.name": optimizer, "init.out_scale": 1.0}
            fields |= {"optimizer.lr": RATES} if name == "Adam" else {}  # those that both starts have
            large, small = (runs.where(fields | {f"init.{kind}": sizes[kind]}) for sizes in (LARGE, SMALL))
            with np.errstate(all="ignore"):
                ratios = [
                    np.divide(*(looked(part.where({"optimizer.lr": rate}), step, what) for part in (large, small)))
                    for step, what in ((10, "moved"), (1, "change"))
                ]
            where = f"24 blocks, {kind} {SMALL[kind]} to {LARGE[kind]}"
            yield Finding(f"C68/first updates, {name}", tuple(map(effect, ratios)), f"{where}, rate {rate:g}")
            dead, too = (share([ending(row) in DEAD for row in part]) for part in (large, small))
            cut = (
                "from the small start most runs are no better after these steps"
                if too.mean > 0.5
                else unfinished(large)
            )
            notes = (f"from the large start: {ends(large)}", f"from the small start: {ends(small)}")
            yield Finding(f"C68/dead zone, {name}", (dead,), where, cut, notes)


def looked(runs: Runs, step: int, what: str) -> np.ndarray:
    """What a look has found, by seed."""
    return np.array(runs.values(f"looks.{step}.{what}", SEEDS), np.float64)


def ends(runs: Runs) -> str:
    """How many runs ended how."""
    return ", ".join(f"{count} {name}" for name, count in sorted(runs.outcomes().items())) or "no runs"


def unfinished(runs: Runs) -> str:
    """A sentence where cells failed to run, so that a share of them tells nothing."""
    count = sum(ending(row) in ("failed", "killed") for row in runs)
    return f"{count} of {len(runs)} cells failed to run" if count else ""


def doublings(runs: Runs) -> np.ndarray:
    """Of the stream's mean square from the first block to the last of trained runs, by seed; NaN where a run has no end."""
    found = []
    for row in runs.by_seed(SEEDS):
        rms = profile(row, "end", "stream_rms") if row is not None else np.empty(0)
        with np.errstate(all="ignore"):
            found.append(2 * np.log2(rms[-1, -1] / rms[0, 0]) if rms.size and row and not row.get("error") else np.nan)
    return np.array(found)


def of_scaled_outputs(runs: Runs) -> Finding:
    """C66: each arm at its best rate, and the highest rates that train."""
    fields = {"residual.name": "pre_ln", "model.norm": "layernorm", "model.depth": MANY, "init.kind": "gain"}
    fields |= {"optimizer.name": "adamw", "init.gain": SMALL["gain"]}
    scaled, plain = (runs.where(fields | {"init.out_scale": out}) for out in (None, 1.0))
    unit = rope(at_best(plain).runs.losses(SEEDS))
    found = benefit(scaled, plain, unit)
    rates = [f"{one.value:g}" for one in found.best]
    notes = [
        f"loss without 1/sqrt(2L) less with: {told(found.cost, 'nats')}, at {rates[1]} and {rates[0]}; a ROPE is {unit:.3g}",
        f"seeds in which a higher rate trains: {found.higher} of {len(SEEDS)}",
    ]
    for rate in MORE_RATES:
        shared = [np.mean(arm.where({"optimizer.lr": rate}).losses(SEEDS)) for arm in (scaled, plain)]
        notes.append(f"at a shared rate of {rate:g}: {shared[0]:.3f} and {shared[1]:.3f} nats with and without")
    return Finding("C66/benefit", (found.share,), "24 blocks, gain 0.554", found.cut, tuple(notes))


def of_best_std(runs: Runs) -> Finding:
    """C69: the best std of each seed at 4 and at 24 blocks, each std at its best rate."""
    fields = {"residual.name": "pre_ln", "init.kind": "std", "optimizer.name": "adamw", "init.out_scale": 1.0}
    best, means, doubts = [], [], []
    for depth in (FEW, MANY):
        part = runs.where(fields | {"model.depth": depth})
        arms = [at_best(part.where({"init.std": std})) for std in STDS]
        losses = np.array([one.runs.losses(SEEDS) if len(one.runs) else np.full(len(SEEDS), np.nan) for one in arms])
        losses[~np.isfinite(losses)] = np.inf
        best.append(np.where(np.isfinite(losses).any(axis=0), np.array(STDS)[losses.argmin(axis=0)], np.nan))
        place = int(losses.mean(axis=1).argmin())
        means.append(STDS[place])
        doubts += [f"at {depth} blocks and std {STDS[place]:g}, {arms[place].edge}"] if arms[place].edge else []
    hits = np.where(np.isnan(best).any(axis=0), np.nan, best[0] >= 3.99 * best[1])
    found, unknown = counted(hits)
    beyond = means[1] == STDS[0] or means[0] == STDS[-1]
    if beyond and not np.nansum(hits) >= LEAST - 1:
        doubts.insert(0, f"the best stds, {means[0]:g} at 4 and {means[1]:g} at 24 blocks, reach the edge of the grid")
    notes = tuple(
        f"best std by seed at {d} blocks: {', '.join(f'{std:g}' for std in b)}"
        for d, b in zip((FEW, MANY), best, strict=True)
    )
    return Finding("C69", (found,), "Pre-LN, Adam", unknown or "; ".join(doubts), notes)


# ---- panel 8


def figure(runs: Runs, measured: Measured) -> Figure:
    """Initial loss by depth from small and large starts, every seed, with theory."""
    drawn = Figure(figsize=(9.5, 3.8), layout="constrained")
    rows, top = measured["starts"], 50  # nats, above which points are counted instead of drawn
    for axis, kind in zip(drawn.subplots(1, 2), SMALL, strict=True):
        for norms, marker, shift in zip(NORMS, "os^", (0.96, 1.0, 1.04), strict=True):
            for sizes, colour in ((SMALL, "C0"), (LARGE, "C3")):
                found = starts.of(rows, norms=norms, kind=kind, out=ONE, size=sizes[kind])
                points = np.array([(row["depth"] * shift, number(row, "loss")) for row in found]).reshape(-1, 2)
                shown = points[points[:, 1] <= top]
                axis.plot(shown[:, 0], shown[:, 1], marker, color=colour, markersize=3, alpha=0.4)
                lost = int((~np.isfinite(points[:, 1])).sum())
                beyond = {f"above {top:g}": len(points) - len(shown) - lost, "not finite": lost}
                told = ", ".join(f"{count} {what}" for what, count in beyond.items() if count)
                label = f"{norms}, {kind} {sizes[kind]}" + (f" ({told})" if told else "")
                axis.plot([], [], marker, color=colour, label=label)
        for sizes in (SMALL, LARGE):
            axis.axhline(first_loss(kind, sizes[kind]), color="black", linewidth=0.8, linestyle="--")
            g = sizes[kind] * (np.sqrt(WIDTH) if kind == "std" else 1.0)
            if g**2 < 2 * np.log(SYMBOLS):
                axis.axhline(np.log(SYMBOLS) + g**2 / 2, color="black", linewidth=0.8, linestyle=":")
        axis.plot([], [], "--", color="black", linewidth=0.8, label="theory behind a final norm")
        axis.plot([], [], ":", color="black", linewidth=0.8, label="ln V + g^2/2, for g^2 < 2 ln V")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="blocks",
            ylabel="initial loss, nats",
            ylim=(3, top),
            title=f"init.kind={kind}, width {WIDTH}",
        )
        axis.set_xticks(sorted({row["depth"] for row in rows}), sorted({row["depth"] for row in rows}))
        axis.set_yticks([3, 5, 10, 20, top], [3, 5, 10, 20, top])
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=6)
        axis.title.set_size(10)
    return drawn
