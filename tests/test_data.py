"""Sources, baselines and batches: the right text, the right numbers, and the same batch at every visit."""

import json
import math
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from resjax import data
from resjax.data import baselines, builders, corpus, markov, texts
from resjax.data.pipeline import Pipeline
from resjax.errors import Refused


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test has a data folder and a home of its own."""
    monkeypatch.setenv("RESJAX_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "data"


def small(train=b"abracadabra " * 40, held_out=b"abracadabra " * 8) -> corpus.Corpus:
    return corpus.make("small", train, held_out, description="a small text")


def numbered(tokens: int) -> corpus.Corpus:
    """A text whose every token tells its place: token i is i modulo 251."""
    text = (np.arange(tokens) % 251).astype(np.uint8)
    return corpus.make("numbered", text, text[: tokens // 2], description="a text of places")


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


# ---- markov


def test_markov_floors_are_the_published_ones():
    floors = markov.floors(markov.law(0))
    assert floors.unigram == pytest.approx(2.845, abs=0.002)
    assert floors.bigram == pytest.approx(2.326, abs=0.002)
    assert floors.trigram == pytest.approx(1.787, abs=0.002)
    assert math.log(markov.VOCAB) == pytest.approx(3.466, abs=0.001)


def test_markov_law_is_stationary_and_normalised():
    transition, pair = markov.law(3)
    np.testing.assert_allclose(transition.sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.einsum("ab,abx->bx", pair, transition), pair, atol=1e-14)
    assert pair.sum() == pytest.approx(1, abs=1e-12)


def test_markov_plug_in_entropies_agree_with_the_floors():
    """X51: at 1e6 symbols to 0.005.

    The plug-in H3 is biased low by about (V - 1) V^2 / 2n = 0.016 nats, so the Miller-Madow correction is added first.
    """
    law = markov.law()
    chain = markov.sample(law, 1_000_000, seed=1).astype(np.int64)
    entropies = []
    for window in (1, 2, 3):
        code = sum(chain[i : len(chain) - window + 1 + i] * 32 ** (window - 1 - i) for i in range(window))
        counts = np.unique(code, return_counts=True)[1]
        p = counts / counts.sum()
        entropies.append(-(p * np.log(p)).sum() + (len(counts) - 1) / (2 * counts.sum()))
    floors = markov.floors(law)
    assert entropies[0] == pytest.approx(floors.unigram, abs=0.005)
    assert entropies[1] - entropies[0] == pytest.approx(floors.bigram, abs=0.005)
    assert entropies[2] - entropies[1] == pytest.approx(floors.trigram, abs=0.005)


def test_markov_sample_is_the_chain_that_a_loop_would_draw():
    law = markov.law()
    symbols, blocks, seed = 5_000, 7, 4
    rng = np.random.default_rng(seed)
    a, b = divmod(int(rng.choice(32 * 32, p=law.pair.ravel())), 32)
    expected = []
    for uniform in rng.random(symbols):
        cumulative = np.cumsum(law.transition[a, b])
        cumulative[-1] = 1
        a, b = b, int(np.searchsorted(cumulative, uniform, side="right"))
        expected.append(b)
    drawn = markov.sample(law, symbols, seed, blocks)
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_array_equal(drawn, markov.sample(law, symbols, seed, blocks=1))
    assert not np.array_equal(drawn, markov.sample(law, symbols, seed + 1, blocks))


def test_markov_source_shares_law_and_held_out_text_between_seeds(monkeypatch):
    monkeypatch.setattr(markov, "TRAIN_SYMBOLS", 200_000)
    monkeypatch.setattr(markov, "HELD_OUT_SYMBOLS", 50_000)
    first, again, other = data.load("markov", seed=5), data.load("markov", seed=5), data.load("markov", seed=6)
    assert first.sha256 == again.sha256 != other.sha256
    np.testing.assert_array_equal(first.held_out, other.held_out)
    assert first.vocab == 32 and first.train.max() == 31
    b = first.baselines
    assert b.floors == other.baselines.floors == markov.floors(markov.law())
    assert b.uniform == pytest.approx(math.log(32))
    # counting comes near the floors from above, up to the sampling error of the held-out text
    for counted, floor in ((b.unigram, b.floors.unigram), (b.bigram, b.floors.bigram), (b.trigram, b.floors.trigram)):
        assert floor - 0.02 < counted < floor + 0.15


# ---- baselines


def slow_baselines(train: bytes, held_out: bytes, vocab: int) -> list[float]:
    """The formula of `baselines.measure`, a token at a time."""
    weight = 0.1 * vocab
    counts = [Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in (1, 2, 3)]
    followed = [Counter(train[i : i + n] for i in range(len(train) - n)) for n in (0, 1, 2)]

    def p(context: bytes, x: bytes) -> float:
        shorter = p(context[1:], x) if context else 1 / vocab
        n = len(context)
        seen = followed[n][context] if n else len(train)
        return (counts[n][context + x] + weight * shorter) / (seen + weight)

    losses = [math.log(vocab)]
    for order in (0, 1, 2):
        total = sum(-math.log(p(held_out[max(0, i - order) : i], held_out[i : i + 1])) for i in range(len(held_out)))
        losses.append(total / len(held_out))
    return losses


@pytest.mark.parametrize("chunk", [7, 1 << 24])
@pytest.mark.parametrize("vocab", [256, 200])
def test_baselines_equal_a_slow_dictionary(chunk, vocab, monkeypatch):
    monkeypatch.setattr(baselines, "_CHUNK", chunk)
    rng = np.random.default_rng(0)
    train = bytes(rng.choice(list(b"aabcd ef\n"), 900).tolist())
    held_out = bytes(rng.choice(list(b"aabcd ezy"), 101).tolist())  # z and y never occur in training
    found = baselines.measure(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), vocab)
    np.testing.assert_allclose(list(found.as_dict().values()), slow_baselines(train, held_out, vocab), rtol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_baselines_of_the_shortest_texts(length):
    text = b"abc"[:length]
    tokens = np.frombuffer(text, np.uint8)
    found = baselines.measure(tokens, tokens, 256)
    np.testing.assert_allclose(list(found.as_dict().values()), slow_baselines(text, text, 256), rtol=1e-12)


def test_counted_laws_sum_to_one():
    """The baselines score a distribution: over the tokens that may follow a context, the probabilities sum to 1."""
    train = np.frombuffer(b"abracadabra", np.uint8)
    contexts = (b"", b"a", b"z", b"ab", b"zz")
    for context in contexts:
        total = 0.0
        for x in range(256):
            scored = [
                baselines.measure(train, np.frombuffer(text, np.uint8), 256)
                for text in (context + bytes([x]), context)[: 2 if context else 1]
            ]
            name = ("unigram", "bigram", "trigram")[len(context)]
            loss = getattr(scored[0], name) * (len(context) + 1)
            if context:
                loss -= getattr(scored[1], name) * len(context)
            total += math.exp(-loss)
        assert total == pytest.approx(1, abs=1e-9)


def test_baselines_of_eight_megabytes_take_about_a_second():
    rng = np.random.default_rng(0)
    train = rng.choice(np.arange(100, dtype=np.uint8), 8_000_000)
    start = time.process_time()
    baselines.measure(train, train[:800_000], 256)
    assert time.process_time() - start < 4  # 0.3 s on an idle machine


# ---- corpus


def test_corpus_hash_names_the_text_and_its_split():
    whole = b"0123456789" * 10
    hashes = {corpus.make("x", whole[:cut], whole[cut:], description="").sha256 for cut in (50, 60, 90)}
    assert len(hashes) == 3
    assert small().sha256 == small().sha256


def test_corpus_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        small().train[0] = 1


def test_summary_tells_a_newcomer_what_to_compare():
    text = "\n".join(small().summary_lines())
    assert "480 bytes to train on, 96 held out" in text
    assert small().sha256[:12] in text
    for name, value in small().baselines.as_dict().items():
        assert f"{name} {value:.3f}" in text
    assert "below bigram = it uses more than the previous byte" in text


def test_data_folder(monkeypatch, tmp_path):
    assert corpus.data_folder() == tmp_path / "data"
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    assert corpus.data_folder() == tmp_path / "data"
    monkeypatch.delenv("RESJAX_DATA_DIR")
    assert corpus.data_folder() == tmp_path / "sets"
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tmp_path / "home" in corpus.data_folder().parents
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/sets")
    with pytest.raises(Refused, match="TFDS_DATA_DIR is 'gs://bucket/sets'"):
        corpus.data_folder()


# ---- stdlib and files


def test_standard_library_is_read_and_filtered():
    text = texts.standard_library()
    paths = [file.path.decode() for file in text.files]
    assert paths == sorted(paths) and {"argparse.py", "json/decoder.py"} <= set(paths)
    assert all(path.endswith(".py") for path in paths)
    parts = {part for path in paths for part in path.split("/")[:-1]}
    assert not parts & texts.NOT_IN_STDLIB
    assert not any("_sysconfigdata" in path for path in paths)
    assert 6_000_000 < sum(file.size for file in text.files) < 12_000_000


def test_a_python_without_source_names_two_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "zipped")})
    with pytest.raises(Refused, match=r"'stdlib'.*zipped.*markov.*files:PATH"):
        data.load("stdlib")


def test_files_are_split_by_file(tmp_path, folder):
    names = [f"{place}/{i}.txt" for place in "abc" for i in range(12)]
    root = write(tmp_path / "texts", {name: f"<{name}>".encode() * 50 for name in names})
    write(root, {"empty.txt": b"", ".hidden": b"secret", ".git/config": b"secret"})
    found = data.load(f"files:{root}")
    both = found.train.tobytes() + b"\n" + found.held_out.tobytes()
    assert sorted(both.split(b"\n")) == sorted(f"<{name}>".encode() * 50 for name in names)
    held_out = found.held_out.tobytes().split(b"\n")
    assert len(held_out) == 3  # of 36 of one size: the most that keeps within a tenth
    assert not set(held_out) & set(found.train.tobytes().split(b"\n"))
    # the split goes by the relative path: another place, the same split, the same prepared set
    moved = root.rename(tmp_path / "elsewhere")
    assert data.load(f"files:{moved}").sha256 == found.sha256
    assert len(list((folder / "resjax_files").iterdir())) == 1
    # and by its hash, not by the alphabet
    assert held_out != [f"<{name}>".encode() * 50 for name in sorted(names)[-3:]]


def test_few_files_are_split_by_position(tmp_path):
    root = write(tmp_path / "texts", {"one.txt": bytes(range(100)), "two.txt": bytes(range(100, 200))})
    found = data.load(f"files:{root}")
    assert found.train.tobytes() == bytes(range(90)) + b"\n" + bytes(range(100, 190))
    assert found.held_out.tobytes() == bytes(range(90, 100)) + b"\n" + bytes(range(190, 200))
    assert "the last tenth of each held out" in found.description

    alone = data.load(f"files:{root / 'one.txt'}")
    assert alone.train.tobytes() == bytes(range(90)) and alone.held_out.tobytes() == bytes(range(90, 100))
    assert "1 file, the last tenth of it held out" in alone.description
    by_pattern = data.load(f"files:{root}/**/*.txt")
    assert by_pattern.sha256 == found.sha256


def test_any_bytes_survive_and_large_files_are_cut_into_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_PART", 1000)
    content = np.random.default_rng(0).integers(0, 256, 12_345).astype(np.uint8).tobytes()
    root = write(tmp_path / "texts", {"noise.bin": content, "name with ü and space.txt": b"x" * 3000})
    found = data.load(f"files:{root}")
    assert found.train.tobytes() == b"x" * 2700 + b"\n" + content[:11_111]
    assert found.held_out.tobytes() == b"x" * 300 + b"\n" + content[11_111:]


def test_a_second_load_reads_what_the_first_prepared(tmp_path, folder, monkeypatch):
    root = write(tmp_path / "texts", {"a.txt": b"text " * 100})
    first = data.load(f"files:{root}")
    monkeypatch.setattr(builders, "_prepare", lambda *_: pytest.fail("prepared twice"))
    assert data.load(f"files:{root}").sha256 == first.sha256
    monkeypatch.undo()
    monkeypatch.setenv("RESJAX_DATA_DIR", str(folder))
    write(root, {"a.txt": b"other " * 100})
    assert data.load(f"files:{root}").sha256 != first.sha256


@pytest.mark.parametrize("damage", ["truncate", "remove", "garbage"])
def test_a_damaged_set_is_prepared_again(tmp_path, folder, damage):
    root = write(tmp_path / "texts", {"a.txt": b"text " * 1000})
    first = data.load(f"files:{root}")
    records = next(folder.glob("resjax_files/*/1.0.0/*train*"))
    if damage == "truncate":
        records.write_bytes(records.read_bytes()[: records.stat().st_size // 2])
    elif damage == "remove":
        records.unlink()
    else:
        (records.parent / "dataset_info.json").write_text("{")
    assert data.load(f"files:{root}").sha256 == first.sha256
    assert not list(folder.glob(".preparing-*"))


@pytest.mark.parametrize("replace", [False, True])
def test_preparing_what_another_process_just_prepared(tmp_path, folder, replace):
    root = write(tmp_path / "texts", {"a.txt": b"text " * 100})
    expected = data.load(f"files:{root}")
    (there,) = folder.glob("resjax_files/*/1.0.0")
    builders._prepare(builders.ResjaxFiles, texts.own_files(f"files:{root}"), there, replace)
    assert data.load(f"files:{root}").sha256 == expected.sha256
    assert not list(folder.glob(".preparing-*"))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("digits", r"data.source is 'digits'; the forms are stdlib, markov, files:PATH, tfds:NAME\[/CONFIG\]"),
        ("stdlb", r"did you mean 'stdlib'\?"),
        ("", "data.source is ''; the forms are"),
        ("files:", "names no path"),
        ("files:{tmp}/nothing.txt", "nothing.txt does not exist"),
        ("files:{tmp}/empty.txt", "empty.txt is empty"),
        ("files:{tmp}/hollow", "hollow holds no file with text in it"),
        ("files:{tmp}/*.md", r"\*.md matches no file with text in it"),
        ("files:/dev/null", "neither a file nor a folder"),
        ("files:{tmp}/byte.txt", "is too small: nothing is left to train on"),
        ("tfds:", "write tfds:NAME or tfds:NAME/CONFIG"),
        ("tfds:../x", "write tfds:NAME or tfds:NAME/CONFIG"),
    ],
)
def test_bad_sources_are_refused_in_one_sentence(tmp_path, folder, source, sentence):
    write(tmp_path, {"empty.txt": b"", "byte.txt": b"x", "hollow/empty.txt": b""})
    with pytest.raises(Refused, match=sentence) as refusal:
        data.load(source.format(tmp=tmp_path))
    assert "\n" not in str(refusal.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    root = write(tmp_path / "texts", {"a.txt": b"text " * 100})
    monkeypatch.setenv("RESJAX_DATA_DIR", str(root / "a.txt" / "data"))
    with pytest.raises(Refused, match=r"a.txt/data \(Not a directory\); set RESJAX_DATA_DIR"):
        data.load(f"files:{root}")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, folder, monkeypatch):
    """ArrayRecord reports a full disk as a RuntimeError, other writers as an OSError."""
    root = write(tmp_path / "texts", {"a.txt": b"text " * 100})

    def full(*_, **__):
        raise RuntimeError("write() failed: No space left on device")

    monkeypatch.setattr(builders.ResjaxFiles, "download_and_prepare", full)
    with pytest.raises(Refused, match="No space left on device"):
        data.load(f"files:{root}")
    assert list(folder.iterdir()) == []


def test_a_negative_seed_is_refused():
    with pytest.raises(Refused, match="seed is -1; it must be from 0 to 4294967295"):
        data.load("markov", seed=-1)


def test_data_field_is_for_tfds_only():
    with pytest.raises(Refused, match=r"data.field is 'text', but data.source 'markov'"):
        data.load("markov", field="text")


# ---- tfds:NAME


@pytest.fixture
def prepare(folder):
    """Writes a TFDS set as array_record: prepare(NAME, {split: texts}, config=None, version="1.0.0")."""
    import tensorflow_datasets as tfds

    def make(name: str, splits: dict[str, list[str]], config: str = "", version: str = "1.0.0") -> Path:
        features = {
            "label": tfds.features.ClassLabel(num_classes=3),
            "title": tfds.features.Text(),
            "text": tfds.features.Text(),
            "translation": {"de": tfds.features.Text()},
            "picture": tfds.features.Tensor(shape=(2,), dtype=np.uint8),
        }

        class Set(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            VERSION = tfds.core.Version(version)

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(split) for split in splits}

            def _generate_examples(self, split):
                for i, text in enumerate(splits[split]):
                    numbers = {"label": i % 3, "picture": np.zeros(2, np.uint8)}
                    yield i, {"title": f"title {i}", "text": text, "translation": {"de": f"de {i}"}, **numbers}

        Set.name = name
        parent = folder / name / config if config else folder / name
        made = Set(data_dir=folder / "workshop", file_format="array_record")
        with builders._quiet():
            made.download_and_prepare()
        parent.mkdir(parents=True, exist_ok=True)
        return Path(made.data_dir).rename(parent / version)

    return make


def test_a_prepared_set_by_name(prepare):
    prepare("poems", {"train": ["an old poem"] * 5, "test": ["a test"] * 2}, version="1.0.0")
    prepare("poems", {"train": ["a new poem"] * 5, "test": ["a test"] * 2}, version="1.10.0")
    prepare("poems", {"train": ["a poem"] * 5, "test": ["a test"] * 2}, version="1.9.0")
    found = data.load("tfds:poems")
    assert found.train.tobytes() == b"\n".join([b"a new poem"] * 5)
    assert found.held_out.tobytes() == b"a test\na test"
    assert "feature 'text', 7 records, split 'test' held out" in found.description
    assert found.vocab == 256

    nested = data.load("tfds:poems", field="translation/de")
    assert sorted(nested.train.tobytes().split(b"\n")) == [f"de {i}".encode() for i in range(5)]
    with pytest.raises(Refused, match=r"data.field is 'titel'.*text, title, translation/de; did you mean 'title'\?"):
        data.load("tfds:poems", field="titel")


def test_held_out_records_of_a_prepared_set(prepare):
    prepare("both", {"train": ["x"] * 3, "test": ["test"], "validation": ["validation"]})
    assert data.load("tfds:both").held_out.tobytes() == b"validation"
    prepare("alone", {"train": [f"record {i}" for i in range(300)]})
    found = data.load("tfds:alone")
    train, held_out = (set(text.tobytes().split(b"\n")) for text in (found.train, found.held_out))
    assert len(train) + len(held_out) == 300 and not train & held_out
    assert 15 <= len(held_out) <= 50
    assert "about a tenth of the records held out" in found.description
    prepare("other", {"unsupervised": ["x"] * 3})
    with pytest.raises(Refused, match="has no split 'train'; its splits are unsupervised"):
        data.load("tfds:other")


def test_configurations_of_a_prepared_set(prepare):
    prepare("wiki", {"train": ["english"] * 20}, config="2023.en")
    assert data.load("tfds:wiki").sha256 == data.load("tfds:wiki/2023.en").sha256
    prepare("wiki", {"train": ["deutsch"] * 20}, config="2023.de")
    assert b"deutsch" in data.load("tfds:wiki/2023.de").train.tobytes()
    with pytest.raises(Refused, match=r"configurations 2023.de, 2023.en; add one"):
        data.load("tfds:wiki")
    with pytest.raises(Refused, match=r"no prepared set 'wiki/2023.fr'.*did you mean 'wiki/2023"):
        data.load("tfds:wiki/2023.fr")


def test_a_set_stored_as_tfrecord_is_refused_with_the_command(prepare, folder, monkeypatch, tmp_path):
    info = prepare("lm1b", {"train": ["x"] * 3, "test": ["y"]}) / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(Refused) as refusal:
        data.load("tfds:lm1b")
    sentence = str(refusal.value)
    assert "\n" not in sentence and "stored as tfrecord, which only TensorFlow reads" in sentence
    call = f"tfds.builder('lm1b', data_dir='{folder}-array_record', file_format='array_record').download_and_prepare()"
    assert call in sentence and f"then set RESJAX_DATA_DIR={folder}-array_record" in sentence
    # found in the user's TFDS folder: the data folder can take the new one, and comes first afterwards
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    monkeypatch.setenv("RESJAX_DATA_DIR", str(tmp_path / "own"))
    with pytest.raises(Refused, match=rf"data_dir='{tmp_path}/own'"):
        data.load("tfds:lm1b")
    # stored in both formats: readable
    info.write_text(json.dumps(json.loads(info.read_text()) | {"alternativeFileFormats": ["array_record"]}))
    assert data.load("tfds:lm1b").train.tobytes() == b"x\nx\nx"


def test_a_set_that_only_its_own_code_can_open_is_refused(prepare, capfd):
    features = prepare("strange", {"train": ["x"] * 3}) / "features.json"
    features.write_text(features.read_text().replace("text_feature.Text", "no_such_module.Feature"))
    with pytest.raises(
        Refused, match=r"the set in .*strange/1.0.0 cannot be opened here, without TensorFlow \("
    ) as refusal:
        data.load("tfds:strange")
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


def test_an_absent_set_is_told_at_once(prepare, folder):
    prepare("poems", {"train": ["x"] * 3})
    start = time.perf_counter()
    with pytest.raises(Refused) as refusal:
        data.load("tfds:poem")
    assert time.perf_counter() - start < 10  # a look-up that finds no network takes longer
    sentence = str(refusal.value)
    assert "\n" not in sentence and f"no prepared set 'poem' is in {folder}" in sentence
    assert "did you mean 'poems'?" in sentence
    assert f"tfds.builder('poem', data_dir='{folder}', file_format='array_record').download_and_prepare()" in sentence


# ---- batches


def test_batches_are_the_same_from_any_start():
    """A21: 20 in a row equal 8 + 12 resumed, two resumes from 8 and one from 16, across several epochs."""
    text = numbered(1000)
    whole = [Pipeline(text, 16, 8, seed=3).batch(i) for i in range(20)]
    for start in (0, 8, 8, 16):
        resumed = Pipeline(text, 16, 8, seed=3)
        for i in range(start, 20):
            np.testing.assert_array_equal(resumed.batch(i), whole[i])
    assert whole[0].shape == (8, 17) and whole[0].dtype == np.int32
    assert not np.array_equal(Pipeline(text, 16, 8, seed=4).batch(0), whole[0])


def test_held_out_batches_depend_neither_on_resuming_nor_on_the_seed():
    text = numbered(1000)
    first = Pipeline(text, 16, 4, seed=3)
    expected = [first.held_out(i) for i in range(first.held_out_batches)]
    other = Pipeline(text, 16, 4, seed=9)
    for i in (3, 0, 11, 5):
        other.batch(i)
        np.testing.assert_array_equal(other.held_out(i % len(expected)), expected[i % len(expected)])
    starts = np.concatenate([batch[:, 0] for batch in expected])
    assert len(set(starts.tolist())) == len(starts)  # each window once before any comes again
    assert np.std(expected[0][:, 0].astype(int)) > 30  # and one batch is spread over the text


def test_an_epoch_covers_the_text_with_a_new_order_and_place():
    length, tokens = 10, 240
    text = (np.arange(tokens)).astype(np.uint8)
    pipeline = Pipeline(corpus.make("n", text, text, description=""), length, 1, seed=0)
    epochs = []
    for epoch in range(20):
        windows = [pipeline.batch(epoch * pipeline.windows_per_epoch + i)[0] for i in range(pipeline.windows_per_epoch)]
        for window in windows:
            np.testing.assert_array_equal(np.diff(window), 1)  # a piece of the text as it stands
        targets = np.concatenate([window[1:] for window in windows])
        assert len(set(targets.tolist())) == len(targets) > tokens - 2 * length
        epochs.append([window[0] for window in windows])
    assert len({epoch[0] for epoch in epochs}) > 5
    assert {start % length for epoch in epochs for start in epoch} == set(range(length))
    orders = {tuple(np.argsort(epoch)) for epoch in epochs}
    assert len(orders) == len(epochs)
    seen = {int(start) + 1 + i for epoch in epochs for start in epoch for i in range(length)}
    assert seen == set(range(1, tokens))


@pytest.mark.parametrize("tokens", [11, 12, 20, 21])
def test_texts_hardly_longer_than_a_window(tokens):
    text = np.arange(tokens).astype(np.uint8)
    pipeline = Pipeline(corpus.make("n", text, text, description=""), 10, 3, seed=0)
    for i in range(30):
        np.testing.assert_array_equal(np.diff(pipeline.batch(i), axis=1), 1)
    assert pipeline.batch(0).shape == pipeline.held_out(0).shape == (3, 11)


def test_a_sequence_longer_than_the_corpus_is_refused():
    with pytest.raises(Refused, match=r"data.length is 96.*'small' has 96 bytes held out.*at most 95 is possible"):
        Pipeline(small(), 96, 1, 0)
    Pipeline(small(), 95, 1, 0)
    with pytest.raises(Refused, match=r"data.length is 480.*480 bytes to train on.*at most 479"):
        Pipeline(small(), 480, 1, 0)
    for field, arguments in (("data.length", (0, 1, 0)), ("data.batch", (8, 0, 0)), ("seed", (8, 1, -1))):
        with pytest.raises(Refused, match=f"{field} is"):
            Pipeline(small(), *arguments)


def test_stream_starts_anywhere_and_ends_its_thread():
    pipeline = Pipeline(numbered(1000), 16, 8, seed=3)
    stream = pipeline.stream(start=7)
    for i in range(7, 30):
        np.testing.assert_array_equal(next(stream), pipeline.batch(i))
    assert any(thread.name.startswith("resjax-data") for thread in threading.enumerate())
    stream.close()
    assert not any(thread.name.startswith("resjax-data") for thread in threading.enumerate())


# ---- whole processes: no network, no TensorFlow, nothing printed, two at once

ISOLATED = """
import socket, sys, time
connect = socket.socket.connect
def blocked(self, *address):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        raise AssertionError(f'connects to {address}')
    return connect(self, *address)
socket.socket.connect = socket.socket.connect_ex = blocked
def no_look_up(*name):
    raise AssertionError(f'looks up {name}')
socket.getaddrinfo = socket.gethostbyname = no_look_up
from resjax import data
assert not {'jax', 'tensorflow_datasets', 'grain'} & set(sys.modules), 'importing resjax.data is not light'
start = time.perf_counter()
try:
    data.load('tfds:absent')
except data.Refused:
    pass
assert time.perf_counter() - start < 10
stream = data.Pipeline(data.load(sys.argv[1]), 16, 2, 0).stream()
assert next(stream).shape == (2, 17)
assert not any(name.partition('.')[0] in ('tensorflow', 'torch') for name in sys.modules), sorted(sys.modules)
# ends with the stream still open: the program must not hang
"""
DIGEST = "import sys; from resjax import data; print(data.load(sys.argv[1]).sha256)"


def start(program: str, *arguments: str, path: Path | None = None) -> subprocess.Popen:
    places = [str(Path(data.__file__).parents[2]), *([str(path)] if path else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_default_source_needs_no_network_and_no_tensorflow(tmp_path):
    """A37, A38: where connections, look-ups and imports of TensorFlow and torch fail, it loads, in silence."""
    for name in ("tensorflow", "torch"):
        write(tmp_path / "masks", {f"{name}/__init__.py": f"raise SystemExit('{name} was imported')".encode()})
    process = start(ISOLATED, "stdlib", path=tmp_path / "masks")
    output = process.communicate(timeout=60)
    assert (process.returncode, *output) == (0, "", "")


def test_two_processes_prepare_the_same_text_at_once(tmp_path, folder):
    root = write(tmp_path / "texts", {f"{i}.txt": os.urandom(20_000) for i in range(40)})
    processes = [start(DIGEST, f"files:{root}") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0] == outputs[1] and outputs[0][1] == ""
    assert not list(folder.glob(".preparing-*"))
    assert len(list((folder / "resjax_files").iterdir())) == 1
