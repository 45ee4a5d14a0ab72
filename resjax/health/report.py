"""How does a run look? One self-contained ``report.html`` that opens offline, made from the run's files."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from resjax.errors import Refused
from resjax.health import figures
from resjax.health.findings import dtype_of, examine, section
from resjax.health.normal import normal, overrides
from resjax.health.page import HERE, filled, mark, whole_page
from resjax.health.record import HealthRecord

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
BASELINES = ("uniform", "unigram", "bigram", "trigram")
LOSS_HEIGHT = 330  # pixels
BAND_NOTE = "the article's claim (0.01-0.1), not a criterion: healthy models leave it"


def write_report(run_folder: str | os.PathLike) -> Path:
    """Writes ``report.html`` into a run's folder and returns its path.

    Reads config.json, metrics.jsonl, summary.json and health/; each may be missing, as in a run that goes on. The page
    asks nothing of the network, and every string from a file is escaped. It is complete on disk before it gets its
    name.

    Raises:
      Refused: there is no such folder.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise Refused(f"there is no run folder '{folder}'")
    path = folder / "report.html"
    unfinished = path.with_name("report.html.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(page(folder))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def page(folder: Path) -> str:
    """The whole page as text."""
    notes: list[str] = []
    facts = read_json(folder / "config.json", notes)
    config = facts if "model" in facts or "residual" in facts else section(facts, "config")
    summary = read_json(folder / "summary.json", notes)
    rows = read_metrics(folder / "metrics.jsonl", notes)
    record = HealthRecord.load(folder / "health")
    notes += [f"health: {note}" for note in record.notes]
    ours = {} if "recorded_by" in facts else config
    dtype = dtype_of(record, ours, summary.get("stream_dtype"))
    health = section(summary, "health") or examine(
        record, ours, dtype, series(rows, "loss")[1].tolist(), section(summary, "baselines").get("bigram")
    )
    charts = training_charts(rows, section(summary, "baselines") or section(facts, "baselines"))
    ends = figures.ends(record)
    maps, sections = health_sections(record, config, dtype, ends)
    columns = figures.columns(record.steps) if len(record) else None
    name = folder.resolve().name
    fill = {
        "mark": mark("residual health"),
        "name": escape(name),
        "lede": lede(config, summary, rows),
        "verdict": verdict(health, record, bool(summary)),
        "numbers": numbers(summary, rows, dtype),
        "training": training_section(charts, rows),
        "health": sections,
        "config": config_tables(facts),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in notes),
        "notes_hidden": "" if notes else "hidden",
    }
    data = {"columns": columns, "maps": maps, "charts": charts + ends}
    body = filled(HERE / "report.html", fill)
    return whole_page(f"{name}: residual health", __name__, body, data=data, scripts=[HERE / "report.js"])


def read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """A JSON object; empty, with a line in ``notes``, where the file is not one; empty where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_json)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name}: cannot be read ({error}), skipped")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name}: not a JSON object, skipped")
        return {}
    return value


def read_metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order of steps, "nan", "inf" and "-inf" as floats; lines that are not strict JSON
    are skipped with a line in ``notes`` that says how many.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows, skipped = [], 0
    for line in filter(str.strip, lines):
        try:
            row = json.loads(line, parse_constant=_not_json)
            rows.append({key: unquoted(value) for key, value in row.items()} | {"step": int(row["step"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            skipped += 1
    if skipped:
        notes.append(f"{path.name}: {skipped} unfinished or unreadable lines, skipped")
    return sorted(rows, key=lambda row: row["step"])


def unquoted(value: Any) -> Any:
    """A number from a file, non-finite ones being strings there; other values as they are."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have a number called ``key``."""
    found = [
        (row["step"], row[key])
        for row in rows
        if isinstance(row.get(key), int | float) and not isinstance(row[key], bool)
    ]
    return np.array([step for step, _ in found], np.int64), np.array([value for _, value in found], np.float64)


def training_charts(rows: list[dict[str, Any]], baselines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Loss with the baselines, learning rate, gradient norm and speed, as far as they were logged."""
    levels = {name: float(baselines[name]) for name in BASELINES if isinstance(baselines.get(name), int | float)}
    training, held_out = series(rows, "loss"), series(rows, "eval_loss")
    drawn = [figures.curve(*training, "training")] if len(training[0]) else []
    drawn += [figures.curve(*held_out, "held out", "points")] if len(held_out[0]) else []
    charts = []
    if drawn:
        charts.append(
            figures.chart("loss", "Loss", "nats per token", "linear", drawn, levels, wide=True, height=LOSS_HEIGHT)
        )
    for key, title, unit, scale in (
        ("lr", "Learning rate", "per step", "linear"),
        ("grad_norm", "Gradient norm", "global, before clipping", "log"),
        ("tokens_per_s", "Speed", "tokens a second", "linear"),
    ):
        steps, values = series(rows, key)
        if len(steps):
            charts.append(figures.chart(key, title, unit, scale, [figures.curve(steps, values, title)]))
    return charts


def training_section(charts: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The training charts' places; a sentence where nothing was logged."""
    if not charts:
        return '<p class="left-out">No training rows yet: metrics.jsonl is missing or empty.</p>'
    lines = (
        "Held-out points below the bigram line mean that the model uses more than the last token; a curve that rests "
        "on the unigram line has learned token frequencies only."
    )
    no_lines = "The run does not state its baselines (yet), so no level marks what counts as learning."
    sentences = {
        "loss": lines if charts[0]["lines"] else no_lines,
        "lr": "As optimizer.warmup and optimizer.schedule say.",
        "grad_norm": "Isolated peaks are usual; a steady rise is not.",
        "tokens_per_s": "Normally level; other work on the machine shows as dips.",
    }
    steps, loss = series(rows, "loss")
    if not np.isfinite(loss).all():
        sentences["loss"] += f" The loss was not finite at step {steps[~np.isfinite(loss)][0]}."
    places = [chart_place(chart, sentences[chart["id"]]) for chart in charts]
    wide = 1 if charts[0]["id"] == "loss" else 0
    return f'{"".join(places[:wide])}<div class="small">{"".join(places[wide:])}</div>'


def chart_place(chart: Mapping[str, Any], sentence: str) -> str:
    """Title, unit, sentence and empty panel of a line chart; the page's script draws it."""
    return (
        f'<figure class="chart" id="{escape(chart["id"])}">{heading(chart["title"], chart["unit"])}'
        f'<div class="panel" data-chart="{escape(chart["id"])}"></div>'
        f"<figcaption>{escape(sentence)}</figcaption></figure>"
    )


def heading(title: str, unit: str) -> str:
    """A figure's title with its unit."""
    return f'<h3>{escape(title)} <span class="unit">{escape(unit)}</span></h3>'


def health_sections(
    record: HealthRecord, config: Mapping[str, Any], dtype: str, ends: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str]:
    """The maps' data, and the places of all health figures by group; ``ends`` are the small charts of both ends."""
    if not len(record):
        return [], '<p class="left-out">No step has been recorded yet: health/ is missing or empty.</p>'
    maps, html = [], []
    for group, about, members in figures.GROUPS:
        if (group, about, members) in figures.MORE and not any(figure.probe in record for figure in members):
            continue  # not asked for
        places, left_out, missing = [], [], []
        for figure in members:
            drawn = figures.heat(figure, record) if figure.probe in record else None
            if drawn:
                sentence = normal(figure.probe, config, dtype)
                maps.append(drawn)
                places.append(map_place(figure, drawn, record, sentence, scheme_name(config)))
            elif figure.probe == "finite" and figure.probe in record:
                left_out.append("Stream and updates were finite in every recorded step.")
            else:
                missing.append(figure.title)
        html.append(f'<section><h2>{group}</h2><p class="about">{about}</p><div class="maps">{"".join(places)}</div>')
        if missing:
            why = "nothing was recorded or the scheme has no such thing"
            left_out.append(f"Left out, because {why}: {', '.join(missing)}.")
        html.append("".join(f'<p class="left-out">{escape(line)}</p>' for line in left_out) + "</section>")
    if ends:
        places = [end_place(chart) for chart in ends]
        html.append('<section><h2>Ends</h2><p class="about">Measured once a step.</p>')
        html.append(f'<div class="small">{"".join(places)}</div></section>')
    return maps, "".join(html)


def end_place(chart: Mapping[str, Any]) -> str:
    """A small chart of one end of the stack, with its sentence."""
    sentences = {
        "embed_rms": "What enters the first block; the scale that the first updates are measured against.",
        "final_rms": "What the head reads: 1 at the start where the scheme has a final norm, later the norm's gain.",
        "embed_grad": "What reaches the embedding after the whole stack; compare with the gradients at the stream.",
        "moved": "Near 1 in float32, but for embeddings no batch used; less where small steps are rounded away.",
    }
    return chart_place(chart, sentences[chart["id"]])


def map_place(
    figure: figures.Figure, drawn: Mapping[str, Any], record: HealthRecord, sentence: str, scheme: str
) -> str:
    """Title, unit, sentences, colour bar and empty panels of one probe."""
    panels = "".join(
        f'<div class="panel" data-map="{figure.probe}" data-panel="{i}"></div>' for i in range(len(drawn["panels"]))
    )
    band = f'<span class="band-key"><i></i>{escape(BAND_NOTE)}</span>' if figure.band else ""
    notes = filter(None, (figures.all_low(record, figure), figures.binned(record, figure)))
    binned = "".join(f"<span>{escape(text)}</span>" for text in notes)
    return (
        f'<figure class="map n{len(drawn["panels"])}" id="{figure.probe}">{heading(figure.title, figure.unit)}'
        f'<div class="words"><p>{escape(figure.what)}</p>'
        f"<p><b>Normal for {escape(scheme)}.</b> {escape(sentence)}</p></div>"
        f'<div class="bar" data-bar="{figure.probe}"></div><div class="panels">{panels}</div>'
        f'<figcaption><span class="steps" data-steps="{figure.probe}"></span>{band}{binned}</figcaption></figure>'
    )


def scheme_name(config: Mapping[str, Any]) -> str:
    """The run's scheme as configured."""
    return str(section(config, "residual").get("name") or "this scheme")


def lede(config: Mapping[str, Any], summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """What was run, in one or two sentences of escaped HTML."""
    model, residual, data = (section(config, name) for name in ("model", "residual", "data"))
    optimizer, train = section(config, "optimizer"), section(config, "train")
    if not model:
        return "There is no config.json to say what was run."
    changed = overrides(residual)
    parts = [
        f"A model of <b>{_count(model.get('depth', '?'), 'block')}</b>, width {escape(str(model.get('width', '?')))}"
    ]
    if residual.get("name"):  # a watched model of somebody else's has none
        parts.append(f", under the residual scheme <b>{escape(scheme_name(config))}</b>")
        parts.append(f" ({escape(', '.join(changed))})" if changed else "")
    if data.get("source"):
        parts.append(f", trained on {escape(str(data['source']))}")
    if optimizer.get("name"):
        parts.append(f" with {escape(str(optimizer['name']))}")
        parts.append(f" at a learning rate of {escape(str(optimizer['lr']))}" if optimizer.get("lr") else "")
    done, asked = summary.get("steps", rows[-1]["step"] if rows else 0), train.get("steps")
    parts.append(
        f". Done: {escape(str(done))} of {_count(asked, 'step')}." if asked else f". Done: {_count(done, 'step')}."
    )
    return "".join(parts) + ("" if summary else " The run has no summary yet: it goes on, or was cut short.")


def verdict(health: Mapping[str, Any], record: HealthRecord, finished: bool) -> str:
    """The verdict in words, and every finding."""
    findings = [finding for finding in health.get("findings") or [] if isinstance(finding, Mapping)]
    if findings:
        title = _count(len(findings), "finding")
        body = "".join(
            f"<li><h3>{_text(f, 'kind')} <span>{_text(f, 'where')}, step {_text(f, 'step')}</span></h3>"
            f'<p>{_text(f, "evidence")}.</p><p class="advice">{_text(f, "advice")}</p></li>'
            for f in findings
        )
        return f'<div class="verdict bad"><h2>{title}</h2><ul>{body}</ul></div>'
    if health.get("verdict") == "healthy":
        seen = f" ({record.steps[0]} to {record.steps[-1]})" if len(record) else ""
        text = (
            f"In {_count(len(record), 'recorded step')}{seen} no check found anything: no non-finite value, no dead "
            "branch, no swallowed update, no token collapse, no stream blow-up, no gradient spread over depth."
        )
        return f'<div class="verdict good"><h2>{"Healthy" if finished else "Healthy so far"}</h2><p>{text}</p></div>'
    text = "No step was recorded, so nothing can be said about the stream."
    return f'<div class="verdict"><h2>Not measured</h2><p>{text}</p></div>'


def _count(number: Any, thing: str) -> str:
    return f"{escape(str(number))} {thing}{'' if number == 1 else 's'}"


def _text(finding: Mapping[str, Any], key: str) -> str:
    text = str(finding.get(key, ""))
    return escape(text[:1].upper() + text[1:] if key in ("kind", "evidence") else text)


def numbers(summary: Mapping[str, Any], rows: list[dict[str, Any]], dtype: str) -> str:
    """The run's few numbers, side by side."""

    def last(key: str, logged: str, form: str) -> tuple[float | None, str]:
        values = series(rows, logged)[1]
        value = unquoted(summary.get(key, values[-1] if len(values) else None))
        return (value, form.format(value)) if isinstance(value, int | float) else (None, "")

    held_out, held_out_text = last("eval_loss", "eval_loss", "{:.3f}")
    bigram = section(summary, "baselines").get("bigram")
    gap = bigram - held_out if isinstance(bigram, int | float) and held_out is not None else math.nan
    loss_of = "mean of last rows" if "train_loss" in summary else "last row"
    speed_of = "median" if "tokens_per_s" in summary else "last row"
    cells = [
        ("held-out loss", held_out_text, "nats per token"),
        (f"{'above' if gap < 0 else 'below'} the bigram", f"{abs(gap):.3f}" * math.isfinite(gap), "nats per token"),
        ("training loss", last("train_loss", "loss", "{:.3f}")[1], f"nats, {loss_of}"),
        ("speed", last("tokens_per_s", "tokens_per_s", "{:,.0f}")[1], f"tokens a second, {speed_of}"),
        ("stream", dtype, "dtype" + (" in the running program" if summary.get("stream_dtype") else " as configured")),
    ]
    return "".join(f"<div><dt>{a}</dt><dd>{escape(b)}</dd><small>{c}</small></div>" for a, b, c in cells if b)


def config_tables(facts: Mapping[str, Any]) -> str:
    """config.json as small tables, one a section; loose fields first."""
    sections: dict[str, dict[str, Any]] = {}

    def place(prefix: str, mapping: Mapping[str, Any]) -> None:
        for key, value in mapping.items():
            if isinstance(value, Mapping):
                place(f"{prefix}.{key}" if prefix else str(key), value)
            else:
                sections.setdefault(prefix, {})[str(key)] = value

    place("", facts)
    tables = []
    for name in sorted(sections, key=bool):
        lines = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(value if isinstance(value, str) else json.dumps(value))}</td></tr>"
            for key, value in sections[name].items()
        )
        tables.append(f"<table><caption>{escape(name or 'run')}</caption>{lines}</table>")
    return "".join(tables) or "<p>There is no config.json.</p>"
