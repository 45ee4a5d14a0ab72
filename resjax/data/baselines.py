"""How low a loss needs no network? N-gram baselines and, where the source is known, exact floors, in nats per token."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

SMOOTHING = 0.1  # "add one tenth": the pseudo-count of every token of the vocabulary
_CHUNK = 1 << 24  # tokens counted at a time, so that a text of gigabytes needs no index arrays of its size


@dataclasses.dataclass(frozen=True)
class Floors:
    """The exact entropies of a source of known law, in nats per token; no predictor goes below them.

    unigram: H1, for a predictor that sees nothing; bigram: H2, one token back; trigram: H3, two tokens back.
    For a source of order two, H3 is the floor of every predictor.
    """

    unigram: float
    bigram: float
    trigram: float


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Cross-entropies on the held-out text, in nats per token, of predictors that only count the training text.

    uniform: ln V; unigram, bigram, trigram: see `measure`. `floors` is set where the law of the source is known.
    """

    uniform: float
    unigram: float
    bigram: float
    trigram: float
    floors: Floors | None = None

    def as_dict(self) -> dict[str, float]:
        """The four baselines, as `summary.json` stores them."""
        return {name: getattr(self, name) for name in ("uniform", "unigram", "bigram", "trigram")}


def measure(train: np.ndarray, held_out: np.ndarray, vocab: int, floors: Floors | None = None) -> Baselines:
    """Count `train`, then score `held_out`.

    With n(.) the counts in the training text, V the vocabulary and d = 0.1 (add one tenth), each context backs off to
    the one that is a token shorter, and the empty context to the uniform law:

        p(x)    = (n(x)   + d V / V)        / (n     + d V)
        p(x|b)  = (n(bx)  + d V p(x))       / (n(b)  + d V)
        p(x|ab) = (n(abx) + d V p(x|b))     / (n(ab) + d V)

    where n(c), of a context, counts the times that a token followed it, so that each law sums to one over V. A context
    never seen thus has the law of the shorter one. The first token of the held-out text is scored without context and
    the second with one token, since there is no more.

    Args:
      train, held_out: (tokens,) integers in [0, vocab), held_out not empty.
      vocab: V.
      floors: passed on to the result.
    """
    train, held_out, size = _in_the_alphabet_that_occurs(train, held_out, vocab)
    weight = SMOOTHING * vocab
    n_x = np.bincount(train, minlength=size)
    n_bx = _count(train, 2, size)
    n_abx = _count(train, 3, size)
    n_b, n_ab = n_bx.reshape(size, size).sum(1), n_abx.reshape(size * size, size).sum(1)

    p_x = (n_x + SMOOTHING) / (len(train) + weight)
    unigram = -float(np.log(p_x[held_out]).sum())
    first = -math.log(p_x[held_out[0]])

    bigram, trigram, second = first, first, 0.0
    for start, chunk in _chunks(held_out, 2):
        b, x = chunk[:-1], chunk[1:]
        p_bx = (n_bx[b * size + x] + weight * p_x[x]) / (n_b[b] + weight)
        bigram -= float(np.log(p_bx).sum())
        if start == 0:
            second = -math.log(p_bx[0])
    trigram += second
    for _, chunk in _chunks(held_out, 3):
        a, b, x = chunk[:-2], chunk[1:-1], chunk[2:]
        ab = a * size + b
        p_bx = (n_bx[b * size + x] + weight * p_x[x]) / (n_b[b] + weight)
        p_abx = (n_abx[ab * size + x] + weight * p_bx) / (n_ab[ab] + weight)
        trigram -= float(np.log(p_abx).sum())

    n = len(held_out)
    return Baselines(math.log(vocab), unigram / n, bigram / n, trigram / n, floors)


def _in_the_alphabet_that_occurs(
    train: np.ndarray, held_out: np.ndarray, vocab: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The texts with the tokens that occur renumbered as 0..size-1.

    A text uses about 100 of the 256 bytes, which makes the table of trigrams 16 times smaller.
    """
    occurs = (np.bincount(train, minlength=vocab) + np.bincount(held_out, minlength=vocab)) > 0
    renumber = (np.cumsum(occurs) - 1).astype(np.uint8 if vocab <= 256 else np.int32)
    return renumber[train], renumber[held_out], int(occurs.sum())


def _chunks(tokens: np.ndarray, window: int) -> Iterator[tuple[int, np.ndarray]]:
    """Pieces of the text as int64, overlapping so that every run of `window` tokens lies in exactly one of them."""
    for start in range(0, len(tokens) - window + 1, _CHUNK):
        yield start, tokens[start : start + _CHUNK + window - 1].astype(np.int64)


def _count(tokens: np.ndarray, window: int, size: int) -> np.ndarray:
    """How often each run of `window` tokens occurs, indexed by the run read as a number in base `size`."""
    counts = np.zeros(size**window, np.int64)
    for _, chunk in _chunks(tokens, window):
        code = chunk[: len(chunk) - window + 1]
        for offset in range(1, window):
            code = code * size + chunk[offset : len(chunk) - window + 1 + offset]
        counts += np.bincount(code, minlength=len(counts))
    return counts
