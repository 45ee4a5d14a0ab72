"""Does the end of a run swing by itself, or only with its batches? The loss of the last steps beside that of the frozen model (M14)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.series import SHORTEST_TAIL, oscillation
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject, spread
from resjax.health.studies.told import Told
from resjax.models.lm import LM

SHARE = 0.4  # of the logged steps, the last
MOST = 64  # of them, on whose batches the frozen model is run


def steadiness(subject: Subject) -> dict[str, Any]:
    """How the training loss of the last 40 % of the run's logged steps swings about its trend; see :func:`swinging`.

    The frozen model is run as in training (dropout and stochastic depth draw), on the batches of at most 64 of these steps, evenly
    spread: ``steps``. Without a run there is nothing to tell: NaN.
    """
    steps, loss = logged(subject.rows, subject.step)
    return swinging(steps, loss, None if subject.origin is None else lambda steps: frozen_loss(subject, steps))


def frozen_loss(subject: Subject, steps: Sequence[int]) -> np.ndarray:
    """The training loss of the model as it is on the run's batches of ``steps``, nats per token."""
    assert subject.origin is not None
    key, losses = jax.random.key(0), []  # what is drawn need not be what was drawn then
    for step in steps:
        told = Told.of(replace(subject.context, train=True, key=jax.random.fold_in(key, step)))
        losses.append(float(_loss(told, subject.model, jnp.asarray(subject.origin.training_batch(step)))))
    return np.array(losses)


@jax.jit
def _loss(told: Told, model: LM, batch: jax.Array) -> jax.Array:
    return model.objective(batch, told.context)[0]


def swinging(
    steps: Sequence[int],
    loss: Sequence[float],
    frozen: Callable[[Sequence[int]], np.ndarray] | None,
    most: int = MOST,
    share: float = SHARE,
    surrogates: int = 1000,
) -> dict[str, Any]:
    """How the last ``share`` of the logged losses swings about its trend.

    Args:
      steps, loss: the logged steps, ascending, and their training losses.
      frozen: some of the steps -> the loss of the model as it is now, not trained any further, on the batches of each; None where
        the batches are not to be had.

    Returns:
      ratio: standard deviation of the loss by that of the frozen model, a straight line taken off both, on ``steps``: those of the last
        share, at most ``most`` of them, evenly spread. 1 = all of it is the batches.
      period: of the strongest period of all losses in the share, in steps; below two logged steps none can be seen.
      chance: how likely a peak as high is in noise with the same autocorrelation from one logged step to the next.
      lag1: that autocorrelation.
      every: steps from one logged one to the next (median).
      logged: how many logged steps the share has.

    NaN as :func:`resjax.health.series.oscillation` has it.
    """
    at, values = np.asarray(steps), np.asarray(loss, np.float64)
    count = round(share * len(values))
    at, values = at[len(at) - count :], values[len(values) - count :]
    every = float(np.median(np.diff(at))) if count > 1 else np.nan
    whole = oscillation(values, share=1.0, surrogates=surrogates)
    picked = spread(count, most)
    ratio = np.nan
    if frozen is not None and len(picked) >= SHORTEST_TAIL and np.isfinite(values).all():
        beside = frozen([int(step) for step in at[picked]])
        ratio = oscillation(values[picked], beside, share=1.0, surrogates=0).ratio
    return {
        "ratio": ratio,
        "period": whole.period * every,
        "chance": whole.chance,
        "lag1": whole.lag1,
        "every": every,
        "logged": count,
        "steps": at[picked],
    }


def logged(rows: Sequence[Mapping[str, Any]], upto: int) -> tuple[list[int], list[float]]:
    """Steps and training losses of rows of metrics.jsonl, up to a step.

    A first step that is logged beside the regular ones does not matter here: it is not in the last share.
    """
    found = [(int(row["step"]), float(row["loss"])) for row in rows if "loss" in row and row["step"] <= upto]
    return [step for step, _ in found], [loss for _, loss in found]


STUDY = Study(
    "steadiness",
    steadiness,
    "how the end of the run swings",
    "Spread of the training loss in the last 40 % of the logged steps beside that of the frozen model on the same "
    "batches, and its strongest period against noise.",
    "quick",
)
