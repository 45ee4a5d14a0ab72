"""Which pages of docs are made of measured numbers, and how?

python -m benchmarks.pages     write docs/overhead.md from results/overhead.json
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.outcomes import schemes

ROOT = Path(__file__).resolve().parent.parent
OVERHEAD = ROOT / "benchmarks" / "results" / "overhead.json"
PAGE = ROOT / "docs" / "overhead.md"


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


if __name__ == "__main__":
    main()
