"""Lines of a sweep as they might be, for a whole grid: for tests of what is made of them, where nothing is trained."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.experiment import Experiment
from experiments.runs import Runs
from resjax.config.load import load
from resjax.config.schema import FIELDS
from resjax.health.record import BLOCK_PROBES, SITE_PROBES
from resjax.sweeps.run import changed

FLOORS = {"unigram": 2.845, "bigram": 2.326, "trigram": 1.787}


def cells(experiment: Experiment, told: Callable[[Mapping[str, Any]], Mapping[str, Any]], scale: str = "cpu") -> Runs:
    """A line for every cell of an experiment's grid: that of a healthy run, over it what ``told`` says of its fields."""
    usual, rows = changed(load(experiment.spec(scale))), {}
    for fields in experiment.cells(scale):
        config = {path: value for path, value in (usual | fields).items() if value != FIELDS[path].default}
        rows.setdefault(repr(sorted(config.items())), line(config, fields) | dict(told(fields)))
    return Runs(rows.values())  # cells that are the same run are one


def line(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """That of a run which fell from 3.5 to about 2 nats; ``config`` are its fields that are not at their defaults."""
    steps, depth = (config.get(path, FIELDS[path].default) for path in ("train.steps", "model.depth"))
    rng = np.random.default_rng(zlib.crc32(repr(sorted(config.items())).encode()))
    loss = 2.0 + 0.005 * float(rng.normal())
    curve = [{"step": s, "loss": loss + 1.5 * np.exp(-5 * s / steps)} for s in range(10, steps + 1, 10)]
    probes = {name: np.full((depth, 2), 0.05).tolist() for name in SITE_PROBES}
    probes |= {name: np.full(depth, 0.05).tolist() for name in BLOCK_PROBES}
    return {
        "cell": str(len(fields)), "fields": dict(fields), "config": dict(config), "status": "done", "error": None,
        "outcome": "trained", "train_loss": loss, "eval_loss": loss, "first_loss": 3.5, "last_loss": loss, "steps": steps,
        "seconds": 1.0, "token_cosine": 0.3, "floors": FLOORS,
        "spikes": {"score": 0.0, "episodes": 0, "fatal": 0, "max_loss": 3.5}, "curve": curve,
        "profiles": {str(s): probes for s in (1, 10, 30, 100, 300, round(0.7 * steps), round(0.8 * steps), steps)},
        "studies": {}, "looks": {},
    }  # fmt: skip


def lost(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run that left the numbers at its first step."""
    return {
        "status": "diverged", "error": "step 1: the loss is not finite", "outcome": "nonfinite", "eval_loss": None,
        "train_loss": None, "last_loss": None, "token_cosine": None, "steps": 1, "curve": [], "profiles": {},
    }  # fmt: skip
