"""How does a text become a TFDS set? Prepared once, as array_record, under its content's hash, without TensorFlow."""

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import tensorflow_datasets as tfds

from resjax.data import corpus as corpus_lib
from resjax.data.corpus import Corpus
from resjax.data.texts import Split, Text
from resjax.errors import Refused

_SPLITS: tuple[Split, ...] = get_args(Split)


class Record(NamedTuple):
    """One example: `text` is a whole file, or one part of a file that is too large for one record."""

    path: bytes
    part: int
    text: bytes


class ResjaxFiles(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A user's own files, byte for byte."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, text: Text, **options):
        self.text = text
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"path": tfds.features.Text(), "part": tfds.features.Scalar(np.int64), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self, description=self.__doc__, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(split) for split in _SPLITS}

    def _generate_examples(self, split: Split):
        for record in _records_of(self.text, split):
            yield f"{os.fsdecode(record.path)}\0{record.part}", record._asdict()


class ResjaxStdlib(ResjaxFiles, skip_registration=True):  # type: ignore[call-arg]
    """The source of the running Python's standard library."""


def load(text: Text, builder: type[ResjaxFiles]) -> Corpus:
    """The corpus of a text, read through `as_data_source` from its prepared set, which is made first if missing.

    Several processes may prepare the same text at once. A set that is damaged is made again.
    Raises Refused where the files cannot be read or the data folder cannot be written.
    """
    if not all(any(text.pieces(split)) for split in _SPLITS):
        raise Refused(f"data.source '{text.source}' is too small: nothing is left to train on once a tenth is held out")
    try:
        digest = _digest({split: _records_of(text, split) for split in _SPLITS})
    except OSError as error:
        raise Refused(f"data.source '{text.source}' cannot be read: {error.strerror}: {error.filename}") from error
    root = corpus_lib.data_folder()
    folder = root / builder.name / digest[:16] / str(builder.VERSION)
    for _ in range(3):
        present = folder.is_dir()
        try:
            train, held_out = _read(folder, digest)
        except Exception as error:  # absent, or damaged in a way that TFDS, protobuf or ArrayRecord tell as they like
            problem = f"{type(error).__name__}: {error}"
        else:
            return corpus_lib.make(text.source, train, held_out, description=text.description())
        try:
            _prepare(builder, text, folder, replace=present)
        except (OSError, RuntimeError) as error:  # ArrayRecord tells of a full disk by a RuntimeError
            raise Refused(
                f"the prepared text cannot be written to {root} ({getattr(error, 'strerror', None) or error}); "
                "set RESJAX_DATA_DIR to a folder that can be written and has room"
            ) from error
    raise Refused(f"data.source '{text.source}' cannot be prepared as a TFDS set in {folder}: {problem}")


def _prepare(builder: type[ResjaxFiles], text: Text, folder: Path, replace: bool) -> None:
    """Build the set in a folder of its own and move it into place whole: a reader never sees half a set."""
    root = corpus_lib.data_folder()
    root.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=".preparing-", dir=root))
    try:
        if replace:
            with contextlib.suppress(FileNotFoundError):
                folder.rename(workshop / "damaged")
        made = builder(text=text, data_dir=workshop, file_format="array_record")
        with _quiet():
            made.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(made.data_dir).rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same text
                raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TFDS prints what it does and draws bars; a run prints its own summary of the corpus instead."""
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()


def _records_of(text: Text, split: Split) -> Iterator[Record]:
    for piece in text.pieces(split):
        yield Record(piece.file.path, piece.part, piece.read())


def _read(folder: Path, digest: str) -> list[bytes]:
    """The splits of a prepared set, its records in the order of their paths: TFDS shuffles them.

    ValueError where they are not the text that the digest is of.
    """
    made = tfds.builder_from_directory(folder)
    records = {split: sorted(Record(**record) for record in made.as_data_source(split)) for split in _SPLITS}
    if _digest(records) != digest:
        raise ValueError("its content is not that of the files; they may have changed while they were read")
    return [_joined(records[split]) for split in _SPLITS]


def _digest(records: Mapping[Split, Iterable[Record]]) -> str:
    """The SHA-256 of a text: its splits, paths, parts and bytes."""
    digest = hashlib.sha256()
    for split in _SPLITS:
        for path, part, text in records[split]:
            digest.update(f"{split} {len(path)} {part} {len(text)} ".encode())
            digest.update(path)
            digest.update(text)
    return digest.hexdigest()


def _joined(records: Iterable[Record]) -> bytes:
    """Parts of a file follow each other; between files stands the separator."""
    files: dict[bytes, list[bytes]] = {}
    for record in records:
        files.setdefault(record.path, []).append(record.text)
    return corpus_lib.join(b"".join(parts) for parts in files.values())
