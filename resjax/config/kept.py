"""What configuration did an earlier run have? That of a run's folder or its config.json, in the place of a config file."""

import json
from pathlib import Path
from typing import Any

from resjax.config.schema import FIELDS
from resjax.config.tree import Section, from_dict
from resjax.errors import Refused

NAME = "config.json"


def place(path: str) -> Path | None:
    """The config.json that ``path`` means, a run's folder or the file itself; None where it means a Python file."""
    if Path(path).suffix == ".json":
        return Path(path)
    return Path(path, NAME) if Path(path, NAME).is_file() else None


def run_name(path: str) -> str:
    """What a config file, or the run that ``path`` means, is called."""
    found = place(path)
    return Path(path).stem if found is None else found.absolute().parent.name if found.name == NAME else found.stem


def fields(path: Path, asked: str = "--config") -> Section:
    """The configuration that a config.json holds, every field as the run had it; ``asked`` is what named it on the command line.

    Raises:
      Refused: it is missing or damaged, or has fields that this version does not know.
    """
    what = f"{asked} is '{path}', which"
    try:
        facts: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{what} does not exist; give a config file, or the folder of a run") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{what} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    sections = {name.partition(".")[0] for name in FIELDS}
    if not isinstance(facts, dict) or "model" not in facts:
        raise Refused(f"{what} is not the config.json of a run (it has no section 'model')")
    try:
        return from_dict({name: value for name, value in facts.items() if name in sections})
    except Refused as error:
        raise Refused(f"{what} has what this version does not know: {error}") from None
