"""Is a value that is not finite, planted in a run, met by the command, kept, and named by the run, the doctor and the replay alike?"""

import json
import shlex
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest

import planted
import runs
from planted import both, put
from resjax import checkup, doctor, replay
from resjax.data import Pipeline
from resjax.train import rebuild
from resjax.train.checkpoint import Checkpoints
from resjax.train.forensics import first_nonfinite
from resjax.train.rebuild import Again
from resjax.train.writers import parse

pytestmark = pytest.mark.usefixtures("quick")
SLOW = pytest.mark.slow
DONE, BAD = 2, 3  # steps before the fault is planted, and the one that meets it

SCHEME = """
import jax.numpy as jnp
from resjax.residual import CATALOGUE
from resjax.residual.gains import Learned

def root(x):
    return jnp.sqrt(x)

ROOTED = CATALOGUE["pre_ln"].but(name="rooted", scale=Learned(1.0, "scalar", through=root))
"""
CONFIG = """
from resjax.config import default

def get_config():
    config = default()
    config.data.source, config.data.length, config.data.batch = "markov", 8, 2
    config.model.depth, config.model.width, config.model.heads = 8, 16, 2
    config.model.mlp, config.model.norm_eps = "relu", 1e-30
    config.train.steps, config.train.log_every, config.train.eval_every = 5, 1, 0
    return config
"""
HALF = {"precision__compute": "float16", "precision__stream": "float16"}
SITE = "stack/runs/0/sites/1/"
WRITE, FC_IN, NORM = f"{SITE}branch/write/kernel", f"{SITE}branch/fc_in/kernel", f"{SITE}norm_in/gain"


@dataclass(frozen=True)
class Fault:
    """Where the value arises in words, which it is, what the clause about it holds; and how it is planted in the parameters."""

    where: str
    kinds: tuple[str, ...]
    tells: str
    change: planted.Change | None = None


INFINITE = ("+Inf", "-Inf")
FAULTS = {
    "NaN in a matrix": Fault(
        f"parameter params/{WRITE}, block 7 (met in the forward pass, block 7, mlp, output)",
        ("NaN",),
        "1 NaN in",
        put(np.nan, WRITE, 7, 3, 2),
    ),
    "the gradient only": Fault(
        "backward pass, block 4, mlp, scale of the update",
        INFINITE,
        "operation div",
        put(0.0, f"{SITE}gains/scale/gain", 4),
    ),
    "norm": Fault(
        "forward pass, block 5, mlp, norm before the branch", INFINITE, "largest finite magnitude", put(2e38, NORM, 5)
    ),
    # of a token that is all zeros the variance is 0, and the derivative of its root overflows
    "norm, backward": Fault(
        "backward pass, block 0, attention, norm before the branch",
        (*INFINITE, "NaN"),
        "largest finite magnitude",
        both(put(0.0, "embed", slice(None)), put(0.0, "positions", 3)),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The configuration and the scheme."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.py").write_text(CONFIG)
    (folder / "own.py").write_text(SCHEME)
    return folder / "config.py", f"{folder / 'own.py'}:ROOTED"


def begun(files, folder, **fields):
    """A run that was stopped after its first steps, and how it goes on."""
    config, scheme = files
    assert runs.stopped(config, folder, DONE, residual__name=scheme, **fields) == 143
    assert runs.steps(folder) == [DONE]
    return folder, lambda place: runs.run(config, place, residual__name=scheme, **fields)


@pytest.fixture(scope="module")
def healthy(files, tmp_path_factory):
    return begun(files, tmp_path_factory.mktemp("healthy") / "run")


@pytest.fixture(scope="module")
def half(files, tmp_path_factory):
    return begun(files, tmp_path_factory.mktemp("half") / "run", **HALF)


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    """Only the usual groups are measured again, and no scheme's start: both are tested elsewhere."""
    monkeypatch.setattr(rebuild, "HEALTH_GROUPS", ("forward", "backward"))
    monkeypatch.setattr(checkup, "start_of", lambda *_: checkup.Start())


def named_throughout(folder, go_on, fault, capfd):
    """The run stops, what it met is kept, and all who are asked name the same."""
    assert go_on(folder) == 4
    said = capfd.readouterr().out
    met = runs.summary(folder)["nonfinite"]
    assert met["step"] == BAD and met["first"]["where"] == fault.where and met["first"]["kind"] in fault.kinds
    assert fault.tells in met["where"] and met["where"] in said and met["replay"] in said
    kept = folder / "nonfinite" / str(BAD)
    assert json.loads((kept / "report.json").read_text())["first"] == met["first"] and (kept / "batch.npz").is_file()
    assert runs.steps(folder)[-1] == DONE and runs.rows(folder)[-1]["update_applied"] is False

    assert doctor.main([str(folder), "--studies=none", "--json", "--check"]) == 1
    first = parse(capfd.readouterr().out)["findings"][0]
    assert (first["kind"], first["where"], first["step"]) == ("non-finite value", fault.where, BAD)
    assert met["where"] in first["evidence"] and first["advice"].startswith(f"{met['replay']} runs this step again")

    words = shlex.split(met["replay"])
    assert words[:3] == ["python", "-m", "resjax.replay"] and replay.main([*words[3:], "--json"]) == 0
    again = parse(capfd.readouterr().out)
    assert again["finite"] is False and again["nonfinite"] == met["first"] and again["same"] is True
    return again


@pytest.mark.parametrize("name", [name if i < 2 else pytest.param(name, marks=SLOW) for i, name in enumerate(FAULTS)])
def test_a_value_planted_in_the_parameters(name, healthy, tmp_path, capfd):
    run, go_on = healthy
    again = named_throughout(planted.spoilt(run, tmp_path / "run", FAULTS[name].change), go_on, FAULTS[name], capfd)
    forward = np.asarray(again["probes"]["finite"], np.float32)
    assert forward.all() == ("backward" in FAULTS[name].where)


def test_a_token_that_the_model_does_not_have(healthy, tmp_path, monkeypatch, capfd):
    """There is no NaN among tokens; the loss of one beyond the vocabulary is."""
    run, go_on = healthy
    shutil.copytree(run, tmp_path / "run")
    original = Pipeline.batch

    def batch(self, i):
        tokens = original(self, i)
        if i == BAD - 1:
            tokens[1, 5] = 99
        return tokens

    where = "batch, row 1, position 5, where token 99 is none of the model's (met in the forward pass, loss)"
    fault = Fault(where, ("NaN",), "1 NaN in 16 elements")

    def broken(folder):
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "batch", batch)
            return go_on(folder)

    named_throughout(tmp_path / "run", broken, fault, capfd)  # the replay draws no such batch: it was kept


def at_next_step(folder, change):
    """The first value that is not finite in the step after the newest checkpoint, its parameters changed."""
    again = Again.of(folder)
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        state, _, _ = checkpoints.restore(DONE, again.parts.abstract)
    finally:
        checkpoints.close()
    state = replace(state, params=planted.changed(state.params, change))
    return first_nonfinite(again.parts, state, again.pipeline.batch(DONE))


@SLOW
def test_a_float16_overflow_at_66246(half, tmp_path, capfd):
    """A11: the feed-forward's output in block 7; not the norm of the block after it."""
    run, go_on = half
    larger = planted.at_block(7, 100.0, "fc_in")
    far = at_next_step(run, both(larger, planted.at_block(7, 1e6, "sites/1/branch/write")))
    change = both(larger, planted.at_block(7, 1e6 * 66246 / far.unrounded, "sites/1/branch/write"))
    fault = Fault("forward pass, block 7, mlp, output", INFINITE, "in float32 it would be 66,2")
    named_throughout(planted.spoilt(run, tmp_path / "run", change), go_on, fault, capfd)


@SLOW
def test_a_float16_overflow_at_the_residual_add(half, tmp_path, capfd):
    """Stream and update both fit, their sum does not."""
    run, go_on = half
    large = both(put(6e4, "positions", slice(None), 0), put(1e2, WRITE, 7, slice(None), 0))
    assert at_next_step(run, large) is None
    change = both(large, put(1.5e3, WRITE, 7, slice(None), 0))
    fault = Fault("forward pass, block 7, mlp, residual add", INFINITE, "largest finite magnitude before 60,000")
    named_throughout(planted.spoilt(run, tmp_path / "run", change), go_on, fault, capfd)
