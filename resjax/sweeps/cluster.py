"""How is a sweep spread over processes and machines? Ray's workers train one cell after another each; one process writes."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from resjax.errors import Refused
from resjax.sweeps.cells import Architecture, Cell
from resjax.sweeps.estimate import Estimate
from resjax.sweeps.one import KILLED, Stopped
from resjax.sweeps.texts import Known
from resjax.sweeps.wanted import Wanted
from resjax.sweeps.worker import Row, Worker, failed
from resjax.train.session import platform
from resjax.train.signals import Signals

POLL = 0.2  # seconds between looks at the signals
INSTALL = "python -m pip install 'resjax[sweep]'"


class Remote:
    """What runs in a process of Ray: a :class:`Worker`, told one cell at a time."""

    def __init__(self, wanted: Wanted, known: Known):
        self._worker = Worker(wanted, known, say=lambda _: None)

    def facts(self) -> tuple[str, str]:
        """Platform and kind of its device."""
        return platform(), jax.devices()[0].device_kind

    def train(self, group: Architecture, cell: Cell) -> Row:
        """The row of a cell; compiles where the architecture is another one than before."""
        before = self._worker.compiled
        row = self._worker.one(group, cell, Signals())
        return row | {"compiled": self._worker.compiled - before, "process": os.getpid()}


class Crew:
    """Workers on this machine, or on a cluster; entered, they are there, and gone at the end.

    Args:
      count: of them; None = one for each accelerator of the cluster, or for each of its machines where there are none.
      address: of a cluster of Ray's that runs already ('auto': the one that this machine belongs to); None = this machine alone.
      wanted: what each row keeps.
      known: texts that cells were trained on before.

    Raises:
      Refused: Ray is not installed, or there is no cluster.
    """

    def __init__(self, count: int | None, address: str | None, wanted: Wanted, known: Known):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the machine unasked
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do by itself, and warns of
        try:
            import ray
        except ImportError:
            raise Refused(f"--workers and --ray need Ray, which is not installed; {INSTALL}") from None
        self._ray, self.count, self.address = ray, count or 0, address
        self._wanted, self._known = wanted, known
        self._actors: list[Any] = []
        self.compiled = 0

    def __enter__(self) -> "Crew":
        ray, before = self._ray, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        local: dict[str, Any] = {"num_cpus": self.count, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            ray.init(self.address, **({} if self.address else local), log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # what Ray raises depends on what it meets
            raise Refused(f"--ray is '{self.address or 'local'}', where no cluster answers: {error!s:.200}") from None
        finally:
            for number, handler in before.items():  # Ray puts its own in the place of those that stop a sweep
                signal.signal(number, handler)
        try:
            total = ray.cluster_resources()
            self._kind = next((kind for kind in ("GPU", "TPU") if total.get(kind)), None)
            if not self.count:
                self.count = int(total[self._kind]) if self._kind else sum(node["Alive"] for node in ray.nodes())
            self._actors = [self._hired() for _ in range(self.count)]
            self.platform, self.device = ray.get(self._actors[0].facts.remote())
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()

    def _hired(self) -> Any:
        device: dict[str, Any] = {"num_gpus": 1} if self._kind == "GPU" else {}
        if self._kind == "TPU":
            device = {"resources": {"TPU": 1}}
        return self._ray.remote(Remote).options(num_cpus=1, **device).remote(self._wanted, self._known)

    def train(
        self,
        groups: Sequence[tuple[Architecture, Sequence[Cell]]],
        signals: Signals,
        under_way: Callable[[Sequence[Cell]], None],
        estimate: Estimate,
    ) -> Iterator[tuple[Cell, Row]]:
        """Cells with their rows, as they end. A worker that is killed takes the cell under way with it; another takes its place.

        Raises:
          Stopped: a signal asked to stop.
        """
        ray = self._ray
        left = {group.name: list(cells) for group, cells in groups}
        # a worker needs the first cell's configuration to compile, and its own cell
        lean = {group.name: Architecture(group.name, group.cells[:1], group.traced) for group, _ in groups}
        guesses = {group.name: estimate.guess(group) for group, _ in groups}
        cost = {name: guess.cell if guess else 1.0 for name, guess in guesses.items()}
        pays = {name: guess.compiling if guess else 0.0 for name, guess in guesses.items()}
        own: list[str | None] = [None] * self.count
        running: dict[Any, tuple[int, Cell]] = {}
        while True:
            idle = [i for i in range(self.count) if i not in {worker for worker, _ in running.values()}]
            for i in idle:
                name = choose(own[i], left, {one for one in own if one}, cost, pays)
                if name is None:
                    continue
                own[i], cell = name, left[name].pop(0)
                running[self._actors[i].train.remote(lean[name], cell)] = (i, cell)
            if not running:
                return
            if idle:
                under_way([cell for _, cell in running.values()])
            ended, _ = ray.wait(list(running), timeout=POLL)
            if signals.stop:
                raise Stopped
            for reference in ended:
                i, cell = running.pop(reference)
                try:
                    row = ray.get(reference)
                    self.compiled += row.pop("compiled")
                    row.pop("process")
                except ray.exceptions.RayActorError:
                    row = {"status": KILLED, "error": "the worker that trained this cell was killed"}
                    self._actors[i], own[i] = self._hired(), None
                except Exception as error:
                    row = failed(error)
                yield cell, row


def choose(
    own: str | None,
    left: Mapping[str, Sequence[Cell]],
    held: set[str],
    cost: Mapping[str, float],
    pays: Mapping[str, float],
) -> str | None:
    """The architecture that an idle worker goes on with; None = there is nothing that it had better do.

    Its own, whose programs it has, as long as there are cells of it; then one that no worker has, the longest first; then the one with
    the most to do, if that is longer than compiling.

    Args:
      own: its architecture so far.
      left: cells that no worker has begun, by architecture.
      held: architectures of workers.
      cost: seconds of a cell, by architecture.
      pays: seconds of compiling, by architecture.
    """
    work = {name: cost[name] * len(cells) for name, cells in left.items() if cells}
    if own in work:
        return own
    free = {name: seconds for name, seconds in work.items() if name not in held}
    shared = {name: seconds for name, seconds in work.items() if seconds > pays[name]}
    chosen = free or shared
    return max(chosen, key=chosen.__getitem__) if chosen else None
