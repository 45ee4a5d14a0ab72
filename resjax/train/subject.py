"""How does a run become what studies look at? Its model at a saved step, held-out tokens, and what it logged so far."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from resjax.data import Pipeline
from resjax.errors import Refused
from resjax.health.studies.study import TOKENS
from resjax.health.studies.subject import Subject
from resjax.models.lm import LM
from resjax.train.checkpoint import Checkpoints
from resjax.train.rebuild import Again
from resjax.train.saved import load_run


def subject_of(folder: str | os.PathLike, step: int | None = None, tokens: int = TOKENS, **options: Any) -> Subject:
    """The run in ``folder`` at a saved step (None = the newest that is whole), with at least ``tokens`` held-out tokens, or all there
    are. Nothing in the folder is changed.

    ``options`` are further fields of :class:`Subject`, such as ``most``.

    Raises:
      Refused: no run there, no such step, damage; the scheme's file or the corpus is another one than the run's.
    """
    saved = load_run(folder, step)
    origin = Trained(Again.of(folder), saved.step)
    return Subject(
        model=saved.model,
        batches=held_out(origin.again.pipeline, tokens),
        step=saved.step,
        compute=saved.compute,
        config=saved.config,
        rows=[row for row in origin.again.rows if row["step"] <= saved.step],
        origin=origin,
        notes=[*saved.notes, *origin.again.notes],
        **options,
    )


@dataclass(frozen=True)
class Trained:
    """A run at a saved step; see :class:`resjax.health.studies.subject.Origin`.

    Attributes:
      again: the run, with its steps to be done again.
      step: optimizer steps that the model has done.
    """

    again: Again
    step: int

    @property
    def folder(self) -> Path:
        return self.again.folder.path

    @property
    def next_rate(self) -> float:
        return float(self.again.parts.schedule(self.step))

    def training_batch(self, step: int) -> np.ndarray:
        """The batch of step ``step``, from 1.

        Raises:
          Refused: the corpus is another one than the run's.
        """
        return self.again.pipeline.batch(self.batch_of(step))

    def batch_of(self, step: int) -> int:
        """The index of that batch: it runs ahead of the step from a rollback on, which goes on with later batches."""
        jumps = {row["step"]: 0 for row in self.again.rows if "rolled_back_from" in row}
        for row in self.again.rows:
            if "rolled_back_from" in row:
                jumps[row["step"]] += row["rolled_back_from"] - row["step"]
        # the checkpoint of a step that a rollback went back to was saved before it
        ahead = self.cursor - self.step - sum(past for at, past in jumps.items() if at < self.step)
        return step - 1 + ahead + sum(past for at, past in jumps.items() if at < step)

    @cached_property
    def cursor(self) -> int:
        """The index of the next batch, as saved at the step."""
        checkpoints = Checkpoints(self.again.folder.checkpoints)
        try:
            wanted = {"cursor": self.again.parts.abstract.cursor}
            saved, _, _ = checkpoints.restore(self.step, wanted, config=self.again.facts, partial=True)
        finally:
            checkpoints.close()
        return int(saved["cursor"])

    def next_model(self) -> LM | None:
        """The model after one more step; None where it is not finite, so that no run would apply it.

        Raises:
          Refused: there is no checkpoint of the step or before it, or a step on the way from there is not finite; the corpus is
            another one than the run's.
        """
        again = self.again
        state, _ = again.before(self.step + 1, kept=False)
        while True:  # once, if the checkpoint is whole
            done = int(state.step)
            batch = again.program.batch(self.training_batch(done + 1))
            state, metrics, _ = again.program.step(state, batch, np.asarray(False))
            if done == self.step:
                return nnx.merge(again.parts.graphdef, state.params) if bool(metrics["finite"]) else None
            if bool(metrics["halted"]):
                raise Refused(f"step {done + 1} of the run in '{self.folder}' is not finite when it is run again")


def held_out(pipeline: Pipeline, tokens: int) -> np.ndarray:
    """Batches (n, B, T + 1) of the held-out text with ``tokens`` inputs or more, no window twice; B is at most the run's."""
    there = max(1, (len(pipeline.corpus.held_out) - 1) // pipeline.length)
    windows = min(there, -(-tokens // pipeline.length))
    size = min(windows, pipeline.batch_size)
    count = min(there // size, -(-windows // size))
    rows = np.concatenate([pipeline.held_out(i) for i in range(-(-count * size // pipeline.batch_size))])
    return rows[: count * size].reshape(count, size, -1)
