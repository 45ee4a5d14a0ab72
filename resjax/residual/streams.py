"""What is carried from site to site, and how does a branch's update get into it? Here: one additive stream.

A carry has two phases, because probes, gradients of history schemes and data-dependent starts need the gap between them:
``read`` hands the branch its input, ``write`` puts the update back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from resjax.residual.precision import total

GainAt = Callable[
    [str, jax.Array], jax.Array | None
]  # name of a gain, array -> array times the gain; None where the gain is 0
NormAt = Callable[[str, jax.Array], jax.Array]


class Flow(NamedTuple):
    """What passed through one site; arrays (batch, ..., width), or None where the scheme has no such thing.

    Attributes:
      before, after: the stream before and after the site.
      kept: what the update is added to (``skip * H + entry * H_block``); None where nothing is kept.
      update: what is added, as added.
      read: the branch's input before its norm.
    """

    before: jax.Array
    after: jax.Array
    kept: jax.Array | None
    update: jax.Array | None
    read: jax.Array


class CarrySpec(Protocol):
    """The frozen description of a carry."""

    @property
    def uses(self) -> frozenset[str]:
        """Which of skip, entry and norm_after the carry honours; a scheme that sets others is refused."""
        ...

    def open(self, embedded: jax.Array) -> Any: ...

    def read(self, stream: Any) -> tuple[jax.Array, Any]: ...

    def write(
        self, stream: Any, memo: Any, update: jax.Array | None, gain: GainAt, norm: NormAt, entry: Any | None
    ) -> tuple[Any, Flow]: ...

    def close(self, stream: Any) -> jax.Array: ...


@dataclass(frozen=True)
class OneStream:
    """``H' = N_after( skip * H + entry * H_block + y )``; ``entry`` acts at a block's last site only."""

    uses = frozenset({"skip", "entry", "norm_after"})

    def open(self, embedded: jax.Array) -> jax.Array:
        return embedded

    def read(self, stream: jax.Array) -> tuple[jax.Array, None]:
        return stream, None

    def write(
        self,
        stream: jax.Array,
        memo: None,
        update: jax.Array | None,
        gain: GainAt,
        norm: NormAt,
        entry: jax.Array | None,
    ) -> tuple[jax.Array, Flow]:
        kept = total(gain("skip", stream), None if entry is None else gain("entry", entry))
        joined = total(kept, update)
        after = norm("norm_after", jnp.zeros_like(stream) if joined is None else joined)
        return after, Flow(stream, after, kept, update, stream)

    def close(self, stream: jax.Array) -> jax.Array:
        return stream
