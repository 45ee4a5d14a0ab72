"""How is the page drawn? One file that opens without a network, in light and dark."""

import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from experiments.page import wording
from experiments.page.content import Block, Counts, Part, Picture, Points, Strip, Table, Verdicts, Words
from experiments.page.evidence import STATUSES, Entry, Evidence, Row, undecided_because
from resjax.health.page import filled, mark, whole_page

HERE = Path(__file__).parent
MAKER = "resjax.experiments"
INLINE = re.compile(r"\\(?P<kept>.)|`(?P<code>[^`]*)`|\*\*(?P<bold>.+?)\*\*|\[(?P<words>[^\]]+)\]\((?P<to>[^)\s]+)\)")
Drawn = Mapping[str, str]


def text(parts: Iterable[Part], evidence: Evidence, drawn: Drawn) -> str:
    """The whole file.

    Args:
      drawn: the figures' SVG by the names of their files.
    """
    first, *rest = parts
    fill = {
        "mark": mark("experiments"),
        "title": escape(first.title),
        "head": "".join(_block(block, evidence, drawn) for block in first.blocks),
        "links": "".join(f'<a href="#{part.name}">{inline(part.title)}</a>' for part in rest),
        "parts": "".join(_part(part, 2, evidence, drawn) for part in rest),
    }
    body = filled(HERE / "verdicts.html", fill)
    return whole_page(first.title, MAKER, body, [HERE / "verdicts.css"], {}, [HERE / "verdicts.js"])


def inline(marked: str) -> str:
    """A line of the small markup as HTML."""
    done, last = [], 0
    for found in INLINE.finditer(marked):
        done.append(escape(marked[last : found.start()], quote=False))
        last = found.end()
        part = found.groupdict()
        if part["kept"] is not None:
            done.append(escape(part["kept"], quote=False))
        elif part["code"] is not None:
            done.append(f"<code>{escape(part['code'], quote=False)}</code>")
        elif part["bold"] is not None:
            done.append(badge(part["bold"]) if part["bold"] in STATUSES else f"<b>{inline(part['bold'])}</b>")
        else:
            done.append(f'<a href="{escape(part["to"])}">{inline(part["words"])}</a>')
    return "".join([*done, escape(marked[last:], quote=False)])


def badge(status: str) -> str:
    return f'<b class="v {status.replace(" ", "-")}">{status}</b>'


def lines(marked: str) -> str:
    """Several lines of it."""
    return "".join(f"<p>{inline(line)}</p>" for line in marked.split("\n"))


def _part(part: Part, level: int, evidence: Evidence, drawn: Drawn) -> str:
    inner = "".join(_block(block, evidence, drawn) for block in part.blocks)
    inner += "".join(_part(one, level + 1, evidence, drawn) for one in part.parts)
    kind = "section" if level == 2 else "div"
    return f'<{kind} id="{part.name}" class="part"><h{level}>{inline(part.title)}</h{level}>{inner}</{kind}>\n'


def _block(block: Block, evidence: Evidence, drawn: Drawn) -> str:
    match block:
        case Words():
            return '<div class="words">' + "".join(f"<p>{inline(one)}</p>" for one in block.paragraphs) + "</div>"
        case Points():
            return '<ul class="points">' + "".join(f"<li>{inline(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            return table(block)
        case Counts():
            return counts(block)
        case Picture():
            return figure(block, drawn[block.kept.picture.name])
        case Strip():
            return '<div class="strip">' + "".join(map(chip, block.rows)) + "</div>"
        case Verdicts():
            return verdicts(block.rows, evidence)


def table(block: Table) -> str:
    head = "".join(f"<th>{inline(field)}</th>" for field in block.head)
    rows = "".join(
        "<tr>" + f"<th>{lines(row[0])}</th>" + "".join(f"<td>{lines(field)}</td>" for field in row[1:]) + "</tr>"
        for row in block.rows
    )
    return f'<div class="wide"><table class="listed"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def counts(block: Counts) -> str:
    """Numbers that also choose which claims the table shows."""
    buttons = []
    for status in STATUSES:
        apart = block.by_construction[status]
        more = f"<small>and {apart} by construction</small>" if apart else ""
        name = "not tested yet" if status == "not tested" else status
        buttons.append(
            f'<button type="button" data-status="{status}" class="{status.replace(" ", "-")}">'
            f"<span>{name}</span><strong>{block.by_experiment[status]}</strong>{more}</button>"
        )
    return f'<div class="counts">{"".join(buttons)}</div>'


def chip(row: Row) -> str:
    reading = f" {escape(row.reading)}" if row.reading else ""
    how = ", ".join(filter(None, ("by construction" if row.construction else "", *row.scales)))
    status = row.verdict
    name = "not tested yet" if status == "not tested" else status
    small = f" <small>{escape(how)}</small>" if how else ""
    return (
        f'<a class="chip {status.replace(" ", "-")}" href="#{row.claim.id}" title="{escape(row.claim.text)}">'
        f"<b>{row.claim.id}</b>{reading} <i>{name}</i>{small}</a>"
    )


def figure(block: Picture, svg: str) -> str:
    """A drawing in the page, its ids its own; in the dark its brightness is turned round."""
    name = block.kept.picture.stem.replace(".", "-")
    svg = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(block.title)}" ', 1)
    about = f"{escape(block.kept.experiment.name)} at scale {escape(block.kept.scale)}"
    return (
        f'<figure><div class="drawn">{svg}</div><figcaption><a href="results/{block.kept.path.name}">{about}</a>'
        f"<code>{escape(block.kept.command)}</code></figcaption></figure>"
    )


# ------------------------------------------------------------------------------------------------------- all claims


def verdicts(rows: Iterable[Row], evidence: Evidence) -> str:
    by_claim: dict[str, list[Row]] = {}
    for row in rows:
        by_claim.setdefault(row.claim.id, []).append(row)
    claims = "".join(_claim(mine, evidence) for mine in by_claim.values())
    return (
        '<p class="filter" hidden><label>Show claims with <input type="search" placeholder="any words"></label> <output></output></p>'
        f'<div class="claims">{claims}</div>'
    )


def _claim(rows: list[Row], evidence: Evidence) -> str:
    claim = rows[0].claim
    statuses = "|".join(dict.fromkeys(row.verdict for row in rows))
    notes = "".join(f'<p class="literature">{inline(wording.literature(one))}</p>' for one in claim.literature)
    return (
        f'<article class="claim" id="{claim.id}" data-status="{statuses}"><a class="id" href="#{claim.id}">{claim.id}</a>'
        f'<div class="said"><h3>{escape(claim.text)}</h3><p class="where">{escape(wording.where(rows[0]))} · {escape(claim.kind)}</p>'
        f'{notes}</div><div class="found">{"".join(_row(row, evidence) for row in rows)}</div></article>\n'
    )


def _row(row: Row, evidence: Evidence) -> str:
    reading = ""
    for one in wording.readings(row):
        name, _, says = one.partition(": ")
        reading += f'<p class="reading"><b>{escape(name)}</b> {escape(says)}</p>'
    if not row.entries:
        return f'<div class="row">{reading}<p class="open">{badge("not tested")} · {inline(wording.untested(row, evidence))}</p></div>'
    how = ", ".join(["by construction"] * row.construction + row.scales)
    told = "".join(_entry(entry) for entry in row.entries)
    return f'<div class="row">{reading}<p>{badge(row.verdict)} · {escape(how)}</p>{told}</div>'


def _entry(entry: Entry) -> str:
    rows = ""
    for judged, adjusted in zip(entry.settled.judged, entry.adjusted, strict=True):
        why = undecided_because(judged)
        cells = (
            escape(wording.claimed(judged.predicate)) + (f'<p class="open">would be decided by: {escape(why)}</p>' if why else ""),
            escape(wording.measured(judged.effect)),
            escape(wording.seeds(judged)),
            "" if entry.settled.construction else escape(wording.p(adjusted)),
            badge(judged.verdict),
        )  # fmt: skip
        rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in entry.settled.notes)
    head = "".join(f"<th>{name}</th>" for name in ("claimed", "mean [95 %]", "seeds", "Holm’s p", "verdict"))
    return (
        f'<div class="entry"><p class="at">{escape(wording.settings(entry))} · <a href="results/{entry.kept.path.name}">'
        f"{entry.kept.experiment.name}</a> · <code>{escape(entry.kept.command)}</code></p>"
        f'<table class="judged"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}</div>'
    )
