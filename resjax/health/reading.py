"""How are probes read over the recorded steps, and how is a finding about them put? At the start, at the end, since when, at which sites.

A finding is a mapping as :func:`resjax.health.findings.examine` describes it; until that gives it away it may also hold ``at``, the sites
(block, site) that it speaks of as an array of bool.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from resjax.health.record import HealthRecord

# "At the end" is the median of this many last rows, the first one apart, which is the start: one odd batch is no finding.
LAST_ROWS = 5
# "The last blocks": where what reaches the head is decided. Blocks before may pass through odd values and recover.
LAST_BLOCKS = 0.1
Finding = dict[str, Any]


# ---- rows


def last_rows(rows: np.ndarray) -> np.ndarray:
    """Of rows, those that are the end."""
    return rows[-LAST_ROWS:] if len(rows) > LAST_ROWS else rows[1:] if len(rows) > 1 else rows


def at_end(values: np.ndarray) -> np.ndarray:
    """Median over the last rows that have any value, finite ones only; NaN where there are none. See ``LAST_ROWS``."""
    return _over_rows(values, last_rows)


def at_start(values: np.ndarray) -> np.ndarray:
    """The first row that has any value."""
    return _over_rows(values, lambda rows: rows[:1])


def end_named(steps: np.ndarray) -> str:
    """Of which of the recorded steps :func:`at_end` is the median."""
    last = last_rows(steps)
    return f"median of steps {last[0]} to {last[-1]}" if len(last) > 1 else f"step {last[0]}"


def _over_rows(values: np.ndarray, pick: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rows = np.flatnonzero(np.isfinite(values).reshape(len(values), -1).any(axis=1))
    if not len(rows):
        return np.full(values.shape[1:], np.nan)
    chosen = values[pick(rows)].astype(np.float64)
    masked = np.ma.masked_invalid(chosen)
    return np.ma.filled(np.ma.median(masked, axis=0), np.nan) if len(chosen) > 1 else masked.filled(np.nan)[0]


def end_of(record: HealthRecord, name: str, state: Mapping[str, Any]) -> np.ndarray | None:
    """A probe at the end: of the record, else of ``state``, the probes of a state that was studied; None where neither has it."""
    if len(record) and name in record:
        return at_end(record[name])
    return np.asarray(state[name], np.float64) if name in state else None


def since(hit: Any) -> int:
    """Index of the first row of the unbroken stretch of ``hit`` (rows,) at the end; the last row where that does not hit."""
    miss = np.flatnonzero(~np.asarray(hit))
    return min(int(miss[-1]) + 1, len(hit) - 1) if len(miss) else 0


def first_row(hit: np.ndarray | None) -> int | None:
    """Index of the first row with any hit."""
    if hit is None or not hit.any():
        return None
    return int(np.argmax(hit.reshape(len(hit), -1).any(axis=1)))


def last_blocks(depth: int) -> range:
    """The blocks of the last tenth of the depth, at least one."""
    return range(depth - max(1, round(LAST_BLOCKS * depth)), depth)


# ---- findings


def said(kind: str, where: str, step: Any, evidence: str, advice: str) -> Finding:
    """What a finding says in words."""
    return {"kind": kind, "where": where, "step": int(step), "evidence": evidence, "advice": advice}


def measured(figure: str, value: Any, bounds: tuple[float | None, float | None], step: Any) -> Finding:
    """What a finding says in one number: the figure's name and value, the bounds it should keep, since which step it does not."""
    return {"figure": figure, "value": float(value), "range": list(bounds), "since": int(step)}


def at_sites(
    kind: str, hit: np.ndarray, record: HealthRecord, evidence: str, advice: str, more: Finding
) -> list[Finding]:
    """One finding for all sites (block, site) where ``hit``, named by ranges of blocks."""
    evidence = f"{evidence} ({int(hit.sum())} of {hit.size} sites)"
    return [said(kind, sites_named(record, hit), record.steps[-1], evidence, advice) | more | {"at": hit}]


def sites_named(record: HealthRecord, hit: np.ndarray) -> str:
    """``attention of blocks 0-3; mlp of block 7``: the sites (block, site) where ``hit``."""
    names = record.site_names(hit.shape[1])
    there = [(name, np.flatnonzero(hit[:, i])) for i, name in enumerate(names)]
    return "; ".join(f"{name} of {ranges(blocks)}" for name, blocks in there if len(blocks))


def ranges(blocks: Iterable[int], most: int = 6) -> str:
    """``blocks 0-3, 7``: increasing block numbers as ranges, at most ``most`` of them."""
    numbers = list(blocks)
    starts = [i for i, b in enumerate(numbers) if i == 0 or b != numbers[i - 1] + 1]
    spans = [(numbers[i], numbers[j - 1]) for i, j in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:most])
    more = f" and {len(spans) - most} more ranges" if len(spans) > most else ""
    return ("block " if len(numbers) == 1 else "blocks ") + text + more


def span(values: np.ndarray) -> str:
    """``3.1e-05 to 0.00042``; one number where all agree; empty for no values."""
    if not values.size:
        return ""
    low, high = f"{values.min():.2g}", f"{values.max():.2g}"
    return low if low == high else f"{low} to {high}"
