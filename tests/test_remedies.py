"""Does the command line accept every command that the doctor suggests, and does one of them do what it says?"""

import shlex
from dataclasses import replace

import pytest

import runs
from resjax import main
from resjax.config.load import load
from resjax.config.scheme import scheme as scheme_of
from resjax.config.validate import resolve
from resjax.health.diagnosis.case import recorded_in
from resjax.health.diagnosis.finding import Finding
from resjax.health.diagnosis.remedies import KINDS, advised
from resjax.train import fork
from resjax.train.assemble import assemble
from resjax.train.checkpoint import saved_steps

pytestmark = pytest.mark.usefixtures("quick")

# two runs between which every remedy has something to change
ODD = {
    "residual__skip": 0.5,
    "init__embed_gain": 2,
    "init__out_scale": 1,
    "precision__compute": "float16",
    "precision__stream": "bfloat16",
    "optimizer__b2": 0.999,
    "optimizer__warmup": 2,
    "optimizer__clip": 0,
}
SINCE = 12  # of a finding, between two checkpoints
REMEDIES = tuple(dict.fromkeys(remedy for remedies in KINDS.values() for remedy in remedies))


@pytest.fixture(scope="module")
def suggested(tmp_path_factory):
    """By what is suggested: the run, and the command as the doctor prints it."""
    found = {}
    for name, fields in (("usual", {"residual__name": "post_ln"}), ("odd", ODD)):
        folder = tmp_path_factory.mktemp(name)
        run = folder / "a run"
        assert runs.run(runs.calm(folder), run, train__eval_every=0, **fields) == 0
        case = recorded_in(str(run))
        case = replace(case, saved=saved_steps(run / "checkpoints"))
        findings = [Finding(kind, "somewhere", 20, "", since=SINCE) for kind in KINDS]
        found |= {one.what: (run, one) for one in reversed(advised(case, findings))}
    return found


def test_every_remedy_is_suggested_to_some_run(suggested):
    assert suggested.keys() == {remedy.what for remedy in REMEDIES}


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.what)
def test_a_suggested_command_is_accepted(remedy, suggested):
    """Everything that the command refuses is looked for, but for the training; a state to go on from fits."""
    run, advice = suggested[remedy.what]
    words = shlex.split(advice.command)
    assert words[:3] == ["python", "-m", "resjax.main"]
    others, overrides = main.split_overrides(words[3:])
    arguments, unknown = main.parser().parse_known_args(others)
    assert not unknown and arguments.config == str(run) and overrides[: len(advice.overrides)] == [*advice.overrides]
    config = resolve(load(arguments.config, overrides), "cpu")
    scheme_of(config)
    assert (arguments.source is not None) == remedy.goes_on
    if remedy.goes_on:
        assert arguments.source == f"{run}@10"  # the last one before the trouble
        state, lineage, skipped = fork.load(fork.parse(arguments.source), assemble(config, 32))
        assert int(state.step) == 10 and not skipped and {*lineage["changed"]} == {path for path, _ in overrides}


def test_a_suggested_command_trains(suggested, tmp_path, capfd):
    """From the checkpoint before the trouble, at the lower rate, to the end of the run; here two steps of it."""
    _, advice = suggested["a third of the learning rate"]
    words = [*shlex.split(advice.command)[3:], f"--workdir={tmp_path / 'on'}", "--config.train.steps=12"]
    assert main.main(words) == 0, capfd.readouterr().err
    assert [row["step"] for row in runs.rows(tmp_path / "on")] == [11, 12]
    assert max(row["lr"] for row in runs.rows(tmp_path / "on")) < 1.1e-3
