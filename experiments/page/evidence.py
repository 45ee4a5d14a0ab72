"""What do the kept results say about each claim? Their verdicts by the judging code, lined up by claim and reading."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments import results
from experiments.claims import Claim, claims
from experiments.experiment import SCALES, Experiment, every
from experiments.judge import Judged, Settled, Verdict, holm, p_value, together

Status = Literal["supported", "refuted", "mixed", "undecided", "not tested"]
STATUSES: tuple[Status, ...] = ("supported", "refuted", "mixed", "undecided", "not tested")
KEPT_SCALES = SCALES[1:]  # smoke keeps nothing


@dataclass(frozen=True)
class Kept:
    """A file of results, read and judged.

    Attributes:
      path: of the file.
      found: what it holds.
      settled: the verdicts that it gives.
    """

    experiment: Experiment
    scale: str
    path: Path
    found: results.Results
    settled: tuple[Settled, ...]

    @property
    def picture(self) -> Path:
        """The file of its figure."""
        return self.path.with_suffix(".svg")

    @property
    def command(self) -> str:
        return str(self.found.about["command"])

    @cached_property
    def outcomes(self) -> Counter:
        """How many runs ended how."""
        return self.found.runs.outcomes()


@dataclass(frozen=True)
class Entry:
    """A verdict at one scale and setting.

    Attributes:
      adjusted: of each predicate the p-value by Holm's rule over all predicates of the page; NaN where there is none.
    """

    kept: Kept
    settled: Settled
    adjusted: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A claim, or one reading of it, with all that was found about it."""

    claim: Claim
    reading: str
    entries: tuple[Entry, ...]

    @property
    def verdict(self) -> Status:
        """Over all scales and settings; 'not tested' where nothing was found."""
        return together([one.settled.verdict for one in self.entries]) if self.entries else "not tested"

    @property
    def construction(self) -> bool:
        """Whether what decides it follows from the equations alone."""
        decided = [one for one in self.entries if one.settled.verdict != "undecided"]
        return bool(self.entries) and all(one.settled.construction for one in decided or self.entries)

    @property
    def scales(self) -> list[str]:
        """The scales of the entries that decide it, or of all where none does."""
        decided = [one for one in self.entries if one.settled.verdict != "undecided"]
        return list(dict.fromkeys(one.settled.scale for one in decided or self.entries))


@dataclass(frozen=True)
class Evidence:
    """All that is known.

    Attributes:
      built: the experiments that have a file, by name.
      kept: the files of results.
      rows: the claims, a row for each reading.
    """

    built: Mapping[str, Experiment]
    kept: tuple[Kept, ...]
    rows: tuple[Row, ...]

    def about(self, claim: str) -> list[Row]:
        """The rows of a claim."""
        return [row for row in self.rows if row.claim.id == claim]

    def of(self, experiment: str) -> list[Kept]:
        """The results of an experiment, one a scale."""
        return [one for one in self.kept if one.experiment.name == experiment]

    def counts(self, construction: bool = False) -> dict[Status, int]:
        """How many rows have which verdict, those by construction counted apart; of what is not tested, how many claims."""
        found = Counter(row.verdict for row in self.rows if row.entries and row.construction == construction)
        found["not tested"] = 0 if construction else len(claims()) - self.tested
        return {status: found[status] for status in STATUSES}

    def brief(self, names: Iterable[str]) -> list[Row]:
        """The rows of some claims; of a claim about which nothing was found, one row."""
        found = {name: self.about(name) for name in names}
        return [
            row
            for rows in found.values()
            for row in (rows if any(one.entries for one in rows) else [Row(rows[0].claim, "", ())])
        ]

    @property
    def tested(self) -> int:
        """Claims about which something was found."""
        return len({row.claim.id for row in self.rows if row.entries})


def gather(experiments: Iterable[Experiment] | None = None) -> Evidence:
    """What the committed results and the judging code say, of all experiments or of those given.

    Raises:
      Refused: a file is none of results, or an experiment cannot judge what it holds.
    """
    built = {one.name: one for one in (every() if experiments is None else experiments)}
    kept = []
    for one in built.values():
        for scale in KEPT_SCALES:
            path = results.place(one, scale)
            if path.exists():
                found = results.read(path)
                settled = one.settle(found.runs, found.measured, scale)
                kept.append(Kept(one, scale, path, found, tuple(settled)))
    return Evidence(built, tuple(kept), tuple(_rows(_entries(kept))))


def _entries(kept: Sequence[Kept]) -> list[Entry]:
    """All verdicts with Holm's p-values over all predicates that are no construction."""
    verdicts = [(one, settled) for one in kept for settled in one.settled]
    counted = [(i, j) for i, (_, settled) in enumerate(verdicts) if not settled.construction for j in _numbers(settled)]
    adjusted = dict(zip(counted, holm([_p(verdicts[i][1].judged[j]) for i, j in counted]), strict=True))
    return [
        Entry(one, settled, tuple(adjusted.get((i, j), np.nan) for j in _numbers(settled)))
        for i, (one, settled) in enumerate(verdicts)
    ]


def _numbers(settled: Settled) -> range:
    return range(len(settled.judged))


def _p(judged: Judged) -> float:
    """Two-sided p that the mean is the bound that it is judged by."""
    said, mean = judged.predicate, judged.effect.mean
    bound = said.threshold
    if said.side == "inside":
        bound = float(np.copysign(said.threshold, mean))
    elif said.other is not None and (mean < said.other if said.side == "above" else mean > said.other):
        bound = said.other
    return p_value(judged.effect, bound)


def _rows(entries: Sequence[Entry]) -> Iterable[Row]:
    by_key: dict[tuple[str, str], list[Entry]] = {}
    for one in entries:
        by_key.setdefault((one.settled.claim, one.settled.reading), []).append(one)
    for claim in claims().values():
        found = [reading for name, reading in by_key if name == claim.id]
        whole = [""] if "" in found or not claim.readings else []
        for reading in dict.fromkeys([*whole, *claim.readings, *found]):
            yield Row(claim, reading, tuple(by_key.get((claim.id, reading), ())))


def undecided_because(judged: Judged) -> str:
    """What would decide a predicate that is undecided; empty where it is not."""
    verdict: Verdict = judged.verdict
    count, known = len(judged.effect.values), len(judged.effect.values) - judged.effect.missing
    if verdict != "undecided":
        return ""
    if judged.cut:
        return judged.cut
    if count < judged.predicate.seeds:
        return f"{judged.predicate.seeds} seeds, of which there are {count}"
    if known < 2:
        return f"values of at least two seeds; known is that of {known}"
    return "more seeds, or a larger effect: the interval spans the bound"


def ended(kept: Kept) -> dict[str, Any]:
    """How the runs of a file ended: their number, those that did not end as trained, and which these are."""
    others = {name: count for name, count in sorted(kept.outcomes.items()) if name != "trained"}
    return {"runs": len(kept.found.runs), "others": sum(others.values()), "which": others}
