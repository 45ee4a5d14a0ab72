"""How is one step's record written out? Every probe of every group, a line a site, block or role."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resjax.health.record import BLOCK_PROBES, MORE_PROBES, ROLE_PROBES, SITE_PROBES, STEP_PROBES, site_names

TITLES = {  # of columns, where they are not the probe's name
    "update_ratio": "update/stream",
    "update_cosine": "cosine",
    "stream_rms": "stream RMS",
    "update_rms": "update RMS",
    "stream_max": "stream max",
    "update_max": "update max",
    "stream_grad": "gradient",
    "update_ratio_block": "block/stream",
    "param_grad_block": "gradient of its weights",
}
USUAL = "stream and updates"  # the groups that are on by default
OF_SITES = {USUAL: SITE_PROBES} | {
    group: names for group, names in MORE_PROBES.items() if not set(names) & set(ROLE_PROBES)
}


def title(probe: str) -> str:
    """What a column is called."""
    return TITLES.get(probe, probe.replace("_", " "))


def written(probes: Mapping[str, np.ndarray], roles: Sequence[str] = ()) -> list[str]:
    """The tables of a step, lines with one above each that says what it shows.

    Args:
      probes: of one step: (block, site), (block, role), (block,), ().
      roles: names of the last axis of ``ROLE_PROBES``.
    """
    lines: list[str] = []
    for name, group in OF_SITES.items():
        if there := [probe for probe in group if probe in probes]:
            sites = site_names(probes[there[0]].shape[1])
            lines += ["", f"{name}:", *by_block(there, probes, "site", sites)]
    if there := [probe for probe in ROLE_PROBES if probe in probes]:
        lines += ["", "weights by role:", *by_block(there, probes, "role", roles)]
    if there := [probe for probe in BLOCK_PROBES if probe in probes]:
        rows = [[str(block), *(four_digits(probes[probe][block]) for probe in there)] for block in range(depth(probes))]
        lines += ["", "whole blocks:", *aligned([["block", *map(title, there)], *rows])]
    if there := [probe for probe in STEP_PROBES if probe in probes]:
        lines += ["", "ends: " + ", ".join(f"{title(probe)} {four_digits(probes[probe])}" for probe in there)]
    return lines[1:] if lines else ["nothing is measured"]


def by_block(wanted: Sequence[str], probes: Mapping[str, np.ndarray], what: str, names: Sequence[str]) -> list[str]:
    """A table of probes (block, site or role), without the rows that have no value."""
    rows = [["block", what, *map(title, wanted)]]
    for block in range(depth({probe: probes[probe] for probe in wanted})):
        for i, name in enumerate(names):
            values = [probes[probe][block, i] for probe in wanted]
            if what == "site" or not np.isnan(values).all():
                rows.append([str(block), name, *map(four_digits, values)])
    return aligned(rows)


def depth(probes: Mapping[str, np.ndarray]) -> int:
    """Blocks that the probes are of."""
    return max((len(value) for value in probes.values() if np.ndim(value)), default=0)


def four_digits(value: Any) -> str:
    """Four digits; '-' where the scheme has no such thing (or it is NaN)."""
    value = float(value)
    return "-" if value != value else f"{value:.4g}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines, columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
