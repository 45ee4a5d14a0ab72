"""What does every scheme cost beside Pre-LN, at equal depth and width? Step time in pairs, temporary memory, parameters.

    python benchmarks/overhead.py [--size=24x64x64x16] [NAME ...]

Training steps (AdamW, no probes) of depth x width x length x batch, remat as 'auto' chooses; medians of 5 pairs. Rows are kept one by
one in results/overhead.json; `python -m benchmarks.pages` makes docs/overhead.md of them.
"""

import argparse
import json
from typing import Any

import jax

from bench import PLAIN, RESULTS, Step, keep, pairs
from resjax.residual import CATALOGUE
from resjax.residual.entries import FORMS

PLAIN.pop("model.norm")  # the default: schemes without norms refuse to be told one
SECONDS_A_ROUND = 0.6
PAIRS = 5


def fields(size: str) -> dict[str, Any]:
    depth, width, length, batch = map(int, size.split("x"))
    sizes = {"model.depth": depth, "model.width": width, "model.heads": max(2, width // 64)}
    return sizes | {"data.length": length, "data.batch": batch}


def measured(step: Step) -> dict[str, Any]:
    return {
        "temporary_mib": round(step.compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(step.parts.abstract.params)),
        "compile_seconds": round(step.compile_seconds, 1),
    }


def kept() -> dict[str, Any]:
    """The rows of earlier measurements by size: each is a ratio of pairs of its own run."""
    path = RESULTS / "overhead.json"
    return json.loads(path.read_text())["sizes"] if path.exists() else {}


def main() -> None:
    every = [
        (name, form if made != scheme else None)
        for name, scheme in CATALOGUE.items()
        for form, made in FORMS.get(name, {"": scheme}).items()
    ]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--size", default="24x64x64x16", help="depth x width x length x batch")
    arguments = parser.parse_args()
    base = Step(fields(arguments.size))
    steps = max(2, round(1e3 * SECONDS_A_ROUND / base.run(3)))
    plain = measured(base)
    for name, form in every:
        label = f"{name}:{form}" if form else name
        if name == "pre_ln" or (arguments.names and label not in arguments.names):
            continue
        step = Step(fields(arguments.size) | {"residual.name": name} | ({"residual.form": form} if form else {}))
        timed = pairs(lambda step=step: step.run(steps), lambda: base.run(steps), PAIRS)
        row = measured(step) | {"time": timed["ratio"], "times": timed["ratios"]}
        print(
            f"{label:28s} time x {row['time']:.2f}  memory x {row['temporary_mib'] / plain['temporary_mib']:.2f}  "
            f"parameters {row['parameters'] - plain['parameters']:+,}  compiled in {row['compile_seconds']} s",
            flush=True,
        )
        sizes = kept()
        rows = sizes.get(arguments.size, {}) | {"pre_ln": plain, label: row}
        keep("overhead", {"sizes": sizes | {arguments.size: rows}})


if __name__ == "__main__":
    main()
