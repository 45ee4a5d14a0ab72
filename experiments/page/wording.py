"""How is a verdict said? The same words for the text page and for the drawn one, in a small markup.

The markup: **bold**, `code`, [words](where); a backslash takes the meaning of the character behind it. What comes from results passes
through ``raw``, so that nothing in it is taken for markup.
"""

import re
from collections.abc import Sequence

import numpy as np

from experiments.claims import Literature
from experiments.experiment import Experiment
from experiments.judge import Effect, Judged, Predicate
from experiments.page.evidence import Entry, Evidence, Row

SIGNIFICANT = 0.05
SHOWN = 16  # values that are listed one by one
MARKUP = re.compile(r"([\\*`|<$~]|\[(?=[^\]]*\]\()|(?<!\w)_|_(?!\w))")


def raw(text: str) -> str:
    """Text as it is, on one line."""
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


def link(claim: str) -> str:
    """A claim's id that leads to its row."""
    return f"[{claim}](#{claim})"


def name(row: Row) -> str:
    """'C17' or 'C17 (branch off)', leading to its row."""
    return link(row.claim.id) + (f" ({raw(row.reading)})" if row.reading else "")


def verdict(row: Row) -> str:
    """The verdict of a row with its scales."""
    if not row.entries:
        return "not tested yet"
    how = " by construction" if row.construction else ""
    return f"**{row.verdict}**{how} ({', '.join(row.scales)})"


def untested(row: Row, evidence: Evidence) -> str:
    """What would tell about a row that nothing was found about."""
    unbuilt = [one for one in row.claim.experiments if one not in evidence.built]
    waiting = [name for name, one in evidence.built.items() if _judges(one, row)]
    told = [f"{_all(unbuilt)} would tell: not built yet"] if unbuilt else []
    told += [f"{_all(waiting)} would tell: no results yet, `{run(*waiting)}`"] if waiting else []
    return "; ".join(told) or f"{_all(row.claim.experiments)} would be the place, and has no predicate for it yet"


def _judges(experiment: Experiment, row: Row) -> bool:
    """Whether an experiment has a predicate for a claim, or for this reading of it."""
    keys = [key.partition("/")[::2] for key in experiment.predicates]
    return any(claim == row.claim.id and row.reading in ("", reading) for claim, reading in keys)


def _all(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def readings(row: Row) -> list[str]:
    """What is claimed in the reading of a row; where it stands for all of its claim, in each."""
    if row.reading:
        return [f"{row.reading}: {row.claim.readings.get(row.reading, '')}"]
    return [] if row.entries else [f"{name}: {says}" for name, says in row.claim.readings.items()]


def run(*experiments: str) -> str:
    """The command that does experiments at cpu scale."""
    return f"python -m experiments.run {' '.join(experiments)}"


def number(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "none"


def p(value: float) -> str:
    """A p-value; that it is no longer small among all of the page is said."""
    if not np.isfinite(value):
        return "none"
    return ("< 0.0001" if value < 1e-4 else f"{value:.2g}") + (" (not small)" if value >= SIGNIFICANT else "")


def measured(effect: Effect) -> str:
    """Mean and interval."""
    low, high = effect.interval
    return f"{number(effect.mean)} " + (
        f"[{low:.3g}, {high:.3g}]" if np.isfinite([low, high]).all() else "(no interval)"
    )


def seeds(judged: Judged) -> str:
    """Every seed's value in order, or of many their range; how many have none, and how many lie on the claimed side."""
    values = judged.effect.values
    known = [value for value in values if np.isfinite(value)]
    if len(values) <= SHOWN:
        told = ", ".join(map(number, values)) or "none"
    else:
        told = f"from {number(min(known))} to {number(max(known))}" if known else "no value"
    missing = f"{judged.effect.missing} missing, " if judged.effect.missing else ""
    return f"{len(values)} ({told}): {missing}{judged.agreeing} as claimed"


def claimed(said: Predicate) -> str:
    """What a predicate says."""
    sign = {"above": "> ", "below": "< ", "inside": "within ±"}[said.side]
    return f"{said.name} {sign}{said.threshold:g}"


def refuting(said: Predicate) -> str:
    """Where a predicate is refuted."""
    other = said.threshold if said.other is None else said.other
    sign = {"above": "< ", "below": "> ", "inside": "beyond ±"}[said.side]
    return f"{sign}{other:g}"


def settings(entry: Entry) -> str:
    """Scale and settings of a verdict."""
    return ", ".join(filter(None, (entry.settled.scale, entry.settled.settings)))


def literature(one: Literature) -> str:
    """What has been published, with its tag."""
    return f"Literature {one.stance}: {raw(one.note)} {raw(one.source)} [{one.tag}]"


def where(row: Row) -> str:
    """Article and sections."""
    return f"{row.claim.article} {', '.join(row.claim.sections)}"


def in_a_line(judged: Judged) -> str:
    """A predicate with its verdict and number."""
    return f"{raw(claimed(judged.predicate))}: {raw(measured(judged.effect))}, {judged.verdict}"
