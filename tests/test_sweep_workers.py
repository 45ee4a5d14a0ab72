"""Do workers of Ray give the numbers of one process, with few compilations, and does a killed one take its cell alone with it?"""

import os
import pickle
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace

import pytest

import runs
from resjax import sweep
from resjax.config.load import from_file
from resjax.errors import Refused
from resjax.sweeps.crew import Crew, Remote, choose
from resjax.sweeps.sent import Sent
from resjax.sweeps.texts import Known
from resjax.sweeps.wanted import from_config
from resjax.train.writers import parse
from runs import ROOT

LR_AND_DEPTH = ("--no-figures", "--grid", "model.depth=1,2", "--grid", "optimizer.lr=1e-3,1e-2")


@pytest.fixture(scope="module")
def environ():
    pytest.importorskip("ray")
    return runs.environment()


def started(config, folder, environ, *options, **fields):
    words = runs.words(
        config, folder, *LR_AND_DEPTH, *options, **({"train__steps": 6, "health__groups": "none"} | fields)
    )
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "sweep_command.py"), *words],
        env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lines(folder):
    path = folder / "results.jsonl"
    return [parse(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(folder):
    found = {}
    for row in lines(folder):
        found[row["cell"]] = {name: row[name] for name in row if name not in ("seconds", "compile_seconds")}
    return found


def trained(folder, environ, config, *options):
    process = started(config, folder, environ, *options)
    out = process.communicate(timeout=280)[0]
    assert process.returncode == 0, out
    return out


@pytest.mark.slow
def test_workers_give_the_numbers_of_one_process_and_go_on(calm, tmp_path, environ):
    trained(tmp_path / "alone", environ, calm)
    out = trained(tmp_path / "sweep", environ, calm, "--workers=2")
    assert numbers(tmp_path / "sweep") == numbers(tmp_path / "alone") and len(lines(tmp_path / "sweep")) == 4
    assert out.count("held-out loss") == 4 and sorted(os.listdir(tmp_path / "sweep")) == ["results.jsonl"]
    assert "4 done" in trained(tmp_path / "sweep", environ, calm, "--workers=2"), "nothing is trained again"
    compiled = [row for row in lines(tmp_path / "sweep") if row["compile_seconds"]]
    assert len(compiled) == 2, "each worker had one architecture"


KEEP = """
import numpy as np

def look(subject, before):
    embed = np.asarray(subject.model.embed[...])
    return {"moved": None if before is None else float(np.abs(embed - before).max()), "_memory": embed}

def keep():
    return {"studies": ("update",), "looks": {"steps": (2, "end"), "look": look}}
"""


@pytest.fixture
def looking(calm, tmp_path):
    path = tmp_path / "looking.py"
    path.write_text(calm.read_text() + KEEP)
    return path


@pytest.mark.slow
def test_workers_look_and_study_as_one_process_does(looking, tmp_path, environ):
    trained(tmp_path / "alone", environ, looking, "--curves")
    trained(tmp_path / "sweep", environ, looking, "--workers=2", "--curves")
    rows = numbers(tmp_path / "sweep")
    assert rows == numbers(tmp_path / "alone") and len(rows) == 4
    for row in rows.values():
        assert row["look"] == "look" and list(row["looks"]) == ["2", "6"] and row["looks"]["6"]["moved"] > 0
        assert row["studies"]["update"]["change"] > 0


def test_what_is_wanted_reaches_another_process(looking):
    """A look by the file that it is in, and only as long as that is the same; all else as it is."""
    asked = from_config(from_file(str(looking), "keep"), str(looking)).more(True, "1,end", "lens")
    sent = pickle.loads(pickle.dumps(Sent.of(asked, os.path.relpath(looking))))
    got = sent.opened()
    assert got.looks.name == "look" and got.looks.steps == (0, 2) and got.looks.look is not asked.looks.look
    assert replace(got, looks=None) == replace(asked, looks=None) == sent.rest
    rest = pickle.loads(pickle.dumps(Sent.of(sent.rest, str(looking))))
    looking.write_text(looking.read_text() + "# more\n")
    assert rest.opened() == sent.rest, "where nothing is looked at, the file is not read"
    with pytest.raises(Refused, match="is another one there, or has changed since the sweep began"):
        sent.opened()
    looking.unlink()
    row = Remote(sent, Known()).train(None, None)
    assert row["status"] == "failed" and "does not exist" in row["error"]
    with pytest.raises(Refused, match="does not exist"):
        Crew(OfOneProcess(), 1, sent, Known())


class OfOneProcess:
    """As much of Ray as hires an actor and asks it, here."""

    def cluster_resources(self):
        return {}

    def remote(self, made):
        def hire(*given):
            actor = made(*given)
            return types.SimpleNamespace(facts=types.SimpleNamespace(remote=actor.facts))

        return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=hire))

    def get(self, value):
        return value


def until(found, process, seconds=240):
    """What ``found()`` gives, once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return value


@pytest.mark.slow
def test_a_killed_worker_takes_one_cell_with_it_which_the_same_command_trains(calm, tmp_path, environ):
    folder, place = tmp_path / "sweep", tmp_path / "who"
    process = started(calm, folder, environ | {"BEGUN": str(place), "HOLD": "2"}, "--workers=2")
    began = until(lambda: place.exists() and [line.split() for line in place.read_text().splitlines()], process)
    os.kill(int(began[0][0]), signal.SIGKILL)
    out = process.communicate(timeout=280)[0]
    assert process.returncode == 1, out
    ends = {row["cell"]: row["status"] for row in lines(folder)}
    assert sorted(ends.values()) == ["done", "done", "done", "killed"] and ends[began[0][1]] == "killed", out
    trained(folder, environ, calm, "--workers=2")
    assert [row["status"] for row in lines(folder)].count("done") == 4 == len(numbers(folder))


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_workers(calm, tmp_path, environ, number, code):
    folder, place = tmp_path / "sweep", tmp_path / "who"
    process = started(calm, folder, environ | {"BEGUN": str(place), "HOLD": "2"}, "--workers=2")
    until(lambda: lines(folder), process)
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == code, out
    assert "of 4 cells finished; the same command goes on" in out and "Traceback" not in out
    assert sorted(os.listdir(folder)) == ["results.jsonl"]
    deadline = time.monotonic() + 30
    while any(alive(int(line.split()[0])) for line in place.read_text().splitlines()):
        assert time.monotonic() < deadline, "a worker goes on without its sweep"
        time.sleep(0.05)


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:port"])
def test_a_cluster_that_is_not_there_is_refused(calm, tmp_path, capsys, monkeypatch, address):
    """At once, before Ray tries for minutes."""
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace())
    assert sweep.main(runs.words(calm, tmp_path / "sweep", *LR_AND_DEPTH, f"--ray={address}")) == 2
    captured = capsys.readouterr()
    assert f"--ray is '{address}', where no cluster answers" in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_a_machine_on_which_ray_does_not_start_is_told(calm, tmp_path, capsys, monkeypatch):
    """By the flag that was given; nothing is wrong with it, so that it is no bad input."""

    def init(*_, **__):
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    assert sweep.main(runs.words(calm, tmp_path / "sweep", *LR_AND_DEPTH, "--workers=2")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "resjax: Ray does not start on this machine for --workers=2 (The current node timed out"
    )
    assert captured.err.count("\n") == 1 and not captured.out and not (tmp_path / "sweep").exists()


COST = {"short": 1.0, "long": 10.0, "long too": 10.0}


@pytest.mark.parametrize(
    "own, left, held, expected",
    [
        (None, {"short": 9, "long": 3}, set(), "long"),
        (None, {"short": 9, "long": 3}, {"long"}, "short"),
        ("short", {"short": 1, "long": 3}, {"short"}, "short"),
        ("short", {"short": 0, "long": 3}, {"short", "long"}, "long"),
        ("short", {"short": 0, "long": 0}, {"short", "long"}, None),
        ("long", {"short": 7, "long": 0}, {"short", "long"}, None),
        ("long", {"short": 9, "long": 0}, {"short", "long"}, "short"),
    ],
)
def test_which_architecture_a_worker_goes_on_with(own, left, held, expected):
    """Its own first; then one that nobody has; then help with one that takes longer than the 8 seconds of compiling."""
    cells = {name: list(range(count)) for name, count in left.items()}
    assert choose(own, cells, held, COST, dict.fromkeys(COST, 8.0)) == expected


@pytest.mark.parametrize(
    "options, sentence",
    [
        *(
            ((f"--workers={given}",), f"--workers is '{given}'; it must be a whole number from 1")
            for given in ("0", "-1", "abc", "1.5", "")
        ),
        (("--together=x",), "--together is 'x'; it must be a whole number from 1"),
        (("--workers=2", "--together=2"), "--together and --workers contradict one another"),
        (("--ray=auto", "--together=2"), "--together and --ray contradict one another"),
        (("--measure",), "--measure goes with --dry-run"),
    ],
)
def test_bad_input(calm, tmp_path, capsys, options, sentence):
    assert sweep.main(runs.words(calm, tmp_path / "sweep", *LR_AND_DEPTH, *options)) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_without_ray_its_extra_is_named(calm, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert sweep.main(runs.words(calm, tmp_path / "sweep", *LR_AND_DEPTH, "--workers=2")) == 2
    assert "pip install 'resjax[sweep]'" in capsys.readouterr().err and not (tmp_path / "sweep").exists()
