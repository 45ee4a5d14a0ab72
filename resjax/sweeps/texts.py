"""Where do the cells of a sweep get their batches? From texts that are read once and batches that are drawn once."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from resjax import data
from resjax.data import Corpus, Pipeline
from resjax.errors import Refused

DRAWN_BY_SEED = ("markov",)  # sources whose training text depends on the seed
TEXTS, PIPELINES = 32, 64  # that are kept, the last ones used
KEPT_BYTES = 128 << 20  # of batches, of all pipelines; those that do not fit are drawn anew by each cell


class Batches:
    """Batches that were drawn, the last used ones, up to ``KEPT_BYTES`` of all pipelines together."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()  # a pipeline draws in a thread of its own
        self.bytes = 0

    def get(self, key: Hashable, draw: Callable[[], np.ndarray]) -> np.ndarray:
        """The batch called ``key``, drawn if it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = draw()
        with self._lock:
            if key not in self._kept and made.nbytes <= KEPT_BYTES:
                self._kept[key] = made
                self.bytes += made.nbytes
                while self.bytes > KEPT_BYTES:
                    self.bytes -= self._kept.popitem(last=False)[1].nbytes
        return made


class Kept(Pipeline):
    """A pipeline that draws a batch once, as long as there is room for it."""

    def __init__(self, batches: Batches, corpus: Corpus, length: int, batch: int, seed: int):
        super().__init__(corpus, length, batch, seed)
        self._batches, self._name = batches, (corpus.sha256, length, batch, seed)

    def batch(self, i: int) -> np.ndarray:
        draw = super().batch
        return self._batches.get((self._name, True, i), lambda: draw(i))

    def held_out(self, i: int) -> np.ndarray:
        draw = super().held_out
        return self._batches.get((self._name, False, i), lambda: draw(i))


class Texts:
    """The corpora and pipelines of a sweep, by what they depend on."""

    def __init__(self) -> None:
        self._corpus = functools.lru_cache(TEXTS)(data.load)
        self._pipeline = functools.lru_cache(PIPELINES)(self._drawn)
        self._batches = Batches()

    def corpus(self, config: Any) -> Corpus:
        """The text of a configuration.

        Raises:
          Refused: it is missing, empty or unreadable.
        """
        source = config.data.source
        return self._corpus(source, config.data.field, config.seed if source in DRAWN_BY_SEED else 0)

    def facts(self, config: Any) -> dict[str, Any]:
        """Which text that is: source, seed where the text depends on it, sha256."""
        source = config.data.source
        seed = config.seed if source in DRAWN_BY_SEED else None
        return {"source": source, "seed": seed, "sha256": self.corpus(config).sha256}

    def pipeline(self, config: Any) -> Pipeline:
        """Its batches."""
        return self._pipeline(self.corpus(config), config.data.length, config.data.batch, config.seed)

    def _drawn(self, corpus: Corpus, length: int, batch: int, seed: int) -> Pipeline:
        return Kept(self._batches, corpus, length, batch, seed)


class Known:
    """The texts that cells of a sweep were trained on.

    Args:
      rows: lines of a sweep.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self._by: dict[tuple[Any, Any], tuple[str, str]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Remember the text of a line."""
        if text := row.get("corpus"):
            self._by[text.get("source"), text.get("seed")] = (str(text.get("sha256")), str(row.get("cell")))

    def refuse_other(self, text: Mapping[str, Any]) -> None:
        """Refuse a text (see :meth:`Texts.facts`) that is not the one that cells of the same source were trained on.

        Raises:
          Refused: it has changed meanwhile.
        """
        was, cell = self._by.get((text["source"], text["seed"]), (text["sha256"], ""))
        if was != text["sha256"]:
            raise Refused(
                f"the text of data.source '{text['source']}' has changed since cell {cell}: its sha256 was "
                f"{was[:12]} and is {text['sha256'][:12]}; give a new --workdir"
            )
