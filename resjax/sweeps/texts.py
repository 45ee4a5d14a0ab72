"""Where do the cells of a sweep get their batches? From texts that are read once and batches that are drawn once."""

import functools
from typing import Any

import numpy as np

from resjax import data
from resjax.data import Corpus, Pipeline

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

    def pipeline(self, config: Any) -> Pipeline:
        """Its batches."""
        return self._pipeline(self.corpus(config), config.data.length, config.data.batch, config.seed)

    def _drawn(self, corpus: Corpus, length: int, batch: int, seed: int) -> Pipeline:
        return Kept(corpus, length, batch, seed)
