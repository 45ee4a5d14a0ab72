"""Where do the numbers of a foreign training loop go? Into a folder laid out as a run's, so that report and doctor read it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from resjax.errors import Refused
from resjax.health.findings import examine, section
from resjax.health.record import HealthRecord, Stream, drop_after
from resjax.health.report import write_report
from resjax.train.writers import JsonlWriter, from_json, read_json, read_metrics, to_json, write_json
from resjax.watch import kept
from resjax.watch.plan import Taps, row, stream_dtype, stream_width

MARK = {"recorded_by": "resjax.watch"}
SUMMED_ROWS = 10  # rows that the summary's training loss is the mean of


class Log:
    """The folder of one training run: config.json, metrics.jsonl, health/; at the end summary.json, on request studies/, report.html.

    In a ``with`` block it is closed at the end; after an exception what was written stays, and there is no summary.

    Args:
      folder: made if it is not there. One that a Log wrote before is continued.
      config: what to say of the run, JSON-able, nested as you like; shown in the report.
      after: drop rows of later steps first: the run goes on from a state of that step.
      save_every: recorded steps after which probes are written; those of a run that is killed before are lost.
      sites: names of a block's sites; needed for probes that come as arrays, since taps know theirs.
      width: length of the stream's last axis; needed likewise.

    Raises:
      Refused: the folder holds something else, another config, or probes of other sites or another width.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        config: Mapping[str, Any] | None = None,
        after: int | None = None,
        save_every: int = 20,
        sites: Sequence[str] | None = None,
        width: int | None = None,
    ):
        for name, given in (("save_every", save_every), ("width", width)):
            if given is not None and given < 1:
                raise Refused(f"{name} is {given}, and has to be a number from 1")
        self.folder, self._save_every = Path(folder), save_every
        self._start(config)
        self._metrics = JsonlWriter(self.folder / "metrics.jsonl")
        if after is not None:
            self._metrics.drop_after(after)
            drop_after(self.folder / "health", after)
            kept.drop_after(self.folder / "studies", after)
        done = HealthRecord.load(self.folder / "health")
        self._record = HealthRecord(done.sites, stream=done.stream)
        if sites is not None:
            self._named(tuple(sites))
        self._is(width or 0)
        self._shapes = {name: done[name].shape[1:] for name in done}
        self._probed = int(done.steps[-1]) if len(done) else None
        self._last = max((row["step"] for row in self.rows), default=None)
        self._closed = False

    def _start(self, config: Mapping[str, Any] | None) -> None:
        path = self.folder / "config.json"
        try:
            facts = from_json(to_json(config or {})) | MARK
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists():
                held = read_json(path)
                if held.get("recorded_by") != MARK["recorded_by"]:
                    raise Refused(f"'{self.folder}' holds a run that watch.Log did not write; give another folder")
                if config is not None and held != facts:
                    raise Refused(
                        f"'{self.folder}' holds a run with another config; give another folder, or the same config"
                    )
                return
            if (self.folder / "metrics.jsonl").exists() or (self.folder / "health").exists():
                raise Refused(
                    f"'{self.folder}' holds metrics or probes that watch.Log did not write; give another folder"
                )
            write_json(path, facts)
        except (OSError, ValueError) as error:
            raise Refused(f"'{self.folder}' cannot be used for a log ({error}); give another folder") from None
        except TypeError as error:
            raise Refused(f"config cannot be kept: {error}") from None

    def write(
        self,
        step: int,
        found: Taps | Mapping[str, Any] | None = None,
        probes: Mapping[str, Any] | None = None,
        **metrics: Any,
    ) -> None:
        """One step.

        Args:
          step: optimizer steps done; increasing.
          found: the gradient of the taps, or a row of :mod:`resjax.watch`; None, or off in this step: no probes.
          probes: more of them, such as ``param_grad_block``; kept in steps that have ``found``.
          metrics: one number each: ``loss``, ``lr``, ``grad_norm``, ``tokens_per_s``, ``eval_loss``, whatever there is.

        Raises:
          Refused: the step is not after the last one, a metric is no number, an add was forgotten or is there twice, or shapes differ
            from the steps before.
        """
        step = int(step)
        if self._last is not None and step <= self._last:
            raise Refused(
                f"step is {step}, and '{self.folder}' already has step {self._last}; give Log(..., after=STEP) to go on from STEP"
            )
        for name, value in metrics.items():
            if not isinstance(from_json(to_json(value)), int | float):
                raise Refused(f"{name} is {value!r} at step {step}, and a metric is one number")
        values = row(found) if isinstance(found, Taps) else dict(found or {})
        if isinstance(found, Taps) and values:
            self._named(found.plan.sites)
            self._is(stream_width(found), stream_dtype(found) or "")
        if values:
            self._append(step, values | dict(probes or {}))
        if metrics:
            self._metrics.scalars(step, metrics)
        self._last = step
        if len(self._record) >= self._save_every:
            self.flush()

    def _named(self, sites: tuple[str, ...]) -> None:
        held = self._record.sites
        if held and held != sites:
            raise Refused(f"the sites are {', '.join(sites)}, and '{self.folder}' has probes of {', '.join(held)}")
        self._record.sites = sites

    def _is(self, width: int, dtype: str = "") -> None:
        """What the stream is; nothing where that is not known."""
        held = self._record.stream
        if width and held.width and width != held.width:
            raise Refused(
                f"the stream is {width} wide, and '{self.folder}' has probes of one that is {held.width} wide"
            )
        self._record.stream = Stream(width or held.width, dtype or held.dtype)

    def _append(self, step: int, values: Mapping[str, Any]) -> None:
        arrays = {name: np.asarray(value, np.float32) for name, value in values.items()}
        shapes = {name: value.shape for name, value in arrays.items()}
        if self._shapes and shapes != self._shapes:
            name = next(name for name in (*shapes, *self._shapes) if shapes.get(name) != self._shapes.get(name))
            now, before = shapes.get(name, "none"), self._shapes.get(name, "none")
            raise Refused(
                f"the probe {name} has the shape {now} at step {step}, and had {before} before: the model's adds changed"
            )
        self._shapes = shapes
        self._record.append(step, arrays)

    def flush(self) -> None:
        """Puts probes so far on the disk."""
        self._record.flush(self.folder / "health")
        if not self._closed:
            self._metrics.flush()

    @property
    def record(self) -> HealthRecord:
        """Everything recorded in the folder."""
        self.flush()
        return HealthRecord.load(self.folder / "health")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Everything in metrics.jsonl."""
        return read_metrics(self.folder / "metrics.jsonl")

    def studied(self, step: int, found: Mapping[str, Mapping[str, Any]]) -> Path:
        """Keeps what :func:`resjax.watch.study` found of the state after ``step``, for ``python -m resjax.doctor``; returns the file.

        Raises:
          Refused: one is no study.
        """
        return kept.write(self.folder / "studies", int(step), found)

    def examine(self) -> dict[str, Any]:
        """The verdict on the run so far: see :func:`resjax.health.findings.examine`.

        From what the folder holds, as the doctor's: probes, losses, studies of the newest state, baselines of a log that was closed.
        What ``config`` says of the model does not count.
        """
        path = self.folder / "summary.json"
        return self._examined(read_json(path) if path.is_file() else {})

    def _examined(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        losses = [row["loss"] for row in self.rows if "loss" in row]
        step, studies = kept.newest(self.folder / "studies", None, [])
        bigram = section(summary, "baselines").get("bigram")
        return examine(self.record, {}, None, losses, bigram, studies.get("probes", {}), step)

    def report(self) -> Path:
        """Writes ``report.html`` into the folder and returns its path."""
        self.flush()
        return write_report(self.folder)

    def close(self, **more: Any) -> dict[str, Any]:
        """Ends the run: writes summary.json (steps, train_loss, eval_loss, stream_dtype, health) and returns what it holds.

        ``more`` is added to it, such as ``baselines={"bigram": 2.3}``, which the report draws as lines.
        """
        self.flush()
        rows = self.rows
        losses, held_out = ([r[name] for r in rows if name in r] for name in ("loss", "eval_loss"))
        summary = {
            "status": "finished",
            "steps": self._last or 0,
            "train_loss": fmean(losses[-SUMMED_ROWS:]) if losses else None,
            "eval_loss": held_out[-1] if held_out else None,
            "stream_dtype": self._record.stream.dtype or None,
            "health": self._examined(more),
            **more,
        }
        write_json(self.folder / "summary.json", summary)
        self._metrics.close()
        self._closed = True
        return summary

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._closed:
            return
        if kind is None:
            self.close()
        else:
            self.flush()
            self._metrics.close()
            self._closed = True
