"""How is one cell trained? As an ordinary run is, but that nothing is saved: its numbers come back as one row."""

import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import jax
import numpy as np

from resjax.data import Corpus, Pipeline
from resjax.health.findings import examine
from resjax.health.record import HealthRecord
from resjax.sweeps.outcome import last_loss, outcome
from resjax.sweeps.shared import Shared
from resjax.sweeps.wanted import Wanted, profile
from resjax.train import faults
from resjax.train.closing import SUMMED_ROWS
from resjax.train.loop import MOST_SKIPS, Pending
from resjax.train.program import Programs, held_out_loss, once_more
from resjax.train.signals import Signals
from resjax.train.state import TrainState

DONE, DIVERGED, FAILED, KILLED = "done", "diverged", "failed", "killed"
FETCHED = 20  # steps whose numbers are fetched at once: often enough to notice a non-finite one


class Stopped(Exception):
    """A signal asked the sweep to stop in the middle of a cell."""


@dataclass
class Seen:
    """What came out of the steps so far.

    Attributes:
      losses: of each step.
      record: the probes of the steps that measured.
      bad: the first step at which the policy for non-finite values ends the run; 0 = none.
      curve: rows as in metrics.jsonl.
      wanted: steps whose profiles are kept.
      profiles: those, by step.
    """

    config: Any
    wanted: frozenset[int] = frozenset()
    losses: list[float] = field(default_factory=list)
    record: HealthRecord = field(default_factory=HealthRecord)
    bad: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)

    def measures(self, number: int) -> bool:
        """Whether step ``number`` (from 1) measures, as in an ordinary run."""
        return number in (1, self.config.train.steps) or number % self.config.health.every == 0

    def logs(self, number: int) -> bool:
        return number in (1, self.config.train.steps) or number % self.config.train.log_every == 0

    def take(self, waiting: list[Pending]) -> None:
        """Fetch the numbers of some steps; what comes after a bad one is left out."""
        rows = jax.device_get([(pending.metrics, pending.probes) for pending in waiting])
        for pending, (metrics, probes) in zip(waiting, rows, strict=True):
            if self.bad:
                return
            self.losses.append(float(metrics["loss"]))
            overflow = not (metrics["finite"] or metrics["halted"] or metrics["skipped"])
            if probes and not overflow and self.measures(pending.number):
                self.record.append(pending.number, probes)
            if probes and pending.number in self.wanted:
                self.profiles[str(pending.number)] = profile(probes)
            if self.logs(pending.number):
                self.curve.append({"step": pending.number, "loss": self.losses[-1]})
            if metrics["halted"] or metrics["skipped"] > MOST_SKIPS:
                self.bad = pending.number

    def train_loss(self) -> float:
        """As in summary.json: the mean of the last logged steps."""
        return fmean([row["loss"] for row in self.curve if "loss" in row][-SUMMED_ROWS:])


@dataclass(frozen=True)
class Ended:
    """A cell after its last step, or after a bad one.

    Attributes:
      config, shared, corpus, pipeline: what it was trained with.
      programs: of this cell alone.
      seen: what came out of its steps.
      state: the last; of a bad cell under the policy stop the one before the bad step.
    """

    config: Any
    shared: Shared
    corpus: Corpus
    pipeline: Pipeline
    programs: Programs
    seen: Seen
    state: TrainState


def train(config: Any, shared: Shared, corpus: Corpus, pipeline: Pipeline, signals: Signals, wanted: Wanted) -> dict:
    """Train one cell to its end; returns its results.

    Args:
      config: the cell's, of the architecture that ``shared`` was compiled for.
      wanted: with curves, it is also evaluated every ``train.eval_every`` steps; probes of other steps than those of the cadence are
        in its profiles only.

    Raises:
      Stopped: a signal asked to stop.
    """
    began = time.monotonic()
    numbers = shared.numbers(config)
    programs = shared.programs(numbers)
    seen = Seen(config, wanted.steps(config))
    state = shared.initial(numbers, shared.parts.seen(pipeline.batch))
    state = _steps(state, seen, programs, pipeline, signals, wanted.curves)
    loss = None if seen.bad else _evaluated(state, programs, pipeline, config, signals)
    row = closed(Ended(config, shared, corpus, pipeline, programs, seen, state), loss, wanted)
    return row | {"seconds": round(time.monotonic() - began, 3)}


def closed(end: Ended, loss: float | None, wanted: Wanted) -> dict[str, Any]:
    """The results of a cell, but for the seconds that it took; ``loss`` is the held-out one, None of a bad cell."""
    config, seen, error = end.config, end.seen, None
    steps = int(end.state.step)  # before the state is used up
    if seen.bad:
        steps = min(steps, seen.bad)  # whenever it was noticed
    if seen.bad:
        where = _where(end.state, end.programs, end.pipeline, config)
        error = f"step {seen.bad}: the loss or the gradient is not finite{where and '; '}{where}"
    elif loss is not None:
        if wanted.curves:
            seen.curve.append({"step": len(seen.losses), "eval_loss": loss})
        if not np.isfinite(loss):
            error = "the held-out loss is not finite"
    health = examine(seen.record, config.to_dict(), end.shared.stream_dtype)
    cosine = float(seen.record["token_cosine"][-1, -1, -1]) if "token_cosine" in seen.record else None
    return {
        "status": DIVERGED if error else DONE,
        "error": error,
        "outcome": "nonfinite" if error else outcome(seen.losses, end.corpus.baselines.floors, cosine),
        "train_loss": seen.train_loss(),
        "eval_loss": loss,
        "first_loss": seen.losses[0],
        "last_loss": last_loss(seen.losses),
        "steps": steps,
        "token_cosine": cosine,
        "health": {"verdict": health["verdict"], "findings": sorted({one["kind"] for one in health["findings"]})},
        **({"curve": seen.curve} if wanted.curves else {}),
        **({"profiles": seen.profiles} if wanted.profiles else {}),
    }


def _steps(
    state: TrainState, seen: Seen, programs: Programs, pipeline: Pipeline, signals: Signals, curves: bool
) -> TrainState:
    """The state after the last step, or after a bad one. Numbers are fetched while later steps compute."""
    config = seen.config
    steps, every = config.train.steps, config.train.eval_every
    waiting: list[Pending] = []
    batches = pipeline.stream()
    try:
        for number in range(1, steps + 1):
            if signals.stop:
                raise Stopped
            on = seen.measures(number) or number in seen.wanted
            state, metrics, probes = programs.step(state, programs.batch(next(batches)), np.asarray(on))
            waiting.append(Pending(number, metrics, probes if on else None))
            evaluates = curves and every > 0 and number % every == 0 and number < steps
            if evaluates or number == steps or len(waiting) > FETCHED:
                kept = 0 if evaluates or number == steps else 1  # the step under way
                seen.take(waiting[: len(waiting) - kept])
                del waiting[: len(waiting) - kept]
                if seen.bad:
                    break
            if evaluates:
                loss = _evaluated(state, programs, pipeline, config, signals)
                seen.curve.append({"step": number, "eval_loss": loss})
    finally:
        batches.close()
    return state


def _evaluated(state: TrainState, programs: Programs, pipeline: Pipeline, config: Any, signals: Signals) -> float:
    most = config.train.eval_batches
    loss = held_out_loss(programs.evaluation, state.params, state.step, pipeline, most, programs.rows, signals)
    if loss is None:
        raise Stopped
    return loss


def _where(state: TrainState, programs: Programs, pipeline: Pipeline, config: Any) -> str:
    """Where the non-finite value arose, in words; empty where the state has gone past it."""
    if config.train.on_nonfinite == "skip":
        return ""
    _, metrics, probes = once_more(programs, state, pipeline.batch(int(state.cursor)))
    return faults.origin(probes, float(metrics["loss"]), float(metrics["grad_norm"]))
