"""How does a comparison look? One self-contained compare.html: what the runs came to, curves, profiles by depth, what differs."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from resjax.health.comparison import Comparison
from resjax.health.comparison.charts import by_depth, over_steps
from resjax.health.comparison.settings import shown
from resjax.health.comparison.side import SPAN
from resjax.health.comparison.told import heading, results
from resjax.health.page import filled, mark, whole_page
from resjax.health.report import chart_place, verdict

HERE = Path(__file__).parent
MAKER = "resjax.compare"  # the command, by which it knows its own page again
HUES, DASHES = 8, 4  # looks of curves, as page.js has them
IN_TITLE = 3  # names
SPIKES = (
    "A loss above the median of the 51 logged losses before by more than 0.1 nats and 7 robust deviations, or not finite; fatal: not "
    "back within a tenth of the run. The score is the share of losses 7 deviations away from the mean of a tenth of the run before."
)
SENTENCES = {
    "loss": f"Thick: the mean over {SPAN} steps. Thin: as logged. What is far above the usual start is drawn at the upper edge.",
    "eval_loss": "On held-out text.",
    "lr": "As optimizer.warmup and optimizer.schedule say.",
    "grad_norm": "Isolated peaks are usual; a steady rise is not.",
    "tokens_per_s": "Other work on the machine shows as dips.",
}


def page(comparison: Comparison) -> str:
    """The whole page as text."""
    names, charts, depth = comparison.names, over_steps(comparison), by_depth(comparison)
    lines = heading(comparison)[bool(comparison.warning) :]
    fill = {
        "mark": mark("runs side by side"),
        "name": escape(" beside ".join(names) if len(names) <= IN_TITLE else f"{len(names)} runs side by side"),
        "lede": escape(" ".join(_sentence(line) for line in lines)),
        "warning": f'<p class="warning">* {escape(_sentence(comparison.warning))}</p>' if comparison.warning else "",
        "results": results_table(comparison),
        "legend": legend(names),
        "about_training": "Point at a figure to read it, at a name to see its curves alone.",
        "training": training(charts),
        "about_depth": escape(measured(comparison)),
        "depth": depth_charts(depth),
        "findings": findings(comparison),
        "about_spikes": SPIKES,
        "spikes": spikes(comparison),
        "settings": settings_table(comparison),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in comparison.notes),
        "notes_hidden": "" if comparison.notes else "hidden",
    }
    data = {"charts": charts + [chart for chart, _ in depth], "runs": names}
    title = f"{names[0]} and {len(names) - 1} more" if len(names) > IN_TITLE else " and ".join(names)
    body = filled(HERE / "compare.html", fill)
    return whole_page(f"{title}: compared", MAKER, body, [HERE / "compare.css"], data, [HERE / "compare.js"])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def sample(run: int) -> str:
    """A piece of a run's curve."""
    look = f"curve run h{run % HUES} dash{run // HUES % DASHES}"
    return f'<svg class="sample" viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" class="{look}"/></svg>'


def legend(names: Sequence[str]) -> str:
    """The runs with a piece of their curves."""
    items = "".join(f'<li data-run="{run}">{sample(run)}{escape(name)}</li>' for run, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def results_table(comparison: Comparison) -> str:
    """What the runs came to, a row each."""
    lines = {
        label: texts for label, texts in results(comparison).items() if any(text not in ("", "-") for text in texts)
    }
    head = "".join(f"<th>{escape(label)}</th>" for label in ("", *lines))
    body = ""
    for run, name in enumerate(comparison.names):
        star = " *" if name in comparison.not_comparable else ""
        cells = "".join(f"<td>{escape(texts[run])}</td>" for texts in lines.values())
        body += f'<tr data-run="{run}"><th>{sample(run)}{escape(name)}{star}</th>{cells}</tr>'
    return f'<table class="beside"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def training(charts: Sequence[Mapping[str, Any]]) -> str:
    """The places of charts over steps; a sentence where nothing was logged."""
    if not charts:
        return '<p class="left-out">No training rows yet: metrics.jsonl is missing or empty everywhere.</p>'
    places = [(chart["wide"], chart_place(chart, SENTENCES[chart["id"]])) for chart in charts]
    wide, small = ("".join(place for is_wide, place in places if is_wide is which) for which in (True, False))
    return f'{wide}<div class="small">{small}</div>'


def measured(comparison: Comparison) -> str:
    """Of which steps the profiles are."""
    spans = {tuple(run["measured_steps"]) for run in comparison.runs if run["measured_steps"]}
    if not spans:
        return "No step was recorded: health/ is missing or empty everywhere."
    of_all = len(spans) == 1
    when = "steps {} to {}".format(*next(iter(spans))) if of_all else "its last recorded steps"
    depths = {len(values) for run in comparison.runs for sites in run["profiles"].values() for values in sites.values()}
    axis = " The runs differ in depth: drawn over the share of it." if len(depths) > 1 else ""
    return f"Of each run the median of {when}.{axis}"


def depth_charts(found: Sequence[tuple[Mapping[str, Any], Any]]) -> str:
    """The places of charts over depth."""
    return (
        f'<div class="pairs">{"".join(chart_place(chart, figure.what) for chart, figure in found)}</div>'
        if found
        else ""
    )


def findings(comparison: Comparison) -> str:
    """What was found, a box for each run where something was; the others in one line."""
    boxes, quiet = "", dict[str, list[str]]()
    for number, (side, run) in enumerate(zip(comparison.sides, comparison.runs, strict=True)):
        if run["health"]["findings"]:
            box = verdict(run["health"], side.case.record, True)
            boxes += f'<div class="found"><h3>{sample(number)}{escape(side.name)}</h3>{box}</div>'
        else:
            quiet.setdefault(run["health"]["verdict"], []).append(side.name)
    said = {"healthy": "No check found anything", "unmeasured": "No step was recorded"}
    lines = [f"{said.get(kind, kind)}: {', '.join(names)}." for kind, names in quiet.items()]
    lines.append("The doctor (python -m resjax.doctor RUN) looks closer.")
    return f'<div class="runs">{boxes}</div>' + "".join(f'<p class="left-out">{escape(line)}</p>' for line in lines)


def spikes(comparison: Comparison) -> str:
    """Every episode of every run, and the scores."""
    rows = ""
    for run, told in enumerate(comparison.runs):
        for one in told["spikes"]["episodes"]:
            span = f"{one['first']}" + (f"–{one['last']}" if one["last"] > one["first"] else "")
            before = f"{one['before']:.3f}" if np.isfinite(one["before"]) else "–"
            peak = f"{one['peak']:.3f}" if np.isfinite(one["peak"]) else "not finite"
            cells = "".join(f"<td>{text}</td>" for text in (span, before, peak, one["outcome"]))
            rows += f'<tr data-run="{run}"><th>{sample(run)}{escape(comparison.names[run])}</th>{cells}</tr>'
    if not rows:
        return '<p class="left-out">No run has one.</p>'
    head = "".join(f"<th>{text}</th>" for text in ("", "steps", "loss before", "highest", "outcome"))
    return f'<div class="wide"><table class="beside"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def settings_table(comparison: Comparison) -> str:
    """What is not the same in all runs, a column each."""
    if not comparison.settings:
        return '<p class="left-out">None: the runs have the same configuration.</p>'
    head = "".join(f"<th>{sample(run)}{escape(name)}</th>" for run, name in enumerate(comparison.names))
    body = ""
    for section, rows in comparison.settings.items():
        body += f'<tr><th class="group" colspan="{len(comparison.names) + 1}">{escape(section)}</th></tr>'
        for path, values in rows.items():
            cells = "".join(f"<td>{escape(shown(value))}</td>" for value in values)
            body += f"<tr><th>{escape(path)}</th>{cells}</tr>"
    return f'<div class="wide"><table class="beside texts"><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
