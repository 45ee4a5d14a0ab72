"""How is a training state kept on disk, and got back whole or refused? A thin module over Orbax's CheckpointManager.

A step is a folder ``<folder>/<step>`` with two Orbax items: ``state``, the arrays as nested dicts named by their paths
(no class of Flax or optax on disk), and ``meta``, JSON with ``format``, ``step``, ``leaves`` (path -> [dtype, shape]),
``hash`` (SHA-256 over the leaves), ``check`` (SHA-256 over the rest of the meta) and what the caller adds, such as
``config``. Orbax writes under a temporary name and renames at the end: a step is there or it is not. The hashes find
what is damaged later.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from resjax.errors import Refused
from resjax.train import mismatch, quiet
from resjax.train.leaves import fingerprint, named, nested, rebuilt, signatures, to_hosts, tree_hash
from resjax.train.writers import to_json

__all__ = ["FORMAT", "Checkpoints", "NothingToRestore", "tree_hash"]

FORMAT = 1  # of the layout above; a later one is refused
UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of Orbax's temporary folders, and of ours
MARKERS = ("_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA")  # what every committed step has,
NEWER_MARKERS = ("commit_success.txt", "meta/commit_success.txt", "state/commit_success.txt")  # and from Orbax 0.12.4
OWN = ("format", "step", "leaves", "hash", "check")  # names in the meta

quiet.install()


class NothingToRestore(Refused):
    """No step can be used. ``skipped`` has one line for each that was tried."""

    def __init__(self, folder: Path, skipped: list[str]):
        super().__init__("\n  ".join([f"no checkpoint in {folder} can be used", *skipped]))
        self.skipped = skipped


class _Damaged(Exception):
    """Why a step cannot be used, as the end of a sentence."""


def _check(meta: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in meta.items() if key != "check"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Checkpoints:
    """The newest ``keep`` saved steps of one run. Nothing is written, nor the folder made, before a save."""

    def __init__(self, folder: str | os.PathLike, keep: int = 3):
        self.folder, self.keep = Path(folder).absolute(), keep
        # Orbax works in this thread, one call after the other: beside the training, never in a notebook's event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._known: set[int] = set()  # steps that this object has written or read whole
        # Which steps stay is decided here: Orbax would count damaged ones, and refuse a step that is not the newest.
        options = ocp.CheckpointManagerOptions(
            create=False, enable_async_checkpointing=False, lightweight_initialize=True, save_root_metadata=False
        )
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def save(self, step: int, tree: Any, meta: Mapping[str, Any]) -> bool:
        """Copy ``tree`` to the host now and write it in the background; it is committed when :meth:`wait` returns.

        Args:
          step: optimizer steps done.
          tree: any tree of arrays, typed random keys included; its buffers may be donated as soon as this returns.
          meta: JSON to keep beside it, such as ``{"config": ...}``.

        Returns:
          False if that step was already written or restored by this object, and is not written again.

        Raises:
          OSError: the save before this one failed (disk full), and this one was not begun.
          TypeError, ValueError: a leaf that is no array; a name in ``meta`` that this module uses.
        """
        self.wait()
        step = int(step)
        if step in self._known:
            return False
        if taken := sorted(set(OWN).intersection(meta)):
            raise ValueError(f"meta may not have the names {taken}")
        leaves = named(tree)
        record = {**to_json(meta), "format": FORMAT, "step": step, "leaves": signatures(leaves)}
        self._pending = self._thread.submit(self._write, step, to_hosts(leaves), record)
        return True

    def wait(self) -> None:
        """Return when all is committed. OSError: the last save failed; it left nothing, and earlier steps are whole."""
        if self._pending is not None:
            wait([self._pending])  # an interrupt here leaves it pending
            pending, self._pending = self._pending, None
            pending.result()

    def poll(self) -> None:
        """Raise what :meth:`wait` would raise, but without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """:meth:`wait`, and let go. After it, leaving the program loses nothing."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._manager.close()

    def _write(self, step: int, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
        record["hash"] = fingerprint(arrays, record["leaves"])
        record["check"] = _check(record)
        target, aside = self.folder / str(step), self.folder / f"{step}.replaced{UNFINISHED}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers():
                shutil.rmtree(leftover)
            if target.exists():  # damaged, or of a future that a return to an earlier step has left behind
                target.rename(aside)
            self._manager.reload()  # else Orbax refuses a step that it remembers
            items = ocp.args.Composite(state=ocp.args.PyTreeSave(nested(arrays)), meta=ocp.args.JsonSave(record))
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            shutil.rmtree(self.folder / f"{step}{UNFINISHED}", ignore_errors=True)  # it fills a full disk
            if aside.exists() and not target.exists():
                aside.rename(target)
            code = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore's errors are ValueErrors
            if code is None or isinstance(error, OSError):
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(target)) from error
        self._known.add(step)
        shutil.rmtree(aside, ignore_errors=True)
        for old in [other for other in self.steps() if other <= step][: -self.keep]:
            self._remove(old)

    def drop_after(self, step: int) -> None:
        """Remove the steps after ``step``: the run goes on from there, and they are of a future that will not come."""
        self.wait()
        for later in [other for other in self._numbers() if other > step]:
            self._remove(later)

    def set_aside(self, step: int) -> list[str]:
        """Take the steps after ``step`` out of the row, as ``<step>.set-aside``: they could not be read, which may be no
        fault of theirs, so they are kept. One line for each.
        """
        self.wait()
        lines = []
        for later in [other for other in self._numbers() if other > step]:
            free = next(name for i in count() if not (name := self.folder / f"{later}.set-aside{i or ''}").exists())
            (self.folder / str(later)).rename(free)
            self._known.discard(later)
            lines.append(f"checkpoint {later} is kept as {free.name}")
        return lines

    def _remove(self, step: int) -> None:
        # Renamed first, so that a kill half-way leaves nothing that looks like a step.
        gone = (self.folder / str(step)).rename(self.folder / f"{step}.removed{UNFINISHED}")
        shutil.rmtree(gone, ignore_errors=True)
        self._known.discard(step)

    def steps(self) -> list[int]:
        """The committed steps, ascending. Whether their arrays are whole shows when they are read."""
        return [step for step in self._numbers() if self._missing(step) is None]

    def _numbers(self) -> list[int]:
        """Every folder with the name of a step, committed or not, ascending."""
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in folders if re.fullmatch(r"0|[1-9]\d*", path.name) and path.is_dir())

    def _leftovers(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"*{UNFINISHED}*") if path.is_dir())

    def _missing(self, step: int) -> str | None:
        """Which mark of a committed step is missing, if any."""
        folder = self.folder / str(step)
        newer = NEWER_MARKERS if any((folder / marker).exists() for marker in NEWER_MARKERS) else ()
        return next((marker for marker in (*MARKERS, *newer) if not (folder / marker).is_file()), None)

    def meta(self, step: int) -> dict[str, Any]:
        """What :meth:`save` was given as meta, and format, step, leaves, hash. Refused: no such step, or damaged."""
        self.wait()
        try:
            return self._read_meta(step)
        except _Damaged as damage:
            raise self._unusable(step, damage) from None

    def _unusable(self, step: int, damage: _Damaged) -> Refused:
        others = ", ".join(str(other) for other in self.steps() if other != step) or "none"
        return Refused(f"checkpoint {step} in {self.folder} cannot be used: {damage}; other steps: {others}")

    def _read_meta(self, step: int) -> dict[str, Any]:
        if not (self.folder / str(step)).is_dir():
            raise _Damaged("there is none")
        if missing := self._missing(step):
            raise _Damaged(f"it was not committed ({missing} is missing)")
        try:
            meta = json.loads((self.folder / str(step) / "meta/metadata").read_bytes())
            sound = meta["check"] == _check(meta)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise _Damaged("its metadata is damaged")
        if meta["format"] > FORMAT:
            raise Refused(f"checkpoint {step} has format {meta['format']}; this resjax reads formats up to {FORMAT}")
        return meta

    def _read_arrays(self, step: int, meta: dict[str, Any]) -> dict[str, np.ndarray]:
        items = ocp.args.Composite(state=ocp.args.PyTreeRestore())
        try:
            arrays = named(self._thread.submit(lambda: self._manager.restore(step, args=items)["state"]).result())
        except Exception as error:
            raise _Damaged(f"its arrays cannot be read ({str(error).partition(chr(10))[0][:200]})") from error
        if lost := sorted(set(meta["leaves"]).difference(arrays)):
            raise _Damaged(f"it lacks {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else ""))
        if set(arrays) != set(meta["leaves"]) or fingerprint(arrays, meta["leaves"]) != meta["hash"]:
            raise _Damaged("its arrays are not those that were saved (their hash differs)")
        return arrays

    def restore(
        self, step: int | None, like: Any, *, config: Any = None, partial: bool = False, cast: bool = False
    ) -> tuple[Any, dict[str, Any], list[str]]:
        """A saved state in the form of ``like``: its tree, classes and metadata (roles); the numbers from disk.

        Args:
          step: which; None = the newest that is whole.
          like: arrays or abstract arrays (``jax.eval_shape``); where one has a sharding, its array is laid out so.
          config: that of the program which restores, as nested dicts; a refusal then names the fields that differ.
          partial: leave out what ``like`` has not, such as the moments where only parameters are wanted.
          cast: convert floating-point dtypes that differ.

        Returns:
          The tree, the meta, and one line for each newer step that was skipped, saves that were cut off included.

        Raises:
          Refused: the chosen step is missing or damaged; or paths, shapes, dtypes differ, listed with both values.
          NothingToRestore: ``step`` is None and no step can be used.
        """
        self.wait()
        newest = step is None
        skipped = [f"{path.name} is skipped: its save was cut off" for path in self._leftovers() if newest]
        for number in reversed(self._numbers()) if step is None else [step]:
            try:
                return *self._restore(number, like, config, partial, cast), skipped
            except _Damaged as damage:
                if not newest:
                    raise self._unusable(number, damage) from None
                skipped.append(f"checkpoint {number} is skipped: {damage}")
        raise NothingToRestore(self.folder, skipped)

    def _restore(self, step: int, like: Any, config: Any, partial: bool, cast: bool) -> tuple[Any, dict[str, Any]]:
        meta, wanted = self._read_meta(step), named(like)
        if differences := mismatch.leaves(meta["leaves"], signatures(wanted), partial, cast):
            fields = mismatch.fields(meta.get("config"), to_json(config)) if config is not None else []
            raise Refused(mismatch.message(f"checkpoint {step} in {self.folder} does not fit", differences, fields))
        arrays = self._read_arrays(step, meta)
        self._known.add(step)
        return rebuilt(arrays, like), meta


def saved_steps(folder: Path) -> list[int]:
    """The steps that there are checkpoints of in a folder, in order; none where there is no folder."""
    if not folder.is_dir():
        return []
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.steps()
    finally:
        checkpoints.close()
