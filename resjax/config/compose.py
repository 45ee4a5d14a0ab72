"""What does ``post_ln+prores`` mean? One scheme as the base, and what others add to it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from resjax.errors import Refused
from resjax.residual import CATALOGUE, Frozen, Scheme

PLAIN_BASE = CATALOGUE["pre_ln"]  # what an addition is compared with: what it sets beside Pre-LN is what it adds
DOCUMENTATION = ("name", "equation", "paper", "unverified")
MERGED = ("init", "optim", "project", "inside", "share")
# Where the norms stand is the base's; an addition that differs from Pre-LN there is a base itself.
PLACEMENT = ("norm_in", "norm_out", "norm_after", "final_norm", "keep_normed", "at", "fuse")


def composed(base: Scheme, more: list[Scheme], name: str) -> Scheme:
    """``base`` with what each of ``more`` sets beside Pre-LN: a gain, a rate of stochastic depth, a carry, rules by role.

    Raises:
      Refused: an addition moves norms, adds nothing, sets what is set already, or has no meaning on the base.
    """
    taken: dict[str, str] = {field: base.name for field in _own(base)}
    for other in more:
        own = _own(other)
        if moves := [field for field in own if field in PLACEMENT]:
            raise Refused(
                f"residual.name is '{name}', but '{other.name}' is a base of its own (it sets {', '.join(moves)}), "
                f"which cannot be added to '{base.name}'; give it first"
            )
        if not own:
            raise Refused(f"residual.name is '{name}', but '{other.name}' adds nothing to '{base.name}'")
        changes: dict[str, Any] = {}
        for field, value in own.items():
            if field in MERGED:
                mine = getattr(base, field)
                if both := set(mine) & set(value):
                    raise Refused(
                        _clash(name, f"{field} of '{sorted(both)[0]}'", taken.get(field, base.name), other.name)
                    )
                value = Frozen({**mine, **value})
            elif field in taken:
                raise Refused(_clash(name, field, taken[field], other.name))
            changes[field] = value
            taken[field] = other.name
        if why := _meaningless(base, other, own):
            raise Refused(f"residual.name is '{name}', but '{other.name}' has no meaning on '{base.name}': {why}")
        try:
            base = base.but(
                name=f"{base.name}+{other.name}", equation=f"{base.equation}; with {other.equation}", **changes
            )
        except ValueError as error:
            raise Refused(f"residual.name is '{name}': {error}") from None
    return base


def _meaningless(base: Scheme, other: Scheme, own: Mapping[str, Any]) -> str:
    """Why what ``other`` sets has no meaning on a base; empty where it has."""
    start = own["init"].get("write") if "init" in own else None
    sites = [base, *(base.but(None, at=()).but(None, **overrides) for _, overrides in base.at)]
    normed, skipless = any(one.norm_out is not None for one in sites), any(one.skip == 0.0 for one in sites)
    if start is not None and start.gain == 0.0:
        if normed:
            return "a norm follows the branch, and of an output that starts at 0 it makes a gradient of 1 / its epsilon"
        if skipless:
            return "without a skip, branches that start at 0 leave nothing of the input"
    if set(own) == {"init"} and set(own["init"]) == {"write"} and normed:
        return "a norm follows the branch, and takes the size of its last matrix away"
    if "drop" in own and skipless:
        return "without a skip, nothing is left where a branch is dropped"
    # a proposal that cannot be dropped cannot be shrunk, for the same reason
    if "scale" in own and "drop" in base.carry.lacks:
        return "its branch is a proposal to be mixed in, not an update that could be scaled"
    return ""


def _own(scheme: Scheme) -> dict[str, Any]:
    """What a scheme sets differently from Pre-LN."""
    names = [field.name for field in fields(Scheme) if field.name not in DOCUMENTATION]
    return {name: getattr(scheme, name) for name in names if getattr(scheme, name) != getattr(PLAIN_BASE, name)}


def _clash(name: str, what: str, first: str, second: str) -> str:
    return f"residual.name is '{name}', but '{first}' and '{second}' both set {what}; only one can"
