"""How far does one optimizer step move what the model says? The magnitude that DeepNet bounds, Wang et al. 2022 (2203.00555; M18)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject
from resjax.health.studies.told import Told
from resjax.models.lm import LM


def update(subject: Subject) -> dict[str, Any]:
    """How far the logits of held-out tokens move by one more step of the run: its own next batch, optimizer and learning rate.

    Rules that depend on the step are held, so that all of the change is the parameters'.

    Returns:
      change: mean over tokens of the length of the change of a token's logits.
      relative: the same by the mean length of the logits.
      tokens: that it is the mean of.
      lr: the learning rate of that step.

    NaN without a run, and where that step is not finite, so that no run would apply it.
    """
    if subject.origin is None or (after := subject.origin.next_model()) is None:
        return figures(np.zeros(3)) | {"lr": np.nan}
    told, sums = Told.of(subject.context), np.zeros(3)
    for batch in subject.batches:
        tokens = jnp.asarray(batch[:, :-1])
        sums += moved(_logits(told, subject.model, tokens), _logits(told, after, tokens))
    return figures(sums) | {"lr": subject.origin.next_rate}


@jax.jit
def _logits(told: Told, model: LM, tokens: jax.Array) -> jax.Array:
    return model(tokens, told.context)[0]


def moved(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Sums over tokens of ``|after - before|`` and of ``|before|``, and the number of tokens, (3,); logits (..., vocabulary)."""
    was, now = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (before, after))
    return np.array([np.linalg.norm(now - was, axis=1).sum(), np.linalg.norm(was, axis=1).sum(), len(was)])


def figures(sums: np.ndarray) -> dict[str, Any]:
    """Mean length of the change of a token's logits, and the same beside the mean length of the logits; from :func:`moved`, added up."""
    change, size, tokens = np.asarray(sums, np.float64)
    return {
        "change": change / tokens if tokens else np.nan,
        "relative": change / size if size > 0 else np.nan,
        "tokens": int(tokens),
    }


STUDY = Study(
    "update",
    update,
    "what one more step changes",
    "Mean length of the change of a held-out token's logits by the run's own next step (Wang et al. 2022, 2203.00555).",
    "quick",
)
