"""What does ``python -m resjax.sample`` print, and what does it refuse?"""

import io
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from resjax import sample
from resjax.check import perturbed
from resjax.config import default
from resjax.config.validate import resolve
from resjax.data import corpus as corpora
from resjax.errors import Refused
from resjax.models.generate import generate
from resjax.train.assemble import assemble
from resjax.train.checkpoint import Checkpoints
from resjax.train.runfolder import RunFolder, describe
from resjax.train.saved import load_run
from resjax.train.writers import write_json


def make_run(folder, source="stdlib", factors=None, **residual):
    """A run's folder as training leaves it: config.json, and at each step drawn parameters times that step's factor."""
    config = default()
    config.data.source, config.data.length, config.data.batch = source, 8, 4
    config.model.depth, config.model.width, config.model.heads = 2, 8, 2
    for name, value in residual.items():
        config.residual[name] = value
    config = resolve(config, "cpu")
    vocab = 32 if source == "markov" else 256
    corpus = corpora.make(source, bytes(range(20)) * 9, bytes(range(20)) * 3, description="a test", vocab=vocab)
    abstract = assemble(config, corpus.vocab).abstract.params
    params = perturbed(abstract)
    paths = RunFolder(folder)
    paths.path.mkdir(parents=True)
    write_json(paths.config, describe(config, corpus, None))
    checkpoints = Checkpoints(paths.checkpoints, keep=9)
    for step, factor in (factors or {0: 1}).items():
        tree = {"params": jax.tree.map(lambda x, factor=factor: x * np.float32(factor), params), "step": np.int32(step)}
        checkpoints.save(step, tree | {"moments": np.zeros(3, np.float32)}, {"config": config.to_dict()})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one", factors={0: 2, 3: 1})


def said(capsys, *words):
    """Exit code, standard output, standard error."""
    code = sample.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_follows_the_prompt_and_is_the_seeds(run, capsys):
    code, text, notes = said(capsys, run, "--prompt=import é", "--length=40")
    assert code == 0
    assert text.startswith("import é") and text.endswith("\n")
    assert "step 3" in notes and "seed 0" in notes and "0.8" in notes
    assert said(capsys, run, "--prompt=import é", "--length=40")[1] == text
    assert said(capsys, run, "--prompt=import é", "--length=40", "--seed=1")[1] != text


def test_temperature_0_is_the_likeliest_text(run, capsys):
    prompt = "a prompt that is longer than the window of eight bytes"
    _, text, _ = said(capsys, run, f"--prompt={prompt}", "--length=20", "--temperature=0")
    saved = load_run(run)
    tokens = generate(saved.model, list(prompt.encode()), 20, key=jax.random.key(7), temperature=0)
    assert text == (prompt.encode() + bytes(tokens)).decode("utf-8", "replace") + "\n"
    assert said(capsys, run, f"--prompt={prompt}", "--length=20", "--top_k=1")[1] == text


def test_an_earlier_step_can_be_chosen(run, capsys):
    _, text, notes = said(capsys, run, "--prompt=x", "--length=40", "--temperature=0", "--step=0")
    assert "step 0" in notes
    assert said(capsys, run, "--prompt=x", "--length=40", "--temperature=0")[1] != text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt="], "--prompt is empty"),
        (["--prompt=a", "--temperature=-1"], "--temperature is -1.0; it must be a number from 0"),
        (["--prompt=a", "--temperature=nan"], "--temperature is nan"),
        (["--prompt=a", "--temperature=inf"], "--temperature is inf"),
        (["--prompt=a", "--length=0"], "--length is 0; it must be 1"),
        (["--prompt=a", "--top_k=0"], "--top_k is 0; it must be from 1 to 256"),
        (["--prompt=a", "--top_k=257"], "--top_k is 257"),
        (["--prompt=a", "--seed=-1"], "--seed is -1"),
        (["--prompt=a", "--step=2"], "checkpoint 2 in .* other steps: 0, 3"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, capsys, words, sentence):
    code, text, notes = said(capsys, run, *words)
    assert code == 2 and text == ""
    assert notes.startswith("resjax: ") and notes.count("\n") == 1
    assert re.search(sentence, notes), notes


def test_no_run_no_checkpoint_no_text(tmp_path, capsys, run):
    code, _, notes = said(capsys, str(run)[:-1] + "f", "--prompt=a")
    assert code == 2 and "holds no run" in notes and str(run) in notes, "the run beside it is what was meant"

    started = tmp_path / "started"
    started.mkdir()
    (started / "config.json").write_text((run / "config.json").read_text())
    code, _, notes = said(capsys, started, "--prompt=a")
    assert code == 2 and "no checkpoint in" in notes
    assert [path.name for path in started.iterdir()] == ["config.json"], "sampling leaves nothing in the folder"

    (started / "config.json").write_text('{"seed": ')
    code, _, notes = said(capsys, started, "--prompt=a")
    assert code == 2 and "cannot be read" in notes

    code, text, notes = said(capsys, make_run(tmp_path / "symbols", "markov"), "--prompt=a")
    assert code == 2 and text == "" and "'markov', whose 32 symbols are no text" in notes


def test_a_model_that_is_not_finite_ends_with_exit_code_4(tmp_path, capsys):
    broken = make_run(tmp_path / "broken", factors={0: 1, 1: np.nan})
    code, text, notes = said(capsys, broken, "--prompt=ab", "--length=9")
    assert code == 4 and text == "ab\n" and "not finite" in notes


def test_a_run_of_many_devices_is_sampled_on_one(run, tmp_path, capsys):
    facts = json.loads((run / "config.json").read_text())
    facts["mesh"]["data"] = 64
    other = tmp_path / "many"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(facts))
    (other / "checkpoints").symlink_to(run / "checkpoints")
    assert said(capsys, other, "--prompt=x", "--length=9")[1] == said(capsys, run, "--prompt=x", "--length=9")[1]


def test_a_scheme_file_that_has_changed_since_is_refused(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("from resjax.residual import CATALOGUE\nMINE = CATALOGUE['pre_ln'].but(name='mine', scale=0.5)\n")
    folder = make_run(tmp_path / "own", name=f"{path}:MINE")
    assert load_run(folder).model.stack.plan[0].sites[0].scale == 0.5
    path.write_text(path.read_text().replace("0.5", "0.25"))
    with pytest.raises(Refused, match="has changed since the run was made"):
        load_run(folder)


def test_bytes_that_are_no_utf8_and_control_characters():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def shown(out, *parts):
        text = sample.Text(out)
        for part in parts:
            text.put(part)
        text.end()
        return out.getvalue()

    split = "aé€".encode()
    assert shown(io.StringIO(), *(split[i : i + 1] for i in range(len(split)))) == "aé€\n"
    assert shown(io.StringIO(), b"a\xff", b"b\xe2\x82") == "a\ufffdb\ufffd\n"
    assert shown(Terminal(), b"a\x1b[2J\tb\nc\r\x9b") == "a\ufffd[2J\tb\nc\ufffd\ufffd\n"
    assert shown(io.StringIO(), b"\x1b[2J") == "\x1b[2J\n", "a file gets the text as it is"


def test_help_answers_without_jax():
    code = (
        "import sys\nfrom resjax import sample\n"
        "try: sample.main(['--help'])\nexcept SystemExit as end: sys.exit(end.code or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout


def test_a_reader_that_goes_away_is_no_fault(run):
    command = f"set -o pipefail; {sys.executable} -m resjax.sample {run} --prompt=a --length=3000 | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
