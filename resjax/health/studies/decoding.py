"""What can be read off the stream by a straight map, and how deep? The token, the one before, its place, brackets, the next one (M5).

Probes in the sense of Alain and Bengio 2016 (1610.01644). NumPy on the host, float64.
"""

from typing import Any, NamedTuple

import numpy as np

from resjax.errors import Refused
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Layered

TARGETS = ("current token", "previous token", "position", "next token")
BRACKETS = "bracket depth"  # of texts of bytes only
OPENING, CLOSING, DEEPEST = b"([{", b")]}", 4
# Ridge penalties to choose among, in units of the features' mean variance.
PENALTIES = (1e-6, 1e-4, 1e-2, 1e-1, 1.0, 10.0)
MOST_TRAINING, MOST_TESTING = 8192, 4096  # tokens that a probe learns from, and that it is judged by
FEWEST = 5  # sequences that can be divided


def decoding(subject: Layered) -> dict[str, Any]:
    """Accuracy of a straight map from the stream to what ``targets`` name, before every block; 8,192 tokens train it, 4,096 test it.

    Returns:
      accuracy: (targets, points), share of the test's tokens.
      chance: (targets,), accuracy of always saying what is most frequent.
      above: (targets, points), the accuracy with chance taken off: 0 is chance, 1 is all.
      targets: their names; ``bracket depth``, of texts of bytes, is how many brackets are open after a token, counted from the
        sequence's start, 4 standing for more.
      points: before which blocks, the depth being after the last.
      training, testing: tokens.

    NaN with fewer than 5 sequences, with sequences of fewer than two tokens, and where the stream is not finite.

    Raises:
      Refused: there are no tokens.
    """
    points, sequences = subject.points, subject.sequences
    if sequences is None:
        raise Refused("no tokens are given, and what can be read off the stream is asked of them")
    targets = [*TARGETS, BRACKETS] if subject.of_bytes else list(TARGETS)
    parts, labels = divided(*sequences.shape), labelled(sequences)[: len(targets)]
    accuracy = np.full((len(targets), len(points)), np.nan)
    by_chance, counts = np.full(len(targets), np.nan), (0, 0)
    if parts is not None and labels.size:
        by_chance = chance(labels, parts)
        counts = tuple(sum(map(len, some)) * labels.shape[-1] for some in (parts[:2], parts[2:]))
        needed = 1 + max(map(max, parts))
        for column, stream in enumerate(subject.layers(points, needed)):
            features = np.asarray(stream, np.float32)[:needed, 1:]
            accuracy[:, column] = accuracies(features, labels[:, :needed], parts)
    return {
        "accuracy": accuracy,
        "chance": by_chance,
        "above": (accuracy - by_chance[:, None]) / np.where(by_chance < 1, 1 - by_chance, np.nan)[:, None],
        "targets": targets,
        "points": np.array(points),
        "training": counts[0],
        "testing": counts[1],
    }


class Parts(NamedTuple):
    """Which sequences a probe learns from, which its penalty is chosen by, and which it is judged by: numbers of sequences."""

    fit: np.ndarray
    choose: np.ndarray
    test: np.ndarray


def divided(sequences: int, length: int) -> Parts | None:
    """Whole sequences, so that no probe is judged by tokens whose neighbours it has learned from; None where they are too few.

    Every third is for the test, at most ``MOST_TESTING`` tokens of ``length`` a sequence; of the others, at most ``MOST_TRAINING``
    tokens, every fifth is for choosing.
    """
    if sequences < FEWEST:
        return None
    third = np.arange(sequences) % 3 == 2
    test = np.flatnonzero(third)[: max(1, MOST_TESTING // length)]
    training = np.flatnonzero(~third)[: max(2, MOST_TRAINING // length)]
    fifth = np.arange(len(training)) % 5 == 1
    return Parts(training[~fifth], training[fifth], test)


def labelled(batches: np.ndarray) -> np.ndarray:
    """What there is to read at each token of sequences (n, length + 1): (targets, n, length - 1), the first token left out.

    The first token has none before it.
    """
    place = np.broadcast_to(np.arange(1, batches.shape[1] - 1), (len(batches), batches.shape[1] - 2))
    return np.stack([batches[:, 1:-1], batches[:, :-2], place, batches[:, 2:], open_brackets(batches)[:, 1:-1]])


def open_brackets(batches: np.ndarray) -> np.ndarray:
    """How many brackets are open after each byte of sequences (n, length), 0 to ``DEEPEST``; one that closes none counts for nothing."""
    steps = np.isin(batches, list(OPENING)).astype(int) - np.isin(batches, list(CLOSING))
    total = np.cumsum(steps, axis=1)
    below = np.minimum(np.minimum.accumulate(total, axis=1), 0)  # closed ones that were opened before the sequence
    return np.minimum(total - below, DEEPEST)


def chance(labels: np.ndarray, parts: Parts) -> np.ndarray:
    """Accuracy of always saying what is most frequent in training, (targets,); labels (targets, sequences, tokens)."""
    known = np.concatenate([parts.fit, parts.choose])
    said = [np.unique(row[known], return_counts=True) for row in labels]
    return np.array(
        [np.mean(row[parts.test] == names[counts.argmax()]) for row, (names, counts) in zip(labels, said, strict=True)]
    )


def accuracies(features: np.ndarray, labels: np.ndarray, parts: Parts) -> np.ndarray:
    """Share of the test's tokens that a ridge probe names right, (targets,).

    The probe is least squares to one number a class (1 for the token's own, 0 for others), on features of mean 0 and variance 1, with
    that penalty of ``PENALTIES`` which is best on the sequences for choosing; the class with the highest number is named. One that is
    not in the training sequences is never named.

    Args:
      features: (sequences, tokens, width).
      labels: (targets, sequences, tokens).

    A feature that is not finite gives NaN.
    """
    chosen = np.concatenate(parts)
    if not np.isfinite(features[chosen]).all():
        return np.full(len(labels), np.nan)
    fit, choose, test = (features[part].reshape(-1, features.shape[-1]).astype(np.float64) for part in parts)
    mean, spread = fit.mean(axis=0), fit.std(axis=0)
    # a feature that does not vary, but for rounding, says nothing
    varies = spread > 1e-6 * np.abs(mean)
    unit = np.where(varies, 1 / np.where(varies, spread, 1), 0.0)
    fit, choose, test = ((x - mean) * unit for x in (fit, choose, test))
    values, vectors = np.linalg.eigh(fit.T @ fit)
    values, choose, test = np.maximum(values, 0), choose @ vectors, test @ vectors
    penalties = len(fit) * np.array(PENALTIES)
    found = []
    for row in labels:
        names, numbers = np.unique(row[parts.fit], return_inverse=True)
        wanted = np.eye(len(names))[numbers.reshape(-1)]
        share = wanted.mean(axis=0)
        onto = vectors.T @ (fit.T @ (wanted - share))

        def right(
            x: np.ndarray, part: np.ndarray, penalty: float, onto=onto, share=share, names=names, row=row
        ) -> float:
            said = names[np.argmax(x @ (onto / (values + penalty)[:, None]) + share, axis=1)]
            return float(np.mean(said == row[part].reshape(-1)))

        # of equals the largest: the last
        best = max(penalties, key=lambda penalty: (right(choose, parts.choose, penalty), penalty))
        found.append(right(test, parts.test, best))
    return np.array(found)


STUDY = Study(
    "decoding",
    decoding,
    "what can be read off the stream",
    "Accuracy of a ridge probe for the token, the one before, the place and the next token from the stream before "
    "every block (Alain and Bengio 2016, 1610.01644).",
    "quick",
    tokens=MOST_TRAINING + MOST_TESTING,
)
