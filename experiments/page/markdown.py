"""How is the page written as Markdown?"""

from collections.abc import Iterable

from experiments.page import wording
from experiments.page.content import Block, Counts, Part, Picture, Points, Strip, Table, Verdicts, Words
from experiments.page.evidence import STATUSES, Entry, Evidence, Row, undecided_because

MADE = "<!-- made by python -m experiments.report; do not edit -->"


def text(parts: Iterable[Part], evidence: Evidence) -> str:
    """The whole file."""
    return (
        "\n\n".join(
            [MADE, *(line for part in parts for line in _part(part, 1 if part.name == "verdicts" else 2, evidence))]
        )
        + "\n"
    )


def _part(part: Part, level: int, evidence: Evidence) -> Iterable[str]:
    yield f"{'#' * level} {part.title}"
    for block in part.blocks:
        if written := _block(block, evidence):
            yield written
    for inner in part.parts:
        yield from _part(inner, level + 1, evidence)


def _block(block: Block, evidence: Evidence) -> str:
    match block:
        case Words():
            return "\n\n".join(block.paragraphs)
        case Points():
            return "\n".join(f"- {item}" for item in block.items)
        case Table():
            return table(block.head, block.rows)
        case Counts():
            return _counts(block)
        case Picture():
            return f"![{wording.raw(block.title)}](results/{block.kept.picture.name})"
        case Strip():
            return " · ".join(f"{wording.name(row)}: {wording.verdict(row)}" for row in block.rows)
        case Verdicts():
            return table(("Claim", "Verdict", "Evidence"), _verdicts(block.rows, evidence))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; lines of a field are kept apart."""
    lines = [list(head), ["---" for _ in head], *rows]
    return "\n".join("| " + " | ".join(field.replace("\n", "<br>") for field in line) + " |" for line in lines)


def _counts(block: Counts) -> str:
    rows = [("by experiment", *(str(block.by_experiment[status]) for status in STATUSES[:4]))]
    rows.append(("by construction", *(str(block.by_construction[status]) for status in STATUSES[:4])))
    return table(("", *STATUSES[:4]), rows) + f"\n\nNot tested yet: {block.by_experiment['not tested']} claims."


def _verdicts(rows: Iterable[Row], evidence: Evidence) -> Iterable[tuple[str, str, str]]:
    seen = set()
    for row in rows:
        yield _claim(row, row.claim.id not in seen), wording.verdict(row), _evidence(row, evidence)
        seen.add(row.claim.id)


def _claim(row: Row, first: bool) -> str:
    """What is claimed; of a claim with several readings the whole only in the first of its rows."""
    anchor = f'<a id="{row.claim.id}"></a>' if first else ""
    lines = [
        f"{anchor}**{row.claim.id}** ({wording.where(row)}; {row.claim.kind})"
        + (f" {wording.raw(row.claim.text)}" if first else "")
    ]
    lines += [f"Reading {wording.raw(one)}" for one in wording.readings(row)]
    if first:
        lines += [wording.literature(one) for one in row.claim.literature]
    return "\n".join(lines)


def _evidence(row: Row, evidence: Evidence) -> str:
    if not row.entries:
        return wording.untested(row, evidence)
    return "\n".join(line for entry in row.entries for line in _entry(entry))


def _entry(entry: Entry) -> Iterable[str]:
    kept = entry.kept
    at = wording.raw(wording.settings(entry))
    yield f"**{entry.settled.verdict}** at {at}, [{kept.experiment.name}](results/{kept.path.name}), `{kept.command}`"
    for judged, adjusted in zip(entry.settled.judged, entry.adjusted, strict=True):
        p = f"; Holm's p {wording.raw(wording.p(adjusted))}" if not entry.settled.construction else ""
        line = f"- {wording.in_a_line(judged)}; seeds {wording.seeds(judged)}{p}"
        if why := undecided_because(judged):
            line += f"; would be decided by: {wording.raw(why)}"
        yield line
    yield from (f"Note: {wording.raw(note)}" for note in entry.settled.notes)
