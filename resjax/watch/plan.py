"""Which adds does a model have, and what did they report? The plan, its taps, and the row of probes that comes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.errors import Refused, not_one_of
from resjax.watch.tap import DTYPES, TAIL, Kind, site_probes, width

GROUPS = ("tokens", "ranks", "precision")
UNSEEN = {  # groups of resjax's own step that no add tells
    "attention": "the softmax is inside the branch",
    "roles": "weights and their gradients do not pass there",
    "optimizer": "weights and their steps do not pass there",
}


@dataclass(frozen=True)
class Plan:
    """The adds of a model.

    Attributes:
      blocks: how many blocks there are.
      sites: the adds of one block by name, in their order. ``resjax``'s own blocks have ('attention', 'mlp').
      groups: more probes than those that are always there: 'tokens' (centred cosine, residual norm, growth), 'ranks' (directions that
        the tokens use), 'precision' (error and bits of the add); see docs/probes.md.
    """

    blocks: int
    sites: tuple[str, ...] = ("attention", "mlp")
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sites = (self.sites,) if isinstance(self.sites, str) else tuple(self.sites)
        object.__setattr__(self, "sites", sites)
        if isinstance(self.blocks, bool) or not isinstance(self.blocks, int) or self.blocks < 1:
            raise Refused(f"blocks is {self.blocks!r}, and has to be a number from 1")
        if not sites or not all(isinstance(site, str) and site for site in sites):
            raise Refused(f"sites is {self.sites!r}, and has to be one or more names")
        if twice := [site for site in sites if sites.count(site) > 1]:
            raise Refused(f"sites names '{twice[0]}' twice, and every add of a block needs a name of its own")

        groups = (self.groups,) if isinstance(self.groups, str) else tuple(dict.fromkeys(self.groups))
        object.__setattr__(self, "groups", groups)
        for group in groups:
            if group in UNSEEN:
                raise Refused(
                    f"groups has '{group}', which an add cannot tell: {UNSEEN[group]}; there are {', '.join(GROUPS)}"
                )
            if group not in GROUPS:
                raise not_one_of("groups", group, GROUPS)

    @property
    def kind(self) -> Kind:
        """That of the taps of its sites."""
        return ("site", *self.groups)

    def taps(self, on: Any = True) -> "Taps":
        """The input whose gradient the probes are. ``on``: whether to measure in this call; a traced boolean will do."""
        value = jnp.where(jnp.asarray(on), 0.0, 1.0).astype(jnp.float32)

        def full(kind: Kind, *shape: int) -> jax.Array:
            return jnp.broadcast_to(value, (*shape, width(kind)))

        shape = self.blocks, len(self.sites)
        return Taps(full(self.kind, *shape), full("block", self.blocks), full("embedded"), full("final"), self)

    def name(self, block: int, site: int) -> str:
        return f"'{self.sites[site]}' of block {block}"

    def __str__(self) -> str:
        return f"{self.blocks} blocks with {', '.join(self.sites)}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Taps:
    """Zeros to differentiate by, or what came of that; float32, the last axis as in :mod:`resjax.watch.tap`.

    Attributes:
      sites: (block, site, ...); blocks: (block, ...); embedded, final: one vector each.
      plan: of what model.
    """

    sites: jax.Array
    blocks: jax.Array
    embedded: jax.Array
    final: jax.Array
    plan: Plan = field(metadata={"static": True})


def row(found: Taps, partial: bool = False) -> dict[str, np.ndarray]:
    """The probes of one step by name, as a :class:`resjax.health.record.HealthRecord` takes them.

    Args:
      found: the gradient of :meth:`Plan.taps`, concrete.
      partial: NaN for adds that were not passed (blocks that are skipped at random); else they are refused.

    Returns:
      update_ratio, stream_rms, ..., stream_grad (block, site); update_ratio_block (block,); embed_rms, embed_grad, final_rms (); NaN
      where nothing was watched. Empty for a step in which nothing was to be measured.

    Raises:
      Refused: an add was not passed, or more than once, or the gradient is not as jax.grad gave it.
    """
    if not isinstance(found, Taps):
        raise Refused(
            f"the probes are of type {type(found).__name__}, and have to be the gradient of Plan.taps(), a Taps"
        )
    leaves = {name: getattr(found, name) for name in ("sites", "blocks", "embedded", "final")}
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves.values()):
        raise Refused(
            "watch.row was called inside a traced function; return the gradient of the taps from it, and call row there"
        )
    seen = {name: np.asarray(leaf, np.float32) for name, leaf in jax.device_get(leaves).items()}
    _counted(seen, found.plan, partial)
    if not any(_tail(values, "on").any() for values in seen.values()):
        return {}
    sites, blocks = _blank(seen["sites"]), _blank(seen["blocks"])
    embedded, final = _blank(seen["embedded"]), _blank(seen["final"])
    probes = dict(zip(site_probes(found.plan.groups), np.moveaxis(sites, -1, 0), strict=False))
    return probes | {
        "stream_grad": _tail(sites, "gradient"),
        "update_ratio_block": blocks[:, 0],
        "embed_rms": embedded[0],
        "embed_grad": _tail(embedded, "gradient"),
        "final_rms": final[0],
    }


def stream_dtype(found: Taps) -> str | None:
    """The narrowest dtype that the stream had at an add, as the program had it; None if that is unknown."""
    codes = _tail(np.asarray(jax.device_get(found.sites)), "dtype")
    code = int(codes.max(initial=0))
    return DTYPES[code - 1] if 0 < code <= len(DTYPES) else None


def stream_width(found: Taps) -> int:
    """Length of the stream's last axis after the last add that was measured; 0 if none was."""
    widths = _tail(np.asarray(jax.device_get(found.sites)), "width")
    return int(widths[widths > 0][-1]) if (widths > 0).any() else 0


def _tail(values: np.ndarray, name: str) -> np.ndarray:
    return values[..., TAIL.index(name) - len(TAIL)]


def _blank(values: np.ndarray) -> np.ndarray:
    """NaN where the tap was not passed."""
    return np.where(_tail(values, "adds")[..., None] == 1, values, np.nan).astype(np.float32)


def _counted(seen: Mapping[str, np.ndarray], plan: Plan, partial: bool) -> None:
    """Refuse what was passed any number of times but once."""
    adds = _tail(seen["sites"], "adds")
    if not adds.any() and not partial:
        raise Refused(
            "no add reported: call watch.add inside watch.into(taps), and take the gradient of the loss by these taps"
        )
    refuse_counts(plan, adds, partial)
    for kind, name in {"blocks": "watch.block", "embedded": "watch.embedded", "final": "watch.final"}.items():
        for place, count in np.ndenumerate(_tail(seen[kind], "adds")):
            _refuse_count(f"{name} of block {place[0]}" if place else name, count, plan, True)


def refuse_counts(plan: Plan, adds: np.ndarray, partial: bool) -> None:
    """Refuse adds (block, site) that were passed any number of times but once; ``partial`` allows for none."""
    for place, count in np.ndenumerate(adds):
        _refuse_count(plan.name(*place), count, plan, partial)


def _refuse_count(name: str, count: float, plan: Plan, partial: bool) -> None:
    if count == 0 and not partial:
        raise Refused(
            f"{name} was not passed in this step, and the plan has {plan}; call watch.add there (a stop_gradient after it cuts it "
            "off too), take it out of the plan, or allow for it by partial=True"
        )
    if count > 1 and count == round(count):
        raise Refused(
            f"{name} was passed {count:.0f} times in one step, and every add needs a block and site of its own"
        )
    if count not in (0, 1):
        raise Refused(
            f"{name} was passed {count:g} times: hand over the gradient of the taps as jax.grad gives it, not scaled"
        )
