"""How is a step of a run done again? From the state that was kept before it, or run up to from the last checkpoint before it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax import data
from resjax.config.schema import HEALTH_GROUPS
from resjax.config.tree import from_dict
from resjax.config.validate import BYTES, SYMBOLS
from resjax.errors import Refused
from resjax.train import evidence
from resjax.train.assemble import Parts, assemble, quick_start
from resjax.train.checkpoint import Checkpoints, saved_steps
from resjax.train.forensics import First, first_nonfinite
from resjax.train.leaves import named, rebuilt, to_hosts
from resjax.train.program import StepProgram, compile_step, passed_over
from resjax.train.roles import block_roles
from resjax.train.runfolder import PACKAGES, RunFolder, fields_of, installed
from resjax.train.saved import facts_of, refuse_other_scheme
from resjax.train.state import TrainState
from resjax.train.writers import read_metrics

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@dataclass(frozen=True)
class Replayed:
    """A step, done again: once as the run did it, and once with everything measured.

    Attributes:
      step: from 1.
      metrics: loss, grad_norm, lr, finite, loss_scale, by the run's own program.
      measured: loss and grad_norm by the program that measures everything; rounded otherwise, as it is another one.
      probes: of all groups, by that program; see :mod:`resjax.health.record`.
      recorded: the loss and gradient norm of the same step in metrics.jsonl, if it was logged.
      steady: where the numbers are not those recorded, whether the step, done twice here, gives the same both times.
      first: the first non-finite value; None where all is finite, or it was not found.
    """

    step: int
    metrics: dict[str, float]
    measured: dict[str, float]
    probes: dict[str, np.ndarray]
    recorded: dict[str, float]
    steady: bool | None = None
    first: First | None = None

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.metrics["loss"]) and np.isfinite(self.metrics["grad_norm"]))

    @property
    def same(self) -> bool | None:
        """Whether loss and gradient norm are those recorded, bit for bit; None where none are."""
        return alike(self.metrics, self.recorded) if self.recorded else None


def alike(metrics: Mapping[str, Any], recorded: Mapping[str, float]) -> bool:
    """Whether the numbers that were recorded are these, bit for bit."""
    return all(np.array_equal(np.float32(metrics[name]), np.float32(was), True) for name, was in recorded.items())


@dataclass
class Again:
    """A run that is over, or goes on, with its steps to be done again. Nothing in its folder is changed.

    Attributes:
      folder, facts, config: of the run.
      parts: assembled for this machine.
      unrolled: what is measured is measured with the blocks one by one, nothing scanned and nothing rematerialised.
      notes: what a reader should know, one line each.
      source: what the steps were run from, in words.
      strayed: the first step that was run again on the way and whose numbers are not those recorded; None: there is none.
      tried: by step, the numbers of the try that was kept.
    """

    folder: RunFolder
    facts: dict[str, Any]
    config: Any
    parts: Parts
    unrolled: bool = True
    notes: list[str] = field(default_factory=list)
    source: str = ""
    strayed: int | None = None
    tried: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str | os.PathLike, unrolled: bool = True) -> "Again":
        """The run in a folder.

        Raises:
          Refused: no run there, or its scheme's file is another one.
        """
        folder = RunFolder(path)
        facts = facts_of(folder)
        config = from_dict(fields_of(facts))
        refuse_other_scheme(facts, config)
        notes = [*other_versions(facts), *inexact(facts)]
        if (facts.get("device") or {}).get("count") != jax.device_count():
            config.mesh.data = 1
        return cls(folder, facts, config, assemble(config, vocab_of(config)), unrolled, notes)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder.metrics) if self.folder.metrics.is_file() else []

    @cached_property
    def saved(self) -> list[int]:
        """The steps that there are checkpoints of."""
        return saved_steps(self.folder.checkpoints)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the weights in its blocks, in the order in which probes have them."""
        return block_roles(self.parts.abstract.params)

    @property
    def last(self) -> int:
        """The last step that the run has tried."""
        tried = [row["step"] for row in self.rows], self.saved, evidence.steps(self.folder.nonfinite)
        return max((step for steps in tried for step in steps), default=0)

    @cached_property
    def pipeline(self) -> data.Pipeline:
        """The run's batches.

        Raises:
          Refused: its corpus is not what it was.
        """
        section = self.config.data
        corpus = data.load(section.source, section.field, self.config.seed)
        was, now = (self.facts.get("corpus") or {}).get("sha256"), corpus.sha256
        if was not in (None, now):
            raise Refused(
                f"the corpus of data.source '{section.source}' has changed since the run was made (sha256 {was[:12]} then, "
                f"{now[:12]} now), so its batches cannot be drawn again"
            )
        return data.Pipeline(corpus, section.length, section.batch, self.config.seed)

    @cached_property
    def program(self) -> StepProgram:
        """The run's own step."""
        return compile_step(self.parts, self.parts.abstract)

    @cached_property
    def everything(self) -> StepProgram:
        """The step with all groups of probes, of the same states."""
        config = self.config.copy_and_resolve_references()
        config.health.groups = HEALTH_GROUPS
        if self.unrolled:
            config.model.scan, config.model.remat = False, "none"
        parts = assemble(config, vocab_of(config))
        return compile_step(parts, self.parts.abstract, quick_start(self.parts.abstract.params))

    @cached_property
    def logged(self) -> dict[int, dict[str, float]]:
        """By step, the loss and gradient norm that metrics.jsonl has of it."""
        rows = [row for row in reversed(self.rows) if "loss" in row]
        return {row["step"]: {name: row[name] for name in ("loss", "grad_norm") if name in row} for row in rows}

    def check(self, steps: Sequence[int]) -> None:
        """Refuse steps that the run has not."""
        for step in steps:
            if step < 1:
                raise Refused(f"--step is {step}, but steps count from 1")
            if step > self.last:
                raise Refused(f"--step is {step}, but the run in '{self.folder.path}' has done {self.last} steps")

    def done_twice(self, step: int) -> bool:
        """Whether the run did a step again after a try that it did not go on from: after a rollback, or after it was stopped by it."""
        kept = evidence.report(self.folder.nonfinite, step)
        if kept is not None and step in self.logged:
            return not alike(self.logged[step], tried_of(kept))
        reached = max((*(row["step"] for row in self.rows), *self.saved), default=0)
        return reached >= step and any(row["step"] < step <= row.get("rolled_back_from", 0) for row in self.rows)

    def which(self, step: int, kept: bool) -> str:
        """Which of its tries of a step was done again, in a sentence; empty where the run did it once. ``kept``: see :meth:`replay`."""
        if not self.done_twice(step):
            return ""
        if step in self.tried:
            return f"this is the try of step {step} that was not finite; the run did step {step} again afterwards, which --repeated replays"
        there = evidence.report(self.folder.nonfinite, step) is not None
        other = (
            f"is kept in nonfinite/{step}, which --repeated leaves aside"
            if there and not kept
            else "cannot be replayed"
        )
        return f"the run did step {step} twice; this is the repeat that it went on from, and the try before {other}"

    def replay(self, steps: Sequence[int], kept: bool = True) -> list[Replayed]:
        """Some steps, in increasing order, done again.

        Args:
          kept: of the first of them, the try that was not finite and was kept, if there is one; else all as the run went on from.

        Raises:
          Refused: see :meth:`check`, :meth:`before`; or a step on the way is not finite this time.
        """
        self.check(steps)
        state, batch = self.before(steps[0], kept)
        which = (self.which(step, kept) for step in steps)
        self.notes += [sentence for sentence in which if sentence]
        done = []
        for step in steps:
            state = self._up_to(state, step)
            tokens = self.pipeline.batch(int(state.cursor)) if batch is None else batch
            state, replayed = self._step(state, step, tokens)
            done.append(replayed)
            batch = None
        return done

    def before(self, step: int, kept: bool = True) -> tuple[TrainState, np.ndarray | None]:
        """A state at or before ``step``'s start, and the step's batch where it was kept; ``kept`` False: leave aside what was kept.

        Raises:
          Refused: there is no state before it.
        """
        config = self.config.to_dict()
        found = evidence.load(self.folder.nonfinite, step, self.parts.abstract, config) if kept else None
        place = f"nonfinite/{step}"
        if found and found.state is not None:
            self.source = f"the state kept in {place}"
            self.tried[step] = tried_of(found.report)
            return self._placed(found.state), found.batch
        earlier = [number for number in self.saved if number < step]
        if found and (not earlier or earlier[-1] != step - 1):
            self.notes.append(f"{place} is left aside: the checkpoint of step {step - 1} that belongs to it is gone")
            found = None
        checkpoints = Checkpoints(self.folder.checkpoints)
        try:
            for number in reversed(earlier):
                try:
                    state, _, _ = checkpoints.restore(number, self.parts.abstract, config=config)
                except Refused as refused:
                    self.notes.append(str(refused).partition("\n")[0])
                    found = None
                    continue
                self.source = f"checkpoint {number}" + (f" and the batch kept in {place}" if found else "")
                if found:
                    self.tried[step] = tried_of(found.report)
                return self._placed(state), found.batch if found else None
        finally:
            checkpoints.close()
        if self.facts.get("lineage"):
            have = f"the first is of step {self.saved[0]}" if self.saved else "there are none"
            raise Refused(
                f"--step is {step}, but the run keeps no checkpoint before it ({have}), and it was started from another "
                f"run; replay a later step"
            )
        self.source = "the start of the run"
        return self._placed(self.parts.initial(self.pipeline.batch)), None

    def recorded(self, step: int) -> dict[str, float]:
        """The loss and the gradient norm that are known of a step's try."""
        return self.tried.get(step) or self.logged.get(step, {})

    def _placed(self, state: TrainState) -> TrainState:
        state = replace(state, halted=jnp.asarray(False))
        return jax.device_put(state, self.program.whole)

    def _up_to(self, state: TrainState, step: int) -> TrainState:
        """Run on until the next step is ``step``."""
        while (done := int(state.step)) < step - 1:
            state = self._rolled_back(state)
            batch = self.program.batch(self.pipeline.batch(int(state.cursor)))
            state, metrics, _ = self.program.step(state, batch, np.asarray(False))
            if self.strayed is None and not alike(metrics, self.logged.get(done + 1, {})):
                self.strayed = done + 1
            if bool(metrics["halted"]):
                if self.config.train.on_nonfinite != "skip":
                    raise Refused(
                        f"step {done + 1}, on the way from {self.source} to --step={step}, is not finite when it is run again, "
                        f"and the run went on from it; replay step {done + 1}"
                    )
                state = passed_over(self.program, state, int(metrics["skipped"]))
        return self._rolled_back(state)

    def _rolled_back(self, state: TrainState) -> TrainState:
        """``state`` past the batches that rollbacks to its step have left behind, as the run went on."""
        done = int(state.step)
        past = sum(
            int(row["rolled_back_from"]) - done
            for row in self.rows
            if row["step"] == done and "rolled_back_from" in row
        )
        if not past:
            return state
        return replace(state, cursor=jax.device_put(jnp.int32(int(state.cursor) + past), self.program.whole))

    def _step(self, state: TrainState, step: int, tokens: np.ndarray) -> tuple[TrainState, Replayed]:
        """One step: the state after it, and what it was.

        A program takes the buffers of the state that it is given. The state before the step is kept in the memory of the host in
        between, so that there is one on the device at a time, and two while a step is searched or done twice.
        """
        batch, before = self.program.batch(tokens), to_hosts(named(state))
        everything, probes = self.everything.step(state, batch, np.asarray(True))[1:]
        state, metrics, _ = self.program.step(self._again(before), batch, np.asarray(False))
        numbers = {name: float(metrics[name]) for name in ("loss", "grad_norm", "lr", "finite", "loss_scale")}
        measured = {name: float(everything[name]) for name in ("loss", "grad_norm")}
        replayed = Replayed(step, numbers, measured, jax.device_get(probes), self.recorded(step))
        if replayed.same is False:
            twice = self.program.step(self._again(before), batch, np.asarray(False))[1]
            replayed = replace(replayed, steady=alike(twice, {name: numbers[name] for name in ("loss", "grad_norm")}))
        if not replayed.finite:
            replayed = replace(replayed, first=first_nonfinite(self.parts, self._again(before), tokens))
        if bool(metrics["halted"]):
            state = passed_over(self.program, state, int(metrics["skipped"]))
        return state, replayed

    def _again(self, arrays: Mapping[str, np.ndarray]) -> TrainState:
        """A state out of the memory of the host."""
        return jax.device_put(rebuilt(arrays, self.parts.abstract), self.program.whole)


def tried_of(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a try that was kept."""
    return {name: report[name] for name in ("loss", "grad_norm") if isinstance(report.get(name), float)}


def vocab_of(config: Any) -> int:
    """Tokens of a run's data; not of the corpus itself, which may not be there."""
    return SYMBOLS.get(config.data.source, BYTES)


def other_versions(facts: Mapping[str, Any]) -> list[str]:
    """A line if packages have other versions than in the run's last session."""
    sessions = [facts, *facts.get("continued", [])]
    was, now = sessions[-1].get("versions") or {}, installed()
    names = [name for name in PACKAGES if name in was and was[name] != now[name]]
    listed = ", ".join(f"{name} {was[name]} then, {now[name]} now" for name in names)
    return [f"the run was made with other versions ({listed}): the last bits may differ"] if names else []


def inexact(facts: Mapping[str, Any]) -> list[str]:
    """Lines that say why the numbers may not be those of the run, bit for bit."""
    was = ([facts, *facts.get("continued", [])])[-1].get("device") or {}
    here = {"kind": jax.devices()[0].device_kind, "platform": jax.default_backend(), "count": jax.device_count()}
    notes = []
    if was and was != here:
        shown = [f"{side.get('count')} x {side.get('kind')}" for side in (was, here)]
        notes.append(f"the run was made on {shown[0]}, this is {shown[1]}: the numbers differ in their last bits")
    if here["platform"] == "gpu" and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        notes.append(
            "a GPU adds in an order that changes from time to time, so a step run again is close, not the same; "
            f"XLA_FLAGS={DETERMINISTIC}, for the run and its replay, makes it the same"
        )
    return notes
