"""How does the doctor's page look? One self-contained doctor.html: findings first, then profiles by depth, then what to try."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from resjax.health import figures
from resjax.health.diagnosis import Diagnosis, curves
from resjax.health.diagnosis.band import sentence
from resjax.health.diagnosis.panels import drawn
from resjax.health.diagnosis.shown import studies_shown
from resjax.health.page import filled, mark, whole_page
from resjax.health.report import lede

TEMPLATE = Path(__file__).with_name("doctor.html")
STYLE = Path(__file__).with_name("doctor.css")
NOTHING_TO_SEE = ("finite",)


def page(diagnosis: Diagnosis, against: Diagnosis | None = None) -> str:
    """The whole page as text; with a second run beside the first."""
    runs = [diagnosis] + ([against] if against else [])
    names = labels(runs)
    notes = [note for one in runs for note in one.case.notes]
    fill = {
        "mark": mark("the doctor"),
        "name": escape(" beside ".join(names)),
        "lede": "".join(
            f'<p class="lede">{described(one, name, len(runs) > 1)}</p>' for one, name in zip(runs, names, strict=True)
        ),
        "findings": "".join(
            f"<div>{verdict(one, name if len(runs) > 1 else '')}</div>" for one, name in zip(runs, names, strict=True)
        ),
        "profiles": profiles(runs, names),
        "studies": studies_shown([one.case for one in runs], names),
        "remedies": "".join(
            remedies(one, name if len(runs) > 1 else "") for one, name in zip(runs, names, strict=True)
        ),
        "claimed": claimed(runs, names),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in notes),
        "notes_hidden": "" if notes else "hidden",
    }
    if len(runs) > 1:
        fill["findings"] = f'<div class="runs">{fill["findings"]}</div>'
    return whole_page(f"{' and '.join(names)}: the doctor", __name__, filled(TEMPLATE, fill), [STYLE])


def labels(runs: Sequence[Diagnosis]) -> list[str]:
    """What the runs are called; told apart where they have one name."""
    names = [one.case.name for one in runs]
    return names if len(set(names)) == len(names) else [one.case.path or one.case.name for one in runs]


def described(diagnosis: Diagnosis, name: str, several: bool) -> str:
    """What was looked at, as escaped HTML."""
    case = diagnosis.case
    said = (
        lede(case.config, case.summary, [dict(row) for row in case.rows])
        if case.config
        else "A model that is not resjax's own."
    )
    seen = f" Probes of {len(case.record)} steps" if len(case.record) else " No probes"
    state = f"; the state of step {case.state} was studied." if case.state is not None else "; no state was studied."
    return (f"<b>{escape(name)}</b>: " if several else "") + said + seen + state


def verdict(diagnosis: Diagnosis, name: str) -> str:
    """All findings, each with its range and reason."""
    title = f"{escape(name)}: " if name else ""
    if diagnosis.verdict == "unmeasured":
        return f'<div class="verdict"><h2>{title}nothing to look at</h2><p>No probe, no loss and no state was found.</p></div>'
    if not diagnosis.findings:
        text = "Every figure lies in its range. That is no proof of health: only what was measured was looked at."
        return f'<div class="verdict good"><h2>{title}no findings</h2><p>{text}</p></div>'
    count = len(diagnosis.findings)
    rows = []
    for one in diagnosis.findings:
        bounds = one.bounds()
        said = f"should be {bounds}" + (f": {one.source}" if one.source else "") if bounds else ""
        since = f"since step {one.since}" if one.since is not None and one.since != one.step else f"step {one.step}"
        rows.append(
            f"<li><h3>{escape(one.kind)} <span>{escape(one.where)}, {since}</span></h3><p>{escape(_sentence(one.evidence))}</p>"
            + (f'<p class="range">{escape(one.figure or "")} {escape(said)}</p>' if said else "")
            + (f'<p class="reason">{escape(_sentence(one.reason))}</p>' if one.reason else "")
            + (f'<p class="advice">{escape(one.advice)}</p>' if one.advice else "")
            + "</li>"
        )
    return f'<div class="verdict bad"><h2>{title}{count} finding{"s" * (count > 1)}</h2><ul>{"".join(rows)}</ul></div>'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def profiles(runs: Sequence[Diagnosis], names: Sequence[str]) -> str:
    """Every recorded probe over depth: the first step, the end, the range; of two runs their ends and ranges."""
    made = []
    for group, about, members in figures.GROUPS:
        panels = [
            panel
            for figure in members
            if figure.probe not in NOTHING_TO_SEE
            for panel in curves.panels(figure, runs, names)
        ]
        if panels:
            body = "".join(drawn(panel) for panel in panels)
            made.append(
                f'<section><h2>{escape(group)}</h2><p class="about">{about}</p><div class="profiles">{body}</div></section>'
            )
    return "".join(made)


def remedies(diagnosis: Diagnosis, name: str) -> str:
    """What to try, with the commands."""
    if not diagnosis.advice:
        return ""
    rows = []
    for one in diagnosis.advice:
        rows.append(
            f"<tr><td>{escape(one.area)}</td><td>{escape(_sentence(one.what))}<small>{escape(one.source)}</small></td>"
            f"<td>{escape(', '.join(one.kinds))}</td><td><code>{escape(one.command)}</code></td></tr>"
        )
    about = "One change at a time, each from the last checkpoint before the trouble where it can be made there, else from the start."
    head = "<thead><tr><th>Where</th><th>What</th><th>Against</th><th>Command</th></tr></thead>"
    title = f"What to try{f', {escape(name)}' if name else ''}"
    body = f'<table class="remedies">{head}<tbody>{"".join(rows)}</tbody></table>'
    return f'<section><h2>{title}</h2><p class="about">{about}</p>{body}</section>'


def claimed(runs: Sequence[Diagnosis], names: Sequence[str]) -> str:
    """Where the rule of 0.01 to 0.1 agrees with the findings, and where not."""
    told = [(one, name) for one, name in zip(runs, names, strict=True) if one.claimed is not None]
    if not told:
        return ""
    several = len(runs) > 1
    rows, sentences = "", []
    for one, name in told:
        found: dict[str, Any] = one.claimed or {}
        cells = "".join(f"<td>{found[place]}</td>" for place in ("below", "inside", "above"))
        rows += f"<tr><th>{escape(name) if several else 'sites at the end'}</th>{cells}</tr>"
        whose = f"of {escape(name)}, " if several else ""
        sentences.append(f"Read as a test of each site (inside: healthy), {whose}{escape(sentence(found))}.")
    share = (told[0][0].claimed or {})["healthy_inside"]
    if share is not None:
        sentences.append(f"Of the sites of the healthy runs {share:.0%} lie inside.")
    sentences.append("It is drawn in the ratio's figures, and is no criterion here.")
    head = f"<tr><th>{'sites at the end' if several else ''}</th><th>below</th><th>inside</th><th>above</th></tr>"
    return (
        f'<section><h2>The rule that a healthy ratio lies in 0.01 to 0.1</h2><table class="counts">{head}{rows}</table>'
        f'<p class="about">{" ".join(sentences)}</p></section>'
    )
