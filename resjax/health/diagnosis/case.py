"""What does the doctor look at? Everything that is known of one run, in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from resjax.config.kept import fields
from resjax.config.tree import to_dict
from resjax.errors import Refused, nearest
from resjax.health.findings import dtype_of, section
from resjax.health.reading import end_of
from resjax.health.record import HealthRecord
from resjax.health.report import read_json, read_metrics


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
      theory: by probe, what theory expects there, (depth, sites), and which curve that is, in words; empty where none speaks of it.
      studies: by name, what each study of the state found.
      state: the step of the state that was studied; None where none was.
      saved: steps that there are checkpoints of.
      path: how commands name the run; empty where none can.
      notes: a line for everything that was left out, and why.
      nonfinite: what the run kept of each step that was not finite, in order; it may have gone past all but the last.
    """

    name: str
    record: HealthRecord
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    start: Mapping[str, np.ndarray] = field(default_factory=dict)
    theory: Mapping[str, tuple[np.ndarray, str]] = field(default_factory=dict)
    studies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    state: int | None = None
    saved: Sequence[int] = ()
    path: str = ""
    notes: list[str] = field(default_factory=list)
    nonfinite: Sequence[Mapping[str, Any]] = ()

    @property
    def scheme(self) -> str:
        """Name of the residual scheme; empty where there is none to know."""
        return str(section(self.config, "residual").get("name") or "")

    @property
    def depth(self) -> int:
        """Blocks of the model: as configured, else as many as there are probes of; 0 where nothing says so."""
        probes = [
            *(self.record[name][0] for name in self.record if len(self.record)),
            *self.studies.get("probes", {}).values(),
        ]
        counted = [len(one) for one in map(np.asarray, probes) if one.ndim]
        return int(section(self.config, "model").get("depth") or max(counted, default=0))

    def has(self, *probes: str) -> bool:
        """Whether all these probes were recorded, and something was."""
        return bool(len(self.record)) and all(probe in self.record for probe in probes)

    def end(self, probe: str) -> np.ndarray | None:
        """A probe at the end: the median of the last recorded steps, else of the state that was studied; None where neither has it."""
        return end_of(self.record, probe, self.studies.get("probes", {}))

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

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on past a step that is not finite, which it does not apply."""
        precision, train = section(self.config, "precision"), section(self.config, "train")
        return str(train.get("on_nonfinite") or "stop") != "stop" or precision.get("loss_scale") is not None

    @property
    def done(self) -> int:
        """Steps that the run has done."""
        recorded = int(self.record.steps[-1]) if len(self.record) else 0
        summed = self.summary.get("steps")
        return max([recorded, *(row["step"] for row in self.rows), summed if isinstance(summed, int) else 0])


def recorded_in(folder: str) -> Case:
    """What the run in ``folder`` has written down so far: probes, rows, summary; of the state and the start nothing.

    Raises:
      Refused: there is no run.
    """
    path, config, notes = Path(folder).expanduser(), configuration(folder), list[str]()
    record = HealthRecord.load(path / "health")
    notes += record.notes
    rows = read_metrics(path / "metrics.jsonl", notes)
    summary = read_json(path / "summary.json", notes)
    return Case(
        name=path.resolve().name,
        record=record,
        config=config,
        rows=rows,
        summary=summary,
        nonfinite=met_in(path, summary, notes),
        dtype=dtype_of(record, config, summary.get("stream_dtype")),
        path=str(path),
        notes=notes,
    )


def met_in(path: Path, summary: Mapping[str, Any], notes: list[str]) -> list[Mapping[str, Any]]:
    """What the run in a folder has kept of the steps that were not finite, in order; that of the last is in its summary too."""
    reports = {
        int(one.parent.name): read_json(one, notes)
        for one in (path / "nonfinite").glob("*/report.json")
        if one.parent.name.isdigit()
    }
    if last := section(summary, "nonfinite"):
        reports.setdefault(int(last["step"]), dict(last))
    return [reports[step] for step in sorted(reports) if reports[step]]


def configuration(given: str) -> dict[str, Any]:
    """The resolved fields of the run in a folder; empty for that of a model that is not resjax's own.

    Raises:
      Refused: the folder holds neither, or a damaged config.json.
    """
    path, notes = Path(given).expanduser(), list[str]()
    facts = read_json(path / "config.json", notes)
    if facts and "recorded_by" not in facts:
        return to_dict(fields(path / "config.json", "RUN"))
    if notes:  # damaged
        raise Refused(f"'{given}' has a config.json that cannot be read: {notes[0].partition(': ')[2]}")
    if path.is_dir() and ((path / "health").is_dir() or (path / "metrics.jsonl").is_file()):
        return {}
    siblings = [str(one.parent) for one in path.parent.glob("*/config.json")] if path.parent.is_dir() else []
    raise Refused(f"'{given}' holds no run (it has neither config.json nor health/){nearest(given, siblings)}")
