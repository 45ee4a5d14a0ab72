"""At which depth is the answer there? The final norm and the head, applied after every block."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject


def lens(subject: Subject) -> dict[str, Any]:
    """The logit lens (M17).

    Returns:
      blocks: before which blocks the stream is read out, the depth being after the last.
      loss: (blocks,) nats per token there.
      settled: (blocks,) share of tokens whose likeliest next token is already that of the whole network.
    """
    points, walk = subject.points, subject.walk
    losses, tops = [], []
    for batch, streams in zip(subject.batches, subject.streams(points), strict=True):
        losses.append([walk.loss(stream, batch[:, 1:]) for stream in streams])
        tops.append([np.asarray(_top(walk.logits(stream))) for stream in streams])
    return read_out(points, np.array(losses), np.stack([np.stack(found, axis=0) for found in tops], axis=1))


def read_out(points: list[int], losses: np.ndarray, tops: np.ndarray) -> dict[str, Any]:
    """The results of :func:`lens` from the losses (batches, points) and the likeliest tokens (points, batches, ...)."""
    return {
        "blocks": points,
        "loss": np.mean(losses, axis=0),
        "settled": np.mean(tops == tops[-1], axis=tuple(range(1, tops.ndim))),
    }


@jax.jit
def _top(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1)


STUDY = Study(
    "lens",
    lens,
    "the answer by depth",
    "Loss of the final norm and head read after each block, and the share of tokens whose likeliest token is already the final one "
    "(the logit lens, nostalgebraist 2020).",
    "quick",
)
