"""Where does a loss spike, and does it come back? M7: a score over the run, and episodes, from the logged losses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BEFORE = 51  # losses that an episode is measured against,
JUMP, DEVIATIONS = 0.1, 7.0  # and how far above their median it is: nats, and robust standard deviations
MERGED = 10  # steps within which spikes are one episode
RETURN = 0.1  # share of the run within which a loss comes back, or the spike was fatal
SCORED, SCORED_SHARE = 1000, 0.1  # steps that the score looks back on: at most so many, and this share of the run
NORMAL = 1.4826  # standard deviation of a normal over its median absolute deviation


@dataclass(frozen=True)
class Episode:
    """A spike of the loss.

    Attributes:
      first, last: steps at which the loss is a spike.
      peak: step of its highest loss (a loss that is not finite is the highest).
      before: median of the losses before it.
      height: nats of the peak above that.
      fatal: the loss does not come back to within 0.1 nats of ``before`` in a tenth of the run.
    """

    first: int
    last: int
    peak: int
    before: float
    height: float
    fatal: bool


def episodes(steps: Sequence[int], losses: Sequence[float]) -> list[Episode]:
    """The spikes (M7b, M7c): losses more than 0.1 nats above the median of the 51 before, and more than 7 robust standard
    deviations, merged within 10 steps.

    Args:
      steps: increasing step numbers of the losses that were logged.
      losses: nats; what is not finite is infinitely high. The 51 before are those that are finite and no spikes.
    """
    steps_, values = np.asarray(steps), np.where(np.isfinite(losses), losses, np.inf)
    calm: list[float] = []
    found: list[dict] = []
    for i, (step, loss) in enumerate(zip(steps_, values, strict=True)):
        window = np.asarray(calm[-BEFORE:])
        if len(window) == BEFORE:
            median = float(np.median(window))
            spread = NORMAL * float(np.median(np.abs(window - median)))
            if loss > median + JUMP and loss - median > DEVIATIONS * spread:
                if found and step - found[-1]["last"] <= MERGED:
                    found[-1]["last"] = int(step)
                    found[-1]["peak"] = max(found[-1]["peak"], i, key=lambda at: values[at])
                else:
                    found.append({"first": int(step), "last": int(step), "peak": i, "before": median})
                continue
        if np.isfinite(loss):
            calm.append(float(loss))
    return [_episode(one, steps_, values) for one in found]


def _episode(one: dict, steps: np.ndarray, values: np.ndarray) -> Episode:
    within = (steps > one["last"]) & (steps <= one["last"] + RETURN * steps[-1])
    returns = bool(np.any(values[within] <= one["before"] + JUMP))
    height = float(values[one["peak"]] - one["before"])
    return Episode(one["first"], one["last"], int(steps[one["peak"]]), one["before"], height, not returns)


def score(losses: Sequence[float]) -> float:
    """The percentage of losses at least 7 standard deviations from the mean of those before (M7a, as OLMo), over
    min(1000, a tenth of the run); those before that many are not scored."""
    values = np.asarray(losses, np.float64)
    window = int(min(SCORED, SCORED_SHARE * len(values)))
    if window < 2:
        return 0.0
    hits = 0
    for i in range(window, len(values)):
        before = values[i - window : i]
        before = before[np.isfinite(before)]
        if not np.isfinite(values[i]) or (
            len(before) > 1 and np.abs(values[i] - before.mean()) >= DEVIATIONS * before.std() > 0
        ):
            hits += 1
    return 100.0 * hits / len(values)
