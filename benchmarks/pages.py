"""Which pages of docs are made of measured numbers, and how?

python -m benchmarks.pages     write docs/overhead.md and docs/probes.md from results/overhead.json and results/probes.json, if there
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.outcomes import schemes

ROOT = Path(__file__).resolve().parent.parent
OVERHEAD = ROOT / "benchmarks" / "results" / "overhead.json"
PAGE = ROOT / "docs" / "overhead.md"
PROBES = ROOT / "benchmarks" / "results" / "probes.json"
PROBES_PAGE = ROOT / "docs" / "probes.md"
MEASURED = "<!-- measured: everything below is made by python -m benchmarks.pages -->"


def overhead(sizes: Mapping[str, Mapping[str, Any]]) -> str:
    """What every scheme costs beside Pre-LN, one column a size for the time, one for the memory."""
    names = list(sizes)
    first = sizes[names[0]]
    lines = [
        "# What every scheme costs beside Pre-LN",
        "",
        "Made by `python -m benchmarks.pages` from [the numbers](../benchmarks/results/overhead.json), which "
        "`python benchmarks/overhead.py` measures: training steps in alternation with Pre-LN's in one process on 2 CPU cores, the median "
        "of 5 pairs (in brackets the smallest and the largest), and what the compiled step needs in temporary memory, both as multiples "
        f"of Pre-LN's; parameters beside Pre-LN's at {names[0]}. Sizes are depth x width x length x batch. A CPU is a bad place for what "
        "moves much and computes little, and a narrow model more so: the wider the model, the smaller the share of its streams.",
        "",
        "| scheme | " + " | ".join(f"time at {size} | memory" for size in names) + " | parameters |",
        "|---|" + "---|" * (2 * len(names) + 1),
    ]
    for label in schemes():
        cells = [cell for size in names for cell in costs(sizes[size], label)]
        more = f"{first[label]['parameters'] - first['pre_ln']['parameters']:+,}" if label in first else "-"
        lines.append(f"| `{label}` | {' | '.join(cells)} | {more} |")
    return "\n".join([*lines, ""])


def probes(text: str, sizes: Mapping[str, Mapping[str, Any]]) -> str:
    """``text`` with what the groups of probes cost below its mark."""
    lines = [
        MEASURED,
        "",
        "Made by `python -m benchmarks.pages` from [the numbers](../benchmarks/results/probes.json), which `python benchmarks/probes.py` "
        "measures: training steps in alternation with those of a program without probes, the median of 7 pairs (in brackets the smallest "
        "and the largest). Sizes are depth x width x length x batch.",
        "",
        "| size | measured | time | milliseconds a step | temporary memory, MiB | compiled in, s |",
        "|---|---|---|---|---|---|",
    ]
    for size, rows in sizes.items():
        for name, row in rows.items():
            time = f"{row['time']:.3f} ({row['times'][0]:.3f} to {row['times'][-1]:.3f})" if "time" in row else "1"
            cells = (size, name, time, row.get("ms", "-"), row["temporary_mib"], row["compile_seconds"])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return text.partition(MEASURED)[0] + "\n".join([*lines, ""])


def costs(rows: Mapping[str, Any], label: str) -> tuple[str, str]:
    if label not in rows:
        return "-", "-"
    row, base = rows[label], rows["pre_ln"]
    memory = f"{row['temporary_mib'] / base['temporary_mib']:.2f}"
    if "time" not in row:
        return "1", memory
    return f"{row['time']:.2f} ({row['times'][0]:.2f} to {row['times'][-1]:.2f})", memory


def main() -> None:
    PAGE.write_text(overhead(json.loads(OVERHEAD.read_text())["sizes"]))
    if PROBES.exists():
        PROBES_PAGE.write_text(probes(PROBES_PAGE.read_text(), json.loads(PROBES.read_text())["sizes"]))


if __name__ == "__main__":
    main()
