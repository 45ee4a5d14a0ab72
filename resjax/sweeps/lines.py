"""What does a line of results say? A field of the run, a number, how it ended."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from resjax.config.schema import FIELDS, find
from resjax.sweeps.outcome import OUTCOMES

RATE, DEPTH, SEED, LOSS = "optimizer.lr", "model.depth", "seed", "eval_loss"
UNCLASSED = "no class"  # ended, but the source's floors are unknown
NOT_RUN = ("failed", "killed")
CLASSES = (*OUTCOMES, UNCLASSED, *NOT_RUN)
ENDED = ("done", "diverged")
Row = Mapping[str, Any]


def value(row: Row, path: str) -> Any:
    """A field of a run: as its line says, or its default.

    Raises:
      Refused: no such field.
    """
    path = find(path).path
    found = row.get("fields", {}).get(path, row.get("config", {}).get(path, FIELDS[path].default))
    return tuple(found) if isinstance(found, list) else found


def number(given: Any) -> float:
    """A number of a line; NaN of None, of text such as "nan", and of what is not there."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return np.nan
    try:
        return float(given)
    except ValueError:
        return np.nan


def ending(row: Row) -> str:
    """One of ``CLASSES``."""
    status = row.get("status")
    return str(row.get("outcome") or (UNCLASSED if status in ENDED else status))
