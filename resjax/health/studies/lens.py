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
    top = np.concatenate([np.stack(found) for found in tops], axis=1)  # (points, n * B, T)
    return {
        "blocks": points,
        "loss": np.mean(losses, axis=0),
        "settled": np.mean(top == top[-1], axis=(1, 2)),
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
