"""Where do a run's numbers go? Strict JSON lines (the truth), TensorBoard, memory; and small files, atomically."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from resjax.errors import Refused

FLUSH_SECONDS = 5.0  # how long a TensorBoard event may lie in memory


def to_json(value: Any) -> Any:
    """``value`` as strict JSON can hold it: NumPy, bfloat16 and JAX scalars and arrays as numbers and lists, tuples
    as lists.

    Numbers that are not finite become the strings "nan", "inf", "-inf".

    Raises:
      TypeError: a key that is no string, or a value of another kind.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string")
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, float):
        if not hasattr(value, "__array__") or hasattr(value, "keys"):
            raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r}")
        array = np.asarray(value)
        if array.ndim:
            return [to_json(item) for item in array]
        if array.dtype == bool:
            return bool(array)
        if np.issubdtype(array.dtype, np.integer):
            return int(array)
        value = float(array)
    return value if math.isfinite(value) else str(float(value))


def from_json(value: Any) -> Any:
    """The inverse for numbers: "nan", "inf" and "-inf" become floats again."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def parse(text: str | bytes) -> Any:
    """Strict JSON; the NaN and Infinity that Python alone accepts are errors.

    Raises:
      ValueError: not strict JSON.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _replace(path: Path, write: Callable[[Any], None]) -> None:
    """A new file in the place of ``path``, whole or not at all, also when the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """``content`` as one file, replaced as a whole: a reader, and a crash, see the old file or the new one.

    Raises:
      OSError: it cannot be written (disk full); the old file stands.
    """
    _replace(Path(path), lambda file: file.write(content))


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """``obj`` as one strict-JSON file, replaced as a whole: a reader, and a crash, see the old file or the new one.

    Raises:
      OSError: it cannot be written (disk full); the old file stands.
      TypeError: see :func:`to_json`.
    """
    text = json.dumps(to_json(obj), indent=2, allow_nan=False, ensure_ascii=False)
    _replace(Path(path), lambda file: file.write(text.encode() + b"\n"))


def read_json(path: str | os.PathLike) -> Any:
    """What :func:`write_json` wrote, numbers that are not finite as floats.

    Raises:
      OSError: no such file.
      ValueError: not strict JSON.
    """
    return from_json(parse(Path(path).read_bytes()))


def _whole_lines(path: Path) -> list[bytes]:
    """The lines that end in a newline; a last line without one was cut off by a kill."""
    return path.read_bytes().split(b"\n")[:-1]


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics file in order, numbers that are not finite as floats. A cut-off last line is left out.

    Raises:
      OSError: no such file.
      Refused: a line that is not strict JSON, named by its number.
    """
    rows = []
    for number, line in enumerate(_whole_lines(Path(path)), 1):
        try:
            rows.append(from_json(parse(line)))
        except ValueError as error:
            raise Refused(f"line {number} of {path} is not strict JSON ({error}); mend or remove the line") from None
    return rows


class Writer(Protocol):
    """Something that takes rows of numbers as a run goes on."""

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """One row: the numbers (Python, NumPy or JAX scalars) that belong to ``step``."""

    def drop_after(self, step: int) -> None:
        """Forget the rows of later steps: the run goes on from ``step``."""

    def flush(self) -> None:
        """Rows so far outlive the process."""

    def close(self) -> None:
        """No rows will follow."""


class JsonlWriter:
    """metrics.jsonl: one strict-JSON object a line, each in the file when :meth:`scalars` returns.

    A file that is there is continued; a last line that a kill cut off is removed first.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = self._open()

    def _open(self) -> Any:
        file = open(self.path, "ab", buffering=0)  # noqa: SIM115  unbuffered: one system call a line
        whole = sum(len(line) + 1 for line in _whole_lines(self.path))
        if whole != file.tell():
            file.truncate(whole)
        return file

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        self.append({"step": step, **values})

    def append(self, row: Mapping[str, Any]) -> None:
        """One row of any kind.

        Raises:
          OSError: disk full; what got into the file of this line is removed again.
          TypeError: see :func:`to_json`.
        """
        line = json.dumps(to_json(row), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]  # a disk that fills up takes a part first and fails on the rest
        except OSError:
            self._file.truncate(start)
            raise

    def drop_after(self, step: int) -> None:
        self.drop(lambda row: row.get("step", step) > step)

    def drop(self, gone: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the rows that ``gone`` says."""
        rows = read_metrics(self.path)
        kept = [line for line, row in zip(_whole_lines(self.path), rows, strict=True) if not gone(row)]
        self._file.close()
        try:
            _replace(self.path, lambda file: file.writelines(line + b"\n" for line in kept))
        finally:
            self._file = self._open()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """events.* for TensorBoard, through tensorboardX; every number of a row under its own name.

    Written in the calling thread: tensorboardX's own thread dies of a full disk in silence, and the run hangs on its
    queue.

    Args:
      folder: where the event file goes.
      purge_step: when a run is continued, its next step: TensorBoard then hides what an earlier file says from there
        on.
    """

    def __init__(self, folder: str | os.PathLike, purge_step: int | None = None):
        self._folder = Path(folder)
        self._start(purge_step)

    def _start(self, purge_step: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it warns of every NaN, and names no metric
        self._folder.mkdir(parents=True, exist_ok=True)
        # The name has the time in whole seconds; the suffix keeps a quick restart from writing over the file before.
        suffix = f".{os.getpid()}.{len(list(self._folder.glob('events.*')))}"
        self._events, self._pb = EventsWriter(str(self._folder / "events"), suffix), event_pb2
        if purge_step is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(step=purge_step, session_log=log))
        self.flush()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            number = from_json(to_json(value))
            if isinstance(number, (int, float)):
                self._write(self._pb.Event(step=int(step), summary=scalar(name, float(number))))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def drop_after(self, step: int) -> None:
        self._events.close()
        self._start(step + 1)

    def flush(self) -> None:
        self._events.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._events.close()


class MemoryWriter:
    """Rows in a list, for notebooks and tests; as :func:`read_metrics` would give them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append(from_json(to_json({"step": step, **values})))

    def drop_after(self, step: int) -> None:
        self.rows = [row for row in self.rows if row["step"] <= step]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class MultiWriter:
    """Every row to each of several writers."""

    def __init__(self, *writers: Writer):
        self._writers = writers

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.scalars(step, values)

    def drop_after(self, step: int) -> None:
        for writer in self._writers:
            writer.drop_after(step)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
