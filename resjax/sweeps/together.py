"""How are cells that share a program trained at once? Their states stacked along one axis, which lies over the devices.

On an accelerator a small model leaves most of the device idle, and many at once cost little more than one; a CPU gains
nothing (measured: 0.9 times the speed), so there cells follow one another unless asked otherwise.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from resjax.data import Corpus, Pipeline
from resjax.errors import Refused
from resjax.scale.mesh import replicated
from resjax.scale.program import stream_dtype
from resjax.sweeps.cells import Architecture, Cell
from resjax.sweeps.one import FETCHED, SoFar, close
from resjax.sweeps.shared import Functions, Numbers, Shared
from resjax.sweeps.subject import Looking
from resjax.sweeps.wanted import Wanted
from resjax.train.assemble import quick_start
from resjax.train.loop import Pending
from resjax.train.program import STREAM, tokens
from resjax.train.signals import Signals, Stopped
from resjax.train.state import TrainState

CELLS = "cells"  # axis of the devices
MOST = 64  # cells at once: beyond, a step takes as many times as long
UNKNOWN = 8  # where a device does not say how much memory it has
SHARE = 0.8  # of a device's memory


@dataclass(frozen=True, eq=False)
class Ready:
    """A cell with what it is trained on."""

    config: Any
    corpus: Corpus
    pipeline: Pipeline


@dataclass(frozen=True, eq=False)
class Group:
    """Programs for ``size`` cells at once; each argument has the axis of the cells in front.

    Attributes:
      shared: the same programs for one cell: it is computed ``size`` times over, which is for the odd step only.
      initial, step, evaluation: as those of :class:`resjax.sweeps.shared.Shared`; step takes one ``on`` for all.
      place: how arrays lie on the devices.
      bytes: of a device's memory that a step takes.
    """

    size: int
    shared: Shared
    initial: Callable[..., TrainState]
    step: Callable[..., tuple[TrainState, dict, dict]]
    evaluation: Callable[..., jax.Array]
    place: NamedSharding
    bytes: int

    def put(self, rows: Sequence[Any]) -> Any:
        """A pytree for each cell, as one on the devices."""
        return jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *rows), self.place)

    def one(self, tree: Any, i: int) -> Any:
        """Of the ``i``-th cell, as an ordinary run has it."""
        return jax.device_put(jax.tree.map(lambda leaf: leaf[i], tree), replicated(self.shared.parts.mesh))


def check(cells: Sequence[Cell], asked: int) -> None:
    """Refuse what cannot go together.

    Raises:
      Refused: cells want several devices each.
    """
    for cell in cells:
        if asked > 1 and cell.config is not None and cell.config.mesh.data > 1:
            raise Refused(
                f"--together={asked} and mesh.data={cell.config.mesh.data} contradict one another: of cells that are trained at "
                "once each lies on one device; leave mesh.data at -1, or give --together=1"
            )


def size_for(cells: Sequence[Cell], asked: int, device_count: int, platform: str) -> int:
    """How many of these cells to train at once; 1 = one after another.

    Rounds are as full as can be: of 5 cells, 3 and 2 rather than 4 and 1. A multiple of the devices, that all have work.

    Args:
      cells: of one architecture.
      asked: 0 = as many as pays, if memory allows.
    """
    most = asked
    if not asked:
        own = platform == "cpu" or any(cell.config.mesh.data > 1 for cell in cells)
        most = 1 if own else MOST * device_count
    if most == 1 or len(cells) == 1:
        return 1
    rounds = -(-len(cells) // most)
    even = -(-len(cells) // rounds)
    return -(-even // device_count) * device_count


def compile_fitting(
    architecture: Architecture, vocab: int, size: int, bounded: bool, say: Callable[[str], None]
) -> Group:
    """The programs for ``size`` cells, or, if ``bounded``, for as many as the devices have memory for.

    Raises:
      Refused: see :func:`resjax.sweeps.shared.compile_shared`.
    """
    count, limit = jax.device_count(), memory()
    if bounded and limit is None:
        size = min(size, max(1, UNKNOWN // count) * count)
    while True:
        group = None
        try:
            group = compile_group(architecture, vocab, size)
        except jax.errors.JaxRuntimeError as error:
            if not bounded or size <= count or "RESOURCE_EXHAUSTED" not in str(error):
                raise
        if group is not None and (not bounded or size <= count or limit is None or group.bytes <= SHARE * limit):
            return group
        share = SHARE * limit / group.bytes if group is not None and limit is not None else 0.5
        fewer = max(1, int(min(share, 0.9) * size) // count) * count
        say(f"  {size} cells at once do not fit into memory; {fewer} are tried")
        size = fewer


def memory() -> int | None:
    """Bytes of a device's memory; None where it does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def compile_group(architecture: Architecture, vocab: int, size: int) -> Group:
    """Assemble, trace and compile for ``size`` cells."""
    began = time.monotonic()
    made = Functions.of(architecture, vocab, devices=1)
    parts = made.parts
    devices = jax.devices()
    devices = devices[: len(devices) if size % len(devices) == 0 else 1]
    mesh = jax.make_mesh((len(devices),), (CELLS,), axis_types=(AxisType.Auto,), devices=devices)
    place, whole = NamedSharding(mesh, PartitionSpec(CELLS)), NamedSharding(mesh, PartitionSpec())

    def many(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), tree)

    def steps(state: TrainState, batch: jax.Array, on: jax.Array, numbers: Any) -> tuple:
        def step(state: TrainState, batch: jax.Array, numbers: Any) -> tuple:
            return made.step(state, batch, on, numbers, alone=False)

        return jax.vmap(step)(state, batch, numbers)

    numbers, state, batch = many(made.shapes()), many(parts.abstract), many(tokens(parts))
    options = quick_start(parts.abstract.params)
    start = jax.jit(jax.vmap(made.initial), in_shardings=place, out_shardings=place, compiler_options=options)
    jitted = jax.jit(steps, donate_argnums=0, in_shardings=(place, place, whole, place), out_shardings=place)
    traced = jitted.trace(state, batch, jax.ShapeDtypeStruct((), jnp.bool), numbers)
    step = traced.lower().compile()
    evaluate = jax.jit(jax.vmap(made.evaluation), in_shardings=place, out_shardings=place)
    evaluation = evaluate.lower(state.params, batch, state.step, numbers).compile()
    initial = start.lower(numbers, many(made.first())).compile()

    def alone(program: Callable[..., Any], common: int | None = None) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            of_all = [one if i == common else copies(one) for i, one in enumerate(given)]
            return jax.tree.map(lambda leaf: jax.device_put(leaf[0], replicated(parts.mesh)), program(*of_all))

        return run

    def copies(tree: Any) -> Any:
        def spread(leaf: Any) -> jax.Array:
            leaf = jnp.asarray(leaf)
            return jnp.broadcast_to(leaf[None], (size, *leaf.shape))

        return jax.device_put(jax.tree.map(spread, tree), place)

    shared = Shared(
        parts,
        made.traced,
        alone(initial),
        alone(step, common=2),
        alone(evaluation),
        stream_dtype(traced, STREAM),
        time.monotonic() - began,
    )
    return Group(size, shared, initial, step, evaluation, place, _bytes(step))


def _bytes(program: Any) -> int:
    """Of a device's memory that a compiled program takes; 0 where its compiler does not say."""
    told = program.memory_analysis()
    if told is None:
        return 0
    kept = told.argument_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    return kept + told.temp_size_in_bytes + told.generated_code_size_in_bytes


def train(
    cells: Sequence[Ready], group: Group, signals: Signals, wanted: Wanted
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train at most ``group.size`` cells to their ends; gives the place of each and its results, as soon as it ended.

    The numbers are those of :func:`resjax.sweeps.one.train`, but for rounding. A cell takes its share of the seconds, and those of its
    own studies.

    Raises:
      Stopped: a signal asked to stop.
    """
    began, closing = time.monotonic(), 0.0
    run = _Run(cells, group, signals, wanted)
    for i in run.steps():
        ended = time.monotonic()
        share = (ended - began - closing) / len(cells)
        state = group.one(run.state, i)
        row = close(state, run.seen[i], run.looking[i], cells[i].corpus, signals, run.losses.get(i))
        own = time.monotonic() - ended
        closing += own
        yield i, row | {"seconds": round(share + own, 3), "together": len(cells)}


class _Run:
    """Cells that are trained at once; places of a group that they leave free repeat the last of them."""

    def __init__(self, cells: Sequence[Ready], group: Group, signals: Signals, wanted: Wanted):
        self.cells, self.group, self.signals = cells, group, signals
        self.lanes = [*cells, *[cells[-1]] * (group.size - len(cells))]
        self.numbers: list[Numbers] = [group.shared.numbers(lane.config) for lane in self.lanes]
        self.placed = group.put(self.numbers)
        seen = [group.shared.parts.seen(lane.pipeline.batch) for lane in self.lanes]
        self.state = group.initial(self.placed, None if seen[0] is None else group.put(seen))
        self.seen = [SoFar(cell.config, wanted) for cell in cells]
        self.looking = [Looking(wanted.looks, cell.config, group.shared, cell.pipeline) for cell in cells]
        self.curves = wanted.curves
        self.open = list(range(len(cells)))
        self.losses: dict[int, float] = {}

    def steps(self) -> Iterator[int]:
        """The places of cells that ended: those that left the numbers when it is noticed, the others after the last step."""
        last = self.cells[0].config.train.steps  # of all: the program's schedule depends on it
        streams = {id(lane.pipeline): lane.pipeline.stream() for lane in self.lanes}
        waiting: list[Pending] = []
        try:
            for number in range(1, last + 1):
                if self.signals.stop:
                    raise Stopped
                drawn = {pipeline: next(stream) for pipeline, stream in streams.items()}
                batch = self.group.put([drawn[id(lane.pipeline)] for lane in self.lanes])
                on = any(self.seen[i].measures(number) or number in self.seen[i].profiled for i in self.open)
                self.state, metrics, probes = self.group.step(self.state, batch, np.asarray(on), self.placed)
                waiting.append(Pending(number, metrics, probes if on else None))
                evaluated = [i for i in self.open if self.curves and self._evaluates(i, number, last)]
                looked = [i for i in self.open if number in self.looking[i].steps]
                pauses = evaluated or looked or number == last
                if pauses or len(waiting) > FETCHED:
                    kept = 0 if pauses else 1  # the step under way
                    self._take(waiting[: len(waiting) - kept])
                    del waiting[: len(waiting) - kept]
                    for bad in [i for i in self.open if self.seen[i].bad]:
                        self.open.remove(bad)
                        yield bad
                    if not self.open:
                        return
                if going := [i for i in evaluated if i in self.open]:
                    self._evaluate()
                    for i in going:
                        self.seen[i].curve.append({"step": number, "eval_loss": self.losses[i]})
                for i in looked:
                    if self.signals.stop:
                        raise Stopped
                    if i in self.open:
                        self.looking[i].look(self.group.one(self.state, i), self.seen[i].losses)
        finally:
            for stream in streams.values():
                stream.close()
        self._evaluate()
        yield from self.open

    def _evaluates(self, i: int, number: int, last: int) -> bool:
        every = self.cells[i].config.train.eval_every
        return every > 0 and number % every == 0 and number < last

    def _take(self, waiting: Sequence[Pending]) -> None:
        """Hand each cell its numbers."""
        fetched = jax.device_get([(pending.metrics, pending.probes) for pending in waiting])
        for i in self.open:
            rows = jax.tree.map(lambda leaf, i=i: leaf[i], fetched)
            self.seen[i].take([Pending(pending.number, *row) for pending, row in zip(waiting, rows, strict=True)])

    def _evaluate(self) -> None:
        """The held-out loss of every cell as it is."""
        counts = [min(lane.config.train.eval_batches, lane.pipeline.held_out_batches) for lane in self.lanes]
        rows = []
        for k in range(max(counts)):
            if self.signals.stop:
                raise Stopped
            batch = self.group.put(
                [lane.pipeline.held_out(min(k, n - 1)) for lane, n in zip(self.lanes, counts, strict=True)]
            )
            rows.append(self.group.evaluation(self.state.params, batch, self.state.step, self.placed))
        losses = jax.device_get(rows)
        self.losses = {i: fmean(float(row[i]) for row in losses[: counts[i]]) for i in self.open}
