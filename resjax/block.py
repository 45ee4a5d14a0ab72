"""What is one block? Its sites in order, probed and tapped; as a whole or in the units that a backward pass can take back."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from resjax.residual import Connection, Context, Site, tap
from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.connection import coin, measured, stored
from resjax.residual.inside import Side
from resjax.residual.precision import exact, rounded

Probes = dict[str, jax.Array]
STREAM = "stream"  # the name that the stream after each site bears in the program, for checkpoint policies and for reading its dtype


class Layer(NamedTuple):
    """What one block is told, beside the context.

    Attributes:
      index: the block, from 0; possibly traced.
      numbers: the gains that are rules, one dict a site.
      taps: (sites,) zeros for the gradient norm of the stream after each site; None = no taps.
    """

    index: Any
    numbers: list[dict[str, jax.Array]]
    taps: jax.Array | None


class Block(nnx.Module):
    """The sites of one block. In a stack every leaf has the run's length in front.

    A unit is what is added to the stream at once: a site, or, under an outer carry, the whole block.
    """

    def __init__(self, sites: list[Connection], outer: Carry | None, spec: CarrySpec, places: tuple[Site, ...]):
        self.sites = nnx.List(sites)
        self.outer = outer
        self.spec = spec  # of the carry that the units write to
        self._places = places  # of block 0

    def places(self, index: Any) -> list[Site]:
        """The sites, when this is block ``index`` (possibly traced)."""
        return [site.on(index) for site in self._places]

    @property
    def units(self) -> int:
        return len(self.sites) if self.outer is None else 1

    def __call__(self, stream: Any, layer: Layer, context: Context) -> tuple[Any, Side, Probes]:
        """The stream after the block, what it hands to others, and what was measured: (sites,) a site probe, scalars for the block."""
        handed: Side = {}
        entry, rows = stream, []
        for unit in range(self.units):
            update, memo, given, seen = self.produce(unit, stream, layer, context)
            stream, probes = self.write(unit, stream, memo, update, entry, layer, context)
            handed |= given
            rows.append(seen | probes)
        if self.outer is not None:
            return stream, handed, rows[0]
        probes = stacked(rows)
        if context.measure_block is not None and self.spec.blockwise:
            probes |= measured(context, context.measure_block, entry, stream)
        return stream, handed, probes

    def produce(self, unit: int, stream: Any, layer: Layer, context: Context) -> tuple[Any, Any, Side, Probes]:
        """A unit's update, what its ``write`` wants to know, what it hands to other blocks, and its probes so far."""
        places = self.places(layer.index)
        if self.outer is None:
            with scope(places[unit]):
                seen: Probes = {}
                return *self.sites[unit].produce(stream, places[unit], layer.numbers[unit], context, seen=seen), seen
        with jax.named_scope("read"):
            read, memo = self.outer.read(stream, whole(places))
        views = {name: x for name, x in read.items() if name != "r"} if isinstance(read, dict) else None
        inner = entry = read["r"] if isinstance(read, dict) else read
        handed: Side = {}
        rows = []
        for i, (connection, site) in enumerate(zip(self.sites, places, strict=True)):
            given_views = views if i == 0 else None  # the first sub-layer, attention, reads the views
            last = entry if site.last_in_block else None
            with scope(site):
                seen = {}
                update, about, given = connection.produce(inner, site, layer.numbers[i], context, given_views, seen)
                inner, flow = connection.write(inner, about, update, site, layer.numbers[i], last, context)
            inner = watched(inner, i, layer, context)
            handed |= given
            rows.append(seen | probed(context, connection.carry, flow, site))
        probes = stacked(rows)
        if context.measure_block is not None:
            probes |= measured(context, context.measure_block, entry, inner)
        return inner, memo, handed, probes

    def write(
        self, unit: int, stream: Any, memo: Any, update: Any, entry: Any, layer: Layer, context: Context
    ) -> tuple[Any, Probes]:
        """The stream with the unit's update in it, and the probes of that."""
        places = self.places(layer.index)
        if self.outer is not None:
            with jax.named_scope("add"):
                stream, _ = self.outer.write(stream, memo, update, self._around(whole(places), context))
            return stored(stream, whole(places).s, context), {}
        site = places[unit]
        if self.spec.rows and update is not None:
            update = watched(update, unit, layer, context)
        last = entry if site.last_in_block else None
        with scope(site):
            stream, flow = self.sites[unit].write(stream, memo, update, site, layer.numbers[unit], last, context)
        if not self.spec.rows:
            stream = watched(stream, unit, layer, context)
        return stream, probed(context, self.sites[unit].carry, flow, site)

    def undo(self, unit: int, stream: Any, update: Any, layer: Layer) -> Any:
        """The stream before the unit, from that after it."""
        places = self.places(layer.index)
        if self.outer is not None:
            return self.outer.undo(stream, update, whole(places))
        return self.sites[unit].carry.undo(stream, update, places[unit])

    def _around(self, site: Site, context: Context) -> Around:
        """What an outer carry is lent: no gains and norms of its own."""
        first = site.s * len(self.sites)
        return Around(lambda name, x: x, lambda name, x: x, None, site, partial(coin, first, context))


def scope(site: Site) -> Any:
    """The name that a site's operations bear in the program; see :mod:`resjax.health.places`."""
    return jax.named_scope(f"site_{site.pos}_{site.kind}")


def whole(places: list[Site]) -> Site:
    """A block as one site."""
    return Site("block", 0, 1, places[0].depth, places[0].block, places[0].step)


def watched(x: Any, unit: int, layer: Layer, context: Context) -> Any:
    """``x``, named in the program, with its gradient norm going to the unit's tap."""
    x = checkpoint_name(x, STREAM)
    if layer.taps is None:
        return x
    number = layer.taps[unit]
    return jax.tree.map(lambda part: tap(part, number, jnp.asarray(context.on)), x)


def stacked(rows: list[Probes]) -> Probes:
    return {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}


def probed(context: Context, carry: Carry, flow: Flow, site: Site) -> Probes:
    """The probes of one site; what they look at is worked out in the steps that measure only."""
    if context.measure is None:
        return {}
    measure = context.measure
    return measured(context, lambda *parts: measure(with_stored(carry.viewed(Flow(*parts)), site, context)), *flow)


def with_stored(flow: Flow, site: Site, context: Context) -> Flow:
    """The flow, with what is stored of its add where the context says how sites store."""
    if context.store is None or flow.kept is None or flow.update is None:
        return flow
    kept = context.store(flow.kept, site.s)
    total = rounded(exact(kept) + exact(flow.update), kept.dtype).astype(kept.dtype)
    return flow._replace(stored=(kept, context.store(total, site.s)))
