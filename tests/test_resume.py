"""Does a stopped run go on as if nothing had happened, and does a folder refuse what is not its run?"""

import json
import shutil

import numpy as np
import pytest

import runs
from runs import STEPS, arrays, files, health, recorded_batches, rows, run, same, state_hash, steps, stopped, summary

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """20 steps without a stop: (folder, hashes of its batches)."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with recorded_batches() as batches:
        assert run(config, folder) == 0
    return folder, batches


def assert_same_run(folder, other):
    """Every number that a run leaves, bit for bit."""
    assert rows(folder) == rows(other)
    assert rows(folder, "eval_loss") == rows(other, "eval_loss")
    assert same(health(folder), health(other))
    assert state_hash(folder, STEPS) == state_hash(other, STEPS)
    assert summary(folder)["param_hash"] == summary(other)["param_hash"]


def test_a_run_leaves_everything(whole, capsys):
    folder, batches = whole
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows(folder, "eval_loss")] == [5, 10, 15, 20]
    assert steps(folder) == [5, 10, 15, 20]
    assert len(set(batches)) == STEPS
    made = summary(folder)
    assert made["status"] == "finished" and made["steps"] == STEPS
    assert made["eval_loss"] == rows(folder, "eval_loss")[-1]["eval_loss"]
    assert made["stream_dtype"] == "float32"
    for name in ("config.json", "report.html"):
        assert (folder / name).stat().st_size > 1000
    assert list(folder.glob("events.*"))
    assert health(folder)["steps"].tolist() == [1, 3, 6, 9, 12, 15, 18, 20]


@pytest.mark.parametrize("k", [1, 7, 10, 19])
def test_stop_and_go_on_is_bit_for_bit(k, config, whole, tmp_path, capfd):
    """Loss, evaluation, probes, parameters, moments, random key, data; with all that is random (A20, A21)."""
    folder = tmp_path / "run"
    with recorded_batches() as batches:
        assert stopped(config, folder, k) == 143
        assert f"saved at step {k}" in capfd.readouterr().out
        assert steps(folder)[-1] == k
        assert [row["step"] for row in rows(folder)] == list(range(1, k + 1))
        assert not (folder / "summary.json").exists()
        assert run(config, folder) == 0
    assert f"from step {k}" in capfd.readouterr().out
    assert batches == whole[1]
    assert_same_run(folder, whole[0])


def test_a_stop_at_the_last_step_is_made_up_for(config, whole, tmp_path, capfd):
    folder = tmp_path / "run"
    assert stopped(config, folder, STEPS, number=runs.signal.SIGINT) == 130
    assert steps(folder)[-1] == STEPS and not (folder / "summary.json").exists()
    assert run(config, folder) == 0
    assert_same_run(folder, whole[0])


def test_two_continuations_from_one_step(config, whole, tmp_path):
    """The second after a copy: the first has not moved the data or the random state (A21)."""
    folder = tmp_path / "run"
    assert stopped(config, folder, 8) == 143
    shutil.copytree(folder, tmp_path / "copy")
    assert stopped(config, folder, 5) == 143
    assert run(config, folder) == 0
    assert run(config, tmp_path / "copy") == 0
    assert_same_run(folder, whole[0])
    assert_same_run(tmp_path / "copy", whole[0])


def test_later_rows_probes_and_saves_are_dropped(config, whole, tmp_path):
    """Going on from an earlier step than the last one written."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / "summary.json").unlink()
    for step in (15, 20):
        (folder / f"checkpoints/{step}/state/manifest.ocdbt").write_bytes(b"damaged")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "loss": 1.0}\n{"step": 22, "lo')
    with recorded_batches() as batches:
        assert stopped(config, folder, 2) == 143
    assert batches == whole[1][10:12]
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))
    assert [row["step"] for row in rows(folder, "eval_loss")] == [5, 10]
    assert health(folder)["steps"].tolist() == [1, 3, 6, 9, 12]
    assert steps(folder) == [5, 10, 12]
    assert run(config, folder) == 0
    assert_same_run(folder, whole[0])


def test_saves_that_cannot_be_read_are_not_thrown_away(config, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / "summary.json").unlink()
    for step in steps(folder):
        (folder / f"checkpoints/{step}/state/manifest.ocdbt").write_bytes(b"damaged")
    before = files(folder)
    assert run(config, folder) == 2
    said = capsys.readouterr().err
    assert "checkpoint 20 is skipped" in said and "remove" in said
    assert files(folder) == before


def test_a_finished_folder_is_left_alone(config, whole, capfd):
    folder, _ = whole
    before = files(folder)
    capfd.readouterr()
    assert run(config, folder) == 0
    out, err = capfd.readouterr()
    assert out.count("\n") == 1 and "is finished: 20 steps" in out and err == ""
    assert files(folder) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer__lr": 0.01}, ["optimizer.lr was 0.003, is now 0.01"]),
        ({"model__depth": 3, "init__gain": 1}, ["model.depth was 2, is now 3", "init.gain was 0.55, is now 1.0"]),
        ({"residual__name": "post_ln"}, ["residual.name was 'pre_ln', is now 'post_ln'"]),
        ({"train__steps": 30}, ["train.steps was 20, is now 30", "cosine"]),
        ({"train__eval_batches": 3}, ["train.eval_batches was 2, is now 3"]),
        ({"model__scan": "false"}, ["model.scan was True, is now False"]),
        ({"precision__stream": "bfloat16"}, ["precision.stream was 'float32', is now 'bfloat16'"]),
    ],
)
def test_a_changed_field_is_refused_with_the_list(fields, words, config, whole, capfd):
    folder, _ = whole
    before = files(folder)
    capfd.readouterr()
    assert run(config, folder, **fields) == 2
    out, err = capfd.readouterr()
    assert out == "" and all(word in err for word in words)
    assert len(err.strip().splitlines()) == 1 + len(fields)
    assert files(folder) == before


def test_what_changes_no_number_may_differ(config, whole, tmp_path):
    folder = tmp_path / "run"
    assert stopped(config, folder, 8) == 143
    free = {"mesh__data": 1, "health__every": 7, "train__save_every": 3, "train__keep": 2, "train__log_every": 2}
    assert run(config, folder, **free) == 0
    assert steps(folder) == [18, 20]
    assert [row["step"] for row in rows(folder)] == [*range(1, 9), *range(10, 21, 2)]
    assert [row for row in rows(whole[0]) if row["step"] in (8, 20)] == [
        row for row in rows(folder) if row["step"] in (8, 20)
    ]
    assert state_hash(folder, STEPS) == state_hash(whole[0], STEPS)
    assert json.loads((folder / "config.json").read_text())["train"]["save_every"] == 3


def test_a_run_may_grow_where_the_rate_does_not_depend_on_its_end(calm, tmp_path):
    free = {"optimizer__schedule": "constant", "optimizer__warmup": 2}
    assert run(calm, tmp_path / "grown", train__steps=7, **free) == 0
    assert summary(tmp_path / "grown")["steps"] == 7
    assert run(calm, tmp_path / "grown", train__steps=12, **free) == 0
    assert run(calm, tmp_path / "at once", train__steps=12, **free) == 0
    assert rows(tmp_path / "grown") == rows(tmp_path / "at once")
    assert state_hash(tmp_path / "grown", 12) == state_hash(tmp_path / "at once", 12)
    assert summary(tmp_path / "grown")["steps"] == 12
    assert run(calm, tmp_path / "grown", train__steps=9, **free) == 2


def test_a_second_process_is_refused(config, tmp_path, capsys):
    """While the first trains (here: in the middle of it)."""
    folder, codes = tmp_path / "run", []
    with runs.at_batch(8, lambda: codes.append(run(config, folder))):
        assert run(config, folder) == 0
    assert codes == [2]
    assert "another process is training" in capsys.readouterr().err
    assert summary(folder)["steps"] == STEPS


def test_a_stop_before_the_first_step_writes_no_state(config, whole, tmp_path, monkeypatch, capfd):
    """In the middle of compiling (A24 a)."""
    from resjax.train import session

    original = session.compile_programs

    def interrupted(*arguments):
        runs.os.kill(runs.os.getpid(), runs.signal.SIGTERM)
        return original(*arguments)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(session, "compile_programs", interrupted)
        assert run(config, folder) == 143
        assert not (folder / "checkpoints").exists()
        assert "stopped before step 1" in capfd.readouterr().out
    assert stopped(config, folder, 3) == 143
    with monkeypatch.context() as patch:
        patch.setattr(session, "compile_programs", interrupted)
        assert run(config, folder) == 143
        assert steps(folder) == [3]
        assert "stopped before step 4" in capfd.readouterr().out
    assert run(config, folder) == 0
    assert_same_run(folder, whole[0])


def test_scanned_and_unrolled_files_fit_both(calm, tmp_path):
    """The state is stored alike; numbers may differ by rounding, so it is a fork, not a continuation (A25)."""
    fields = {"train__steps": 6, "train__save_every": 3}
    assert run(calm, tmp_path / "scanned", **fields) == 0
    assert run(calm, tmp_path / "unrolled", f"--from={tmp_path / 'scanned'}@3", model__scan="false", **fields) == 0
    there, here = rows(tmp_path / "scanned")[3:], rows(tmp_path / "unrolled")
    assert [row["step"] for row in here] == [4, 5, 6]
    np.testing.assert_allclose([row["loss"] for row in here], [row["loss"] for row in there], rtol=1e-6)
    first, second = arrays(tmp_path / "scanned", 3), arrays(tmp_path / "unrolled", 3)
    assert same(
        {k: v for k, v in first.items() if "loss_scale" not in k},
        {k: v for k, v in second.items() if "loss_scale" not in k},
    )
    # and back, where the parameters have the same hash as before
    assert run(calm, tmp_path / "back", f"--from={tmp_path / 'unrolled'}@3", **fields) == 0
    assert rows(tmp_path / "back") == rows(tmp_path / "scanned")[3:]
    assert summary(tmp_path / "back")["param_hash"] == summary(tmp_path / "scanned")["param_hash"]


def test_evaluation_of_a_saved_step_is_that_of_the_run(config, whole, capsys):
    folder, _ = whole
    before = files(folder)
    for step, loss in [(None, rows(folder, "eval_loss")[-1]), (10, rows(folder, "eval_loss")[1])]:
        capsys.readouterr()
        assert run(config, folder, "--evaluate" if step is None else f"--evaluate={step}") == 0
        out = capsys.readouterr().out
        assert f"step {loss['step']}: held-out loss {loss['eval_loss']:.6f}" in out and out.count("\n") == 1
    assert run(config, folder, "--evaluate=11") == 2
    assert "other steps: 5, 10, 15, 20" in capsys.readouterr().err
    assert run(config, folder, "--evaluate=best") == 2
    assert run(config, folder, "--evaluate", model__depth=3) == 2
    assert run(config, folder.parent / "nothing", "--evaluate") == 2
    assert files(folder) == before
