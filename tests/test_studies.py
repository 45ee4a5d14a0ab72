"""Do the studies of a state answer right where the answer is known, and do they run under every kind of carry?"""

import json
from dataclasses import replace
from math import atan, pi

import jax.numpy as jnp
import numpy as np
import pytest

from kit import make, start, variables
from resjax.health.geometry import angular_distance
from resjax.health.metrics import cka, cka_of_pairs
from resjax.health.studies import STUDIES, Subject
from resjax.health.studies.ablation import ablation, effective
from resjax.health.studies.lens import lens
from resjax.health.studies.massive import massive, row
from resjax.health.studies.order import order
from resjax.health.studies.rounding import FORMATS, in_float32, rounding
from resjax.health.studies.similarity import angles, late, similarity
from resjax.residual import CATALOGUE, Context
from resjax.train.writers import to_json
from test_catalogue import ALL

MINE = ("similarity", "ablation", "order", "lens", "massive", "rounding")
SCHEMES = ("pre_ln", "post_ln", "hyper_connections:dynamic", "denseformer", "attnres", "ngpt", "reversible", "highway")
TEXT = np.random.default_rng(3).integers(0, 8, (2, 3, 7)).astype(np.int32)


pytestmark = pytest.mark.usefixtures("quickly")


def subject(name="pre_ln", model=None, batches=TEXT, **shape):
    return Subject(model or make(ALL[name], **({"depth": 4, "width": 16} | shape)), batches)


def turning(angle_ratio, depth=3):
    """A model each of whose blocks adds, at right angles to the embedding, a vector of ``angle_ratio`` times its length.

    Token i is the i-th unit vector; feed-forwards without norm read it and write the (8 + i)-th.
    """
    scheme = CATALOGUE["pre_ln"].but(norm_in=None)
    model = start(scheme, depth=depth, width=16, vocab=8, mlp="relu", mlp_ratio=1.0, positions="none")
    model.embed[...] = jnp.eye(8, 16)
    attention, mlp = (site.branch for site in model.stack.runs[0].sites)
    for variable in variables(attention):
        variable[...] = jnp.zeros_like(variable[...])
    reads = jnp.zeros((16, 16)).at[:8, :8].set(jnp.eye(8))
    writes = jnp.zeros((16, 16)).at[:8, 8:].set(angle_ratio * jnp.eye(8))
    mlp.fc_in.kernel[...] = jnp.broadcast_to(reads, (depth, 16, 16))
    mlp.write.kernel[...] = jnp.broadcast_to(writes, (depth, 16, 16))
    return model


def silenced(model, block):
    """The model, whose matrices that write are zeros in one block."""
    for variable in variables(model.stack.runs[0]):
        if variable.role == ("write",):
            variable[...] = variable[...].at[block].set(0)
    return model


# ------------------------------------------------------------------ similarity


@pytest.mark.parametrize("r", [0.1, 0.3, 1.0])
def test_x38_the_angle_of_an_update_at_right_angles(r):
    found = similarity(subject(model=turning(r)))
    turn = [atan(r * l) / pi for l in range(4)]
    want = np.abs(np.subtract.outer(turn, turn))
    assert np.allclose(found["angular"], want, atol=1e-6)
    assert found["angular"][0, 1] == pytest.approx({0.1: 0.0317, 0.3: 0.0928, 1.0: 0.25}[r], abs=5e-5)
    assert found["influence"][0] == pytest.approx({0.1: 0.0050, 0.3: 0.0422, 1.0: 0.293}[r], abs=5e-4)
    assert found["influence"] == pytest.approx(1 - np.cos(pi * np.diff(turn)), abs=1e-6)
    assert found["blocks"] == [0, 1, 2, 3]
    assert found["late"] == pytest.approx(want[2, 3], abs=1e-6)
    assert np.allclose(found["cka"], 1, atol=1e-5)  # of one-hot tokens, the second half is the first once more


def test_a_rotated_stream_is_the_same_to_cka_and_not_to_the_angle():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(5, 40, 6))
    turn, _ = np.linalg.qr(draw.normal(size=(6, 6)))
    streams = jnp.asarray(np.stack([x, 3 * x @ turn + 1, draw.normal(size=x.shape)]), jnp.float32)
    table = np.asarray(cka_of_pairs(streams))
    assert np.allclose(table[0, :2], 1, atol=1e-5) and table[0, 2] < 0.1
    assert np.asarray(angles(streams))[0, 1] > 0.2


@pytest.mark.parametrize("rows", [4, 40])  # fewer than the width, and more
def test_tables_are_those_of_the_pairs(rows):
    streams = jnp.asarray(np.random.default_rng(1).normal(size=(3, rows, 12)), jnp.float32)
    by_angle, by_cka = np.asarray(angles(streams)), np.asarray(cka_of_pairs(streams))
    for i in range(3):
        for j in range(3):
            assert by_angle[i, j] == pytest.approx(float(angular_distance(streams[i], streams[j])), abs=1e-6)
            assert by_cka[i, j] == pytest.approx(float(cka(streams[i], streams[j])), abs=1e-5)


def test_streams_without_directions_have_no_similarity():
    streams = jnp.stack([jnp.ones((4, 6)), jnp.eye(4, 6), jnp.full((4, 6), jnp.nan), jnp.zeros((4, 6))])
    by_angle, by_cka = np.asarray(angles(streams)), np.asarray(cka_of_pairs(streams))
    assert np.isnan(by_cka[[0, 2, 3]]).all() and by_cka[1, 1] == pytest.approx(1)
    assert np.isnan(by_angle[2:]).all() and np.isfinite(by_angle[:2, :2]).all()


def test_the_last_third():
    angular = np.arange(49.0).reshape(7, 7)
    assert late(angular, list(range(7)), 6) == np.median([angular[4, 5], angular[4, 6], angular[5, 6]])
    assert np.isnan(late(angular, [0, 1], 1))


# ------------------------------------------------------------------ ablation


def test_a_block_of_zeros_is_worth_nothing_and_dead():
    found = ablation(subject(model=silenced(make(CATALOGUE["pre_ln"], width=16), 2)))
    assert found["delta"][2] == 0 and not found["delta_site"][2].any()
    assert list(found["dead"]) == [False, False, True, False]
    assert np.all(found["delta"][[0, 1, 3]] != 0) and not found["ratio"][2].any()


def test_ablation_is_the_loss_of_a_model_with_zeros():
    whole = subject(model=make(CATALOGUE["pre_ln"], width=16))
    without = subject(model=silenced(make(CATALOGUE["pre_ln"], width=16), 1))
    found = ablation(whole)
    assert found["loss"] == pytest.approx(whole.loss, rel=1e-6)
    assert found["delta"][1] == pytest.approx(without.loss - whole.loss, rel=1e-4)
    last = found["delta_site"][3, 1]  # of the last site, by hand
    keep = np.ones((4, 2), np.float32)
    keep[3, 1] = 0
    context = Context(keep=jnp.asarray(keep))
    losses = [float(whole.model.objective(jnp.asarray(batch), context)[0]) for batch in TEXT]
    assert last == pytest.approx(np.mean(losses) - whole.loss, rel=1e-3, abs=1e-5)


def test_effective_depth_counts_blocks():
    assert effective(np.array([0.5, 0.5, 0.5, -2.0])) == pytest.approx(3)
    assert effective(np.array([1.0, 0.0, 0.0])) == 1
    assert np.isnan(effective(np.array([-1.0, 0.0]))) and np.isnan(effective(np.array([np.nan, 1])))


def test_of_many_blocks_some_are_looked_at():
    some = replace(subject(depth=9), most=3)
    found = {name: STUDIES[name].run(some) for name in ("ablation", "order", "lens", "similarity")}
    assert found["ablation"]["blocks"] == [0, 4, 8] and found["ablation"]["delta"].shape == (3,)
    assert found["order"]["blocks"] == [0, 4, 7]
    assert found["lens"]["blocks"] == found["similarity"]["blocks"] == [0, 3, 6, 9]
    assert found["similarity"]["influence"].shape == (9,)
    assert found["lens"]["loss"][-1] == pytest.approx(some.loss, rel=1e-6)


# ------------------------------------------------------------------ order


def test_swapping_equal_blocks_costs_nothing():
    model = make(CATALOGUE["pre_ln"], width=16)
    for variable in variables(model.stack.runs[0]):
        variable[...] = variable[...].at[2].set(variable[...][1])
    found = order(subject(model=model))
    assert found["blocks"] == [0, 1, 2]
    assert found["swap"][1] == 0 and np.all(found["swap"][[0, 2]] != 0)


def test_a_swap_is_the_loss_of_the_model_with_both_changed():
    model, other = (make(CATALOGUE["pre_ln"], width=16) for _ in range(2))
    for variable in variables(other.stack.runs[0]):
        variable[...] = variable[...][jnp.array([0, 2, 1, 3])]
    whole = subject(model=model)
    assert order(whole)["swap"][1] == pytest.approx(subject(model=other).loss - whole.loss, rel=1e-4)


def test_what_the_first_block_hands_on_cannot_come_later():
    swap = order(subject("value_residual"))["swap"]
    assert np.isnan(swap[0]) and np.isfinite(swap[1:]).all()
    assert order(subject(depth=1))["swap"].shape == (0,)


# ------------------------------------------------------------------ lens


def test_the_lens_ends_at_the_loss():
    looked = subject()
    found = lens(looked)
    assert found["loss"][-1] == looked.loss and found["settled"][-1] == 1
    assert found["loss"].shape == found["settled"].shape == (5,)
    assert np.all(found["settled"][:-1] < 1)


def test_the_lens_of_blocks_that_add_nothing_is_settled_from_the_start():
    model = make(CATALOGUE["pre_ln"], width=16)
    for block in range(4):
        silenced(model, block)
    looked = subject(model=model)
    found = lens(looked)
    assert np.all(found["settled"] == 1) and np.all(found["loss"] == looked.loss)


# ------------------------------------------------------------------ massive activations


def test_a_planted_feature_is_found():
    """A bias of the writing matrix at block 2, feature 5, and one token whose embedding has more of it."""
    model = make(CATALOGUE["pre_ln"], width=16, bias=True)
    model.stack.runs[0].sites[1].branch.write.bias[...] = jnp.zeros((4, 16)).at[2, 5].set(1e4)
    model.embed[...] = model.embed[...].at[3, 5].add(500)
    found = massive(subject(model=model))
    assert list(found["feature"]) == [5] * 4 and list(found["token"]) == [3] * 4
    assert np.all(TEXT[..., found["position"]] == 3, axis=-1).any()
    assert found["largest"][2] == pytest.approx(1e4, rel=0.1) and found["largest"][1] < 1e3
    assert list(found["features_above"][2]) == [1, 1] and list(found["features_above"][1]) == [1, 0]
    assert found["ratio"] == pytest.approx(found["largest"] / found["median"])


def test_extremes_of_massive_activations():
    tokens = np.arange(6).reshape(2, 3)
    zeros = row(np.zeros((2, 3, 4), np.float32), tokens)
    assert np.isnan(zeros["ratio"]) and zeros["features_above"] == [0, 0]
    one = np.zeros((2, 3, 4), np.float32)
    one[1, 2, 3] = -7
    found = row(one, tokens)
    assert (found["largest"], found["feature"], found["position"], found["token"]) == (7, 3, 2, 5)
    assert np.isposinf(found["ratio"])
    one[0, 0, 0] = np.nan
    found = row(one, tokens)
    assert np.isnan(found["largest"]) and found["feature"] == found["token"] == -1


# ------------------------------------------------------------------ rounding


def test_rounding_in_float32_changes_nothing():
    looked = subject()
    found = rounding(looked)
    assert found["loss"] == pytest.approx(looked.loss, rel=1e-6)
    exact = found["formats"]["float32"]
    assert exact["loss"] == exact["stream_error"] == 0
    assert tuple(found["formats"]) == tuple(FORMATS)
    errors = {name: figures["stream_error"] for name, figures in found["formats"].items()}
    assert 0 < errors["float16"] < errors["bfloat16"] / 4 < errors["bfloat16 truncating"]
    bits = {name: figures["effective_bits"] for name, figures in found["formats"].items()}
    assert np.all(bits["float16"] > bits["bfloat16"] + 2) and np.all(bits["float32"] > bits["float16"] + 10)
    for name, figures in found["formats"].items():
        signed = figures["signed_error"]
        assert signed.shape == (4, 2)
        if name == "bfloat16 truncating":
            assert np.all(signed < -1e-3)
        elif "bfloat16" in name:
            assert abs(signed.mean()) < 2e-4


def test_small_updates_of_a_large_stream_are_swallowed():
    """Updates of 1/1000 of the stream: below half a spacing of bfloat16, above one of float16; at random they arrive in the mean."""
    model = turning(0.0)
    model.embed[...] = jnp.zeros((8, 16)).at[:, :8].set(jnp.eye(8)).at[:, 8:].set(jnp.eye(8))
    site = model.stack.runs[0].sites[1].branch
    site.write.kernel[...] = jnp.broadcast_to(jnp.zeros((16, 16)).at[:8, 8:].set(1e-3 * jnp.eye(8)), (3, 16, 16))
    formats = ("bfloat16", "float16", "bfloat16 stochastic")
    found = rounding(subject(model=model), formats)["formats"]
    assert np.all(found["bfloat16"]["swallowed"][:, 1] == 1) and np.all(found["bfloat16"]["effective_bits"][:, 1] == 0)
    assert np.all(found["float16"]["swallowed"][:, 1] == 0)
    assert np.all(found["bfloat16 stochastic"]["swallowed"][:, 1] > 0.5)
    assert np.isnan(found["bfloat16"]["effective_bits"][:, 0]).all()  # attention adds zeros


def test_a_stream_in_bfloat16_is_replayed_from_float32():
    model = make(CATALOGUE["pre_ln"], width=16, stream="bfloat16")
    assert in_float32(model).embedded(TEXT[0, :, :-1], Context()).dtype == jnp.float32
    assert model.shape.stream == "bfloat16"
    assert rounding(subject(model=model), ["bfloat16"])["formats"]["bfloat16"]["stream_error"] > 1e-3


# ------------------------------------------------------------------ all of them


def test_every_study_says_what_it_is():
    for name, study in STUDIES.items():
        assert study.name == name and study.title and study.what.endswith(".") and study.cost in ("quick", "slow")
    assert set(MINE) <= set(STUDIES)


TOLD = {"angular", "cka", "influence", "late", "delta", "delta_site", "swap", "loss", "settled", "largest", "median"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_every_study_runs_and_can_be_written(name):
    looked = subject(name)
    for study in MINE:
        result = STUDIES[study].run(looked)
        json.dumps(to_json(result), allow_nan=False)
        for key in TOLD & set(result):
            assert np.isfinite(result[key]).all(), (study, key)
