"""What stands on the page? Its sections as blocks of words, tables and figures, whatever they are written as."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from experiments import frozen
from experiments.claims import claims
from experiments.page import wording
from experiments.page.evidence import STATUSES, Evidence, Kept, Row, ended
from experiments.page.outline import Panel, Side, outline
from resjax.errors import Refused

LINE = 120  # of README.md


@dataclass(frozen=True)
class Words:
    """Paragraphs."""

    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Points:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table; the first column names its rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Counts:
    """How many verdicts there are of each kind, by experiment and by construction."""

    by_experiment: dict
    by_construction: dict


@dataclass(frozen=True)
class Picture:
    """The figure of an experiment at a scale."""

    kept: Kept
    title: str


@dataclass(frozen=True)
class Strip:
    """Verdicts in a line."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Verdicts:
    """The table of all claims."""

    rows: tuple[Row, ...]


Block = Words | Points | Table | Counts | Picture | Strip | Verdicts


@dataclass(frozen=True)
class Part:
    """A part of the page; ``parts`` inside it have smaller titles."""

    title: str
    name: str
    blocks: tuple[Block, ...]
    parts: tuple["Part", ...] = ()


def page(evidence: Evidence) -> list[Part]:
    """The whole page, the first part being its head."""
    return [
        head(evidence),
        panels(evidence),
        Part("All 83 claims", "claims", (Words(READING), Verdicts(tuple(evidence.brief(claims()))))),
        paradigms(evidence),
        trail(evidence),
        minds(evidence),
        honesty(evidence),
    ]


READING = (
    "What decides a claim is what its predicates say: a number over seeds with its 95 % interval, and the bound that was frozen before "
    "the runs. Supported: every interval lies on the claimed side, and at least four seeds of five do. Refuted: one lies wholly on the "
    "other side. Undecided: too little power, or the grid was cut; what would decide it is said. Mixed: anything else, or settings "
    "or scales that disagree. A verdict holds at its scale and settings and no further.",
    "Beside each number stands Holm's p-value over all predicates of this page: what it calls not small may be chance among so many. "
    "Verdicts by construction follow from the equations and count as no experiment. Literature: [V] was read in full, [S] in a "
    "summary.",
)


def head(evidence: Evidence) -> Part:
    told = sum(bool(row.entries) for row in evidence.rows)
    articles = outline().articles
    lede = (
        f"Two articles make 83 claims about residual connections that can be checked: A, {articles['A']}, and B, {articles['B']}. "
        "Each is put to runs or to equations here, with bounds that were frozen before the runs.",
        f"{evidence.tested} of the 83 have been put to the test so far, with {_many(told, 'verdict')} (a claim with several readings, "
        "or parts, has one for each).",
    )
    return Part(
        "Verdicts on 83 claims about residual connections",
        "verdicts",
        (Words(lede), Counts(evidence.counts(), evidence.counts(construction=True))),
    )


def panels(evidence: Evidence) -> Part:
    """The eight headline panels, then the figures of the experiments that have none."""
    parts = [panel(i, one, evidence) for i, one in enumerate(outline().panels, 1)]
    shown = {one.experiment for one in outline().panels}
    further = [one for one in evidence.kept if one.experiment.name not in shown]
    if further:
        blocks: list[Block] = []
        for one in further:
            mine = tuple(row for row in evidence.rows if any(entry.kept == one for entry in row.entries))
            blocks += [Words((f"**{one.experiment.name}** {wording.raw(one.experiment.question)}",))]
            blocks += [Picture(one, one.experiment.question), Strip(mine)]
        parts.append(Part("Further figures", "further", tuple(blocks)))
    return Part("Eight panels", "panels", (), tuple(parts))


def panel(number: int, one: Panel, evidence: Evidence) -> Part:
    kept = evidence.of(one.experiment)
    rows = tuple(evidence.brief(one.claims))
    blocks: list[Block] = [Words((f"{one.about} ({one.experiment})",))]
    blocks += [Picture(each, one.title) for each in kept]
    if not kept:
        blocks.append(Words((nothing(one.experiment, evidence),)))
    return Part(f"{number}. {one.title}", f"panel{number}", (*blocks, Strip(rows)))


def nothing(experiment: str, evidence: Evidence) -> str:
    """That an experiment has no results, and what would make them."""
    if experiment in evidence.built:
        return f"No results yet: `{wording.run(experiment)}` makes them."
    return f"No results yet: {experiment} is not built yet."


def paradigms(evidence: Evidence) -> Part:
    """The articles' lost table, from what was measured."""
    rows = [(one.row, _side(one.gradient, evidence), _side(one.information, evidence)) for one in outline().paradigms]
    words = (
        "Article B sets two paradigms side by side in its section 2.3, in a table that is missing from its text. Here it is put together "
        "from what the text around it says, and each field has what was measured of it.",
    )
    columns = ("", "Skip as a shortcut of gradients", "Skip as the trunk of information")
    return Part("The lost table: two paradigms", "paradigms", (Words(words), Table(columns, tuple(rows))))


def _side(side: Side, evidence: Evidence) -> str:
    lines = [wording.raw(side.says)]
    rows = evidence.brief(side.claims)
    for row in rows:
        if row.entries:
            lines.append(f"{wording.name(row)}: {wording.verdict(row)}")
        for entry in row.entries:
            lines += [
                f"{wording.raw(wording.settings(entry))}: {wording.in_a_line(one)}" for one in entry.settled.judged
            ]
    return "\n".join([*lines, *_open(rows, "not measured yet")])


def _open(rows: Iterable[Row], said: str) -> list[str]:
    """Those about which nothing was found, in one line; none where there are none."""
    names = [wording.name(row) for row in rows if not row.entries]
    return [f"{', '.join(names)}: {said}"] if names else []


def trail(evidence: Evidence) -> Part:
    """From each section of the articles to commands and verdicts."""
    rows = []
    for one in outline().sections:
        mine = [name for name, claim in claims().items() if claim.article == one.article and one.name in claim.sections]
        needed = sorted({experiment for name in mine for experiment in claims()[name].experiments})
        built = [name for name in needed if name in evidence.built]
        rest = [name for name in needed if name not in evidence.built]
        commands = [f"`{wording.run(*built)}`"] if built else []
        commands += [f"not built yet: {', '.join(rest)}"] if rest else []
        told = evidence.brief(mine)
        verdicts = [f"{wording.name(row)}: {wording.verdict(row)}" for row in told if row.entries]
        verdicts += _open(told, "not tested yet")
        rows.append((f"{one.article} {one.name}", wording.raw(one.says), "\n".join(verdicts), "\n".join(commands)))
    columns = ("Section", "What it says, in our words", "Claims and verdicts", "Command")
    return Part("The trail: section by section", "trail", (Table(columns, tuple(rows)),))


def minds(evidence: Evidence) -> Part:
    """What would overturn each headline result: in words, and what its predicates say."""
    parts = []
    for i, one in enumerate(outline().panels, 1):
        rows = []
        for row in (row for claim in one.claims for row in evidence.about(claim)):
            for said in _predicates(row, evidence):
                refuted = f"{wording.raw(wording.refuting(said))}"
                rows.append((wording.name(row), wording.verdict(row), wording.raw(wording.claimed(said)), refuted))
        columns = ("Claim", "Now", "Supported if, with its whole interval", "Refuted if")
        table: tuple[Block, ...] = (Table(columns, tuple(rows)),) if rows else ()
        parts.append(Part(f"{i}. {one.title}", f"mind{i}", (Words((wording.raw(one.mind),)), *table)))
    return Part("What would change our mind", "minds", (), tuple(parts))


def _predicates(row: Row, evidence: Evidence) -> list:
    """The predicates of a row in all experiments that are built, each once."""
    key = f"{row.claim.id}/{row.reading}" if row.reading else row.claim.id
    found = [said for one in evidence.built.values() for said in one.predicates.get(key, ())]
    return list(dict.fromkeys(found))


RULES = (
    "A verdict names its scale and settings; nothing small is said of anything large.",
    "Predicates, bounds and grids are frozen before the first run, in a file whose hash stands below; what is changed later is listed with "
    "the reason.",
    "The unit is the seed. Every seed is shown; a run that failed or ended not finite stays in figures and tables, and never agrees "
    "with a claim.",
    "Arms are compared each at its own best learning rate; what they do at a shared one is said beside it.",
    "Where the articles can be read in several ways, each reading has its verdict.",
    "Numbers from papers are given with how they were read; what is only remembered is no reference, and no pilot run is shown.",
)


def honesty(evidence: Evidence) -> Part:
    return Part(
        "Rules, and what did not go as planned",
        "honesty",
        (Points(RULES),),
        (_frozen(evidence), _runs(evidence), _cuts(evidence), *_unbuilt(evidence)),
    )


def _frozen(evidence: Evidence) -> Part:
    kept = frozen.read()
    if not kept["experiments"]:
        return Part("What was frozen", "frozen", (Words(("Nothing has been frozen yet.",)),))
    rows = []
    for name, entry in kept["experiments"].items():
        cells = ", ".join(f"{one['cells']} ({scale})" for scale, one in entry["grids"].items() if one["cells"])
        rows.append((name, entry["frozen"], str(len(entry["predicates"])), cells, _as_frozen(name, evidence)))
    columns = ("Experiment", "Frozen", "Claims and readings", "Cells", "Now")
    blocks: list[Block] = [Words((f"`frozen.json` has the SHA-256 `{frozen.digest()}`.",)), Table(columns, tuple(rows))]
    changed = [
        f"{one['date']}, {one['experiment']}, {wording.raw(', '.join(one['what']))}: {wording.raw(one['why'])}"
        for one in kept["changes"]
    ]
    blocks.append(Points(tuple(changed)) if changed else Words(("Nothing was changed after it was frozen.",)))
    return Part("What was frozen", "frozen", tuple(blocks))


def _as_frozen(name: str, evidence: Evidence) -> str:
    if name not in evidence.built:
        return "its file is gone"
    try:
        frozen.check(evidence.built[name])
    except Refused as refused:
        return wording.raw(str(refused).partition(";")[0])
    return "as frozen"


def _runs(evidence: Evidence) -> Part:
    """How runs ended, and what made them."""
    if not evidence.kept:
        return Part("How runs ended", "runs", (Words(("There are no runs yet.",)),))
    rows = []
    for one in evidence.kept:
        how = ended(one)
        which = ", ".join(f"{count} {wording.raw(name)}" for name, count in how["which"].items()) or "none"
        about = one.found.about
        versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
        rows.append(
            (
                f"[{one.experiment.name}](results/{one.path.name})", one.scale, str(how["runs"]), which,
                wording.raw(f"{about['device']}; {versions}"), f"`{about['frozen'][:12]}`", f"`{one.command}`",
            )
        )  # fmt: skip
    columns = (
        "Experiment",
        "Scale",
        "Runs",
        "Ended otherwise than trained",
        "Made with",
        "frozen.json then",
        "Command",
    )
    words = "All of them are in the figures and in the numbers above."
    return Part("How runs ended", "runs", (Words((words,)), Table(columns, tuple(rows))))


def _cuts(evidence: Evidence) -> Part:
    """What was left out of the grids."""
    cuts = [f"{one.name}: {wording.raw(cut)}" for one in evidence.built.values() for cut in one.cut]
    block: Block = Points(tuple(cuts)) if cuts else Words(("Nothing is listed as cut.",))
    return Part("What was cut at cpu scale", "cuts", (block,))


def _unbuilt(evidence: Evidence) -> Iterable[Part]:
    rest = [
        f"{name}: {wording.raw(asks)}" for name, asks in outline().experiments.items() if name not in evidence.built
    ]
    if rest:
        yield Part("Experiments that are not built yet", "unbuilt", (Points(tuple(rest)),))


def readme(evidence: Evidence) -> str:
    """What README.md says of the page, in Markdown: how many verdicts there are, and figures where there are any."""
    counts, made = evidence.counts(), sum(evidence.counts(construction=True).values())
    told = ", ".join(f"{counts[status]} {status}" for status in STATUSES[:4])
    apart = f", and {made} decided by construction" if made else ""
    words = (
        "[The page of verdicts](experiments/REPORT.md) puts 83 claims of two articles about residual connections to the test, each "
        "with its bounds, its evidence and its command; bounds are frozen before the runs. "
        + (
            f"Tested so far: {evidence.tested} claims; of their readings {told} by experiment{apart}."
            if evidence.kept
            else "No results are in yet."
        )
    )
    lines = ["\n".join(textwrap.wrap(words, LINE, break_long_words=False, break_on_hyphens=False))]
    for one in outline().panels:
        if one.readme:
            lines += [
                f"![{one.title}](experiments/results/{kept.picture.name})" for kept in evidence.of(one.experiment)[:1]
            ]
    return "\n\n".join(lines) + "\n"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
