"""What does a sweep hold in memory after each cell, and which cells compiled anything?

    python -m benchmarks.sampled FILE.json ARGUMENTS OF resjax.sweep

Writes a list into the file, a dict a line of results: the cell's fields and status, bytes of memory that the process holds (as Linux
says), and how often XLA has compiled until then.
"""

import itertools
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from resjax import sweep
from resjax.main import listen
from resjax.sweeps.results import Results
from resjax.train.writers import write_json

STATM = Path("/proc/self/statm")
COMPILED = "/jax/core/compile/backend_compile_duration"
MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def main(words: Sequence[str] | None = None) -> int:
    """The sweep's command, sampled; returns its exit code."""
    if words is None:
        listen()
        words = sys.argv[1:]
    place, *rest = words
    samples: list[dict[str, Any]] = []
    compiled = [0]

    def heard(name: str, _: float, **__: Any) -> None:
        compiled[0] += name == COMPILED

    add = Results.add

    def added(self: Results, row: Mapping[str, Any]) -> None:
        add(self, row)
        about = {"fields": row["fields"], "status": row["status"]}
        samples.append(about | {"bytes": resident(), "compiled": compiled[0]})

    jax.monitoring.register_event_duration_secs_listener(heard)
    Results.add = added  # type: ignore[method-assign]
    try:
        code = sweep.main(rest)
    finally:
        Results.add = add  # type: ignore[method-assign]
        jax.monitoring.unregister_event_duration_listener(heard)
    write_json(place, samples)
    return code


def told(samples: Sequence[Mapping[str, Any]], shape: str, early: int) -> dict[str, Any]:
    """What samples of cells come to.

    Args:
      shape: the field whose values are the shapes.
      early: cells after which memory is to be flat.

    Raises:
      ValueError: there are no more cells than ``early``.
    """
    if len(samples) <= early:
        raise ValueError(f"{len(samples)} cells tell nothing of what comes after {early}")
    held = [sample["bytes"] / MIB for sample in samples]
    totals = [0, *(sample["compiled"] for sample in samples)]
    compiling = [i for i, (before, after) in enumerate(itertools.pairwise(totals)) if after > before]
    shapes = [sample["fields"][shape] for sample in samples]
    first = [i for i, one in enumerate(shapes) if one not in shapes[:i]]
    return {
        "cells": len(samples),
        "shapes": len(first),
        "early": early,
        "mib_early": round(held[early - 1], 1),
        "mib_most_later": round(max(held[early:]), 1),
        "mib_last": round(held[-1], 1),
        "growth": round(max(held[early:]) / held[early - 1] - 1, 4),
        "compilations": totals[-1],
        "cells_that_compiled": len(compiling),
        "only_the_first_of_a_shape_compiled": compiling == first,
        "mib": [round(one, 1) for one in held],
    }


if __name__ == "__main__":
    sys.exit(main())
