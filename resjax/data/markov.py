"""What did a model learn? A synthetic text of order two, whose entropies are known, so that a loss names the answer.

The law: V = 32 symbols, a two back and b one back,

    p(x | a, b) = softmax over x of  -1.5 ln rank(x) + A[b, x] + B[a, x],      A, B ~ N(0, 1.5^2),   rank(x) = x + 1.

The logits are additive in a and b, so one attention head that looks two back learns them; with 1,024 independent rows
it could not. A model that only sees frequencies stops at H1 = 2.845 nats, one that sees the previous symbol at H2 =
2.326, and nothing goes below H3 = 1.787 (ln V = 3.466): the plateau of a loss curve is named by its nearest floor.
"""

import functools
from typing import NamedTuple

import numpy as np

from resjax.data.baselines import Floors

VOCAB = 32
LAW_SEED = 0  # the law that every run shares: floors and held-out text are then comparable between seeds
TRAIN_SYMBOLS = 1 << 23
HELD_OUT_SYMBOLS = 1 << 19
HELD_OUT_SEED = 2**32 + 1  # a seed that no run can have, so that no training text repeats the held-out one


class Law(NamedTuple):
    """transition: (V, V, V) float64, p(x | a, b) at [a, b, x]; pair: (V, V), the stationary law of (a, b)."""

    transition: np.ndarray
    pair: np.ndarray


@functools.cache
def law(seed: int = LAW_SEED) -> Law:
    """The transition law drawn from `seed`, and its stationary pair law by power iteration to rounding."""
    rng = np.random.default_rng(seed)
    A, B = rng.normal(0, 1.5, (VOCAB, VOCAB)), rng.normal(0, 1.5, (VOCAB, VOCAB))
    logits = -1.5 * np.log(np.arange(1, VOCAB + 1)) + A[None, :, :] + B[:, None, :]
    transition = np.exp(logits - logits.max(-1, keepdims=True))
    transition /= transition.sum(-1, keepdims=True)
    pair = np.full((VOCAB, VOCAB), VOCAB**-2.0)
    for _ in range(10_000):
        before, pair = pair, np.einsum("ab,abx->bx", pair, transition)
        if np.abs(pair - before).max() < 1e-16:
            break
    for array in (transition, pair):
        array.flags.writeable = False
    return Law(transition, pair)


def floors(source: Law) -> Floors:
    """H1, H2 and H3 in nats: the entropy of a symbol given none, one, two before it, under the stationary pair law."""
    H1 = _entropy(source.pair.sum(0))
    H_pair = _entropy(source.pair)
    H_triple = _entropy(source.pair[:, :, None] * source.transition)
    return Floors(unigram=H1, bigram=H_pair - H1, trigram=H_triple - H_pair)


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def sample(source: Law, symbols: int, seed: int, blocks: int = 4096) -> np.ndarray:
    """One unbroken chain from its stationary law: (symbols,) uint8, a pure function of its arguments.

    The chain is cut into blocks that are drawn side by side, each from a guessed beginning and with its own uniform
    numbers. Then every block is given the true end of the one before it and drawn again with the same numbers: two
    chains that share their numbers soon meet, and from there on they agree, so a second pass of some dozen symbols
    makes the blocks one chain. The outcome is what a loop symbol by symbol would draw, whatever the number of blocks.
    """
    blocks = max(1, min(blocks, symbols // 256))
    length = -(-symbols // blocks)
    rng = np.random.default_rng(seed)
    start = rng.choice(VOCAB * VOCAB, p=source.pair.ravel())
    # drawn block by block in the order of the text, used a step of all blocks at a time
    uniform_TK = np.ascontiguousarray(rng.random((blocks, length)).T)
    cumulative = np.cumsum(source.transition, -1)
    cumulative[..., -1] = 1.0
    cumulative = cumulative.ravel()

    # two rows of context, then the block; VOCAB stands for what is not drawn yet
    chain_TK = np.full((length + 2, blocks), VOCAB, np.uint8)
    chain_TK[:2] = np.array(divmod(start, VOCAB))[:, None]
    _draw(chain_TK, uniform_TK, cumulative)
    while not np.array_equal(chain_TK[:2, 1:], chain_TK[-2:, :-1]):
        chain_TK[:2, 1:] = chain_TK[-2:, :-1]
        _draw(chain_TK, uniform_TK, cumulative)
    return chain_TK[2:].T.ravel()[:symbols]


def _draw(chain_TK: np.ndarray, uniform_TK: np.ndarray, cumulative: np.ndarray) -> None:
    """Draw all blocks in place, a step of all at a time, until two steps running change nothing: then none does."""
    unchanged = 0
    for t, uniform in enumerate(uniform_TK):
        row = (chain_TK[t].astype(np.intp) * VOCAB + chain_TK[t + 1]) * VOCAB
        # the number of cumulative probabilities at or below the uniform number, by bisection in log2(V) look-ups
        x = np.zeros_like(row)
        step = VOCAB // 2
        while step:
            x += step * (cumulative[row + x + (step - 1)] <= uniform)
            step //= 2
        unchanged = unchanged + 1 if np.array_equal(x, chain_TK[t + 2]) else 0
        if unchanged == 2:
            return
        chain_TK[t + 2] = x
