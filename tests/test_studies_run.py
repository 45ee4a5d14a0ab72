"""Do studies that want more of a run than its model get it: the next step of its own, the batches of steps gone by?"""

import hashlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import runs
from resjax.health.studies import STUDIES
from resjax.residual import Context
from resjax.train.subject import subject_of
from resjax.train.writers import read_json, write_json
from runs import files, run

pytestmark = pytest.mark.usefixtures("quick")
PLAIN = dict(optimizer__name="sgd", optimizer__momentum=0.0, optimizer__weight_decay=0.0, optimizer__clip=0.0)
RATE = dict(optimizer__lr=0.5, optimizer__schedule="linear", optimizer__warmup=0)


def digest(batch):
    return hashlib.sha256(np.ascontiguousarray(batch).tobytes()).hexdigest()[:8]


@pytest.fixture(scope="module")
def plain(calm, tmp_path_factory):
    """A run by plain SGD, and the hashes of its batches."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    with runs.recorded_batches() as seen:
        assert run(calm, folder, **PLAIN, **RATE) == 0
    return folder, seen


def test_the_update_is_one_step_of_sgd_made_by_hand(plain):
    folder, _ = plain
    before = files(folder)
    subject = subject_of(folder, step=10, tokens=128)
    found = STUDIES["update"].run(subject)
    assert files(folder) == before
    rate = 0.5 * (1 - 10 / 20)
    assert found["lr"] == pytest.approx(rate)
    graphdef, params = nnx.split(subject.model)
    batch = jnp.asarray(subject.origin.training_batch(11))

    @jax.jit
    def stepped(params):
        nats = lambda p: nnx.merge(graphdef, p).objective(batch, Context(step=jnp.int32(10)))[0]  # noqa: E731
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(nats)(params))

    logits = jax.jit(lambda p, tokens: nnx.merge(graphdef, p)(tokens, subject.context)[0])
    after = stepped(params)
    moved = [np.asarray(logits(after, b[:, :-1]) - logits(params, b[:, :-1]), np.float64) for b in subject.batches]
    change = np.linalg.norm(np.concatenate(moved), axis=-1).mean()
    assert found["change"] == pytest.approx(change, rel=1e-3) and change > 1e-3
    assert found["tokens"] == 128 and 0 < found["relative"] < 1


def test_at_a_rate_of_zero_nothing_moves(plain, tmp_path):
    folder, _ = plain
    after_the_end = STUDIES["update"].run(subject_of(folder, tokens=64))  # a linear schedule ends at 0
    assert after_the_end["lr"] == 0 and after_the_end["change"] == 0 and after_the_end["relative"] == 0
    frozen = tmp_path / "run"
    shutil.copytree(folder, frozen)
    facts = read_json(frozen / "config.json")
    facts["optimizer"]["lr"] = 0.0
    write_json(frozen / "config.json", facts)
    found = STUDIES["update"].run(subject_of(frozen, step=5, tokens=64))
    assert found["lr"] == 0 and found["change"] == 0


def test_batches_are_those_that_the_run_drew(plain):
    folder, seen = plain
    for at in (5, 20):
        origin = subject_of(folder, step=at, tokens=64).origin
        assert [digest(origin.training_batch(step)) for step in range(1, 21)] == seen


@pytest.mark.slow
def test_batches_after_a_rollback_are_those_that_the_run_went_on_with(calm, tmp_path, monkeypatch):
    from test_faults import plant

    with runs.compiled_anew(), monkeypatch.context() as patch, runs.recorded_batches() as seen:
        plant(patch, 7)
        assert run(calm, tmp_path / "run", train__on_nonfinite="rollback") == 0
        back = [row for row in runs.rows(tmp_path / "run", "rolled_back_from")]
    assert len(back) == 1 and back[0]["step"] == 5
    last = seen[-15:]  # steps 6 to 20, with later batches
    for at in (5, 10, 20):
        origin = subject_of(tmp_path / "run", step=at, tokens=64).origin
        assert [digest(origin.training_batch(step)) for step in range(1, 21)] == seen[:5] + last


def test_steadiness_of_a_run(plain):
    folder, _ = plain
    before = files(folder)
    found = STUDIES["steadiness"].run(subject_of(folder, tokens=64))
    assert files(folder) == before
    assert found["logged"] == 8 and found["every"] == 1
    np.testing.assert_array_equal(found["steps"], range(13, 21))
    assert np.isfinite([found["ratio"], found["period"], found["chance"], found["lag1"]]).all()
    # in so few steps the model hardly moves: what swings are the batches
    assert found["ratio"] == pytest.approx(1, abs=0.3)


def test_a_step_that_is_not_finite_is_no_update(plain, tmp_path):
    folder, _ = plain
    broken = tmp_path / "run"
    shutil.copytree(folder, broken)
    facts = read_json(broken / "config.json")
    scheme = tmp_path / "own.py"
    scheme.write_text(
        "import jax.numpy as jnp\nfrom resjax.residual import CATALOGUE\n"
        "BROKEN = CATALOGUE['pre_ln'].but(scale=lambda site: jnp.where(site.step >= 10, jnp.nan, 1.0))\n"
    )
    facts["residual"]["name"] = f"{scheme}:BROKEN"
    write_json(broken / "config.json", facts)
    found = STUDIES["update"].run(subject_of(broken, step=10, tokens=64))
    assert np.isnan(found["change"])
