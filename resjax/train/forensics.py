"""Which value of a step was the first that is not finite, and where? The step's gradient, searched operation by operation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax.health.places import Place, place
from resjax.health.walk import Origin, search
from resjax.train.assemble import Parts
from resjax.train.leaves import named
from resjax.train.state import TrainState
from resjax.train.step import make_gradient

LISTED = 6  # blocks or rows of a parameter that are named
RUNS, BATCH = "params/stack/runs/", "batch"
SUM_OF_GRADIENTS = "add_any"  # JAX's own, where a value is used more than once
# Parts that may be the first to read the stream; and those behind the branch, whose gradient goes past it too.
ENTERED = ("read", "norm_in", "branch", "queries_keys_values", "hidden")
JOINED = ("add", "norm_after")


@dataclass(frozen=True)
class First:
    """The first value that is not finite.

    Attributes:
      direction: 'forward' or 'backward'; the loss is finite in the second case.
      block: from 0; None outside of the blocks.
      site: sub-layer, such as 'mlp'.
      part: of the sub-layer, or of the model's ends; see :data:`resjax.health.places.PARTS`.
      kind: '+Inf', '-Inf' or 'NaN'. Where there are some of each it is the infinity that there is more of: a product of
        matrices that overflows has NaN beside it, as infinities are added up.
      nan, plus_inf, minus_inf, size: how many elements of the result are which, and how many it has.
      dtype: of the result.
      operation: the operation that gave it; '' for a parameter or a constant.
      largest_before: largest finite magnitude among its operands.
      largest_beside: largest finite magnitude in the same result.
      unrounded: where float16 or bfloat16 overflowed, the largest magnitude that the operation gives in float32.
      parameter: path of the parameter (or other part of the state) that was not finite before the step, or 'batch'; '' for others.
      blocks, rows: of a parameter, the blocks (or, for one outside of the blocks, or for the batch, rows) that are not finite.
      stray: of a batch of tokens, the position in the first of its rows and the token there that the model does not have: what
        should be predicted has no probability, and the loss is NaN.
      constant: it is a constant of the program, such as the value of a scheme's rule.
    """

    direction: str
    block: int | None
    site: str | None
    part: str | None
    kind: str
    nan: int
    plus_inf: int
    minus_inf: int
    size: int
    dtype: str
    operation: str
    largest_before: float | None
    largest_beside: float | None
    unrounded: float | None
    parameter: str
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    constant: bool
    stray: tuple[int, int] | None = None

    @property
    def place(self) -> str:
        """'block 7, mlp, output'."""
        return str(Place(self.block, self.site, self.part))

    @property
    def where(self) -> str:
        """'parameter params/..., block 7', 'batch, row 3', or 'forward pass, block 7, mlp, output'."""
        pass_ = f"{self.direction} pass, {self.place}"
        if not self.parameter:
            return pass_
        within = [
            f"{word}{'s' * (len(found) > 1)} {numbers(found)}"
            for word, found in (("block", self.blocks), ("row", self.rows))
            if found
        ]
        if self.stray is not None:
            within.append(f"position {self.stray[0]}, where token {self.stray[1]} is none of the model's")
        what = self.parameter if self.parameter == BATCH else f"parameter {self.parameter}"
        return ", ".join([what, *within]) + f" (met in the {pass_})"

    def sentence(self) -> str:
        """A clause for a person."""
        counts = {"+Inf": self.plus_inf, "-Inf": self.minus_inf, "NaN": self.nan}
        parts = [f"{counts[self.kind]:,} {self.kind}"]
        parts += [f"{count:,} {kind}" for kind, count in counts.items() if count and kind != self.kind]
        facts = [f"{' and '.join(parts)} in {self.size:,} element{'s' if self.size != 1 else ''}, {self.dtype}"]
        if self.operation:
            facts.append(f"operation {self.operation}")
        if self.largest_before is not None:
            facts.append(f"largest finite magnitude before {self.largest_before:,.6g}")
        if self.unrounded is not None:
            facts.append(f"in float32 it would be {self.unrounded:,.6g}")
        if self.constant:
            facts.append("from a constant of the program")
        return f"the first non-finite value is in the {self.where}: {self.kind} ({'; '.join(facts)})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "where": self.where, "sentence": self.sentence()}


def numbers(found: tuple[int, ...]) -> str:
    listed = ", ".join(str(number) for number in found[:LISTED])
    return listed + (f" and {len(found) - LISTED} more" if len(found) > LISTED else "")


def first_nonfinite(parts: Parts, state: TrainState, batch: np.ndarray) -> First | None:
    """The first non-finite value of the step that ``state`` is about to do on ``batch``; None where all is finite.

    One device does it, whatever the mesh. It takes about as long as compiling the step and some thousand small operations.

    Args:
      parts: of the run.
      state: before the step; its buffers are left alone.
      batch: (B, T + 1) tokens, or what else the model's ``objective`` takes.
    """
    recipe = replace(
        parts.recipe, forward=False, backward=False, more=frozenset(), moved=False
    )  # probes may be NaN by right
    gradient = make_gradient(parts.graphdef, recipe, parts.knobs)

    def program(state: TrainState, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, norm, _, _ = gradient(state, batch, jnp.asarray(False))
        return value, norm

    before = jax.device_put(replace(state, opt_state=()), jax.devices()[0])
    tokens = jax.device_put(jnp.asarray(batch), jax.devices()[0])
    given = {**named(before), BATCH: tokens}
    found = search(jax.make_jaxpr(program)(before, tokens), [*given.values()], [*given])
    if found.origin is None:
        return None
    first = described(found.origin, "backward" if found.target else "forward", given, first_blocks(parts))
    return with_stray(first, np.asarray(batch), parts.vocab)


def first_blocks(parts: Parts) -> list[int]:
    """The first block of each run of the stack."""
    return [run.first for run in nnx.merge(parts.graphdef, parts.abstract.params).stack.plan]


def with_stray(first: First, batch: np.ndarray, vocab: int) -> First:
    """``first``, laid to the batch where it is the probability of a token that the model does not have."""
    if (first.part, first.operation) != ("loss", "gather") or not np.issubdtype(batch.dtype, np.integer):
        return first
    targets = batch[:, 1:]
    stray = np.argwhere((targets >= vocab) | (targets < -vocab))
    if not len(stray):
        return first
    row, position = (int(i) for i in stray[0])
    rows = tuple(int(i) for i in np.unique(stray[:, 0]))
    return replace(first, parameter=BATCH, rows=rows, stray=(position + 1, int(targets[row, position])))


def joins(origin: Origin, at: Place) -> bool:
    """Whether an origin in the backward pass is the sum of two gradients, of a branch and of the skip past it: the residual add, as
    the backward pass meets it."""
    if origin.operation != SUM_OF_GRADIENTS or at.part not in ENTERED:
        return False
    others = [place(stack) for stack in origin.operands]
    return any(one and ((one.block, one.site) != (at.block, at.site) or one.part in JOINED) for one in others)


def described(origin: Origin, direction: str, given: Mapping[str, Any], firsts: list[int]) -> First:
    """An origin in the network's terms; ``given`` are the program's inputs by name, ``firsts`` the first blocks of the stack's runs."""
    # of the backward pass, a value that was worked out beforehand stands where it is met
    stack = origin.backward[1] if direction == "backward" and origin.backward else origin.stack or origin.entered
    at = place(stack) or place(origin.stack or origin.entered)
    if joins(origin, at):
        at = replace(at, part="add")
    counts = {"+Inf": origin.plus, "-Inf": origin.minus, "NaN": origin.nan}
    blocks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    if origin.input:
        bad = ~np.isfinite(np.asarray(given[origin.input]).astype(np.float32))
        found = tuple(int(i) for i in np.unique(np.argwhere(bad)[:, 0])) if bad.ndim else ()
        if origin.input.startswith(RUNS):
            first = firsts[int(origin.input.removeprefix(RUNS).partition("/")[0])]
            blocks = tuple(first + i for i in found)
        else:
            rows = found
    return First(
        direction=direction,
        block=at.block,
        site=at.site,
        part=at.part,
        kind=max(counts, key=lambda kind: (counts[kind] > 0, kind != "NaN", counts[kind])),
        nan=origin.nan,
        plus_inf=origin.plus,
        minus_inf=origin.minus,
        size=origin.size,
        dtype=origin.dtype,
        operation=origin.operation,
        largest_before=origin.before,
        largest_beside=origin.beside,
        unrounded=origin.unrounded,
        parameter=origin.input,
        blocks=blocks,
        rows=rows,
        constant=origin.constant,
    )
