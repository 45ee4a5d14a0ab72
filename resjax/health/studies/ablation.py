"""Which blocks does a network need? The rise of its loss without the updates of each."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from resjax.health.geometry import ratio
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject
from resjax.residual import Flow

DEAD_NATS, DEAD_RATIO = 0.002, 0.01


def ablation(subject: Subject) -> dict[str, Any]:
    """The loss with the updates of one block, or of one of its sites, set to 0 (M15); what it hands to other blocks stays.

    Returns:
      blocks: that were left out, one at a time.
      loss: nats per token of the whole network.
      delta: (blocks,) rise of the loss without the block's updates.
      delta_site: (blocks, sites) the same without one of its sites' updates.
      ratio: (blocks, sites) token mean of |update| / |what it is added to|; NaN where there is nothing of the kind.
      effective_depth: (sum delta)^2 / sum delta^2, of the rises only: how many of ``blocks`` carry the weight; NaN if none does.
      dead: (blocks,) less than 0.002 nats and, at all sites, less than 1 % of the stream.
    """
    blocks, walk, sites = subject.blocks, subject.walk, len(subject.kinds)
    each = range(sites) if sites > 1 else ()
    table = np.zeros((len(subject.batches), len(blocks), 1 + len(each)))
    whole: list[float] = []
    for rises, (state, targets) in zip(table, subject.opened(), strict=True):
        whole.append(subject.loss_of(state, targets))
        for rise, block in zip(rises, blocks, strict=True):
            state = walk.to(state, block)
            for i, site in enumerate((slice(None), *each)):
                keep = np.ones((subject.depth, sites), np.float32)
                keep[block, site] = 0
                rise[i] = subject.loss_of(walk.to(state, block + 1, keep), targets) - whole[-1]
    ratios = np.mean([found["ratio"] for found in subject.measured(_ratio)], axis=0)
    return worth(blocks, whole, table, ratios[blocks])


def worth(blocks: list[int], whole: Sequence[float], table: np.ndarray, ratios: np.ndarray) -> dict[str, Any]:
    """The results of :func:`ablation`.

    Args:
      blocks: that were left out.
      whole: loss of the whole network on each batch.
      table: (batches, blocks, 1 + sites) rises of the loss without a block, then without each of its sites; of one site (..., 1).
      ratios: (blocks, sites).
    """
    delta, *of_sites = table.mean(axis=0).T
    small = ~np.any(ratios >= DEAD_RATIO, axis=1)  # a site without update is small too
    return {
        "blocks": blocks,
        "loss": float(np.mean(whole)),
        "delta": delta,
        "delta_site": np.stack(of_sites or [delta], axis=1),
        "ratio": ratios,
        "effective_depth": effective(delta),
        "dead": (delta < DEAD_NATS) & small,
    }


def effective(delta: np.ndarray) -> float:
    """(sum d)^2 / sum d^2, negative ones being 0; NaN where there is no other."""
    rises = np.where(delta < 0, 0, delta)
    with np.errstate(invalid="ignore"):
        return float(np.float64(rises.sum() ** 2) / np.float64(np.square(rises).sum()))


def _ratio(flow: Flow) -> dict[str, jax.Array]:
    if flow.update is None or flow.beside is None:
        return {"ratio": jax.numpy.float32(np.nan)}
    return {"ratio": ratio(flow.update, flow.beside)}


STUDY = Study(
    "ablation",
    ablation,
    "what each block is worth",
    "Rise of the loss when the updates of one block or site are set to 0, and how many blocks carry that weight (Veit et al. "
    "2016, 1605.06431).",
    "slow",
)
