"""Which tokens does step i train on? Batches as a pure function of (seed, i), so that a resumed run draws the same."""

import functools
import itertools
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from resjax.data.corpus import Corpus
from resjax.errors import Refused

_EVALUATION_SEED = 0  # the held-out batches are the same whatever the run's seed


def check_seed(seed: int) -> None:
    """Refuses a seed that Grain and NumPy would not both take."""
    if not 0 <= seed < 2**32:
        raise Refused(f"seed is {seed}; it must be from 0 to {2**32 - 1}")


class Pipeline:
    """Windows of a corpus in shuffled batches, by Grain's random-access datasets.

    A window is `length + 1` tokens: `length` inputs and, one later, `length` targets. The windows of an epoch lie side
    by side and share only the end token of one with the start of the next, so every token is a target once; the text's
    two ends, less than `length` tokens each, are left over. Each epoch draws a new order and a new start of the first
    window, so over epochs all tokens but the first are targets, at all places in the window.

    Args:
      corpus: the text.
      length: tokens that the model reads at once.
      batch: windows in a batch.
      seed: of the training order, 0 <= seed < 2^32.

    Raises:
      Refused: if the corpus has less than `length + 1` tokens to train on or held out.
    """

    def __init__(self, corpus: Corpus, length: int, batch: int, seed: int):
        for field, value in (("data.length", length), ("data.batch", batch)):
            if value < 1:
                raise Refused(f"{field} is {value}; it must be 1 or more")
        check_seed(seed)
        for what, tokens in (("to train on", corpus.train), ("held out", corpus.held_out)):
            if len(tokens) < length + 1:
                raise Refused(
                    f"data.length is {length}, but data.source '{corpus.name}' has {len(tokens):,} {corpus.unit} "
                    f"{what}, and a window of length + 1 must fit: at most {len(tokens) - 1:,} is possible"
                )
        import grain  # imports JAX, which this module's other users need not wait for

        self.corpus, self.length, self.batch_size, self.seed = corpus, length, batch, seed
        self.windows_per_epoch = max(1, (len(corpus.train) - length) // length)
        self._phases = min(length, len(corpus.train) - self.windows_per_epoch * length)
        self._phase = functools.lru_cache(maxsize=8)(self._draw_phase)
        self._train = (
            grain.MapDataset.range(self.windows_per_epoch)
            .seed(seed)
            .map_with_index(self._train_window)
            .shuffle()
            .repeat()
            .batch(batch)
        )
        held_out_windows = (len(corpus.held_out) - 1) // length
        self.held_out_batches = max(1, held_out_windows // batch)
        self._held_out = (
            grain.MapDataset.range(held_out_windows)
            .seed(_EVALUATION_SEED)
            .map(lambda window: self._cut(corpus.held_out, window * length))
            .shuffle()
            .repeat(reseed_each_epoch=False)
            .batch(batch)
        )

    def batch(self, i: int) -> np.ndarray:
        """Training batch i >= 0: (batch, length + 1) int32, whatever was asked for before."""
        return self._train[i]

    def held_out(self, i: int) -> np.ndarray:
        """Evaluation batch i: (batch, length + 1) int32.

        These depend on neither seed nor resuming, and each is spread over the whole held-out text, so that a few of
        them stand for all; after `held_out_batches` of them windows come again.
        """
        return self._held_out[i]

    def stream(self, start: int = 0, ahead: int = 2) -> Generator[np.ndarray]:
        """batch(start), batch(start + 1), ... without end, prepared `ahead` of their use by one thread.

        Closing the iterator (or dropping it, or leaving the program) ends the thread.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="resjax-data") as pool:
            pending = deque(pool.submit(self.batch, i) for i in range(start, start + ahead))
            for i in itertools.count(start + ahead):
                pending.append(pool.submit(self.batch, i))
                yield pending.popleft().result()

    def _train_window(self, index: int, window: int) -> np.ndarray:
        phase = self._phase(index // self.windows_per_epoch)
        return self._cut(self.corpus.train, phase + window * self.length)

    def _draw_phase(self, epoch: int) -> int:
        return int(np.random.default_rng((self.seed, epoch)).integers(self._phases))

    def _cut(self, tokens: np.ndarray, start: int) -> np.ndarray:
        return tokens[start : start + self.length + 1].astype(np.int32)
