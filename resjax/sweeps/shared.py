"""What do the cells of one architecture execute together? One compiled step that takes their numbers as values."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.config.scheme import opened
from resjax.scale.mesh import by_rows, replicated
from resjax.scale.program import stream_dtype
from resjax.sweeps.cells import Architecture, program_value
from resjax.train.assemble import Parts, assemble, quick_start
from resjax.train.numbers import GAINS, knobs, with_numbers
from resjax.train.program import STREAM, Programs, tokens
from resjax.train.state import TrainState
from resjax.train.step import make_evaluation, make_step

Numbers = Mapping[str, np.generic]


@dataclass(frozen=True, eq=False)
class Functions:
    """What the cells of an architecture compute, not compiled; each takes, last, the numbers of a cell.

    Attributes:
      parts: as assembled from the first cell, with knobs for the gains in which cells differ.
      traced: the fields that are values.
    """

    parts: Parts
    traced: tuple[str, ...]

    @classmethod
    def of(cls, architecture: Architecture, vocab: int, devices: int | None = None) -> "Functions":
        """Assemble; on so many devices, or on those that the configuration says.

        Raises:
          Refused: what a configuration cannot have on this machine, such as its mesh.
        """
        config, traced = architecture.cells[0].config, architecture.traced
        if devices is not None and config.mesh.data != devices:
            config = config.copy_and_resolve_references()
            config.mesh.data = devices
        gains = [path for path in traced if path in GAINS]
        return cls(assemble(config, vocab, opened(config, gains) if gains else None), traced)

    def initial(self, numbers: Mapping[str, jax.Array], tokens: jax.Array | None) -> TrainState:
        return with_numbers(self.parts, numbers).start(tokens)

    def step(
        self,
        state: TrainState,
        batch: jax.Array,
        on: jax.Array,
        numbers: Mapping[str, jax.Array],
        alone: bool = True,
    ) -> tuple[TrainState, dict[str, jax.Array], dict[str, jax.Array]]:
        now = with_numbers(self.parts, numbers)
        made = make_step(now.graphdef, now.optimizer, now.schedule, now.recipe, now.knobs, alone)
        return made(state, batch, on)

    def evaluation(self, params: Any, batch: jax.Array, step: jax.Array, numbers: Mapping[str, jax.Array]) -> jax.Array:
        return make_evaluation(self.parts.graphdef, self.parts.compute, knobs(numbers))(params, batch, step)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of the numbers of a cell."""
        shapes = {path: jax.ShapeDtypeStruct((), jnp.float32) for path in self.traced}
        return shapes | {"seed": jax.ShapeDtypeStruct((), jnp.uint32)}

    def first(self) -> jax.ShapeDtypeStruct | None:
        """Of the tokens that the start depends on; None for most schemes."""
        data = self.parts.config.data
        return jax.ShapeDtypeStruct((data.batch, data.length), jnp.int32) if self.parts.scheme.calibrate else None


@dataclass(frozen=True)
class Shared:
    """The programs of an architecture; each takes, last, the numbers of a cell.

    Attributes:
      parts, traced: see :class:`Functions`.
      initial: (numbers, tokens that the start depends on, or None) -> state before the first step.
      step, evaluation: see :class:`resjax.train.program.Programs`.
      stream_dtype: dtype of the residual stream in the step.
      seconds: that assembling, tracing and compiling took.
    """

    parts: Parts
    traced: tuple[str, ...]
    initial: Callable[[Numbers, jax.Array | None], TrainState]
    step: Callable[..., tuple[TrainState, dict, dict]]
    evaluation: Callable[..., jax.Array]
    stream_dtype: str
    seconds: float

    def numbers(self, config: Any) -> Numbers:
        """What the programs take of a cell."""
        found: dict[str, np.generic] = {path: np.float32(program_value(config, path)) for path in self.traced}
        return found | {"seed": np.uint32(config.seed)}

    def programs(self, numbers: Numbers) -> Programs:
        """The programs of one cell, as those of an ordinary run."""
        return Programs(
            step=lambda state, batch, on: self.step(state, batch, on, numbers),
            evaluation=lambda params, batch, step: self.evaluation(params, batch, step, numbers),
            whole=replicated(self.parts.mesh),
            rows=by_rows(self.parts.mesh),
            stream_dtype=self.stream_dtype,
            seconds=self.seconds,
        )


def compile_shared(architecture: Architecture, vocab: int) -> Shared:
    """Assemble, trace and compile, once for all cells.

    Raises:
      Refused: what a configuration cannot have on this machine, such as its mesh.
    """
    began = time.monotonic()
    made = Functions.of(architecture, vocab)
    parts, shapes = made.parts, made.shapes()
    whole, rows = replicated(parts.mesh), by_rows(parts.mesh)
    options = quick_start(parts.abstract.params)
    start = jax.jit(made.initial, in_shardings=whole, out_shardings=whole, compiler_options=options)
    jitted = jax.jit(made.step, donate_argnums=0, in_shardings=(whole, rows, whole, whole), out_shardings=whole)
    traced_step = jitted.trace(parts.abstract, tokens(parts), jax.ShapeDtypeStruct((), jnp.bool), shapes)
    evaluate = (
        jax.jit(made.evaluation, in_shardings=(whole, rows, whole, whole))
        .lower(parts.abstract.params, tokens(parts), parts.abstract.step, shapes)
        .compile()
    )
    return Shared(
        parts,
        made.traced,
        start.lower(shapes, made.first()).compile(),
        traced_step.lower().compile(),
        evaluate,
        stream_dtype(traced_step, STREAM),
        time.monotonic() - began,
    )
