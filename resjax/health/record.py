"""Where do a run's probe arrays live on disk, and how are they read back?

``RUN/health/<first>-<last>.npz``: one chunk a save, named by the first and last recorded step (zero-padded to 8
digits), each with ``steps`` (int64) and float32 arrays whose leading axis is the recorded step; of a model with sites of
its own also ``sites``, their names. Chunks are never rewritten while a run goes on.
"""

import contextlib
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What a recorded step holds beyond its number. Shapes of one row; NaN where a scheme has no such thing.
FORWARD_PROBES = (  # (block, site)
    "update_ratio",
    "stream_rms",
    "update_rms",
    "update_cosine",
    "token_cosine",
    "stream_max",
    "update_max",
    "finite",
    "swallowed",
)
SITE_PROBES = (*FORWARD_PROBES, "stream_grad")  # (block, site)
BLOCK_PROBES = ("update_ratio_block", "param_grad_block")  # (block,)
STEP_PROBES = ("embed_rms", "embed_grad", "final_rms", "moved")  # ()

CHUNK = re.compile(r"(\d{8,})-(\d{8,})\.npz")
UNFINISHED = ".tmp"
SITES = "sites"
# What NumPy and zipfile raise on a damaged chunk; the last is zipfile's for a compression method that does not exist.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


def site_names(count: int) -> tuple[str, ...]:
    """Names of a block's sites, in the order of the arrays' last axis."""
    return {1: ("block",), 2: ("attention", "mlp")}.get(count, tuple(f"site {i}" for i in range(count)))


class HealthRecord:
    """Probe arrays by recorded step: collects rows during a run, or holds what :meth:`load` read.

    Attributes:
      notes: one line for everything that :meth:`load` skipped, and why.
      sites: names of a block's sites where they are not those of :func:`site_names`; else None.
    """

    def __init__(self, sites: Sequence[str] | None = None) -> None:
        self.sites: tuple[str, ...] | None = None if sites is None else tuple(sites)
        self.notes: list[str] = []
        self._steps = np.zeros(0, np.int64)
        self._arrays: dict[str, np.ndarray] = {}
        self._missing: dict[str, np.ndarray] = {}
        self._pending: list[tuple[int, dict[str, np.ndarray]]] = []

    def append(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Adds one recorded step: arrays of shape (block, site), (block,) or (), of any real dtype, kept as float32.

        Raises:
          ValueError: the step does not follow the last one, or a shape or name differs from the row before.
        """
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is what a reader must see
            row = {name: np.array(value, dtype=np.float32) for name, value in arrays.items()}
        if self._pending:
            last, previous = self._pending[-1]
            if step <= last:
                raise ValueError(f"health row of step {step} does not follow step {last}")
            if (new := {k: v.shape for k, v in row.items()}) != (old := {k: v.shape for k, v in previous.items()}):
                raise ValueError(
                    f"health row of step {step} has other names or shapes than step {last}: {new} against {old}"
                )
        self._pending.append((int(step), row))

    def flush(self, folder: str | os.PathLike) -> Path | None:
        """Writes the rows appended since the last flush as one chunk and returns its path; None if there are none.

        The chunk is complete on disk before it gets its name. If that fails (OSError, such as a full disk) nothing is
        left behind and the rows stay, so that the next flush may try again.
        """
        if not self._pending:
            return None
        steps = np.array([step for step, _ in self._pending], np.int64)
        names = self._pending[0][1]
        arrays = {name: np.stack([row[name] for _, row in self._pending]) for name in names}
        if self.sites is not None:
            arrays[SITES] = np.array(self.sites)
        path = _write(Path(folder), steps, arrays)
        self._pending = []
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike, names: Collection[str] | None = None) -> "HealthRecord":
        """Everything recorded in ``RUN/health``, in order of steps; only the arrays called ``names``, if given.

        A step found twice counts as its latest chunk says. Unreadable chunks and unfinished files are skipped, each
        with a line in ``notes``. An array that a chunk lacks is NaN there (see :meth:`recorded`). A folder that does
        not exist is empty.
        """
        record = cls()
        folder = Path(folder)
        record.notes += [f"{path.name}: unfinished, skipped" for path in sorted(folder.glob(f"*{UNFINISHED}"))]
        chunks: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for path in _chunks(folder):
            try:
                steps, arrays, sites = _read(path, names)
            except UNREADABLE as error:
                record.notes.append(f"{path.name}: cannot be read ({_one_line(error)}), skipped")
                continue
            here = {name: value.shape[1:] for name, value in arrays.items()}
            if odd := [name for name, shape in here.items() if shapes.setdefault(name, shape) != shape]:
                record.notes.append(f"{path.name}: {odd[0]} has shape {here[odd[0]]}, not {shapes[odd[0]]}, skipped")
                continue
            chunks.append((steps, arrays))
            record.sites = sites or record.sites
        if chunks:
            record._join(chunks, shapes)
        return record

    def _join(self, chunks: list[tuple[np.ndarray, dict[str, np.ndarray]]], shapes: dict[str, tuple[int, ...]]) -> None:
        steps = np.concatenate([steps for steps, _ in chunks])
        order = np.argsort(steps, kind="stable")
        keep = order[np.append(np.diff(steps[order]) > 0, True)]  # the last of equal steps
        self._steps = steps[keep]
        for name, shape in shapes.items():
            missing = np.concatenate([np.full(len(s), name not in arrays) for s, arrays in chunks])[keep]
            if missing.any():
                self._missing[name] = missing
            # pop: what is joined is not held twice
            parts = [arrays.pop(name, np.full((len(s), *shape), np.nan, np.float32)) for s, arrays in chunks]
            joined = np.concatenate(parts)
            self._arrays[name] = joined if len(keep) == len(joined) and (np.diff(keep) == 1).all() else joined[keep]

    @property
    def steps(self) -> np.ndarray:
        """Steps recorded, (step,), increasing; rows not yet flushed included."""
        return np.append(self._steps, np.array([step for step, _ in self._pending], np.int64))

    def __getitem__(self, name: str) -> np.ndarray:
        """The array called ``name``: (step, block, site), (step, block) or (step,), float32."""
        rows = [row[name] for _, row in self._pending if name in row]
        parts = ([self._arrays[name]] if name in self._arrays else []) + ([np.stack(rows)] if rows else [])
        if not parts:
            raise KeyError(name)
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(array) == len(self):
            return array
        blank = np.full((len(self), *array.shape[1:]), np.nan, np.float32)  # absent before, or in, the pending rows
        blank[slice(len(self) - len(array), None) if rows else slice(0, len(array))] = array
        return blank

    def site_names(self, count: int) -> tuple[str, ...]:
        """Names of the model's sites, in the order of the arrays' last axis, of which there are ``count``."""
        return self.sites if self.sites is not None and len(self.sites) == count else site_names(count)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or any(name in row for _, row in self._pending)

    def __len__(self) -> int:
        return len(self._steps) + len(self._pending)

    def __iter__(self) -> Iterator[str]:
        """Names of the arrays held."""
        return iter(dict.fromkeys([*self._arrays, *(name for _, row in self._pending for name in row)]))

    def recorded(self, name: str) -> np.ndarray:
        """Which steps have a row of ``name`` at all, (step,) bool: False where the probe was not switched on."""
        stored = ~self._missing.get(name, np.full(len(self._steps), name not in self._arrays))
        return np.append(stored, np.array([name in row for _, row in self._pending], bool))


def drop_after(folder: str | os.PathLike, step: int) -> list[str]:
    """Removes rows recorded after ``step`` (the step restored) and unfinished files; returns a line for everything left
    as it is.

    A chunk that spans ``step`` is cut: the shorter one is complete on disk before the longer one goes, so that a crash
    in between leaves equal rows twice, which :meth:`HealthRecord.load` counts once.
    """
    folder, notes = Path(folder), []
    for path in list(folder.glob(f"*{UNFINISHED}")):
        path.unlink(missing_ok=True)
    for path in _chunks(folder):
        first, last = _span(path)
        if last <= step:
            continue
        if first > step:
            path.unlink()
            continue
        try:
            steps, arrays, sites = _read(path, None)
        except UNREADABLE as error:
            notes.append(f"{path.name}: cannot be read ({_one_line(error)}), left as it is")
            continue
        keep = steps <= step
        kept = {name: value[keep] for name, value in arrays.items()}
        _write(folder, steps[keep], kept if sites is None else kept | {SITES: np.array(sites)})
        path.unlink()
    return notes


def _span(path: Path) -> tuple[int, int]:
    match = CHUNK.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2])


def _chunks(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("*.npz") if CHUNK.fullmatch(path.name)), key=_span)


def _read(
    path: Path, names: Collection[str] | None
) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[str, ...] | None]:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as chunk:
        if not isinstance(chunk, np.lib.npyio.NpzFile):
            raise ValueError("not an npz file")
        steps = chunk["steps"].astype(np.int64)
        wanted = [name for name in chunk.files if names is None or name in names]
        arrays = {name: chunk[name] for name in wanted if name not in ("steps", SITES)}
        sites = tuple(str(name) for name in chunk[SITES]) if SITES in chunk.files else None
    if steps.ndim != 1 or any(value.shape[:1] != steps.shape for value in arrays.values()):
        raise ValueError("its arrays disagree about the number of steps")
    return steps, arrays, sites


def _write(folder: Path, steps: np.ndarray, arrays: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{steps[0]:08d}-{steps[-1]:08d}.npz"
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, allow_pickle=False, **{"steps": steps, **arrays})
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    _sync_folder(folder)
    return path


def _sync_folder(folder: Path) -> None:
    """The new name reaches the disk too, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
