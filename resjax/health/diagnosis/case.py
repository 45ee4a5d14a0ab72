"""What does the doctor look at? Everything that is known of one run, in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from resjax.health.findings import at_end, section
from resjax.health.record import HealthRecord


@dataclass(frozen=True, eq=False)
class Case:
    """One run, or a model that is not ours.

    Attributes:
      name: what the page calls it.
      record: the probes; of steps up to the one that is looked at.
      config: resolved fields, nested; empty for a model that is not ours.
      rows: of metrics.jsonl, numbers as floats.
      summary: of summary.json; empty where there is none.
      dtype: of the stream.
      start: the scheme at its start under the ordinary init, by probe (seeds, depth, sites); empty where it was not measured.
      studies: by name, what each study of the state found.
      state: the step of the state that was studied; None where none was.
      saved: steps that there are checkpoints of.
      path: how commands name the run; empty where none can.
      notes: a line for everything that was left out, and why.
    """

    name: str
    record: HealthRecord
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    start: Mapping[str, np.ndarray] = field(default_factory=dict)
    studies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    state: int | None = None
    saved: Sequence[int] = ()
    path: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def scheme(self) -> str:
        """Name of the residual scheme; empty where there is none to know."""
        return str(section(self.config, "residual").get("name") or "")

    def has(self, *probes: str) -> bool:
        """Whether all these probes were recorded, and something was."""
        return bool(len(self.record)) and all(probe in self.record for probe in probes)

    def end(self, probe: str) -> np.ndarray | None:
        """A probe at the end: the median of the last recorded steps, else of the state that was studied; None where neither has it."""
        if self.has(probe):
            return at_end(self.record[probe])
        found = self.studies.get("probes", {}).get(probe)
        return None if found is None else np.asarray(found, np.float64)

    @property
    def last_step(self) -> int:
        """The step that the end is: of the state that was studied, else of the record."""
        return int(self.state if self.state is not None else self.record.steps[-1] if len(self.record) else 0)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the rows of metrics.jsonl that hold ``key``."""
        found = [(row["step"], float(row[key])) for row in self.rows if isinstance(row.get(key), int | float)]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, np.int64), np.array(values, np.float64)

    def baseline(self, name: str) -> float | None:
        """A baseline of the run's data in nats per token; None where the run does not state it."""
        value = section(self.summary, "baselines").get(name)
        return float(value) if isinstance(value, int | float) else None
