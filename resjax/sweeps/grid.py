"""Which cells does a sweep have? Products of values of some fields, from the command line and a config's sweep()."""

import csv
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from resjax.config.field import Field, show
from resjax.config.schema import FIELDS, find
from resjax.config.tree import Section, flat
from resjax.errors import Refused

SCALES = ("smoke", "cpu", "accelerator")
EXAMPLE = "--grid optimizer.lr=1e-3,3e-3"
# The largest a run of --scale=smoke is: it tells whether all cells run, and nothing of what they learn.
SMOKE = {
    "model.depth": 4,
    "model.width": 16,
    "model.heads": 2,
    "data.length": 16,
    "data.batch": 8,
    "train.steps": 60,
    "train.eval_batches": 2,
}

Grid = dict[str, list[Any]]  # field -> its values, in the type of the field


def from_flags(words: Iterable[str]) -> Grid:
    """The grid of several 'FIELD=a,b'. A value with a comma in it stands in double quotes.

    Raises:
      Refused: an unknown field, no value, a value that its field cannot have, one field twice.
    """
    grid: Grid = {}
    for word in words:
        path, equals, text = word.partition("=")
        if not equals:
            raise Refused(f"--grid is '{word}', without values; write FIELD=VALUE,VALUE, such as {EXAMPLE}")
        if not path.strip():
            raise Refused(f"--grid is '{word}', without a field; write FIELD=VALUE,VALUE, such as {EXAMPLE}")
        field = find(path.strip())
        if field.path in grid:
            raise Refused(f"--grid names {field.path} twice; give all its values in one, such as {EXAMPLE}")
        try:
            values = next(csv.reader([text], skipinitialspace=True, strict=True), [])
        except csv.Error:
            values = []
        if not values or not all(one.strip() for one in values):
            raise Refused(
                f"--grid {field.path} is '{text}'; give values with commas between them, such as {EXAMPLE}, "
                "and one that has a comma itself in double quotes"
            )
        grid[field.path] = [_parsed(field, one, text) for one in values]
    return grid


def _parsed(field: Field, one: str, text: str) -> Any:
    """A value of ``text``, the values of a field.

    Raises:
      Refused: the field cannot have it.
    """
    try:
        return field.parse(one)
    except Refused:
        bare = text.strip()
        if bare[0] + bare[-1] in ("[]", "()"):
            raise Refused(
                f"--grid {field.path} is '{text}'; give the values without brackets: --grid {field.path}={bare[1:-1]}"
            ) from None
        raise


def from_config(made: Any, path: str) -> list[Grid]:
    """What ``sweep()`` of the config file ``path`` returned: one dict field -> values, or several.

    Of several the cells follow one another; a value that is no list is a list of one, so that a list of dicts of single
    values is a list of cells.

    Raises:
      Refused: another form, an unknown field, a value that its field cannot have, a dict or list without entries.
    """
    what = f"sweep() of '{path}'"
    grids = [made] if isinstance(made, Mapping) else list(made) if isinstance(made, Iterable) else []
    if not grids or isinstance(made, str) or not all(isinstance(grid, Mapping) and grid for grid in grids):
        raise Refused(
            f"{what} returns {made!r:.80}; it must return a dict of fields with lists of values, such as "
            "{'optimizer.lr': [1e-3, 3e-3]}, or a list of such dicts"
        )
    try:
        return [{find(str(name)).path: _values(str(name), given) for name, given in grid.items()} for grid in grids]
    except Refused as error:
        raise Refused(f"{what}: {error}") from None


def _values(path: str, given: Any) -> list[Any]:
    field = find(path)
    single = isinstance(given, str) or not isinstance(given, Iterable) or (field.kind == "names" and _is_names(given))
    values = [given] if single else list(given)
    if not values:
        raise Refused(f"{path} has no values")
    return [field.parse(value) if isinstance(value, str) else field.check(value) for value in values]


def _is_names(given: Any) -> bool:
    return isinstance(given, tuple) and all(isinstance(one, str) for one in given)


def settings(grids: list[Grid], flags: Grid, fixed: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The cells, each as field -> value, in order: the first field varies slowest.

    Args:
      grids: those of ``sweep()``.
      flags: that of the command line, which replaces the same fields of the others.
      fixed: fields that the command line sets to one value, which are no part of the grids either.

    Raises:
      Refused: a field is both fixed and in ``flags``; there is nothing to vary.
    """
    fixed = set(fixed)
    for path in flags:
        if path in fixed:
            raise Refused(f"--grid {path} and --config.{path} contradict one another; give one of them")
    merged = [{path: values for path, values in grid.items() if path not in fixed} | flags for grid in grids or [{}]]
    if not any(merged):
        raise Refused(f"there is nothing to sweep over; give {EXAMPLE}, or the config file a function sweep()")
    return [dict(zip(grid, values, strict=True)) for grid in merged for values in product(*grid.values())]


def text(fields: Mapping[str, Any]) -> str:
    """The setting of a cell in a line: 'optimizer.lr=0.001 seed=0'."""
    return " ".join(f"{path}={show(value).strip(chr(39))}" for path, value in fields.items())


def shrink(config: Section) -> None:
    """Make a configuration as small as ``SMOKE``, where it is larger."""
    values = flat(config)
    for path, most in SMOKE.items():
        if values[path] > most:
            section = config[FIELDS[path].section]
            section[FIELDS[path].leaf] = most
    warmup = config.optimizer.warmup
    if warmup is not None and warmup > config.train.steps:
        config.optimizer.warmup = config.train.steps
