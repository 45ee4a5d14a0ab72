"""Which pages of docs are made of measured numbers, and how?

python -m benchmarks.pages     write docs/overhead.md, and below their marks docs/probes.md and docs/sweeps.md, from what lies in results
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
SWEEPS = ROOT / "benchmarks" / "results" / "sweeps.json"
SWEEPS_PAGE = ROOT / "docs" / "sweeps.md"
AIM = 0.85  # of Pre-LN's throughput
WHY = (
    "The arithmetic of these schemes is small (but for `gtrxl`); what they cost is the arrays of (batch, length, "
    "width) that they move. By count, a Pre-LN site writes about 12 such arrays forward (norm, projections, scores or"
    " hidden features, result, sum) and about twice as many with its gradient, each of which is read again: some 70 "
    "passes. Beside these:",
    "",
    "- **Histories.** A row that a site reads costs two passes forward (its weight, its share of the sum) and four "
    "backward (the gradients of both, and of the row): 6 of 70, so 5 to 10 % of Pre-LN's time a row and site. "
    "`attnres` reads 24.5 rows a site on average at 24 blocks, 12.5 at 12: 2.34 and 0.62 times Pre-LN's time more, 9 "
    "and 5 % a row. `denseformer` reads 12.5 rows a block at 24 blocks, 6.5 at 12, half of that a site: 0.49 and 0.24"
    " more, 8 and 7 % a row. `muddformer` and `deep_cross_attention` make four and three sums of each row once it is "
    "read. `attnres:block` reads 8 rows at most. `x0_mixing:ladder` stores a row a block of the first half and "
    "fetches it in the second.",
    "- **Streams.** Four streams are read, mixed and written at every site: 8 passes forward for Pre-LN's 2, and the "
    "gradient of the 4 x 4 mixing is a sum over all tokens. `altup` has two streams and a predictor, `siamese_norm` "
    "two and three norms a site, `frac_connections` one in four parts.",
    "- **Weights made of the stream** (`hyper_connections:dynamic`, `mhc`, `mhc_lite`): a norm over all streams and a"
    " product with a matrix of 4 width x 24 or more a site, a quarter of the arithmetic of a site at width 64 and 6 %"
    " at 256; the 20 Sinkhorn steps of `mhc` are 40 small loops at any width.",
    "- **Matrices.** `gtrxl` has six more of width x width a site, where Pre-LN has 4 or 8: twice the arithmetic.",
    "",
    "Passes grow with the width, products with its square: the wider the model, the less of this is left. "
    "Accelerators, whose arithmetic is their faster part, were not measured.",
)
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
    lines += ["", "## Below 0.85 of Pre-LN's throughput, and why", ""]
    for size in names:
        slow = {label: 1 / row["time"] for label, row in sizes[size].items() if row.get("time", 1.0) > 1 / AIM}
        told = ", ".join(f"`{label}` {slow[label]:.2f}" for label in sorted(slow, key=slow.__getitem__))
        lines.append(f"- {size}: {told or 'none'}.")
    return "\n".join([*lines, "", *WHY, ""])


def probes(text: str, sizes: Mapping[str, Mapping[str, Any]]) -> str:
    """``text`` with what the groups of probes cost below its mark."""
    lines = [
        MEASURED,
        "",
        "Made by `python -m benchmarks.pages` from [the numbers](../benchmarks/results/probes.json), which `python benchmarks/probes.py` "
        "measures: training steps in alternation with those of a program without probes, the median of 7 pairs (in brackets the smallest "
        "and the largest). Sizes are depth x width x length x batch. Where the range goes from below 1 to above the goal, the "
        "machine's noise is larger than what is looked for.",
        "",
        "| size | measured | time | goal | milliseconds a step | temporary memory, MiB | compiled in, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, rows in sizes.items():
        for name, row in rows.items():
            time = f"{row['time']:.3f} ({row['times'][0]:.3f} to {row['times'][-1]:.3f})" if "time" in row else "1"
            cells = (
                size,
                name,
                time,
                row.get("goal", "-"),
                row.get("ms", "-"),
                row["temporary_mib"],
                row["compile_seconds"],
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return text.partition(MEASURED)[0] + "\n".join([*lines, ""])


def sweeps(text: str, found: Mapping[str, Any]) -> str:
    """``text`` with what a sweep was measured to do below its mark, which is put at its end where there is none."""
    speed, memory, machine = found["speed"], found["memory"], found["machine"]
    hourly, ratios = speed["cells_an_hour"], sorted(speed["ratios"])
    pairs = f"the median of {len(ratios)} pairs in turn, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    compiled = (
        "only the first of each shape compiled anything"
        if memory["only_the_first_of_a_shape_compiled"]
        else f"{memory['cells_that_compiled']} compiled something, where {memory['shapes']} would do"
    )
    lines = [
        MEASURED,
        "",
        "## How fast, and in how much memory",
        "",
        "Made by `python -m benchmarks.pages` from [the numbers](../benchmarks/results/sweeps.json), which "
        f"`{found['command']}` measures, here on {machine['cores']} cores ({machine['processor']}).",
        "",
        "| the same cells | cells an hour |",
        "|---|---|",
        f"| one sweep in one process | {hourly['sweep']:.0f} |",
        f"| a process for each run | {hourly['one_process_a_run']:.0f} |",
        "",
        f"That is {speed['ratio']:.2f} times as many ({pairs}): {speed['cells']} cells of one shape, {speed['depth']} blocks, "
        f"{speed['steps']} steps. The longer a cell trains, the less it matters that it need not start and compile.",
        "",
        f"| {memory['cells']} small cells of {memory['shapes']} shapes in one process | MiB |",
        "|---|---|",
        f"| after cell {memory['early']} | {memory['mib_early']:.0f} |",
        f"| most later | {memory['mib_most_later']:.0f} |",
        f"| after the last | {memory['mib_last']:.0f} |",
        "",
        f"That is {100 * memory['growth']:+.1f} % at most; of the {memory['cells']} cells {compiled}.",
    ]
    return text.partition(MEASURED)[0].rstrip("\n") + "\n\n" + "\n".join([*lines, ""])


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
    if SWEEPS.exists():
        SWEEPS_PAGE.write_text(sweeps(SWEEPS_PAGE.read_text(), json.loads(SWEEPS.read_text())))


if __name__ == "__main__":
    main()
