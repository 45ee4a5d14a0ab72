"""E13: how does the gradient come down before training, with skips and without, with the norm before the branch or after the add?

python -m experiments.run E13
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from experiments.experiment import Finding, Measured, Rows
from experiments.judge import Predicate, effect
from experiments.runs import Runs
from experiments.shared import starts
from experiments.shared.sizes import sized
from resjax.health.studies.gradient import gradient
from resjax.propagation.cases import Case
from resjax.propagation.measured import batches, measured
from resjax.residual import Context
from resjax.train.numbers import with_numbers

QUESTION = "How much of the gradient comes down the skips at the start, and does it keep its size on the way?"
DEPTHS, DEEP, SMOKE_DEPTHS = (4, 8, 16, 32, 64), 32, (4, 32)
WIDTH = {"model.width": 64, "model.heads": 4, "data.length": 32}
UNIT, HALF, DOUBLE = "gain 1", "gain 0.55, out_scale 1/sqrt(2L)", "gain 2"
GAINS = {
    UNIT: {"init.gain": 1.0, "init.out_scale": 1.0, "init.embed_gain": 8.0},  # embeddings of variance 1 at width 64
    HALF: {"init.gain": 0.55},
    DOUBLE: {"init.gain": 2.0, "init.out_scale": 1.0, "init.embed_gain": 4.0},
}
NO_SKIP, NO_NORM = {"residual.skip": 0.0}, {"model.norm": "none"}
ARMS: dict[str, dict[str, Any]] = {
    "Pre-LN": {"residual.name": "pre_ln"},
    "Post-LN": {"residual.name": "post_ln"},
    "DeepNorm": {"residual.name": "deepnorm"},
    "no norms": NO_NORM,
    "Pre-LN, no skips": {"residual.name": "pre_ln"} | NO_SKIP,
    "Post-LN, no skips": {"residual.name": "post_ln"} | NO_SKIP,
    "no norms, no skips": NO_NORM | NO_SKIP,
}
PLAIN = (("no norms, no skips", UNIT), ("no norms, no skips", DOUBLE), ("Pre-LN, no skips", UNIT))
NETWORKS = (  # arm and gain
    *((arm, gain) for arm in ("Pre-LN", "Post-LN", "Pre-LN, no skips", "Post-LN, no skips") for gain in (UNIT, HALF)),
    ("DeepNorm", UNIT), ("no norms", UNIT), PLAIN[0], PLAIN[1],
)  # fmt: skip
XAVIER = {"model.mlp": "relu", "model.mlp_ratio": 1.0, "model.positions": "none"} | GAINS[UNIT]  # as Xiong et al. 2020
PREDICATES = {
    "C02": (
        Predicate("share of the gradient at the first of 32 blocks that came down as it was, with skips", "above", 0.3),
        Predicate("the same share without skips", "below", 0.05),
        Predicate("orders of magnitude between the gradients at both ends of 32 blocks, with skips", "below", 1.0),
        Predicate("the same without skips", "above", 1.0),
    ),
    "C08": (
        Predicate("identity share of the gradient at the first of 32 blocks, Pre-LN less Post-LN", "above", 0.0),
        Predicate("change of Post-LN's identity share over Pre-LN's when the depth doubles", "below", 0.0),
    ),
    "C19": (
        Predicate("orders of magnitude that the gradient changes a block on its way down", "above", 0.01),
        Predicate("share of that change that is exponential in the depth, R^2", "above", 0.98),
    ),
    "C13/explosion or vanishing": (
        Predicate("orders of magnitude that the gradient spans in 32 blocks without norms and skips", "above", 4.0),
    ),
}
CUT = ("widths 128 and 256, which no predicate names, are left out: all is at width 64",)
SETTINGS = dict.fromkeys(("cpu", "accelerator"), "width 64, at the start, 256 random tokens of 32")
VARIANTS = ("accelerator",)


def get_config(variant: str | None = None) -> Any:
    """A network of this experiment; nothing is trained."""
    return built("Pre-LN", UNIT, DEEP)


def built(arm: str, gain: str, depth: int, **more: Any) -> Any:
    """The configuration of one network."""
    # DeepNorm's own rule starts what writes to the stream
    start = {path: value for path, value in GAINS[gain].items() if arm != "DeepNorm" or path != "init.out_scale"}
    fields = WIDTH | ARMS[arm] | start | more | {"model.depth": depth}
    return sized("cpu-S", **{path.replace(".", "__"): value for path, value in fields.items()})


# ---- what is measured


def gradients(scale: str) -> Iterator[dict[str, Any]]:
    """Of every network and seed how the gradient of the loss comes down its blocks."""
    for arm, gain in NETWORKS:
        for depth in SMOKE_DEPTHS if scale == "smoke" else DEPTHS:
            case = starts.case(built(arm, gain, depth), starts.seeds(scale))
            for seed, subject in starts.subjects(case):
                found = gradient(subject)
                with np.errstate(all="ignore"):  # a gradient may have vanished
                    size = np.log10(found["size"])
                    gained, span = float(size[0] - size[-1]), float(size.max() - size.min())
                row = {"arm": arm, "gain": gain, "depth": depth, "seed": seed, "gained": gained, "span": span}
                yield row | {"share": float(found["identity_share"][0])}


def streams(scale: str) -> Iterator[dict[str, Any]]:
    """RMS of Pre-LN's and Post-LN's streams after every site, and what theory expects, under the weights of Xiong et al. 2020."""
    depth = SMOKE_DEPTHS[-1] if scale == "smoke" else DEEP
    for arm in ("Pre-LN", "Post-LN"):
        case = starts.case(built(arm, UNIT, depth, **XAVIER), starts.seeds(scale))
        for seed, rms in zip(case.seeds, measured(case).sites["stream_rms"], strict=True):
            yield {"arm": arm, "depth": depth, "curve": "measured", "seed": seed, "rms": starts.sites(rms)}
        for curve in starts.theory(case, "stream_rms"):
            yield {"arm": arm, "depth": depth, "curve": curve.name, "rms": starts.sites(curve.values)}


def last_matrix(scale: str) -> Iterator[dict[str, Any]]:
    """Length of the gradient of the last feed-forward's output matrix, of which Xiong et al. 2020 say how it goes with depth."""
    for arm in ("Pre-LN", "Post-LN"):
        for depth in SMOKE_DEPTHS if scale == "smoke" else DEPTHS:
            case = starts.case(built(arm, UNIT, depth, **XAVIER), starts.seeds(scale))
            run = jax.jit(lambda seed, batch, case=case: length(case, seed, batch))
            for seed, batch in zip(case.seeds, batches(case), strict=True):
                yield {"arm": arm, "depth": depth, "seed": seed, "length": float(run(np.uint32(seed), batch))}


def length(case: Case, seed: jax.Array, batch: jax.Array) -> jax.Array:
    """Of the gradient of the last matrix that writes to the stream."""
    params = with_numbers(case.parts, {"seed": seed}).start().params
    loss = lambda params: nnx.merge(case.parts.graphdef, params).objective(batch, Context())[0]  # noqa: E731
    grads = nnx.merge(case.parts.graphdef, jax.grad(loss)(params))
    return jnp.linalg.norm(grads.stack.runs[-1].sites[-1].branch.write.kernel[-1])


MEASURES = {"gradients": gradients, "streams": streams, "last_matrix": last_matrix}


# ---- verdicts


def judge(runs: Runs, measured: Measured) -> Iterator[Finding]:
    rows = measured["gradients"]

    def at(name: str, arm: str, gain: str) -> np.ndarray:
        return starts.values(rows, name, arm=arm, gain=gain, depth=DEEP)

    slopes = "; ".join(
        f"{arm}'s last matrix has a gradient that goes as L^{np.nanmean(depth_slopes(measured, arm)):.2f}"
        for arm in ("Pre-LN", "Post-LN")
    )
    for arm in ("Pre-LN", "Post-LN"):
        for gain in (UNIT, HALF):
            plain = f"{arm}, no skips"
            effects = [effect(at("share", one, gain)) for one in (arm, plain)]
            effects += [effect(np.abs(at("gained", one, gain))) for one in (arm, plain)]
            yield Finding("C02", tuple(effects), f"{arm}, {gain}", notes=lost(rows, (arm, plain), gain))
    for gain in (UNIT, HALF):
        pre, post = at("share", "Pre-LN", gain), at("share", "Post-LN", gain)
        depths = depths_of(rows)
        shares = [starts.table(rows, "share", "depth", depths, arm=arm, gain=gain) for arm in ("Post-LN", "Pre-LN")]
        change = starts.slopes(np.log2(depths), shares[0] / shares[1])
        total = np.nanmean(at("gained", "Post-LN", gain))
        notes = (f"Post-LN's whole gradient changes by 10^{total:.2g} on its way down 32 blocks", slopes)
        yield Finding("C08", (effect(pre - post), effect(change)), gain, notes=notes)
    for arm, gain in PLAIN:
        depths, gained = known_depths(rows, arm, gain)
        if len(depths) < 3:
            nothing = effect(np.full(len(gained), np.nan))
            cut = f"the gradient is finite and not 0 in all seeds at {len(depths)} depths only"
            yield Finding("C19", (nothing, nothing), f"{arm}, {gain}", cut)
            continue
        slope = starts.slopes(depths, gained)
        said = (
            f"it {'grows' if np.mean(slope) > 0 else 'shrinks'} on its way down; depths {', '.join(map(str, depths))}"
        )
        effects = effect(np.abs(slope)), effect(starts.straightness(depths, gained))
        yield Finding("C19", effects, f"{arm}, {gain}", notes=(said, *lost(rows, (arm,), gain)))
    arm, gain = PLAIN[0]
    most = np.nanmax(at("span", "Pre-LN", UNIT))
    notes = (f"under Pre-LN it spans {most:.2g} orders of magnitude at most", *lost(rows, (arm,), gain))
    yield Finding("C13/explosion or vanishing", (effect(at("span", arm, gain)),), f"{arm}, {gain}", notes=notes)


def depths_of(rows: Rows) -> list[int]:
    return sorted({row["depth"] for row in rows})


def known_depths(rows: Rows, arm: str, gain: str) -> tuple[list[int], np.ndarray]:
    """The depths at which every seed's gradient is a number and not 0, and (seeds, depths) its orders of magnitude from top to bottom."""
    depths = depths_of(rows)
    gained = starts.table(rows, "gained", "depth", depths, arm=arm, gain=gain)
    known = np.isfinite(gained).all(axis=0)
    return [depth for depth, good in zip(depths, known, strict=True) if good], gained[:, known]


def depth_slopes(measured: Measured, arm: str) -> list[float]:
    """Of each seed the power of the depth with which the gradient of the last matrix goes."""
    rows = measured["last_matrix"]
    depths = depths_of(rows)
    return starts.slopes(np.log(depths), np.log(starts.table(rows, "length", "depth", depths, arm=arm)))


def lost(rows: Rows, arms: tuple[str, ...], gain: str) -> tuple[str, ...]:
    """A sentence where gradients are not finite, or 0, in some networks."""
    bad = [row for arm in arms for row in starts.of(rows, arm=arm, gain=gain) if not is_number(row["gained"])]
    where = ", ".join(map(str, sorted({row["depth"] for row in bad})))
    return (f"{len(bad)} networks have a gradient that is not finite, or 0, at depths {where}",) if bad else ()


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


# ---- panel 4


def figure(runs: Runs, measured: Measured) -> Figure:
    """Who keeps the trunk in size, and how the gradient goes with depth."""
    drawn = Figure(figsize=(12.0, 3.6), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    for arm, colour in (("Pre-LN", "C0"), ("Post-LN", "C3")):
        draw_streams(left, measured["streams"], arm, colour)
        rows = measured["last_matrix"]
        depths = depths_of(rows)
        lengths = starts.table(rows, "length", "depth", depths, arm=arm)
        middle.loglog(depths, lengths.T, ".", color=colour, alpha=0.5)
        fitted = np.exp(np.log(lengths).mean(axis=0))
        label = f"{arm}, slope {np.nanmean(depth_slopes(measured, arm)):.2f}"
        middle.loglog(depths, fitted, color=colour, label=label)
    guide = np.array([depths[0], depths[-1]])
    for power, style in ((-0.5, "--"), (0.0, ":")):
        line = fitted[0] * (guide / guide[0]) ** power
        middle.loglog(guide, line, style, color="black", linewidth=0.8, label=f"slope {power:g}, Xiong et al. 2020")
    styles = {arm: f"C{i}" for i, arm in enumerate(ARMS)}
    for arm, colour in styles.items():
        rows = measured["gradients"]
        depths = depths_of(rows)
        shares = np.ma.masked_invalid(starts.table(rows, "share", "depth", depths, arm=arm, gain=UNIT))
        right.plot(depths, shares.T, ".", color=colour, alpha=0.5)
        right.plot(depths, shares.mean(axis=0), color=colour, label=arm)
    left.set(xlabel="site", ylabel="RMS of the stream", title="Stream, unit weights")
    middle.set(xlabel="blocks", ylabel="gradient of the last matrix", title="Last feed-forward's gradient")
    right.set(xlabel="blocks", ylabel="identity share at the first block", title="Gradient that comes down as it is")
    for axis in (middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(depths, [str(depth) for depth in depths])
    for axis in (left, middle, right):
        axis.legend(frameon=False, fontsize=7)
        axis.title.set_size(10)
    return drawn


def draw_streams(axis: Any, rows: Rows, arm: str, colour: str) -> None:
    """Every seed, and the bounds of theory where there are some."""
    found = starts.profiles(rows, "rms", arm=arm, curve="measured")
    sites = np.arange(1, found.shape[1] + 1)
    axis.plot(sites, found.T, color=colour, alpha=0.35, linewidth=0.8)
    axis.plot([], [], color=colour, label=f"{arm}, every seed")
    bounds = [starts.profiles(rows, "rms", arm=arm, curve=f"{side} bound") for side in ("lower", "upper")]
    if all(len(bound) for bound in bounds):
        low, high = (bound[0] for bound in bounds)
        axis.fill_between(
            sites, low, high, color="#9a9a9a", alpha=0.25, linewidth=0, label="bounds of Xiong et al. 2020"
        )
