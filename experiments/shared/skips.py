"""What is a network without skips, without branches or without norms, in fields of a configuration? And which runs are its?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.runs import RATE, SEED, Best, Runs, number
from experiments.shared.sizes import SEEDS

Fields = dict[str, Any]

FULL: Fields = {"residual.name": "pre_ln"}
POST: Fields = {"residual.name": "post_ln"}
NO_NORM: Fields = FULL | {"model.norm": "none"}
NO_NORM_PLAIN: Fields = NO_NORM | {"init.out_scale": 1.0}  # nor the start that makes up for depth
NO_SKIP: Fields = FULL | {"residual.skip": 0.0}
NEITHER: Fields = NO_NORM | NO_SKIP
NO_ATTENTION_SKIP: Fields = FULL | {"residual.attention.skip": 0.0}
NO_MLP_SKIP: Fields = FULL | {"residual.mlp.skip": 0.0}
NO_BRANCH: Fields = FULL | {"residual.scale": 0.0}
NO_BRANCH_TIED: Fields = NO_BRANCH | {"model.tied": True}
SHAPED: Fields = {"residual.name": "shaped_skipless"}  # identity-dominant attention in the place of its skip
USUAL: Fields = {
    "residual.skip": None, "residual.attention.skip": None, "residual.mlp.skip": None, "residual.scale": None,
    "model.norm": "layernorm", "model.tied": False, "init.out_scale": None,
}  # fmt: skip

MOST = {"threshold": 0.3, "other": 0.45}  # by Wilson's interval: 4 seeds of 5 are most, and none of 5 is refuted
FEW = {"threshold": 0.45, "other": 0.3}  # the other way round


def arm(runs: Runs, fields: Fields) -> Runs:
    """The runs of an arm: what it does not name is as usual."""
    return runs.where(USUAL | dict(fields))


def at_best(runs: Runs) -> Best:
    """Where an arm is at its best; of no runs, none."""
    return runs.best() if len(runs) else Best(np.nan, runs, "there are no runs of an arm")


def edge(worse: bool, arm: Best, base: Best) -> str:
    """Why the sign of a difference may be another beyond the grid; empty where it may not.

    An arm that is worse could be better at a rate that was not tried, if its best one is the last; one that is not worse could become
    worse only if the base could be better.
    """
    return (arm if worse else base).edge


def capped(runs: Runs, seeds: Sequence[int] = SEEDS) -> list[float]:
    """Of each seed the mean over the rates of min(held-out loss, loss at the start), nats: M8 with the best loss not taken off.

    M8 itself calls an arm insensitive that fails at every rate alike, so that it cannot compare arms. A loss that is not finite counts
    as the start; NaN where a seed has no run, or none with a start.
    """
    found = []
    for seed in seeds:
        mine = runs.where({SEED: seed})
        starts = np.array([number(row, "first_loss") for row in mine])
        losses = np.array([number(row, "eval_loss") for row in mine])
        if not np.isfinite(starts).any():
            found.append(np.nan)
            continue
        start = float(np.mean(starts[np.isfinite(starts)]))
        found.append(float(np.mean(np.minimum(np.where(np.isfinite(losses), losses, np.inf), start))))
    return found


def endings(runs: Runs, name: str) -> str:
    """How the runs of an arm ended, rate by rate, for a note."""
    parts = [
        f"{rate:g}: " + ", ".join(f"{count} {end}" for end, count in part.outcomes().items())
        for rate, part in runs.split(RATE).items()
    ]
    return f"{name} by rate: {'; '.join(parts) or 'no runs'}"
