"""How is a network gone through block by block? Its blocks one at a time or many, altered, reordered, read out, differentiated.

Every kind of run of blocks is compiled once, whatever the block and the number of blocks: which blocks is data. Works for any scheme:
n streams, buffers of earlier outputs, outer carries, values that blocks hand on.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resjax.block import Block, Layer, whole
from resjax.models.lm import LM, loss
from resjax.residual import Chain, Context, Run
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
        self.model, self.context, self.stack = model, model.told(replace(context, keep=None)), model.stack
        self.depth, self.sites = self.stack.depth, len(self.stack.kinds)
        self.plan = self.stack.plan
        self.parts = [
            Part(blocks, self.stack.numbers(run, context))
            for run, blocks in zip(self.plan, self.stack.runs, strict=True)
        ]
        self.whole = jnp.ones((self.depth, self.sites), jnp.float32)  # of ``keep``: nothing is taken away
        self._open = jax.jit(self._opened)
        self._blocks = jax.jit(self._through, static_argnums=0)
        self._seen = {name: jax.jit(f) for name, f in (("read", self._read), ("closed", self._closed))}
        self._logits = jax.jit(lambda model, seen: model.logits(model.final(seen, self.context)))
        self._loss = jax.jit(lambda model, seen, targets: loss(model.logits(model.final(seen, self.context)), targets))
        self._pull = jax.jit(self._pulled, static_argnums=0)
        self._push = jax.jit(self._pushed, static_argnums=0)
        self._pull_seen = {
            "read": jax.jit(
                lambda part, i, place, stream, g: pulled(lambda s: self._read(part, i, place, s), stream, g)
            ),
            "closed": jax.jit(lambda ends, stream, g: pulled(lambda s: self._closed(ends, s), stream, g)),
        }
        self._gradient = jax.jit(
            jax.grad(lambda model, stream, targets: self._nats(model, stream, targets) * targets.size, argnums=1)
        )

    # ------------------------------------------------------------------ forward

    def open(self, tokens: np.ndarray | jax.Array) -> State:
        """Before the first block; tokens (B, T)."""
        return State(0, self._open(self.model, jnp.asarray(tokens)), {})

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
                stream, side = self._blocks(handed(run), part, given, stream, side, low, low - run.first, high - low)
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
        stream, side = self._blocks(handed(run), moved, self.whole, *state.parts, state.place, 0, 1)
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
        name, arguments = self._sight(state)
        return self._seen[name](*arguments, state.stream)

    def logits(self, seen: jax.Array) -> jax.Array:
        """(B, T, V) from a stream as one array, by the final norm and the head: the logit lens."""
        return self._logits(self.model, seen)

    def loss(self, seen: jax.Array, targets: np.ndarray | jax.Array) -> float:
        """Mean nats per token of :meth:`logits`; targets (B, T)."""
        return float(self._loss(self.model, seen, jnp.asarray(targets)))

    # ------------------------------------------------------------------ derivatives

    def gradient(self, end: State, targets: np.ndarray | jax.Array) -> tuple[Any, dict]:
        """The gradient of the summed loss at the state after the last block, as :attr:`State.parts`.

        Summed, not mean: a token's share of a mean over thousands is below what float16 holds.
        """
        stream = self._gradient(self.model, end.stream, jnp.asarray(targets))
        return stream, jax.tree.map(jnp.zeros_like, end.side)

    def pull(self, state: State, cotangent: tuple[Any, dict]) -> tuple[Any, dict]:
        """The vector-Jacobian product of the next block: cotangent of the parts after it -> of those before it."""
        run, part, i = self.at(state.place)
        stream, side = self._pull(handed(run), part, i, *state.parts, state.place, cotangent)
        return self._written(stream, state.place), side

    def push(self, state: State, tangent: tuple[Any, dict]) -> tuple[Any, dict]:
        """The Jacobian-vector product of the next block: tangent of the parts before it -> of those after it.

        Raises:
          NotImplementedError: the carry is a buffer of earlier outputs, which has a rule for the other direction only.
        """
        if self.stack.carry.rows:
            raise NotImplementedError("a buffer of earlier outputs has no Jacobian-vector product; use pull")
        run, part, i = self.at(state.place)
        return self._push(handed(run), part, i, *state.parts, state.place, tangent)

    def pull_seen(self, state: State, cotangent: jax.Array) -> Any:
        """Cotangent of :meth:`seen` (B, T, D) -> that of the state's stream."""
        name, arguments = self._sight(state)
        return self._written(self._pull_seen[name](*arguments, state.stream, cotangent), state.place)

    # ------------------------------------------------------------------ inside

    def at(self, block: int) -> tuple[Run, Part, int]:
        """The run that a block is in, and its number there."""
        for run, part in zip(self.plan, self.parts, strict=True):
            if run.first <= block < run.first + run.length:
                return run, part, block - run.first
        raise IndexError(f"block {block} is not one of 0..{self.depth - 1}")

    def _opened(self, model: LM, tokens: jax.Array) -> Any:
        stream = self.stack.carry.open(model.stack.ends, model.embedded(tokens, self.context), self.stack.units)
        return stored(stream, -1, self.context)

    def _through(
        self,
        names: tuple[str, ...],
        part: Part,
        keep: jax.Array,
        stream: Any,
        side: dict,
        place: Any,
        i: Any,
        count: Any,
    ) -> tuple[Any, dict]:
        """``count`` blocks of a part from its ``i``-th on, which stand at ``place`` and after."""
        context = replace(self.context, keep=keep)
        if jax.tree.leaves(part)[0].shape[0] == 1:  # without a loop: the first block hands on what was not there before
            return one_block(names, part, 0, stream, side, place, context)

        def step(k: Any, carried: tuple[Any, dict]) -> tuple[Any, dict]:
            return one_block(names, part, i + k, *carried, place + k, context)

        return jax.lax.fori_loop(0, count, step, (stream, side))

    def _pulled(
        self, names: tuple[str, ...], part: Part, i: Any, stream: Any, side: dict, place: Any, cotangent: tuple
    ) -> tuple[Any, dict]:
        def step(parts: tuple[Any, dict]) -> tuple[Any, dict]:
            return one_block(names, part, i, parts[0], parts[1], place, self.context)

        return pulled(step, (stream, side), cotangent)

    def _pushed(
        self, names: tuple[str, ...], part: Part, i: Any, stream: Any, side: dict, place: Any, tangent: tuple
    ) -> tuple[Any, dict]:
        def step(parts: tuple[Any, dict]) -> tuple[Any, dict]:
            return one_block(names, part, i, parts[0], parts[1], place, self.context)

        return jax.jvp(step, ((stream, side),), (tangent,))[1]

    def _sight(self, state: State) -> tuple[str, tuple]:
        """Which program shows the stream, and what it is told besides."""
        if not self.stack.carry.rows or state.place == self.depth:
            return "closed", (self.stack.ends,)
        _, part, i = self.at(state.place)
        return "read", (part, i, state.place)

    def _read(self, part: Part, i: Any, place: Any, stream: Any) -> jax.Array:
        block = jax.tree.map(lambda leaf: leaf[i], part.blocks)
        places = block.places(place)
        if block.outer is None:
            return block.sites[0].carry.read(stream, places[0])[0]
        read = block.outer.read(stream, whole(places))[0]
        return read["r"] if isinstance(read, dict) else read

    def _closed(self, ends: Any, stream: Any) -> jax.Array:
        return self.stack.carry.close(ends, stream)

    def _nats(self, model: LM, stream: Any, targets: jax.Array) -> jax.Array:
        return loss(model.logits(model.final(self._closed(model.stack.ends, stream), self.context)), targets)

    def _written(self, gradient: Any, place: int) -> Any:
        """The gradient of a buffer, zeros in the rows that are not written before block ``place``: they hold what is of no account."""
        if not (self.stack.carry.rows and self.stack.carry.undoable):
            return gradient
        rows = 1 + place * self.stack.units // self.depth
        return jnp.where((jnp.arange(len(gradient)) < rows).reshape(-1, *(1,) * (gradient.ndim - 1)), gradient, 0)


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
