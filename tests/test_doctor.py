"""Does the doctor's command look at runs of every kind, write what it says, and refuse what it cannot do?"""

import json
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import runs
import synthetic_run
from resjax import doctor
from resjax.checkup import case_of, repeating
from resjax.config.load import load
from resjax.health.diagnosis import diagnose
from resjax.health.diagnosis.starts import START_FIGURES, start_band
from resjax.health.record import HealthRecord
from resjax.health.studies import STUDIES
from resjax.train.writers import parse
from runs import files, run

pytestmark = pytest.mark.usefixtures("quick")


def said(capfd, *words):
    """Exit code, standard output, standard error."""
    capfd.readouterr()
    code = doctor.main([str(word) for word in words])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run; checkpoints at 5, 10, 15, 20."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(runs.calm(folder), folder / "run") == 0
    return folder / "run"


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def troubled(tmp_path):
    """A folder without checkpoints, in which much is wrong."""
    return synthetic_run.write_run(tmp_path / "troubled", trouble=True)


def test_a_run_is_studied_and_only_the_doctors_files_are_written(copy, capfd):
    before = files(copy)
    code, out, err = said(capfd, copy, "--studies=similarity,lens")
    assert code == 0 and not err and "state of step 20" in out and "probes of steps 1 to 20" in out
    after = files(copy)
    assert {name for name in after if after[name] != before.get(name)} <= {".", "doctor.html", "doctor.json"}
    told = parse((copy / "doctor.json").read_text())
    assert told["studied_step"] == 20 and set(told["studies"]) == {"similarity", "lens"}
    page = (copy / "doctor.html").read_text()
    assert page.startswith("<!doctype html>") and re.search(r"at the end \((median of steps \d+ to 20|step 20)\)", page)


def test_json_is_what_the_file_holds_and_nothing_else(copy, capfd):
    code, out, _ = said(capfd, copy, "--studies=none", "--json")
    assert code == 0 and parse(out) == parse((copy / "doctor.json").read_text())
    assert parse(out)["studied_step"] is None and parse(out)["studies"] == {}


def test_check_exits_with_1_where_there_are_findings_only(troubled, copy, capfd, monkeypatch):
    assert said(capfd, troubled, "--check", "--studies=none")[0] == 1
    assert said(capfd, troubled, "--studies=none")[0] == 0
    monkeypatch.setattr("resjax.health.diagnosis.merged", lambda found, goes_on: [])
    assert said(capfd, copy, "--check", "--studies=none")[0] == 0


def test_findings_come_first_and_name_range_reason_and_remedy(troubled, capfd):
    _, out, _ = said(capfd, troubled, "--studies=none")
    lines = out.splitlines()
    assert "finding" in lines[1] and lines[2].startswith("1. non-finite value")
    found = parse((troubled / "doctor.json").read_text())
    assert found["remedies"] and all(
        one["command"].startswith("python -m resjax.main --config=") for one in found["remedies"]
    )
    for remedy in found["remedies"]:  # a command that is suggested is one that is accepted
        overrides = [tuple(flag.removeprefix("--config.").split("=", 1)) for flag in remedy["overrides"]]
        load(str(troubled), overrides)


def test_a_step_is_looked_at_as_the_run_was_then(copy, capfd):
    _, out, _ = said(capfd, copy, "--step=12", "--studies=lens", "--json")
    told = parse(out)
    assert told["studied_step"] == 10 and told["recorded_steps"] == [1, 12]
    code, _, err = said(capfd, copy, "--step=99")
    assert code == 2 and "--step is 99" in err and "20 steps" in err and len(err.splitlines()) == 1
    assert said(capfd, copy, "--step=0")[0] == 2


def test_two_runs_side_by_side(copy, troubled, capfd):
    code, out, _ = said(capfd, copy, f"--against={troubled}", "--studies=none")
    assert code == 0 and out.count("probes of steps") == 2
    told = parse((copy / "doctor.json").read_text())
    assert told["against"]["run"] == str(troubled) and told["against"]["findings"]
    page = (copy / "doctor.html").read_text()
    assert "troubled, at the end" in page and "run, at the end" in page and not (troubled / "doctor.html").exists()


@pytest.mark.parametrize(
    "words, tells",
    [
        (["nowhere"], "holds no run"),
        (["RUN", "--against=nowhere"], "holds no run"),
        (["RUN", "--studies=lense"], "did you mean 'lens'"),
        (["RUN", "--studies="], "--studies is ''"),
        (["RUN", "--follow", "--json"], "--follow and --json contradict"),
        (["RUN", "--follow", "--step=3"], "--follow and --step contradict"),
        (["RUN", "--folow"], "did you mean --follow"),
        (["RUN", "--step=x"], "--step"),
        ([""], "RUN is empty"),
        ([], "RUN"),
    ],
)
def test_bad_input_gets_one_sentence(copy, capfd, words, tells):
    try:
        code, _, err = said(capfd, *[str(copy) if word == "RUN" else word for word in words])
    except SystemExit as stopped:
        code, err = stopped.code, capfd.readouterr().err
    assert code == 2 and tells in err and "Traceback" not in err
    assert not (copy / "doctor.json").exists()


def test_a_mistyped_run_is_told_the_nearest(copy, capfd):
    _, _, err = said(capfd, str(copy)[:-1] + "m")
    assert f"did you mean '{copy}'" in err


def test_a_folder_that_cannot_be_written_is_still_looked_at(troubled, capfd, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("resjax.train.writers.write_bytes", full)
    code, out, _ = said(capfd, troubled, "--studies=none")
    assert code == 0 and "not written" in out and "No space left" in out


def test_a_model_that_is_not_ours_has_findings_and_no_commands(tmp_path, capfd):
    record = HealthRecord(("time", "features"))
    for step in range(20):
        ratio = np.full((6, 2), 0.1)
        ratio[3, 1] = 0.0
        record.append(step, {"update_ratio": ratio, "stream_rms": np.ones((6, 2)), "finite": np.ones((6, 2))})
    record.flush(tmp_path / "theirs" / "health")
    code, out, err = said(capfd, tmp_path / "theirs")
    assert code == 0 and not err and "dead branches: features of block 3" in out and "resjax.main" not in out
    assert "with their scale at 0 and compare" in out  # no word of residual.at, which their model does not have
    assert "not resjax" in (tmp_path / "theirs" / "doctor.html").read_text()


def test_a_folder_that_was_filled_by_watching(tmp_path, capfd):
    from resjax import watch

    rng = np.random.default_rng(0)
    with watch.Log(tmp_path / "theirs", config={"model": {"depth": 4, "width": 8}}, sites=("mlp",)) as log:
        for step in range(1, 7):
            update = rng.normal(size=(4, 2, 16, 8))
            update[2] = 0
            log.write(
                step, watch.from_arrays({"mlp": rng.normal(size=(4, 2, 16, 8))}, {"mlp": update}), loss=3.0 / step
            )
        log.close()
    code, out, err = said(capfd, tmp_path / "theirs")
    assert code == 0 and not err and "dead branches: mlp of block 2, since step 1" in out and "resjax.main" not in out
    assert "with their scale at 0 and compare" in out


def test_the_first_value_that_is_not_finite_is_named(tmp_path, capfd):
    scheme = tmp_path / "own.py"
    scheme.write_text(
        "import jax.numpy as jnp\nfrom resjax.residual import CATALOGUE\n"
        "def bad(site):\n    return jnp.where((site.step == 6) & (site.block == 1), jnp.nan, 1.0)\n"
        "ONCE = CATALOGUE['pre_ln'].but(name='once', scale=bad)\n"
    )
    assert run(runs.calm(tmp_path), tmp_path / "run", residual__name=f"{scheme}:ONCE") == 4
    code, out, _ = said(capfd, tmp_path / "run", "--check", "--studies=none")
    lines = out.splitlines()
    assert (
        code == 1
        and lines[1] == "1 finding"
        and lines[2].startswith("1. non-finite value: forward pass, block 1, attention, scale of the update")
        and "step 7" in lines[2]
    )
    assert "resjax.replay" in out


def test_tokens_repeat_as_often_as_so_many_kinds_drawn_evenly():
    assert repeating(np.arange(7)) == 7 and repeating(np.full(5, 3)) == 1
    assert repeating(np.random.default_rng(0).integers(0, 32, (64, 64))) == 32
    assert repeating(np.repeat([1, 2, 3], [8, 1, 1])) == 2  # 1 / 0.66


def test_every_study_speaks_json_and_is_drawn_or_left_out(whole):
    case = case_of(str(whole), studies=tuple(STUDIES), start=True)
    missing = set(STUDIES) - set(case.studies)
    assert all(any(f"'{name}'" in note for note in case.notes) for name in missing)
    assert len(case.studies) >= 10 and case.start["update_ratio"].shape == (2, 2, 2)
    for name, (values, _) in case.theory.items():  # width 8, and all the same within a factor of 2
        assert values.shape == (2, 2) and (np.abs(np.log2(case.start[name].mean(axis=0) / values)) < 1).all(), name
    assert set(case.theory) == set(START_FIGURES) and "closed form" in start_band(case, "update_rms").source
    from resjax.health.diagnosis.page import page
    from resjax.train.writers import to_json

    diagnosis = diagnose(case)
    json.dumps(to_json(diagnosis.as_dict()), allow_nan=False)
    text = page(diagnosis)
    for title in (
        "Loss without a block",
        "Logit lens",
        "Linear CKA",
        "Block Jacobian",
        "Decodability",
        "Massive activations",
    ):
        assert title in text


# ---- a run that goes on


def test_follow_tells_findings_as_they_come_and_ends_with_the_run(tmp_path, monkeypatch, capfd):
    whole = synthetic_run.write_run(tmp_path / "whole", rows=51)
    going = tmp_path / "going"
    going.mkdir()
    shutil.copy(whole / "config.json", going)
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    record = HealthRecord.load(whole / "health")
    monkeypatch.setattr(doctor, "LOOKS", 0.05)

    def train():
        part = HealthRecord()
        for first in (0, 25):
            for i in range(first, min(first + 25, len(record)) if first == 0 else len(record)):
                row = {name: record[name][i] for name in record}
                row["token_cosine"] = row["token_cosine"] if first == 0 else np.full_like(row["token_cosine"], 0.99)
                part.append(int(record.steps[i]), row)
            part.flush(going / "health")
            count = len(lines) // 2 if first == 0 else len(lines)
            (going / "metrics.jsonl").write_text("".join(line + "\n" for line in lines[:count]))
            time.sleep(1.5)
        shutil.copy(whole / "summary.json", going)

    training = threading.Thread(target=train)
    training.start()
    code, out, _ = said(capfd, going, "--follow", "--check", "--studies=none")
    training.join()
    first = out.splitlines()[0]
    assert "no findings" in first and "token collapse" in out and "the run has ended" in out and code == 1
    assert out.index("no findings") < out.index("token collapse") < out.index("the run has ended")


def test_follow_ends_where_nobody_trains(copy, monkeypatch, capfd):
    (copy / "summary.json").unlink()
    monkeypatch.setattr(doctor, "LOOKS", 0.05)
    monkeypatch.setattr(doctor, "QUIET", 0.3)
    code, out, _ = said(capfd, copy, "--follow", "--studies=none")
    assert code == 0 and "nobody trains in this folder" in out


def test_follow_ends_where_somebody_else_s_loop_is_silent(copy, monkeypatch, capfd):
    """Its folder has no lock that could be asked."""
    for name in ("summary.json", "config.json"):
        (copy / name).unlink()
    monkeypatch.setattr(doctor, "LOOKS", 0.05)
    monkeypatch.setattr(doctor, "SILENT", 0.3)
    code, out, _ = said(capfd, copy, "--follow", "--studies=none")
    assert code == 0 and "no news for 0 minutes; the same command watches on" in out


def test_help_answers_without_jax():
    script = "import sys, resjax.doctor as d\ntry: d.main(['--help'])\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    assert (
        "--against" in subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    )


# ---- a run in the place of a config file


def test_the_folder_of_a_run_is_a_configuration(whole, tmp_path, capfd):
    from resjax import main

    assert main.main([f"--config={whole}", f"--workdir={tmp_path / 'again'}", "--config.train.steps=3"]) == 0
    was, now = (json.loads((place / "config.json").read_text()) for place in (whole, tmp_path / "again"))
    for section in ("data", "model", "residual", "optimizer"):
        assert was[section] == now[section]
    assert main.main([f"--config={whole}/config.json", f"--from={whole}@15", f"--workdir={tmp_path / 'on'}"]) == 0
    capfd.readouterr()
    for spec, tells in (
        (f"{whole}:fast", "a run has no variants"),
        (f"{whole}/summary.json", "is not the config.json of a run"),
        (f"{tmp_path}/none.json", "does not exist"),
    ):
        assert main.main([f"--config={spec}", f"--workdir={tmp_path / 'no'}"]) == 2
        assert tells in capfd.readouterr().err


def test_the_folder_of_a_run_made_from_a_run_is_named_after_it(whole):
    from resjax.config.folder import default_folder

    assert default_folder(str(whole), [("seed", "3")]) == "runs/run,seed=3"
    assert default_folder(f"{whole}/config.json") == "runs/run"
