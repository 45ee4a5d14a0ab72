"""What do runs say about a claim? Effects over seeds with their intervals, and a verdict by rules that are fixed before the runs.

The unit is the seed. A difference is paired: same seed, same data order in both arms. Every seed counts: one whose value is not known (a
run that ended NaN) stays in the list, never agrees with a claim, and is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from scipy import stats

from resjax.errors import Refused, not_one_of

Verdict = Literal["supported", "refuted", "mixed", "undecided"]
Side = Literal["above", "below", "inside"]
Numbers = Sequence[float] | np.ndarray[Any, Any]
RESAMPLES, LEVEL = 10_000, 0.95
FEW = 5  # seeds up to which the t interval is taken too, and the wider of the two counts
AGREEING = 0.8  # share of all seeds that have to lie on the claimed side
LEAST = 5  # seeds of a primary predicate
SMALLEST_ROPE = 0.01  # nats


class Interval(NamedTuple):
    """The bounds of a confidence interval; NaN where there is none."""

    low: float
    high: float


@dataclass(frozen=True)
class Effect:
    """One number over seeds.

    Attributes:
      values: one a seed, in order; NaN where it is not known.
      interval: 95 %, of the mean of those that are known.
    """

    values: tuple[float, ...]
    interval: Interval

    @property
    def mean(self) -> float:
        known = [value for value in self.values if np.isfinite(value)]
        return float(np.mean(known)) if known else np.nan

    @property
    def missing(self) -> int:
        """Seeds whose value is not known."""
        return sum(not np.isfinite(value) for value in self.values)


def effect(values: Numbers) -> Effect:
    """A number over seeds with its interval: bootstrap of the mean (10,000 resamples, percentiles); with five seeds or fewer, the wider of
    that and Student's."""
    row = np.asarray(values, np.float64)
    known = row[np.isfinite(row)]
    if len(known) < 2:
        return Effect(tuple(map(float, row)), Interval(np.nan, np.nan))
    draws = np.random.default_rng(0).integers(0, len(known), (RESAMPLES, len(known)))
    low, high = np.quantile(known[draws].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    if len(known) <= FEW:
        half = stats.t.ppf((1 + LEVEL) / 2, len(known) - 1) * known.std(ddof=1) / np.sqrt(len(known))
        low, high = min(low, known.mean() - half), max(high, known.mean() + half)
    return Effect(tuple(map(float, row)), Interval(float(low), float(high)))


def difference(arm: Numbers, baseline: Numbers) -> Effect:
    """Paired differences, arm less baseline, by seed.

    Raises:
      Refused: the two have other numbers of seeds.
    """
    if len(arm) != len(baseline):
        raise Refused(
            f"a paired difference needs the same seeds on both sides, and there are {len(arm)} and {len(baseline)}"
        )
    with np.errstate(invalid="ignore"):
        return effect(np.asarray(arm, np.float64) - np.asarray(baseline, np.float64))


def rope(baseline: Numbers) -> float:
    """The half width within which a difference of losses is none: 0.01 nats, or twice the baseline's spread over seeds if that is more."""
    known = np.asarray(baseline, np.float64)
    known = known[np.isfinite(known)]
    return max(SMALLEST_ROPE, 2 * float(known.std(ddof=1)) if len(known) > 1 else 0.0)


def in_ropes(arm: Numbers, baseline: Numbers) -> Effect:
    """Paired differences of losses, arm less baseline, as multiples of the baseline's ROPE: within ±1 the two are equal."""
    found, unit = difference(arm, baseline), rope(baseline)
    return Effect(tuple(value / unit for value in found.values), Interval(*(bound / unit for bound in found.interval)))


def share(hits: Sequence[bool | float] | np.ndarray[Any, Any]) -> Effect:
    """A share of runs, a value of 0 or 1 a run, with Wilson's interval.

    A run that is not known (NaN) widens it: the lower bound counts it as 0, the upper one as 1.
    """
    row = np.asarray(hits, np.float64)
    hit, unknown = int(np.nansum(row)), int(np.isnan(row).sum())
    interval = Interval(wilson(hit, len(row)).low, wilson(hit + unknown, len(row)).high)
    return Effect(tuple(map(float, row)), interval)


def wilson(hits: int, of: int) -> Interval:
    """Wilson's interval of a share; (0, 1) of none."""
    if not of:
        return Interval(0.0, 1.0)
    z = stats.norm.ppf((1 + LEVEL) / 2)
    share, size = hits / of, 1 + z**2 / of
    middle, half = (share + z**2 / (2 * of)) / size, z / size * np.sqrt(share * (1 - share) / of + z**2 / (4 * of**2))
    return Interval(float(max(0.0, middle - half)), float(min(1.0, middle + half)))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given; NaN stays NaN and is not counted."""
    row = np.asarray(p, np.float64)
    order = [int(i) for i in np.argsort(row) if np.isfinite(row[i])]
    adjusted, worst = np.full(len(row), np.nan), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * float(row[i])))
        adjusted[i] = worst
    return adjusted.tolist()


def p_value(found: Effect, threshold: float = 0.0) -> float:
    """Two-sided p of Student's test that the mean is the threshold; NaN with fewer than two known seeds."""
    known = [value for value in found.values if np.isfinite(value)]
    if len(known) < 2:
        return np.nan
    if np.ptp(known) == 0:
        return float(known[0] == threshold)
    return float(stats.ttest_1samp(known, threshold).pvalue)


# ---- predicates and verdicts


@dataclass(frozen=True)
class Predicate:
    """What a claim says of one effect; frozen before the runs.

    Attributes:
      name: in words.
      side: the claimed side of the threshold; ``inside`` is within it on both sides of 0.
      threshold: in the effect's unit.
      seeds: that it needs.
      other: the threshold beyond which it is refuted, if that is another one: Predicate("share", "above", 0.8, other=0.2) is supported
        by an interval wholly above 0.8, refuted by one wholly below 0.2, and undecided by any other, such as 0.3 to 0.6.
      agree: share of the seeds that have to lie on the claimed side themselves; 0 where the claim is that something occurs at all.
    """

    name: str
    side: Side
    threshold: float
    seeds: int = LEAST
    other: float | None = None
    agree: float = AGREEING

    def __post_init__(self) -> None:
        if self.side not in (sides := get_args(Side)):
            raise not_one_of(f"the side of the predicate '{self.name}'", self.side, sides)


@dataclass(frozen=True)
class Judged:
    """A predicate with what was measured of it.

    Attributes:
      effect: what was measured.
      cut: why it cannot be told, if the grid was cut or its best value lies at an edge; empty otherwise.
    """

    predicate: Predicate
    effect: Effect
    cut: str = ""

    @property
    def verdict(self) -> Verdict:
        """supported, refuted, undecided; mixed where the interval says yes and too many seeds do not."""
        low, high = self.effect.interval
        if self.cut or len(self.effect.values) < self.predicate.seeds or not np.isfinite([low, high]).all():
            return "undecided"
        if self._beyond(low, high):
            return "refuted"
        if not self._claimed(low, high):
            return "undecided"
        return "supported" if self.agreeing >= self.predicate.agree * len(self.effect.values) else "mixed"

    @property
    def agreeing(self) -> int:
        """How many seeds lie on the claimed side."""
        return sum(self._claimed(value, value) for value in self.effect.values if np.isfinite(value))

    def _claimed(self, low: float, high: float) -> bool:
        """Whether all from low to high lies on the claimed side."""
        t = self.predicate.threshold
        return {"above": low > t, "below": high < t, "inside": -t < low and high < t}[self.predicate.side]

    def _beyond(self, low: float, high: float) -> bool:
        """Whether all of it lies where the predicate is refuted."""
        side, t = self.predicate.side, self.predicate.threshold
        other = t if self.predicate.other is None else self.predicate.other
        return {"above": high < other, "below": low > other, "inside": low > other or high < -other}[side]

    def sentence(self) -> str:
        """What was claimed and what was seen."""
        low, high = self.effect.interval
        sign = {"above": "> ", "below": "< ", "inside": "within ±"}[self.predicate.side]
        seen = f"{self.effect.mean:.3g} [{low:.3g}, {high:.3g}]" if np.isfinite(low) else "no interval"
        lost = (
            f", {self.effect.missing} of {len(self.effect.values)} seeds without a value" if self.effect.missing else ""
        )
        return f"{self.predicate.name} {sign}{self.predicate.threshold:g}: {seen}{lost}" + (
            f" ({self.cut})" if self.cut else ""
        )


@dataclass(frozen=True)
class Settled:
    """The verdict on a claim at one scale and setting.

    Attributes:
      claim: its id.
      reading: which reading of it; empty where there is one.
      scale, settings: where it holds.
      judged: its primary predicates.
      notes: more that a reader should know.
      construction: whether it follows from the equations alone, so that it counts as no experiment.
    """

    claim: str
    scale: str
    settings: str
    judged: tuple[Judged, ...]
    reading: str = ""
    notes: tuple[str, ...] = field(default=())
    construction: bool = False

    @property
    def verdict(self) -> Verdict:
        """supported if all predicates are; refuted if one is; undecided if one is and none is refuted; else mixed.

        Raises:
          Refused: it has no predicate.
        """
        if not self.judged:
            raise Refused(f"{self.claim} has no predicate to judge it by")
        found = [one.verdict for one in self.judged]
        if "refuted" in found:
            return "refuted"
        if "undecided" in found:
            return "undecided"
        return "mixed" if "mixed" in found else "supported"

    def told(self) -> str:
        """The verdict with its evidence, in some lines."""
        claim = f"{self.claim} ({self.reading})" if self.reading else self.claim
        how = f"{self.verdict} by construction" if self.construction else self.verdict
        lines = [f"{claim}: {how} ({', '.join(filter(None, (self.scale, self.settings)))})"]
        lines += [f"  {one.verdict}: {one.sentence()}" for one in self.judged]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over scales, data or inits: theirs where they agree, mixed where decided ones differ, undecided where none is decided.

    What is undecided somewhere takes nothing from what is decided elsewhere: it is told beside it.
    """
    decided = {one for one in verdicts if one != "undecided"}
    return "undecided" if not decided else decided.pop() if len(decided) == 1 else "mixed"


def best_at_edge(grid: Sequence[float], losses: Sequence[float]) -> str:
    """A sentence where the best value of a grid is its smallest or largest, so that a better one may lie beyond; empty otherwise.

    Losses that are not finite are the worst.
    """
    row = np.where(np.isfinite(losses), losses, np.inf)
    if not np.isfinite(row).any():
        return "no value of the grid ended finite"
    best = int(np.argmin(row))
    inner = sorted(grid)[1:-1]
    return "" if grid[best] in inner else f"the best value, {grid[best]:g}, lies at the edge of the grid"
