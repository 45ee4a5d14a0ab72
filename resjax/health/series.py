"""What does the course of a run's loss say beside its last value? Spikes, sensitivity to the rate, oscillation, steps to a target.

NumPy on the host. A series is one loss a step, in order, nats per token (any unit where none is named); positions are counted from 0.
Where losses are logged every k steps a "step" here is a logged loss; ``every=k`` keeps those lengths right that are meant in steps of
the run. A series that is too short for a figure has none (NaN, or no spike).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from resjax.errors import Refused

CHUNK = 4096  # windows that are looked at together
RESOLUTION = 1e-7  # a loss is a float32: spreads below this share of it are taken to be this large
SCORED = 1000  # steps at most that the score's mean is taken of
HISTORY, MERGE = 51, 10  # of episodes: losses that the median is taken of; steps within which two belong together
SHORTEST_TAIL = 8  # values that an oscillation can be told from
TAIL = 0.05  # of a run: what its last loss is the mean of
ENOUGH = 20  # logged losses, fewer tell nothing of where a run ended

Outcome = Literal["recovered", "fatal", "open"]


# ---- the last value


def last_loss(loss: ArrayLike) -> float:
    """Mean of the last twentieth of the finite losses; NaN where none is."""
    values = np.asarray(loss, np.float64)
    finite = values[np.isfinite(values)]
    return float(finite[-max(1, round(TAIL * len(finite))) :].mean()) if len(finite) else np.nan


# ---- spikes (M7)


def spacing(steps: ArrayLike) -> float:
    """Steps of the run from one logged loss to the next: the median; 1 for fewer than two."""
    return float(np.median(np.diff(np.asarray(steps)))) if np.size(steps) > 1 else 1.0


def in_whole_run(losses: int, every: float, planned: object) -> int:
    """How many losses the run will have when its ``planned`` steps are done: a tenth of these is the time that a loss has to come back.

    Args:
      losses: how many it has so far.
      every: steps from one to the next.
      planned: ``train.steps`` of the run; where that is no number it ends with these losses.
    """
    return max(losses, round(planned / every)) if isinstance(planned, int) else losses


def spike_steps(
    loss: ArrayLike, deviations: float = 7.0, window: int | None = None, every: float = 1, whole: int | None = None
) -> np.ndarray:
    """Steps whose loss is at least ``deviations`` standard deviations from the mean of the ``window`` steps before, above or below.

    By default the window is min(1000 steps, a tenth of the run), as OLMo's spike score has it. The first ``window`` steps are not judged.
    A non-finite loss is a spike wherever it stands, and is left out of the windows.

    Args:
      every: steps of the run from one loss to the next.
      whole: how many losses the run will have, where it goes on; by default it ends with these.
    """
    values = series(loss)
    window = min(round(SCORED / every), (whole or len(values)) // 10) if window is None else window
    finite = np.isfinite(values)
    found = ~finite
    clean = np.where(finite, values, 0.0)
    if window >= 2:
        for here, before in windows(clean, window):
            known = sliding_window_view(finite, window)[here.start - window : here.stop - window]
            count = np.maximum(known.sum(axis=1), 1)
            mean = np.sum(before, axis=1, where=known) / count
            spread = np.sqrt(np.sum(np.square(before - mean[:, None]), axis=1, where=known) / count)
            distance = np.abs(clean[here] - mean)
            far = (distance > 0) & (distance >= deviations * np.maximum(spread, RESOLUTION * np.abs(mean)))
            found[here] |= far & (known.sum(axis=1) >= 2)
    return np.flatnonzero(found)


def spike_score(
    loss: ArrayLike, deviations: float = 7.0, window: int | None = None, every: float = 1, whole: int | None = None
) -> float:
    """Percentage of the steps that are :func:`spike_steps`; NaN for no steps at all."""
    count = len(series(loss))
    return 100 * len(spike_steps(loss, deviations, window, every, whole)) / count if count else np.nan


@dataclass(frozen=True)
class Episode:
    """One loss spike.

    Attributes:
      first, last: its first and last step that stands out.
      before: median of the (up to 51) finite losses before it; NaN where there are none.
      peak: the largest loss from first to last; inf where one is not finite.
      top: its step.
      back: the first step after ``last`` with a loss of at most ``before`` + height; None if there is none in time.
      outcome: recovered; fatal (not back within a tenth of the run after ``last``, or the run ends on a non-finite loss); open (the
        run ends before that could be told).
    """

    first: int
    last: int
    before: float
    peak: float
    top: int
    back: int | None
    outcome: Outcome


def spike_episodes(
    loss: ArrayLike, height: float = 0.1, score: float = 7.0, every: float = 1, whole: int | None = None
) -> list[Episode]:
    """Spikes as stretches of the run, in order.

    A step stands out where its loss is above the median of the 51 steps before by more than ``height`` (nats) and by more than
    ``score`` robust standard deviations (1.4826 times the median absolute deviation of those 51), or is not finite; steps that stand
    out within 10 steps of one another are one episode. The first 51 steps stand out only where they are not finite.

    Args:
      every: steps of the run from one loss to the next; the median is of 51 losses all the same.
      whole: how many losses the run will have, where it goes on; by default it ends with these.
    """
    values = series(loss)
    finite = np.isfinite(values)
    stands_out = ~finite
    heights = np.where(finite, values, np.inf)
    for here, before in windows(heights, HISTORY):
        middle = _middle(before)
        with np.errstate(invalid="ignore"):  # where most of the window is infinite nothing can stand out
            spread = 1.4826 * _middle(np.abs(before - middle[:, None]))
            above = heights[here] - middle
            bound = np.maximum(score * np.maximum(spread, RESOLUTION * np.abs(middle)), height)
            stands_out[here] |= above > bound
    steps = np.flatnonzero(stands_out)
    apart = np.diff(steps) > max(1.0, MERGE / every)
    groups = np.split(steps, np.flatnonzero(apart) + 1) if len(steps) else []
    return [_episode(values, int(group[0]), int(group[-1]), height, whole or len(values)) for group in groups]


def _episode(values: np.ndarray, first: int, last: int, height: float, whole: int) -> Episode:
    history = values[max(0, first - HISTORY) : first]
    history = history[np.isfinite(history)]
    before = float(np.median(history)) if len(history) else np.nan
    during = np.where(np.isfinite(values), values, np.inf)[first : last + 1]
    top = first + int(np.argmax(during))
    limit = last + int(np.ceil(whole / 10))
    after = values[last + 1 : limit + 1]
    home = np.flatnonzero(np.isfinite(after) & ~(after > before + height))  # with nothing before, any finite loss
    back = last + 1 + int(home[0]) if len(home) else None
    outcome: Outcome = "recovered"
    if back is None:
        outcome = "fatal" if limit < len(values) or not np.isfinite(values[-1]) else "open"
    return Episode(first, last, before, float(during[top - first]), top, back, outcome)


# ---- over a grid of learning rates (M8), and towards a target (M19)


def learning_rate_sensitivity(final: ArrayLike, start: float) -> float:
    """Mean over a grid of learning rates of min(l, start) - best, l the final losses and ``start`` the loss at initialisation.

    Wortsman et al. 2023 (2309.14322). A final loss that is not finite counts as ``start``. NaN where no run got below ``start``, or
    there is none: then there is no best to compare with.
    """
    losses = series(final)
    capped = np.minimum(np.where(np.isfinite(losses), losses, np.inf), start)
    if not len(capped) or not capped.min() < start:
        return np.nan
    return float(np.mean(capped - capped.min()))


def steps_to_target(loss: ArrayLike, target: float, window: int = 20) -> float:
    """The first step at which the mean of the last ``window`` losses, its own included, is at most ``target``; inf if never.

    A non-finite loss in the window keeps the target from being reached.
    """
    values = series(loss)
    if len(values) < window:
        return np.inf
    with np.errstate(invalid="ignore"):
        means = sliding_window_view(values, window).mean(axis=1)
    reached = np.flatnonzero(means <= target)
    return float(reached[0] + window - 1) if len(reached) else np.inf


# ---- oscillation (M14)


class Oscillation(NamedTuple):
    """How the end of a run swings about its trend; NaN where it cannot be told.

    Attributes:
      ratio: standard deviation of the loss by that of the frozen final model on the same batches: 1 = all of it is the batches.
      period: of the strongest period, in steps.
      chance: how likely a peak as high is in noise with the same lag-1 autocorrelation, at least 1 / (surrogates + 1).
      lag1: autocorrelation with the step before; near -1 for a swing up and down at every other step.
    """

    ratio: float
    period: float
    chance: float
    lag1: float


def oscillation(
    loss: ArrayLike, frozen: ArrayLike | None = None, share: float = 0.4, surrogates: int = 1000, seed: int = 0
) -> Oscillation:
    """What the last ``share`` of the run does, a straight line taken off.

    The peak is the largest value of the periodogram beside the sum of all; the same is worked out for ``surrogates`` series of noise
    with the autocorrelation of the series at lag 1 (AR(1), freed of a line too).

    Args:
      frozen: loss of the final model, not trained any further, on the same batches: for the whole run or for the share.

    All NaN with a non-finite loss in the share, with fewer than 8 steps in it, and where it is a straight line.
    """
    values = series(loss)
    count = round(share * len(values))
    nothing = Oscillation(np.nan, np.nan, np.nan, np.nan)
    tail = values[len(values) - count :]
    if count < SHORTEST_TAIL or not np.isfinite(tail).all():
        return nothing
    left = _detrended(tail)
    if left.std() <= RESOLUTION * np.abs(tail).max():
        return nothing
    ratio = np.nan
    if frozen is not None:
        beside = series(frozen)
        if len(beside) < count:
            raise Refused(
                f"frozen has {len(beside)} losses, and the last {share:g} of the run are {count}: give as many"
            )
        beside = beside[len(beside) - count :]
        noise = _detrended(beside).std() if np.isfinite(beside).all() else np.nan
        ratio = float(left.std() / noise) if noise > 0 else np.nan
    peak, at = _peak(left[None])
    lag1 = float(left[1:] @ left[:-1] / (left @ left))
    rng, higher = np.random.default_rng(seed), 0
    for first in range(0, surrogates, 100):
        many = min(100, surrogates - first)
        higher += int(np.sum(_peak(_detrended(_red_noise(rng, lag1, many, count)))[0] >= peak[0]))
    return Oscillation(ratio, count / (int(at[0]) + 1), (1 + higher) / (1 + surrogates), lag1)


def _detrended(x: np.ndarray) -> np.ndarray:
    """Without its straight line, (..., steps)."""
    t = np.arange(x.shape[-1]) - (x.shape[-1] - 1) / 2
    level = x - x.mean(axis=-1, keepdims=True)
    return level - (level @ t / (t @ t))[..., None] * t


def _peak(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Height and place of the largest value of the periodogram beside the sum of all, (series, steps) -> (series,) each."""
    power = np.square(np.abs(np.fft.rfft(x, axis=1)[:, 1:]))
    return power.max(axis=1) / power.sum(axis=1), power.argmax(axis=1)


def _red_noise(rng: np.random.Generator, phi: float, count: int, steps: int) -> np.ndarray:
    """``count`` stationary AR(1) series x_t = phi x_(t-1) + e_t, (count, steps)."""
    phi = float(np.clip(phi, -0.999, 0.999))
    noise = rng.normal(size=(steps, count))
    noise[0] /= np.sqrt(1 - phi**2)
    for t in range(1, steps):
        noise[t] += phi * noise[t - 1]
    return noise.T


# ---- series and windows


def series(loss: ArrayLike) -> np.ndarray:
    """The loss as float64, one number a step."""
    values = np.asarray(loss, np.float64)
    if values.ndim != 1:
        raise Refused(f"loss has the shape {values.shape}, and is to be one number a step")
    return values


def windows(values: np.ndarray, length: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Steps that have ``length`` steps before them, a few thousand at a time, and those before each: (steps, length)."""
    for first in range(length, len(values), CHUNK):
        here = slice(first, min(first + CHUNK, len(values)))
        yield here, sliding_window_view(values, length)[first - length : here.stop - length]


def _middle(x: np.ndarray) -> np.ndarray:
    """The median of each row of odd length; infinities are the largest numbers."""
    return np.partition(x, x.shape[1] // 2, axis=1)[:, x.shape[1] // 2]
