"""What does every scheme cost beside Pre-LN, at equal depth and width? Step time in pairs, temporary memory, parameters.

    python benchmarks/overhead.py [NAME ...]

Training steps at 24 x 64, length 64, batch 16 (AdamW, no probes), remat as 'auto' chooses; medians of 5 pairs.
"""

import argparse
import json
from typing import Any

import jax

from bench import PLAIN, RESULTS, Step, keep, pairs
from resjax.residual import CATALOGUE
from resjax.residual.entries import FORMS

SIZE = {"model.depth": 24, "model.width": 64, "model.heads": 2, "data.length": 64, "data.batch": 16}
PLAIN.pop("model.norm")  # the default: schemes without norms refuse to be told one
SECONDS_A_ROUND = 0.6
PAIRS = 5


def measured(step: Step) -> dict[str, Any]:
    return {
        "temporary_mib": round(step.compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(step.parts.abstract.params)),
        "compile_seconds": round(step.compile_seconds, 1),
    }


def kept() -> dict[str, Any]:
    """The rows of earlier measurements: each is a ratio of pairs of its own run."""
    path = RESULTS / "overhead.json"
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def main() -> None:
    every = [
        (name, form if made != scheme else None)
        for name, scheme in CATALOGUE.items()
        for form, made in FORMS.get(name, {"": scheme}).items()
    ]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    wanted = parser.parse_args().names
    base = Step(SIZE)
    steps = max(2, round(1e3 * SECONDS_A_ROUND / base.run(3)))
    rows = {"pre_ln": measured(base)}
    for name, form in every:
        label = f"{name}:{form}" if form else name
        if name == "pre_ln" or (wanted and label not in wanted):
            continue
        step = Step(SIZE | {"residual.name": name} | ({"residual.form": form} if form else {}))
        timed = pairs(lambda step=step: step.run(steps), lambda: base.run(steps), PAIRS)
        rows[label] = measured(step) | {"time": timed["ratio"], "times": timed["ratios"]}
        row = rows[label]
        print(
            f"{label:28s} time x {row['time']:.2f}  memory x {row['temporary_mib'] / rows['pre_ln']['temporary_mib']:.2f}  "
            f"parameters {row['parameters'] - rows['pre_ln']['parameters']:+,}  compiled in {row['compile_seconds']} s",
            flush=True,
        )
        keep("overhead", {"size": "24x64x64x16", "rows": kept() | {"pre_ln": rows["pre_ln"], label: row}})


if __name__ == "__main__":
    main()
