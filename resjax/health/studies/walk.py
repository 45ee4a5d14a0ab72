"""How is a network gone through block by block? Its blocks one at a time or many, altered, reordered, read out, differentiated.

Every kind of run of blocks is compiled once, whatever the block and the number of blocks: which blocks is data, and so are the
weights, so that all models of one form are gone through by the same programs (see :mod:`resjax.health.studies.told`). Works for any
scheme: n streams, buffers of earlier outputs, outer carries, values that blocks hand on.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resjax.block import Block, Layer, whole
from resjax.health.studies.told import Told
from resjax.models.lm import LM, loss
from resjax.residual import CarrySpec, Chain, Context, Run
from resjax.residual.connection import stored
from resjax.residual.inside import Keep


@dataclass(frozen=True)
class State:
    """The network's state before one of its blocks.

    Attributes:
      place: that block, from 0; the depth after the last.
      stream: what is carried, as the scheme has it; see :meth:`Walk.seen` for one array.
      side: what earlier blocks hand to later ones, by point.
    """

    place: int
    stream: Any
    side: dict[str, jax.Array]

    @property
    def parts(self) -> tuple[Any, dict[str, jax.Array]]:
        """All that the rest of the network depends on, as a pytree."""
        return self.stream, self.side


class Part(NamedTuple):
    """Blocks of one form with what they are told: every leaf has their number in front.

    Attributes:
      blocks: their parameters.
      numbers: the gains that are rules, one dict a site.
    """

    blocks: Block
    numbers: list[dict[str, jax.Array]]


class Walk:
    """A language model, to be gone through block by block.

    Args:
      model: the model.
      context: as for a forward pass (evaluation, unless it says otherwise); ``keep`` is given to :meth:`to`, not here.
    """

    def __init__(self, model: LM, context: Context):
        self.model, self.stack = model, model.stack
        self.told = Told.of(context, model.shape.rounding)
        self.depth, self.sites = self.stack.depth, len(self.stack.kinds)
        self.plan = self.stack.plan
        self.parts = [
            Part(blocks, self.stack.numbers(run, context))
            for run, blocks in zip(self.plan, self.stack.runs, strict=True)
        ]
        self.whole = jnp.ones((self.depth, self.sites), jnp.float32)  # of ``keep``: nothing is taken away

    # ------------------------------------------------------------------ forward

    def open(self, tokens: np.ndarray | jax.Array) -> State:
        """Before the first block; tokens (B, T)."""
        return State(0, _opened(self.told, self.model, jnp.asarray(tokens)), {})

    def to(self, state: State, place: int, keep: jax.Array | np.ndarray | None = None) -> State:
        """On to before block ``place``, at or after where ``state`` is.

        ``keep`` (depth, sites) are factors on what each site adds: 0 takes its update away. Of a gate, whose branch only proposes, it
        is what changes that is taken away.
        """
        if not state.place <= place <= self.depth:
            raise ValueError(f"place is {place}; from {state.place} it can be {state.place} to {self.depth}")
        given = self.whole if keep is None else jnp.asarray(keep, jnp.float32)
        stream, side = state.parts
        for run, part in zip(self.plan, self.parts, strict=True):
            low, high = max(state.place, run.first), min(place, run.first + run.length)
            if low < high:
                first, count = low - run.first, high - low
                stream, side = _through(handed(run), self.told, part, given, stream, side, low, first, count)
        return State(place, stream, side)

    def to_end(self, state: State, keep: jax.Array | np.ndarray | None = None) -> State:
        """On to after the last block."""
        return self.to(state, self.depth, keep)

    def other(self, state: State, block: int) -> State | None:
        """As if block ``block`` stood at the place that comes next: its branches, norms and gains, and the carry's parameters.

        Where the carry is a buffer of earlier outputs, its weights belong to rows, not to the block, and stay at their place. None:
        the block wants what earlier blocks would have handed on, and they have not yet.
        """
        run, part, i = self.at(block)
        if any(name not in state.side for name in wanted(run)):
            return None
        moved = jax.tree.map(lambda leaf: leaf[i : i + 1], part)
        if self.stack.carry.rows:
            _, here, j = self.at(state.place)
            home = jax.tree.map(lambda leaf: leaf[j : j + 1], here)
            if home.blocks.outer is not None:
                moved.blocks.outer = home.blocks.outer
            else:
                for site, own in zip(moved.blocks.sites, home.blocks.sites, strict=True):
                    site.carry = own.carry
        stream, side = _through(handed(run), self.told, moved, self.whole, *state.parts, state.place, 0, 1)
        return State(state.place + 1, stream, side)

    def states(self, tokens: np.ndarray | jax.Array) -> list[State]:
        """All states of a forward pass, depth + 1 of them.

        A buffer of earlier outputs is one array that all of them share: rows that are not written yet are never read.
        """
        found = [self.open(tokens)]
        for place in range(1, self.depth + 1):
            found.append(self.to(found[-1], place))
        if self.stack.carry.rows and self.stack.carry.undoable:
            found = [replace(state, stream=found[-1].stream) for state in found]
        return found

    # ------------------------------------------------------------------ what is there to see

    def seen(self, state: State) -> jax.Array:
        """The stream as one array (B, T, D): what close would make of it; of a buffer of earlier outputs, what the next block reads."""
        if self._is_closed(state):
            return _closed(self.stack.carry, self.stack.ends, state.stream)
        _, part, i = self.at(state.place)
        return _read(part, i, state.place, state.stream)

    def logits(self, seen: jax.Array) -> jax.Array:
        """(B, T, V) from a stream as one array, by the final norm and the head: the logit lens."""
        return _logits(self.told, self.model, seen)

    def loss(self, seen: jax.Array, targets: np.ndarray | jax.Array) -> float:
        """Mean nats per token of :meth:`logits`; targets (B, T)."""
        return float(_loss(self.told, self.model, seen, jnp.asarray(targets)))

    # ------------------------------------------------------------------ derivatives

    def gradient(self, end: State, targets: np.ndarray | jax.Array) -> tuple[Any, dict]:
        """The gradient of the summed loss at the state after the last block, as :attr:`State.parts`.

        Summed, not mean: a token's share of a mean over thousands is below what float16 holds.
        """
        stream = _gradient(self.told, self.model, end.stream, jnp.asarray(targets))
        return stream, jax.tree.map(jnp.zeros_like, end.side)

    def pull(self, state: State, cotangent: tuple[Any, dict]) -> tuple[Any, dict]:
        """The vector-Jacobian product of the next block: cotangent of the parts after it -> of those before it."""
        run, part, i = self.at(state.place)
        stream, side = _pulled(handed(run), self.told, part, i, *state.parts, state.place, cotangent)
        return self._written(stream, state.place), side

    def push(self, state: State, tangent: tuple[Any, dict]) -> tuple[Any, dict]:
        """The Jacobian-vector product of the next block: tangent of the parts before it -> of those after it.

        Raises:
          NotImplementedError: the carry is a buffer of earlier outputs, which has a rule for the other direction only.
        """
        if self.stack.carry.rows:
            raise NotImplementedError("a buffer of earlier outputs has no Jacobian-vector product; use pull")
        run, part, i = self.at(state.place)
        return _pushed(handed(run), self.told, part, i, *state.parts, state.place, tangent)

    def pull_seen(self, state: State, cotangent: jax.Array) -> Any:
        """Cotangent of :meth:`seen` (B, T, D) -> that of the state's stream."""
        if self._is_closed(state):
            gradient = _pulled_closed(self.stack.carry, self.stack.ends, state.stream, cotangent)
        else:
            _, part, i = self.at(state.place)
            gradient = _pulled_read(part, i, state.place, state.stream, cotangent)
        return self._written(gradient, state.place)

    # ------------------------------------------------------------------ inside

    def at(self, block: int) -> tuple[Run, Part, int]:
        """The run that a block is in, and its number there."""
        for run, part in zip(self.plan, self.parts, strict=True):
            if run.first <= block < run.first + run.length:
                return run, part, block - run.first
        raise IndexError(f"block {block} is not one of 0..{self.depth - 1}")

    def _is_closed(self, state: State) -> bool:
        """Whether the stream is shown as close makes it, and not as the next block reads it."""
        return not self.stack.carry.rows or state.place == self.depth

    def _written(self, gradient: Any, place: int) -> Any:
        """The gradient of a buffer, zeros in the rows that are not written before block ``place``: they hold what is of no account."""
        if not (self.stack.carry.rows and self.stack.carry.undoable):
            return gradient
        rows = 1 + place * self.stack.units // self.depth
        return jnp.where((jnp.arange(len(gradient)) < rows).reshape(-1, *(1,) * (gradient.ndim - 1)), gradient, 0)


# ---------------------------------------------------------------------- programs


@jax.jit
def _opened(told: Told, model: LM, tokens: jax.Array) -> Any:
    stack = model.stack
    stream = stack.carry.open(stack.ends, model.embedded(tokens, told.context), stack.units)
    return stored(stream, -1, told.context)


@partial(jax.jit, static_argnums=0)
def _through(
    names: tuple[str, ...],
    told: Told,
    part: Part,
    keep: jax.Array,
    stream: Any,
    side: dict,
    place: Any,
    i: Any,
    count: Any,
) -> tuple[Any, dict]:
    """``count`` blocks of a part from its ``i``-th on, which stand at ``place`` and after."""
    context = replace(told.context, keep=keep)
    if jax.tree.leaves(part)[0].shape[0] == 1:  # without a loop: the first block hands on what was not there before
        return one_block(names, part, 0, stream, side, place, context)

    def step(k: Any, carried: tuple[Any, dict]) -> tuple[Any, dict]:
        return one_block(names, part, i + k, *carried, place + k, context)

    return jax.lax.fori_loop(0, count, step, (stream, side))


@partial(jax.jit, static_argnums=0)
def _pulled(
    names: tuple[str, ...], told: Told, part: Part, i: Any, stream: Any, side: dict, place: Any, cotangent: tuple
) -> tuple[Any, dict]:
    def step(parts: tuple[Any, dict]) -> tuple[Any, dict]:
        return one_block(names, part, i, parts[0], parts[1], place, told.context)

    return pulled(step, (stream, side), cotangent)


@partial(jax.jit, static_argnums=0)
def _pushed(
    names: tuple[str, ...], told: Told, part: Part, i: Any, stream: Any, side: dict, place: Any, tangent: tuple
) -> tuple[Any, dict]:
    def step(parts: tuple[Any, dict]) -> tuple[Any, dict]:
        return one_block(names, part, i, parts[0], parts[1], place, told.context)

    return jax.jvp(step, ((stream, side),), (tangent,))[1]


@jax.jit
def _read(part: Part, i: Any, place: Any, stream: Any) -> jax.Array:
    block = jax.tree.map(lambda leaf: leaf[i], part.blocks)
    places = block.places(place)
    if block.outer is None:
        return block.sites[0].carry.read(stream, places[0])[0]
    read = block.outer.read(stream, whole(places))[0]
    return read["r"] if isinstance(read, dict) else read


@jax.jit
def _pulled_read(part: Part, i: Any, place: Any, stream: Any, cotangent: jax.Array) -> Any:
    return pulled(lambda s: _read(part, i, place, s), stream, cotangent)


@partial(jax.jit, static_argnums=0)
def _closed(carry: CarrySpec, ends: Any, stream: Any) -> jax.Array:
    return carry.close(ends, stream)


@partial(jax.jit, static_argnums=0)
def _pulled_closed(carry: CarrySpec, ends: Any, stream: Any, cotangent: jax.Array) -> Any:
    return pulled(lambda s: carry.close(ends, s), stream, cotangent)


@jax.jit
def _logits(told: Told, model: LM, seen: jax.Array) -> jax.Array:
    return model.logits(model.final(seen, told.context))


@jax.jit
def _loss(told: Told, model: LM, seen: jax.Array, targets: jax.Array) -> jax.Array:
    return loss(model.logits(model.final(seen, told.context)), targets)


@jax.jit
def _gradient(told: Told, model: LM, stream: Any, targets: jax.Array) -> Any:
    """Of the loss summed over tokens."""

    def summed(stream: Any) -> jax.Array:
        seen = model.stack.carry.close(model.stack.ends, stream)
        return loss(model.logits(model.final(seen, told.context)), targets) * targets.size

    return jax.grad(summed)(stream)


def one_block(
    names: tuple[str, ...], part: Part, i: Any, stream: Any, side: dict, place: Any, context: Context
) -> tuple[Any, dict]:
    """The ``i``-th block of a part, standing at ``place``; ``names`` are of what it hands on."""
    block, numbers = jax.tree.map(lambda leaf: leaf[i], part)
    stream, given, _ = block(stream, Layer(jnp.asarray(place, jnp.int32), numbers, None), replace(context, side=side))
    return stream, side | {name: given[name] for name in names}


def pulled(f: Any, at: Any, cotangent: Any) -> Any:
    return jax.vjp(f, at)[1](cotangent)[0]


def handed(run: Run) -> tuple[str, ...]:
    """Names of what the blocks of a run hand to those after them."""
    shares = {name: share for scheme in run.sites for name, share in scheme.share.items()}
    return tuple(sorted(name for name, share in shares.items() if isinstance(share, Chain | Keep)))


def wanted(run: Run) -> tuple[str, ...]:
    """Names of what the blocks of a run want from those before them."""
    shares = {name: share for scheme in run.sites for name, share in scheme.share.items()}
    return tuple(sorted(name for name, share in shares.items() if not isinstance(share, Keep)))
