"""In what does a saved state differ from the one that a program wants? Lines with both values, for a refusal."""

from collections.abc import Mapping
from typing import Any

LINES = 8  # of leaves that are listed; the rest is counted
FIELDS = 4  # of the config that are named
SECTIONS = ("model", "residual", "precision", "optimizer")  # only these decide which leaves there are


def leaves(saved: Mapping[str, Any], wanted: Mapping[str, Any], partial: bool = False, cast: bool = False) -> list[str]:
    """One line for each leaf that differs, in the order of ``wanted`` and then of ``saved``.

    Args:
      saved, wanted: the leaves in the file, and here: path -> [dtype, shape].
      partial: leaves that only the file has are no difference.
      cast: another floating-point dtype is no difference.
    """
    lines = []
    for path in dict.fromkeys([*wanted, *saved]):
        there, here = saved.get(path), wanted.get(path)
        if there == here or (partial and here is None):
            continue
        if cast and there and here and there[1] == here[1] and "float" in there[0] and "float" in here[0]:
            continue
        shown = ["nothing" if leaf is None else f"{leaf[0]}{leaf[1]}" for leaf in (there, here)]
        lines.append(f"{path}: {shown[0]} in the checkpoint, {shown[1]} here")
    return lines


def fields(saved: Any, wanted: Any) -> list[str]:
    """One line for each field that differs between two configs (nested dicts) and can decide which leaves there are."""
    there, here = _flat(saved), _flat(wanted)
    names = [name for name in sorted(there.keys() | here.keys()) if name.split(".")[0] in SECTIONS]
    return [
        f"{name} is {there.get(name)} in the checkpoint and {here.get(name)} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


def message(head: str, leaf_lines: list[str], field_lines: list[str]) -> str:
    """The refusal: what does not fit, the fields that explain it, the first leaves."""
    first = f"{head}: {'; '.join(field_lines[:FIELDS]) or 'the parameters differ'}"
    more = [f"... and {len(leaf_lines) - LINES} more"] if len(leaf_lines) > LINES else []
    return "\n  ".join([first, *leaf_lines[:LINES], *more])


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, Mapping):
        return {prefix[:-1]: config}
    return {path: value for key in config for path, value in _flat(config[key], f"{prefix}{key}.").items()}
