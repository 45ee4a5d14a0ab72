"""How does a run go from its first step to its last? Steps, logs, evaluations, saves, stops."""

import shlex
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from resjax.data import Corpus, Pipeline
from resjax.errors import Refused
from resjax.health.record import HealthRecord
from resjax.health.record import drop_after as drop_health_after
from resjax.train import closing, evidence, faults
from resjax.train.assemble import Parts
from resjax.train.checkpoint import Checkpoints, NothingToRestore
from resjax.train.forensics import first_nonfinite
from resjax.train.program import Programs, held_out_loss, once_more, passed_over
from resjax.train.progress import Board
from resjax.train.roles import block_roles
from resjax.train.runfolder import FINISHED, NONFINITE, RunFolder
from resjax.train.signals import Signals
from resjax.train.state import TrainState
from resjax.train.writers import JsonlWriter, MultiWriter, TensorBoardWriter, read_metrics

MOST_SKIPS, MOST_ROLLBACKS = 10, 3  # non-finite steps in a row, rollbacks in a run, before a run stops after all
PROFILED = (3, 8)  # steps of a session, from which to which the profiler looks

DONE, STOPPED_NONFINITE = 0, 4


@dataclass
class Pending:
    """A step whose numbers are still on their way: fetched while the next one computes."""

    number: int
    metrics: dict[str, jax.Array]
    probes: dict[str, jax.Array] | None


class Loop:
    """One session of a run: from a state to the last step, or to what stops it.

    Args:
      parts, programs: the assembled run, and its compiled form.
      corpus, pipeline: its data.
      folder: its open folder.
      checkpoints: its saved states.
      signals: read between steps and evaluation batches.
      console: where it prints.
    """

    def __init__(
        self,
        parts: Parts,
        programs: Programs,
        corpus: Corpus,
        pipeline: Pipeline,
        folder: RunFolder,
        checkpoints: Checkpoints,
        signals: Signals,
        console: Console,
    ):
        self.parts, self.programs, self.corpus, self.pipeline = parts, programs, corpus, pipeline
        self.folder, self.checkpoints, self.signals, self.console = folder, checkpoints, signals, console
        self.config = parts.config
        self.record = self._new_record()
        self.rollbacks = 0

    def _new_record(self) -> HealthRecord:
        return HealthRecord(roles=block_roles(self.parts.abstract.params))

    # ------------------------------------------------------------------ the steps

    def run(self, state: TrainState, profile: bool = False) -> int:
        """Train from ``state`` to the end; returns the exit code. What the folder holds of later steps is dropped.

        Raises:
          OSError: the disk is full, or the like.
        """
        self.state, self.number = state, int(state.step)
        self.profile_at = self.number + min(PROFILED[0], self.config.train.steps - self.number - 1) if profile else None
        self.profiling = False
        continued = any(self.folder.path.glob("events.*"))
        rows = JsonlWriter(self.folder.metrics)
        try:
            rows.drop_after(self.number)
            # A rollback to this very step is not in its saved state: the batches that it passed over come again.
            rows.drop(lambda row: row.get("step") == self.number and "rolled_back_from" in row)
            drop_health_after(self.folder.health, self.number)
            evidence.clear(self.folder.nonfinite)
            for line in self.checkpoints.set_aside(self.number):
                self.console.print(line)
            self.writer = MultiWriter(rows, TensorBoardWriter(self.folder.path, self.number + 1 if continued else None))
            self.board = Board(self.number, self.config.train.steps, self.console)
            self.clock_at, self.clock_step, self.paused = time.monotonic(), self.number, 0.0
            self.speed = 0.0
            with self.board:
                if self._owes_evaluation():
                    self.evaluate()
                code = self._stop() if self.signals.stop else self._steps()
            return self._finish() if code is None else code
        finally:
            rows.close()
            if hasattr(self, "writer"):
                self.writer.close()

    def _steps(self) -> int | None:
        """Step by step to the last; an exit code if something stops the run before."""
        steps = self.config.train.steps
        pending: Pending | None = None
        batches = self._batches()
        try:
            while self.number < steps:
                if self.number == self.profile_at:
                    jax.profiler.start_trace(str(self.folder.profile))
                    self.profiling = True
                on = self._measures(self.number + 1)
                batch = self.programs.batch(next(batches))
                self.state, metrics, probes = self.programs.step(self.state, batch, np.asarray(on))
                self.number += 1
                bad = pending is not None and self._consume(pending)
                pending = Pending(self.number, metrics, probes if on else None)
                last = self.number == steps
                if not bad and (last or self._due() or self.signals.stop or self.signals.report):
                    bad, pending = self._consume(pending), None
                if bad:
                    if (code := self._recover()) is not None:
                        return code
                    pending = None
                    batches.close()
                    batches = self._batches()
                    if self.config.train.on_nonfinite == "rollback":
                        continue
                    last = self.number == steps  # of the step passed over, which may not be the last one tried
                self._serve(last)
                # A signal that came after the look at it above is heeded a step later: this step's numbers, still on
                # their way, would be missing beside its saved state.
                if self.signals.stop and pending is None:
                    return self._stop()
        finally:
            batches.close()
            self._end_profile()
        return None

    def _batches(self) -> Generator[np.ndarray]:
        return self.pipeline.stream(int(self.state.cursor))

    def _measures(self, number: int) -> bool:
        """Whether step ``number`` (from 1) measures: the first, each ``health.every``, the last."""
        return number in (1, self.config.train.steps) or number % self.config.health.every == 0

    def _every(self, steps: int) -> bool:
        return steps > 0 and self.number % steps == 0

    def _due(self) -> bool:
        return self._every(self.config.train.eval_every) or self._every(self.config.train.save_every)

    def _serve(self, last: bool) -> None:
        """What is due between two steps: a report that was asked for, an evaluation, a save."""
        began = time.monotonic()
        if (
            self.profiling
            and self.profile_at is not None
            and self.number >= self.profile_at + PROFILED[1] - PROFILED[0]
        ):
            self._end_profile()
        self.checkpoints.poll()
        if self.signals.report:
            self.signals.report = False
            self.report()
        if last or self._every(self.config.train.eval_every):
            self.evaluate()
        if not last and not self.signals.stop and self._every(self.config.train.save_every):
            self.save()
        self.paused += time.monotonic() - began

    def _consume(self, pending: Pending) -> bool:
        """Fetch a step's numbers and log them. Returns whether the run has to react to a non-finite value."""
        values = jax.device_get(pending.metrics)
        halted = bool(values.pop("halted"))
        skipped = int(values.pop("skipped"))
        applied = bool(values.pop("finite"))
        row: dict[str, Any] = {name: float(value) for name, value in values.items()}
        if self.config.precision.loss_scale is None:
            del row["loss_scale"]
        # The overflow of a dynamic loss scale is no fault: its infinite gradients say nothing of the run's health.
        overflow = not (applied or halted or skipped)
        if pending.probes and not overflow:
            probes = jax.device_get(pending.probes)
            self.record.append(pending.number, probes)
            if "moved" in probes:
                row["moved"] = float(probes["moved"])
        logged = pending.number % self.config.train.log_every == 0 or pending.number in (1, self.config.train.steps)
        if logged or not applied:
            row["tokens_per_s"] = self._speed(pending.number)
            if not applied:
                row["update_applied"] = False
            self.writer.scalars(pending.number, row)
            self.board.advance(pending.number, row)
        self.bad = pending.number, row, skipped
        return halted

    def _speed(self, number: int) -> float:
        """Training tokens per second since the last row; evaluations and saves do not count."""
        now = time.monotonic()
        seconds, steps = now - self.clock_at - self.paused, number - self.clock_step
        self.clock_at, self.clock_step, self.paused = now, number, 0.0
        if steps > 0 and seconds > 0:
            self.speed = steps * self.config.data.batch * self.config.data.length / seconds
        return self.speed

    def _end_profile(self) -> None:
        if self.profiling:
            self.profiling = False
            jax.block_until_ready(self.state)
            jax.profiler.stop_trace()
            steps = f"{(self.profile_at or 0) + 1} to {self.number}"
            self.board.say(f"profile of steps {steps}: {self.folder.profile} (TensorBoard or Perfetto opens it)")

    # ------------------------------------------------------------------ evaluation, saves, reports, ends

    def evaluate(self) -> float | None:
        """Mean held-out loss of the state, logged; None if a signal asked to stop in between."""
        loss = held_out_loss(
            self.programs.evaluation,
            self.state.params,
            self.state.step,
            self.pipeline,
            self.config.train.eval_batches,
            self.programs.rows,
            self.signals,
        )
        if loss is not None:
            self.writer.scalars(self.number, {"eval_loss": loss})
            self.board.say(f"step {self.number}: held-out loss {loss:.4f}, {closing.against_bigram(self.corpus, loss)}")
        return loss

    def _owes_evaluation(self) -> bool:
        """Is the evaluation of the state that was restored missing? A stop may come in the middle of one."""
        due = self.number == self.config.train.steps or self._every(self.config.train.eval_every)
        rows = read_metrics(self.folder.metrics) if due and self.number else []
        return due and self.number > 0 and not any(row["step"] == self.number and "eval_loss" in row for row in rows)

    def save(self) -> None:
        """Begin to save the state; the rows up to it are on disk before it is."""
        self._flush()
        self.checkpoints.save(int(self.state.step), self.state, {"config": self.config.to_dict()})

    def _flush(self) -> None:
        self.writer.flush()
        self.record.flush(self.folder.health)

    def report(self, health: dict[str, Any] | None = None) -> None:
        """The table by depth on the terminal, and report.html; ``health`` is the verdict, if it is known."""
        self._flush()
        with self.board.away():
            self.console.print(closing.report(self.folder, self.config, self.programs.stream_dtype, health))

    def _stop(self) -> int:
        self.save()
        self.checkpoints.wait()
        name = self.signals.stop.name if self.signals.stop else ""
        self.board.say(f"stopped by {name}: saved at step {int(self.state.step)}; the same command goes on")
        return self.signals.exit_code

    def _finish(self) -> int:
        self.save()
        self.checkpoints.wait()
        summary = self._summarize(FINISHED)
        self.console.print(
            f"done: {summary['steps']} steps, held-out loss {summary['eval_loss']:.4f} nats per token, "
            f"{closing.against_bigram(self.corpus, summary['eval_loss'])}; everything is in {self.folder.path}"
        )
        return DONE

    def _summarize(self, status: str, **more: Any) -> dict[str, Any]:
        summary = closing.summarize(self.folder, self.config, self.corpus, self.programs, self.state, status, more)
        self.report(summary["health"])
        return summary

    # ------------------------------------------------------------------ non-finite values

    def _recover(self) -> int | None:
        """After a non-finite step under the run's policy: an exit code, or None to go on from ``self.state``."""
        policy, (step, row, skipped) = self.config.train.on_nonfinite, self.bad
        if policy == "skip" and skipped <= MOST_SKIPS:
            self._keep(step, row)
            self.state, self.number = passed_over(self.programs, self.state, skipped), step
            return None
        if policy == "rollback" and self.rollbacks < MOST_ROLLBACKS:
            self._keep(step, row)
            self._roll_back(step)
            return None
        batch = self.pipeline.batch(int(self.state.cursor))
        probed = self._locate(step, batch)
        self.save()
        self.checkpoints.wait()
        found, where = self._search(batch, probed)
        nonfinite = {"step": step, "where": where, "first": found, "replay": self._replay(step)}
        evidence.save(self.folder.nonfinite, step, batch, {**nonfinite, **row, "policy": policy})
        tried = {
            "skip": f" ({MOST_SKIPS} steps in a row were passed over)",
            "rollback": f" ({MOST_ROLLBACKS} rollbacks did not help)",
        }.get(policy, "")
        with self.board.away():
            self._summarize(NONFINITE, nonfinite=nonfinite)
        self.board.say(
            f"stopped at step {step}: the loss or the gradient is not finite{tried}{'; ' if where else ''}{where}; "
            f"its update was not applied, and the state of step {int(self.state.step)} is saved; "
            f"{nonfinite['replay']} runs this step again"
        )
        return STOPPED_NONFINITE

    def _keep(self, step: int, row: dict[str, Any]) -> None:
        """Before a run goes past a non-finite step: keep the state before it, its batch and what was found, if there is room."""
        if not evidence.has_room(self.folder.nonfinite):
            return
        before = replace(self.state, halted=jnp.asarray(False), skipped=jnp.int32(self.bad[2] - 1))
        batch = self.pipeline.batch(int(before.cursor))
        found, where = self._search(batch, "")
        report = {"step": step, "where": where, "first": found, "replay": self._replay(step), **row}
        policy = self.config.train.on_nonfinite
        try:
            evidence.save(
                self.folder.nonfinite, step, batch, {**report, "policy": policy}, before, self.config.to_dict()
            )
        except OSError as error:  # the run goes on without it
            self.board.say(f"step {step}: the state before it could not be kept ({error})")
        self.board.say(f"step {step}: the loss or the gradient is not finite{'; ' if where else ''}{where}")

    def _search(self, batch: np.ndarray, probed: str) -> tuple[dict[str, Any] | None, str]:
        """The first non-finite value of the step that the state is before, and in words; ``probed`` where the search finds none."""
        try:
            found = first_nonfinite(self.parts, self.state, batch)
        except (NotImplementedError, TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
            reason = str(error).partition("\n")[0][:200]
            return None, f"{probed} (its operations could not be searched one by one: {reason})".strip()
        if found is None:
            return (
                None,
                f"{probed} (done operation by operation the step is finite: fused ones round otherwise)".strip(),
            )
        return found.as_dict(), found.sentence()

    def _replay(self, step: int) -> str:
        """The command that runs ``step`` again."""
        return f"python -m resjax.replay {shlex.quote(str(self.folder.path))} --step={step}"

    def _roll_back(self, step: int) -> None:
        """Back to the last save, and on with batches after that of ``step``: no batch is drawn again."""
        self.rollbacks += 1
        cursor = int(self.state.cursor) + 1
        state, skipped = newest(self.checkpoints, self.parts)
        state = replace(state or self.parts.initial(self.pipeline.batch), cursor=jnp.int32(cursor))
        self.state, self.number = jax.device_put(state, self.programs.whole), int(state.step)
        for line in [*skipped, f"step {step}: non-finite value; back to step {self.number}, and on with later batches"]:
            self.board.say(line)
        self.record = self._new_record()
        # rows, probes and saves of later steps are of a future that will not come
        self.writer.drop_after(self.number)
        drop_health_after(self.folder.health, self.number)
        self.checkpoints.drop_after(self.number)
        self.writer.scalars(self.number, {"rolled_back_from": step})

    def _locate(self, step: int, batch: np.ndarray) -> str:
        """Run the bad step once more on the kept state, everything measured; where the fault shows in the probes, in words."""
        self.state, metrics, probes = once_more(self.programs, self.state, batch)
        if probes and (not len(self.record) or self.record.steps[-1] < step):
            self.record.append(step, probes)
        return faults.origin(probes, float(metrics["loss"]), float(metrics["grad_norm"]))


def newest(checkpoints: Checkpoints, parts: Parts) -> tuple[TrainState | None, list[str]]:
    """The newest whole state in a run's folder, or None; and a line for each newer one that was skipped.

    Raises:
      Refused: there are saved steps, but none can be used; or what is saved does not fit.
    """
    try:
        state, _, skipped = checkpoints.restore(None, parts.abstract, config=parts.config.to_dict())
        return state, skipped
    except NothingToRestore as nothing:
        if checkpoints.steps():
            raise Refused(f"{nothing}\n  remove {checkpoints.folder} to start again from step 0") from None
        return None, nothing.skipped
