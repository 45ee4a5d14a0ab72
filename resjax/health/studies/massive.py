"""Are there a few features of huge magnitude? The largest element of the stream after each block, and where it is."""

from typing import Any

import numpy as np

from resjax.health.studies.study import Study
from resjax.health.studies.subject import Layered

TIMES = (100, 1000)  # the median; Sun et al. call massive what is above 100 and about 1,000 times the median


def massive(subject: Layered) -> dict[str, Any]:
    """Massive activations (Sun et al. 2024, 2402.17762) of the stream after every block.

    Returns:
      largest, median: (depth,) of the magnitudes of all elements; both NaN where an element is NaN.
      ratio: (depth,) their ratio; inf for a median of 0, NaN for a stream of zeros.
      feature, position, token: (depth,) where the largest is: the feature, the place in the sequence, and which token stands there;
        -1 where the largest is NaN, and for the token where no tokens are known.
      features_above: (depth, 2) features with an element above 100 and above 1,000 times the median.
    """
    tokens = None if subject.sequences is None else subject.sequences[:, :-1]
    rows = [row(np.asarray(stream), tokens) for stream in subject.layers(list(range(1, subject.depth + 1)))]
    return {name: np.array([found[name] for found in rows]) for name in rows[0]}


def row(stream: np.ndarray, tokens: np.ndarray | None) -> dict[str, Any]:
    """The figures of one stream (rows, T, D), tokens (rows, T)."""
    size = np.abs(stream.astype(np.float64))
    largest, median = float(size.max()), float(np.median(size))
    where = (-1, -1, -1) if np.isnan(largest) else np.unravel_index(int(size.argmax()), size.shape)
    at_feature = size.max(axis=(0, 1))
    with np.errstate(all="ignore"):
        ratio = float(np.float64(largest) / np.float64(median))
        above = [int(np.sum(at_feature > times * median)) for times in TIMES]
    return {
        "largest": largest,
        "median": median,
        "ratio": ratio,
        "feature": int(where[2]),
        "position": int(where[1]),
        "token": int(tokens[where[0], where[1]]) if tokens is not None and where[0] >= 0 else -1,
        "features_above": above,
    }


STUDY = Study(
    "massive",
    massive,
    "massive activations",
    "Largest and median magnitude of the stream after each block, and the feature, place and token of the largest (Sun et al. 2024, "
    "2402.17762).",
    "quick",
)
