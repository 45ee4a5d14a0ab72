"""What does a comparison say of one run? Its losses, spikes, steps to a target, health, and its profiles by depth at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, nan
from statistics import fmean, median
from typing import Any

import numpy as np

from resjax.health.diagnosis.case import Case
from resjax.health.findings import examine, section
from resjax.health.reading import at_end, last_rows
from resjax.health.report import BASELINES, unquoted
from resjax.health.series import in_whole_run, spacing, spike_episodes, spike_score, steps_to_target

SPAN = 20  # steps that a loss is the mean of where it is held against a target
LAST = 10  # rows that the training loss of a run without a summary is the mean of, as summary.json has it
PROBES = ("update_ratio", "stream_rms", "token_cosine", "stream_grad")
UNFINISHED = "unfinished"


@dataclass(frozen=True, eq=False)
class Side:
    """One of the runs that are compared.

    Attributes:
      name: what it is called beside the others.
      case: what it has written down.
      facts: all of its config.json.
    """

    name: str
    case: Case
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and training losses as logged, nats per token."""
        return self.case.series("loss")

    @property
    def window(self) -> int:
        """Logged losses in ``SPAN`` steps, at least one."""
        return max(1, round(SPAN / self.spacing))

    @property
    def spacing(self) -> float:
        """Steps from one logged loss to the next."""
        return spacing(self.losses[0])

    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and means of the losses logged in the ``SPAN`` steps up to each; of the finite ones, NaN where none is."""
        steps, loss = self.losses
        known = np.isfinite(loss)
        total = np.concatenate([[0.0], np.cumsum(np.where(known, loss, 0.0))])
        count = np.concatenate([[0], np.cumsum(known)])
        ends = np.arange(self.window, len(loss) + 1)
        here = count[ends] - count[ends - self.window]
        means = (total[ends] - total[ends - self.window]) / np.maximum(here, 1)
        return steps[ends - 1], np.where(here > 0, means, nan)

    def half_way(self) -> tuple[float, int]:
        """The mean loss of ``SPAN`` steps at half of the run so far, NaN where there is none, and the step."""
        steps, loss = self.losses
        if not len(steps):
            return nan, 0
        first = max(0.0, steps[0] - self.spacing)
        last = max(0, int(np.searchsorted(steps, (first + steps[-1]) / 2, side="right")) - 1)
        return float(np.mean(loss[max(0, last + 1 - self.window) : last + 1])), int(steps[last])

    def reached(self, target: float) -> float:
        """The first step at which the mean loss of ``SPAN`` steps is at most ``target``; inf if it never was (M19)."""
        steps, loss = self.losses
        at = steps_to_target(loss, target, self.window)
        return int(steps[int(at)]) if isfinite(at) else inf

    def spikes(self) -> dict[str, Any]:
        """Score and episodes of the training loss (M7), in steps."""
        steps, loss = self.losses
        whole = in_whole_run(len(loss), self.spacing, section(self.case.config, "train").get("steps"))
        episodes = [
            {
                "first": int(steps[one.first]),
                "last": int(steps[one.last]),
                "top": int(steps[one.top]),
                "before": one.before,
                "peak": one.peak,
                "outcome": one.outcome,
            }
            for one in spike_episodes(loss, every=self.spacing, whole=whole)
        ]
        return {
            "score": spike_score(loss, every=self.spacing, whole=whole),
            "fatal": sum(one["outcome"] == "fatal" for one in episodes),
            "episodes": episodes,
        }

    def health(self) -> dict[str, Any]:
        """Verdict and findings, as the run's summary has them; of one that has none, worked out."""
        case = self.case
        found = section(case.summary, "health") or examine(
            case.record, case.config, case.dtype, self.losses[1].tolist(), case.baseline("bigram")
        )
        findings = [dict(one) for one in found.get("findings") or [] if isinstance(one, Mapping)]
        return {"verdict": str(found.get("verdict")), "findings": findings}

    def profiles(self) -> dict[str, dict[str, list[float]]]:
        """Probe -> site -> a value a block: the median of the last recorded steps, as the doctor has it."""
        record, found = self.case.record, {}
        for probe in PROBES:
            if probe in record and record[probe].ndim == 3:
                end = at_end(record[probe])
                if np.isfinite(end).any():
                    names = record.site_names(end.shape[1])
                    found[probe] = {name: end[:, site].tolist() for site, name in enumerate(names)}
        return found

    def measured_steps(self) -> list[int]:
        """First and last of the recorded steps that the profiles are the median of; empty where none was recorded."""
        steps = last_rows(self.case.record.steps)
        return [int(steps[0]), int(steps[-1])] if len(steps) else []

    def last(self, key: str, logged: str) -> float | None:
        """A number of the summary; without one, of the last row that has it."""
        found = self.case.series(logged)[1]
        value = unquoted(self.case.summary.get(key, found[-1] if len(found) else None))
        return float(value) if isinstance(value, int | float) else None

    def as_dict(self, target: float) -> dict[str, Any]:
        """All that is said of it, for machines."""
        case, (evaluated, _) = self.case, self.case.series("eval_loss")
        speeds = [speed for speed in case.series("tokens_per_s")[1] if speed]
        status = case.summary.get("status") or ("finished" if case.summary else UNFINISHED)
        trained = [float(loss) for loss in self.losses[1][-LAST:]]
        return {
            "name": self.name,
            "run": case.path,
            "status": str(status),
            "steps": case.done,
            "planned": section(case.config, "train").get("steps"),
            "scheme": case.scheme or None,
            "stream_dtype": case.dtype,
            "eval_loss": self.last("eval_loss", "eval_loss"),
            "eval_step": int(evaluated[-1]) if len(evaluated) else None,
            "train_loss": self.last("train_loss", "") if case.summary else fmean(trained) if trained else None,
            "baselines": {name: value for name in BASELINES if (value := case.baseline(name)) is not None},
            "steps_to_target": self.reached(target) if isfinite(target) and len(self.losses[0]) else None,
            "spikes": self.spikes(),
            "tokens_per_s": self.last("tokens_per_s", "") if case.summary else median(speeds) if speeds else None,
            "health": self.health(),
            "measured_steps": self.measured_steps(),
            "profiles": self.profiles(),
        }
