"""Would an experiment come to its verdicts? Its judge and figure on made-up lines of its whole grid, before anything is trained."""

import io
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.experiment import Experiment, Rows
from experiments.judge import Settled
from experiments.runs import Runs
from resjax.config.load import load
from resjax.config.schema import FIELDS
from resjax.errors import Refused
from resjax.health.record import BLOCK_PROBES, SITE_PROBES
from resjax.sweeps import grid
from resjax.sweeps.cells import build
from resjax.sweeps.run import changed
from resjax.train.session import platform

FLOORS = {"unigram": 2.845, "bigram": 2.326, "trigram": 1.787}


def cells(experiment: Experiment, told: Callable[[Mapping[str, Any]], Mapping[str, Any]], scale: str = "cpu") -> Runs:
    """A line for every cell of an experiment's grid: that of a healthy run, over it what ``told`` says of its fields."""
    usual = changed(load(experiment.spec(scale)))
    rows: dict[str, dict[str, Any]] = {}
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
        "profiles": {str(s): probes for s in (1, 10, 30, 100, 300, *(round(part * steps) for part in (0.7, 0.8, 0.9, 1)))},
        "studies": {}, "looks": {},
    }  # fmt: skip


def lost(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run that left the numbers at its first step."""
    return {
        "status": "diverged", "error": "step 1: the loss is not finite", "outcome": "nonfinite", "eval_loss": None,
        "train_loss": None, "last_loss": None, "token_cosine": None, "steps": 1, "curve": [], "profiles": {},
    }  # fmt: skip


def failed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a cell that did not run."""
    nothing = dict.fromkeys(("outcome", "eval_loss", "first_loss", "last_loss", "train_loss", "token_cosine", "floors"))
    return nothing | {"status": "failed", "error": "it did not run", "curve": [], "profiles": {}}


ENDS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "healthy": lambda fields: {},
    "lost": lost,
    "failed": failed,
}


def rehearse(experiment: Experiment, case: str, scale: str = "cpu") -> list[Settled]:
    """The verdicts on made-up runs that all end in one way, one of ``ENDS``; the figure is drawn too, and thrown away.

    Measurements are empty; a figure that needs them is left out.

    Raises:
      Refused: judge or figure do not do what they should.
    """
    runs = cells(experiment, ENDS[case], scale)
    measured: dict[str, Rows] = {name: [] for name in experiment.measures}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing are NaN here
        settled = experiment.settle(runs, measured, scale)
        if not experiment.measures:
            experiment.drawn(runs, measured).savefig(io.BytesIO(), format="svg")
    return settled


def check(experiment: Experiment, grids: Sequence[str] = ("cpu",)) -> None:
    """All that can be found to be wrong with an experiment before it trains; of one that only measures, nothing can.

    Args:
      grids: the scales that are looked at, one after another.

    Raises:
      Refused: a field of a cell, or cells that contradict themselves; judge or figure that fail on runs of one of ``ENDS``.
    """
    if not experiment.cells():
        return
    for scale in grids:
        settings = grid.settings(grid.from_config(experiment.cells(scale), str(experiment.path)), {})
        for cell in build(experiment.spec(scale), (), settings, platform()):
            if cell.refusal:
                raise Refused(f"{experiment.name}, {grid.text(cell.fields)}: {cell.refusal}")
        for case in ENDS:
            rehearse(experiment, case, scale)
