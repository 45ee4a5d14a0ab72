"""What did runs that went well look like? The committed set of them, and the ranges over depth that they span.

``healthy.json`` is made by ``python -m benchmarks.healthy``; of every run it keeps the probes of the first and of the last recorded steps.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resjax.health.diagnosis import known
from resjax.health.normal import LIKE

PATH = Path(__file__).with_name("healthy.json")


@dataclass(frozen=True, eq=False)
class Healthy:
    """One run of the set.

    Attributes:
      label: scheme, size and data, in words.
      scheme: name in the catalogue.
      depth: blocks.
      start, end: by probe, (depth, sites) or (depth,): of step 1, and the median of the last recorded steps.
      studies: single numbers of studies on its last state.
      facts: what it was: fields, losses.
    """

    label: str
    scheme: str
    depth: int
    start: Mapping[str, np.ndarray]
    end: Mapping[str, np.ndarray]
    studies: Mapping[str, float]
    facts: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Band:
    """A range by site.

    Attributes:
      low, high: the smallest and largest of the healthy runs, the shape of the probe; NaN where they have none.
      source: which runs, in words.
    """

    low: np.ndarray
    high: np.ndarray
    source: str

    def widened(self, factor: float) -> "Band":
        """The band with a margin on either side, for positive figures."""
        return Band(self.low / factor, self.high * factor, self.source)


@functools.cache
def runs() -> tuple[Healthy, ...]:
    """The committed set."""
    arrays = lambda part: {name: np.array(rows, np.float64) for name, rows in part.items()}  # noqa: E731
    made = []
    for row in json.loads(PATH.read_text(encoding="utf-8"), parse_constant=float)["runs"]:
        known = {name: row[name] for name in ("label", "scheme", "depth", "studies", "facts")}
        made.append(Healthy(**known, start=arrays(row["start"]), end=arrays(row["end"])))
    return tuple(made)


def like(scheme: str) -> tuple[list[Healthy], str]:
    """The healthy runs to compare a scheme with, and who they are: its own, else of the scheme that it starts as, else all."""
    base = scheme.partition("+")[0]
    for name in (base, LIKE.get(base)):
        if found := [run for run in runs() if run.scheme == name]:
            return found, f"{len(found)} healthy run{'s' * (len(found) > 1)} of {name}"
    return list(runs()), f"the {len(runs())} healthy runs of all schemes, since none is of {base}"


def change_band(probe: str, scheme: str, depth: int, sites: int) -> Band | None:
    """By which factor a probe changes from the first step to the end in healthy runs, (depth, sites); None where they do not tell.

    Runs of another depth are read at the same share of the depth; the first and the last block are compared with the first and the
    last.
    """
    found, who = like(scheme)
    profiles = []
    for run in found:
        if probe in run.start and probe in run.end and run.end[probe].ndim == 2:
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = run.end[probe] / run.start[probe]
            profiles.append(stretched(factor, depth, sites))
    return _band(profiles, who)


def end_band(probe: str, scheme: str, depth: int, sites: int) -> Band | None:
    """The values of a probe at the end of healthy runs, (depth, sites), in the same way."""
    found, who = like(scheme)
    return _band(
        [stretched(run.end[probe], depth, sites) for run in found if run.end.get(probe, NOTHING).ndim == 2], who
    )


NOTHING = np.zeros(0)


def study_range(name: str, scheme: str) -> tuple[float, float, str] | None:
    """The smallest and largest value that a study's number has in healthy runs, and who they are."""
    found, who = like(scheme)
    values = [run.studies[name] for run in found if np.isfinite(run.studies.get(name, np.nan))]
    return (min(values), max(values), who) if values else None


def stretched(profile: np.ndarray, depth: int, sites: int) -> np.ndarray:
    """A profile (blocks, sites) on another number of blocks, linear in the logarithm in between; NaN where the sites are other ones."""
    if profile.shape[1] != sites:
        return np.full((depth, sites), np.nan)
    here, there = np.linspace(0, 1, depth), np.linspace(0, 1, len(profile))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(profile)
    columns = []
    for i in range(sites):
        there_is = np.isfinite(logs[:, i])
        columns.append(
            np.exp(np.interp(here, there[there_is], logs[there_is, i])) if there_is.any() else np.full(depth, np.nan)
        )
    return np.stack(columns, axis=1)


def _band(profiles: list[np.ndarray], who: str) -> Band | None:
    told = [one for one in profiles if np.isfinite(one).any()]
    if not told:
        return None
    stack = np.stack(told)
    return Band(known.smallest(stack, 0), known.largest(stack, 0), who)
