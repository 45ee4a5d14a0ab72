"""How does the doctor's page look? One self-contained doctor.html: findings first, then profiles by depth, then what to try."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from resjax.health import figures
from resjax.health.diagnosis import Diagnosis, healthy
from resjax.health.diagnosis.band import sentence
from resjax.health.diagnosis.panels import Line, Panel, drawn, told
from resjax.health.diagnosis.shown import studies_shown
from resjax.health.diagnosis.starts import start_band
from resjax.health.page import filled, mark, whole_page
from resjax.health.reading import at_end, at_start
from resjax.health.report import lede

TEMPLATE = Path(__file__).with_name("doctor.html")
STYLE = Path(__file__).with_name("doctor.css")
RATIO_CLAIMED = ("update_ratio", "update_ratio_block")
NOTHING_TO_SEE = ("finite",)


def page(diagnosis: Diagnosis, against: Diagnosis | None = None) -> str:
    """The whole page as text; with a second run beside the first."""
    runs = [diagnosis] + ([against] if against else [])
    names = labels(runs)
    notes = [note for one in runs for note in one.case.notes]
    fill = {
        "mark": mark("the doctor"),
        "name": escape(" beside ".join(names)),
        "lede": " ".join(described(one, name, len(runs) > 1) for one, name in zip(runs, names, strict=True)),
        "findings": "".join(
            f"<div>{verdict(one, name if len(runs) > 1 else '')}</div>" for one, name in zip(runs, names, strict=True)
        ),
        "profiles": profiles(runs, names),
        "studies": studies_shown([one.case for one in runs], names),
        "remedies": "".join(
            remedies(one, name if len(runs) > 1 else "") for one, name in zip(runs, names, strict=True)
        ),
        "claimed": claimed(diagnosis),
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
    """Every recorded probe over depth: the first step, the end, the reference; of two runs their ends."""
    if not any(len(one.case.record) for one in runs):
        return ""
    made = []
    for group, about, members in figures.GROUPS:
        panels = [
            panel
            for figure in members
            if figure.probe not in NOTHING_TO_SEE
            for panel in of_figure(figure, runs, names)
        ]
        if panels:
            body = "".join(drawn(panel) for panel in panels)
            made.append(
                f'<section><h2>{escape(group)}</h2><p class="about">{about}</p><div class="profiles">{body}</div></section>'
            )
    return "".join(made)


def of_figure(figure: figures.Figure, runs: Sequence[Diagnosis], names: Sequence[str]) -> list[Panel]:
    """The panels of one probe: one a kind of site, or one a block."""
    record = runs[0].case.record
    there = [one for one in runs if figure.probe in one.case.record]
    if not there:
        return []
    shape = at_end(there[0].case.record[figure.probe]).shape
    if len(shape) == 1 or figure.layout == "stream":
        sites: list[int | None] = [None]
    elif figure.layout == "split":
        sites = list(range(shape[1]))
    else:
        return []
    made = []
    for site in sites:
        lines = []
        for index, (one, name) in enumerate(zip(runs, names, strict=True)):
            if figure.probe not in one.case.record or at_end(one.case.record[figure.probe]).ndim != len(shape):
                continue
            values = one.case.record[figure.probe]
            blocks = places(at_end(values), site)
            if len(runs) == 1:
                lines.append(Line(f"step {record.steps[0]}", of_site(at_start(values), site), "early", blocks))
            label = f"{name}, at the end" if len(runs) > 1 else f"at the end (step {record.steps[-1]})"
            lines.append(Line(label, of_site(at_end(values), site), ("late", "other")[index], blocks))
        kind = "" if site is None else f", {record.axis_names(figure.probe, shape[-1])[site]}"
        panel = Panel(
            f"{figure.title}{kind}",
            figure.unit,
            figure.what,
            lines,
            figure.scale == "log",
            reference(figure.probe, runs[0], site, shape) if figure.scale == "log" else None,
            figure.probe in RATIO_CLAIMED,
            figure.reach,
        )
        made += [panel] if told(panel) else []
    return made


def of_site(profile: np.ndarray, site: int | None) -> np.ndarray:
    """One kind of site of a profile (block, site), of a run with fewer sites the last; or all of it in the order of depth."""
    return profile.reshape(-1) if site is None else profile[:, min(site, profile.shape[1] - 1)]


def places(profile: np.ndarray, site: int | None) -> np.ndarray:
    """Where its values stand on the axis of blocks."""
    per_block = profile.size // len(profile) if site is None else 1
    return np.arange(len(profile) * per_block) / per_block


def reference(
    probe: str, diagnosis: Diagnosis, site: int | None, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, str] | None:
    """The range of a probe at the end: how healthy runs changed, from where this one's scheme starts; else where it starts."""
    if len(shape) != 2 or probe not in diagnosis.case.start:
        return None
    start = start_band(diagnosis.case, probe)
    if start is None or start.low.shape != shape:
        return None
    change = healthy.change_band(probe, diagnosis.case.scheme, *shape)
    if change is None:
        return of_site(start.low, site), of_site(start.high, site), start.source
    basis = "by its closed form" if probe in diagnosis.case.theory else "as measured"
    source = f"this scheme's start {basis}, changed as in {change.source}"
    return of_site(start.low * change.low, site), of_site(start.high * change.high, site), source


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


def claimed(diagnosis: Diagnosis) -> str:
    """Where the rule of 0.01 to 0.1 agrees with the findings, and where not."""
    found: dict[str, Any] | None = diagnosis.claimed
    if found is None:
        return ""
    cells = "".join(f"<td>{found[name]}</td>" for name in ("below", "inside", "above"))
    healthy_share = found["healthy_inside"]
    rest = f" Of the sites of the healthy runs {healthy_share:.0%} lie inside." if healthy_share is not None else ""
    text = (
        f"Read as a test of each site (inside: healthy), {escape(sentence(found))}.{rest} It is drawn in the ratio's figures, and is no "
        "criterion here."
    )
    return (
        '<section><h2>The rule that a healthy ratio lies in 0.01 to 0.1</h2><table class="counts"><tr><th></th><th>below</th>'
        f"<th>inside</th><th>above</th></tr><tr><th>sites at the end</th>{cells}</tr></table>"
        f'<p class="about">{text}</p></section>'
    )
