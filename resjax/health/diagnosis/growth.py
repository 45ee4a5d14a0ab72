"""How does the stream run over depth and over training: does it vanish or explode, against what its scheme and healthy runs do?"""

from dataclasses import dataclass

import numpy as np

from resjax.health.diagnosis import healthy, known
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.course import recipe
from resjax.health.diagnosis.finding import Finding
from resjax.health.diagnosis.starts import start_band
from resjax.health.findings import section
from resjax.health.reading import at_end, at_start, since, sites_named

PROBE = "stream_rms"
PROFILE_MARGIN = 10.0  # around the scheme's own growth over depth (and at the end around what healthy runs make of it)
USUAL = (0.1, 10.0)  # growth over depth that is neither vanishing nor explosion, whatever the scheme
ANY_SCHEME = (0.01, 100.0)  # the bounds where the scheme's own growth is no guide: two orders of magnitude
STEPS_MARGIN = 5.0  # above the largest growth of the stream in healthy runs


def examined(case: Case) -> list[Finding]:
    """All findings of the stream's size."""
    return [*large_steps(case), *over_depth(case)]


# ---- over depth


@dataclass(frozen=True, eq=False)
class _Bounds:
    """What the stream's RMS after a site may be, over that after the first: (depth, sites) each, and where that comes from."""

    low: np.ndarray
    high: np.ndarray
    source: str


def over_depth(case: Case) -> list[Finding]:
    """The stream falls or grows over depth far beyond its scheme's own profile, at the end or, if not there, at the start."""
    if not case.has(PROBE):
        return []
    record = case.record[PROBE].astype(np.float64)
    end, first = at_end(record), at_start(record)
    fresh = case.record.steps[0] <= 1
    own = own_profile(case, end.shape)
    began = relative(first) if own is None and fresh and np.isfinite(relative(first)).all() else own
    found: dict[str, Finding] = {}
    for made in (
        _judged(case, end, bounds_at_end(case, began), "at the end"),
        _judged(case, first, bounds_at_start(case, own), "at the start") if fresh else [],
    ):
        for one in made:
            found.setdefault(one.kind, one)
    return list(found.values())


def relative(profile: np.ndarray) -> np.ndarray:
    """Over the value at the first site; NaN where that is no positive number."""
    first = profile[0, 0]
    return profile / first if np.isfinite(first) and first > 0 else np.full(profile.shape, np.nan)


def own_profile(case: Case, shape: tuple[int, ...]) -> np.ndarray | None:
    """The scheme's own growth over depth at its start, (depth, sites); None where it is not known or is another network's."""
    band = start_band(case, PROBE)
    if band is None or band.low.shape != shape:
        return None
    own = relative(np.sqrt(band.low * band.high))
    return own if np.isfinite(own).all() else None


def skips_overridden(case: Case) -> bool:
    """Whether the configuration changes the skips of its scheme: what the stream then does over depth is its doing, and no guide."""
    residual = section(case.config, "residual")
    parts = (residual, section(residual, "attention"), section(residual, "mlp"))
    return any(part.get("skip") not in (None, "", 1.0, "1") for part in parts) or "skip" in str(
        residual.get("at") or ""
    )


def bounds_at_start(case: Case, own: np.ndarray | None) -> _Bounds:
    """Around the scheme's own growth."""
    if (plain := _without_guide(case, own)) is not None:
        return plain
    assert own is not None
    band = start_band(case, PROBE)
    source = band.source.partition("around ")[2] if band is not None else "this run's first step"
    return _around(own, own, f"{PROFILE_MARGIN:g} times around {source}")


def bounds_at_end(case: Case, own: np.ndarray | None) -> _Bounds:
    """The same, changed by training as in healthy runs."""
    if (plain := _without_guide(case, own)) is not None:
        return plain
    assert own is not None
    change = healthy.change_band(PROBE, case.scheme, *own.shape)
    if change is None:
        return bounds_at_start(case, own)
    low, high = own * change.low / change.high[0, 0], own * change.high / change.low[0, 0]
    return _around(low, high, f"{PROFILE_MARGIN:g} times around the growth at the start, changed as in {change.source}")


def _without_guide(case: Case, own: np.ndarray | None) -> _Bounds | None:
    shape = at_end(case.record[PROBE]).shape
    if own is None:
        return _Bounds(np.full(shape, ANY_SCHEME[0]), np.full(shape, np.inf), "two orders of magnitude")
    if skips_overridden(case):
        words = "two orders of magnitude, since the configuration changes the scheme's skips"
        return _Bounds(np.full(shape, ANY_SCHEME[0]), np.full(shape, ANY_SCHEME[1]), words)
    return None


def _around(low: np.ndarray, high: np.ndarray, source: str) -> _Bounds:
    return _Bounds(np.fmin(low / PROFILE_MARGIN, USUAL[0]), np.fmax(high * PROFILE_MARGIN, USUAL[1]), source)


def _judged(case: Case, profile: np.ndarray, bounds: _Bounds, when: str) -> list[Finding]:
    """The findings of one profile (depth, sites)."""
    grown, made = relative(profile), []
    with np.errstate(invalid="ignore"):
        sides = {"vanishing stream": grown < bounds.low, "exploding stream": np.isfinite(grown) & (grown > bounds.high)}
    names = case.record.site_names(profile.shape[1])
    for kind, hit in sides.items():
        if not hit.any():
            continue
        vanishes = kind == "vanishing stream"
        size = np.where(hit, grown, np.inf if vanishes else -np.inf)
        worst = np.unravel_index(int(size.argmin() if vanishes else size.argmax()), size.shape)
        low, high = float(bounds.low[worst]), float(bounds.high[worst])
        with np.errstate(invalid="ignore", divide="ignore"):
            rows = case.record[PROBE][:, worst[0], worst[1]] / case.record[PROBE][:, 0, 0]
            out = rows < low if vanishes else rows > high
        began = int(case.record.steps[since(out) if when == "at the end" else 0])
        change = (
            f"{1 / grown[worst]:.3g} times smaller"
            if vanishes and grown[worst] > 0
            else "nothing is left"
            if vanishes
            else f"{grown[worst]:.3g} times larger"
        )
        made.append(
            Finding(
                kind,
                sites_named(case.record, hit),
                int(case.record.steps[-1 if when == "at the end" else 0]),
                f"stream RMS {profile[0, 0]:.2g} after block 0, {names[0]}, and {profile[worst]:.2g} after block {worst[0]}, "
                f"{names[worst[1]]} {when}: {change}",
                ADVICE[kind],
                REASON[kind],
                "stream RMS over that after the first site",
                float(grown[worst]),
                (low, high if np.isfinite(high) else None),
                bounds.source,
                began,
                at=hit,
            )
        )
    return made


ADVICE = {
    "vanishing stream": "Look at the skips' gains (a product of all above a block) and at the sizes of the branches' outputs; keep the "
    "skip at 1.",
    "exploding stream": "Look from which block on the slope is steep, and at the size of the branches' outputs there: scale them by "
    "1/sqrt(2 depth), or bound them by a norm.",
}
REASON = {
    "vanishing stream": "what early blocks wrote is gone before the head reads it, and gradients shrink by the same factors on the way "
    "down",
    "exploding stream": "each block outweighs all before it, the update that one step makes grows with it, and low precision overflows",
}


# ---- over training


def large_steps(case: Case) -> list[Finding]:
    """The stream of most sites grows, while the rate is high, far more than in any healthy run; by whose updates, where few do it."""
    if not case.has(PROBE):
        return []
    record, first = case.record[PROBE].astype(np.float64), at_start(case.record[PROBE])
    band = healthy.change_band(PROBE, case.scheme, *first.shape)
    if band is None or not np.isfinite(first).any():
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = known.median((record / (first * band.high)).reshape(len(record), -1), 1)
        worst = known.median(known.largest(record, 0) / first)
    with np.errstate(invalid="ignore"):
        outgrown = growth > STEPS_MARGIN
    if not outgrown.any():
        return []
    row, usual = int(np.argmax(outgrown)), known.median(band.high)
    step = int(case.record.steps[row])
    few = outgrown_updates(case, row)
    by = "" if few is None else " by the updates of these sites alone"
    return [
        Finding(
            "steps too large",
            "most sites" if few is None else sites_named(case.record, few),
            step,
            f"by step {step} the stream had outgrown every healthy run{by}, and it became {worst:.3g} times as large as at the start "
            f"(median over sites); {recipe(case)}",
            "Lower the rate or lengthen the warm-up before anything else; clipping bounds a step but not its repetition."
            if few is None
            else "Look at the learning rate, the size and the gradient of these weights beside those of their kind in other blocks.",
            "weights that grow this fast turn every norm's gradient down and every branch into a constant",
            "growth of the stream",
            worst,
            (None, STEPS_MARGIN * usual),
            f"{STEPS_MARGIN:g} times the largest of {band.source}",
            step,
            at=few,
        )
    ]


def outgrown_updates(case: Case, row: int) -> np.ndarray | None:
    """The sites whose updates have outgrown those of healthy runs by a recorded row, (block, site), where they are fewer than half."""
    if "update_rms" not in case.record:
        return None
    updates, first = case.record["update_rms"].astype(np.float64), at_start(case.record["update_rms"])
    band = healthy.change_band("update_rms", case.scheme, *first.shape)
    if band is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        hit = updates[row] / (first * band.high) > STEPS_MARGIN
    return hit if 0 < hit.sum() < 0.5 * np.isfinite(first).sum() else None
