"""Which residual scheme does a configuration mean? A catalogue entry or the user's own, with overrides."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from resjax.config import at
from resjax.config.entry import entry_of
from resjax.config.field import show
from resjax.config.schema import FIELDS, KINDS
from resjax.config.tree import flat
from resjax.config.validate import said
from resjax.errors import Refused, not_one_of
from resjax.residual import KERNEL_ROLES, ROLES, Blocks, Frozen, Gain, Knob, Learned, OptRule, Scheme, Site, Where
from resjax.residual.gains import DepthPower, Linear, is_rule
from resjax.residual.norms import POINTWISE
from resjax.residual.scheme import GAINS

SETS = {"scale_kind": "scale", "skip_kind": "skip", "drop_path": "drop"}  # override -> field of the record
OPEN = ("scale", "scale_eval", "skip")  # the overrides whose number can be a knob
_RESIDUAL = tuple(path for path in FIELDS if path.startswith("residual."))
NORM_FIELDS = ("norm_in", "norm_out", "norm_after")


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


def scheme(config: ConfigDict) -> Scheme:
    """The scheme of ``config.residual``.

    The overrides are applied in this order, later ones win: the entry with its own exceptions; ``residual.FIELD``,
    which changes the base and leaves those exceptions; ``residual.attention.FIELD`` and ``residual.mlp.FIELD``;
    ``residual.at``.

    Raises:
      Refused: unknown scheme, a fault in the user's file, a field that has no effect under this scheme.
    """
    first = entry_of(config)
    overrides = _overrides(config)
    kinds = KINDS[config.model.family]
    places = _Places(first.sites(kinds), config.model.depth, _edges(first, overrides, config.model.depth))
    try:
        made = _apply(first, overrides, places)
        made.runs(kinds, places.depth)
        made.carry.refuse(made.sites(kinds), config.model.width)
    except ValueError as error:  # the record's own checks, such as a field that its carry does not use
        raise Refused(f"residual.name is '{config.residual.name}': {error}") from None
    _refuse_unusable(made, config)
    _refuse_void_overrides(config, first, overrides, places)
    _refuse_void_fields(config, made, first, places)
    return _with_gain_rate(made, config)


def _with_gain_rate(made: Scheme, config: ConfigDict) -> Scheme:
    """With the config's factor on the rate of learned gains, beside the scheme's own."""
    if (factor := config.optimizer.gain_lr) == 1.0:
        return made
    own = made.optim.get("gain", OptRule()).faster(factor)
    return made.but(optim=Frozen({**made.optim, "gain": own}))


def opened(config: ConfigDict, paths: Collection[str]) -> Scheme | None:
    """The scheme of a ``config`` that :func:`scheme` accepts, with the constant gains that ``paths`` set left open.

    They are knobs of these names, whose values a program takes. None where one of the paths sets no constant gain, but
    the start of a learned one.
    """
    first = entry_of(config)
    overrides = [_with_knobs(override, paths) for override in _overrides(config)]
    kinds = first.sites(KINDS[config.model.family])
    places = _Places(kinds, config.model.depth, _edges(first, overrides, config.model.depth))
    try:
        made = _apply(first, overrides, places)
    except Refused:
        return None
    gains = [getattr(resolved, name) for resolved, _ in _resolved(made, config) for name in GAINS]
    return (
        None if any(isinstance(getattr(gain, "start", None), Knob) for gain in gains) else _with_gain_rate(made, config)
    )


def _with_knobs(override: Override, paths: Collection[str]) -> Override:
    """The override with its numbers of gains at ``paths`` as knobs; one of a range of blocks stays as it is."""
    found = [] if override.clause else [name for name in OPEN if override.path(name) in paths]
    return replace(
        override,
        changes={
            name: Knob(override.path(name)) if name in found else value for name, value in override.changes.items()
        },
    )


def _overrides(config: ConfigDict) -> list[Override]:
    residual, kinds = config.residual, KINDS[config.model.family]
    leaves = [field.leaf for field in FIELDS.values() if field.section == f"residual.{kinds[0]}"]
    found = [Override(one) for one in _paired({name: residual[name] for name in [*leaves, "final_norm"]})]
    for kind in kinds:
        found += [Override(one, kind) for one in _paired({name: residual[kind][name] for name in leaves})]
    if residual.at is not None:
        for clause in at.parse(residual.at, config.model.depth, config.model.family):
            blocks = Blocks(clause.first, clause.last)
            for named in sorted(
                clause.changes, key=lambda kind: kind is not None
            ):  # of one range, what names a kind wins
                found += [Override(one, named, blocks, clause.text) for one in _paired(clause.changes[named])]
    return found


def _paired(changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is set of them, one field of the record at a time; a gain's number and kind are one change."""
    changes = {name: value for name, value in changes.items() if value is not None}
    for field in dict.fromkeys(SETS.get(name, name) for name in changes):
        yield {name: value for name, value in changes.items() if SETS.get(name, name) == field}


@dataclass(frozen=True)
class _Places:
    """The sites of a stack: kinds of sub-layer, and pieces of the depth (first, last) in which nothing changes."""

    kinds: tuple[str, ...]
    depth: int
    pieces: tuple[tuple[int, int], ...]


def _edges(first: Scheme, overrides: list[Override], depth: int) -> tuple[tuple[int, int], ...]:
    """The depth, cut where an exception or an override begins or ends, so that 1,000 blocks cost like a few."""
    ranges = [where.blocks for where, _ in first.at] + [override.blocks for override in overrides]
    cuts = {0, depth} | ({1} if first.share else set())  # what is shared starts in the first block
    for blocks in ranges:
        if blocks is not None:
            cuts |= set(blocks.span(depth))
    order = sorted(cut for cut in cuts if 0 <= cut <= depth)
    return tuple((begin, end - 1) for begin, end in pairwise(order))


def _apply(made: Scheme, overrides: list[Override], places: _Places) -> Scheme:
    for override in overrides:
        made = made.but(**_fields(made, override.changes)) if override.base else _somewhere(made, override, places)
    return made


def _somewhere(made: Scheme, override: Override, places: _Places) -> Scheme:
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


def _refuse_unusable(made: Scheme, config: ConfigDict) -> None:
    """What only a user's own scheme can have: knobs, rules that fail, roles that do not exist, unhashable fields."""
    name = config.residual.name
    try:
        hash(made)
    except TypeError as error:
        raise Refused(
            f"residual.name is '{name}', which is not hashable ({error}); use resjax.residual.Frozen for dicts"
        ) from None
    for where, _ in made.at:
        if where.kind not in (None, *KINDS[config.model.family], *made.sites(KINDS[config.model.family])):
            raise not_one_of(f"a kind in 'at' of residual.name '{name}'", where.kind, KINDS[config.model.family])
    for rules in ("init", "optim", "project"):
        for role in getattr(made, rules):
            if role not in ROLES:
                raise not_one_of(f"a role in {rules} of residual.name '{name}'", role, ROLES)
    for resolved, site in _resolved(made, config):
        for gain in GAINS:
            if isinstance(knob := getattr(resolved, gain), Knob):
                raise Refused(
                    f"residual.name is '{name}', whose {gain} is the knob '{knob.name}', which only programs set; "
                    "give a number"
                )
            value = getattr(resolved, gain)
            _try(_rule(value), site, gain, name, start=isinstance(value, Learned))
        for role, start in resolved.init.items():
            _try(_rule(start.gain), site, f"the start of '{role}'", name, start=True)


def _try(rule: Any, site: Site, what: str, name: str, start: bool) -> None:
    """Refuse a rule that fails on a site of plain numbers, or traced, as the program calls it: ``start`` once a block,
    at step 0; else on all blocks at once, with the step.
    """
    if rule is None:
        return

    def number(block: Any, step: Any) -> jax.Array:
        return jnp.asarray(rule(site.on(block, step)), jnp.float32)

    def traced(blocks: jax.Array, step: jax.Array) -> jax.Array:
        return jax.vmap(lambda block: number(block, 0))(blocks) if start else number(blocks, step) + 0 * blocks

    why = ""
    try:
        float(rule(site))
        why = " in the compiled program (write jnp.where for 'if', and jnp's functions for math's)"
        jax.eval_shape(traced, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((site.depth,), ())))
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise Refused(
            f"the rule for {what} of residual.name '{name}' fails{why}: {type(error).__name__}: {first}"
        ) from None


def _resolved(made: Scheme, config: ConfigDict) -> Iterator[tuple[Scheme, Site]]:
    """The scheme at the first block of each run, with the site."""
    kinds, depth = KINDS[config.model.family], config.model.depth
    sites = made.sites(kinds)
    for run in made.runs(kinds, depth):
        for pos, resolved in enumerate(run.sites):
            yield resolved, Site(sites[pos], pos, len(sites), depth, run.first)


def _rule(gain: Gain | None) -> Any:
    """The rule in a gain or in its start, if there is one."""
    rule = gain.start if isinstance(gain, Learned) else gain
    return rule if is_rule(rule) and not isinstance(rule, Linear | DepthPower) else None


def _effective(made: Scheme, places: _Places) -> tuple:
    """What a run does, with everything that a constant scale of 0 switches off left out."""

    def at_site(kind: str, block: int) -> Scheme:
        resolved = made.resolve(kind, block, places.depth)
        if resolved.scale == 0.0 and resolved.scale_eval in (None, 0.0):
            return replace(resolved, norm_in=None, norm_out=None, in_scale=1.0, drop=0.0)
        return resolved

    return made.final_norm, tuple(at_site(kind, begin) for begin, _ in places.pieces for kind in places.kinds)


def _refuse_void_overrides(config: ConfigDict, first: Scheme, overrides: list[Override], places: _Places) -> None:
    """Refuse an override that no site would feel: with another value in its place the scheme would be the same."""
    now = _effective(_apply(first, overrides, places), places)
    for index, override in enumerate(overrides):
        winners = [later for later in overrides[index + 1 :] if later.field == override.field]
        for name, value in override.changes.items():
            other = replace(override, changes={**override.changes, name: _other(name, value)})
            if _effective(_apply(first, [*overrides[:index], other, *overrides[index + 1 :]], places), places) != now:
                continue
            by = [later.path(one) for later in winners for one in later.changes] or _RESIDUAL
            if not said(config, override.path(name), tuple(by)):
                continue
            calls = list(dict.fromkeys(later.call(one) for later in winners for one in later.changes))
            wins = f"{' and '.join(calls)} {'win' if len(calls) > 1 else 'wins'} at all its sites"
            why = wins if winners else "the scale is 0 at all its sites"
            raise Refused(f"{override.call(name)} is {show(value)}, which has no effect: {why}")


def _other(name: str, value: Any) -> Any:
    """Another valid value of an override field."""
    if name.endswith("_kind"):
        return "scalar" if value == "vector" else "vector"
    if isinstance(value, str):
        return "rmsnorm" if value == "unit" else "unit"
    return 0.5 + value / 4 if name == "drop_path" else value + 1.0


def _refuse_void_fields(config: ConfigDict, made: Scheme, first: Scheme, places: _Places) -> None:
    """Refuse settings outside of ``residual`` that nothing under this scheme reads."""
    sites = [made.resolve(kind, begin, places.depth) for begin, _ in places.pieces for kind in places.kinds]
    norms = {getattr(site, field) for site in sites for field in NORM_FIELDS} | {made.final_norm}
    norms |= {getattr(point, "norm", None) for site in sites for point in site.inside.values()}
    carry = made.written
    real = {config.model.norm if norm == "norm" else norm for norm in norms} - {None, "none"}
    who = f"residual.name is '{config.residual.name}', which{' with these overrides' if made != first else ''}"
    own = [site.init.get("write") for site in sites]
    for field, read_by_run, why, more in (
        ("model.norm", "norm" in norms, "has no norm that follows model.norm", ()),
        (
            "model.norm_eps",
            real - set(POINTWISE) or (config.model.qk_norm and made.norm_in not in POINTWISE) or carry.own_norms,
            "has no norm",
            ("model.norm", "model.qk_norm"),
        ),
        ("model.norm_gain", real - {"unit"}, "has no norm with a gain", ("model.norm",)),
        (
            "model.remat",
            config.model.remat == "auto" or not (carry.undoable and config.model.scan),
            "takes its updates back instead of storing or recomputing streams",
            ("model.scan",),
        ),
        (
            "model.tied",
            "head" not in {**made.init, **made.project},
            "starts or holds the head by a rule of its own, and there is none",
            (),
        ),
        ("optimizer.weight_decay", _decays(made), "lets no weight decay", ()),
        (
            "init.out_scale",
            "write" not in made.project
            and any(rule is None or (rule.family == "base" and rule.gain != 0.0) for rule in own),
            "starts the matrices that write to the stream by a rule of its own",
            (),
        ),
    ):
        if not read_by_run and said(config, field, (*_RESIDUAL, *more)):
            cause = f"model.norm is 'none' and {who}" if config.model.norm == "none" and more else who
            raise Refused(f"{field} is {show(flat(config)[field])}, which has no effect: {cause} {why}")


def _decays(made: Scheme) -> bool:
    """Whether any weights decay under the scheme's rules: by default the kernels do."""
    return any(made.optim.get(role) is None or made.optim[role].decay is not False for role in KERNEL_ROLES)


def describe(config: ConfigDict) -> list[str]:
    """The scheme as resolved: equation, one line a run of blocks, and the numbers that its rules give at this depth."""
    made = scheme(config)
    kinds, depth = KINDS[config.model.family], config.model.depth
    lines = [f"{config.residual.name}: {entry_of(config).equation}", *made.describe(kinds, depth)]
    sites = made.sites(kinds)
    for run in made.runs(kinds, depth):
        last = run.first + run.length - 1
        for pos, resolved in enumerate(run.sites):
            site = Site(sites[pos], pos, len(sites), depth)
            for name in GAINS:
                gain = getattr(resolved, name)
                if rule := _rule(gain):
                    begin, end = (float(rule(site.on(block))) for block in (run.first, last))
                    number = (
                        f"{begin:g}" if begin == end else f"{begin:g} in block {run.first} to {end:g} in block {last}"
                    )
                    verb = "starts at" if isinstance(gain, Learned) else "is"
                    lines.append(
                        f"{name} {verb} {number} (the rule {getattr(rule, '__name__', rule)} at depth {depth})"
                    )
    if made.written.undoable and not made.written.rows and config.precision.stream != "float32":
        lines.append(
            f"note: the stream is computed back in {config.precision.stream} (precision.stream), and drifts; float32 is exact to 1e-6"
        )
    if any(
        "norm" in (made.final_norm, *(getattr(site, field) for field in NORM_FIELDS))
        for site, _ in _resolved(made, config)
    ):
        lines.append(f"norm is {config.model.norm} (model.norm)")
    return list(dict.fromkeys(lines))
