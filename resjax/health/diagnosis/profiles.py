"""What do the profiles over depth say is wrong? Rewriting and restless layers, uneven steps, biased adds."""

from collections.abc import Sequence

import numpy as np

from resjax.health.diagnosis import healthy, known
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.diagnosis.starts import START_MARGIN, start_band
from resjax.health.reading import at_end, at_start, ranges, since, sites_named

REWRITING_MARGIN = 3.0  # above the highest of the healthy runs
REWRITING_RATIO = 0.5  # updates smaller than half the stream rewrite nothing
REWRITING_STEP = 4.0  # above the neighbours of the same kind
NEIGHBOURS = 2  # to either side
RESTLESS_SHARE, RESTLESS_ROWS = 0.4, 8  # of the recorded rows, and at least so many, of which the end of a run is made
RESTLESS_JITTER, RESTLESS_FACTOR = 0.15, 4.0  # of log ratio between rows; beyond the median of its kind
RISING, FALLING = 0.25, -0.05  # change of log ratio over that end
UNEVEN = 8.0  # relative step of a weight over that of its kind
BIASED = 0.5  # of the mean error, signed: rounding to nearest and at random keep it within a few percent
FEWEST = 1e-4  # mean error of an add below which its bias is nothing: float32 loses 1e-8


def examined(case: Case) -> list[Finding]:
    """All findings of the profiles."""
    return [*rewriting(case), *restless(case), *uneven_steps(case), *biased_adds(case)]


def loud_start(case: Case) -> list[Finding]:
    """Sites whose first update is far above that of the scheme's own start."""
    probe = "update_ratio"
    if not case.has(probe) or case.record.steps[0] > 1 or (band := start_band(case, probe)) is None:
        return []
    values = at_start(case.record[probe])
    if values.shape != band.low.shape:
        return []
    limit = np.fmax(band.high * (REWRITING_MARGIN / START_MARGIN), REWRITING_RATIO)
    with np.errstate(invalid="ignore"):
        hit = values > limit
    if not hit.any():
        return []
    worst = np.unravel_index(int(np.where(hit, values / limit, -np.inf).argmax()), values.shape)
    source = f"half the stream, or {REWRITING_MARGIN:g} times this scheme's own start under the ordinary init, whichever is more"
    return [_rewriting(case, hit, values, worst, (None, float(limit[worst])), source, "at the start", 0)]


# ---- the end


def rewriting(case: Case) -> list[Finding]:
    """Sites that end with updates far above those of their neighbours and of healthy runs: each replaces what was there."""
    probe = "update_ratio"
    if not case.has(probe):
        return []
    values, first = at_end(case.record[probe]), at_start(case.record[probe])
    beside = neighbours(values)
    limit = np.fmax(REWRITING_STEP * beside, REWRITING_RATIO)
    source = "half the stream, or four times the neighbours of the same kind, whichever is more"
    if (band := healthy.end_band(probe, case.scheme, *values.shape)) is not None:
        limit = np.fmax(limit, REWRITING_MARGIN * band.high)
        factor = healthy.change_band(probe, case.scheme, *values.shape)
        if factor is not None:
            limit = np.fmax(limit, REWRITING_MARGIN * factor.high * np.fmin(first, ordinary_start(case, first)))
        source = (
            f"the most of: half the stream, four times the neighbours of the same kind, and {REWRITING_MARGIN:g} times the end, or "
            f"the change since the start, of {band.source}"
        )
    with np.errstate(invalid="ignore"):
        hit = values > limit
    if not hit.any():
        return []
    worst = np.unravel_index(int(np.where(hit, values / limit, -np.inf).argmax()), values.shape)
    with np.errstate(invalid="ignore"):
        rows = case.record[probe][:, worst[0], worst[1]] > limit[worst]
    return [_rewriting(case, hit, values, worst, (None, float(limit[worst])), source, "at the end", since(rows))]


def ordinary_start(case: Case, first: np.ndarray) -> np.ndarray:
    """The largest update ratios that are ordinary at the start: four times those of the neighbours, and what the scheme's own start gives.

    The first block's stream is the embedding alone, as small as it may be: it is compared with the scheme's start only.
    """
    limit = REWRITING_STEP * neighbours(first)
    limit[0] = np.inf
    band = start_band(case, "update_ratio")
    return np.fmin(limit, band.high) if band is not None and band.high.shape == first.shape else limit


def _rewriting(
    case: Case,
    hit: np.ndarray,
    values: np.ndarray,
    worst: Sequence,
    bounds: tuple[float | None, float],
    source: str,
    when: str,
    row: int,
) -> Finding:
    beside = neighbours(values)[worst[0], worst[1]]
    value = float(values[worst[0], worst[1]])
    compared = (
        f", {value / beside:.2g} times that of its neighbours of the same kind ({beside:.2g})" if beside > 0 else ""
    )
    return Finding(
        "rewriting layers",
        sites_named(case.record, hit),
        int(case.record.steps[0 if when == "at the start" else -1]),
        f"update/stream ratio {value:.3g} {when}{compared}",
        "Look whether its output matrix or gain is out of line, and at the gradient below it; bound it by a norm on the branch's "
        "output or a smaller scale.",
        "an update larger than the stream replaces what earlier blocks wrote, and later blocks read little else",
        "update_ratio",
        value,
        bounds,
        source,
        int(case.record.steps[row]),
        at=hit,
    )


def neighbours(values: np.ndarray) -> np.ndarray:
    """The median of the nearest blocks' sites of the same kind, two to either side, itself left out; NaN where none of them has a value."""
    depth, rows = len(values), []
    for block in range(depth):
        first = min(max(0, block - NEIGHBOURS), max(0, depth - 1 - 2 * NEIGHBOURS))
        near = [i for i in range(first, min(depth, first + 2 * NEIGHBOURS + 1)) if i != block]
        rows.append(known.median(values[near], 0) if near else np.full(values.shape[1], np.nan))
    return np.stack(rows)


def restless(case: Case) -> list[Finding]:
    """Sites whose update ratio still moves when that of the others has settled, or rises while that of the others falls."""
    if not case.has("update_ratio"):
        return []
    record = case.record["update_ratio"]
    count = max(RESTLESS_ROWS, round(RESTLESS_SHARE * len(record)))
    if len(record) < 2 * RESTLESS_ROWS:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(record[-count:].astype(np.float64))
    logs[~np.isfinite(logs)] = np.nan
    whole = np.isfinite(logs).all(axis=0)
    if not whole.any():
        return []
    time = np.linspace(-0.5, 0.5, count)[:, None, None]
    slope = (logs * time).sum(axis=0) / (time**2).sum(axis=0)  # change of log ratio over the whole stretch
    left = logs - logs.mean(axis=0) - slope * time
    jitter = np.sqrt(np.square(np.diff(left, axis=0)).mean(axis=0) / 2)
    usual, middle = (known.median(np.where(whole, x, np.nan), 0) for x in (jitter, slope))
    with np.errstate(invalid="ignore"):
        shakes = whole & (jitter > RESTLESS_JITTER) & (jitter > RESTLESS_FACTOR * usual)
        rises = whole & (slope > RISING) & (middle < FALLING) & ~shakes
    first = int(case.record.steps[-count])
    found = []
    for hit, figure, values, usually, verb in (
        (shakes, "jitter of the update ratio", jitter, usual, "does not settle"),
        (rises, "trend of the update ratio", slope, middle, "rises while the others fall"),
    ):
        if not hit.any():
            continue
        worst = np.unravel_index(int(np.where(hit, values, -np.inf).argmax()), values.shape)
        typical = float(usually[worst[1]])
        bound = max(RESTLESS_JITTER, RESTLESS_FACTOR * typical) if verb == "does not settle" else RISING
        found.append(
            Finding(
                "restless layers",
                sites_named(case.record, hit),
                int(case.record.steps[-1]),
                f"since step {first} the update/stream ratio {verb}: {TRENDS[verb].format(np.exp(values[worst]), np.exp(typical))}",
                "Look at this block's gradient and step sizes beside the others'; a lower rate for its role, or for all, or clipping.",
                "a layer that still moves when the others have settled is trained at too high a rate for it, or works against them",
                figure,
                float(values[worst]),
                (None, float(bound)),
                "the other sites of the same kind in this run",
                first,
                at=hit,
            )
        )
    return found


TRENDS = {
    "does not settle": "from one recorded step to the next it changes by a factor of {:.3g}, others of its kind by {:.3g}",
    "rises while the others fall": "it changed by a factor of {:.3g}, the median of its kind by {:.3g}",
}


# ---- what only some runs record


def uneven_steps(case: Case) -> list[Finding]:
    """The weights of one block and role move many times as far, for their size, as those of the same role in other blocks."""
    probe = "role_change"
    if not case.has(probe) or len(case.record) < 3:
        return []
    record = case.record[probe].astype(np.float64)
    record[record <= 0] = np.nan
    usual = np.exp(known.median(np.log(record), 1))[:, None]
    times = known.median((record / usual)[1:], 0)
    with np.errstate(invalid="ignore"):
        hit = times > UNEVEN
    if not hit.any():
        return []
    worst = np.unravel_index(int(np.where(hit, times, -np.inf).argmax()), times.shape)
    roles = case.record.axis_names(probe, times.shape[1])
    names = [f"{roles[i]} of {ranges(np.flatnonzero(hit[:, i]))}" for i in range(times.shape[1]) if hit[:, i].any()]
    return [
        Finding(
            "uneven steps",
            "; ".join(names),
            int(case.record.steps[-1]),
            f"a step changes {roles[worst[1]]} of block {worst[0]} by {at_end(record)[worst]:.2g} of its size, {times[worst]:.3g} times "
            "the median of the other blocks (over the recorded steps)",
            "Look at this weight's learning rate, its size, and its gradient beside the others'.",
            "with Adam all weights of a role move alike: one that does not has another rate, or is far smaller than its kind",
            "relative step of a weight over its kind's",
            float(times[worst]),
            (None, UNEVEN),
            "the same role in the other blocks of this run",
            int(case.record.steps[0]),
        )
    ]


def biased_adds(case: Case) -> list[Finding]:
    """The adds lose to one side: rounding that is not to nearest."""
    signed, mean = case.end("signed_error"), case.end("mean_error")
    if signed is None or mean is None:
        return []
    with np.errstate(invalid="ignore"):
        hit = (np.abs(signed) > BIASED * mean) & (mean > FEWEST)
    if not hit.any():
        return []
    worst = np.unravel_index(int(np.where(hit, np.abs(signed), -np.inf).argmax()), signed.shape)
    return [
        Finding(
            "biased adds",
            sites_named(case.record, hit),
            case.last_step,
            f"signed mean error of an add {100 * signed[worst]:.2g} % beside {100 * mean[worst]:.2g} % unsigned",
            "Look for a truncating cast or accelerator mode at the residual add; keep the stream in float32, or round to nearest.",
            "an error of one sign adds up over depth as the number of adds, noise as its root",
            "signed_error",
            float(signed[worst]),
            (-BIASED * float(mean[worst]), BIASED * float(mean[worst])),
            "half the mean error; rounding to nearest stays within a few percent of it",
            at=hit,
        )
    ]
