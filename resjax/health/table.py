"""How healthy is the stream at every depth? One table for the terminal, legible at 1,000 blocks; plain elsewhere."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from resjax.health import findings
from resjax.health.collapse import COLLAPSED_COSINE
from resjax.health.reading import at_end, at_start, end_named
from resjax.health.record import HealthRecord

ROWS = 16  # deeper models are shown as the first block, the last, and ranges of equal length between
SPARKS = "▁▂▃▄▅▆▇█"
PLAIN_WIDTH = 400  # no wrapping in files and pipes


def print_health(record: HealthRecord, health: Mapping[str, Any], scheme: str = "", file: TextIO | None = None) -> None:
    """Prints the table by depth and the findings.

    On a terminal the table fits its width: colours, sparks and, where there is room, the spread within a range of
    blocks. Elsewhere it is plain ASCII, one line a row.

    Args:
      record: the run's probes.
      health: the verdict of :func:`resjax.health.findings.examine`.
      scheme: name of the residual scheme, for the title.
      file: where to print; standard output by default.
    """
    console, fancy = terminal(file)
    if not len(record):
        console.print("Residual health: no step was recorded.")
        return
    found = health.get("findings") or []
    table, spread, hidden = health_table(record, health, fancy, console.width)
    console.print(Text(_title(record, scheme), style="bold"))
    print_table(console, table, fancy)
    console.print(Text(_legend(record, spread, hidden, bool(found)), style="dim"))
    if not found:
        console.print(Text("Healthy: no check found anything.", style="green"))
    for finding in found:
        console.print(
            Text(
                f"! {finding['kind']}: {finding['where']}, step {finding['step']}: {finding['evidence']}.", style="red"
            )
        )
        console.print(Text(f"  {finding['advice']}"))


def terminal(file: TextIO | None = None) -> tuple[Console, bool]:
    """Where a table is printed, and whether colours and signs beyond ASCII are shown there."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    fancy = console.is_terminal and not console.is_dumb_terminal and "utf" in console.encoding.lower()
    if not fancy:
        console = Console(file=file, highlight=False, markup=False, emoji=False, color_system=None, width=PLAIN_WIDTH)
    return console, fancy


def new_table(fancy: bool) -> Table:
    """A table without columns: ruled on a terminal, of plain ASCII elsewhere."""
    return Table(
        box=box.SIMPLE_HEAD if fancy else box.MARKDOWN, pad_edge=not fancy, padding=(0, 1), show_edge=not fancy
    )


def print_table(console: Console, table: Table, fancy: bool) -> None:
    """Prints it; elsewhere than on a terminal without the blanks that fill a terminal's line."""
    if fancy:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    console.print("\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()))


def table_width(table: Table) -> int:
    """Characters that its widest line takes."""
    measure = Console(width=PLAIN_WIDTH)
    return Measurement.get(measure, measure.options, table).maximum


def health_table(
    record: HealthRecord, health: Mapping[str, Any], fancy: bool = False, width: int = PLAIN_WIDTH
) -> tuple[Table, bool, int]:
    """The table by depth, whether its ranges show their spread, and how many columns are left out: where ``width`` is
    short ranges show their median instead, and where that is not enough columns go, last first.
    """
    columns = _columns(record, {finding["kind"] for finding in health.get("findings") or []})
    for spread, count in [(True, len(columns)), *((False, count) for count in range(len(columns), 1, -1))]:
        table = _table(record, columns[:count], spread, fancy)
        if table_width(table) <= width:
            break
    return table, spread, len(columns) - count


def ranges(depth: int, rows: int = ROWS) -> list[tuple[int, int]]:
    """First and last block of every row: all blocks, or the first, the last, and ranges of (nearly) equal length
    between.
    """
    if depth <= rows:
        return [(block, block) for block in range(depth)]
    edges = np.linspace(1, depth - 1, rows - 1).round().astype(int)
    return [(0, 0), *((int(a), int(b) - 1) for a, b in pairwise(edges)), (depth - 1, depth - 1)]


class _Column:
    """One probe's column: values by block at the end (and at the start, if ``start``), and which of them a finding
    speaks of.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        end: np.ndarray,
        start: np.ndarray | None = None,
        alarm: Callable[[Any], Any] | None = None,
    ):
        self.title, self.unit, self.end, self.start = title, unit, end, start
        self.alarm = alarm(end) & np.isfinite(end) if alarm else np.zeros(end.shape, bool)

    def cell(self, first: int, last: int, spread: bool, fancy: bool) -> Text:
        here = slice(first, last + 1)
        text = "" if self.start is None else f"{_values(self.start[here], spread)} {'→' if fancy else '->'} "
        loud = bool(self.alarm[here].any())
        shown = Text(text + _values(self.end[here], spread) + ("!" if loud else ""), style="bold red" if loud else "")
        if fancy and self.start is not None:
            shown.append(" " + self.spark(here), style="cyan")
        return shown

    def spark(self, here: slice) -> str:
        """The median at the end as a bar, on a logarithmic scale over the whole column."""
        with np.errstate(divide="ignore", invalid="ignore"):
            heights = np.log10(self.end)
        known, mine = heights[np.isfinite(heights)], heights[here][np.isfinite(heights[here])]
        if not mine.size:
            return " "
        low, high = known.min(), known.max()
        share = (float(np.median(mine)) - low) / (high - low) if high > low else 0.5
        return SPARKS[min(len(SPARKS) - 1, int(share * len(SPARKS)))]


def _columns(record: HealthRecord, kinds: set[str]) -> list[_Column]:
    columns = []
    if "update_ratio" in record:
        ratio = record["update_ratio"]
        start, end = at_start(ratio), at_end(ratio)
        dead = (lambda v: v < findings.DEAD_RATIO) if "dead branches" in kinds else None
        for i, name in enumerate(record.site_names(ratio.shape[2])):
            columns.append(_Column("update/stream", name, end[:, [i]], start[:, [i]], dead))
    limits: tuple[tuple[str, str, str, float, Callable | None], ...] = (
        ("stream_rms", "stream", "RMS", 1, None),
        (
            "token_cosine",
            "token",
            "cosine",
            1,
            (lambda v: v > COLLAPSED_COSINE) if "token collapse" in kinds else None,
        ),
        ("stream_grad", "gradient", "norm", 1, None),
        (
            "swallowed",
            "swallowed",
            "%",
            100,
            (lambda v: v > 100 * findings.SWALLOWED_SHARE) if "swallowed updates" in kinds else None,
        ),
        (
            "stream_max",
            "largest",
            "element",
            1,
            (lambda v: v > findings.LARGEST) if "stream blow-up" in kinds else None,
        ),
        ("update_cosine", "update", "cosine", 1, None),
    )
    for probe, title, unit, factor, alarm in limits:
        if probe in record:
            end = factor * at_end(record[probe])
            columns.append(
                _Column(title, unit, np.where(end < 0.01, 0.0, end) if probe == "swallowed" else end, None, alarm)
            )
    return columns


def _table(record: HealthRecord, columns: list[_Column], spread: bool, fancy: bool) -> Table:
    table = new_table(fancy)
    table.add_column("block", justify="right", no_wrap=True)
    for column in columns:
        arrow = "" if column.start is None else ", start → end" if fancy else ", start -> end"
        gap = "\n" if fancy else " "
        title = (
            f"{column.title}{gap}{column.unit}{arrow}"
            if column.start is not None
            else f"{column.title}{gap}{column.unit}"
        )
        table.add_column(title, justify="right", no_wrap=True)
    broken = (record["finite"] == 0).any(axis=(0, 2)) if "finite" in record else None
    depth = len(columns[0].end) if columns else 0
    for first, last in ranges(depth):
        bad = broken is not None and bool(broken[first : last + 1].any())
        label = Text(
            (f"{first}" if first == last else f"{first}-{last}") + ("!" if bad else ""), style="bold red" if bad else ""
        )
        table.add_row(label, *(column.cell(first, last, spread, fancy) for column in columns))
    return table


def _values(values: np.ndarray, spread: bool) -> str:
    """``0.012..0.034``, one number where all agree (or the median, without ``spread``), ``-`` where there is none."""
    known = values[np.isfinite(values)]
    if not known.size:
        return "-"
    if not spread:
        return few_digits(float(np.median(known)))
    low, high = few_digits(float(known.min())), few_digits(float(known.max()))
    return low if low == high else f"{low}..{high}"


def few_digits(value: float) -> str:
    """Two or three digits in at most 7 characters: 0, 0.012, 1.24, 120, 1.2e-5, 3.4e6."""
    size = abs(value)
    if size == 0 or 100 <= size < 1e4:
        return f"{value:.0f}"
    if size < 1e-3 or size >= 1e4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:#.3g}" if size >= 1 else f"{value:#.2g}"


def _title(record: HealthRecord, scheme: str) -> str:
    probe = next((name for name in record if record[name].ndim >= 2), None)
    depth = f", {record[probe].shape[1]} blocks" if probe else ""
    return (
        f"Residual health{': ' + scheme if scheme else ''}{depth}, {len(record)} recorded steps from "
        f"{record.steps[0]} to {record.steps[-1]}"
    )


def _legend(record: HealthRecord, spread: bool, hidden: int, marks: bool) -> str:
    text = f"start: step {record.steps[0]}; end: {end_named(record.steps)}; columns without a start show the end"
    shown = "smallest..largest" if spread else "the median"
    text += f"; rows of several sites show {shown}" + ("; !: a finding speaks of a site here" if marks else "")
    return text + (f"; a wider terminal shows {hidden} more column{'s' * (hidden > 1)}" if hidden else "")
