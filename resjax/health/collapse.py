"""Have the tokens of a sequence become one, or do they lie along one line? Collapse, told from an offset that they merely share.

An offset common to all tokens (a bias, a feature that outweighs the rest) raises their cosine and takes nothing away: what is left of them
less their mean tells them apart as before. So a high cosine is a collapse only where the figures about the mean, if there are any, do not
contradict it: the centred cosine, the share of the stream that is left, its effective rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from resjax.health.reading import Finding, end_of, last_blocks, last_rows, measured, ranges, said, since
from resjax.health.record import HealthRecord
from resjax.health.series import ENOUGH, last_loss

# Tokens of one sequence within 11 degrees of one another: the model can tell frequencies, hardly tokens.
COLLAPSED_COSINE = 0.98
# What is left without the mean token, as a share of the stream, below which it is as good as nothing: 0.06 degrees.
NOTHING_LEFT = 1e-3
# Directions and the share of those that could be, the first not counted: "near 1" where many are possible.
COLLAPSED_RANK, COLLAPSED_SHARE = 2.0, 0.1
# Largest magnitude over RMS, from which a few elements make the rank, in roots of the width: tokens of one length reach one root only.
# Of a width that is not known: 2,500.
FEW_ELEMENTS, UNKNOWN_WIDTH = 2.0, 2500

NOT_MEASURED = "The cosine about the mean tells: have a state studied for the doctor (probes), or record it (health.groups=tokens). "


def token_collapse(record: HealthRecord, state: Mapping[str, Any], step: int, apart: str = "") -> list[Finding]:
    """Tokens of a sequence have become (nearly) parallel throughout the last blocks, and no figure about their mean says otherwise.

    Args:
      state: probes of a state that was studied, for what the record lacks.
      step: of the state, or the last recorded one.
      apart: what else shows that tokens reach the head apart, in words.
    """
    if (found := _parallel(record, state)) is None or apart or told_apart(record, state):
        return []
    first, lowest, rows = found
    steps = record.steps if "token_cosine" in record else [step]
    end = float(np.median(lowest[last_rows(rows)]))
    began = _last_stretch(rows, lowest[rows] > COLLAPSED_COSINE)
    about = _about_the_mean(record, state)
    evidence = f"mean cosine between different tokens at least {end:.3f} at the end, above {COLLAPSED_COSINE:g}; " + (
        ", ".join(about) if about else "whether a common offset alone makes it so was not measured"
    )
    advice = (
        "Compare the loss with the unigram baseline: a collapsed model has learned token frequencies only. "
        + ("" if about else NOT_MEASURED)
        + "Keep the skip of attention at 1, lower the learning rate, lengthen the warm-up, or take pre_ln, sandwich_branch or deepnorm."
    )
    where = f"{ranges(range(first, _depth(record, state)))} (the last)"
    more = measured("token_cosine", end, (None, COLLAPSED_COSINE), steps[began])
    return [said("token collapse", where, steps[began], evidence, advice) | more]


def shared_offset(record: HealthRecord, state: Mapping[str, Any], apart: str = "") -> str:
    """A sentence on tokens that are nearly parallel in the last blocks and yet told apart; empty where there are none such."""
    if _parallel(record, state) is None or not (reason := told_apart(record, state) or apart):
        return ""
    first = last_blocks(_depth(record, state))
    return f"{ranges(first)}: the tokens share a common offset (cosine above {COLLAPSED_COSINE:g}) and are no collapse: {reason}"


def below_bigram(losses: Sequence[float] | np.ndarray, floor: float | None) -> str:
    """That the loss shows tokens to reach the head apart, in words; empty where it does not, or is not known.

    Args:
      losses: of training, as logged.
      floor: the bigram baseline of the run's data.
    """
    last = last_loss(losses) if len(losses) >= ENOUGH else np.nan
    if floor is None or not last < floor:
        return ""
    return f"the loss of {last:.3f} nats is below the bigram baseline of {floor:.3f}"


def told_apart(record: HealthRecord, state: Mapping[str, Any]) -> str:
    """What tells the tokens of the last blocks apart once their mean is taken off, in words; empty where nothing does, or none is known."""
    cosine, left, rank = (_last(record, state, name) for name in ABOUT_THE_MEAN)
    if cosine is not None and not (np.isfinite(cosine).any() and np.nanmin(cosine) <= COLLAPSED_COSINE):
        return ""  # of tokens that are the same but for rounding there is no centred cosine
    if left is not None and np.isfinite(left).any() and np.nanmax(left) < NOTHING_LEFT:
        return ""
    if rank is not None and (low := _low(record, state)) is not None and low[last_blocks(len(low))].all():
        return ""
    return ", ".join(_about_the_mean(record, state))


def rank_collapse(record: HealthRecord, state: Mapping[str, Any], step: int, width: int | None = None) -> list[Finding]:
    """What is left of the tokens less their sequence's mean falls over depth to (nearly) one direction, up to the last block.

    Not where a few elements outweigh all others (massive activations): the rank is then theirs, and the others are still there.

    Args:
      state, step: as for :func:`token_collapse`.
      width: of the stream.
    """
    low, rank = _low(record, state), end_of(record, "effective_rank", state)
    if low is None or rank is None or not low[last_blocks(len(low))].all():
        return []
    worst = float(np.nanmax(rank[last_blocks(len(rank))]))
    most = np.unravel_index(int(np.where(np.isfinite(rank), rank, -1.0).argmax()), rank.shape)
    if not rank[most] >= max(2 * worst, COLLAPSED_RANK):
        return []
    largest, rms = (_last(record, state, name) for name in ("stream_max", "stream_rms"))
    few = FEW_ELEMENTS * (width or UNKNOWN_WIDTH) ** 0.5
    if largest is not None and rms is not None and (largest > few * rms).any():
        return []
    whole = np.flatnonzero(~low.reshape(len(low), -1).all(axis=1))  # blocks that are not low at every site
    first = int(whole[-1]) + 1 if len(whole) else 0
    began = step
    if "effective_rank" in record:
        rows = record["effective_rank"][:, last_blocks(len(low))].reshape(len(record), -1)
        rows = np.where(np.isfinite(rows), rows, -np.inf).max(axis=1)
        began = int(record.steps[since(rows < COLLAPSED_RANK)])
    evidence = f"effective rank of the tokens less their mean {rank[most]:.3g} in block {most[0]} and {worst:.2g} at the end of the depth"
    advice = (
        "Look where the rank falls in the profiles, and whether a skip below 1, a norm or a large branch stands there; keep the skip of "
        "attention at 1."
    )
    more = measured("effective_rank", worst, (COLLAPSED_RANK, None), began)
    return [said("rank collapse", ranges(range(first, len(low))), step, evidence, advice) | more]


ABOUT_THE_MEAN = ("token_cosine_centred", "residual_frobenius", "effective_rank")


def _parallel(record: HealthRecord, state: Mapping[str, Any]) -> tuple[int, np.ndarray, np.ndarray] | None:
    """The first of the last blocks, by row the lowest cosine there, and which rows have one; None where tokens are not parallel."""
    cosine = record["token_cosine"] if "token_cosine" in record else state.get("token_cosine")
    if cosine is None:
        return None
    rows = np.asarray(cosine, np.float64)
    rows = rows if "token_cosine" in record else rows[None]
    first = last_blocks(rows.shape[1])[0]
    here = rows[:, first:].reshape(len(rows), -1)
    lowest = np.where(np.isnan(here), np.inf, here).min(axis=1)  # inf where nothing was measured
    there = np.flatnonzero(np.isfinite(lowest))
    if not len(there) or not np.median(lowest[last_rows(there)]) > COLLAPSED_COSINE:
        return None
    return first, lowest, there


def _last_stretch(rows: np.ndarray, holds: np.ndarray) -> int:
    """The row with which the last stretch of those where something ``holds`` begins; an odd one after it is none."""
    last = int(np.flatnonzero(holds)[-1])
    before = np.flatnonzero(~holds[:last])
    return int(rows[before[-1] + 1 if len(before) else 0])


def _depth(record: HealthRecord, state: Mapping[str, Any]) -> int:
    found = end_of(record, "token_cosine", state)
    assert found is not None
    return len(found)


def _last(record: HealthRecord, state: Mapping[str, Any], name: str) -> np.ndarray | None:
    """A probe at the end, in the last blocks."""
    values = end_of(record, name, state)
    return None if values is None else values[last_blocks(len(values))]


def _low(record: HealthRecord, state: Mapping[str, Any]) -> np.ndarray | None:
    """At which sites (block, site) the rank is near 1 though it could be large, or nothing has one; None where none is known."""
    rank, collapse = (end_of(record, name, state) for name in ("effective_rank", "rank_collapse"))
    if rank is None or collapse is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        attainable = rank / (1 - collapse)
        near = (rank < COLLAPSED_RANK) & (rank - 1 <= COLLAPSED_SHARE * (attainable - 1))
    return np.asarray(near | ((rank == 0) & (collapse == 1)))


def _about_the_mean(record: HealthRecord, state: Mapping[str, Any]) -> list[str]:
    """The figures of the last blocks without the mean token, in words; of those that are known."""
    words = ("about their mean {:.2g}", "{:.2g} of the stream is not shared", "effective rank about the mean {:.3g}")
    found = zip(words, (_last(record, state, name) for name in ABOUT_THE_MEAN), strict=True)
    return [word.format(np.nanmedian(x)) for word, x in found if x is not None and np.isfinite(x).any()]
