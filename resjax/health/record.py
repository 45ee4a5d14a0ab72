"""Where do a run's probe arrays live on disk, and how are they read back?

``RUN/health/<first>-<last>.npz``: one chunk a save, named by the first and last recorded step (zero-padded to 8 digits), each
with ``steps`` (int64) and float32 arrays whose leading axis is the recorded step; where arrays go by role, also ``roles``, the
names of their last axis; of a model with sites of its own also ``sites``, their names, and ``width`` and ``dtype``, what its stream is.
Chunks are never rewritten while a run goes on.
"""

import contextlib
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
# What there is only where health.groups asks for it, by group.
MORE_PROBES: dict[str, tuple[str, ...]] = {
    "tokens": ("token_cosine_centred", "residual_frobenius", "residual_composite", "growth", "update_ratio_frobenius"),
    "ranks": ("effective_rank", "stable_rank", "participation_ratio", "rank_collapse"),
    "precision": ("update_error", "effective_bits", "mean_error", "signed_error", "headroom"),
    "attention": ("attention_entropy", "attention_largest_logit", "attention_logit_std"),
    "roles": ("role_grad", "role_rms"),  # (block, role), as those of the next
    "optimizer": ("role_change", "role_moved", "role_signal"),
}
ROLE_PROBES = (*MORE_PROBES["roles"], *MORE_PROBES["optimizer"])

CHUNK = re.compile(r"(\d{8,})-(\d{8,})\.npz")
UNFINISHED = ".tmp"
# What NumPy and zipfile raise on a damaged chunk; the last is zipfile's for a compression method that does not exist.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


class Names(NamedTuple):
    """What is called how along the arrays' last axes; empty where nothing says so.

    Attributes:
      sites: of a model whose sites are not those of :func:`site_names`.
      roles: of ``ROLE_PROBES``.
    """

    sites: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


class Stream(NamedTuple):
    """What the stream of a model is that no configuration of ours describes; 0 and empty where it is not known.

    Attributes:
      width: length of its last axis.
      dtype: the narrowest that it had at an add.
    """

    width: int = 0
    dtype: str = ""


ABOUT = (*Names._fields, *Stream._fields)  # entries of a chunk that are no probes


def site_names(count: int) -> tuple[str, ...]:
    """Names of a block's sites, in the order of the arrays' last axis."""
    return {1: ("block",), 2: ("attention", "mlp")}.get(count, tuple(f"site {i}" for i in range(count)))


class HealthRecord:
    """Probe arrays by recorded step: collects rows during a run, or holds what :meth:`load` read.

    Attributes:
      notes: one line for everything that :meth:`load` skipped, and why.
      sites: names of a block's sites where they are not those of :func:`site_names`; else empty.
      roles: names of the last axis of ``ROLE_PROBES``; empty where no such array was recorded.
      stream: what the recorded model's stream is, as the newest chunk says that does; of resjax's own runs their configuration does.
    """

    def __init__(self, sites: Sequence[str] = (), roles: Sequence[str] = (), stream: Stream | None = None) -> None:
        self.notes: list[str] = []
        self.stream = stream or Stream()
        self.sites, self.roles = tuple(sites), tuple(roles)
        self._steps = np.zeros(0, np.int64)
        self._arrays: dict[str, np.ndarray] = {}
        self._missing: dict[str, np.ndarray] = {}
        self._pending: list[tuple[int, dict[str, np.ndarray]]] = []

    def append(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Adds one recorded step: arrays of shape (block, site), (block, role), (block,) or (), of any real dtype, kept as float32.

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
        path = _write(Path(folder), steps, arrays, Names(self.sites, self.roles), self.stream)
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
                steps, arrays, called, stream = _read(path, names)
            except UNREADABLE as error:
                record.notes.append(f"{path.name}: cannot be read ({_one_line(error)}), skipped")
                continue
            here = {name: value.shape[1:] for name, value in arrays.items()}
            if odd := [name for name, shape in here.items() if shapes.setdefault(name, shape) != shape]:
                record.notes.append(f"{path.name}: {odd[0]} has shape {here[odd[0]]}, not {shapes[odd[0]]}, skipped")
                continue
            held = Names(record.sites, record.roles)
            odd_names = [
                axis for axis in Names._fields if len({*filter(None, (getattr(held, axis), getattr(called, axis)))}) > 1
            ]
            if odd_names:
                mine, theirs = (", ".join(getattr(side, odd_names[0])) for side in (held, called))
                record.notes.append(f"{path.name}: its {odd_names[0]} are {theirs}, not {mine}, skipped")
                continue
            chunks.append((steps, arrays))
            record.sites, record.roles = held.sites or called.sites, held.roles or called.roles
            record.stream = Stream(stream.width or record.stream.width, stream.dtype or record.stream.dtype)
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

    def until(self, step: int) -> "HealthRecord":
        """The same up to ``step``; what was not recorded in a row stays so."""
        kept = HealthRecord(self.sites, self.roles, self.stream)
        kept.notes = self.notes
        rows = self.steps <= step
        kept._steps = self.steps[rows]
        kept._arrays = {name: self[name][rows] for name in self}
        kept._missing = {name: missing for name in self if (missing := ~self.recorded(name)[rows]).any()}
        return kept

    def site_names(self, count: int) -> tuple[str, ...]:
        """Names of the model's sites, in the order of the arrays' last axis, of which there are ``count``."""
        return self.sites if len(self.sites) == count else site_names(count)

    def axis_names(self, probe: str, count: int) -> tuple[str, ...]:
        """Names along the last axis of a probe's array: of sites, or of roles."""
        if probe not in ROLE_PROBES:
            return self.site_names(count)
        return self.roles if len(self.roles) == count else tuple(f"role {i}" for i in range(count))

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
            steps, arrays, called, stream = _read(path, None)
        except UNREADABLE as error:
            notes.append(f"{path.name}: cannot be read ({_one_line(error)}), left as it is")
            continue
        keep = steps <= step
        _write(folder, steps[keep], {name: value[keep] for name, value in arrays.items()}, called, stream)
        path.unlink()
    return notes


def _span(path: Path) -> tuple[int, int]:
    match = CHUNK.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2])


def _chunks(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("*.npz") if CHUNK.fullmatch(path.name)), key=_span)


def _read(path: Path, names: Collection[str] | None) -> tuple[np.ndarray, dict[str, np.ndarray], Names, Stream]:
    """Steps, arrays, the names along their axes, and what the stream is."""
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as chunk:
        if not isinstance(chunk, np.lib.npyio.NpzFile):
            raise ValueError("not an npz file")
        steps = chunk["steps"].astype(np.int64)
        called = Names(*(tuple(map(str, chunk[axis])) if axis in chunk.files else () for axis in Names._fields))
        stream = Stream(
            *(
                kind(chunk[name].item()) if name in chunk.files else kind()
                for name, kind in Stream.__annotations__.items()
            )
        )
        wanted = [name for name in chunk.files if name not in ("steps", *ABOUT) and (names is None or name in names)]
        arrays = {name: chunk[name] for name in wanted}
    if steps.ndim != 1 or any(value.shape[:1] != steps.shape for value in arrays.values()):
        raise ValueError("its arrays disagree about the number of steps")
    return steps, arrays, called, stream


def _write(folder: Path, steps: np.ndarray, arrays: Mapping[str, np.ndarray], called: Names, stream: Stream) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{steps[0]:08d}-{steps[-1]:08d}.npz"
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with open(unfinished, "wb") as file:
            named = Names(called.sites, called.roles if any(name in arrays for name in ROLE_PROBES) else ())
            about = {name: np.array(fact) for name, fact in (named._asdict() | stream._asdict()).items() if fact}
            np.savez(file, allow_pickle=False, **{"steps": steps, **arrays, **about})
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
