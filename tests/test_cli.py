"""What does ``python -m resjax.main`` print, refuse and leave alone?"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import runs
from resjax import main
from resjax.train.program import compile_programs
from runs import ROOT, files, rows, run, summary, words

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def config(calm):
    return calm


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    """A finished run of 6 steps."""
    folder = tmp_path_factory.mktemp("done") / "run"
    assert run(config, folder, train__steps=6) == 0
    return folder


def python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=runs.environment(**options),
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=240,
    )


# ------------------------------------------------------------------ help

HELP = """
import sys, time
began = time.process_time()
from resjax.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = [name for name in ("jax", "numpy", "flax", "orbax", "tensorflow_datasets") if name in sys.modules]
print(f"code {code}; {heavy}; {time.process_time() - began}", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--help", ["--config", "--workdir", "--from", "--evaluate", "--profile", "SIGUSR1", "130 and 143"]),
        ("--config_help", ["model.depth", "residual.drop_path", "train.on_nonfinite", "default"]),
    ],
)
def test_help_answers_without_loading_jax(option, said):
    answer = python(HELP, option)
    code, loaded, seconds = answer.stderr.strip().split("; ")
    assert code == "code 0" and "'jax'" not in loaded and "'flax'" not in loaded
    assert float(seconds) < 1  # of this process; others may be busy
    assert all(word in answer.stdout for word in said)


# ------------------------------------------------------------------ what is refused

SCHEMES = """
from resjax.residual import CATALOGUE
PRE = CATALOGUE["pre_ln"]
BRANCHES = PRE.but(name="branches", scale=lambda site: 0.0 if site.step > 5 else 1.0)
FAILS = PRE.but(name="fails", scale=lambda site: 1 / 0)
WORDS = PRE.but(name="words", scale=lambda site: "x")
"""
NEW = "--workdir=new"
BAD = {
    "unknown field": ([NEW, "--config.model.detph=4"], ["'model.detph'", "did you mean 'model.depth'"]),
    "wrong section": ([NEW, "--config.train.depth=4"], ["'train.depth'", "did you mean 'model.depth'"]),
    "unknown section": ([NEW, "--config.modle.depth=4"], ["'modle.depth'", "model.depth"]),
    "a section": ([NEW, "--config.model=4"], ["'model' is a section"]),
    "unknown scheme": ([NEW, "--config.residual.name=preln"], ["residual.name is 'preln'", "did you mean 'pre_ln'"]),
    "no depth": ([NEW, "--config.model.depth=0"], ["model.depth is 0", "1 or above"]),
    "half a block": ([NEW, "--config.model.depth=3.5"], ["model.depth is 3.5", "whole number"]),
    "heads": ([NEW, "--config.model.heads=3"], ["model.width is 8", "model.heads=3"]),
    "long sequence": ([NEW, "--config.data.length=9000000"], ["data.length is 9000000", "at most 8,388,607"]),
    "short text": ([NEW, "--config.data.source=files:short.txt"], ["data.length is 16", "short.txt"]),
    "missing text": ([NEW, "--config.data.source=files:none.txt"], ["none.txt", "does not exist"]),
    "empty text": ([NEW, "--config.data.source=files:empty.txt"], ["empty.txt", "is empty"]),
    "unknown source": ([NEW, "--config.data.source=stdlb"], ["'stdlb'", "did you mean 'stdlib'"]),
    "absent set": ([NEW, "--config.data.source=tfds:nothing_like_it"], ["'nothing_like_it'", "no prepared set"]),
    "below a file": (["--workdir=empty.txt/new"], ["'empty.txt/new'", "cannot be"]),
    "no such place": (["--workdir=/proc/new"], ["'/proc/new'", "cannot be written"]),
    "a file": (["--workdir=empty.txt"], ["'empty.txt'", "which is a file"]),
    "other files": (["--workdir=other"], ["'other'", "holds other files"]),
    "long name": (["--workdir=" + "x" * 300], ["xxx", "too long"]),
    "remote": (["--workdir=gs://bucket/new"], ["gs://bucket/new", "no local folder"]),
    "empty folder name": (["--workdir="], ["--workdir is empty"]),
    "two optimizers": (
        [NEW, "--config.optimizer.name=sgd", "--config.optimizer.b1=0.9"],
        ["optimizer.b1 is 0.9", "optimizer.name is 'sgd'"],
    ),
    "long warm-up": ([NEW, "--config.optimizer.warmup=99"], ["optimizer.warmup is 99", "train.steps"]),
    "accumulation": ([NEW, "--config.train.accumulate=3"], ["data.batch is 4", "train.accumulate=3"]),
    "devices": ([NEW, "--config.mesh.data=2"], ["mesh.data is 2", "1 device is visible"]),
    "vocabulary": ([NEW, "--config.model.vocab=8"], ["model.vocab is 8", "32 tokens"]),
    "evaluate a fork": ([NEW, "--evaluate", "--from=x"], ["--evaluate", "--from"]),
    "evaluate and profile": ([NEW, "--evaluate", "--profile"], ["--evaluate", "--profile"]),
    "evaluate nothing": ([NEW, "--evaluate"], ["'new'", "holds no run"]),
    "no origin": ([NEW, "--from=nowhere"], ["'nowhere'", "holds no run"]),
    "no value": ([NEW, "--config.model.depth"], ["--config.model.depth has no value"]),
    "no folder": (["--workdir"], ["--workdir", "expected one argument"]),
    "unknown option": ([NEW, "--worker=3"], ["'--worker=3'", "did you mean --workdir=3"]),
    "forgotten prefix": ([NEW, "--model.depth=3"], ["did you mean --config.model.depth=3"]),
    "forgotten option": (["configs/smoke.py"], ["did you mean --config=configs/smoke.py"]),
    "a rule that branches": ([NEW, "--config.residual.name=schemes.py:BRANCHES"], ["scale", "jnp.where"]),
    "a rule that fails": ([NEW, "--config.residual.name=schemes.py:FAILS"], ["scale", "ZeroDivisionError"]),
    "a rule without a number": ([NEW, "--config.residual.name=schemes.py:WORDS"], ["scale", "'x'"]),
    "no such scheme": ([NEW, "--config.residual.name=schemes.py:PREE"], ["schemes.py:PREE", "schemes.py:PRE"]),
    "no scheme's file": ([NEW, "--config.residual.name=none.py:A"], ["none.py"]),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with things to stumble over; nothing may be added to it."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "schemes.py").write_text(SCHEMES)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESJAX_DATA_DIR", str(tmp_path.parent / "data"))
    return tmp_path


def contents(folder):
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_one_sentence(case, config, place, capfd):
    """On standard error, with exit code 2; nothing is left behind."""
    arguments, said = BAD[case]
    before = contents(place)
    assert main.main([f"--config={config}", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("resjax: ") and err.count("\n") == 1
    assert all(word in err for word in said), err
    assert contents(place) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["--config is missing"]),
        (["--config=none.py"], ["'none.py' does not exist"]),
        (["--config=other"], ["'other' is a folder"]),
        (["--config=short.txt"], ["short.txt", "'hello' is not defined"]),
        (["--config=schemes.py"], ["schemes.py", "get_config"]),
        (["--config={config}:large"], ["has no variant 'large'"]),
        (["--config={config}", "--config.seed=-1"], ["seed is -1"]),
    ],
)
def test_a_bad_configuration_is_one_sentence(arguments, said, config, place, capfd):
    before = contents(place)
    assert main.main([one.format(config=config) for one in arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("resjax: ") and err.count("\n") == 1 and all(word in err for word in said), err
    assert contents(place) == before


def test_a_refusal_of_the_command_itself(config, place):
    """In its own process: exit code, the two streams, no folder at the default place either."""
    answer = runs.command(f"--config={config}", "--config.model.detph=4", script=runs.REAL)
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "did you mean 'model.depth'" in answer.stderr
    assert not (place / "runs").exists()


def test_without_a_device_the_reason_is_told(config, place):
    answer = runs.command(f"--config={config}", NEW, environ=runs.environment(JAX_PLATFORMS="abacus"))
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1 and "abacus" in answer.stderr


def test_an_unexpected_error_is_not_hidden(config, tmp_path, monkeypatch):
    from resjax.train import session

    def fails(*arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(session, "compile_programs", fails)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        run(config, tmp_path / "run")


# ------------------------------------------------------------------ folders and options


def test_without_a_folder_the_name_says_what_runs(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main([f"--config={config}", "--config.train.steps=6"]) == 0
    assert summary(tmp_path / "runs" / "calm,steps=6")["steps"] == 6


def test_home_is_understood(config, done, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(done.parent))
    monkeypatch.chdir(tmp_path)
    assert run(config, "~/run", train__steps=6) == 0
    assert "is finished" in capfd.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 9])
def test_a_profile_is_written(count, config, tmp_path, capfd):
    """Also of a run that ends before the profiler would begin."""
    assert run(config, tmp_path / "run", "--profile", train__steps=count) == 0
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert re.search(r"profile of steps \d to \d", capfd.readouterr().out)


def test_a_report_on_request(config, tmp_path, capfd):
    """SIGUSR1: the table and report.html, while the run goes on."""
    folder, seen = tmp_path / "run", []
    with (
        runs.at_batch(9, lambda: seen.append((folder / "report.html").exists())),
        runs.at_batch(8, lambda: os.kill(os.getpid(), signal.SIGUSR1)),
    ):
        assert run(config, folder, train__steps=10) == 0
    assert seen == [True]
    out = capfd.readouterr().out
    assert out.count("Residual health: pre_ln, 2 blocks, 3 recorded steps from 1 to 6") == 1
    assert out.count("Residual health: pre_ln, 2 blocks, 5 recorded steps from 1 to 10") == 1
    assert out.count("report: ") == 2


# ------------------------------------------------------------------ what a person sees


def on_a_terminal(arguments, send=None):
    """What the command writes to a terminal, and its exit code; a signal is sent when the bar shows."""
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *runs.COMMAND, *map(str, arguments)],
        env=runs.environment(TERM="xterm-256color", COLUMNS="160", LINES="50"),
        stdin=other,
        stdout=other,
        stderr=other,
    )
    os.close(other)
    written = b""
    while True:
        try:
            more = os.read(terminal, 1 << 16)
        except OSError:  # the end of a terminal on Linux
            break
        if not more:
            break
        written += more
        if send and b"training" in written:
            process.send_signal(send)
            send = None
    os.close(terminal)
    return written.decode(), process.wait()


def test_a_bar_on_a_terminal(config, tmp_path):
    text, code = on_a_terminal(words(config, tmp_path / "run", train__steps=150), send=signal.SIGUSR1)
    assert code == 0
    assert "training" in text and "━" in text and "tokens/s" in text and "150/150" in text
    assert not re.search(r"step \d+/150 ", text)
    assert text.count("Residual health") == 2 and "report: " in text
    bar, after = text.rsplit("150/150", 1)
    assert "\x1b[?25l" in bar and "\x1b[?25h" in after  # the cursor is back
    assert re.search(r"step 150: held-out loss", text) and "done: 150 steps" in after


def test_plain_lines_elsewhere(config, tmp_path, capfd):
    assert run(config, tmp_path / "run", train__steps=6) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out and "\r" not in out and err == ""
    for line in (
        r"data: markov: .*",
        r"baselines \(nats per token on the held-out text\): uniform 3\.466, .*",
        r"model: 2 blocks x width 8, .*",
        r"starting in .*",
        r"compiled in \d+ s; .*",
        r"step 1/6  loss \d\.\d{4}  [\d,]+ tokens/s  lr .*",
        r"step 6/6  .* 0 s left",
        r"step 6: held-out loss \d\.\d{4}, \d\.\d{3} above the bigram baseline",
        r"done: 6 steps, .*",
    ):
        assert re.search(f"^{line}$", out, re.M), line


OFFLINE = """
import socket, sys
def blocked(*arguments, **options):
    raise AssertionError(f"a look at the network: {arguments}")
connect = socket.socket.connect
def local(self, address):
    return blocked(address) if self.family in (socket.AF_INET, socket.AF_INET6) else connect(self, address)
socket.socket.connect = socket.socket.connect_ex = local
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = blocked
from resjax.main import main
code = main()
print("loaded", [name for name in ("tensorflow", "torch", "clu", "tensorboard") if name in sys.modules])
sys.exit(code)
"""


def test_nothing_leaves_the_machine(config, tmp_path):
    """Nor are TensorFlow or PyTorch loaded, here with a text that goes through TFDS and Grain (A37, A38)."""
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    fields = {"data__source": f"files:{text}", "train__steps": 3}
    folder = tmp_path / "Lauf für mich"  # and a terminal that cannot show that name
    variables = {"RESJAX_DATA_DIR": str(tmp_path / "data"), "PYTHONIOENCODING": "ascii"}
    answer = python(OFFLINE, *words(config, folder, **fields), **variables)
    assert answer.returncode == 0, answer.stderr
    assert "loaded []" in answer.stdout and answer.stderr == ""
    assert summary(folder)["steps"] == 3


@pytest.mark.slow
def test_a_run_of_the_command_itself_is_quiet_on_standard_error(tmp_path):
    """As a newcomer types it, with the configuration that is there for this."""
    fields = ["--config=configs/smoke.py", f"--workdir={tmp_path / 'run'}", "--config.train.steps=3"]
    answer = subprocess.run(
        [sys.executable, "-m", "resjax.main", *fields, "--config.data.source=markov"],
        env=runs.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0 and answer.stderr == "" and "done: 3 steps" in answer.stdout


# ------------------------------------------------------------------ numbers


def test_accumulation_changes_no_number(config, tmp_path):
    """But by rounding: the same losses and gradient norms."""
    for parts in (1, 2):
        assert run(config, tmp_path / str(parts), train__accumulate=parts, train__steps=6) == 0
    for name in ("loss", "grad_norm"):
        one, two = ([row[name] for row in rows(tmp_path / parts)] for parts in "12")
        np.testing.assert_allclose(one, two, rtol=1e-6 if name == "loss" else 1e-5)


def test_compiling_takes_no_longer_for_a_deep_model(config):
    """A scan compiles one block, whatever the depth (A34); in seconds of this process, since others may be busy."""
    from resjax.config.load import load
    from resjax.config.validate import resolve
    from resjax.train.assemble import assemble

    seconds = {}
    for depth in (4, 64):
        parts = assemble(resolve(load(str(config), [("model.depth", str(depth)), ("data.batch", "2")]), "cpu"), 32)
        began = time.process_time()
        compile_programs(parts, parts.abstract)
        seconds[depth] = time.process_time() - began
    assert seconds[64] < 2 * seconds[4], seconds


DEVICES = """
import json, sys, pathlib
import command
import jax
from jax.experimental import multihost_utils
from resjax.config.load import load
from resjax.config.validate import resolve
from resjax.main import main
from resjax.train import loop
from resjax.train.assemble import assemble
from resjax.train.leaves import tree_hash
from resjax.train.program import compile_programs
config, place = sys.argv[1:]
def parts(**fields):
    pairs = [("data.batch", "16"), ("train.steps", "6"), *((name.replace("__", "."), str(value)) for name, value in fields.items())]
    return assemble(resolve(load(config, pairs), "cpu"), 32)
def words(name, **fields):
    return [f"--config={config}", f"--workdir={place}/{name}", "--config.data.batch=16", "--config.train.steps=6",
            *(f"--config.{field.replace('__', '.')}={value}" for field, value in fields.items())]
def flops(**fields):
    made = parts(**fields)
    return compile_programs(made, made.abstract).step.cost_analysis()["flops"]
initial = parts().initial()
found = {
    "devices": jax.device_count(),
    "hash": tree_hash(initial.params),
    "codes": [main(words("eight")), main(words("two", mesh__data=2)), main(words("slices", train__accumulate=2)),
              main(words("odd", data__batch=12))],
    "share": flops() / flops(mesh__data=1),
    "share of slices": flops(train__accumulate=2) / flops(mesh__data=1, train__accumulate=2),
}
# the way back after a non-finite value puts the state on all devices again
rolled = []
original = loop.Loop._consume
def consume(self, pending):
    bad = original(self, pending)
    if pending.number == 3 and not rolled:
        rolled.append(3)
        return True
    return bad
loop.Loop._consume = consume
found["codes"].append(main(words("rolled", train__on_nonfinite="rollback")))
pathlib.Path(place, "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def eight(config, tmp_path_factory):
    """Runs on eight devices, and what was found there."""
    place = tmp_path_factory.mktemp("devices")
    answer = python(DEVICES, config, place, flags="--xla_force_host_platform_device_count=8")
    assert (place / "found.json").exists(), answer.stderr
    return place, json.loads((place / "found.json").read_text()), answer


def test_eight_devices(eight, config, tmp_path):
    """The same start, the same losses to rounding, each device with its share of the work (A42)."""
    from resjax.config.load import load
    from resjax.config.validate import resolve
    from resjax.train.assemble import assemble
    from resjax.train.leaves import tree_hash

    place, found, answer = eight
    assert found["devices"] == 8 and found["codes"] == [0, 0, 0, 2, 0], answer.stderr
    here = assemble(resolve(load(str(config), [("data.batch", "16")]), "cpu"), 32).initial()
    assert tree_hash(here.params) == found["hash"]
    with pytest.MonkeyPatch.context() as patch:
        from resjax.data import markov

        patch.setattr(markov, "TRAIN_SYMBOLS", 1 << 16)
        patch.setattr(markov, "HELD_OUT_SYMBOLS", 1 << 14)
        patch.setattr("resjax.data._markov", runs.data._markov.args[0])
        assert run(config, tmp_path / "one", data__batch=16, train__steps=6) == 0
    one = [row["loss"] for row in rows(tmp_path / "one")]
    for name in ("eight", "two", "slices"):
        np.testing.assert_allclose([row["loss"] for row in rows(place / name)], one, rtol=1e-5)
    assert found["share"] < 0.2 and found["share of slices"] < 0.2
    assert json.loads((place / "eight" / "config.json").read_text())["device"]["count"] == 8
    assert "8 cpu devices" in answer.stdout and "2 cpu devices" in answer.stdout


def test_a_batch_that_devices_cannot_share_is_refused(eight):
    place, _, answer = eight
    said = [line for line in answer.stderr.splitlines() if line.startswith("resjax: ")]
    assert len(said) == 1 and "8 devices" in said[0] and "12" in said[0]
    assert not (place / "odd").exists()


def test_looking_changes_nothing(config, done, capfd):
    """The same command, an evaluation, a refusal: a finished folder stays as it is, to the byte and the minute."""
    before = files(done)
    assert run(config, done, train__steps=6) == 0
    assert run(config, done, "--evaluate", train__steps=6) == 0
    assert run(config, done, train__steps=7) == 2
    assert files(done) == before
    assert Path(done / "config.json").is_file()
