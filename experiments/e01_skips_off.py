"""E01: what does a network learn whose skips, or whose branches, are switched off?

python -m experiments.run E01
"""

from dataclasses import asdict

import numpy as np

from experiments.experiment import Finding
from experiments.judge import Predicate, difference, effect
from experiments.parts import e01_chasing as chasing
from experiments.parts.e01_panel import panel
from experiments.parts.e01_symmetric import least_loss
from experiments.runs import RATE, Runs, ending, number
from experiments.shared import seen
from experiments.shared.seen import counted, told
from experiments.shared.sizes import RATES4, RATES7, SEEDS, sized
from experiments.shared.skips import (
    FEW,
    FULL,
    MOST,
    NEITHER,
    NO_ATTENTION_SKIP,
    NO_BRANCH,
    NO_BRANCH_TIED,
    NO_MLP_SKIP,
    NO_SKIP,
    POST,
    SHAPED,
    arm,
    at_best,
    endings,
)
from resjax import data
from resjax.data import markov
from resjax.sweeps.combine import chain, product

QUESTION = "What does a Transformer learn without its skips, and what without its branches?"
VARIANTS = ("accelerator",)
SETTINGS = {"cpu": "cpu-S, gain 0.55", "accelerator": "acc-S, gain 0.55"}
SHARED, SOME = 3e-3, (1e-3, 3e-3)  # rates
DEEP, SHALLOW, LINE = 12, 2, (2, 6)  # blocks
LONGER = 5  # times the steps, for skipless attention that is made to train
CUT = (
    "Width 64 (cpu-M).",
    "Depths 4 and 8: the gap of C01 is told from 2, 6 and 12 blocks.",
    "Rates 1e-2 and 3e-2 of Post-LN, one skip off, neither skip nor norm, and shaped attention; 1e-3 of the arms without branches.",
    "Shaped attention over five times the steps at 3e-3 only: if it stays behind there, another rate might have caught up (C01, C64).",
    "On the text of the standard library only Pre-LN with and without skips, at 3e-3: C01, C17 with branches off, C30, C31 and C64 are "
    "judged on the Markov source alone.",
    "Probes for what can be decoded (M5) and gradients (M6): no primary predicate names them.",
)
ARMS = {
    "Pre-LN": FULL, "Post-LN": POST, "no skip": NO_SKIP, "no attention skip": NO_ATTENTION_SKIP, "no MLP skip": NO_MLP_SKIP,
    "no branch": NO_BRANCH, "no branch, tied head": NO_BRANCH_TIED, "no skip, no norm": NEITHER, "shaped attention": SHAPED,
}  # fmt: skip
GAINS = {
    "Pre-LN": 1.0,
    "no branch": 1.0,
    "no branch, tied head": 1.0,
}  # of the linear path; of Post-LN measured, else 0
SWUNG = Predicate(
    "spread of the loss at the end by that of the frozen model on the same batches (M14)", "above", 1.5, other=1.2
)
PERIODIC = Predicate(
    "share of seeds with a period that noise would show in less than 1 % of cases", "above", 0.3, other=-1.0
)
SLIGHTLY = Predicate(
    "share of the way from guessing to symbol frequencies that the loss has come", "below", 0.25, other=0.92
)
AFTER = Predicate("loss of shaped attention after five times the steps less that of Pre-LN, nats", "above", 0.1)
PREDICATES = {
    "C01/a standard block": (
        Predicate("share of seeds in which a network without skips trains at some rate", "below", **FEW),
        Predicate("share of seeds in which the one with skips trains at its best rate", "above", **MOST),
        Predicate("by how much more skips lower the loss at 12 blocks than at 2, at rate 3e-3, nats", "above", 0.0),
    ),
    "C01/any block": (AFTER,),
    "C17/branch off": (
        Predicate("share of seeds that swing (M14 > 1.5, p < 0.01) and do not end as a bigram table", "above", 0.3, other=-1.0),
        Predicate("share of seeds that end calmly (M14 < 1.2) as a bigram table", "below", **FEW),
    ),
    "C17/branch off, tied head": (SWUNG, SLIGHTLY),
    "C17/skip off": (SLIGHTLY, Predicate("loss of guessing less that without skips, nats", "above", 0.0)),
    "C24": (
        Predicate("slope of log |res X| / |X| by sub-layer without skips", "below", 0.0),
        Predicate("the same less that with skips", "below", 0.0),
    ),
    "C27/tokens": (
        Predicate("cosine between different tokens after the last block, without skips", "above", 0.95, other=0.8),
        Predicate("effective rank of what sets tokens apart there, by that with skips", "below", 0.3),
    ),
    "C27/late layers": (
        Predicate("median angle of two late layers' streams without skips, in pi (a cosine of 0.95 is 0.1)", "below", 0.1, other=0.2),
    ),
    "C27/metric": (Predicate("best loss without skips less that with, nats", "above", 0.3),),
    "C29/plateau": (Predicate("share of seeds without skips that end at the symbols' frequencies, all tokens the same", "above", **MOST),),
    "C29/oscillation": (SWUNG, PERIODIC),
    "C30": (
        Predicate("chase index without skips", "below", -0.1),
        Predicate("the same less that with skips", "below", 0.0),
    ),
    "C31": (Predicate("drift in 50 steps of mean updates with skips less that of mean outputs without", "below", 0.0),),
    "C64": (Predicate("rank correlation over the arms of linear-path gain and falling loss", "above", 0.8), AFTER),
}  # fmt: skip


def get_config(variant=None):
    config = sized("acc-S" if variant else "cpu-S")
    config.health.groups = ("forward", "tokens", "ranks")
    config.train.log_every = config.train.steps // 40
    return config


def sweep(variant=None):
    config = get_config(variant)
    every, seeds = {RATE: RATES7 if variant else RATES4}, {"seed": SEEDS}
    shared, some, most = ({RATE: rates} if not variant else every for rates in (SHARED, SOME, RATES4[1:]))
    pair = chain(FULL, NO_SKIP)
    longer = SHAPED | {"train.steps": LONGER * config.train.steps, "optimizer.warmup": LONGER * config.optimizer.warmup}
    return chain(
        product(pair, every, seeds),
        product(chain(NO_BRANCH, NO_BRANCH_TIED), most, seeds),
        product(chain(POST, NO_ATTENTION_SKIP, NO_MLP_SKIP, NEITHER, SHAPED), some, seeds),
        product(longer, {RATE: SOME if variant else SHARED}, seeds),
        product({"model.depth": (2, 6, 24, 48) if variant else LINE}, pair, shared, seeds),
        product({"data.source": "stdlib"}, pair, shared, seeds),
    )


def keep(variant=None):
    geometry = (
        "token_cosine",
        "residual_frobenius",
        "residual_composite",
        "effective_rank",
        "update_ratio",
        "update_cosine",
    )
    looks = {"steps": (*chasing.STEPS, "end"), "look": chasing.look}
    return {"curves": True, "profiles": (1, "end"), "probes": geometry, "studies": ("steadiness",), "looks": looks}


def floors(scale):
    """What predictors that see little can reach, nats: exact for the Markov source, counted on the text of the library."""
    for source in ("markov", "stdlib"):
        row = {"source": source} | data.load(source).baselines.as_dict()
        if source == "markov":
            law = markov.law()
            row |= asdict(markov.floors(law)) | {"symmetric": least_loss(law.pair)}
        yield row


MEASURES = {"floors": floors}


def judge(runs, measured):
    for source, part in runs.split("data.source").items():
        row = next((row for row in measured["floors"] if row["source"] == source), {})
        levels = {name: number(row, name) for name in ("uniform", "unigram", "bigram", "symmetric")}
        arms, best, control = chosen(part)
        yield from collapsed(arms, best, source)
        yield from flat(arms["no skip"], best, levels, source)
        if source == "markov":
            yield from needed(part, arms, best, control)
            yield from branches_off(arms, best, levels)
            yield from chased(arms, best)
            yield routed(best, control)


def chosen(runs):
    """Of 12 blocks: all runs of an arm, those at its best rate, and those of the control that was trained for longer."""
    deep = runs.where({"model.depth": DEEP})
    long = Runs(row for row in deep if "train.steps" in row["fields"])
    arms = {
        name: arm(Runs(row for row in deep if "train.steps" not in row["fields"]), fields)
        for name, fields in ARMS.items()
    }
    return arms, {name: at_best(there).runs for name, there in arms.items()}, at_best(long).runs


def at(runs):
    """At which rate an arm is at its best, in words."""
    best = at_best(runs)
    return f"{best.value:g}{f' ({best.edge})' if best.edge else ''}"


def gap(best, control="no skip"):
    """How much more loss an arm has than the full network."""
    return difference(*((best[one] if isinstance(one, str) else one).losses(SEEDS) for one in (control, "Pre-LN")))


def needed(runs, arms, best, control):
    """C01: does a network train without skips?"""
    gaps = {}
    for depth, part in runs.where({RATE: SHARED}).split("model.depth").items():
        gaps[depth] = difference(*(arm(part, fields).losses(SEEDS) for fields in (NO_SKIP, FULL)))
    nothing = effect([np.nan] * len(SEEDS))
    grows = difference(*(gaps.get(depth, nothing).values for depth in (DEEP, SHALLOW)))
    (without, unknown), (with_, unsaid) = counted(seen.trains(arms["no skip"])), counted(seen.trains(best["Pre-LN"]))
    notes = (
        *(endings(arms[name], name) for name in ("no skip", "Pre-LN")),
        *(
            f"{depth} blocks at rate {SHARED:g}: {told(found, 'nats')} more without skips"
            for depth, found in gaps.items()
        ),
    )
    yield Finding("C01/a standard block", (without, with_, grows), "markov", unknown or unsaid, notes)
    notes = (
        f"after as many steps as the others, at rate {at(arms['shaped attention'])}: {told(gap(best, 'shaped attention'), 'nats')}",
        "this control has no skip around attention; that of its MLP has a weight that is learned from 1",
    )
    yield Finding("C01/any block", (gap(best, control),), "markov", notes=notes)


def collapsed(arms, best, source):
    """C24 and C27: do tokens become the same, and late layers alike?"""
    full, none = best["Pre-LN"], best["no skip"]
    for step, when in ((1, "at the start"), ("end", "after training")):
        falls, usual = seen.slopes(none, step), seen.slopes(full, step)
        notes = (
            f"with skips the slope is {told(effect(usual))}",
            f"second difference without skips in the composite norm, below 0 in Dong's regime: {told(effect(seen.bends(none, step)))}",
        )
        yield Finding("C24", (effect(falls), difference(falls, usual)), f"{source}, {when}", notes=notes)
        ranks = [np.array(seen.last(part, step, "effective_rank")) for part in (none, full)]
        with np.errstate(invalid="ignore", divide="ignore"):
            found = effect(seen.last(none, step, "token_cosine")), effect(ranks[0] / ranks[1])
        notes = (
            f"with skips the cosine is {told(effect(seen.last(full, step, 'token_cosine')))}",
            f"ranks {told(effect(ranks[0]))} without and {told(effect(ranks[1]))} with skips",
        )
        yield Finding("C27/tokens", found, f"{source}, {when}", notes=notes)
    angle, alike = (seen.at_end(none, name) for name in ("late_angle", "late_cka"))
    notes = (
        f"with skips the angle is {told(effect(seen.at_end(full, 'late_angle')))} pi",
        f"CKA of late layers: {told(effect(alike))} without, {told(effect(seen.at_end(full, 'late_cka')))} with skips",
    )
    yield Finding("C27/late layers", (effect(angle),), f"{source}, after training", notes=notes)
    shared = {name: runs.where({RATE: SHARED}) for name, runs in arms.items()}
    notes = (
        f"best rates {at(arms['no skip'])} without and {at(arms['Pre-LN'])} with skips",
        f"at rate {SHARED:g}: {told(gap(shared), 'nats')}",
    )
    yield Finding("C27/metric", (gap(best),), source, notes=notes)


def flat(every, best, levels, source):
    """C29, and C17 with the skip off: where does the loss end, and does it swing?"""
    none = best["no skip"]
    losses = np.array(none.values("last_loss", SEEDS))
    found, unknown = counted(seen.at_frequencies(none, levels["unigram"]))
    spiky = sum(number(row, "spikes.episodes") > 0 for row in every)
    notes = (
        f"loss less that of the symbols' frequencies: {told(effect(losses - levels['unigram']), 'nats')}",
        endings(every, "no skip"),
        f"{spiky} of {len(every)} runs at all rates have an episode of spikes",
    )
    yield Finding("C29/plateau", (found,), source, unknown, notes)
    periodic, unknown = counted(
        [np.nan if np.isnan(chance) else chance < 0.01 for chance in seen.swing(none, "chance")]
    )
    notes = (
        f"with skips the ratio is {told(effect(seen.swing(best['Pre-LN'], 'ratio')))}",
        *(f"rate {rate:g}: {told(effect(seen.swing(part, 'ratio')))}" for rate, part in every.split(RATE).items()),
    )
    yield Finding("C29/oscillation", (effect(seen.swing(none, "ratio")), periodic), source, unknown, notes)
    notes = (
        f"loss {told(effect(losses), 'nats')}; guessing has {levels['uniform']:.3f}, the frequencies {levels['unigram']:.3f}",
    )
    ways = effect(seen.way(losses, levels)), effect(levels["uniform"] - losses)
    yield Finding("C17/skip off", ways, source, notes=notes)


def branches_off(arms, best, levels):
    """C17, when the branches are what is switched off: with a head of its own, and with a tied one."""
    for name, claim in (("no branch", "C17/branch off"), ("no branch, tied head", "C17/branch off, tied head")):
        runs = best[name]
        ratios, chances = (np.array(seen.swing(runs, of)) for of in ("ratio", "chance"))
        losses = np.array(runs.values("last_loss", SEEDS))
        notes = (
            f"best rate {at(arms[name])}: loss {told(effect(losses), 'nats')}; the entropy given one symbol is {levels['bigram']:.3f}",
            endings(arms[name], name),
        )
        if name == "no branch":
            known = np.isfinite(ratios) & np.isfinite(losses)
            table = np.array(seen.by_seed(runs, lambda row: bool(row) and ending(row) == "bigram"), bool)
            (swinging, unknown), (calm, _) = (
                counted(np.where(known, hits, np.nan))
                for hits in (~table & (ratios > 1.5) & (chances < 0.01), table & (ratios < 1.2))
            )
            yield Finding(claim, (swinging, calm), "markov", unknown, (*notes, f"M14 ratio {told(effect(ratios))}"))
        else:
            told_more = f"the best symmetric table has {levels['symmetric']:.3f}; final norm and positions let the model differ from one"
            yield Finding(
                claim, (effect(ratios), effect(seen.way(losses, levels))), "markov", notes=(*notes, told_more)
            )


def chased(arms, best):
    """C30 and C31: do layers run after one another?"""

    def both(where, name):
        return [seen.looked(where[one], name) for one in ("no skip", "Pre-LN")]

    def words(where, name):
        none, full = both(where, name)
        return f"{told(effect(none))} without, {told(effect(full))} with skips"

    shared = {name: runs.where({RATE: SHARED}) for name, runs in arms.items()}
    none, full = both(best, "chase")
    notes = (
        f"index: {words(best, 'chase')}; at rate {SHARED:g} {words(shared, 'chase')}",
        f"less what the layer before passes on: {words(best, 'own')}",
    )
    yield Finding("C30", (effect(none), difference(none, full)), "markov", notes=notes)
    none, full = both(best, "drift_output")
    notes = (
        f"outputs without, updates with: {words(best, 'drift_output')}; at rate {SHARED:g} {words(shared, 'drift_output')}",
        f"the stream: {words(best, 'drift_stream')}",
    )
    yield Finding("C31", (difference(full, none),), "markov", notes=notes)


def routed(best, control):
    """C64: does the loss go by how much of the signal has a linear path?"""
    names = [name for name in ARMS if name != "shaped attention"]
    losses = np.array([best[name].losses(SEEDS) for name in names])
    post = seen.post_ln_gain(best["Post-LN"])
    gains = np.array([post if name == "Post-LN" else [GAINS.get(name, 0.0)] * len(SEEDS) for name in names])
    found = [seen.ranked(*pair) for pair in zip(gains.T, losses.T, strict=True)]
    means = zip(names, gains.mean(axis=1), losses.mean(axis=1), strict=True)
    notes = (
        f"gain and mean loss: {', '.join(f'{name} {gain:.2g}, {loss:.3f}' for name, gain, loss in means)}",
        "shaped attention, which has no skip around attention, is not ranked",
    )
    return Finding("C64", (effect(found), gap(best, control)), "markov", notes=notes)


def figure(runs, measured):
    part = runs.where({"data.source": "markov"})
    levels = next((row for row in measured["floors"] if row["source"] == "markov"), {})
    arms = chosen(part)[0]
    return panel({name: at_best(there) for name, there in arms.items()}, levels)
