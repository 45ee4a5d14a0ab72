"""What is wrong with a run, and what could be tried? Findings with their ranges, and remedies with their commands."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from resjax.health.collapse import shared_offset
from resjax.health.diagnosis import attention, band, course, growth, profiles, starts, states
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.diagnosis.remedies import Advice, advised
from resjax.health.findings import NON_FINITE, for_any_model, located, looked_for

# Of what looked_for finds: why it is a fault, and where its bounds come from.
REASONS: dict[str, tuple[str, str]] = {
    NON_FINITE: ("from here on nothing is learnt: the step was not applied", ""),
    "dead branches": (
        "an update a thousand times smaller than the stream turns it by 0.06 degrees: without it next to nothing changes",
        "0.06 degrees; branches that start shut count only where others of their kind have opened",
    ),
    "swallowed updates": (
        "what the stream's precision rounds away is computed and never used",
        "a bfloat16 add loses 2 % of the elements at a ratio of 0.1 and 17 % at 0.01",
    ),
    "token collapse": (
        "tokens within 11 degrees of one another can hardly be told apart by the head",
        "11 degrees, in the last tenth of the blocks; that stacks without skips go there: Dong et al. 2021, 2103.03404",
    ),
    "rank collapse": (
        "tokens that differ along one line only can be told apart by one number, and no branch above gets more to read",
        "2 of all the directions that there could be; the mean of each sequence is taken off as in Dong et al. 2021, 2103.03404",
    ),
    "stream blow-up": ("one more doubling and the stream overflows, or nears the end of half precision", "the stream's dtype"),
    "gradient spread": (
        "one learning rate cannot serve gradients a thousandfold apart",
        "healthy runs of the set stay within a factor of 25 over depth",
    ),
}  # fmt: skip


WENT_ON = "the step was not applied, and the run went on without it"
NOT_OURS = "where such a step is applied, the weights are lost from here on; whether it was, the folder does not say"


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What the doctor says of a run.

    Attributes:
      case: what was looked at.
      findings: the gravest first.
      advice: what to try.
      claimed: where the rule of 0.01 to 0.1 agrees, see :func:`band.claimed`; None where no ratio was recorded.
    """

    case: Case
    findings: list[Finding]
    advice: list[Advice]
    claimed: dict[str, Any] | None

    @property
    def verdict(self) -> str:
        """findings, healthy, or unmeasured."""
        seen = len(self.case.record) or self.case.studies or self.case.rows
        return "findings" if self.findings else "healthy" if seen else "unmeasured"

    def as_dict(self) -> dict[str, Any]:
        """What doctor.json holds."""
        case = self.case
        steps = case.record.steps
        return {
            "run": case.path or case.name,
            "verdict": self.verdict,
            "scheme": case.scheme or None,
            "stream_dtype": case.dtype,
            "recorded_steps": [int(steps[0]), int(steps[-1])] if len(steps) else [],
            "studied_step": case.state,
            "findings": [finding.as_dict() for finding in self.findings],
            "remedies": [advice.as_dict() for advice in self.advice],
            "claimed_band": self.claimed,
            "studies": {name: dict(found) for name, found in case.studies.items()},
            "notes": case.notes,
        }


# What goes first: what ended the run, what the loss shows, then the rest in this order.
ORDER = (
    NON_FINITE, "diverging loss", "steps too large", "token collapse", "rank collapse", "token frequencies only", "loss spikes",
    "small start", "large start", "stream blow-up", "exploding stream", "vanishing stream", "gradient spread", "rewriting layers",
    "dead branches", "swallowed updates", "biased adds", "costly rounding", "entropy collapse", "saturated attention",
    "uniform attention", "restless layers", "uneven steps", "idle depth", "harmful blocks", "late layers alike", "massive activations",
)  # fmt: skip


def diagnose(case: Case) -> Diagnosis:
    """All findings of a case in order, and what to try."""
    found = [
        *recorded(case),
        *course.examined(case),
        *(starts.examined(case) or profiles.loud_start(case)),
        *growth.examined(case),
        *profiles.examined(case),
        *attention.examined(case),
        *states.examined(case),
    ]
    findings = merged(found, case.goes_on)
    if not case.scheme:
        findings = [replace(one, advice=for_any_model(one.advice)) for one in findings]
    if offset := shared_offset(case.record, probes_of(case), course.learned(case)):
        case = replace(case, notes=[*case.notes, offset])
    return Diagnosis(case, findings, advised(case, findings), band.claimed(case, findings))


def probes_of(case: Case) -> Mapping[str, Any]:
    """The probes of the state that was studied; none where there is none."""
    return case.studies.get("probes", {})


def recorded(case: Case) -> list[Finding]:
    """What :func:`resjax.health.findings.looked_for` finds, with the first non-finite value as the run located it."""
    looked = looked_for(case.record, case.config, case.dtype, probes_of(case), case.last_step, course.learned(case))
    if case.nonfinite:
        looked = located({"findings": looked}, case.nonfinite[0])["findings"]
    made = [Finding.of(found) for found in looked]
    reasons = dict(REASONS)
    if case.goes_on or not case.config:
        reasons[NON_FINITE] = (WENT_ON if case.config else NOT_OURS, "")
    return [replace(one, reason=reasons[one.kind][0], source=reasons[one.kind][1]) for one in made]


def merged(found: list[Finding], goes_on: bool = False) -> list[Finding]:
    """In order; of two of one kind that name the same places only the first, and no consequences of a value that is not finite.

    Of a run that ``goes_on`` past such a value there are none: it did not apply the step.
    """
    if not goes_on and (broken := [one for one in found if one.kind == NON_FINITE]):
        first = min(one.step for one in broken)
        found = [one for one in found if one.kind == NON_FINITE or one.since is None or one.since < first]
    kept: dict[tuple[str, str], Finding] = {}
    for one in sorted(found, key=lambda one: ORDER.index(one.kind)):
        kept.setdefault((one.kind, one.where), one)
    return list(kept.values())


__all__ = ["Advice", "Case", "Diagnosis", "Finding", "diagnose"]
