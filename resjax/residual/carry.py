"""What is carried from site to site, and how does a branch's update get into it? The two phases that every carry has.

``read`` hands the branch its input, ``write`` puts the update back. Probes, gradients of history schemes and data-dependent starts
need the gap between them.

A carry is a frozen record (the :class:`CarrySpec`, part of a scheme) that builds one module a site (the :class:`Carry`, with
whatever parameters the scheme has there). What is carried, S, is any pytree; the one-stream carry's is one array.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from resjax.residual.norms import NormDefaults
from resjax.residual.site import Site


class Flow(NamedTuple):
    """What passed through one site; arrays (batch, ..., width), or None where the scheme has no such thing.

    Of several streams, what is kept and added may be lists until the carry's ``viewed``, which is called in measuring steps only.

    Attributes:
      before, after: the stream before and after the site, as the carry views it.
      kept: what the update is added to, term by term (``skip * H + entry * H_block``; of several streams, all of them, in
        front); None where nothing is kept or nothing is added.
      update: what is added, as added (of several streams, what each gets).
      read: the branch's input before its norm.
      beside: what the update is compared with in size; ``kept`` where there is one.
      stored: of ``kept`` and of ``kept + update`` what a site would store, where the context says how (``Context.store``); None where
        it does not, so that the dtype alone decides. Worked out in measuring steps only.
    """

    before: jax.Array
    after: jax.Array
    kept: Any
    update: Any
    read: jax.Array
    beside: Any
    stored: Any = None


class Unmoved(Flow):
    """A :class:`Flow` where ``before`` and ``after`` are both what the site read: nothing is a stream there that the site changes."""

    __slots__ = ()


class Around(NamedTuple):
    """What the wrapper lends a carry at one site.

    Attributes:
      gain: name of a gain and an array -> the array times the gain; None where the gain is 0.
      norm: name of a norm and an array -> the normalised array.
      entry: the stream at the block's start, at the block's last site only; else None.
      site: which site, its block possibly traced.
      coin: probability -> one traced boolean for the whole batch, drawn anew at each step and site; True outside training.
      base: what the skip starts from where that is not the stream itself (its normalised form); else None.
    """

    gain: Callable[[str, jax.Array], jax.Array | None]
    norm: Callable[[str, jax.Array], jax.Array]
    entry: jax.Array | None
    site: Site
    coin: Callable[[float], jax.Array]
    base: jax.Array | None = None


class Carry(nnx.Module):
    """One site's part of a carry, with its parameters.

    Attributes:
      gated: the branch's output is a proposal to be mixed in, so that a branch without output does not leave the stream as it is.
    """

    gated: ClassVar[bool] = False

    def read(self, stream: Any, site: Site) -> tuple[Any, Any]:
        """The branch's input, and what ``write`` wants to know of how it was read.

        One array; an outer carry with ``views`` gives a dict of the skip 'r' and the views.
        """
        raise NotImplementedError

    def write(self, stream: Any, memo: Any, update: jax.Array | None, around: Around) -> tuple[Any, Flow]:
        """The stream after the site, and what flowed. ``update`` is None where the branch's gain is 0."""
        raise NotImplementedError

    def viewed(self, flow: Flow) -> Flow:
        """The flow as probes see it; called in the steps that measure only, so what costs something is worked out here."""
        return flow

    def undo(self, stream: Any, update: jax.Array | None, site: Site) -> Any:
        """The stream before the site, from that after it. The law: ``read`` gives the same of both. Undoable carries only."""
        raise NotImplementedError


@dataclass(frozen=True)
class CarrySpec:
    """The frozen description of a carry; the defaults are those of one array that is carried as it is.

    Attributes:
      uses: which of skip, entry, norm_after and keep_normed it honours; a scheme that sets others is refused.
      lacks: what of the wrapper has no meaning for it, such as drop.
      undoable: the stream before a site can be had from that after it, so a stack need not store it; see ``undo``.
      rows: what is carried is a buffer of outputs: gradients are watched at what is written, not at the whole.
      blockwise: what is carried is one array, so that a block's change of it can be measured.
      own_norms: it has norms of its own.
      views: names of what an outer carry's ``read`` gives the attention of a block, beside the skip 'r'; empty = one array.
      carries: in words, for listings.
    """

    uses: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[frozenset[str]] = frozenset()
    undoable: ClassVar[bool] = False
    rows: ClassVar[bool] = False
    blockwise: ClassVar[bool] = False
    own_norms: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ()
    carries: ClassVar[str] = "one stream"

    def build(self, width: int, site: Site, norms: NormDefaults, key: jax.Array) -> Carry:
        """The module of one site; ``site.block`` may be traced."""
        raise NotImplementedError

    def open(self, ends: Any, embedded: jax.Array, sites: int) -> Any:
        """The stream before the first of ``sites`` sites, from the embedding (batch, ..., width); ``ends`` as built below."""
        return embedded

    def build_ends(self, width: int, sites: int, norms: NormDefaults, key: jax.Array) -> nnx.Module | None:
        """The parameters of ``open`` and ``close``, if they have any."""
        return None

    def close(self, ends: Any, stream: Any) -> jax.Array:
        """One array (batch, ..., width) for the final norm and the head."""
        return stream

    @property
    def whole_from(self) -> int:
        """From how many sites on all of it acts: a test with fewer would see a part of it only."""
        return 1

    def refuse(self, kinds: tuple[str, ...], width: int) -> None:
        """Raise ValueError where the carry cannot serve blocks of these sub-layers at this width."""
