"""How is one cell trained? As an ordinary run is, but that nothing is saved: its numbers come back as one row."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import jax
import numpy as np

from resjax.data import Corpus, Pipeline
from resjax.health.findings import examine
from resjax.health.record import HealthRecord
from resjax.health.series import spike_episodes, spike_score
from resjax.sweeps.kept import profile
from resjax.sweeps.outcome import last_loss, outcome
from resjax.sweeps.shared import Shared
from resjax.sweeps.subject import Looking, studied
from resjax.sweeps.wanted import ENDS_ONLY, Wanted
from resjax.train import faults
from resjax.train.closing import SUMMED_ROWS
from resjax.train.loop import MOST_SKIPS, Pending
from resjax.train.program import Programs, held_out_loss, once_more
from resjax.train.roles import block_roles
from resjax.train.signals import Signals, Stopped
from resjax.train.state import TrainState

DONE, DIVERGED, FAILED, KILLED = "done", "diverged", "failed", "killed"
BY_ROLE = frozenset(("roles", "optimizer"))  # groups
FETCHED = 20  # steps whose numbers are fetched at once: often enough to notice a non-finite one


@dataclass
class SoFar:
    """What came out of the steps so far.

    Attributes:
      losses: of each step.
      record: the probes of the steps that measured.
      bad: the first step at which the policy for non-finite values ends the run; 0 = none.
      curve: rows as in metrics.jsonl.
      wanted: what is kept of them.
      profiles: probes of the steps that are kept, by step.
    """

    config: Any
    wanted: Wanted = ENDS_ONLY
    losses: list[float] = field(default_factory=list)
    record: HealthRecord = field(default_factory=HealthRecord)
    bad: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)

    def measures(self, number: int) -> bool:
        """Whether step ``number`` (from 1) measures, as in an ordinary run."""
        return number in (1, self.config.train.steps) or number % self.config.health.every == 0

    @cached_property
    def profiled(self) -> frozenset[int]:
        """The steps whose probes are kept."""
        return self.wanted.steps(self.config)

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
            if probes and pending.number in self.profiled:
                self.profiles[str(pending.number)] = profile(probes, self.wanted.probes)
            if self.logs(pending.number):
                self.curve.append({"step": pending.number, "loss": self.losses[-1]})
            if metrics["halted"] or metrics["skipped"] > MOST_SKIPS:
                self.bad = pending.number

    def train_loss(self) -> float:
        """As in summary.json: the mean of the last logged steps."""
        return fmean([row["loss"] for row in self.curve if "loss" in row][-SUMMED_ROWS:])


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
    seen, looking = SoFar(config, wanted), Looking(wanted.looks, config, shared, pipeline)
    first = shared.initial(numbers, shared.parts.seen(pipeline.batch))
    state = _steps(first, seen, looking, shared.programs(numbers), pipeline, signals)
    row = close(state, seen, looking, corpus, signals)
    return row | {"seconds": round(time.monotonic() - began, 3)}


def close(
    state: TrainState, seen: SoFar, looking: Looking, corpus: Corpus, signals: Signals, loss: float | None = None
) -> dict[str, Any]:
    """The results of a cell from its state after the last step, or after a bad one, and what was seen of the steps; all but the time.

    Args:
      state: of a bad cell under the policy stop the one before the bad step. It is used up.
      loss: the held-out one, if it is known; it is evaluated otherwise, but of a bad cell.

    Raises:
      Stopped: a signal asked to stop.
    """
    config, wanted, shared, pipeline = seen.config, seen.wanted, looking.shared, looking.pipeline
    programs = shared.programs(shared.numbers(config))
    done, error = int(state.step), None
    if seen.bad:
        done, loss = min(done, seen.bad), None  # whenever it was noticed
        where = _where(state, programs, pipeline, config)
        error = f"step {seen.bad}: the loss or the gradient is not finite{where and '; '}{where}"
    else:
        if loss is None:
            loss = _evaluated(state, programs, pipeline, config, signals)
        if wanted.curves:
            seen.curve.append({"step": len(seen.losses), "eval_loss": loss})
        if not np.isfinite(loss):
            error = "the held-out loss is not finite"
    logged = [row["loss"] for row in seen.curve if "loss" in row]
    health = examine(seen.record, config.to_dict(), shared.stream_dtype, logged, corpus.baselines.bigram)
    cosine = float(seen.record["token_cosine"][-1, -1, -1]) if "token_cosine" in seen.record else None
    row: dict[str, Any] = {
        "status": DIVERGED if error else DONE,
        "error": error,
        "outcome": "nonfinite" if error else outcome(seen.losses, corpus.baselines.floors, cosine),
        "train_loss": seen.train_loss(),
        "eval_loss": loss,
        "first_loss": seen.losses[0],
        "last_loss": last_loss(seen.losses),
        "spikes": spikes(seen.losses),
        "steps": done,
        "token_cosine": cosine,
        "health": {"verdict": health["verdict"], "findings": sorted({one["kind"] for one in health["findings"]})},
    }
    if wanted.curves:
        row["curve"] = seen.curve
    if wanted.profiles:
        row["profiles"] = seen.profiles
        if wanted.probes is not None:
            row["probes"] = wanted.probes
        if BY_ROLE & set(config.health.groups):
            row["roles"] = block_roles(state.params)
    if wanted.looks is not None:
        row |= {"look": wanted.looks.name, "looks": looking.kept}
    if wanted.studies:
        ended = () if error else wanted.studies
        row["studies"] = studied(ended, state, config, shared, pipeline, seen.losses, signals)
    return row


def spikes(losses: list[float]) -> dict[str, Any]:
    """The spikes of a run's losses, by :mod:`resjax.health.series`: percentage of steps that are some, episodes, those without return.

    ``max_loss`` is the largest of all; inf where one is not finite.
    """
    episodes = spike_episodes(losses)
    return {
        "score": spike_score(losses),
        "episodes": len(episodes),
        "fatal": sum(one.outcome == "fatal" for one in episodes),
        "max_loss": max(loss if np.isfinite(loss) else np.inf for loss in losses),
    }


def _steps(
    state: TrainState, seen: SoFar, looking: Looking, programs: Programs, pipeline: Pipeline, signals: Signals
) -> TrainState:
    """The state after the last step, or after a bad one. Numbers are fetched while later steps compute."""
    config, curves = seen.config, seen.wanted.curves
    steps, every = config.train.steps, config.train.eval_every
    waiting: list[Pending] = []
    batches = pipeline.stream()
    try:
        for number in range(1, steps + 1):
            if signals.stop:
                raise Stopped
            on = seen.measures(number) or number in seen.profiled
            state, metrics, probes = programs.step(state, programs.batch(next(batches)), np.asarray(on))
            waiting.append(Pending(number, metrics, probes if on else None))
            evaluates = curves and every > 0 and number % every == 0 and number < steps
            pauses = evaluates or number == steps or number in looking.steps
            if pauses or len(waiting) > FETCHED:
                kept = 0 if pauses else 1  # the step under way
                seen.take(waiting[: len(waiting) - kept])
                del waiting[: len(waiting) - kept]
                if seen.bad:
                    break
            if evaluates:
                loss = _evaluated(state, programs, pipeline, config, signals)
                seen.curve.append({"step": number, "eval_loss": loss})
            if number in looking.steps:
                looking.look(state, seen.losses)
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
