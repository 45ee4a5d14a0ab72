"""Which files make up a text, and which part of it is held out?"""

import dataclasses
import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from resjax.errors import Refused

# Not part of the text: tests, what distributions split off or move, tables that are easy to memorise, vendored wheels.
NOT_IN_STDLIB = frozenset(
    {
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
        *("encodings", "pydoc_data", "ensurepip", "distutils", "__pycache__"),
    }
)
_SMALLEST_STDLIB = 1_000_000  # bytes; every complete one has over seven million
_HELD_OUT = 0.1
_ENOUGH_FILES = 10  # with fewer, a whole file is too coarse a unit to hold out
_PART = 64 << 20  # bytes; a record stays far below the 2 GiB that a protocol buffer can hold

Split = Literal["train", "held_out"]


@dataclasses.dataclass(frozen=True)
class TextFile:
    """path: relative, /-separated, the same on every machine; location: where it is on this one; size: bytes."""

    path: bytes
    location: Path
    size: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """The bytes [start, stop) of a file; `part` counts the pieces of a file in one split."""

    file: TextFile
    part: int
    start: int
    stop: int

    def read(self) -> bytes:
        with self.file.location.open("rb") as stream:
            stream.seek(self.start)
            return stream.read(self.stop - self.start)


@dataclasses.dataclass(frozen=True)
class Text:
    """The files of a text in the order of their paths, and the rule by which a part of it is held out."""

    source: str
    title: str
    files: tuple[TextFile, ...]

    @property
    def by_file(self) -> bool:
        return len(self.files) >= _ENOUGH_FILES

    def description(self) -> str:
        count = f"{len(self.files):,} file{'s' if len(self.files) > 1 else ''}"
        if self.by_file:
            rule = "about a tenth held out by whole files"
        else:
            rule = "the last tenth of it held out" if len(self.files) == 1 else "the last tenth of each held out"
        return f"{self.title}, {count}, {rule}"

    def pieces(self, split: Split) -> Iterator[Piece]:
        """The split's bytes, file by file in the order of their paths; every byte is in one piece of one split.

        With ten files or more, whole files are held out: in the order of a hash of their relative paths, each that
        keeps the held-out share at or below a tenth, so the split depends neither on the alphabet nor on the machine
        nor on the run's seed. With fewer, the last tenth of every file is held out.
        """
        held_out = _held_out_files(self.files) if self.by_file else frozenset()
        for file in self.files:
            cut = file.size - max(1, round(_HELD_OUT * file.size))
            if self.by_file:
                cut = 0 if file.path in held_out else file.size
            start, stop = (0, cut) if split == "train" else (cut, file.size)
            for part, at in enumerate(range(start, stop, _PART)):
                yield Piece(file, part, at, min(at + _PART, stop))


def _held_out_files(files: tuple[TextFile, ...]) -> frozenset[bytes]:
    budget = _HELD_OUT * sum(file.size for file in files)
    chosen = set()
    for file in sorted(files, key=lambda file: hashlib.sha256(b"held_out 0 " + file.path).digest()):
        if file.size <= budget:
            budget -= file.size
            chosen.add(file.path)
    return frozenset(chosen)


def standard_library() -> Text:
    """The source of the running Python's standard library: real text that is nearly always there, with no download.

    `.py` files outside of NOT_IN_STDLIB, and without the two that record where this Python was built, so that the same
    Python gives the same text everywhere. The files are read, never imported. Raises Refused where Python came without
    them (zipped, stripped, embedded, frozen).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in _walk(root, NOT_IN_STDLIB)
        if file.location.suffix == ".py" and not file.path.startswith((b"_sysconfigdata", b"config-"))
    ]
    if sum(file.size for file in files) < _SMALLEST_STDLIB:
        raise Refused(
            "data.source is 'stdlib', but this Python came without the source text of its standard library (looked in "
            f"{root}); use --config.data.source=markov, which needs no file, or files:PATH for a text of your own"
        )
    return Text("stdlib", f"the standard library's source of Python {platform.python_version()}", tuple(files))


def own_files(source: str) -> Text:
    """The text of `files:PATH`: a file, a folder with all that is below it, or a glob pattern (`**` crosses folders).

    Empty files are passed over, and in folders also hidden ones. Raises Refused where nothing is left.
    """
    given = source.partition(":")[2]
    path = Path(given).expanduser()
    if not given:
        raise Refused(
            "data.source is 'files:', which names no path; write files:PATH with a file, a folder or a glob pattern"
        )
    if path.is_dir():
        files = _walk(path, frozenset(("__pycache__",)))
        what = f"folder {given} holds no file with text in it"
    elif path.is_file():
        files = [TextFile(os.fsencode(path.name), path, path.stat().st_size)]
        what = f"file {given} is empty"
    else:
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = _below_common_folder([match for match in matches if match.is_file()])
        what = (
            f"pattern {given} matches no file with text in it"
            if glob.has_magic(given)
            else f"path {given} does not exist"
        )
        if path.exists():
            what = f"path {given} is neither a file nor a folder"
    files = [file for file in files if file.size]
    if not files:
        raise Refused(f"data.source is '{source}', but the {what}")
    return Text(source, given, tuple(files))


def _walk(root: Path, without: frozenset[str]) -> list[TextFile]:
    """The regular files below a folder, by relative path, without hidden ones."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return _relative_to(root, [path for path in found if path.is_file()])


def _below_common_folder(paths: list[Path]) -> list[TextFile]:
    if not paths:
        return []
    return _relative_to(Path(os.path.commonpath([path.absolute().parent for path in paths])), paths)


def _relative_to(root: Path, paths: list[Path]) -> list[TextFile]:
    root = root.absolute()
    files = [
        TextFile(os.fsencode(path.absolute().relative_to(root).as_posix()), path, path.stat().st_size) for path in paths
    ]
    return sorted(files, key=lambda file: file.path)
