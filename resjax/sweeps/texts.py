"""Where do the cells of a sweep get their batches? From texts that are read once and batches that are drawn once."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from resjax import data
from resjax.data import Corpus, Pipeline
from resjax.errors import Refused

DRAWN_BY_SEED = ("markov",)  # sources whose training text depends on the seed
TEXTS, PIPELINES = 32, 64  # that are kept, the last ones used
KEPT_BYTES = 64 << 20  # of a pipeline's batches; those beyond are drawn anew by each cell


class Kept(Pipeline):
    """A pipeline that draws a batch once."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._kept: dict[tuple[bool, int], np.ndarray] = {}
        self._bytes = 0

    def batch(self, i: int) -> np.ndarray:
        return self._once(True, i)

    def held_out(self, i: int) -> np.ndarray:
        return self._once(False, i)

    def _once(self, train: bool, i: int) -> np.ndarray:
        found = self._kept.get((train, i))
        if found is None:
            found = super().batch(i) if train else super().held_out(i)
            if self._bytes + found.nbytes <= KEPT_BYTES:
                self._kept[train, i] = found
                self._bytes += found.nbytes
        return found


class Texts:
    """The corpora and pipelines of a sweep, by what they depend on."""

    def __init__(self) -> None:
        self._corpus = functools.lru_cache(TEXTS)(data.load)
        self._pipeline = functools.lru_cache(PIPELINES)(self._drawn)

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
        return Kept(corpus, length, batch, seed)


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
