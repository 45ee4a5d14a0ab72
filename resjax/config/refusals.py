"""What of a residual scheme and its configuration contradicts itself, or would have no effect?"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from resjax.config.field import show
from resjax.config.overrides import Override, Places, apply, resolved_at
from resjax.config.schema import FIELDS, KINDS
from resjax.config.tree import flat
from resjax.config.validate import said
from resjax.errors import Refused, not_one_of
from resjax.residual import KERNEL_ROLES, ROLES, Gain, Knob, Learned, Scheme, Site
from resjax.residual.gains import DepthPower, Linear, is_rule
from resjax.residual.norms import POINTWISE
from resjax.residual.scheme import GAINS

_RESIDUAL = tuple(path for path in FIELDS if path.startswith("residual."))
NORM_FIELDS = ("norm_in", "norm_out", "norm_after")


def refuse_unusable(made: Scheme, config: ConfigDict) -> None:
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
    for resolved, site in resolved_at(made, config):
        for gain in GAINS:
            if isinstance(knob := getattr(resolved, gain), Knob):
                raise Refused(
                    f"residual.name is '{name}', whose {gain} is the knob '{knob.name}', which only programs set; "
                    "give a number"
                )
            value = getattr(resolved, gain)
            _try(rule_of(value), site, gain, name, start=isinstance(value, Learned))
        for role, start in resolved.init.items():
            _try(rule_of(start.gain), site, f"the start of '{role}'", name, start=True)


def _try(rule: Any, site: Site, what: str, name: str, start: bool) -> None:
    """Refuse a rule that fails on a site of plain numbers, or traced, as the program calls it: ``start`` once a block,
    at step 0; else on all blocks at once, with the step.
    """
    if rule is None:
        return

    def gain(block: Any, step: Any) -> jax.Array:
        return jnp.asarray(rule(site.on(block, step)), jnp.float32)

    def traced(blocks: jax.Array, step: jax.Array) -> jax.Array:
        return jax.vmap(lambda block: gain(block, 0))(blocks) if start else gain(blocks, step) + 0 * blocks

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


def rule_of(gain: Gain | None) -> Any:
    """The rule in a gain or in its start, if there is one."""
    rule = gain.start if isinstance(gain, Learned) else gain
    return rule if is_rule(rule) and not isinstance(rule, Linear | DepthPower) else None


def _effective(made: Scheme, places: Places) -> tuple:
    """What a run does, with everything that a constant scale of 0 switches off left out."""

    def at_site(kind: str, block: int) -> Scheme:
        resolved = made.resolve(kind, block, places.depth)
        if resolved.scale == 0.0 and resolved.scale_eval in (None, 0.0):
            return replace(resolved, norm_in=None, norm_out=None, in_scale=1.0, drop=0.0)
        return resolved

    return made.final_norm, tuple(at_site(kind, begin) for begin, _ in places.pieces for kind in places.kinds)


def refuse_void_overrides(config: ConfigDict, first: Scheme, overrides: list[Override], places: Places) -> None:
    """Refuse an override that no site would feel: with another value in its place the scheme would be the same."""
    now = _effective(apply(first, overrides, places), places)
    for index, override in enumerate(overrides):
        winners = [later for later in overrides[index + 1 :] if later.field == override.field]
        for name, value in override.changes.items():
            other = replace(override, changes={**override.changes, name: _other(name, value)})
            if _effective(apply(first, [*overrides[:index], other, *overrides[index + 1 :]], places), places) != now:
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


def refuse_void_fields(config: ConfigDict, made: Scheme, first: Scheme, places: Places) -> None:
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
