"""How is a grid put together? Products, pairs and sequences of cells, for the ``sweep()`` of a config file.

    def sweep():
        sizes = zipped({"model.depth": [6, 12], "model.width": [64, 32]})
        return chain(
            product(sizes, {"optimizer.lr": [1e-3, 3e-3], "seed": range(5)}),
            product({"residual.name": "post_ln", "optimizer.lr": 1e-3, "seed": range(5)}),
        )

A cell is a dict field -> value; a grid a dict field -> value or values, or a list of cells. Plain Python, without JAX.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product as every_choice
from typing import Any

from resjax.errors import Refused

Cell = dict[str, Any]
Grid = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def product(*grids: Grid) -> list[Cell]:
    """Every combination; the first varies slowest. Of two that set one field the later wins, so that a grid can be overridden.

    Two cells that come out the same are one.
    """
    made: list[Cell] = []
    for choice in every_choice(*map(cells, grids)):
        cell: Cell = {}
        for part in choice:
            cell |= part
        if cell not in made:
            made.append(cell)
    return made


def zipped(grid: Mapping[str, Any]) -> list[Cell]:
    """The first values of all fields, the second of all, and so on; a single value goes with each.

    Raises:
      Refused: fields have other numbers of values.
    """
    columns = {name: values(given) for name, given in grid.items()}
    counts = {name: len(column) for name, column in columns.items() if len(column) != 1}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise Refused(f"zipped takes as many values of each field, or one, and {told}")
    count = max(counts.values(), default=1)
    return [{name: column[i if len(column) > 1 else 0] for name, column in columns.items()} for i in range(count)]


def chain(*grids: Grid) -> list[Cell]:
    """One after the other, each cell once."""
    made: list[Cell] = []
    for grid in grids:
        made += [cell for cell in cells(grid) if cell not in made]
    return made


def cells(grid: Grid) -> list[Cell]:
    """All cells of a grid."""
    if not isinstance(grid, Mapping):
        return [cell for part in grid for cell in cells(part)]
    names = list(grid)
    return [dict(zip(names, choice, strict=True)) for choice in every_choice(*(values(grid[name]) for name in names))]


def values(given: Any) -> list[Any]:
    """What a field takes: one value, or each of several. Text, a tuple of names and None are one."""
    names = isinstance(given, tuple) and all(isinstance(one, str) for one in given)
    return [given] if names or isinstance(given, str) or not isinstance(given, Iterable) else list(given)
