"""How does a cell become what studies look at? Its model as it is now, held-out text, its losses; no folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax.data import Pipeline
from resjax.errors import Refused
from resjax.health.studies import STUDIES, Subject
from resjax.health.studies.study import TOKENS
from resjax.models.lm import LM
from resjax.sweeps.kept import rounded
from resjax.sweeps.shared import Shared
from resjax.sweeps.wanted import Looks
from resjax.train.numbers import knobs, with_numbers
from resjax.train.signals import Signals, Stopped
from resjax.train.state import TrainState
from resjax.train.subject import held_out

MEMORY, ERROR = "_memory", "error"


@dataclass(frozen=True)
class Trained:
    """A cell at a state; see :class:`resjax.health.studies.subject.Origin`. Nothing of the state is given away to a program.

    Attributes:
      state: after its last step, or after one on the way (then only until the next step is made).
      config: its own.
      shared: the programs of its architecture.
      pipeline: its batches.
    """

    state: TrainState
    config: Any
    shared: Shared
    pipeline: Pipeline

    @cached_property
    def numbers(self) -> Mapping[str, np.generic]:
        return self.shared.numbers(self.config)

    @property
    def next_rate(self) -> float:
        return float(with_numbers(self.shared.parts, self.numbers).schedule(int(self.state.step)))

    def training_batch(self, step: int) -> np.ndarray:
        """The batch of step ``step``, from 1: a cell never goes back, so it is the one of that number."""
        return self.pipeline.batch(step - 1)

    def next_model(self) -> LM | None:
        """The model after one more step; None where it is not finite."""
        programs = self.shared.programs(self.numbers)
        batch = programs.batch(self.training_batch(int(self.state.step) + 1))
        state, metrics, _ = programs.step(copied(self.state), batch, np.asarray(False))
        return nnx.merge(self.shared.parts.graphdef, state.params) if bool(metrics["finite"]) else None


def copied(tree: Any) -> Any:
    """The arrays once more: a step takes those that it is given for its result."""
    return jax.tree.map(jnp.copy, tree)


def subject_of(
    state: TrainState, config: Any, shared: Shared, pipeline: Pipeline, losses: Sequence[float], tokens: int = TOKENS
) -> Subject:
    """A cell, to be looked at by ``tokens`` held-out tokens or more, or all there are; ``losses`` are those of its steps so far."""
    origin = Trained(state, config, shared, pipeline)
    return Subject(
        model=nnx.merge(shared.parts.graphdef, copied(state.params)),
        batches=held_out(pipeline, tokens),
        step=int(state.step),
        compute=shared.parts.compute,
        knobs=knobs(origin.numbers),
        config=config,
        rows=[{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)],
        origin=origin,
    )


def studied(
    names: Sequence[str],
    state: TrainState,
    config: Any,
    shared: Shared,
    pipeline: Pipeline,
    losses: Sequence[float],
    signals: Signals,
) -> dict[str, Any]:
    """The results of studies of a cell's last state, by name; of one that fails, its sentence.

    Raises:
      Stopped: a signal asked to stop.
    """
    found: dict[str, Any] = {}
    subjects: dict[int, Subject] = {}  # by tokens
    for name in names:
        if signals.stop:
            raise Stopped
        study = STUDIES[name]
        try:
            if study.tokens not in subjects:
                subjects[study.tokens] = subject_of(state, config, shared, pipeline, losses, study.tokens)
            found[name] = rounded(study.run(subjects[study.tokens]))
        except Exception as error:
            found[name] = {ERROR: sentence(error)}
    return found


def sentence(error: Exception) -> str:
    """What a fault says, in a line."""
    said = " ".join(str(error).split())
    return said if isinstance(error, Refused) else f"{type(error).__name__}: {said[:500]}"


@dataclass
class Looking:
    """The looks at one cell.

    Attributes:
      looks: what is asked for; None = nothing.
      config, shared, pipeline: of the cell.
      kept: what the looks found, by step.
    """

    looks: Looks | None
    config: Any
    shared: Shared
    pipeline: Pipeline
    kept: dict[str, Any] = field(default_factory=dict)
    _memory: Any = None

    @cached_property
    def steps(self) -> frozenset[int]:
        """After which there is a look."""
        return frozenset() if self.looks is None else self.looks.at(self.config)

    def look(self, state: TrainState, losses: Sequence[float]) -> None:
        """Look at the state after step ``len(losses)``; one that fails leaves its sentence."""
        assert self.looks is not None
        try:
            found = self.looks.look(subject_of(state, self.config, self.shared, self.pipeline, losses), self._memory)
            if not isinstance(found, Mapping):
                raise Refused(f"{self.looks.name} returns {found!r:.80}; it must return a dict")
            row = rounded({name: value for name, value in found.items() if name != MEMORY})
            # a copy, since what it has of the state is gone with the next step
            self._memory = jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, found.get(MEMORY))
        except Exception as error:
            row = {ERROR: sentence(error)}
        self.kept[str(len(losses))] = row
