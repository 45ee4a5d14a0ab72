"""Which runs does a sweep consist of, which of them are one, and which share a compiled program?"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resjax.config.entry import entry
from resjax.config.entry import source as scheme_source
from resjax.config.folder import MAY_DIFFER
from resjax.config.load import load
from resjax.config.schema import FIELDS
from resjax.config.scheme import opened, scheme
from resjax.config.tree import Section, flat
from resjax.config.validate import BYTES, SYMBOLS, no_source, resolve
from resjax.errors import Refused
from resjax.residual.precision import ROUNDING, ROUNDINGS
from resjax.train import optimizer
from resjax.train.numbers import GAINS, SWITCHED, TRACEABLE
from resjax.train.schedule import warmup_steps

# No number in a cell's line depends on these; the training loss there is a mean of logged steps.
# and findings, outcome and token cosine come from what is measured.
WITHOUT_EFFECT = tuple(path for path in MAY_DIFFER if path != "train.log_every" and not path.startswith("health"))
# No program depends on these.
OUTSIDE = (
    "seed",
    "data.source",
    "data.field",
    "train.save_every",
    "train.keep",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "health.every",
)
# Fields whose values are names, of a list that no other field changes.
NAMED = ("residual.name", "data.source")


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a sweep.

    Attributes:
      name: hash of all that its numbers depend on: the same cell has the same name in every sweep.
      fields: what the grid sets.
      config: checked and resolved; None only where it is refused.
      refusal: why it is refused.
    """

    name: str
    fields: Mapping[str, Any]
    config: Any = None
    refusal: str | None = None


@dataclass(frozen=True, eq=False)
class Architecture:
    """Cells that one compiled program serves.

    Attributes:
      name: hash of what the program is made of.
      traced: the fields in which its cells differ, beside the seed: values that the program takes.
    """

    name: str
    cells: tuple[Cell, ...]
    traced: tuple[str, ...]


def build(
    spec: str,
    overrides: Sequence[tuple[str, str]],
    settings: Iterable[Mapping[str, Any]],
    platform: str,
    finish: Callable[[Section], None] | None = None,
) -> list[Cell]:
    """The cells, those that are the same run once (under the fields of the first).

    A cell whose fields contradict one another is kept with its refusal: grids have such corners. A name that nothing has is wrong in
    each of its cells, and is refused at once.

    Args:
      spec, overrides, finish: see :func:`resjax.config.load.load`.
      settings: what the grid sets, one mapping a cell.
      platform: of the devices; see :func:`resjax.config.validate.resolve`.

    Raises:
      Refused: the config file is faulty, a scheme or source that the grid names does not exist, or all cells are refused.
    """
    cells: dict[str, Cell] = {}
    settings = list(settings)
    _refuse_no_names(settings)
    for fields in settings:
        cell = _cell(spec, overrides, fields, platform, finish)
        cells.setdefault(cell.name, cell)
    found = list(cells.values())
    refusals = [cell.refusal for cell in found if cell.refusal]
    if refusals and len(refusals) == len(found):
        raise Refused(refusals[0])
    return found


def _refuse_no_names(settings: Iterable[Mapping[str, Any]]) -> None:
    for path, value in dict.fromkeys((path, fields[path]) for fields in settings for path in NAMED if path in fields):
        if path == "residual.name":
            entry(value)
        elif sentence := no_source(value):
            raise Refused(sentence)


def _cell(
    spec: str,
    overrides: Sequence[tuple[str, str]],
    fields: Mapping[str, Any],
    platform: str,
    finish: Callable[[Section], None] | None,
) -> Cell:
    try:
        config = resolve(load(spec, [*overrides, *fields.items()], finish=finish), platform)
        scheme(config)
        if config.train.on_nonfinite == "rollback":
            raise Refused(
                "train.on_nonfinite is 'rollback', but a sweep saves no states to go back to; give stop or skip"
            )
    except Refused as refused:
        return Cell(
            _hash({"spec": spec, "overrides": list(overrides), "fields": dict(fields)}), fields, None, str(refused)
        )
    values = {path: value for path, value in flat(config).items() if not path.startswith(WITHOUT_EFFECT)}
    return Cell(_hash({"fields": values, "scheme": _own_scheme(config)}), fields, config)


def architectures(cells: Iterable[Cell]) -> list[Architecture]:
    """The cells that can run, by the program that they need, in the order of the first of each.

    A number that a program can take as a value (``TRACEABLE``) is one where the cells of its architecture differ in it;
    elsewhere it is a constant, as in an ordinary run.
    """
    cells = [cell for cell in cells if cell.config is not None]
    varied = [path for path in TRACEABLE if len({program_value(cell.config, path) for cell in cells}) > 1]
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_hash(_form(cell.config, varied)), []).append(cell)
    return [
        Architecture(
            name,
            tuple(group),
            tuple(
                path
                for path in varied
                if path != "seed" and len({program_value(one.config, path) for one in group}) > 1
            ),
        )
        for name, group in groups.items()
    ]


def program_value(config: Any, path: str) -> Any:
    """The value of one of ``TRACEABLE``, of an optimizer's own number also where it is left unset."""
    value = flat(config)[path]
    if path == "optimizer.warmup":
        return warmup_steps(value, config.train.steps)
    if path == ROUNDING:
        return ROUNDINGS.index(value)
    if value is None and path.startswith("optimizer."):
        return optimizer.FIELDS[config.optimizer.name].get(FIELDS[path].leaf)
    return value


def _form(config: Any, varied: Iterable[str]) -> dict[str, Any]:
    """What a program is made of, if it takes the fields of ``varied`` as values where it can."""
    taken = [path for path in varied if _can_be_taken(config, path)]
    form = {path: value for path, value in flat(config).items() if path not in OUTSIDE and path not in taken}
    vocab = config.model.vocab or SYMBOLS.get(config.data.source, BYTES)
    return {"fields": form, "taken": taken, "vocab": vocab, "scheme": _own_scheme(config)}


def _can_be_taken(config: Any, path: str) -> bool:
    value = program_value(config, path)
    if value is None or (path in SWITCHED and value == 0.0):
        return False
    return path not in GAINS or opened(config, (path,)) is not None


def _own_scheme(config: Any) -> str | None:
    """Hash of the file that the user's own scheme comes from."""
    source = scheme_source(config)
    return None if source is None else source["sha256"]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()[:12]
