"""Which lines has the figure of a probe? Of one run its start, its end and its range; of two runs their ends and ranges together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resjax.health.diagnosis import Diagnosis, healthy
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.panels import BLOCK, SHARE, Line, Panel, Range, told
from resjax.health.diagnosis.starts import start_band
from resjax.health.figure import Figure, along
from resjax.health.reading import at_end, at_start, end_named

RATIO_CLAIMED = ("update_ratio", "update_ratio_block")
RUNS = (("q0", "first"), ("q2", "second"))  # how a run's line and its range look where there are two


@dataclass(frozen=True, eq=False)
class RunProbe:
    """A probe of one run.

    Attributes:
      start, end: (block, site), (block, role) or (block,); there is no start where only a state was studied.
      names: of the last axis; empty of one value a block.
      first, last: which steps they are of.
    """

    start: np.ndarray | None
    end: np.ndarray
    names: tuple[str, ...]
    first: str
    last: str

    def of(self, profile: np.ndarray, kind: str) -> np.ndarray:
        """The values of one kind of site or role; without a kind all of them, in the order of depth."""
        return profile[:, self.names.index(kind)] if kind else profile.reshape(-1)

    def places(self, kind: str, share: bool) -> np.ndarray:
        """Where they stand on the axis of blocks, or on that of the share of the depth."""
        each = 1 if kind else self.end.size // len(self.end)
        return along(np.arange(len(self.end) * each) / each, 1 / each, len(self.end) if share else None)


def run_probe(case: Case, probe: str) -> RunProbe | None:
    """A probe as the run recorded it, else as the study of its state found it; None where neither has a value."""
    record = case.record
    if probe in record and len(record):
        values = record[probe]
        if np.isfinite(values).any() and values.ndim > 1:
            names = record.axis_names(probe, values.shape[-1]) if values.ndim == 3 else ()
            steps = f"step {record.steps[0]}", f"at the end ({end_named(record.steps)})"
            return RunProbe(at_start(values), at_end(values), names, *steps)
    found = np.asarray(case.studies.get("probes", {}).get(probe, np.nan), np.float64)
    if not found.ndim or not np.isfinite(found).any():
        return None
    names = record.site_names(found.shape[-1]) if found.ndim == 2 else ()
    return RunProbe(None, found, names, "", f"at step {case.state}")


def panels(figure: Figure, runs: Sequence[Diagnosis], names: Sequence[str]) -> list[Panel]:
    """The panels of one probe: one a kind of site or role, or one of all sites, or of blocks."""
    found = [run_probe(one.case, figure.probe) for one in runs]
    there = [one for one in found if one is not None]
    if not there:
        return []
    kinds = [""]
    if figure.layout == "split" and all(one.names for one in there):
        kinds = list(dict.fromkeys(name for one in there for name in one.names))
    made = [panel(figure, kind, runs, names, found) for kind in kinds]
    return [one for one in made if told(one)]


def panel(
    figure: Figure, kind: str, runs: Sequence[Diagnosis], names: Sequence[str], found: Sequence[RunProbe | None]
) -> Panel:
    """One of them."""
    lines, ranges, missing = [], [], []
    same = len({len(one.end) for one in found if one is not None}) == 1
    for one, run, name, (look, area) in zip(found, runs, names, RUNS, strict=False):
        if one is None or (kind and kind not in one.names):
            missing.append(f"{name}: {'not recorded' if one is None else 'has no such site or role'}")
            continue
        at = one.places(kind, share=not same)
        span = reference(figure.probe, run, one) if figure.scale == "log" else None
        if len(runs) == 1:
            if one.start is not None:
                lines.append(Line(one.first, one.of(one.start, kind), "early", at))
            lines.append(Line(one.last, one.of(one.end, kind), "late", at))
        else:
            lines.append(Line(f"{name}, {one.last}", one.of(one.end, kind), look, at))
        if span is not None:
            low, high, source = span
            told_as = source if len(runs) == 1 else f"{name}: {source}"
            ranges.append(
                Range(one.of(low, kind), one.of(high, kind), told_as, "range" if len(runs) == 1 else area, at)
            )
    return Panel(
        f"{figure.title}, {kind}" if kind else figure.title,
        figure.unit,
        figure.what,
        lines,
        figure.scale == "log",
        ranges,
        figure.probe in RATIO_CLAIMED,
        figure.reach,
        BLOCK if same else SHARE,
        missing,
    )


def reference(probe: str, diagnosis: Diagnosis, one: RunProbe) -> tuple[np.ndarray, np.ndarray, str] | None:
    """The range of a probe at the end, low and high: how healthy runs changed, from where this one's scheme starts; else where it starts.

    None where its start was not measured.
    """
    shape = one.end.shape
    start = start_band(diagnosis.case, probe)
    if len(shape) != 2 or start is None or start.low.shape != shape:
        return None
    change = healthy.change_band(probe, diagnosis.case.scheme, *shape)
    if change is None:
        return start.low, start.high, start.source
    basis = "by its closed form" if probe in diagnosis.case.theory else "as measured"
    source = f"this scheme's start {basis}, changed as in {change.source}"
    return start.low * change.low, start.high * change.high, source
