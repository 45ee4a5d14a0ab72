"""How does the signal propagate? One table a scheme for the terminal: start, quartiles of depth, end; plain elsewhere."""

from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from resjax.health.table import PLAIN_WIDTH, few_digits
from resjax.propagation.result import Depth, Profile, Study, told

NOT_FINITE = "bold red"


def console(file: TextIO | None = None) -> Console:
    """For tables: as wide as the terminal; without wrapping in files and pipes."""
    made = Console(file=file, highlight=False, markup=False, emoji=False)
    if fancy(made):
        return made
    return Console(file=file, highlight=False, markup=False, emoji=False, color_system=None, width=PLAIN_WIDTH)


def fancy(made: Console) -> bool:
    return made.is_terminal and not made.is_dumb_terminal and "utf" in made.encoding.lower()


def print_study(found: Study, to: Console) -> None:
    """The table of one scheme, what its numbers are of, where they are not finite, and what theory says."""
    case = found.case
    to.print(Text(f"{case.name}: {case.parts.scheme.equation}", style="bold"))
    table = _table(found, fancy(to), to.width)
    if fancy(to):
        to.print(table)
    else:  # without the blanks that fill a terminal's line
        with to.capture() as capture:
            to.print(table)
        to.print("\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()))
    seeds = len(case.seeds)
    to.print(Text("; ".join(found.notes), style="dim"), soft_wrap=True)
    spread = "mean and standard deviation over seeds" if seeds > 1 else "one seed, so no spread"
    to.print(
        Text(f"rows: first block, quartiles of the depth, last block; {spread}; (..): mean-field theory", style="dim")
    )
    for depth in found.depths:
        for row in depth.nonfinite:
            to.print(Text(f"! {depth.depth} blocks: {told(row, seeds)}", style="red"))
    for line in theory_lines(found.depths[-1]):
        to.print(Text(line, style="dim"), soft_wrap=True)


def theory_lines(depth: Depth) -> list[str]:
    """The curves, what each assumes and where it departs; of the deepest network."""
    lines, seen = [], set()
    if depth.no_mean_field:
        lines.append(f"no mean-field theory: {depth.no_mean_field}")
    for curve in depth.theory:
        text = f"theory, {curve.name}: {curve.source}. Holds for {curve.holds}."
        text += f" Here: {curve.departs}." if curve.departs else ""
        if text not in seen:
            lines.append(text)
        seen.add(text)
    return lines


def quartiles(depth: int) -> list[int]:
    """The first block, those at the quarters of the depth, the last."""
    return sorted({round(share * (depth - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)})


def _table(found: Study, is_fancy: bool, width: int) -> Table:
    """With spread where that fits; then without; then without the last columns."""
    measure = Console(width=PLAIN_WIDTH)
    columns = _columns(found)
    for spread, count in [(True, len(columns)), *((False, count) for count in range(len(columns), 3, -1))]:
        table = _filled(found, columns[:count], spread, is_fancy)
        if Measurement.get(measure, measure.options, table).maximum <= width:
            break
    return table


Column = tuple[str, str, int | None]  # title, probe, which site (None = the block's last)


def _columns(found: Study) -> list[Column]:
    sites = found.depths[0].sites
    ratios = [(f"update/stream {name}", "update_ratio", i) for i, name in enumerate(sites)]
    return [
        ("stream RMS", "stream_rms", None),
        *ratios,
        ("token cosine", "token_cosine", None),
        ("gradient norm", "stream_grad", None),
        ("centred cosine", "token_cosine_centred", None),
        ("participation ratio", "participation_ratio", None),
        ("stable rank", "stable_rank", None),
    ]


def _filled(found: Study, columns: Sequence[Column], spread: bool, is_fancy: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if is_fancy else box.MARKDOWN, pad_edge=not is_fancy, padding=(0, 1), show_edge=not is_fancy
    )
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("block", justify="right", no_wrap=True)
    for title, _, _ in columns:
        table.add_column(title.replace(" ", "\n", 1) if is_fancy else title, justify="right", no_wrap=True)
    for depth in found.depths:
        for i, block in enumerate(quartiles(depth.depth)):
            bad = _broken(depth, block)
            cells = [_cell(depth, probe, block, pos, spread, is_fancy) for _, probe, pos in columns]
            table.add_row(
                f"{depth.depth}" if i == 0 or not is_fancy else "",
                Text(f"{block}!" if bad else f"{block}", style=NOT_FINITE if bad else ""),
                *cells,
            )
    return table


def _broken(depth: Depth, block: int) -> bool:
    return bool((depth.profiles["finite"].mean[block] != 1).any())


def _cell(depth: Depth, probe: str, block: int, pos: int | None, spread: bool, is_fancy: bool) -> Text:
    at = (block, -1 if pos is None else pos)
    profile = depth.profiles[probe]
    mean = float(profile.mean[at])
    if not np.isfinite(mean):  # inf, or nan where the values are not finite; else there is no such thing
        broken = np.isinf(mean) or _broken(depth, block) or probe == "stream_grad"
        return Text(str(mean), style=NOT_FINITE) if broken else Text("-")
    text = few_digits(mean) + (_spread(profile, at, is_fancy) if spread else "")
    expected = next(
        (one.values[at] for one in depth.theory if one.quantity == probe and one.name == "mean field"), None
    )
    if expected is not None and np.isfinite(expected):
        text += f" ({few_digits(float(expected))})"
    return Text(text)


def _spread(profile: Profile, at: Any, is_fancy: bool) -> str:
    return f" {'±' if is_fancy else '+-'} {few_digits(float(profile.sd[at]))}"
