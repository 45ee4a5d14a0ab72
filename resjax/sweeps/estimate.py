"""How long will a sweep take? From the cells that ended, else from cells of other sizes, else by a rule for 2 CPU cores.

The rule counts products of matrices, passes over the numbers of the stream, and a fixed cost a block and a step; its constants fit the
runs of benchmarks/results/configs.json (4 to 24 blocks of width 16 to 64) within 15 %, and steps of 128 and 1,000 blocks of width 16.
Where a machine has ended or timed a cell, only ratios of the rule are used.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from resjax.config.schema import FIELDS
from resjax.config.tree import flat
from resjax.config.validate import BYTES, SYMBOLS
from resjax.sweeps.cells import Architecture, Cell
from resjax.sweeps.one import DONE
from resjax.sweeps.shared import compile_shared
from resjax.sweeps.texts import Texts
from resjax.sweeps.wanted import ENDS_ONLY, Wanted
from resjax.train.progress import clock

STEP, BLOCK, FLOPS = 2e-3, 0.08e-3, 125e9  # seconds, seconds, operations a second
PASSES = 66e-9  # seconds that a block takes a number of the stream, beside its products
COMPILED = 8.0  # seconds that the three programs of an architecture take to compile
TIMED_STEPS, TIMED_SECONDS = 10, 5.0  # at most, of --measure


def rule(fields: Mapping[str, Any], curves: bool = False) -> float:
    """Seconds of a cell on 2 CPU cores, without compiling; ``fields`` by path."""
    length, width, steps = fields["data.length"], fields["model.width"], fields["train.steps"]
    tokens = length * fields["data.batch"]
    hidden = fields["model.mlp_ratio"] * (1.5 if fields["model.mlp"] == "swiglu" else 1)
    vocab = fields["model.vocab"] or SYMBOLS.get(fields["data.source"], BYTES)
    block = tokens * (2 * (4 + 2 * hidden) * width**2 + 4 * length * width)
    forward = (fields["model.depth"] * block + tokens * 2 * width * vocab) / FLOPS
    slices = fields["train.accumulate"]
    beside = (BLOCK + PASSES * tokens * width) * fields["model.depth"]  # the products
    step = STEP + slices * beside + 3.5 * forward  # backward twice, and half of forward again
    every = fields["train.eval_every"]
    evaluations = 1 + ((steps - 1) // every if curves and every > 0 else 0)
    return steps * step + evaluations * fields["train.eval_batches"] * (STEP + 0.3 * beside + forward)


@dataclass(frozen=True)
class Guess:
    """Of the cells of an architecture: seconds of each, seconds to compile, and where that comes from."""

    cell: float
    compiling: float
    basis: str


class Estimate:
    """Seconds of cells, better with every line. What studies and looks take is known only from lines of cells that had them.

    Args:
      groups: the architectures of the sweep.
      wanted: what each line keeps.
      device: their kind; lines from others tell nothing, and the rule holds for 'cpu' alone.
    """

    def __init__(self, groups: Sequence[Architecture], wanted: Wanted = ENDS_ONLY, device: str = "cpu"):
        self.device, self.wanted = device, wanted
        self._rule = {group.name: rule(flat(group.cells[0].config), wanted.curves) for group in groups}
        self._group = {cell.name: group.name for group in groups for cell in group.cells}
        self._own: dict[str, list[float]] = {}
        self._points: list[tuple[float, float]] = []  # by the rule, and as it was
        self._compiling: list[float] = []
        self._measured: dict[str, float] = {}

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> "Estimate":
        """Take the lines of cells that are done."""
        for row in rows:
            if row.get("status") != DONE or row.get("device") != self.device or not row.get("seconds"):
                continue
            fields = {path: row.get("config", {}).get(path, FIELDS[path].default) for path in FIELDS}
            self._points.append((rule(fields, "curve" in row), row["seconds"]))
            if name := self._group.get(row["cell"]):
                self._own.setdefault(name, []).append(row["seconds"])
            if row.get("compile_seconds"):
                self._compiling.append(row["compile_seconds"])
        return self

    def measure(self, groups: Iterable[Architecture]) -> None:
        """Time some steps of the smallest and of the largest of these architectures, where no line tells.

        Raises:
          Refused: their text is missing, or the machine does not have what they ask for.
        """
        open_ = sorted((group for group in groups if group.name not in self._own), key=lambda g: self._rule[g.name])
        for group in {one.name: one for one in (*open_[:1], *open_[-1:])}.values():
            seconds, compiling = timed(group, self.wanted)
            self._measured[group.name] = seconds
            self._points.append((self._rule[group.name], seconds))
            self._compiling.append(compiling)

    def guess(self, group: Architecture) -> Guess | None:
        """Of an architecture; None where nothing is known of this kind of device."""
        compiling = float(np.mean(self._compiling)) if self._compiling else COMPILED
        if own := self._own.get(group.name):
            basis = f"as {len(own)} of its cells took" if len(own) > 1 else "as one of its cells took"
            return Guess(float(np.mean(own)), compiling, basis)
        if group.name in self._measured:
            return Guess(self._measured[group.name], compiling, "timed steps")
        expected = self._rule[group.name]
        if self._points:
            nearest = min(abs(math.log(point / expected)) for point, _ in self._points)
            ratios = [took / point for point, took in self._points if abs(math.log(point / expected)) <= nearest + 0.01]
            return Guess(
                expected * float(np.mean(ratios)),
                compiling,
                "from cells of other sizes" if nearest else "as cells of its size took",
            )
        return Guess(expected, compiling, "by a rule for 2 CPU cores") if self.device == "cpu" else None

    def left(
        self, lists: Iterable[tuple[Architecture, Sequence[Cell]]], workers: int = 1, compiled: str = ""
    ) -> float | None:
        """Seconds of the cells that are left, by architecture, on so many workers; ``compiled`` is the one that need not be."""
        total = 0.0
        for group, cells in lists:
            if not cells:
                continue
            if (guess := self.guess(group)) is None:
                return None
            total += guess.cell * len(cells) + (guess.compiling if group.name != compiled else 0.0)
        return total / workers


def timed(group: Architecture, wanted: Wanted) -> tuple[float, float]:
    """Seconds of the first cell of an architecture, from some of its steps and an evaluation, and of compiling."""
    texts, config = Texts(), group.cells[0].config
    corpus, pipeline = texts.corpus(config), texts.pipeline(config)
    shared = compile_shared(group, config.model.vocab or corpus.vocab)
    numbers = shared.numbers(config)
    programs = shared.programs(numbers)
    state = shared.initial(numbers, shared.parts.seen(pipeline.batch))
    began, seconds = 0.0, []
    for i in range(1 + min(TIMED_STEPS, config.train.steps)):  # the first warms up
        began = time.monotonic()
        on = np.asarray(i % config.health.every == 0)
        state = jax.block_until_ready(programs.step(state, programs.batch(pipeline.batch(i)), on))[0]
        seconds.append(time.monotonic() - began)
        if i and sum(seconds[1:]) > TIMED_SECONDS:
            break
    began = time.monotonic()
    jax.block_until_ready(programs.evaluation(state.params, programs.batch(pipeline.held_out(0)), state.step))
    evaluation = time.monotonic() - began
    steps, every = config.train.steps, config.train.eval_every
    evaluations = 1 + ((steps - 1) // every if wanted.curves and every > 0 else 0)
    batches = min(config.train.eval_batches, pipeline.held_out_batches)
    jax.clear_caches()
    return steps * float(np.mean(seconds[1:])) + evaluations * batches * evaluation, shared.seconds


def about(seconds: float | None) -> str:
    """'about 12 min 30 s', or that it is not known."""
    return "unknown" if seconds is None else f"about {clock(seconds)}"
