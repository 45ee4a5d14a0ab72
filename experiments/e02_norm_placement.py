"""E02: how far does it depend on where the norms stand whether, how fast and how smoothly a stack trains?"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.experiment import Finding, Measured
from experiments.judge import SMALLEST_ROPE, Effect, Predicate, difference, effect, in_ropes
from experiments.runs import RATE, Best, Row, Runs, ended, losses_of, mean_between, number, value_of
from experiments.shared.rates import (
    by_seed,
    highest,
    lost,
    mean_by_seed,
    open_above,
    seen_at_end,
    spikes,
    steps_above,
    total,
)
from experiments.shared.sizes import RATES7, SEEDS, SIZES, WARMUP, sized
from resjax.health.studies import STUDIES
from resjax.sweeps.combine import chain, product
from resjax.sweeps.figures.diagram import at_first_step, phase

QUESTION = "How far does it depend on where the norms stand whether, how fast and how smoothly a stack trains?"
DEPTH, GAIN, NAME = "model.depth", "init.gain", "residual.name"
PLACES = {"Pre-LN": "pre_ln", "Post-LN": "post_ln"}
BOTH = {NAME: list(PLACES.values())}
USUAL = (3e-4, 1e-3, 3e-3)  # the rates that C43 calls usual
USUAL_GAIN, OTHER_GAIN = 0.55, 1.0
MIDDLE, DEEP = 12, 24  # blocks that the claims name
REMOVED: Mapping[str, Mapping[str, Any]] = {  # a remedy, and the Pre-LN stack without it (for clipping: with it)
    "norm": {"model.norm": "none"},
    "output scale": {"init.out_scale": 1.0},
    "warm-up": {"optimizer.warmup": 0},
    "clipping": {"optimizer.clip": 1.0},
    "branch scale": {"residual.scale": 0.3},
}
ADDED = ("clipping", "branch scale")  # which the protocol's stack lacks
REMEDY_RATES, TIMES_BEST = (3e-2, 1e-1), 3

_RATIO = Predicate("ln of the highest trained rate, Pre-LN's by Post-LN's (3 times: 1.1)", "above", 1.09)
PREDICATES = {
    "C09": (
        Predicate("best loss of Pre-LN less that of Post-LN, ROPEs", "below", 1.0),
        Predicate("sensitivity to the rate (M8) of Pre-LN less that of Post-LN, nat", "below", 0.0),
    ),
    **{
        f"C12/{name}": (
            Predicate(
                "rise of the sensitivity to the rate (M8) without it, nat (or, where that is decided, steps of the grid by which the "
                "highest trained rate falls, less a half)", "above", 0.0, other=SMALLEST_ROPE,
            ),
        )
        for name in REMOVED
    },
    "C13/loss spikes": (Predicate("share of seeds that spike in the arm of untrained runs that spikes most", "above", 0.0, agree=0.0),),
    **{
        f"C32/{place}": (
            Predicate("spikes of a run at rates up to the best", "below", 0.01),
            Predicate("spread of the detrended loss by that of the frozen model", "below", 1.1),
        )
        for place in PLACES
    },
    "C37": (
        _RATIO,
        Predicate("steps of the common rates by which Post-LN's highest falls, fewest to most blocks", "above", 0.5),
        Predicate("steps of the common rates by which Pre-LN's highest falls", "below", 0.5),
    ),
    "C40": (Predicate("training loss of Post-LN less that of Pre-LN at 5 to 20 % of the run, ROPEs", "below", -1.0, other=1.0),),
    "C41/threshold": (_RATIO,),
    "C41/spikes": (
        Predicate("share of failed Post-LN runs that spike or rise by 0.1 nat above their start", "above", 0.5, other=0.2),
    ),
    "C41/Pre-LN smooth": (Predicate("share of Pre-LN runs at rates up to the best without a spike", "above", 0.949),),
    "C42": (Predicate("best loss of Post-LN less that of Pre-LN, ROPEs", "above", -1.0),),
    "C43/at usual rates": (
        Predicate("share of trained Post-LN runs", "below", 0.2, other=0.8),
        Predicate("share of trained Pre-LN runs", "above", 0.949),
    ),
    "C43/growing gap": (Predicate("rise of Post-LN's best loss less Pre-LN's for twice the blocks, nat", "above", 0.0),),
    "C47": (
        Predicate("rise of Post-LN's loss without warm-up, nat", "above", 0.2),
        Predicate("rise of Pre-LN's loss without warm-up, ROPEs", "inside", 1.0),
    ),
}  # fmt: skip
SETTINGS = {"cpu": "cpu-S, markov", "accelerator": "acc-S and acc-M, markov"}
CUT = (
    "Gain 0.16 everywhere, and gain 1.0 but for the usual rates at 24 blocks (Pre-LN at 3e-3 only).",
    "The rate 3e-4 everywhere, 1e-3 below 24 blocks, 1e-1 at 24 blocks, 3e-1 everywhere: C43's usual rates are two.",
    "Warm-ups of 30, 180 and 300 steps, and of 1e-3: C47 compares none with a tenth at 3e-3.",
    "C12 removes one thing from 6 blocks, not 24, at two rates; of branch scale it has no arm, so that this part is undecided.",
    "The stdlib text, and depths from 48 on: C43 is judged at 24 blocks, C13 finds spikes up to 24 blocks or is undecided.",
)
VARIANTS = ("accelerator",)


def get_config(variant: str | None = None) -> Any:
    config = sized("acc-S" if variant else "cpu-S")
    config.train.log_every, config.health.groups = config.train.steps // 60, ("forward",)
    return config


def sweep(variant: str | None = None) -> list[dict[str, Any]]:
    return _accelerator() if variant else _cpu()


def _cpu() -> list[dict[str, Any]]:
    usual, other, seeds = {GAIN: USUAL_GAIN}, {GAIN: OTHER_GAIN}, {"seed": SEEDS}
    pre, post, little = {NAME: "pre_ln"}, {NAME: "post_ln"}, {DEPTH: 6}
    remedies = [dict(fields) for name, fields in REMOVED.items() if name != "branch scale"]
    return chain(
        product(usual, little, BOTH, {RATE: (3e-3, 1e-2, 3e-2, 1e-1)}, seeds),
        product(usual, {DEPTH: MIDDLE}, BOTH, {RATE: (3e-3, 1e-2, 3e-2, 1e-1)}, seeds),
        product(usual, {DEPTH: DEEP}, BOTH, {RATE: (1e-3, 3e-3, 1e-2, 3e-2)}, seeds),
        product(other, {DEPTH: DEEP}, [post | {RATE: 1e-3}, post | {RATE: 3e-3}, pre | {RATE: 3e-3}], seeds),
        product(usual, {DEPTH: MIDDLE, RATE: 3e-3, "optimizer.warmup": 0}, BOTH, seeds),
        product(usual, little, pre, remedies, {RATE: REMEDY_RATES}, seeds),
    )


def _accelerator() -> list[dict[str, Any]]:
    steps, rates, size = SIZES["acc-S"]["train.steps"], {RATE: RATES7}, SIZES["acc-M"]
    depths, gains, seeds = {DEPTH: (6, 12, 24, 48)}, {GAIN: (USUAL_GAIN, OTHER_GAIN)}, {"seed": SEEDS}
    others = {NAME: ["deepnorm", "sandwich_branch"]}
    large = size | {"optimizer.warmup": round(WARMUP * size["train.steps"]), "train.log_every": 320}
    return chain(
        product(gains, depths, BOTH, rates, seeds),
        product({GAIN: USUAL_GAIN}, depths, others, rates, {"seed": SEEDS[:3]}),
        product({GAIN: USUAL_GAIN}, depths, BOTH, rates, {"optimizer.warmup": (0, steps // 100)}, seeds),
        product({GAIN: USUAL_GAIN, DEPTH: DEEP, NAME: "pre_ln"}, list(REMOVED.values()), rates, seeds),
        product(large, {GAIN: USUAL_GAIN, DEPTH: (12, 24)}, BOTH, {RATE: (3e-3, 1e-2)}, seeds),
    )


def keep(variant: str | None = None) -> dict[str, Any]:
    return {
        "curves": True,
        "profiles": (1,),
        "probes": ("token_cosine",),
        "looks": {"steps": ("end",), "look": steadiness},
    }


def steadiness(subject: Any, before: Any) -> dict[str, Any]:
    """How the loss swings beside that of the frozen model, of the cells that C32 speaks of; nothing of the others."""
    if subject.config.model.depth != MIDDLE or subject.config.optimizer.warmup == 0:
        return {}
    return {"ratio": STUDIES["steadiness"].run(subject)["ratio"]}


# ------------------------------------------------------------------ what was found


def judge(runs: Runs, measured: Measured) -> Iterator[Finding]:
    sizes = runs.split("model.width")
    for width, of_size in sizes.items():
        of = f"width {width}" if len(sizes) > 1 else ""
        for found in _of_size(of_size, main=width == min(sizes)):
            yield replace(found, settings=", ".join(filter(None, (of, found.settings))))


def _of_size(runs: Runs, main: bool) -> Iterator[Finding]:
    usual = runs.where({GAIN: USUAL_GAIN})
    plain = _plain(usual)
    arms = {place: plain.where({NAME: name}).split(DEPTH) for place, name in PLACES.items()}
    pre, post = arms["Pre-LN"], arms["Post-LN"]
    gain = f"gain {USUAL_GAIN:g}"
    for depth in pre:
        yield _better(pre[depth], post[depth], f"{gain}, {depth} blocks")
    yield _final(pre[MIDDLE], post[MIDDLE], f"{gain}, {MIDDLE} blocks")
    yield Finding("C43/growing gap", (_gap(pre, post),), gain, notes=lost(plain))
    if not main:
        return
    ratio, cut = _ratio(pre[MIDDLE], post[MIDDLE])
    falls = [_fall(arm) for arm in (post, pre)]
    rates = "; ".join(
        f"{place}: " + ", ".join(f"{part.highest_rate():g} at {depth} blocks" for depth, part in arm.items())
        for place, arm in arms.items()
    )
    yield Finding("C37", (ratio, *falls), gain, cut, (f"highest trained rates, 0 = none: {rates}", *lost(plain)))
    yield Finding("C41/threshold", (ratio,), f"{gain}, {MIDDLE} blocks", cut)
    yield from _smooth(arms, f"{gain}, {MIDDLE} blocks")
    yield _early(pre[MIDDLE], post[MIDDLE], f"{gain}, {MIDDLE} blocks")
    yield from _usual_rates(_plain(runs))
    yield _warmed(usual.where({DEPTH: MIDDLE}), f"{gain}, {MIDDLE} blocks")
    yield from _remedies(usual.where({NAME: "pre_ln"}), gain)
    yield _spiking(runs)


def _plain(runs: Runs) -> Runs:
    """Those of the protocol's recipe, from which no remedy was taken and to which none was added; warmed up over a tenth."""
    kept = runs.where(
        {"model.norm": "layernorm", "init.out_scale": None, "residual.scale": None, "optimizer.clip": 0.0}
    )
    return Runs(row for row in kept if (value_of(row, "optimizer.warmup") or 0) >= 0.99 * WARMUP * total(row))


def _better(pre: Runs, post: Runs, settings: str) -> Finding:
    """C09 at one depth: at each arm's best rate, and over the rates that both have."""
    best = pre.best(), post.best()
    seeds = pre.seeds
    loss = in_ropes(*(one.runs.losses(seeds) for one in best))
    common = {RATE: tuple(set(pre.split(RATE)) & set(post.split(RATE)))}
    sensitive = difference(*(arm.where(common).sensitivity(seeds) for arm in (pre, post)))
    cut = best[1].edge if loss.mean < 1 else best[0].edge
    return Finding("C09", (loss, sensitive), settings, _edge(cut, loss), (_rates(*best), *lost(pre, post)))


def _final(pre: Runs, post: Runs, settings: str) -> Finding:
    best = pre.best(), post.best()
    loss = in_ropes(best[1].runs.losses(pre.seeds), best[0].runs.losses())
    cut = best[1].edge if loss.mean > -1 else best[0].edge
    return Finding("C42", (loss,), settings, _edge(cut, loss), (_rates(*best), *_at_shared(pre, post)))


def _edge(cut: str, found: Effect) -> str:
    """Why the best of the arm that is behind may be better than it was seen; nothing where it is behind by ten ROPEs."""
    return cut if cut and abs(found.mean) < 10 else ""


def _rates(pre: Best, post: Best) -> str:
    edges = "".join(f"; {place}: {best.edge}" for place, best in (("Pre-LN", pre), ("Post-LN", post)) if best.edge)
    return f"best rates {pre.value:g} (Pre-LN) and {post.value:g} (Post-LN){edges}"


def _at_shared(pre: Runs, post: Runs) -> Iterator[str]:
    for rate in sorted(set(pre.split(RATE)) & set(post.split(RATE))):
        found = difference(post.where({RATE: rate}).losses(pre.seeds), pre.where({RATE: rate}).losses(pre.seeds))
        yield f"at {rate:g} Post-LN's loss less Pre-LN's is {found.mean:.3g} nat"


def _ratio(pre: Runs, post: Runs) -> tuple[Effect, str]:
    """ln of the ratio of highest trained rates, and why it may be larger."""
    seeds = pre.seeds
    found = effect(np.log(highest(pre, seeds)) - np.log(highest(post, seeds)))
    more = open_above(pre) and not found.interval.low > _RATIO.threshold
    return found, "Pre-LN is trained at the last rate of the grid, and may be beyond" if more else ""


def _fall(arm: Mapping[Any, Runs]) -> Effect:
    return effect(steps_above(arm[min(arm)], arm[max(arm)], SEEDS))


def _gap(pre: Mapping[Any, Runs], post: Mapping[Any, Runs]) -> Effect:
    """Of each seed the slope of (best loss of Post-LN less that of Pre-LN) on the number of doublings of the depth."""
    depths = sorted(set(pre) & set(post))
    gaps = np.array(
        [difference(*(arm[depth].best().runs.losses(SEEDS) for arm in (post, pre))).values for depth in depths]
    )
    doublings = np.log2(depths) - np.mean(np.log2(depths))
    return effect(doublings @ gaps / (doublings @ doublings))


def _smooth(arms: Mapping[str, Mapping[Any, Runs]], settings: str) -> Iterator[Finding]:
    """C32 and C41: spikes and unsteadiness up to the best rate, and how Post-LN fails beyond its highest."""
    for place, arm in arms.items():
        part = arm[MIDDLE]
        best = part.best()
        below = Runs(row for row in part if value_of(row, RATE) <= best.value)
        episodes = effect(by_seed(below, spikes, part.seeds))
        swings = effect(by_seed(below, lambda row: seen_at_end(row, "ratio"), part.seeds))
        notes = (f"rates up to {best.value:g}", *lost(below))
        yield Finding(f"C32/{place}", (episodes, swings), settings, notes=notes)
        if place == "Pre-LN":
            calm = effect(by_seed(below, lambda row: _no(spikes(row)), part.seeds))
            yield Finding("C41/Pre-LN smooth", (calm,), settings, notes=notes)
            continue
        top = part.highest_rate()
        failed = Runs(row for row in part if value_of(row, RATE) > top and ended(row, "trained") == 0)
        loud = effect(by_seed(failed, _loud, part.seeds))
        notes = (f"{len(failed)} runs failed above {top:g}: {_ends(failed)}",) if len(failed) else ()
        yield Finding("C41/spikes", (loud,), settings, "" if len(failed) else "no Post-LN run failed", notes)


def _loud(row: Row) -> float:
    """1 if a run spiked or rose above its start, 0 if it was silent; NaN where that is not known."""
    episodes, rise = spikes(row), spikes(row, "max_loss") - number(row, "first_loss")
    if row.get("outcome") == "nonfinite":
        return 1.0
    return np.nan if np.isnan(episodes + rise) else float(episodes >= 1 or rise > 0.1)


def _no(count: float) -> float:
    return np.nan if np.isnan(count) else float(count == 0)


def _early(pre: Runs, post: Runs, settings: str) -> Finding:
    """C40, at the rates at which all seeds of both are trained."""
    seeds = pre.seeds
    shared = [
        rate for rate in sorted(set(pre.split(RATE)) & set(post.split(RATE)))
        if all(arm.where({RATE: rate}).trained() == 1 for arm in (pre, post))
    ]  # fmt: skip
    pair = [arm.where({RATE: tuple(shared)}) for arm in (post, pre)]
    early = [by_seed(arm, lambda row: mean_between(row, 0.05, 0.2), seeds) for arm in pair]
    cut = "" if shared else "at no rate are all seeds of both trained"
    notes = (f"rates {', '.join(f'{rate:g}' for rate in shared)}", _crossing(*pair)) if shared else ()
    return Finding("C40", (in_ropes(*early),), settings, cut, notes)


def _crossing(post: Runs, pre: Runs) -> str:
    """Where the mean training losses of both change places."""
    curves = [[losses_of(row) for row in arm] for arm in (post, pre)]
    steps = curves[0][0][0]
    if any(len(one[0]) != len(steps) for arm in curves for one in arm):
        return "no crossing can be told: curves are not complete"
    apart = np.subtract(*(np.mean([one[1] for one in arm], axis=0) for arm in curves))
    ahead = ["Post-LN" if one < 0 else "Pre-LN" for one in apart]
    turns = [f"{ahead[0]} is ahead at first"] + [
        f"{after} from step {step}" for before, after, step in zip(ahead, ahead[1:], steps[1:], strict=False) if after != before
    ]  # fmt: skip
    return ", ".join(turns[:4]) + (f", and {len(turns) - 4} more changes" if len(turns) > 4 else "")


def _usual_rates(runs: Runs) -> Iterator[Finding]:
    for gain, part in runs.split(GAIN).items():
        for depth, there in part.where({RATE: USUAL}).split(DEPTH).items():
            if depth < DEEP:
                continue
            post, pre = (there.where({NAME: PLACES[place]}) for place in ("Post-LN", "Pre-LN"))
            shares = [effect(by_seed(arm, lambda row: ended(row, "trained"), arm.seeds)) for arm in (post, pre)]
            tried = [", ".join(f"{rate:g}" for rate in arm.split(RATE)) for arm in (post, pre)]
            notes = (f"rates {tried[0]} (Post-LN) and {tried[1]} (Pre-LN)", f"Post-LN ended as {_ends(post)}")
            yield Finding(
                "C43/at usual rates", tuple(shares), f"gain {gain:g}, {depth} blocks", notes=(*notes, *lost(there))
            )


def _ends(runs: Runs) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(runs.outcomes().items()))


def _warmed(runs: Runs, settings: str) -> Finding:
    without = runs.where({"optimizer.warmup": 0, "model.norm": "layernorm"})
    rates, effects = tuple(without.split(RATE)), []
    for place, compare in (("Post-LN", difference), ("Pre-LN", in_ropes)):
        cold = without.where({NAME: PLACES[place]})
        warm = _plain(runs).where({NAME: PLACES[place], RATE: rates})
        effects.append(compare(*(mean_by_seed(arm, "eval_loss", SEEDS) for arm in (cold, warm))))
    return Finding(
        "C47", tuple(effects), f"{settings}, rate {', '.join(f'{rate:g}' for rate in rates)}", notes=lost(without)
    )


def _remedies(pre: Runs, gain: str) -> Iterator[Finding]:
    """C12: the stack with and without each remedy, at rates from three times the best."""
    for name, fields in REMOVED.items():
        changed = pre.where(fields)
        depth = min(changed.split(DEPTH), default=None)
        if depth is None:
            yield Finding(
                f"C12/{name}", (effect([]),), gain, "no such arm was trained at this scale; the accelerator grid has it"
            )
            continue
        usual, other = _plain(pre).where({DEPTH: depth}), changed.where({DEPTH: depth})
        common = {RATE: tuple(rate for rate in other.split(RATE) if rate >= TIMES_BEST * usual.best().value * 0.99)}
        present, absent = (other, usual) if name in ADDED else (usual, other)
        present, absent = present.where(common), absent.where(common)
        seeds = usual.seeds
        rise = difference(absent.sensitivity(seeds), present.sensitivity(seeds))
        fall = effect(np.array(steps_above(present, absent, seeds)) - 0.5)
        rates = ", ".join(f"{rate:g}" for rate in common[RATE])
        notes = (
            f"M8 rises by {rise.mean:.3g} nat" if np.isfinite(rise.mean) else "M8 is not known where no loss is finite",
            f"the highest trained rate falls by {fall.mean + 0.5:.3g} steps",
            *lost(other),
        )
        cut = "" if common[RATE] else "no rate of the grid is three times the best or more"
        chosen = fall if fall.interval.low > 0 else rise
        yield Finding(f"C12/{name}", (chosen,), f"{gain}, {depth} blocks, rates {rates or 'none'}", cut, notes)


def _spiking(runs: Runs) -> Finding:
    """C13a: whether some arm that does not train spikes; the deepest of the grid are not very deep, so that none is no answer."""
    arms: dict[tuple, list[Row]] = {}
    for row in runs:
        arms.setdefault(tuple(str(one) for path, one in row["fields"].items() if path != "seed"), []).append(row)
    spiky = {
        arm: [np.nan if np.isnan(count) else float(count >= 1) for count in map(spikes, rows)]
        for arm, rows in arms.items() if any(ended(row, "trained") == 0 for row in rows)
    }  # fmt: skip
    if not spiky:
        return Finding("C13/loss spikes", (effect([]),), cut="every run trained")
    most = max(spiky, key=lambda arm: np.nansum(spiky[arm]))
    found = effect(spiky[most])
    shallow = "no arm spikes, and the deepest of the grid are not very deep"
    fields = arms[most][0]["fields"]
    told = ", ".join(f"{path} {one}" for path, one in fields.items() if path != "seed")
    some = sum(np.nansum(values) > 0 for values in spiky.values())
    notes = (f"{some} of {len(spiky)} arms with untrained runs have a run that spikes; most in {told}",)
    return Finding("C13/loss spikes", (found,), cut="" if np.nansum(found.values) else shallow, notes=notes)


# ------------------------------------------------------------------ the panel


def figure(runs: Runs, measured: Measured) -> Any:
    """Panel 3: outcomes over rate and depth, by place of the norm and gain, with the token cosine before the first step."""
    plain = _plain(runs.where({"model.width": min(runs.split("model.width"))}))

    def panel(row: Row) -> str:
        names = {name: place for place, name in PLACES.items()}
        return f"{names.get(value_of(row, NAME), value_of(row, NAME))}, gain {value_of(row, GAIN):g}"

    ordered = sorted(plain, key=lambda row: (value_of(row, GAIN), value_of(row, NAME)))
    what = "token cosine after the last block at the start"
    return phase(ordered, panel, contour=at_first_step("token_cosine"), contoured=what, side_by_side=2)
