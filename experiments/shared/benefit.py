"""What is a part of a network good for? A lower loss at the best rate, or a higher rate at which it trains, seed by seed."""

from dataclasses import dataclass

import numpy as np

from experiments.judge import LEAST, Effect, difference
from experiments.runs import Best, Runs
from experiments.shared.rates import highest
from experiments.shared.seen import counted
from experiments.shared.sizes import SEEDS
from experiments.shared.skips import at_best, edge


@dataclass(frozen=True)
class Benefit:
    """Two arms that differ by a part, compared.

    Attributes:
      share: of the seeds in which the part is of use.
      cost: loss without it less loss with it, nats.
      rates: highest rates that train by seed, with it and without it.
      best: where the arms are at their best, alike.
      cut: why the share cannot be told; empty where it can.
    """

    share: Effect
    cost: Effect
    rates: tuple[np.ndarray, np.ndarray]
    best: tuple[Best, Best]
    cut: str

    @property
    def higher(self) -> int:
        """Seeds in which a higher rate trains with the part."""
        return int(np.sum(self.rates[0] > self.rates[1]))


def benefit(with_part: Runs, without: Runs, unit: float) -> Benefit:
    """In how many seeds the part lowers the loss by more than ``unit`` nats, each arm at its best rate, or lets a higher rate train.

    A seed without a finite loss where the other arm has one has lost.
    """
    best = at_best(with_part), at_best(without)
    losses = [np.asarray(one.runs.losses(SEEDS)) for one in best]
    cost = difference(losses[1], losses[0])
    rates = np.asarray(highest(with_part, SEEDS)), np.asarray(highest(without, SEEDS))
    lost = np.isfinite(losses[0]) & ~np.isfinite(losses[1])
    known = np.isfinite(rates).all(axis=0) & np.isfinite(losses).any(axis=0)
    lower = np.nan_to_num(cost.values, nan=-np.inf) > unit
    found, unknown = counted(np.where(known, lower | lost | (rates[0] > rates[1]), np.nan).tolist())
    told_by_rates = np.sum(rates[0] > rates[1]) >= LEAST - 1  # whatever the loss is beyond the grid
    doubt = "" if told_by_rates else edge(cost.mean > unit, best[1], best[0])
    return Benefit(found, cost, rates, best, unknown or doubt)
