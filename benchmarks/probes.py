"""What do the groups of probes cost? Step time beside the same step without probes, in pairs; compile time and temporary memory.

    python benchmarks/probes.py [--sizes=24x64x64x16,128x64x64x4] [--seconds=3]

Training steps (AdamW) of depth x width x length x batch, remat as 'auto' chooses: the default groups measured in every step, and all
groups in every 50th, each beside health off; medians of 7 pairs in alternation. Rows are kept one by one in results/probes.json;
`python -m benchmarks.pages` makes docs/probes.md of them.
"""

import argparse
import json
from typing import Any

from bench import RESULTS, Step, keep, pairs

DEFAULT, ALL = ("forward", "backward"), "all"
CASES = {"default groups in every step": (DEFAULT, 1), "all groups in every 50th": (ALL, 50)}
PAIRS = 7
GOAL = 1.05


def fields(size: str) -> dict[str, Any]:
    depth, width, length, batch = map(int, size.split("x"))
    sizes = {"model.depth": depth, "model.width": width, "model.heads": max(2, width // 64)}
    return sizes | {"data.length": length, "data.batch": batch}


def facts(step: Step) -> dict[str, Any]:
    return {
        "temporary_mib": round(step.compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "compile_seconds": round(step.compile_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="24x64x64x16,128x64x64x4", help="depth x width x length x batch")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement, at least; 7 pairs are taken")
    arguments = parser.parse_args()
    for size in arguments.sizes.split(","):
        bare = Step(fields(size))
        least = max(1.0, 1e3 * arguments.seconds / bare.run(3))
        rows: dict[str, Any] = {"health off": facts(bare)}
        for name, (groups, every) in CASES.items():
            probed = Step(fields(size) | {"health.groups": groups})
            steps = every * max(
                1, round(least / every)
            )  # so many steps that each measurement holds as many measured ones
            timed = pairs(
                lambda step=probed, n=steps, every=every: step.run(n, every),
                lambda n=steps, bare=bare: bare.run(n),
                PAIRS,
            )
            row = facts(probed) | {"steps": steps, "time": timed["ratio"], "times": timed["ratios"]}
            rows[name] = row | {"ms": timed["first_ms"], "ms_off": timed["second_ms"], "goal": GOAL}
            print(f"{size}, {name}: time x {row['time']:.3f} {row['times']}", flush=True)
            path = RESULTS / "probes.json"
            sizes = json.loads(path.read_text())["sizes"] if path.exists() else {}
            keep("probes", {"sizes": sizes | {size: rows}})


if __name__ == "__main__":
    main()
