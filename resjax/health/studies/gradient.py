"""How does the gradient of the loss change on its way down, and how much of it comes straight through the skips (M6)?"""

from typing import Any

import jax
import numpy as np

from resjax.health.studies.buffers import newest
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject


def gradient(subject: Subject) -> dict[str, Any]:
    """The gradient of the loss at the stream before every block and after the last.

    Of n streams and pairs it is that of all of them together; of a buffer of earlier outputs, that of the row written last.

    Returns:
      size: (depth + 1,) mean over tokens of |dL/dh|, L the nats of all tokens together: whatever the number of tokens.
      spread: largest size by smallest.
      slope: of log(size) on the block, per block; positive where gradients die on their way down.
      identity_share: (depth,) ``<J^T v, v> / (|J^T v| |v|)``, v the gradient after the last block and J the Jacobian of that stream by
        the stream before the block: 1 where all the gradient comes down as it is, as by skips alone.
    """
    walk, depth = subject.walk, subject.depth
    size, sums, tokens = np.zeros(depth + 1), np.zeros((depth, 3)), 0
    for batch in subject.batches:
        states = walk.states(batch[:, :-1])
        cotangent = walk.gradient(states[-1], batch[:, 1:])
        last = newest(walk, cotangent[0], depth)
        size[depth] += per_token(last).sum()
        for place in reversed(range(depth)):
            cotangent = walk.pull(states[place], cotangent)
            here = newest(walk, cotangent[0], place)
            size[place] += per_token(here).sum()
            sums[place] += products(here, last)
        tokens += batch[:, 1:].size
    return by_depth(size / tokens, sums)


def by_depth(size: np.ndarray, sums: np.ndarray) -> dict[str, Any]:
    """The results of :func:`gradient` from ``size`` and the :func:`products` (depth, 3); a first size of NaN is not known and left out."""
    known = size[1:] if np.isnan(size[0]) else size
    return {"size": size, "spread": spread(known), "slope": slope(known), "identity_share": share(sums)}


def per_token(tree: Any) -> np.ndarray:
    """Length of what belongs to each token, over all arrays of a carried stream, (batch, tokens).

    The arrays are (..., batch, tokens, width), as carries have them. float64, on the host: 0.5^54 has no square in float32.
    """
    squares = [np.square(np.asarray(leaf, np.float64)).sum(axis=-1) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum(square.sum(axis=tuple(range(square.ndim - 2))) for square in squares))


def products(one: Any, other: Any) -> np.ndarray:
    """``<a, b>, <a, a>, <b, b>`` of two carried streams of one form, (3,) float64."""
    sums = np.zeros(3)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        sums += [np.sum(a * b), np.sum(a * a), np.sum(b * b)]
    return sums


def share(sums: np.ndarray) -> np.ndarray:
    """``<a, b> / (|a| |b|)`` of :func:`products` (..., 3); NaN where one is 0."""
    dot, first, second = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    lengths = np.sqrt(first) * np.sqrt(second)
    return np.where(lengths > 0, dot / np.where(lengths > 0, lengths, 1), np.nan)


def slope(size: np.ndarray) -> float:
    """Slope of a straight line through log(size) over the block; NaN unless all are positive and finite, and there are two."""
    size = np.asarray(size, np.float64)
    if len(size) < 2 or not (np.isfinite(size) & (size > 0)).all():
        return np.nan
    x = np.arange(len(size)) - (len(size) - 1) / 2
    return float(x @ np.log(size) / (x @ x))


def spread(size: np.ndarray) -> float:
    """Largest by smallest; inf where the smallest is 0, NaN where one is not finite or all are 0."""
    size = np.asarray(size, np.float64)
    if not len(size) or not np.isfinite(size).all() or size.max() == 0:
        return np.nan
    return float(size.max() / size.min()) if size.min() > 0 else np.inf


STUDY = Study(
    "gradient",
    gradient,
    "the gradient by depth",
    "Length of the loss's gradient at the stream before every block, and the share of it that comes straight down "
    "through the skips (He et al. 2016, 1603.05027).",
    "quick",
)
