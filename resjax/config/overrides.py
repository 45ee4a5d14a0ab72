"""What does a configuration change of a residual scheme, in which order, and where in the stack?"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ml_collections import ConfigDict

from resjax.config import at
from resjax.config.schema import FIELDS, KINDS
from resjax.errors import Refused
from resjax.residual import Blocks, Gain, Knob, Learned, Scheme, Site, Where
from resjax.residual.gains import Linear

SETS = {"scale_kind": "scale", "skip_kind": "skip", "drop_path": "drop"}  # override -> field of the record
OPEN = ("scale", "scale_eval", "skip")  # the overrides whose number can be a knob


@dataclass(frozen=True)
class Override:
    """One step from the entry to the scheme: one field of the record, for a kind of sub-layer (None = all) and blocks.

    Without kind, blocks and clause it changes the base, what holds where nothing else is said. ``clause`` is the part
    of residual.at that it comes from.
    """

    changes: Mapping[str, Any]
    kind: str | None = None
    blocks: Blocks | None = None
    clause: str | None = None

    @property
    def base(self) -> bool:
        return self.kind is None and self.clause is None

    @property
    def field(self) -> str:
        """The field of the record that is set."""
        name = next(iter(self.changes))
        return SETS.get(name, name)

    def path(self, name: str) -> str:
        """The configuration's field that says ``name``."""
        return "residual.at" if self.clause else f"residual.{self.kind}.{name}" if self.kind else f"residual.{name}"

    def call(self, name: str) -> str:
        """How a sentence calls it."""
        of_kind = f"{self.kind}.{name}" if self.kind else name
        return f"{of_kind} of '{self.clause}' in residual.at" if self.clause else self.path(name)


def overrides_of(config: ConfigDict) -> list[Override]:
    """What the fields under ``residual`` change, in the order in which it is applied."""
    residual, kinds = config.residual, KINDS[config.model.family]
    leaves = [field.leaf for field in FIELDS.values() if field.section == f"residual.{kinds[0]}"]
    found = [Override(one) for one in _paired({name: residual[name] for name in [*leaves, "final_norm"]})]
    for kind in kinds:
        found += [Override(one, kind) for one in _paired({name: residual[kind][name] for name in leaves})]
    if residual.at is not None:
        for clause in at.parse(residual.at, config.model.depth, config.model.family):
            blocks = Blocks(clause.first, clause.last)
            # of one range, what names a kind wins
            for named in sorted(clause.changes, key=lambda kind: kind is not None):
                found += [Override(one, named, blocks, clause.text) for one in _paired(clause.changes[named])]
    return found


def _paired(changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is set of them, one field of the record at a time; a gain's number and kind are one change."""
    changes = {name: value for name, value in changes.items() if value is not None}
    for field in dict.fromkeys(SETS.get(name, name) for name in changes):
        yield {name: value for name, value in changes.items() if SETS.get(name, name) == field}


def with_knobs(override: Override, paths: Collection[str]) -> Override:
    """The override with its numbers of gains at ``paths`` as knobs; one of a range of blocks stays as it is."""
    found = [] if override.clause else [name for name in OPEN if override.path(name) in paths]
    return replace(
        override,
        changes={
            name: Knob(override.path(name)) if name in found else value for name, value in override.changes.items()
        },
    )


@dataclass(frozen=True)
class Places:
    """The sites of a stack: kinds of sub-layer, and pieces of the depth (first, last) in which nothing changes."""

    kinds: tuple[str, ...]
    depth: int
    pieces: tuple[tuple[int, int], ...]


def edges(first: Scheme, overrides: list[Override], depth: int) -> tuple[tuple[int, int], ...]:
    """The depth, cut where an exception or an override begins or ends, so that 1,000 blocks cost like a few."""
    ranges = [where.blocks for where, _ in first.at] + [override.blocks for override in overrides]
    cuts = {0, depth} | ({1} if first.share else set())  # what is shared starts in the first block
    for blocks in ranges:
        if blocks is not None:
            cuts |= set(blocks.span(depth))
    order = sorted(cut for cut in cuts if 0 <= cut <= depth)
    return tuple((begin, end - 1) for begin, end in pairwise(order))


def resolved_at(made: Scheme, config: ConfigDict) -> Iterator[tuple[Scheme, Site]]:
    """The scheme at the first block of each run, with the site."""
    kinds, depth = KINDS[config.model.family], config.model.depth
    sites = made.sites(kinds)
    for run in made.runs(kinds, depth):
        for pos, resolved in enumerate(run.sites):
            yield resolved, Site(sites[pos], pos, len(sites), depth, run.first)


def apply(made: Scheme, overrides: list[Override], places: Places) -> Scheme:
    """The scheme with these overrides, one after another."""
    for override in overrides:
        made = made.but(**_fields(made, override.changes)) if override.base else _somewhere(made, override, places)
    return made


def _somewhere(made: Scheme, override: Override, places: Places) -> Scheme:
    """The override as one exception, or as several where a gain of which it changes one half differs between sites."""
    found: list[tuple[str, int, int, dict[str, Any]]] = []
    for kind in places.kinds if override.kind is None else (override.kind,):
        for begin, end in places.pieces:
            if not Where(override.kind, override.blocks)(kind, begin, places.depth):
                continue
            fields = _fields(made.resolve(kind, begin, places.depth), override.changes)
            if found and found[-1][0] == kind and found[-1][3] == fields:
                begin = found.pop()[1]
            found.append((kind, begin, end, fields))
    if all(piece[3] == found[0][3] for piece in found):
        return made.but(where=Where(override.kind, override.blocks), **found[0][3])
    for kind, begin, end, fields in found:
        made = made.but(where=Where(kind, Blocks(begin, end)), **fields)
    return made


def _fields(now: Scheme, changes: Mapping[str, Any]) -> dict[str, Any]:
    """An override as fields of the record, given what holds now."""
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        field = SETS.get(name, name)
        if field in ("scale", "skip"):
            fields[field] = _gain(getattr(now, field), changes.get(field), changes.get(f"{field}_kind"))
        elif field == "drop":
            fields[field] = Linear(value) if value else 0.0
        else:
            fields[field] = None if value == "none" else value
    return fields


def _gain(now: Gain, number: float | None, kind: str | None) -> Gain:
    """A gain with another number, another kind, or both; what is not given stays as it is now."""
    if kind is None:
        return now if number is None else replace(now, start=number) if isinstance(now, Learned) else number
    first = number if number is not None else now.start if isinstance(now, Learned) else now
    if kind == "constant":
        return first
    if isinstance(first, Knob):
        raise Refused(f"the knob '{first.name}' cannot be the start of a learned gain; give its number as well")
    return Learned(first, "scalar" if kind == "scalar" else "vector", offset=kind == "offset")
