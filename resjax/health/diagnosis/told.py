"""How does the doctor speak on a terminal? Findings first, the profile by depth, then what to try."""

import io

from resjax.health.diagnosis import Diagnosis
from resjax.health.diagnosis.band import HIGH, LOW, sentence
from resjax.health.table import print_health


def lines(diagnosis: Diagnosis) -> list[str]:
    """All of it, a line each."""
    case = diagnosis.case
    steps = f"probes of steps {case.record.steps[0]} to {case.record.steps[-1]}" if len(case.record) else "no probes"
    state = f"state of step {case.state}" if case.state is not None else "no state studied"
    made = [f"{case.path or case.name}: {steps}; {state}"]
    count = len(diagnosis.findings)
    if diagnosis.verdict == "unmeasured":
        made.append("nothing to look at: no probe, no loss and no state was found")
    elif not count:
        made.append("no findings: every figure that was measured lies in its range")
    else:
        made.append(f"{count} finding{'s' * (count > 1)}")
    for i, one in enumerate(diagnosis.findings, 1):
        since = f"since step {one.since}" if one.since is not None and one.since != one.step else f"step {one.step}"
        made.append(f"{i}. {one.kind}: {one.where}, {since}")
        made.append(f"   {one.evidence}.")
        if bounds := one.bounds():
            made.append(f"   {one.figure} should be {bounds}" + (f" ({one.source})." if one.source else "."))
        made += [f"   {text}{'' if text.endswith('.') else '.'}" for text in (one.reason, one.advice) if text]
    if len(case.record):
        table = io.StringIO()
        print_health(case.record, {"findings": []}, case.scheme, table)
        told = [line for line in table.getvalue().splitlines() if not line.startswith("Healthy:")]
        made += ["", *told]
    if (found := diagnosis.claimed) is not None:
        counts = f"{found['below']} sites below, {found['inside']} inside, {found['above']} above"
        made.append(f"The rule that a healthy ratio lies in {LOW:g} to {HIGH:g}: {counts}; {sentence(found)}.")
    if diagnosis.advice:
        made += ["", "What to try, one at a time:"]
        for advice in diagnosis.advice:
            made += [
                f"- {advice.area}: {advice.what} ({advice.source}), against {', '.join(advice.kinds)}",
                f"    {advice.command}",
            ]
    made += [f"note: {note}" for note in case.notes]
    return made
