"""At which learning rates does an arm train, and what of that can be told? By seed, so that arms can be compared seed by seed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.judge import Effect, Interval
from experiments.runs import RATE, SEED, Row, Runs, ended, losses_of, number, value_of
from resjax.health.series import steps_to_target

STEP = 10**0.5  # from one rate of the protocol's grids to the next, about
LOST = ("nonfinite", "failed", "killed")
SMOOTHED = 2  # logged losses that a mean is taken of


def highest(runs: Runs, seeds: Sequence[int]) -> list[float]:
    """Of each seed the largest rate at which it was trained (M9 of one seed); where none was, a step below the lowest.

    NaN where a run at a larger rate came to no end, or there is no run.
    """
    found = []
    for seed in seeds:
        ends = {value_of(row, RATE): ended(row, "trained") for row in runs.where({SEED: seed})}
        best = max((rate for rate, end in ends.items() if end == 1), default=min(ends, default=np.nan) / STEP)
        unknown = any(np.isnan(end) for rate, end in ends.items() if rate > best)
        found.append(np.nan if unknown else best)
    return found


def steps_above(runs: Runs, others: Runs, seeds: Sequence[int]) -> list[float]:
    """By how many steps of the common grid the highest trained rate of each seed is above that of the other arm."""
    both = sorted(set(runs.split(RATE)) & set(others.split(RATE)))
    if not both:
        return [np.nan] * len(seeds)

    def places(arm: Runs) -> np.ndarray:
        """Of each seed the place of its highest rate in the grid, from 0; -1 where none was trained."""
        found = highest(arm.where({RATE: tuple(both)}), seeds)
        return np.array([np.nan if np.isnan(rate) else both.index(rate) if rate in both else -1 for rate in found])

    return (places(runs) - places(others)).tolist()


def by_seed(runs: Runs, of: Callable[[Row], float], seeds: Sequence[int]) -> list[float]:
    """Of each seed the mean of a number over its runs; NaN where there is none, or one of them has none."""
    return [float(np.mean([of(row) for row in runs.where({SEED: seed})] or [np.nan])) for seed in seeds]


def spikes(row: Row, what: str = "episodes") -> float:
    """What a line says of spikes; NaN of a run that did not run, whatever its line says."""
    return number(row, f"spikes.{what}") if np.isfinite(ended(row)) else np.nan


def mean_by_seed(runs: Runs, name: str, seeds: Sequence[int]) -> list[float]:
    """Of each seed the mean of a number of its runs' lines; ``name`` as for :meth:`Runs.values`."""
    return by_seed(runs, lambda row: number(row, name), seeds)


def open_above(runs: Runs) -> bool:
    """Whether the highest trained rate is the last of the grid, so that it may be higher."""
    return bool(len(runs)) and runs.highest_rate() == max(runs.split(RATE))


def reached(row: Row, target: float) -> float:
    """The logged step from which the mean of two logged losses is at most ``target`` (M19); inf if never, NaN without a curve."""
    steps, losses = losses_of(row)
    if len(steps) < 1 + SMOOTHED or not np.isfinite(target):
        return np.nan
    at = steps_to_target(losses[1:], target, SMOOTHED)  # the first step is logged beside the regular ones
    return float(steps[1:][int(at)]) if np.isfinite(at) else np.inf


def loss_at(row: Row, share: float) -> float:
    """The training loss at a share of the run, the mean of two logged ones; NaN if it did not come so far."""
    steps, losses = losses_of(row)
    until = np.flatnonzero(steps[1:] <= share * total(row))
    return (
        float(losses[1:][until][-SMOOTHED:].mean())
        if len(until) >= SMOOTHED and row.get("status") == "done"
        else np.nan
    )


def total(row: Row) -> int:
    """Steps that a run was to have."""
    return row.get("config", {}).get("train.steps", row.get("steps", 0))


def seen_at_end(row: Row, name: str) -> float:
    """A number of the last look at a run; NaN without one."""
    looks: Mapping[str, Any] = row.get("looks") or {}
    return number(looks[max(looks, key=int)], name) if looks else np.nan


def unsigned(found: Effect) -> Effect:
    """The effect in the direction in which its mean lies, for what may differ either way."""
    if not found.mean < 0:
        return found
    low, high = found.interval
    return Effect(tuple(-value for value in found.values), Interval(-high, -low))


def lost(*parts: Runs) -> tuple[str, ...]:
    """A sentence on runs that have no end, if there are any."""
    runs = Runs(row for part in parts for row in part)
    counts = runs.outcomes()
    words = [f"{counts[name]} {name}" for name in LOST if counts[name]]
    return (f"of {len(runs)} runs, {', '.join(words)}: they count as worst, or as not trained",) if words else ()
