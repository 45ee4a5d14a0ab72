"""What is a corpus once loaded? Two arrays of tokens, the hash that names them, and what a loss is read against."""

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from resjax.data import baselines as baselines_lib
from resjax.data.baselines import Baselines, Floors
from resjax.errors import Refused

SEPARATOR = b"\n"  # between two documents; a newline and not a zero byte, so that sampled text prints well


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens, split for training and evaluation.

    name: the value of data.source.
    train, held_out: (tokens,) uint8, read-only.
    sha256: of both texts, each preceded by its length; losses of two machines are comparable only where it is equal.
    vocab: the number of possible tokens (256 for bytes).
    description: one line: what it is, of how many files or records, and how it was split.
    baselines: nats per token on `held_out`.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    sha256: str
    vocab: int
    description: str
    baselines: Baselines

    @property
    def unit(self) -> str:
        """What one token is, for people: 'bytes' or 'symbols'."""
        return "bytes" if self.vocab == 256 else "symbols"

    def summary_lines(self) -> list[str]:
        """What a run prints at its start: the source, its hash, and how to tell learning from not learning."""
        b = self.baselines
        lines = [
            f"data: {self.name}: {self.description}",
            f"      {len(self.train):,} {self.unit} to train on, {len(self.held_out):,} held out, "
            f"sha256 {self.sha256[:12]}",
            f"baselines (nats per token on the held-out text): uniform {b.uniform:.3f}, unigram {b.unigram:.3f}, "
            f"bigram {b.bigram:.3f}, trigram {b.trigram:.3f}",
        ]
        if b.floors:
            lines.append(
                f"exact floors of the source: {b.floors.unigram:.3f} for what sees no context, {b.floors.bigram:.3f} "
                f"with one symbol, {b.floors.trigram:.3f} with two; no model goes below the last"
            )
        one = self.unit.removesuffix("s")
        lines.append(
            f"an evaluation loss below unigram = it has learnt more than how often each {one} occurs; "
            f"below bigram = it uses more than the previous {one}; below trigram = more than the previous two"
        )
        return lines


def make(
    name: str,
    train: bytes | np.ndarray,
    held_out: bytes | np.ndarray,
    *,
    description: str,
    vocab: int = 256,
    floors: Floors | None = None,
) -> Corpus:
    """Hash and measure two texts. Refuses an empty one."""
    train, held_out = _tokens(train), _tokens(held_out)
    if not len(train) or not len(held_out):
        raise Refused(
            f"data.source '{name}' gives {len(train)} tokens to train on and {len(held_out)} to hold out: too small"
        )
    digest = hashlib.sha256()
    for text in (train, held_out):
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text.data)
    return Corpus(
        name=name,
        train=train,
        held_out=held_out,
        sha256=digest.hexdigest(),
        vocab=vocab,
        description=description,
        baselines=baselines_lib.measure(train, held_out, vocab, floors),
    )


def _tokens(text: bytes | np.ndarray) -> np.ndarray:
    tokens = np.frombuffer(text, np.uint8) if isinstance(text, bytes) else np.ascontiguousarray(text, np.uint8)
    tokens.flags.writeable = False
    return tokens


def join(documents: Iterable[bytes]) -> bytes:
    """The documents as one text, a newline byte between each two."""
    return SEPARATOR.join(documents)


def data_folder() -> Path:
    """Where prepared text is kept: $RESJAX_DATA_DIR, else $TFDS_DATA_DIR, else resjax's folder in the user's cache."""
    for variable in ("RESJAX_DATA_DIR", "TFDS_DATA_DIR"):
        if value := os.environ.get(variable):
            return _local(value, variable)
    try:
        home = Path.home()
    except RuntimeError as error:
        raise Refused(
            "there is no home folder to keep prepared data in; set RESJAX_DATA_DIR to a folder that can be written"
        ) from error
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "resjax"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "resjax"


def search_folders() -> list[Path]:
    """Where prepared TFDS sets are looked for, in order: the data folder, $TFDS_DATA_DIR, ~/tensorflow_datasets."""
    folders = [data_folder()]
    if value := os.environ.get("TFDS_DATA_DIR"):
        folders.append(_local(value, "TFDS_DATA_DIR"))
    folders.append(Path(os.path.expanduser("~/tensorflow_datasets")))
    return list(dict.fromkeys(folders))


def _local(value: str, variable: str) -> Path:
    if "://" in value:
        raise Refused(
            f"{variable} is '{value}'; only folders of this machine are read, so copy the set to one and name that"
        )
    return Path(value).expanduser()
