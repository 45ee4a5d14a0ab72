"""How is a comparison told on a terminal? One table with a column a run, or of many runs tables with a row a run."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resjax.health import figures
from resjax.health.comparison import Comparison
from resjax.health.comparison.settings import shown
from resjax.health.comparison.side import PROBES, SPAN, UNFINISHED
from resjax.health.report import BASELINES
from resjax.health.table import few_digits, new_table, print_table, table_width, terminal

COLUMNS = 5  # more runs than these are rows
Run = Mapping[str, Any]


class Group(NamedTuple):
    """Lines that belong together: a title, and label -> a text a run."""

    title: str
    lines: dict[str, list[str]]


def groups(comparison: Comparison) -> list[Group]:
    """All that is told, in order; lines without any value are left out."""
    differ = {
        f"settings that differ: {section}": {path: [shown(value) for value in values] for path, values in rows.items()}
        for section, rows in comparison.settings.items()
    }
    depth = {"at the end, in the first, the middle and the last block": by_depth(comparison.runs)}
    every = {"": results(comparison)} | depth | differ
    return [
        Group(title, kept)
        for title, lines in every.items()
        if (kept := {k: v for k, v in lines.items() if any(map(told, v))})
    ]


def told(text: str) -> bool:
    return text not in ("", "-")


def results(comparison: Comparison) -> dict[str, list[str]]:
    """What the runs came to: label -> a text a run."""
    levels = [] if comparison.baselines else [(name, f"{name} baseline") for name in BASELINES]
    lines: dict[str, Callable[[Run], str]] = {
        "state": state,
        "held-out loss": held_out,
        "held-out - bigram": lambda run: over_bigram(run, comparison.baselines),
        **{title: lambda run, name=name: nats(run["baselines"].get(name)) for name, title in levels},  # type: ignore[misc]
        "training loss": lambda run: nats(run["train_loss"]),
        "steps to target": steps_to_target,
        "spikes": spikes,
        "tokens a second": lambda run: "-" if run["tokens_per_s"] is None else f"{run['tokens_per_s']:,.0f}",
        "health": lambda run: run["health"]["verdict"] if not run["health"]["findings"] else findings(run),
    }
    return {label: [say(run) for run in comparison.runs] for label, say in lines.items()}


def state(run: Run) -> str:
    """How far it came."""
    if run["status"] == UNFINISHED:
        return f"unfinished, step {run['steps']}" + (f" of {run['planned']}" if run["planned"] else "")
    ended = (
        "finished" if run["status"] == "finished" else "not finite" if run["status"] == "nonfinite" else run["status"]
    )
    return f"{ended}, {run['steps']} steps"


def nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def held_out(run: Run) -> str:
    """The last held-out loss, with its step where the run has gone on since."""
    late = run["eval_step"] is not None and run["eval_step"] != run["steps"]
    return nats(run["eval_loss"]) + (f" (step {run['eval_step']})" if late and run["eval_loss"] is not None else "")


def over_bigram(run: Run, shared: Mapping[str, float]) -> str:
    """Below 0 the model uses more than the last token. A run that has not ended states no baselines, and has those of its text."""
    bigram = (run["baselines"] or shared).get("bigram")
    return "-" if bigram is None or run["eval_loss"] is None else f"{run['eval_loss'] - bigram:+.3f}"


def steps_to_target(run: Run) -> str:
    steps = run["steps_to_target"]
    return "-" if steps is None else "never" if steps == inf else f"{steps:.0f}"


def spikes(run: Run) -> str:
    """Score and episodes."""
    found = run["spikes"]
    if not np.isfinite(found["score"]):
        return "-"
    count = len(found["episodes"])
    episodes = (
        f", {count} episode{'s' * (count > 1)}" + (f", {found['fatal']} fatal" if found["fatal"] else "")
        if count
        else ""
    )
    return f"{found['score']:.2g} %{episodes}"


def findings(run: Run) -> str:
    return "; ".join(dict.fromkeys(str(one.get("kind")) for one in run["health"]["findings"]))


def by_depth(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Probe and site -> first, middle and last block of each run."""
    titles = {figure.probe: figure.title for _, _, members in figures.GROUPS for figure in members}
    lines: dict[str, list[str]] = {}
    for probe in PROBES:
        sites = list(dict.fromkeys(site for run in runs for site in run["profiles"].get(probe, {})))
        for site in sites:
            lines[f"{titles[probe]}, {site}"] = [three(run["profiles"].get(probe, {}).get(site)) for run in runs]
    return lines


def three(values: Sequence[float] | None) -> str:
    """The first, the middle and the last of some values by block."""
    if not values:
        return "-"
    places = sorted({0, len(values) // 2, len(values) - 1})
    return "  ".join(few_digits(values[place]) if np.isfinite(values[place]) else "-" for place in places)


# ---- on a terminal


def print_comparison(comparison: Comparison, file: TextIO | None = None) -> None:
    """Prints all of it."""
    console, fancy = terminal(file)
    for line in heading(comparison):
        console.print(Text(line), soft_wrap=True)
    names = [name + " *" * (name in comparison.not_comparable) for name in comparison.names]
    made = groups(comparison)
    whole = columns(names, made, fancy)
    if len(names) <= COLUMNS and table_width(whole) <= console.width:
        print_table(console, whole, fancy)
    else:
        for group in joined(made):
            console.print(Text(group.title, style="bold"))
            for part in rows(names, group, fancy, console):
                print_table(console, part, fancy)
    for line in footing(comparison):
        console.print(Text(line, style="dim"), soft_wrap=True)


def heading(comparison: Comparison) -> list[str]:
    """What should be known before the table."""
    made = [f"* {comparison.warning}"] if comparison.warning else []
    if comparison.target_is:
        made.append(
            f"target: {comparison.target:.3f} nats per token, {comparison.target_is}; reached where the mean of {SPAN} steps is no higher"
        )
    if levels := comparison.baselines:
        made.append(f"baselines: {', '.join(f'{name} {value:.3f}' for name, value in levels.items())} nats per token")
    return made


def footing(comparison: Comparison) -> list[str]:
    """What should be known after it."""
    made = [] if comparison.settings else ["no setting differs"]
    return [*made, *(f"note: {note}" for note in comparison.notes)]


def columns(names: Sequence[str], made: Sequence[Group], fancy: bool) -> Table:
    """A column a run."""
    table = new_table(fancy)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for title, lines in made:
        if title:
            table.add_row()
            table.add_row(Text(title, style="bold"))
        for label, texts in lines.items():
            table.add_row(Text(label), *map(Text, texts))
    return table


def joined(made: Sequence[Group]) -> list[Group]:
    """The same with all settings in one group: a field's name says its section."""
    settings = {
        path: texts for group in made if group.title.startswith("settings") for path, texts in group.lines.items()
    }
    others = [group for group in made if not group.title.startswith("settings")]
    return [*others, *([Group("settings that differ", settings)] if settings else [])]


def rows(names: Sequence[str], group: Group, fancy: bool, console: Console) -> list[Table]:
    """A row a run; in as many tables below one another as the width asks for."""
    done: list[Table] = []
    left = dict(group.lines)
    while left:
        for count in range(len(left), 0, -1):
            table = new_table(fancy)
            table.add_column("run", overflow="fold")
            chosen = dict(list(left.items())[:count])
            for label in chosen:
                table.add_column(Text(label), justify="right", overflow="fold")
            for i, name in enumerate(names):
                table.add_row(Text(name), *(Text(texts[i]) for texts in chosen.values()))
            if table_width(table) <= console.width:
                break
        done.append(table)
        left = {label: texts for label, texts in left.items() if label not in chosen}
    return done
