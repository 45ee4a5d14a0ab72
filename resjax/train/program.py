"""Which programs does a run consist of? Its step and its evaluation, compiled once, with their shardings."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from resjax.block import STREAM
from resjax.data import Pipeline
from resjax.scale.mesh import by_rows, replicated
from resjax.scale.program import stream_dtype
from resjax.train.assemble import Parts
from resjax.train.signals import Signals
from resjax.train.state import TrainState
from resjax.train.step import make_evaluation, make_step

Evaluation = Callable[[Any, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class StepProgram:
    """A compiled step.

    Attributes:
      step: (state, batch, on) -> (state, metrics, probes); the state's buffers are used again for the result.
      whole, rows: shardings of a state, and of a batch.
      stream_dtype: dtype of the residual stream in the step.
      seconds: that tracing and compiling took.
    """

    step: Callable[..., tuple[TrainState, dict[str, jax.Array], dict[str, jax.Array]]]
    whole: NamedSharding
    rows: NamedSharding
    stream_dtype: str
    seconds: float

    def batch(self, tokens: np.ndarray) -> jax.Array:
        """A batch, on the devices."""
        return jax.device_put(tokens, self.rows)


@dataclass(frozen=True)
class Programs(StepProgram):
    """What a run executes: its step (see :class:`StepProgram`) and its evaluation.

    Attributes:
      evaluation: (params, batch, step) -> loss of a held-out batch.
    """

    evaluation: Evaluation


def compile_programs(parts: Parts, state: TrainState) -> Programs:
    """Trace and compile; ``state`` may be abstract."""
    began = time.monotonic()
    step = compile_step(parts, state)
    evaluation = compile_evaluation(parts)
    return Programs(step.step, step.whole, step.rows, step.stream_dtype, time.monotonic() - began, evaluation)


def compile_step(parts: Parts, state: TrainState, options: dict[str, Any] | None = None) -> StepProgram:
    """The program of a step alone; ``state`` may be abstract, ``options`` are the compiler's."""
    began = time.monotonic()
    whole, rows = replicated(parts.mesh), by_rows(parts.mesh)
    # Whatever the policy, the state stops before a step that is not finite, so that it can be looked into and kept.
    recipe = replace(parts.recipe, stop=True)
    step = make_step(parts.graphdef, parts.optimizer, parts.schedule, recipe)
    jitted = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(whole, rows, whole),
        out_shardings=whole,
        compiler_options=options,
    )
    traced = jitted.trace(state, tokens(parts), jax.ShapeDtypeStruct((), jnp.bool))
    compiled = traced.lower().compile()
    return StepProgram(compiled, whole, rows, stream_dtype(traced, STREAM), time.monotonic() - began)


def compile_evaluation(parts: Parts) -> Evaluation:
    """The program of an evaluation alone."""
    whole, rows = replicated(parts.mesh), by_rows(parts.mesh)
    evaluate = make_evaluation(parts.graphdef, parts.compute)
    jitted = jax.jit(evaluate, in_shardings=(whole, rows, whole))
    return jitted.lower(parts.abstract.params, tokens(parts), parts.abstract.step).compile()


def tokens(parts: Parts) -> jax.ShapeDtypeStruct:
    """What a batch is, without its numbers."""
    data = parts.config.data
    return jax.ShapeDtypeStruct((data.batch, data.length + 1), jnp.int32)


def once_more(programs: StepProgram, state: TrainState, tokens: np.ndarray) -> tuple[TrainState, dict, dict]:
    """The step at which ``state`` halted, run again on its batch and measured: state as it was, metrics, probes."""
    skipped = jax.device_put(jnp.int32(max(0, int(state.skipped) - 1)), programs.whole)
    again = replace(state, halted=jax.device_put(jnp.asarray(False), programs.whole))
    state, metrics, probes = programs.step(again, programs.batch(tokens), np.asarray(True))
    state = replace(state, halted=jnp.asarray(False), skipped=skipped)
    return state, jax.device_get(metrics), jax.device_get(probes)


def passed_over(programs: StepProgram, state: TrainState, skipped: int) -> TrainState:
    """The state after the step at which ``state`` halted, its update left out; ``skipped`` such steps in a row now."""
    counts = {"step": int(state.step) + 1, "cursor": int(state.cursor) + 1, "skipped": skipped}
    placed = {name: jax.device_put(jnp.int32(count), programs.whole) for name, count in counts.items()}
    return replace(state, **placed, halted=jax.device_put(jnp.asarray(False), programs.whole))


def held_out_loss(
    evaluation: Evaluation,
    params: Any,
    step: jax.Array,
    pipeline: Pipeline,
    most: int,
    rows: NamedSharding,
    signals: Signals | None = None,
) -> float | None:
    """Mean loss of the first ``most`` held-out batches (or all there are); None if a signal asks to stop in between."""
    losses = []
    for i in range(min(most, pipeline.held_out_batches)):
        if signals and signals.stop:
            return None
        losses.append(evaluation(params, jax.device_put(pipeline.held_out(i), rows), step))
    return fmean(float(loss) for loss in losses)
