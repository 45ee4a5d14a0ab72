"""Which carry can be computed backwards? A pair of streams, each updated from the other, whose earlier states need no memory."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from resjax.residual.carry import Around, Carry, CarrySpec, Flow
from resjax.residual.norms import NormDefaults
from resjax.residual.precision import exact, plus
from resjax.residual.site import Site


@dataclass(frozen=True)
class Pair(CarrySpec):
    """Reversible residuals (Gomez et al. 2017, 1707.04585; Kitaev et al. 2020, 2001.04451): ``a' = a + F(b)``, ``b' = b + G(a')``.

    Both halves start as the embedding; close is their mean (Trax concatenates them before the final norm, which doubles the
    head). Even sites of a block write a, odd ones b, so a block has an even number of sites.
    """

    undoable: ClassVar = True
    carries: ClassVar = "two streams"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> "PairSite":
        return PairSite()

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> tuple[jax.Array, jax.Array]:
        return embedded, embedded

    def close(self, ends: Any, stream: Any) -> jax.Array:
        a, b = (exact(half) for half in stream)
        return (0.5 * (a + b)).astype(stream[0].dtype)

    def refuse(self, kinds: tuple[str, ...], width: int) -> None:
        if len(kinds) % 2:
            raise ValueError(f"reversible residuals need an even number of sites a block, and {len(kinds)} is odd")


class PairSite(Carry):
    def read(self, stream: Any, site: Site) -> tuple[jax.Array, None]:
        return stream[1 - site.pos % 2], None

    def write(self, stream: Any, memo: None, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        half = around.site.pos % 2
        kept = stream[half]
        after = plus(kept, update)
        pair = (after, stream[1]) if half == 0 else (stream[0], after)
        return pair, Flow(kept, after, kept, update, stream[1 - half], kept)

    def undo(self, stream: Any, update: jax.Array | None, site: Site) -> Any:
        half = site.pos % 2
        before = plus(stream[half], None if update is None else -update)
        return (before, stream[1]) if half == 0 else (stream[0], before)
