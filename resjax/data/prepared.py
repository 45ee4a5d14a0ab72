"""Which prepared TFDS set does `tfds:NAME[/CONFIG]` mean, and can its text be read here, without TensorFlow?"""

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resjax.data import corpus as corpus_lib
from resjax.data.corpus import Corpus
from resjax.errors import Refused, nearest

_HELD_OUT_SPLITS = ("validation", "valid", "dev", "held_out", "test")  # the first of these that a set has
_ONE_IN = 10  # records held out of a set that has none of them
_BLOCK = 512  # records fetched at a time


def load(source: str, field: str | None) -> Corpus:
    """The corpus of one text feature of a prepared set, its records joined by a newline byte.

    Trains on the split `train`. Held out are the set's validation records or, without any, its test records; without
    either, one record in ten, by a hash of its index.

    Args:
      source: `tfds:NAME[/CONFIG]`; the newest version is taken.
      field: the feature, a nested one with slashes (`translation/en`); None takes `text`, else the first one by name.

    Raises:
      Refused: for a set that is absent, stored as TFRecord, without such a feature, or not readable here.
    """
    folder = find(source)
    import tensorflow_datasets as tfds  # not before: that a set is absent is told at once

    with _refusing(f"data.source '{source}': the set in {folder} cannot be opened here"):
        builder = tfds.builder_from_directory(folder)
        features, splits = builder.info.features, builder.info.splits
        formats = [file_format.value for file_format in builder.info.available_file_formats()]
    if "array_record" not in formats:
        wanted = source.partition(":")[2]
        raise Refused(
            f"data.source '{source}': the set in {folder} is stored as {' and '.join(formats)}, which only "
            f"TensorFlow reads; {_advice(wanted, folder)}"
        )
    path = _text_feature(source, features, field)
    if "train" not in splits:
        raise Refused(f"data.source '{source}' has no split 'train'; its splits are {', '.join(splits)}")

    def texts(split: str) -> list[bytes]:
        with _refusing(f"data.source '{source}': split '{split}' in {folder} cannot be read here"):
            return list(_texts(builder, split, path))

    train = texts("train")
    records = len(train)
    if split := next((split for split in _HELD_OUT_SPLITS if split in splits), None):
        held_out, rule = texts(split), f"split '{split}' held out"
        records += len(held_out)
    else:
        held_out = [text for index, text in enumerate(train) if _is_held_out(index)]
        train = [text for index, text in enumerate(train) if not _is_held_out(index)]
        rule = "about a tenth of the records held out"
    return corpus_lib.make(
        source,
        corpus_lib.join(train),
        corpus_lib.join(held_out),
        description=f"TFDS set {builder.info.full_name}, feature '{path}', {records:,} records, {rule}",
    )


def find(source: str) -> Path:
    """The folder of the newest version of a set, in the first of `corpus.search_folders` that has it.

    Raises Refused, at once, where none has it, or where one of several configurations must be named.
    """
    wanted = source.partition(":")[2]
    if not re.fullmatch(r"\w+(/[\w.+-]*\w)?", wanted):
        raise Refused(
            f"data.source is '{source}'; write tfds:NAME or tfds:NAME/CONFIG, such as tfds:lm1b or tfds:glue/mnli"
        )
    folders = corpus_lib.search_folders()
    for folder in folders:
        if version := _newest_version(folder / wanted):
            return version
        versions = {path.name: version for path in _folders(folder / wanted) if (version := _newest_version(path))}
        if len(versions) == 1:
            return versions.popitem()[1]
        if versions:
            raise Refused(
                f"data.source is '{source}', which has the configurations {', '.join(versions)}; add one of them"
            )
    names = [path for folder in folders for path in _folders(folder)]
    present = [path.name for path in names] + [f"{path.name}/{sub.name}" for path in names for sub in _folders(path)]
    raise Refused(
        f"data.source is '{source}', but no prepared set '{wanted}' is in {' or '.join(map(str, folders))}"
        f"{nearest(wanted, present) or ';'} {_advice(wanted)}"
    )


def _advice(wanted: str, stored: Path | None = None) -> str:
    """The command that prepares a set once; not the program `tfds`, which does not start without Apache Beam."""
    target, afterwards = corpus_lib.data_folder(), ""
    if stored is not None and target in stored.parents:
        target = target.with_name(f"{target.name}-array_record")
        afterwards = f", then set RESJAX_DATA_DIR={target}"
    return (
        "prepare it once, in an environment that has TensorFlow and a network, by `python -c "
        f"\"import tensorflow_datasets as tfds; tfds.builder('{wanted}', data_dir='{target}', "
        f"file_format='array_record').download_and_prepare()\"`{afterwards}"
    )


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _newest_version(folder: Path) -> Path | None:
    versions = {
        tuple(map(int, path.name.split("."))): path
        for path in _folders(folder)
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name) and (path / "dataset_info.json").is_file()
    }
    return versions[max(versions)] if versions else None


def _text_feature(source: str, features: Mapping[str, Any], field: str | None) -> str:
    """Which feature to read: the given one, else `text`, else the first by name: a set keeps no other order."""
    found = sorted(_text_features(features))
    if not found:
        raise Refused(f"data.source '{source}' has no feature of type Text; its features are {', '.join(features)}")
    if field is None:
        return "text" if "text" in found else found[0]
    if field not in found:
        raise Refused(
            f"data.field is '{field}', but the text features of '{source}' are {', '.join(found)}"
            f"{nearest(field, found)}"
        )
    return field


def _text_features(features: Mapping[str, Any], above: str = "") -> Iterator[str]:
    import tensorflow_datasets as tfds

    for name, feature in features.items():
        if isinstance(feature, tfds.features.Text):
            yield above + name
        elif isinstance(feature, tfds.features.FeaturesDict):
            yield from _text_features(feature, f"{above}{name}/")


def _texts(builder: Any, split: str, path: str) -> Iterator[bytes]:
    """One feature of every record. The others are not decoded: they may be pictures, or need TensorFlow."""
    import tensorflow_datasets as tfds

    names = path.split("/")
    only = builder.info.features
    for name in names:
        only = only[name]
    for name in reversed(names):
        only = tfds.features.FeaturesDict({name: only})
    records = builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    for start in range(0, len(records), _BLOCK):
        for record in records.__getitems__(range(start, min(start + _BLOCK, len(records)))):
            value = only.deserialize_example_np(record)
            for name in names:
                value = value[name]
            yield value


def _is_held_out(index: int) -> bool:
    return int.from_bytes(hashlib.sha256(f"held_out 0 {index}".encode()).digest()[:8], "little") % _ONE_IN == 0


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn whatever the readers raise into one sentence: files, and code that they name, come from elsewhere.

    Without the page that TFDS prints where it misses TensorFlow.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:200]
        raise Refused(f"{what}, without TensorFlow ({type(error).__name__}: {first_line})") from error
