"""How did a run end, in one word? By its losses against the floors of a source whose law is known."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

from resjax.data import Floors

LAST_SHARE = 0.05  # of the steps: the end of a run
RISE = 0.05  # nats above the first loss
NEAR = 0.03  # nats
SAME_TOKENS = 0.98  # mean cosine between different tokens
OUTCOMES = ("nonfinite", "diverged", "collapsed", "bigram", "trained", "partial")


def last_loss(losses: Sequence[float]) -> float:
    """The mean training loss of the last 5 % of the steps."""
    return fmean(losses[-max(1, round(LAST_SHARE * len(losses))) :])


def outcome(losses: Sequence[float], floors: Floors | None, token_cosine: float | None) -> str | None:
    """The first of ``OUTCOMES`` that holds; None where the floors are unknown and the loss neither rose nor left the numbers.

    nonfinite: a loss is not finite. diverged: the last 5 % are above the first step's loss. collapsed: the loss is the entropy
    of single symbols, and tokens have become the same. bigram: it is the entropy given one symbol. trained: it is below
    that. partial: anything else.

    Args:
      losses: of every step, in nats per token.
      token_cosine: mean cosine between different tokens after the last block at the end; None = not measured.
    """
    if not losses or not all(map(isfinite, losses)):
        return "nonfinite"
    loss = last_loss(losses)
    if loss > losses[0] + RISE:
        return "diverged"
    if floors is None:
        return None
    if abs(loss - floors.unigram) < NEAR and token_cosine is not None and token_cosine > SAME_TOKENS:
        return "collapsed"
    if abs(loss - floors.bigram) < NEAR:
        return "bigram"
    return "trained" if loss < floors.bigram - NEAR else "partial"
