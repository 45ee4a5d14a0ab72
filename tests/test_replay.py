"""Is a step that is done again the step that was, and is the run left as it is?"""

import functools
import gc
import json
import shlex
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import runs
from resjax import replay
from resjax.checkup import case_of
from resjax.health.diagnosis import diagnose
from resjax.health.record import BLOCK_PROBES, MORE_PROBES, ROLE_PROBES, SITE_PROBES
from resjax.health.written import OF_SITES
from resjax.train import rebuild
from resjax.train.rebuild import Again
from resjax.train.writers import parse, read_json, write_json
from runs import files, run, stopped, summary

pytestmark = pytest.mark.usefixtures("quick")
SLOW = pytest.mark.slow

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


@pytest.fixture
def usual(monkeypatch):
    """Only the usual groups count as everything: for tests of other things, whose programs compile sooner then."""
    monkeypatch.setattr(rebuild, "HEALTH_GROUPS", ("forward", "backward"))


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
    if step in recorded["steps"]:  # by another program, which rounds otherwise
        at = list(recorded["steps"]).index(step)
        for name in recorded.keys() - {"steps"}:
            np.testing.assert_allclose(
                np.asarray(again["probes"][name], np.float32), recorded[name][at], rtol=1e-4, atol=1e-6, err_msg=name
            )


def test_what_a_person_sees(whole, capfd):
    code, out, err = said(capfd, whole, "--step=13")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0] == f"{whole}, step 13 again, from checkpoint 10"
    assert (
        "the same as in metrics.jsonl, bit for bit" in out
        and "every value of the loss and the gradient is finite" in out
    )
    headings = [line for line in lines if line.endswith(":")]
    assert headings == [f"{name}:" for name in (*OF_SITES, "weights by role", "whole blocks")]
    for heading in headings[:-2]:
        at = lines.index(heading)
        rows = [line.split()[:2] for line in lines[at + 1 : at + 6]]
        assert rows == [["block", "site"], ["0", "attention"], ["0", "mlp"], ["1", "attention"], ["1", "mlp"]]
    assert {line.split()[1] for line in lines[lines.index("weights by role:") + 2 :] if len(line.split()) == 7} == {
        "q", "k", "v", "write", "fc_in", "norm_scale"
    }  # fmt: skip
    assert "unrolled, with everything measured: loss" in out and "note:" not in out


# ------------------------------------------------------------------ unrolled, with everything on

EVERY = [probe for probes in MORE_PROBES.values() for probe in probes]


def measured_unrolled(folder, step, capfd):
    """What the step gives: the loss of the run's own program, and figures of every group at every block that has them."""
    again = told(capfd, folder, f"--step={step}")
    assert again["same"] is True and again["unrolled"] is True
    for name in ("loss", "grad_norm"):
        assert again["measured"][name] == pytest.approx(again[name], rel=1e-5)
    probes = {name: np.asarray(value, np.float32) for name, value in again["probes"].items()}
    assert probes.keys() >= {*SITE_PROBES, *BLOCK_PROBES[-1:], *EVERY}
    depth, sites, roles = 2, len(again["sites"]), len(again["roles"])
    for name, value in probes.items():
        last = roles if name in ROLE_PROBES else sites if name in (*SITE_PROBES, *EVERY) else None
        assert value.shape[:1] in ((), (depth,)) and (last is None or value.shape == (depth, last)), name
    return {name for name, value in probes.items() if np.isfinite(value).any(axis=tuple(range(1, value.ndim))).all()}


def test_every_group_is_measured_whatever_the_run_measured(whole, capfd):
    assert measured_unrolled(whole, 13, capfd) >= {*SITE_PROBES, *BLOCK_PROBES, *EVERY}


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("hyper_connections", {"update_ratio_block"}),
        ("attnres", {"swallowed", "growth", "update_ratio_block", *MORE_PROBES["precision"]}),
        pytest.param("reversible", {"update_ratio_block"}, marks=SLOW),
        pytest.param("denseformer", set(), marks=SLOW),
        pytest.param("post_ln", set(), marks=SLOW),
    ],
)
def test_every_group_is_measured_of_any_scheme(name, lacks, calm, tmp_path, capfd):
    """Of several streams and of a history too; a run that measured nothing itself."""
    folder = tmp_path / "run"
    fields = {"residual__name": name, "train__steps": 2, "train__eval_every": 0, "health__groups": "none"}
    assert run(calm, folder, **fields) == 0
    found = measured_unrolled(folder, 2, capfd)
    assert {*SITE_PROBES, *BLOCK_PROBES, *EVERY} - found == lacks | {"role_signal"}  # of one slice there is no noise


def test_the_blocks_are_unrolled_or_scanned_as_asked(whole):
    for unrolled in (True, False):
        text = Again.of(whole, unrolled).everything.step.as_text()
        assert ("block_1" in text, "blocks_0" in text) == (unrolled, not unrolled)


def test_scanned_it_gives_the_same(whole, capfd):
    unrolled, scanned = told(capfd, whole, "--step=6"), told(capfd, whole, "--step=6", "--scanned")
    assert (scanned["unrolled"], scanned["same"], scanned["loss"]) == (False, True, unrolled["loss"])
    assert scanned["probes"].keys() == unrolled["probes"].keys()
    for name, value in scanned["probes"].items():
        if name not in MORE_PROBES["precision"]:  # of a float32 stream these are the rounding itself
            np.testing.assert_allclose(
                np.asarray(value, np.float32),
                np.asarray(unrolled["probes"][name], np.float32),
                1e-3,
                1e-6,
                err_msg=name,
            )
    assert "scanned as in the run, with everything measured" in said(capfd, whole, "--step=6", "--scanned")[1]


# ------------------------------------------------------------------ what differs


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
    assert (
        "done twice here it is the same both times: it is not chance, and what makes it other than the run is not"
        in out
    )
    assert told(capfd, folder, "--step=6")["steady"] is True
    again = told(capfd, folder, "--step=8")
    assert again["same"] is True and again["strayed"] == 6 and again["steady"] is None


def test_a_device_that_is_not_deterministic_is_told(whole, monkeypatch, capfd):
    """Simulated: every step's loss is off by a unit in its last place, or by two."""
    original, calls = rebuild.compile_step, []

    def compiled(parts, *more):
        program = original(parts, *more)

        def step(*arguments):
            state, metrics, probes = program.step(*arguments)
            calls.append(None)
            off = np.float32(metrics["loss"])
            for _ in range(1 + len(calls) % 2):
                off = np.nextafter(off, np.float32(9))
            return state, metrics | {"loss": off}, probes

        return replace(program, step=step)

    monkeypatch.setattr(rebuild, "compile_step", compiled)
    again = told(capfd, whole, "--step=13")
    assert (again["same"], again["steady"], again["strayed"]) == (False, False, 11)
    assert again["loss"] == pytest.approx(again["recorded"]["loss"], rel=1e-6)
    out = said(capfd, whole, "--step=13")[1]
    assert (
        "the first step on the way from checkpoint 10 that differs is 11; done twice here it differs too: this" in out
    )
    assert "device is not deterministic, and what is shown is close to what was" in out


@pytest.mark.parametrize(
    ("platform", "flags", "was", "tells"),
    [
        ("cpu", "", {}, []),
        ("cpu", "", {"kind": "TPU v5e", "platform": "tpu", "count": 8}, ["made on 8 x TPU v5e, this is 1 x cpu"]),
        ("gpu", "", {}, ["adds in an order that changes from time to time"]),
        ("gpu", "--xla_gpu_deterministic_ops=true", {}, []),
        ("gpu", "", {"kind": "cpu", "platform": "cpu", "count": 1}, ["differ in their last bits", "XLA_FLAGS=--xla_gpu"]),
    ],
)  # fmt: skip
def test_what_may_make_numbers_differ_is_told(platform, flags, was, tells, monkeypatch):
    monkeypatch.setattr(rebuild.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(rebuild.jax, "device_count", lambda: 1)
    monkeypatch.setenv("XLA_FLAGS", flags)
    notes = rebuild.inexact({"device": {}, "continued": [{"device": was}]})
    assert len(notes) == len(tells) and all(tell in note for tell, note in zip(tells, notes, strict=True))


def test_out_is_written_and_nothing_else(whole, tmp_path, capfd):
    before = files(whole)
    code, out, _ = said(capfd, whole, "--step=6", "--json", f"--out={tmp_path}/made/here")
    assert code == 0 and files(whole) == before
    assert parse((tmp_path / "made/here/replay.json").read_text()) == parse(out)


# ------------------------------------------------------------------ what it holds


def live_bytes():
    """Bytes of all arrays on the device; of two that share a buffer, once."""
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if not x.is_deleted()}.values())


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("what", ["the same", "another number", "not finite"])
def test_two_states_on_the_device_at_most(what, whole, once, tmp_path, monkeypatch):
    """Bytes of all live arrays before and after each program, and around the search operation by operation, in whole states."""
    folder = once if what == "not finite" else whole
    if what == "another number":
        folder = tmp_path / "run"
        shutil.copytree(whole, folder)
        text = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in text]
        changed = [row | {"loss": row["loss"] + 1e-3} if row["step"] == 13 and "loss" in row else row for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    held: list[tuple[str, float]] = []

    def held_by(name, f):
        def called(*arguments):
            held.append((name, live()))
            result = f(*arguments)
            held.append((f"after {name}", live()))
            return result

        return called

    def live():
        return (live_bytes() - before) / size

    original = rebuild.compile_step

    def compiled(parts, *more):
        program = original(parts, *more)
        return replace(program, step=held_by("the step", program.step))

    again = Again.of(folder)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(again.parts.abstract))
    monkeypatch.setattr(rebuild, "compile_step", compiled)
    monkeypatch.setattr(rebuild, "first_nonfinite", held_by("the search", rebuild.first_nonfinite))
    assert again.program and again.everything
    gc.collect()
    before = live_bytes()
    (done,) = again.replay([7 if what == "not finite" else 13])
    assert (done.same, done.steady, done.finite) == {
        "the same": (True, None, True),
        "another number": (False, True, True),
        "not finite": (True, None, False),
    }[what]
    count = {"the same": 4, "another number": 5, "not finite": 2}[what]
    names = [name for name, _ in held]
    assert names.count("the step") == count and ("the search" in names) == (what == "not finite")
    assert held[0][1] == pytest.approx(1, abs=0.1), "the state itself is seen"
    assert max(states for _, states in held) < 2.1, held


# ------------------------------------------------------------------ steps that were not


@pytest.mark.usefixtures("usual")
def test_the_step_that_stopped_a_run(once, capfd):
    before = files(once)
    again = told(capfd, once, "--step=7")
    assert again["from"] == "checkpoint 6 and the batch kept in nonfinite/7" and again["finite"] is False
    assert again["nonfinite"] == json.loads((once / "summary.json").read_text())["nonfinite"]["first"]
    assert again["loss"] == "nan" and again["same"] is True
    code, out, _ = said(capfd, once, "--step=7")
    assert code == 0 and summary(once)["nonfinite"]["where"] in out
    assert files(once) == before


@pytest.mark.usefixtures("usual")
def test_a_step_that_was_passed_over_and_those_after_it(calm, schemes, tmp_path, capfd):
    folder = tmp_path / "run"
    assert run(calm, folder, residual__name=f"{schemes}:ONCE", train__on_nonfinite="skip") == 0
    again = told(capfd, folder, "--step=7")
    assert again["from"] == "the state kept in nonfinite/7" and again["nonfinite"]["block"] == 1
    later = told(capfd, folder, "--step=9")  # through step 7, from checkpoint 5
    assert later["from"] == "checkpoint 5" and later["same"] is True and later["finite"] is True


def numbers(again):
    return np.float32(again["loss"]), np.float32(again["grad_norm"])


@pytest.fixture(scope="module", params=["at once", "after a kill"])
def rolled(request, calm, tmp_path_factory):
    """A run that met a bad batch at step 8, went back to step 5 and on; killed before its next save and continued, or not. Its programs."""
    from test_faults import plant

    folder, known = tmp_path_factory.mktemp("rolled_back") / "run", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "KNOWN", known)
        plant(patch, 7)
        if request.param == "after a kill":
            with runs.at_batch(13, functools.partial(fails, "as a kill would")):
                assert run(calm, folder, train__on_nonfinite="rollback") == 1
            assert runs.steps(folder) == [5] and len(runs.rows(folder, "rolled_back_from")) == 1
        assert run(calm, folder, train__on_nonfinite="rollback") == 0
    return folder, known


@pytest.fixture
def rolled_back(rolled, usual, monkeypatch):
    """The folder; the batch is as bad as it was."""
    from test_faults import plant

    plant(monkeypatch, 7)
    monkeypatch.setattr(runs, "KNOWN", rolled[1])
    return rolled[0]


def fails(why):
    raise OSError(why)


def test_after_a_rollback_the_batches_are_those_of_the_run(rolled_back, capfd):
    for step in (7, 12):
        again = told(capfd, rolled_back, f"--step={step}")
        assert again["same"] is True and again["from"] == f"checkpoint {step - 2}"
        assert numbers(again) == numbers(logged(rolled_back, step))


def test_both_tries_of_a_step_that_was_done_again_can_be_replayed(rolled_back, capfd):
    bad = told(capfd, rolled_back, "--step=8")
    assert bad["from"] == "the state kept in nonfinite/8" and bad["finite"] is False
    assert bad["nonfinite"]["part"] == "loss" and bad["same"] is True
    assert bad["notes"] == [
        "this is the try of step 8 that was not finite; the run did step 8 again afterwards, which --repeated replays"
    ]
    good = told(capfd, rolled_back, "--step=8", "--repeated")
    assert good["from"] == "checkpoint 5" and good["finite"] is True and good["nonfinite"] is None
    assert good["same"] is True and numbers(good) == numbers(logged(rolled_back, 8))
    assert good["notes"] == [
        "the run did step 8 twice; this is the repeat that it went on from, and the try before is kept in nonfinite/8, which "
        "--repeated leaves aside"
    ]
    (note,) = told(capfd, rolled_back, "--step=7")["notes"]
    assert (
        note
        == "the run did step 7 twice; this is the repeat that it went on from, and the try before cannot be replayed"
    )
    assert not told(capfd, rolled_back, "--step=9")["notes"], "the rollback came before it"


def test_only_a_step_that_was_done_again_has_a_repeat(rolled_back, whole, capfd):
    for folder, step in ((rolled_back, 9), (whole, 13)):
        code, out, err = said(capfd, folder, f"--step={step}", "--repeated")
        assert code == 2 and out == "" and f"did step {step} once; leave it out" in err and err.count("\n") == 1


def test_a_study_of_one_more_step_starts_from_the_run_and_not_from_the_try(rolled_back):
    """The state kept before the bad try of step 8 is not that of the run at step 7."""
    from resjax.train.subject import Trained

    again = Again.of(rolled_back)
    kept, _ = again.before(8)
    trained = Trained(again, 7)
    trained.__dict__["cursor"] = 10  # there is no checkpoint of step 7 that would say it
    after = trained.next_model()
    (done,) = again.replay([8], kept=False)
    assert done.finite and int(kept.step) == 7 and int(kept.cursor) == 7
    state, _ = again.before(9)
    state = again._up_to(state, 9)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(after), state.params)


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
        (["--spike=1", "--repeated"], ["--repeated is of --step", "leave --repeated out"]),
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


@pytest.mark.usefixtures("usual")
def test_a_fork_without_its_first_checkpoint_is_refused_and_with_it_is_not(whole, config, tmp_path, capfd):
    folder = tmp_path / "fork"
    assert run(config, folder, f"--from={whole}@5", train__keep=1) == 0
    code, _, err = said(capfd, folder, "--step=7")
    assert code == 2 and "keeps no checkpoint before it (the first is of step 20)" in err
    kept = tmp_path / "kept"
    assert run(config, kept, f"--from={whole}@5", seed=3) == 0
    assert told(capfd, kept, "--step=7")["same"] is True


@pytest.mark.usefixtures("usual")
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


@pytest.mark.usefixtures("usual")
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
    # the doctor names it, with the command that does this
    (found,) = [one for one in diagnose(case_of(str(folder), start=False)).findings if one.kind == "loss spikes"]
    assert found.where == "step 60" and found.evidence.startswith("1 (1 recovered)")
    command = shlex.split(found.advice.partition(" rebuilds")[0])
    assert command[:3] == ["python", "-m", "resjax.replay"] and told(capfd, *command[3:]) == again
    code, _, err = said(capfd, folder, "--spike=2")
    assert code == 2 and "--spike is 2" in err and "has 1 (1 at step 60)" in err
