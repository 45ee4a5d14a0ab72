"""Do E01 and E18 say what their runs say? On runs of known truth, with seeds and cells lost; and what they measure, on tiny cases."""

import io
import json
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.special import log_softmax, softmax

from experiments.experiment import named
from experiments.parts import e01_chasing as chasing
from experiments.parts.e01_symmetric import least_loss
from experiments.runs import Runs
from experiments.shared import seen
from experiments.shared.skips import capped
from kit import fast, make
from resjax import sweep
from resjax.config.load import load
from resjax.data import markov
from resjax.health.studies import Subject
from resjax.models.lm import LM, Shape
from resjax.residual import CATALOGUE, Context, Init, NormDefaults

pytestmark = pytest.mark.usefixtures("quickly")
FLOORS = [
    {"source": "markov", "uniform": 3.466, "unigram": 2.845, "bigram": 2.326, "trigram": 1.787, "symmetric": 2.513},
    {"source": "stdlib", "uniform": 5.545, "unigram": 3.2, "bigram": 2.5, "trigram": 1.9},
]
FAILED = {"status": "failed", "outcome": None, "error": "it did not run"}
LOST = {
    "status": "diverged",
    "outcome": "nonfinite",
    "error": "step 9: the loss is not finite",
    "eval_loss": None,
    "last_loss": None,
}
LOST |= {"token_cosine": None, "profiles": {}, "studies": {}, "looks": {}}
SITES = np.arange(24).reshape(12, 2)


def line(fields, loss, outcome, cosine=0.3, fall=-0.02, rank=25.0, swing=(1.0, 0.5), look=None):
    """That of a run: |res X| / |X| falls by ``fall`` in the log a sub-layer."""
    noise = 0.003 * np.random.default_rng(zlib.crc32(repr(fields).encode())).normal()
    probes = {
        "token_cosine": np.full((12, 2), cosine), "effective_rank": np.full((12, 2), rank), "update_ratio": np.full((12, 2), 0.5),
        "update_cosine": np.zeros((12, 2)), "residual_frobenius": 0.8 * np.exp((fall + noise / 10) * SITES),
    }  # fmt: skip
    probes = {name: value.tolist() for name, value in probes.items()}
    probes["residual_composite"] = probes["residual_frobenius"]
    curve = [{"step": s, "loss": loss + np.exp(-s / 100)} for s in range(15, 601, 15)]
    look = {"late_angle": 0.1} if look is None else look
    return {
        "fields": fields, "config": {"data.source": "markov"}, "status": "done", "outcome": outcome, "first_loss": 3.5,
        "eval_loss": loss + noise, "last_loss": loss + noise, "token_cosine": cosine, "curve": curve,
        "profiles": {"1": probes, "600": probes}, "spikes": {"episodes": 0},
        "studies": {"steadiness": {"ratio": swing[0] + noise, "chance": swing[1]}}, "looks": {"600": look},
    }  # fmt: skip


def seen_look(chase, drift, angle=0.1):
    return {
        "late_angle": angle,
        "late_cka": 0.9,
        "chase": chase,
        "own": chase,
        "drift_output": drift,
        "drift_stream": drift,
    }


def calm(fields, **none):
    """The run of a cell of E01 when nothing swings: ``none`` changes those without skips."""
    text = fields.get("data.source") == "stdlib"
    if fields.get("residual.skip") == 0:
        shallow = fields.get("model.depth") == 2
        given = {
            "loss": 3.2 if text else 2.2 if shallow else 2.845,
            "outcome": None if text else "collapsed",
            "cosine": 1.0,
            "fall": -0.3,
        }
        return line(fields, **given | {"rank": 3.0, "look": seen_look(0.2, 0.001, 0.5)} | none)
    if fields.get("residual.scale") == 0:
        return line(
            fields, 2.5 if fields.get("model.tied") else 2.33, "partial" if fields.get("model.tied") else "bigram"
        )
    if "residual.attention.skip" in fields or "residual.mlp.skip" in fields:
        return line(fields, 2.6, "partial")
    if fields["residual.name"] == "shaped_skipless":
        return line(fields, 1.95 if "train.steps" in fields else 2.2, "trained")
    post = fields["residual.name"] == "post_ln"
    return line(fields, 2.1 if text or post else 2.0, None if text else "trained", look=seen_look(0.1, 0.2))


def settled(name, told, measured=FLOORS):
    """The verdicts on runs, one for every cell, by claim, reading and setting; the figure is drawn too."""
    experiment = named(name)
    runs = Runs(told(fields) for fields in experiment.cells("cpu"))
    with np.errstate(all="raise", under="ignore"):
        found = experiment.settle(runs, {"floors": measured}, "cpu")
    experiment.drawing(runs, {"floors": measured}).savefig(io.BytesIO(), format="svg")
    return {(f"{one.claim}/{one.reading}".strip("/"), one.settings.partition("gain 0.55, ")[2]): one for one in found}


def verdicts(found, setting):
    return {claim: one.verdict for (claim, where), one in found.items() if where.startswith(setting)}


# ------------------------------------------------------------------ E01


def test_a_network_that_collapses_calmly_is_told_as_that():
    found = settled("E01", calm)
    told = verdicts(found, "markov")
    assert told == {
        "C01/a standard block": "supported", "C01/any block": "refuted", "C17/branch off": "refuted", "C17/skip off": "refuted",
        "C17/branch off, tied head": "refuted", "C24": "supported", "C27/tokens": "supported", "C27/late layers": "refuted",
        "C27/metric": "supported", "C29/plateau": "supported", "C29/oscillation": "refuted", "C30": "refuted",
        "C31": "refuted", "C64": "refuted",
    }  # fmt: skip
    both = ("C24", "C27/tokens", "C27/late layers", "C27/metric", "C29/plateau", "C29/oscillation", "C17/skip off")
    assert verdicts(found, "stdlib") == {claim: told[claim] for claim in both}
    assert {where for claim, where in found if claim == "C24"} == {
        f"{source}, {when}" for source in ("markov", "stdlib") for when in ("at the start", "after training")
    }
    assert found["C01/any block", "markov"].judged[0].effect.mean == pytest.approx(-0.05, abs=0.01)


def test_a_network_that_swings_near_guessing_is_told_as_that():
    def swinging(fields):
        near = {"loss": 3.4, "outcome": "partial", "cosine": 0.5, "rank": 20.0, "fall": 0.0, "swing": (2.0, 0.001)}
        if fields.get("residual.scale") == 0:
            return line(fields, 3.4, "partial", swing=(2.0, 0.001))
        if fields["residual.name"] == "shaped_skipless":
            return line(fields, 2.8, "partial")
        return calm(fields, **near, look=seen_look(-0.5, 0.5, 0.05))

    told = verdicts(settled("E01", swinging), "markov")
    assert told["C17/branch off"] == told["C17/branch off, tied head"] == told["C17/skip off"] == "supported"
    assert told["C29/oscillation"] == "supported" and told["C29/plateau"] == "refuted"
    assert told["C30"] == told["C31"] == told["C01/any block"] == told["C27/late layers"] == "supported"
    assert told["C24"] == told["C27/tokens"] == "refuted"


def test_one_lost_seed_is_counted_and_two_leave_a_share_undecided():
    for lost, verdict in ((1, "supported"), (2, "undecided")):
        found = settled(
            "E01", lambda fields, n=lost: calm(fields) | (LOST if _bare(fields) and fields["seed"] < n else {})
        )
        assert found["C29/plateau", "markov"].verdict == verdict
        spread = found["C29/oscillation", "markov"].judged[0]
        assert spread.effect.missing == lost and f"{lost} of 5 seeds without a value" in spread.sentence()
        assert found["C27/metric", "markov"].judged[0].effect.missing == lost
        assert any(f"{lost} nonfinite" in note for note in found["C29/plateau", "markov"].notes)


def _bare(fields):
    return fields.get("residual.skip") == 0 and "model.norm" not in fields


@pytest.mark.parametrize("name", ["E01", "E18"])
def test_cells_that_did_not_run_decide_nothing(name):
    found = settled(
        name, lambda fields: {"fields": fields, "config": {"data.source": "markov"}} | FAILED, [{"source": "markov"}]
    )
    assert {one.verdict for one in found.values()} == {"undecided"}
    assert {claim for claim, _ in found} == set(named(name).predicates)


def test_loss_that_goes_by_the_linear_path_is_ranked_so():
    def by_path(fields):
        bare = any(fields.get(name) == 0 for name in ("residual.skip", "residual.attention.skip", "residual.mlp.skip"))
        control = fields["residual.name"] == "shaped_skipless"
        loss = 2.8 if bare or control else 2.2 if fields["residual.name"] == "post_ln" else 2.0
        return line(fields, loss, "trained")

    claim = settled("E01", by_path)["C64", "markov"]
    assert claim.verdict == "supported" and "Post-LN 0.069, 2." in claim.notes[0]  # (1 + 1/4)^(-24/2)


# ------------------------------------------------------------------ E18


def two_by_two(fields, *, bare=2.6, start=2.05, alone="collapsed"):
    norm = fields.get("model.norm") != "none"
    if fields["residual.name"] != "pre_ln":
        return line(fields, start + 0.1 * abs(np.log10(fields["optimizer.lr"] / 3e-3)), "trained")
    if "residual.skip" in fields:
        return line(fields, 2.845 if norm else 3.5, alone)
    loss = (2.0 if norm else bare) + 0.2 * abs(np.log10(fields["optimizer.lr"] / 3e-3))
    return line(fields, loss, "trained" if norm or fields["optimizer.lr"] < 1e-2 else "diverged")


def test_norm_and_skip_that_need_one_another():
    found = settled("E18", two_by_two)
    told = verdicts(found, "12 blocks")
    assert told == {
        "C05": "supported",
        "C14/nothing in its place": "supported",
        "C14/a start made for it in its place": "supported",
    }
    assert verdicts(found, "6 blocks") == {name: told[name] for name in list(told)[:2]}
    assert "skip alone" in found["C05", "12 blocks"].notes[0]


def test_norm_and_skip_that_do_not():
    def alike(fields):
        return two_by_two(fields, bare=1.99, start=1.9) | {"outcome": "trained"}

    told = verdicts(settled("E18", alike), "12 blocks")
    assert told == {
        "C05": "refuted",
        "C14/nothing in its place": "refuted",
        "C14/a start made for it in its place": "refuted",
    }


def test_a_best_rate_at_the_edge_decides_only_what_lies_beyond_cannot_change():
    def falling(fields):
        row = two_by_two(fields)
        if fields["residual.name"] != "pre_ln":
            return line(fields, 2.5 - 0.1 * np.log10(fields["optimizer.lr"]), "trained")
        return row | ({"outcome": "trained"} if fields.get("model.norm") == "none" else {})

    found = settled("E18", falling)
    claim = found["C14/a start made for it in its place", "12 blocks"]
    assert claim.verdict == "undecided" and "edge of the grid" in claim.told()
    assert found["C14/nothing in its place", "12 blocks"].verdict == "supported"


def test_nothing_in_its_place_is_without_the_start_that_shrinks_with_depth():
    """A scaled start alone that does well says nothing against the claim."""

    def helped(fields):
        scaled = _only_skip(fields) and "init.out_scale" not in fields
        return line(fields, 2.0, "trained") if scaled else two_by_two(fields)

    claim = settled("E18", helped)["C14/nothing in its place", "12 blocks"]
    assert claim.verdict == "supported"


def test_seeds_that_left_the_numbers_without_a_norm_have_lost():
    told = settled("E18", lambda fields: two_by_two(fields) | (LOST if _only_skip(fields) else {}))
    claim = told["C14/nothing in its place", "12 blocks"]
    assert sum(claim.judged[0].effect.values) == 5 and claim.verdict != "refuted"
    assert told["C05", "12 blocks"].judged[0].effect.missing == 0  # a lost run counts as its start


def _only_skip(fields):
    return fields.get("model.norm") == "none" and "residual.skip" not in fields


def test_an_arm_that_fails_everywhere_is_insensitive_and_still_the_worse():
    def arm(*losses):
        fields = [{"optimizer.lr": rate, "seed": 0} for rate in (1e-3, 1e-2)]
        return Runs(
            {"fields": one, "status": "done", "first_loss": 3.5, "eval_loss": loss}
            for one, loss in zip(fields, losses, strict=True)
        )

    stuck, trained = arm(2.8, 2.8), arm(2.0, None)
    assert stuck.sensitivity([0]) == [0] and trained.sensitivity([0]) == [0.75]
    assert capped(stuck, [0]) == pytest.approx([2.8]) and capped(trained, [0]) == pytest.approx([2.75])
    assert np.isnan(stuck.sensitivity([1])[0]) and np.isnan(capped(stuck, [1])[0])


# ------------------------------------------------------------------ what is measured


def test_slopes_stop_where_nothing_is_left_and_bends_are_second_differences():
    fell = np.maximum(np.exp(-0.5 * SITES - 0.1 * SITES**2), 6e-8).tolist()
    row = {
        "fields": {"seed": 0},
        "profiles": {"1": {"residual_frobenius": np.exp(-0.5 * SITES).tolist(), "residual_composite": fell}},
    }
    assert seen.slopes(Runs([row]), 1)[0] == pytest.approx(-0.5)
    assert seen.bends(Runs([row]), 1)[0] == pytest.approx(-0.2)
    assert np.isnan(seen.slopes(Runs([row]), 1)[1:]).all()  # seeds that have no run
    row["profiles"]["1"]["residual_frobenius"] = np.full((12, 2), 6e-8).tolist()
    assert np.isnan(seen.slopes(Runs([row]), 1)[0])


def test_the_best_symmetric_table_is_all_there_is_of_a_reversible_chain_and_less_of_another():
    rng = np.random.default_rng(0)
    pair = rng.random((5, 5))
    forth = pair + pair.T
    forth /= forth.sum()

    def entropy(p):
        return float(-np.sum(p * np.log(p / p.sum(axis=1, keepdims=True))))

    assert least_loss(forth) == pytest.approx(entropy(forth), abs=1e-6)
    round_ = np.full((3, 3), 0.01) + 0.3 * np.roll(np.eye(3), 1, axis=1)
    round_ /= round_.sum()  # 0 to 1 to 2 to 0, seldom back: a symmetric table cannot tell forth from back
    assert least_loss(round_) > entropy(round_) + 0.3
    forth_and_back = (round_ + round_.T) / 2
    assert least_loss(round_) == pytest.approx(entropy(forth_and_back), abs=1e-6)


@pytest.fixture(scope="module")
def moved():
    return np.random.default_rng(2).normal(size=(2, 8)) * 1e-3


@pytest.mark.parametrize("skip", [True, False])
def test_what_a_block_passes_on_is_how_its_mean_output_moves(skip, moved):
    tokens = np.random.default_rng(3).integers(0, 11, (1, 2, 7)).astype(np.int32)
    scheme = CATALOGUE["pre_ln"] if skip else CATALOGUE["pre_ln"].but(name="none", skip=0.0)
    subject = Subject(make(scheme, depth=3), tokens)
    passed = chasing.passed_on(subject, moved, skip)
    state = subject.walk.open(tokens[0, :, :-1])
    for place, by in enumerate(moved, 1):
        state = subject.walk.to(state, place)
        there = [
            SimpleNamespace(place=state.place, side=state.side, stream=state.stream + sign * jnp.asarray(by))
            for sign in (1, -1)
        ]
        ends = [
            np.asarray(subject.walk.to(_state(state, one.stream), place + 1).stream, np.float64).mean(axis=(0, 1))
            for one in there
        ]
        want = (ends[0] - ends[1]) / 2 - (by if skip else 0)
        np.testing.assert_allclose(passed[place - 1], want, atol=2e-2 * np.abs(want).max())


def _state(state, stream):
    return type(state)(state.place, stream, state.side)


def test_means_of_outputs_are_those_of_the_stream_and_of_its_steps():
    tokens = np.random.default_rng(3).integers(0, 11, (2, 2, 7)).astype(np.int32)
    subject = Subject(make("pre_ln", depth=3), tokens)
    stream = np.mean([np.asarray(one, np.float64).mean(axis=(1, 2)) for one in subject.streams([0, 1, 2, 3])], axis=0)
    found = chasing.outputs(subject, skip=True)
    np.testing.assert_allclose(found["stream"], stream[1:], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["output"], np.diff(stream, axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(chasing.outputs(subject, skip=False)["output"], found["stream"])


def test_drift_and_cosines_are_exact():
    then = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    assert chasing.drift(then + np.array([[0.5, 0], [0.1, 0], [0, 0.1]]), then) == pytest.approx(0.1)
    found = chasing.cosines(np.array([[1.0, 0], [1, 1], [0, 0]]), np.array([[-2.0, 0], [1, 0], [1, 0]]))
    np.testing.assert_allclose(found, [-1, 0.5**0.5, np.nan])


def test_late_layers_of_a_network_without_branches_are_alike():
    tokens = np.random.default_rng(3).integers(0, 11, (1, 2, 7)).astype(np.int32)
    scheme = CATALOGUE["pre_ln"].but(name="none", scale=0.0)
    found = chasing.alike(Subject(make(scheme, depth=4), tokens))
    assert found["late_angle"] == pytest.approx(0, abs=1e-3) and found["late_cka"] == pytest.approx(1, abs=1e-4)


def test_looks_are_at_full_networks_and_those_without_skips():
    def config(**fields):
        return load(named("E01").spec("cpu"), [(path.replace("__", "."), value) for path, value in fields.items()])

    assert chasing.skips(config()) is True and chasing.skips(config(residual__skip=0.0)) is False
    for other in (
        {"residual__scale": 0.0},
        {"model__depth": 6},
        {"residual__attention__skip": 0.0},
        {"residual__name": "post_ln"},
    ):
        assert chasing.skips(config(**other)) is None
    assert chasing.skips(config(model__norm="none")) is None
    assert {100, 110, 150, 500, 510, 600} < set(chasing.STEPS) and 610 not in chasing.STEPS


LARGEST = 2000.0  # trace of a Gram matrix, more than twice that of the fitted one: no larger ones are spoken of


def fitted(steps=1000, rate=3e-2, tied=False, bias=False, **changes):
    """Scores S[b, x] of a model without branches, trained on the law itself: every symbol b is read, every next x weighed as it is."""
    law, norms = markov.law(), NormDefaults(bias=bias)
    shape = Shape(markov.VOCAB, 1, 1, 64, 1, norms=norms, positions="none", tied=tied, bias=bias)
    model = LM(shape, CATALOGUE["pre_ln"].but(scale=0.0, **changes), Init("gain", gain=0.55), key=jax.random.key(0))
    graphdef, params = nnx.split(model)
    symbols, pair = jnp.arange(markov.VOCAB)[:, None], jnp.asarray(law.pair, jnp.float32)
    adam = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def scores(params):
        return nnx.merge(graphdef, params)(symbols, Context())[0][:, 0]

    def step(carry, _):
        params, state = carry
        grads = jax.grad(lambda params: -jnp.sum(pair * jax.nn.log_softmax(scores(params))))(params)
        updates, state = adam.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    fit = fast(lambda params: scores(jax.lax.scan(step, (params, adam.init(params)), None, steps)[0][0]))
    with jax.numpy_dtype_promotion("standard"):  # Optax counts in integers
        return np.asarray(fit(params), np.float64)


def loss_of(scores):
    return float(-np.sum(markov.law().pair * log_softmax(scores, axis=1)))


def least_gram_loss(scores):
    """What no Gram matrix of a trace up to ``LARGEST`` is below, nats.

    The loss f is convex, so that f(S') >= f(S) + <G, S' - S> with G the symmetric part of its slope at S, and <G, S'> is at least G's
    smallest eigenvalue times the trace of S'.
    """
    pair = markov.law().pair
    slope = pair.sum(axis=1, keepdims=True) * softmax(scores, axis=1) - pair
    slope = (slope + slope.T) / 2
    return loss_of(scores) - float(np.sum(slope * scores)) + min(0.0, np.linalg.eigvalsh(slope)[0]) * LARGEST


@pytest.fixture(scope="module")
def tied():
    return fitted(tied=True, final_norm=None)


def test_without_branches_and_with_a_head_of_its_own_a_model_is_a_table_of_pairs():
    """X51: the entropy given one symbol, from both sides."""
    assert loss_of(fitted(final_norm=None)) == pytest.approx(markov.floors(markov.law()).bigram, abs=1e-3)


def test_a_model_of_nothing_but_a_bias_learns_the_frequencies():
    """X51: without skips and branches the stream is 0, and the final norm's bias is all that the head reads."""
    scores = fitted(skip=0.0, bias=True)
    assert (scores == scores[0]).all() and loss_of(scores) == pytest.approx(
        markov.floors(markov.law()).unigram, abs=1e-3
    )
    untrained = fitted(skip=0.0)
    assert (untrained == 0).all() and loss_of(untrained) == pytest.approx(np.log(markov.VOCAB))


def test_without_branches_and_with_a_tied_head_a_model_is_a_gram_matrix(tied):
    """X52: scores e_b . e_x are symmetric, and more: a Gram matrix. The best of those is found, far above the entropy of pairs."""
    np.testing.assert_array_equal(tied, tied.T)
    assert np.linalg.eigvalsh(tied)[0] > -1e-3 and np.trace(tied) < LARGEST / 2
    least = least_gram_loss(tied)
    assert least <= loss_of(tied) + 1e-2 and loss_of(tied) < least + 1e-2
    assert least > markov.floors(markov.law()).bigram + 0.3


TABLE = """
from experiments.shared.sizes import sized

def get_config():
    config = sized("cpu-S", model__depth=1, train__steps=2500, optimizer__lr=1e-2, train__eval_batches=200)
    config.residual.scale, config.residual.final_norm, config.model.positions = 0.0, "none", "none"
    return config

def sweep():
    return {"model.tied": [False, True]}
"""


@pytest.mark.slow
def test_trained_on_text_such_models_end_there(tmp_path, tied):
    """X51 and X52: at the entropy given one symbol, and at the least loss of Gram matrices, which symmetric scores at large pass."""
    (tmp_path / "table.py").write_text(TABLE)
    assert sweep.main([f"--config={tmp_path / 'table.py'}", f"--workdir={tmp_path / 'sweep'}"]) == 0
    rows = [json.loads(text) for text in (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()]
    own, gram = (
        next(row["eval_loss"] for row in rows if row["fields"]["model.tied"] is is_tied) for is_tied in (False, True)
    )
    law = markov.law()
    assert own == pytest.approx(markov.floors(law).bigram, abs=0.01)
    assert least_gram_loss(tied) - 0.01 < gram < loss_of(tied) + 0.02
    assert own + 0.1 < least_loss(law.pair) < gram - 0.1
