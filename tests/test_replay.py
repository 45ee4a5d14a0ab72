"""Is a step that is done again the step that was, and is the run left as it is?"""

import json
import shutil

import numpy as np
import pytest

import runs
from resjax import replay
from resjax.train.writers import parse, read_json, write_json
from runs import files, run, stopped, summary

pytestmark = pytest.mark.usefixtures("quick")

SCHEMES = """
import jax.numpy as jnp
from resjax.residual import CATALOGUE

def nan_from(first, last, block=1):
    def rule(site):
        return jnp.where((site.step >= first) & (site.step <= last) & (site.block == block), jnp.nan, 1.0)
    return rule

def loud(site):  # a step at which block 0 shouts
    return jnp.where((site.step == 59) & (site.block == 0), 300.0, 1.0)

ONCE = CATALOGUE["pre_ln"].but(name="once", scale=nan_from(6, 6))
LOUD = CATALOGUE["pre_ln"].but(name="loud", scale=loud)
"""


def said(capfd, *words):
    """Exit code, standard output, standard error."""
    capfd.readouterr()
    code = replay.main([str(word) for word in words])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def told(capfd, *words):
    """What ``--json`` says; strict JSON, alone on standard output."""
    code, out, err = said(capfd, *words, "--json")
    assert code == 0, err
    return parse(out)


@pytest.fixture(scope="module")
def schemes(tmp_path_factory):
    path = tmp_path_factory.mktemp("schemes") / "own.py"
    path.write_text(SCHEMES)
    return path


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run with dropout, stochastic depth and accumulation; checkpoints at 5, 10, 15, 20."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(config, folder) == 0
    return folder


@pytest.fixture(scope="module")
def once(calm, schemes, tmp_path_factory):
    """A run that stopped at step 7."""
    folder = tmp_path_factory.mktemp("once") / "run"
    assert run(calm, folder, residual__name=f"{schemes}:ONCE") == 4
    return folder


def logged(folder, step):
    return next(row for row in runs.rows(folder) if row["step"] == step)


# ------------------------------------------------------------------ steps that were finite


@pytest.mark.parametrize(
    ("step", "source"), [(1, "the start of the run"), (6, "checkpoint 5"), (13, "checkpoint 10"), (20, "checkpoint 15")]
)
def test_a_healthy_step_is_the_recorded_one_bit_for_bit(step, source, whole, capfd):
    before = files(whole)
    again = told(capfd, whole, f"--step={step}")
    assert again["same"] is True and again["from"] == source and again["nonfinite"] is None and again["finite"] is True
    row = logged(whole, step)
    assert (np.float32(again["loss"]), np.float32(again["grad_norm"])) == (
        np.float32(row["loss"]),
        np.float32(row["grad_norm"]),
    )
    assert files(whole) == before
    recorded = runs.health(whole)
    if step in recorded["steps"]:
        at = list(recorded["steps"]).index(step)
        for name in ("update_ratio", "stream_rms", "stream_grad"):
            np.testing.assert_array_equal(np.asarray(again["probes"][name], np.float32), recorded[name][at])


def test_what_a_person_sees(whole, capfd):
    code, out, err = said(capfd, whole, "--step=13")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0] == f"{whole}, step 13 again, from checkpoint 10"
    assert (
        "the same as in metrics.jsonl, bit for bit" in out
        and "every value of the loss and the gradient is finite" in out
    )
    table = [line.split() for line in lines if line.strip() and line.split()[0] in ("block", "0", "1")]
    assert [row[:2] for row in table[1:]] == [["0", "attention"], ["0", "mlp"], ["1", "attention"], ["1", "mlp"]]
    assert "note:" not in out


def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "checkpoints/10/meta/metadata").write_text("{}")
    again = told(capfd, folder, "--step=13")
    assert again["same"] is True and again["from"] == "checkpoint 5" and "checkpoint 10" in again["notes"][0]


def test_other_versions_are_told(whole, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    facts = read_json(folder / "config.json")
    facts["versions"]["jax"] = "0.1.2"
    write_json(folder / "config.json", facts)
    code, out, _ = said(capfd, folder, "--step=6")
    assert code == 0 and "note: the run was made with other versions (jax 0.1.2 then" in out


def test_what_differs_is_told(whole, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    text = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in text]
    for row in rows:
        if row["step"] == 6 and "loss" in row:
            row["loss"] += 1e-3
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = said(capfd, folder, "--step=6")
    assert code == 0 and "not the same as in metrics.jsonl: loss" in out


def test_out_is_written_and_nothing_else(whole, tmp_path, capfd):
    before = files(whole)
    code, out, _ = said(capfd, whole, "--step=6", "--json", f"--out={tmp_path}/made/here")
    assert code == 0 and files(whole) == before
    assert parse((tmp_path / "made/here/replay.json").read_text()) == parse(out)


# ------------------------------------------------------------------ steps that were not


def test_the_step_that_stopped_a_run(once, capfd):
    before = files(once)
    again = told(capfd, once, "--step=7")
    assert again["from"] == "checkpoint 6 and the batch kept in nonfinite/7" and again["finite"] is False
    assert again["nonfinite"] == json.loads((once / "summary.json").read_text())["nonfinite"]["first"]
    assert again["loss"] == "nan" and again["same"] is True
    code, out, _ = said(capfd, once, "--step=7")
    assert code == 0 and summary(once)["nonfinite"]["where"] in out
    assert files(once) == before


def test_a_step_that_was_passed_over_and_those_after_it(calm, schemes, tmp_path, capfd):
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{schemes}:ONCE", train__on_nonfinite="skip") == 0
    again = told(capfd, folder, "--step=7")
    assert again["from"] == "the state kept in nonfinite/7" and again["nonfinite"]["block"] == 1
    later = told(capfd, folder, "--step=9")  # through step 7, from checkpoint 5
    assert later["from"] == "checkpoint 5" and later["same"] is True and later["finite"] is True


def test_after_a_rollback_the_batches_are_those_of_the_run(calm, tmp_path, monkeypatch, capfd):
    from test_faults import plant

    with runs.compiled_anew(), monkeypatch.context() as patch:
        plant(patch, 7)
        folder = tmp_path / "run"
        assert run(calm, folder, train__on_nonfinite="rollback") == 0
        again = told(capfd, folder, "--step=7")
        assert again["same"] is True and again["from"] == "checkpoint 5"
        bad = told(capfd, folder, "--step=8")
        assert bad["from"] == "the state kept in nonfinite/8" and bad["finite"] is False
        assert (
            bad["nonfinite"]["part"] == "loss" and bad["same"] is False
        )  # the run did step 8 again, with another batch


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--step=0"], ["--step is 0", "from 1"]),
        (["--step=21"], ["--step is 21", "has done 20 steps"]),
        (["--step=x"], ["--step", "invalid int value: 'x'"]),
        ([], ["--step and --spike are both missing"]),
        (["--step=1", "--spike=1"], ["--step and --spike say different things"]),
        (["--spike=1"], ["--spike is 1", "has none in its 20 logged losses"]),
        (["--step=1", "--stap=2"], ["'--stap=2' is no option", "did you mean --step=2?"]),
        (["--step=1", "--out="], ["--out is empty"]),
    ],
)
def test_bad_words_are_refused(words, parts, whole, capfd):
    code, out, err = said(capfd, whole, *words)
    assert code == 2 and out == "" and err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_folder_without_a_run_is_refused(whole, tmp_path, capfd):
    code, _, err = said(capfd, tmp_path / "none", "--step=1")
    assert code == 2 and "holds no run" in err
    code, _, err = said(capfd, str(whole).replace("run", "rum"), "--step=1")
    assert code == 2 and "holds no run" in err
    target = tmp_path / "file"
    target.write_text("")
    code, _, err = said(capfd, whole, "--step=1", f"--out={target}")
    assert code == 2 and "which is a file" in err


def test_a_fork_without_its_first_checkpoint_is_refused_and_with_it_is_not(whole, config, tmp_path, capfd):
    folder = tmp_path / "fork"
    assert run(config, folder, f"--from={whole}@5", train__keep=1) == 0
    code, _, err = said(capfd, folder, "--step=7")
    assert code == 2 and "keeps no checkpoint before it (the first is of step 20)" in err
    kept = tmp_path / "kept"
    assert run(config, kept, f"--from={whole}@5", seed=3) == 0
    assert told(capfd, kept, "--step=7")["same"] is True


def test_a_scheme_whose_file_has_changed_is_refused(calm, tmp_path, capfd):
    own = tmp_path / "own.py"
    own.write_text(SCHEMES)
    folder = tmp_path / "run"
    assert stopped(calm, folder, 3, residual__name=f"{own}:LOUD") == 143
    assert told(capfd, folder, "--step=2")["same"] is True
    own.write_text(SCHEMES + "\n# changed\n")
    code, _, err = said(capfd, folder, "--step=2")
    assert code == 2 and "has changed since the run was made" in err


def test_help_answers_without_jax():
    script = "import sys, resjax.replay as r\ntry: r.main(['--help'])\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    done = runs.command(script=("-c", script))
    assert done.returncode == 0 and "--step" in done.stdout and "--spike" in done.stdout, done.stderr


# ------------------------------------------------------------------ spikes


def test_a_spike_is_shown_before_at_and_after(calm, schemes, tmp_path, capfd):
    folder = tmp_path / "run"
    fields = {"train__steps": 66, "optimizer__lr": 1e-4, "train__eval_every": 0, "train__save_every": 20}
    fields["residual__final_norm"] = "none"  # so that the head hears it
    assert run(calm, folder, residual__name=f"{schemes}:LOUD", **fields) == 0
    before = files(folder)
    again = told(capfd, folder, "--spike=1")
    assert files(folder) == before
    assert (again["spike"]["peak"], again["spike"]["first"], again["spike"]["outcome"]) == (60, 60, "recovered")
    assert [step["step"] for step in again["steps"]] == [59, 60, 61] and all(step["same"] for step in again["steps"])
    change = next(change for change in again["changes"] if change["probe"] == "update_ratio")
    assert (change["block"], change["factor"] > 30) == (0, True)
    code, out, _ = said(capfd, folder, "--spike=1")
    assert code == 0 and "spike of the loss from step 60 to 60, highest at 60" in out and "it comes back" in out
    assert "update/stream @59  update/stream @60  update/stream @61" in out
    code, _, err = said(capfd, folder, "--spike=2")
    assert code == 2 and "--spike is 2" in err and "has 1 (1 at step 60)" in err
