"""How are the cells of an architecture trained in one process? Compiled once, then one after another, or some at once."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from resjax.sweeps import one, together
from resjax.sweeps.cells import Architecture, Cell
from resjax.sweeps.one import FAILED
from resjax.sweeps.shared import Shared, compile_shared
from resjax.sweeps.subject import sentence
from resjax.sweeps.texts import Known, Texts
from resjax.sweeps.together import Ready
from resjax.sweeps.wanted import Wanted
from resjax.train.progress import clock
from resjax.train.signals import Signals, Stopped

Row = dict[str, Any]


class Worker:
    """Trains cells; whatever fails is the row of its cell.

    Args:
      wanted: what each row keeps beside the ends.
      known: texts that cells were trained on before.
      say: where it prints.
      at_once: cells at once; 0 = as many as pays, if memory allows.
    """

    def __init__(self, wanted: Wanted, known: Known, say: Callable[[str], None] = print, at_once: int = 1):
        self.wanted, self.known, self.say, self.at_once = wanted, known, say, at_once
        self.texts = Texts()
        self._name = ""
        self._shared: Shared | None = None
        self._fault: Row | None = None

    def train(
        self, group: Architecture, cells: Sequence[Cell], signals: Signals, under_way: Callable[[Sequence[Cell]], None]
    ) -> Iterator[tuple[Cell, Row]]:
        """Cells of one architecture, each with its row as soon as it ended; ``under_way`` is told which are trained.

        Raises:
          Stopped: a signal asked to stop.
        """
        self._enter(group)
        left = list(cells)
        size = together.size_for(left, self.at_once, jax.device_count(), jax.default_backend())
        if size > 1:
            for cell, row in self._at_once(group, cells, size, signals, under_way):
                left.remove(cell)
                yield cell, row
        for cell in left:
            under_way([cell])
            yield cell, self.one(group, cell, signals)

    def one(self, group: Architecture, cell: Cell, signals: Signals) -> Row:
        """The row of one cell of an architecture; what fails in compiling fails for all of them.

        Raises:
          Stopped: a signal asked to stop.
        """
        self._enter(group)
        if self._fault is not None:
            return dict(self._fault)
        try:
            ready, waited = self._ready(cell), 0.0
            if signals.stop:
                raise Stopped
            if self._shared is None:
                self._shared = self._compiled(lambda: compile_shared(group, _vocab(ready)), lambda made: made)
                waited = self._shared.seconds
            row = one.train(ready.config, self._shared, ready.corpus, ready.pipeline, signals, self.wanted)
            return row | self._about(ready) | {"compile_seconds": round(waited, 3)}
        except Stopped:
            raise
        except Exception as error:
            return failed(error)

    def _enter(self, group: Architecture) -> None:
        if self._name and self._name != group.name:
            jax.clear_caches()  # so that memory is that of the largest architecture, not of all
        if self._name != group.name:
            self._name, self._shared, self._fault = group.name, None, None

    def _at_once(
        self,
        group: Architecture,
        cells: Sequence[Cell],
        size: int,
        signals: Signals,
        under_way: Callable[[Sequence[Cell]], None],
    ) -> Iterator[tuple[Cell, Row]]:
        """As :meth:`train`, some at once. Those that cannot be prepared, or not together, are left out: alone each fails, or does not,
        by itself.
        """
        ready: dict[Cell, Ready] = {}
        for cell in cells:
            try:
                ready[cell] = self._ready(cell)
            except Exception:  # told when it is tried alone
                continue
            if signals.stop:
                raise Stopped
        whole = list(ready)
        if len(whole) < 2:
            return
        try:
            vocab = _vocab(ready[whole[0]])
            made = self._compiled(
                lambda: together.compile_fitting(group, vocab, size, not self.at_once, self.say),
                lambda made: made.shared,
            )
        except Exception as error:
            self.say(f"  {size} cells at once: {failed(error)['error']}; one after another")
            self._fault = None
            return
        waited = made.shared.seconds
        for first in range(0, len(whole), made.size):
            chosen = whole[first : first + made.size]
            under_way(chosen)
            try:
                for i, row in together.train([ready[cell] for cell in chosen], made, signals, self.wanted):
                    yield chosen[i], row | self._about(ready[chosen[i]]) | {"compile_seconds": round(waited, 3)}
                    waited = 0.0
            except Stopped:
                raise
            except Exception as error:
                self.say(f"  {len(chosen)} cells at once: {failed(error)['error']}; one after another")
                return

    def _ready(self, cell: Cell) -> Ready:
        corpus = self.texts.corpus(cell.config)
        self.known.refuse_other(self.texts.facts(cell.config))
        return Ready(cell.config, corpus, self.texts.pipeline(cell.config))

    def _about(self, ready: Ready) -> Row:
        baselines, floors = ready.corpus.baselines, ready.corpus.baselines.floors
        return {
            "baselines": baselines.as_dict(),
            "floors": floors and {name: getattr(floors, name) for name in ("unigram", "bigram", "trigram")},
            "corpus": self.texts.facts(ready.config),
            "device": jax.devices()[0].device_kind,
        }

    def _compiled(self, compile_: Callable[[], Any], shared: Callable[[Any], Shared]) -> Any:
        try:
            made = compile_()
        except Exception as error:
            self._fault = failed(error)
            raise
        told = shared(made)
        self.say(f"  compiled in {clock(told.seconds)}; the stream is {told.stream_dtype}")
        return made


def _vocab(ready: Ready) -> int:
    return ready.config.model.vocab or ready.corpus.vocab


def failed(error: Exception) -> Row:
    """The row of a cell that an error ended."""
    return {"status": FAILED, "error": sentence(error)}
