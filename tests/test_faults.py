"""What is left of a run after a kill, a signal, a full disk, a non-finite value?"""

import itertools
import os
import random
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from resjax.models import lm
from resjax.train import assemble, checkpoint, step
from resjax.train.signals import Signals
from resjax.train.writers import read_json
from runs import arrays, rows, run, start, state_hash, steps, stopped, summary, until, words

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def calm_run(calm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert run(calm, folder) == 0
    return folder


def losses(folder):
    return [row["loss"] for row in rows(folder)]


def finite(folder, number):
    return all(np.isfinite(array).all() for array in arrays(folder, number).values() if array.dtype.kind == "f")


# ------------------------------------------------------------------ kill -9

KILLED = {"train__save_every": 1, "train__keep": 2, "train__eval_every": 20, "health__every": 10}


def killed(config, folder, kills, count):
    """A run that is killed at random moments after it began to train, and goes on each time to its end."""
    rng = random.Random(kills)
    for _ in range(kills):
        process = start(*words(config, folder, train__steps=count, **KILLED))
        lines = until(process, "compiled in")
        begun = next(line for line in lines if "ing in" in line)
        time.sleep(rng.uniform(0.0, 1.2))
        process.kill()
        rest = process.communicate()[0]
        assert "Traceback" not in rest
        if process.returncode == 0:  # it was done before the kill
            continue
        assert process.returncode == -signal.SIGKILL
        yield begun, max(steps(folder), default=0) if (folder / "checkpoints").exists() else 0
    done = runs.command(*words(config, folder, train__steps=count, **KILLED))
    assert done.returncode == 0, done.stderr
    yield next((line for line in done.stdout.splitlines() if "ing in" in line), ""), None


def kill_and_compare(config, place, kills, count):
    folder, unkilled, committed = place / "run", place / "unkilled", 0
    done = runs.command(*words(config, unkilled, train__steps=count, **KILLED))
    assert done.returncode == 0, done.stderr
    for begun, newest in killed(config, folder, kills, count):
        # at most the steps since the last committed save are lost
        assert f"from step {committed}" in begun if committed else "starting" in begun or not begun, (begun, committed)
        committed = newest
    assert summary(folder)["param_hash"] == summary(unkilled)["param_hash"]
    assert state_hash(folder, count) == state_hash(unkilled, count)
    assert rows(folder) == rows(unkilled) and rows(folder, "eval_loss") == rows(unkilled, "eval_loss")
    assert runs.same(runs.health(folder), runs.health(unkilled))
    assert not list(folder.glob(".*.tmp")) and not list(folder.glob("*/*.tmp*"))


def test_three_kills(calm, tmp_path):
    kill_and_compare(calm, tmp_path, 3, 24)


@pytest.mark.slow
def test_thirty_kills(config, tmp_path):
    kill_and_compare(config, tmp_path, 30, 300)


def test_leftovers_of_a_kill_before_the_first_file_are_no_other_files(calm, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.json.123.tmp").write_text('{"see')
    assert run(calm, folder) == 0
    assert not list(folder.glob(".*.tmp"))


# ------------------------------------------------------------------ signals


def at_held_out(monkeypatch, number, act):
    """``act`` when held-out batch ``number`` (from 1) of this session is drawn: in the middle of an evaluation."""
    from resjax.data import Pipeline

    original, seen = Pipeline.held_out, []

    def held_out(self, i):
        seen.append(i)
        if len(seen) == number:
            act()
        return original(self, i)

    monkeypatch.setattr(Pipeline, "held_out", held_out)


def in_save(monkeypatch, number, act):
    """``act`` in the middle of save ``number`` (from 1) of this session."""
    original, seen = checkpoint.Checkpoints._write, []

    def write(self, *arguments):
        seen.append(arguments[0])
        if len(seen) == number:
            act()
            time.sleep(0.3)
        original(self, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoints, "_write", write)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run(config, folder) == 0
    return folder


@pytest.mark.parametrize(
    ("phase", "number"),
    [("training", signal.SIGINT), ("evaluating", signal.SIGTERM), ("saving", signal.SIGTERM)],
)
def test_a_signal_in_each_phase(phase, number, config, uninterrupted, tmp_path, monkeypatch, capfd):
    """Saved at the last finished step, in bounded time, and what was cut off is made up for (A24 b to d)."""
    folder, sent = tmp_path / "run", []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        if phase == "training":
            code = stopped(config, folder, 7, number=number)
        else:
            (at_held_out if phase == "evaluating" else in_save)(patch, 4 if phase == "evaluating" else 2, send)
            code = run(config, folder)
            assert time.monotonic() - sent[0] < 30
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    newest = steps(folder)[-1]
    if phase == "training":
        assert newest == 7
    else:  # at the boundary itself, or some steps after the save began
        assert newest == 10 if phase == "evaluating" else newest >= 10
    assert finite(folder, newest)
    out, err = capfd.readouterr()
    assert f"stopped by {number.name}: saved at step {newest}" in out and number.name in err
    assert run(config, folder) == 0
    assert rows(folder) == rows(uninterrupted) and rows(folder, "eval_loss") == rows(uninterrupted, "eval_loss")
    assert state_hash(folder, 20) == state_hash(uninterrupted, 20)


def test_a_signal_to_a_process_that_trains(calm, tmp_path):
    folder = tmp_path / "run"
    process = start(*words(calm, folder, train__steps=100000, optimizer__warmup=0))
    until(process, "step 1/")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "stopped by SIGINT" in out and "Traceback" not in out
    newest = steps(folder)[-1]
    assert f"saved at step {newest}" in out and rows(folder)[-1]["step"] == newest and finite(folder, newest)


LOADING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "jaxlib.xla_client":
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from resjax.main import main
sys.exit(main())
"""


def test_an_interrupt_while_modules_load_ends_the_process(calm, tmp_path):
    """An exception in the middle of an import would be swallowed there, or come out as another one."""
    done = runs.command(*words(calm, tmp_path / "run"), script=("-c", LOADING))
    assert done.returncode == 130 and done.stdout == "" and done.stderr == ""
    assert not (tmp_path / "run").exists()


COMPILING = """
import ctypes, sys, command
from resjax.main import main
from resjax.train import session
original = session.compile_programs
def compiles(parts, state):
    print("compiling", flush=True)
    ctypes.CDLL(None).usleep(int(sys.argv[1]))  # as in a compiler: no Python code runs meanwhile
    return original(parts, state)
session.compile_programs = compiles
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_a_process_at_once(number, code, calm, tmp_path):
    """Also one that compiles, where Python runs no handlers; it has written no state (A24 a)."""
    script = ("-c", COMPILING, "60000000")
    process = start(*words(calm, tmp_path / "run"), script=script, cwd=runs.ROOT / "tests")
    until(process, "compiling")
    process.send_signal(number)
    assert number.name in until(process, "resjax: ")[-1]
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=5)
    assert process.returncode == code
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_signal_to_a_process_that_compiles(calm, tmp_path):
    """It is heeded when the compiler returns, and no false step is written (A24 a)."""
    script = ("-c", COMPILING, "1000000")
    process = start(*words(calm, tmp_path / "run"), script=script, cwd=runs.ROOT / "tests")
    until(process, "compiling")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped before step 1" in out and "Traceback" not in out
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_lost_terminal_is_a_stop_but_not_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.stop == signal.SIGHUP and signals.exit_code == 129
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stop is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_left_alone_outside_of_the_main_thread():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def inside():
        with Signals() as signals:
            seen.append((signals.stop, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# ------------------------------------------------------------------ a full disk


@pytest.mark.parametrize("what", ["saves", "rows", "rows and saves"])
def test_a_full_disk(what, config, uninterrupted, small_disk, capfd):
    """One sentence, exit code 1, what was saved before is whole; with space again the run goes on as if nothing had been."""
    place, enlarge = small_disk
    folder = place / "run"
    if what == "saves":
        assert run(config, folder, train__save_every=1, train__keep=100) == 1
    else:
        with runs.at_batch(14, lambda: runs.fill(place, 4096 * (what == "rows"))):
            assert run(config, folder, **({"train__save_every": 0} if what == "rows" else {})) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "No space left on device" in err and "intact" in err
    assert not (folder / "summary.json").exists()
    for number in steps(folder) if (folder / "checkpoints").exists() else []:
        assert finite(folder, number)
    for row in rows(folder):
        assert np.isfinite(row["loss"])
    newest = max(steps(folder), default=0) if (folder / "checkpoints").exists() else 0
    assert newest in {"rows": [0], "rows and saves": [5, 10], "saves": range(3, 20)}[what]
    enlarge()
    capfd.readouterr()
    assert run(config, folder) == 0
    assert (f"from step {newest}" if newest else "starting in") in capfd.readouterr().out
    assert rows(folder) == rows(uninterrupted)
    assert state_hash(folder, 20) == state_hash(uninterrupted, 20)


def test_a_failed_save_is_told_when_it_fails(calm, tmp_path, monkeypatch, capfd):
    """Not at the next save, which may be hours later; also where nothing can be mounted."""
    original = checkpoint.Checkpoints._write

    def write(self, number, *arguments):
        if number == 5:
            raise OSError(28, os.strerror(28), str(self.folder))
        original(self, number, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoints, "_write", write)
    folder = tmp_path / "run"
    fields = {"train__save_every": 5, "train__steps": 5000, "train__eval_every": 0}
    assert run(calm, folder, **fields) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "No space left on device" in err
    assert rows(folder)[-1]["step"] < 10


# ------------------------------------------------------------------ non-finite values

BAD = """
import jax.numpy as jnp
from resjax.residual import CATALOGUE

def from_step(first, last=None, block=1):
    def rule(site):
        at = (site.step >= first) & (site.step <= (first if last is None else last)) & (site.block == block)
        return jnp.where(at, jnp.nan, 1.0)
    return rule

ONCE = CATALOGUE["pre_ln"].but(name="once", scale=from_step(6))
ON = CATALOGUE["pre_ln"].but(name="on", scale=from_step(6, 10**6))
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    path = tmp_path_factory.mktemp("schemes") / "bad.py"
    path.write_text(BAD)
    return path


@pytest.fixture
def anew():
    with runs.compiled_anew():
        yield


def plant(monkeypatch, *numbers):
    """The loss is NaN on these training batches (from 0) of the calm configuration, by what they hold."""
    from resjax import data

    pipeline = data.Pipeline(data.load("markov"), 16, 4, 0)
    marks = [pipeline.batch(number)[0, 1:] for number in numbers]
    original = lm.loss

    def poisoned(logits, targets):
        hit = jnp.stack([jnp.any(jnp.all(targets == mark, axis=1)) for mark in marks]).any()
        return jnp.where(hit, jnp.nan, original(logits, targets))

    monkeypatch.setattr(lm, "loss", poisoned)


def test_by_default_a_run_stops_at_a_non_finite_value(calm, bad, tmp_path, capfd):
    """Exit code 4, the step and the place, the state before it; never a state with NaN (A26)."""
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ONCE") == 4
    out = capfd.readouterr().out
    assert "stopped at step 7: the loss or the gradient is not finite" in out
    assert "forward pass, block 1, attention" in out and "the state of step 6 is saved" in out
    assert steps(folder) == [5, 6] and finite(folder, 6)
    last = rows(folder)[-1]
    assert last["step"] == 7 and np.isnan(last["loss"]) and last["update_applied"] is False
    assert runs.health(folder)["steps"].tolist() == [1, 3, 6, 7]
    made = summary(folder)
    assert made["status"] == "nonfinite" and made["steps"] == 6
    assert made["nonfinite"]["step"] == 7 and "block 1" in made["nonfinite"]["where"]
    assert made["health"]["verdict"] == "findings"
    # the same command meets it again; another scheme goes on from the state
    assert run(calm, folder, residual__name=f"{bad}:ONCE") == 4
    assert steps(folder) == [5, 6] and [row["step"] for row in rows(folder)] == list(range(1, 8))
    assert run(calm, tmp_path / "fork", f"--from={folder}") == 0
    assert summary(tmp_path / "fork")["steps"] == 20


def test_a_learning_rate_that_explodes_stops_the_run(calm, tmp_path, capfd):
    folder = tmp_path / "run"
    fields = {
        "optimizer__lr": 1e30,
        "optimizer__warmup": 0,
        "residual__norm_in": "none",
        "residual__final_norm": "none",
    }
    assert run(calm, folder, **fields) == 4
    assert "the first non-finite value is in the" in capfd.readouterr().out
    assert finite(folder, steps(folder)[-1])


def test_skip_passes_over_a_step(anew, calm, calm_run, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run"
    plant(monkeypatch, 6)
    assert run(calm, folder, train__on_nonfinite="skip", train__save_every=1) == 0
    there = rows(folder)
    assert [row["step"] for row in there] == list(range(1, 21))
    assert [row["step"] for row in there if row.get("update_applied") is False] == [7]
    assert np.isnan(there[6]["loss"]) and losses(folder)[:6] == pytest.approx(losses(calm_run)[:6])
    before, after = arrays(folder, 6), arrays(folder, 7)
    moved = [path for path in before if not np.array_equal(before[path], after[path])]
    assert sorted(moved) == ["cursor", "skipped", "step"]
    assert int(arrays(folder, 8)["skipped"]) == 0
    assert all(finite(folder, number) for number in steps(folder)) and summary(folder)["status"] == "finished"


def test_skip_has_an_end(calm, bad, tmp_path, capfd):
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ON", train__on_nonfinite="skip", train__eval_every=0) == 4
    out = capfd.readouterr().out
    assert "stopped at step 17" in out and "10 steps in a row were passed over" in out
    assert finite(folder, steps(folder)[-1])


def test_roll_back_goes_on_with_other_batches(anew, calm, calm_run, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run"
    plant(monkeypatch, 7)
    with runs.recorded_batches() as batches:
        assert run(calm, folder, train__on_nonfinite="rollback") == 0
    assert "step 8: non-finite value; back to step 5" in capfd.readouterr().out
    assert [row["step"] for row in rows(folder)] == list(range(1, 21))
    assert losses(folder)[:5] == pytest.approx(losses(calm_run)[:5]) and losses(folder)[5] != losses(calm_run)[5]
    assert [row["step"] for row in rows(folder, "rolled_back_from")] == [5]
    assert summary(folder)["status"] == "finished"
    assert int(arrays(folder, 20)["cursor"]) == 23  # 6, 7 and 8 of the first try are not used again
    with runs.recorded_batches() as expected:
        assert run(calm, tmp_path / "other", train__steps=24, train__on_nonfinite="skip") == 0
    # a step that is passed over has its batch drawn again, to be kept: each batch counts where it comes first
    assert batches[-15:] == list(dict.fromkeys(expected))[8:23]


def test_roll_back_has_an_end(calm, bad, tmp_path, capfd):
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{bad}:ONCE", train__on_nonfinite="rollback") == 4
    out = capfd.readouterr().out
    assert out.count("back to step 5") == 3 and "3 rollbacks did not help" in out and "stopped at step 7" in out
    assert steps(folder)[-1] == 6 and finite(folder, 6)


def test_a_float16_overflow_is_survived(anew, calm, tmp_path, monkeypatch, capfd):
    """The dynamic scale falls until the gradient fits, and grows again; an overflow is no fault."""
    monkeypatch.setattr(assemble, "FIRST_DYNAMIC_SCALE", 2.0**24)
    monkeypatch.setattr(step, "GROWTH_INTERVAL", 4)
    folder = tmp_path / "run"
    assert run(calm, folder, precision__compute="float16", precision__loss_scale="dynamic") == 0
    assert "note:" not in capfd.readouterr().out
    there = rows(folder)
    passed_over = [row.get("update_applied") is False for row in there]
    scales = [row["loss_scale"] for row in there]
    assert passed_over[0] and not all(passed_over)
    for row, over, before, after in zip(there, passed_over, scales, scales[1:], strict=False):
        assert np.isfinite(row["loss"])
        assert after == before / 2 if over else after in (before, 2 * before)
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    assert summary(folder)["status"] == "finished" and finite(folder, 20)


def test_float16_without_loss_scaling_is_warned_of(calm, tmp_path, capfd):
    assert run(calm, tmp_path / "run", precision__compute="fp16", train__steps=2) == 0
    out = capfd.readouterr().out
    assert "note: precision.compute is float16 without precision.loss_scale" in out
    assert "loss_scale" not in rows(tmp_path / "run")[0]


def test_the_loss_scale_is_divided_out_again(calm, tmp_path):
    """Also where only the stream is float16: clipping and the reported norm see the gradient itself."""
    dtypes = {
        "precision__compute": "float32",
        "precision__stream": "float16",
        "train__steps": 2,
        "model__dropout": 0,
    }
    norms = []
    for scale in ("none", 64):
        folder = tmp_path / str(scale)
        assert run(calm, folder, **dtypes, precision__loss_scale=scale) == 0
        norms.append([row["grad_norm"] for row in rows(folder)])
    np.testing.assert_allclose(norms[0], norms[1], rtol=0.03)


# ------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("compute", "stream", "scan"),
    [("bfloat16", "float32", "true"), ("bfloat16", "bfloat16", "false"), ("float16", "float16", "true")],
)
def test_the_stream_has_the_dtype_that_was_asked_for(compute, stream, scan, calm, tmp_path, capfd):
    """Said by the program, not by the configuration (A1)."""
    folder = tmp_path / "run"
    fields = {"precision__compute": compute, "precision__stream": stream, "model__scan": scan, "train__steps": 2}
    assert run(calm, folder, **fields) == 0
    assert summary(folder)["stream_dtype"] == stream
    assert f"the stream is {stream} in the compiled program" in capfd.readouterr().out
    assert {array.dtype.name for path, array in arrays(folder, 2).items() if path.startswith("params/")} == {"float32"}
    lost = runs.health(folder)["swallowed"].max()
    assert lost < 1e-4 or stream != "float32"
    assert lost > 1e-3 or stream != "bfloat16"


def test_bfloat16_parameters_that_do_not_move_are_shown(calm, tmp_path, capfd):
    """A28: with 1 - 6e-4 rounding back to 1."""
    fields = {"train__steps": 6, "optimizer__schedule": "constant", "optimizer__warmup": 0, "health__every": 1}
    shares = {}
    for lr in (1e-6, 0.1):
        folder = tmp_path / str(lr)
        assert run(calm, folder, precision__param="bfloat16", optimizer__lr=lr, **fields) == 0
        shares[lr] = [row["moved"] for row in rows(folder)]
    assert max(shares[1e-6]) < 0.05 and min(shares[0.1]) > 0.5
    assert "note: precision.param is bfloat16" in capfd.readouterr().out
    assert runs.health(tmp_path / "0.1")["moved"].tolist() == pytest.approx(shares[0.1])


def test_the_program_is_compiled_once(calm, tmp_path):
    """Probes, evaluations, saves and reports included; the state's form never changes (A17)."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        with runs.at_batch(2, compiled.clear):
            assert run(calm, tmp_path / "run", train__steps=13, train__eval_every=4) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []
    first, last = (read_json(tmp_path / f"run/checkpoints/{number}/meta/metadata")["leaves"] for number in (5, 13))
    assert first == last
