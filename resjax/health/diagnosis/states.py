"""What do the studies of a state say is wrong? Blocks without effect, late layers alike, massive activations, precision."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from resjax.health.diagnosis import healthy
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.reading import ranges

DEAD_SHARE = 0.25  # of the blocks: fewer idle ones are the habit of deep models
HARM = 0.02  # nats that the loss falls by without a block
ALIKE_FACTOR, ALIKE = 3.0, 0.01  # below the smallest of healthy runs; and an angle (over pi) that is small by itself
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0  # Sun et al. 2024 (2402.17762): magnitude, and times the median magnitude
ROUNDING = 0.01  # nats that the stream's own dtype may cost


def examined(case: Case) -> list[Finding]:
    """All findings of the studies that were made."""
    return [*idle(case), *harmful(case), *alike(case), *massive(case), *rounding(case)]


def idle(case: Case) -> list[Finding]:
    """Many blocks that the loss does not miss and that hardly change the stream."""
    if (study := case.studies.get("ablation")) is None:
        return []
    from resjax.health.studies.ablation import (
        DEAD_NATS,
        DEAD_RATIO,
    )  # loads JAX, and who has studied a state has it loaded

    dead, blocks = np.asarray(study["dead"], bool), np.asarray(study["blocks"])
    share = float(dead.mean())
    if not share > DEAD_SHARE:
        return []
    return [
        Finding(
            "idle depth",
            ranges(blocks[dead]),
            case.last_step,
            f"{int(dead.sum())} of {len(blocks)} blocks studied are worth less than {DEAD_NATS:g} nats each and change the stream by less "
            f"than {DEAD_RATIO:.0%}{carried(study)}",
            "Fewer blocks would do; or give the deeper ones weight: layer-norm scaling, a larger share of the stream, another scheme.",
            "each of these blocks can be taken out and the loss stays",
            "share of dead blocks",
            share,
            (None, DEAD_SHARE),
            "blocks below both bounds are dead; a quarter of them is the most that is taken for habit",
        )
    ]


def carried(study: Mapping[str, Any]) -> str:
    """The effective depth in words; empty where no block is worth anything."""
    value = float(study["effective_depth"])
    return f"; effective depth {value:.3g} of {len(study['blocks'])}" if np.isfinite(value) else ""


def harmful(case: Case) -> list[Finding]:
    """Blocks without which the loss is lower."""
    if (study := case.studies.get("ablation")) is None:
        return []
    delta, blocks = np.asarray(study["delta"]), np.asarray(study["blocks"])
    hit = delta < -HARM
    if not hit.any():
        return []
    worst = int(np.argmin(delta))
    return [
        Finding(
            "harmful blocks",
            ranges(blocks[hit]),
            case.last_step,
            f"without block {blocks[worst]} the held-out loss is {-delta[worst]:.3f} nats lower",
            "Compare its update ratio and gradient with its neighbours'; train on from here at a lower rate.",
            "a trained block should not cost more than it gives",
            "rise of the loss without the block",
            float(delta[worst]),
            (-HARM, None),
            "0 up to the noise of the held-out tokens",
        )
    ]


def alike(case: Case) -> list[Finding]:
    """The streams of late blocks hardly differ in direction."""
    if (study := case.studies.get("similarity")) is None:
        return []
    late = float(study["late"])
    known = healthy.study_range("late", case.scheme)
    low = min(ALIKE, known[0] / ALIKE_FACTOR) if known else ALIKE / ALIKE_FACTOR
    if not late < low:
        return []
    return [
        Finding(
            "late layers alike",
            "the last third of the blocks",
            case.last_step,
            f"median angle between the streams of the last third of the blocks {180 * late:.2g} degrees",
            "Compare the loss without them (the ablation study); give them more weight, or leave them out.",
            "layers that leave the direction of every token as it is leave what the head reads as it is",
            "angular distance of late layers",
            late,
            (low, None),
            f"a third of the smallest of {known[2]}, and at most {ALIKE:g}" if known else "no healthy run was studied",
        )
    ]


def massive(case: Case) -> list[Finding]:
    """A few features of a few tokens dwarf all others."""
    if (study := case.studies.get("massive")) is None:
        return []
    largest, median = np.asarray(study["largest"]), np.asarray(study["median"])
    with np.errstate(divide="ignore", invalid="ignore"):
        times = largest / median
    hit = (largest > MASSIVE) & (times > MASSIVE_RATIO)
    if not hit.any():
        return []
    worst = int(np.where(hit, times, -np.inf).argmax())
    features = sorted({int(feature) for feature in np.asarray(study["feature"])[hit]})
    return [
        Finding(
            "massive activations",
            f"{ranges(np.flatnonzero(hit))}; feature{'s' * (len(features) > 1)} {', '.join(map(str, features[:6]))}",
            case.last_step,
            f"magnitude {largest[worst]:.3g} after block {worst}, {times[worst]:.3g} times the median, at position "
            f"{int(np.asarray(study['position'])[worst])}",
            "Keep the stream in float32 or bfloat16, and quantise with care; they often are attention's way of doing nothing.",
            "a few elements this large set the norms of their tokens and, in low precision, the resolution of all adds",
            "largest over median magnitude",
            float(times[worst]),
            (None, MASSIVE_RATIO),
            "Sun et al. 2024 (2402.17762): above 100, and 1,000 times the median",
        )
    ]


def rounding(case: Case) -> list[Finding]:
    """The dtype that the stream has costs loss against a float32 one."""
    formats = case.studies.get("rounding", {}).get("formats", {})
    if case.dtype == "float32" or case.dtype not in formats:
        return []
    change = float(formats[case.dtype]["loss"])
    if abs(change) <= ROUNDING:
        return []
    told = (
        f"{abs(change):.3f} nats {'higher' if change > 0 else 'lower'} than"
        if np.isfinite(change)
        else "not finite, and it is"
    )
    return [
        Finding(
            "costly rounding",
            "the residual adds",
            case.last_step,
            f"with its adds rounded to {case.dtype} the held-out loss is {told} with exact ones",
            "Keep the stream in float32 (precision.stream=float32): 4 bytes an element, no slower branches.",
            "only the residual adds differ between the two numbers",
            "change of the loss",
            change,
            (-ROUNDING, ROUNDING),
            "the noise that 0.01 nats is taken for",
        )
    ]
