"""What is kept of a step that was not finite? ``RUN/nonfinite/<step>/``: the state before it, its batch, what was found.

    state/        the state before the step, as in ``checkpoints/``; not there where the run stopped at it: then the
                  checkpoint of the step before is that state
    batch.npz     ``tokens``, the batch
    report.json   the step's numbers, and the first non-finite value

A folder is written under a temporary name and renamed: it is there or it is not. Of the steps that a run went past, the first few are
kept, so that a run that meets many fills no disk. A step that is met again with another batch, as after a rollback, takes the place of
the one before.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resjax.errors import Refused
from resjax.health.record import UNREADABLE
from resjax.train.checkpoint import Checkpoints
from resjax.train.state import TrainState
from resjax.train.writers import read_json, write_json

MOST_KEPT = 3  # steps whose state is kept
UNFINISHED = ".tmp"
BEFORE = f".before{UNFINISHED}"


@dataclass(frozen=True)
class Evidence:
    """A step that was not finite, as it was kept.

    Attributes:
      state: before the step; None where the checkpoint of the step before is that state.
      batch: (B, T + 1) tokens.
      report: what report.json holds.
    """

    state: TrainState | None
    batch: np.ndarray
    report: dict[str, Any]


def steps(folder: Path) -> list[int]:
    """The steps kept in ``RUN/nonfinite``, ascending."""
    there = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in there if path.name.isdigit())


def has_room(folder: Path) -> bool:
    """Whether the state of one more step will be kept."""
    return sum((folder / str(step) / "state").is_dir() for step in steps(folder)) < MOST_KEPT


def clear(folder: Path) -> None:
    """Remove what a kill has left half-written; what was there before is put back where a kill came between taking it away and its
    successor.
    """
    for before in folder.glob(f"*{BEFORE}"):
        if not (place := before.with_name(before.name.removesuffix(BEFORE))).exists():
            before.rename(place)
    for leftover in folder.glob(f"*{UNFINISHED}"):
        shutil.rmtree(leftover, ignore_errors=True)


def save(
    folder: Path,
    step: int,
    batch: np.ndarray,
    report: Mapping[str, Any],
    state: TrainState | None = None,
    config: Mapping[str, Any] | None = None,
) -> bool:
    """Keep a step; False where it is there already, with this batch, or too many are.

    Args:
      folder: ``RUN/nonfinite``.
      step: the one that was not finite, from 1.
      state: before it, of step - 1; None: see :class:`Evidence`.
      config: to keep with the state.

    Raises:
      OSError: the disk is full, or the like; nothing is left of it, and what was there before stays.
    """
    clear(folder)
    target, unfinished, before = (
        folder / str(step),
        folder / f"{step}{UNFINISHED}",
        folder / f"{step}{BEFORE}",
    )
    if holds(target, batch) or (state is not None and not has_room(folder)):
        return False
    try:
        unfinished.mkdir(parents=True)
        with open(unfinished / "batch.npz", "wb") as file:
            np.savez(file, allow_pickle=False, tokens=batch)
            file.flush()
            os.fsync(file.fileno())
        write_json(unfinished / "report.json", report)
        if state is not None:
            checkpoints = Checkpoints(unfinished / "state")
            try:
                checkpoints.save(int(state.step), state, {"config": dict(config or {})})
            finally:
                checkpoints.close()
        if target.exists():
            target.rename(before)
        unfinished.rename(target)
    except BaseException:
        if before.exists() and not target.exists():
            before.rename(target)
        clear(folder)
        raise
    clear(folder)
    return True


def holds(place: Path, batch: np.ndarray) -> bool:
    """Whether this batch is kept there."""
    try:
        return np.array_equal(_batch_of(place), batch)
    except UNREADABLE:
        return False


def _batch_of(place: Path) -> np.ndarray:
    with np.load(place / "batch.npz", allow_pickle=False) as held:
        return held["tokens"]


def report(folder: Path, step: int) -> dict[str, Any] | None:
    """What report.json of ``step`` holds; None where there is none that can be read."""
    try:
        return read_json(folder / str(step) / "report.json")
    except (OSError, ValueError):
        return None


def load(folder: Path, step: int, like: TrainState, config: Any) -> Evidence | None:
    """What was kept of ``step``; None if nothing was.

    Args:
      like: the abstract state of the run.
      config: of the run, as nested dicts.

    Raises:
      Refused: it is damaged, or does not fit.
    """
    place = folder / str(step)
    if not place.is_dir():
        return None
    try:
        batch = _batch_of(place)
        report = read_json(place / "report.json")
    except UNREADABLE as error:
        raise Refused(f"{place} cannot be read ({error}); remove it to rebuild the step from a checkpoint") from None
    state = None
    if (place / "state").is_dir():
        checkpoints = Checkpoints(place / "state")
        try:
            state, _, _ = checkpoints.restore(step - 1, like, config=config)
        finally:
            checkpoints.close()
    return Evidence(state, batch, report)
