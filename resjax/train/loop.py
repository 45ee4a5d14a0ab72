"""How does a run go from its first step to its last? Steps, logs, evaluations, saves, stops."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.data import Corpus, Pipeline
from resjax.health.findings import examine
from resjax.health.record import HealthRecord, site_names
from resjax.health.record import drop_after as drop_health_after
from resjax.health.report import write_report
from resjax.health.table import print_health
from resjax.scale.mesh import by_rows, replicated
from resjax.scale.program import stream_dtype
from resjax.stack import STREAM
from resjax.train.assemble import Parts
from resjax.train.checkpoint import Checkpoints, NothingToRestore
from resjax.train.leaves import tree_hash
from resjax.train.progress import Board, clock
from resjax.train.runfolder import FINISHED, NONFINITE, RunFolder
from resjax.train.signals import Signals
from resjax.train.state import TrainState
from resjax.train.step import make_evaluation, make_step
from resjax.train.writers import JsonlWriter, MultiWriter, TensorBoardWriter, read_metrics, write_json

MOST_SKIPS, MOST_ROLLBACKS = 10, 3  # non-finite steps in a row, rollbacks in a run, before a run stops after all
SUMMED_ROWS = 10  # rows of metrics.jsonl that the summary's training loss is the mean of
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
      parts: the assembled run.
      corpus, pipeline: its data.
      folder: its open folder.
      signals: read between steps and evaluation batches.
      say: prints a line.
    """

    def __init__(self, parts: Parts, corpus: Corpus, pipeline: Pipeline, folder: RunFolder, signals: Signals, say: Callable[[str], None]):
        self.parts, self.corpus, self.pipeline, self.folder, self.signals, self.say = parts, corpus, pipeline, folder, signals, say
        self.config = parts.config
        self.checkpoints = Checkpoints(folder.checkpoints, self.config.train.keep)
        self.record = HealthRecord()
        self.rollbacks = 0

    # ------------------------------------------------------------------ before the first step

    def restore(self) -> TrainState | None:
        """The newest whole state in the folder, or None. Later rows of the logs are dropped; what was skipped is said."""
        try:
            state, _, skipped = self.checkpoints.restore(None, self.parts.abstract, config=self.config.to_dict())
        except NothingToRestore as nothing:
            state, skipped = None, nothing.skipped
        for line in skipped:
            self.say(line)
        return None if state is None else jax.device_put(state, replicated(self.parts.mesh))

    def prepare(self, state: TrainState) -> None:
        """Compile the step and the evaluation; drop from the logs what lies after ``state``."""
        began = time.monotonic()
        mesh, config = self.parts.mesh, self.config
        step = make_step(self.parts.graphdef, self.parts.optimizer, self.parts.schedule, self.parts.recipe)
        whole, rows = replicated(mesh), by_rows(mesh)
        tokens = jax.ShapeDtypeStruct((config.data.batch, config.data.length + 1), jnp.int32)
        traced = jax.jit(
            step, donate_argnums=0, in_shardings=(whole, rows, whole), out_shardings=whole
        ).trace(state, tokens, jax.ShapeDtypeStruct((), jnp.bool))
        self.stream_dtype = stream_dtype(traced, STREAM)
        self.step = traced.lower().compile()
        evaluate = make_evaluation(self.parts.graphdef, self.parts.compute)
        self.evaluation = jax.jit(evaluate, in_shardings=(whole, rows, whole)).lower(state.params, tokens, state.step).compile()
        self.compile_seconds = time.monotonic() - began
        self.rows_sharding = rows
        done = int(state.step)
        rows_file = JsonlWriter(self.folder.metrics)
        rows_file.drop_after(done)
        started = any(self.folder.path.glob("events.*"))
        self.writer = MultiWriter(rows_file, TensorBoardWriter(self.folder.path, done + 1 if started else None))
        self._forget_after(done)

    def _forget_after(self, step: int) -> None:
        """Probes and saves of later steps belong to a future that will not come."""
        drop_health_after(self.folder.health, step)
        self.checkpoints.drop_after(step)

    # ------------------------------------------------------------------ the steps

    def run(self, state: TrainState, profile: bool = False) -> int:
        """Train from ``state`` to the end; returns the exit code."""
        first, steps = int(state.step), self.config.train.steps
        self.number, self.cursor = first, int(state.cursor)
        self.board = Board(first, steps)
        self.clock_at, self.clock_step, self.last_row = time.monotonic(), first, {"tokens_per_s": 0.0}
        self.paused = 0.0
        self.state = state
        pending: Pending | None = None
        batches = self.pipeline.stream(self.cursor)
        profiling = False
        with self.board:
            try:
                while self.number < steps:
                    if profile and self.number == first + PROFILED[0]:
                        jax.profiler.start_trace(str(self.folder.profile))
                        profiling = True
                    on = self._measures(self.number + 1)
                    batch = jax.device_put(next(batches), self.rows_sharding)
                    self.state, metrics, probes = self.step(self.state, batch, np.asarray(on))
                    self.number += 1
                    bad = pending and self._consume(pending)
                    pending = Pending(self.number, metrics, probes if on else None)
                    if profiling and self.number >= first + PROFILED[1]:
                        profiling = self._end_profile()
                    last, due = self.number == steps, self._due(self.number)
                    if not bad and (last or due or self.signals.stop or self.signals.report):
                        bad, pending = self._consume(pending), None
                    if bad:
                        code = self._recover()
                        if code is not None:
                            return code
                        pending, batches = None, self._restream(batches)
                        continue
                    self._serve(last)
                    if self.signals.stop:
                        return self._stop()
            finally:
                batches.close()
                if profiling:
                    self._end_profile()
        return self._finish()

    def _measures(self, number: int) -> bool:
        """Whether step ``number`` (from 1) measures: the first, each ``health.every``, the last."""
        return number in (1, self.config.train.steps) or number % self.config.health.every == 0

    def _due(self, number: int) -> bool:
        train = self.config.train
        return any(every and number % every == 0 for every in (train.eval_every, train.save_every))

    def _serve(self, last: bool) -> None:
        """What is due between two steps: a report that was asked for, an evaluation, a save."""
        train = self.config.train
        began = time.monotonic()
        if self.signals.report:
            self.signals.report = False
            self.report()
        if last or (train.eval_every and self.number % train.eval_every == 0):
            self.evaluate()
        if not last and not self.signals.stop and train.save_every and self.number % train.save_every == 0:
            self.save()
        self.paused += time.monotonic() - began

    def _consume(self, pending: Pending) -> bool:
        """Fetch a step's numbers and log them. Returns whether the run has to react to a non-finite value."""
        values = jax.device_get(pending.metrics)
        halted = bool(values.pop("halted"))
        skipped = int(values.pop("skipped"))
        finite = bool(values.pop("finite"))
        row: dict[str, Any] = {name: float(value) for name, value in values.items()}
        if self.config.precision.loss_scale is None:
            del row["loss_scale"]
        if pending.probes is not None:
            probes = jax.device_get(pending.probes)
            self.record.append(pending.number, probes)
            if "moved" in probes:
                row["moved"] = float(probes["moved"])
        logged = pending.number % self.config.train.log_every == 0 or pending.number in (1, self.config.train.steps)
        if logged or not finite:
            row["tokens_per_s"] = self._speed(pending.number)
            if not finite:
                row["update_applied"] = False
            self.writer.scalars(pending.number, row)
            self.last_row = row
            self.board.advance(pending.number, row)
        self.bad_step = pending.number
        return halted or (self.config.train.on_nonfinite == "skip" and skipped > MOST_SKIPS)

    def _speed(self, number: int) -> float:
        """Training tokens per second since the last row; evaluations and saves do not count."""
        now = time.monotonic()
        seconds, steps = now - self.clock_at - self.paused, number - self.clock_step
        self.clock_at, self.clock_step, self.paused = now, number, 0.0
        if steps <= 0 or seconds <= 0:
            return float(self.last_row["tokens_per_s"])
        return steps * self.config.data.batch * self.config.data.length / seconds

    def _end_profile(self) -> bool:
        jax.block_until_ready(self.state)
        jax.profiler.stop_trace()
        self.say(f"profile of steps {PROFILED[0] + 1} to {PROFILED[1]}: {self.folder.profile} (TensorBoard or Perfetto opens it)")
        return False

    # ------------------------------------------------------------------ evaluation, saves, reports

    def evaluate(self) -> float | None:
        """Mean held-out loss of the state, logged; None if a signal asked to stop in between."""
        loss = held_out_loss(self.evaluation, self.state, self.pipeline, self.config.train.eval_batches, self.rows_sharding, self.signals)
        if loss is not None:
            self.writer.scalars(self.number, {"eval_loss": loss})
            gap = self.corpus.baselines.bigram - loss
            self.board.say(f"step {self.number}: held-out loss {loss:.4f}, {abs(gap):.3f} {'below' if gap > 0 else 'above'} the bigram baseline")
        return loss

    def save(self) -> None:
        """Begin to save the state; the rows up to it are on disk before it is."""
        self.writer.flush()
        self.record.flush(self.folder.health)
        self.checkpoints.save(int(self.state.step), self.state, {"config": self.config.to_dict()})

    def report(self) -> dict[str, Any]:
        """The table by depth on the terminal, and report.html; returns the verdict."""
        self.writer.flush()
        self.record.flush(self.folder.health)
        record = HealthRecord.load(self.folder.health)
        health = examine(record, self.config.to_dict(), self.stream_dtype)
        print_health(record, health, self.config.residual.name)
        self.say(f"report: {write_report(self.folder.path)}")
        return health

    def _stop(self) -> int:
        self.save()
        self.checkpoints.wait()
        self.say(f"stopped by {self.signals.stop.name if self.signals.stop else ''}: saved at step {int(self.state.step)}; the same command continues")
        self.close()
        return self.signals.exit_code

    def _finish(self) -> int:
        self.save()
        self.checkpoints.wait()
        self.summarize(FINISHED)
        self.close()
        return DONE

    def summarize(self, status: str) -> None:
        """summary.json, the table and the report."""
        rows = read_metrics(self.folder.metrics)
        losses = [row["loss"] for row in rows if "loss" in row]
        evaluations = [row["eval_loss"] for row in rows if "eval_loss" in row]
        speeds = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
        summary = {
            "status": status,
            "steps": int(self.state.step),
            "train_loss": fmean(losses[-SUMMED_ROWS:]) if losses else None,
            "eval_loss": evaluations[-1] if evaluations else None,
            "baselines": self.corpus.baselines.as_dict(),
            "tokens_per_s": median(speeds) if speeds else None,
            "compile_seconds": self.compile_seconds,
            "param_hash": tree_hash(self.state.params),
            "stream_dtype": self.stream_dtype,
        }
        record = HealthRecord.load(self.folder.health)
        summary["health"] = examine(record, self.config.to_dict(), self.stream_dtype)
        write_json(self.folder.summary, summary)
        self.report()
        if status == FINISHED:
            gap = self.corpus.baselines.bigram - summary["eval_loss"]
            self.say(
                f"done: {summary['steps']} steps, held-out loss {summary['eval_loss']:.4f}, {abs(gap):.3f} nats per token "
                f"{'below' if gap > 0 else 'above'} the bigram baseline; everything is in {self.folder.path}"
            )

    def close(self) -> None:
        self.writer.close()
        self.checkpoints.close()

    # ------------------------------------------------------------------ faults

    def _recover(self) -> int | None:
        """After a non-finite step under the run's policy: an exit code, or None where the run goes on from ``self.state``."""
        policy = self.config.train.on_nonfinite
        if policy == "rollback" and self.rollbacks < MOST_ROLLBACKS:
            self.rollbacks += 1
            cursor = int(self.state.cursor) + 1  # the batch of the bad step, and all before it, are not drawn again
            self.board.say(f"step {self.bad_step}: non-finite value; going back to the last save, and on with later batches")
            self.checkpoints.wait()
            state = self.restore() or jax.device_put(self.parts.initial(), replicated(self.parts.mesh))
            self.state = replace(state, cursor=jnp.int32(cursor))
            self.number, self.cursor = int(state.step), cursor
            self.record = HealthRecord()
            self.writer.drop_after(self.number)
            self._forget_after(self.number)
            return None
        where = self._locate() if policy != "skip" else ""
        self.save()
        self.checkpoints.wait()
        tried = {"skip": f"{MOST_SKIPS} steps in a row were passed over", "rollback": f"{MOST_ROLLBACKS} rollbacks did not help"}.get(policy, "")
        self.summarize(NONFINITE)
        self.close()
        self.say(
            f"stopped at step {self.bad_step}: the loss or the gradient is not finite{f' ({tried})' if tried else ''}; {where}"
            f"its update was not applied, and the state of step {int(self.state.step)} is saved"
        )
        return STOPPED_NONFINITE

    def _locate(self) -> str:
        """Run the bad step once more on the kept state, everything measured; where the first non-finite value arises, in words."""
        batch = jax.device_put(self.pipeline.batch(int(self.state.cursor)), self.rows_sharding)
        again = replace(self.state, halted=jax.device_put(jnp.asarray(False), replicated(self.parts.mesh)))
        self.state, _, probes = self.step(again, batch, np.asarray(True))
        self.state = replace(self.state, halted=jnp.asarray(False))
        probes = jax.device_get(probes)
        if not len(self.record) or self.record.steps[-1] < self.bad_step:
            self.record.append(self.bad_step, probes)
        names = site_names(len(self.parts.abstract.params["stack"]["runs"][0]["sites"]))
        for name, direction, order in (("finite", "forward", 1), ("stream_grad", "backward", -1)):
            if name not in probes:
                continue
            bad = probes[name] == 0 if name == "finite" else ~np.isfinite(probes[name])
            if bad.any():
                block, site = np.argwhere(bad)[::order][0]
                return f"first non-finite value: {direction}, block {block}, {names[site]}; "
        return ""

    def _restream(self, batches: Any) -> Any:
        batches.close()
        return self.pipeline.stream(self.cursor)


def held_out_loss(evaluation: Any, state: TrainState, pipeline: Pipeline, most: int, rows: Any, signals: Signals | None = None) -> float | None:
    """Mean loss of the first ``most`` held-out batches (or all there are); None if a signal asked to stop in between."""
    losses = []
    for i in range(min(most, pipeline.held_out_batches)):
        if signals and signals.stop:
            return None
        losses.append(evaluation(state.params, jax.device_put(pipeline.held_out(i), rows), state.step))
    return fmean(float(loss) for loss in losses)


def startup_lines(parts: Parts, corpus: Corpus, described: list[str]) -> list[str]:
    """What a run prints before it compiles."""
    count = sum(leaf.size for leaf in jax.tree.leaves(parts.abstract.params))
    config = parts.config
    return [
        *corpus.summary_lines(),
        *described,
        f"model: {config.model.depth} blocks x width {config.model.width}, {count:,} parameters; compute {parts.compute}, stream "
        f"{parts.stream}; remat {parts.remat}; {parts.mesh.size} {jax.devices()[0].device_kind} device{'s' if parts.mesh.size > 1 else ''}",
    ]


__all__ = ["Loop", "clock", "held_out_loss", "startup_lines"]
