"""Where do the studies of a model that is not ours live, and how are they read back? ``RUN/studies/<step>.json``, one file a state.

Each holds ``step``, ``studies`` by name, and ``notes``; the step in a file's name is zero-padded to 8 digits.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resjax.errors import Refused, not_one_of
from resjax.health.studies import STUDIES
from resjax.train.writers import read_json, write_json

FILE = re.compile(r"(\d{8,})\.json")


def write(folder: Path, step: int, found: Mapping[str, Mapping[str, Any]]) -> Path:
    """Keeps the studies of the state after ``step``; those that were kept of it before are replaced.

    Raises:
      Refused: one is no study; the file cannot be written.
    """
    for name in found:
        if name not in STUDIES:
            raise not_one_of("a study", name, STUDIES)
    path = folder / f"{step:08d}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"step": step, "studies": dict(found), "notes": list(getattr(found, "notes", []))})
    except (OSError, TypeError) as error:
        raise Refused(f"the studies of step {step} cannot be kept in '{path}': {error}") from None
    return path


def newest(folder: Path, step: int | None, notes: list[str]) -> tuple[int | None, dict[str, Mapping[str, Any]]]:
    """The step and the studies of the newest state up to ``step`` that can be read; what cannot, and its notes, are added to ``notes``."""
    for number, path in reversed(_files(folder)):
        if step is not None and number > step:
            continue
        try:
            held = read_json(path)
            found: dict[str, Mapping[str, Any]] = {
                str(name): dict(one) for name, one in held["studies"].items() if name in STUDIES
            }
            notes += [str(note) for note in held["notes"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{path.name}: cannot be read ({error}), skipped")
            continue
        return number, found
    return None, {}


def drop_after(folder: Path, step: int) -> None:
    """Removes the studies of later states."""
    for number, path in _files(folder):
        if number > step:
            path.unlink()


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files, in order."""
    return sorted((int(match[1]), path) for path in folder.glob("*.json") if (match := FILE.fullmatch(path.name)))
