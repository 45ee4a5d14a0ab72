"""Does the rule that a healthy update/stream ratio lies in 0.01 to 0.1 agree with the findings, and at which sites not?"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from resjax.health.diagnosis import healthy
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.reading import at_end, sites_named

LOW, HIGH = 0.01, 0.1


def claimed(case: Case, findings: Iterable[Finding]) -> dict[str, Any] | None:
    """What the rule says of every site, beside what was found there. Read as a test, it calls a site healthy where its ratio is inside.

    Returns None where no ratio was recorded; else
      below, inside, above: how many sites are where at the end.
      agrees: at how many sites the rule and the findings say the same: outside and named in a finding, or inside and in none.
      outside_without_finding, inside_with_finding: the sites where they do not, in words.
      healthy_inside: the share of the sites of the healthy set that is inside; None without a set.
    """
    if not case.has("update_ratio"):
        return None
    ratio = at_end(case.record["update_ratio"])
    there = np.isfinite(ratio)
    if not there.any():
        return None
    with np.errstate(invalid="ignore"):
        below, above = ratio < LOW, ratio > HIGH
    outside = below | above
    named = np.zeros(ratio.shape, bool)
    for one in findings:
        if one.at is not None and one.at.shape == ratio.shape:
            named |= one.at
    ends = [run.end["update_ratio"] for run in healthy.runs() if "update_ratio" in run.end]
    values = np.concatenate([one[np.isfinite(one)] for one in ends]) if ends else np.zeros(0)
    return {
        "below": int(below.sum()),
        "inside": int((there & ~outside).sum()),
        "above": int(above.sum()),
        "agrees": int((there & (outside == named)).sum()),
        "outside_without_finding": sites_named(case.record, outside & ~named),
        "inside_with_finding": sites_named(case.record, there & ~outside & named),
        "healthy_inside": float(((values >= LOW) & (values <= HIGH)).mean()) if len(values) else None,
    }


def sentence(found: dict[str, Any]) -> str:
    """The same in words, for one run."""
    total = found["below"] + found["inside"] + found["above"]
    text = f"it agrees with the findings at {found['agrees']} of {total} sites"
    apart = [
        f"{words}: {where}"
        for words, where in (
            ("outside without a finding", found["outside_without_finding"]),
            ("inside with a finding", found["inside_with_finding"]),
        )
        if where
    ]
    return text + (f", and does not at those {'; '.join(apart)}" if apart else "")
