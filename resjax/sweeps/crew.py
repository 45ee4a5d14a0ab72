"""How is a sweep spread over processes and machines? Ray's workers train one cell after another each; one process writes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from resjax.errors import Refused
from resjax.sweeps.cells import Architecture, Cell
from resjax.sweeps.estimate import Estimate
from resjax.sweeps.one import KILLED
from resjax.sweeps.sent import Sent
from resjax.sweeps.texts import Known
from resjax.sweeps.worker import Row, Worker, failed
from resjax.train.session import platform
from resjax.train.signals import Signals, Stopped

POLL = 0.2  # seconds between looks at the signals


class Remote:
    """What runs in a process of Ray: a :class:`Worker`, told one cell at a time; or what it is refused for, which each row then says."""

    def __init__(self, sent: Sent, known: Known):
        self._worker: Worker | Refused
        try:
            self._worker = Worker(sent.opened(), known, say=lambda _: None)
        except Refused as refused:
            self._worker = refused

    def facts(self) -> tuple[str, str, str]:
        """Platform and kind of its device, and why it cannot work, if so."""
        return platform(), jax.devices()[0].device_kind, str(self._worker) if isinstance(self._worker, Refused) else ""

    def train(self, group: Architecture, cell: Cell) -> Row:
        """The row of a cell; compiles where the architecture is another one than before."""
        if isinstance(self._worker, Refused):
            return failed(self._worker)
        return self._worker.one(group, cell, Signals())


class Crew:
    """Workers of a cluster, gone at the end.

    Args:
      ray: its module, connected; see :mod:`resjax.sweeps.cluster`.
      count: of workers; None = one for each accelerator of the cluster, or for each of its machines where there are none.
      sent: what each row keeps.
      known: texts that cells were trained on before.

    Raises:
      Refused: the first cannot work.

    Attributes:
      platform, device: of the first.
    """

    def __init__(self, ray: Any, count: int | None, sent: Sent, known: Known):
        self._ray, self._sent, self._known = ray, sent, known
        total = ray.cluster_resources()
        self._kind = next((kind for kind in ("GPU", "TPU") if total.get(kind)), None)
        self.count = count or (int(total[self._kind]) if self._kind else sum(node["Alive"] for node in ray.nodes()))
        self._actors = [self._hired() for _ in range(self.count)]
        self.platform, self.device, refusal = ray.get(self._actors[0].facts.remote())
        if refusal:
            raise Refused(refusal)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def _hired(self) -> Any:
        device: dict[str, Any] = {"num_gpus": 1} if self._kind == "GPU" else {}
        if self._kind == "TPU":
            device = {"resources": {"TPU": 1}}
        return self._ray.remote(Remote).options(num_cpus=1, **device).remote(self._sent, self._known)

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
            given: dict[int, Cell] = {}
            for i in idle:
                name = choose(own[i], left, {one for one in own if one}, cost, pays)
                if name is not None:
                    own[i], given[i] = name, left[name].pop(0)
            if not running and not given:
                return
            if idle:  # noted before a worker is told: a kill in between marks a cell too many, and forgets none
                under_way([*(cell for _, cell in running.values()), *given.values()])
            for i, cell in given.items():
                running[self._actors[i].train.remote(lean[own[i] or ""], cell)] = (i, cell)
            ended, _ = ray.wait(list(running), timeout=POLL)
            if signals.stop:
                raise Stopped
            for reference in ended:
                i, cell = running.pop(reference)
                try:
                    row = ray.get(reference)
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
