"""What do the studies of decoding, gradients, Jacobians, updates and steadiness say of whole models whose answer is known?"""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import fast, make, start
from resjax.block import Layer
from resjax.health.studies import STUDIES, Subject, jacobian
from resjax.models.lm import loss
from resjax.residual import CATALOGUE
from resjax.train.writers import to_json
from test_catalogue import ALL

PRE_LN = CATALOGUE["pre_ln"]
NO_BRANCH = PRE_LN.but(name="no_branch", scale=0.0)
SCHEMES = ("pre_ln", "post_ln", "hyper_connections:dynamic", "denseformer", "attnres", "ngpt", "reversible", "highway")


pytestmark = pytest.mark.usefixtures("quickly")


def text(batches=2, rows=3, length=8, vocabulary=11, seed=3):
    return np.random.default_rng(seed).integers(0, vocabulary, (batches, rows, length + 1)).astype(np.int32)


def study(name, model, tokens=None, **options):
    return STUDIES[name].run(Subject(model, text() if tokens is None else tokens, **options))


def some(quick, others):
    """Names, the others among the slow tests."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


# ------------------------------------------------------------------ every scheme


@pytest.mark.parametrize(
    "name", [name if name in ("pre_ln", "attnres") else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_every_scheme_has_figures(name):
    subject = Subject(make(ALL[name], depth=4, width=16, length=8), text())
    decoded = STUDIES["decoding"].run(subject)
    assert decoded["accuracy"].shape == (4, 5) and np.isfinite(decoded["accuracy"]).all()
    gradient = STUDIES["gradient"].run(subject)
    assert gradient["size"].shape == (5,) and (gradient["size"] > 0).all() and np.isfinite(gradient["size"]).all()
    assert gradient["identity_share"].shape == (4,) and (np.abs(gradient["identity_share"]) <= 1 + 1e-6).all()
    stretched = STUDIES["jacobian"].run(subject)
    assert json.dumps(to_json([decoded, gradient, stretched]), allow_nan=False)
    assert stretched["singular"].shape == (4, 11) and stretched["exact"] is True
    known = np.isfinite(stretched["singular"])
    assert not known.any() if name.startswith("attnres") else known.all()
    if known.all():
        assert (np.diff(stretched["singular"], axis=1) >= 0).all() and (stretched["largest"] > 0).all()


# ------------------------------------------------------------------ decoding


def test_the_embedding_is_read_at_once_and_what_is_not_there_is_not():
    model = make(NO_BRANCH, width=16, length=40, positions="none")
    model.embed[...] = jnp.eye(11, 16)
    found = study("decoding", model, text(8, 8, 40))
    current, previous, position, following = found["accuracy"]
    assert (current == 1).all() and (found["above"][0] == 1).all()
    bound = 4 * np.sqrt(0.1 * 0.9 / found["testing"])
    for row, chance in zip((previous, position, following), found["chance"][1:], strict=True):
        assert (np.abs(row - chance) < bound).all()
    assert found["targets"] == ["current token", "previous token", "position", "next token"]
    assert (found["training"], found["testing"]) == (43 * 39, 21 * 39)
    np.testing.assert_array_equal(found["points"], range(5))


def test_attention_to_the_token_before_brings_it_into_the_stream():
    """The first block is made to copy: what it reads of the token before is in the stream after it, and only then."""
    model = start(PRE_LN, width=40, heads=1, length=30, depth=1)
    branch = model.stack.runs[0].sites[0].branch
    width, length, vocab = 40, 30, 11
    embed, place = np.zeros((vocab, width)), np.zeros((length, width))
    embed[:, :vocab] = np.eye(vocab)
    angle = 2 * np.pi * np.arange(length)[:, None] * np.array([1, 7]) / length
    place[:, 22:26] = 3 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    model.embed[...], model.positions[...] = jnp.asarray(embed, jnp.float32), jnp.asarray(place, jnp.float32)
    turn = 2 * np.pi * np.array([1, 7]) / length  # a query is the place before one's own
    cos, sin = np.diag(np.cos(turn)), np.diag(np.sin(turn))
    qkv = np.zeros((width, 3, width))
    qkv[22:26, 0, :4] = 60 * np.block([[cos, -sin], [sin, cos]])
    qkv[22:26, 1, :4] = np.eye(4)
    qkv[:vocab, 2, :vocab] = np.eye(vocab)
    out = np.zeros((width, width))
    out[:vocab, vocab : 2 * vocab] = np.eye(vocab)
    put(branch, qkv, out)
    found = study("decoding", model, text(10, 8, length))
    assert found["accuracy"][1, 0] < 0.3 and found["accuracy"][1, 1] > 0.99
    assert (found["accuracy"][0] == 1).all() and found["accuracy"][3].max() < 0.3


def put(branch, qkv, out):
    """Weights of an attention branch; biases, if any, are zero."""
    for variable in jax.tree.leaves(branch, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        value = {("q", "k", "v"): qkv, ("write",): out}.get(variable.role)
        assert value is not None and variable[...].shape[1:] == value.shape, variable.role
        variable[...] = jnp.asarray(value, jnp.float32)[None]


def test_too_few_sequences_have_no_probe():
    found = study("decoding", make(PRE_LN, length=8), text(1, 4))
    assert np.isnan(found["accuracy"]).all() and np.isnan(found["chance"]).all() and found["testing"] == 0


# ------------------------------------------------------------------ gradient


@pytest.mark.parametrize(
    "name", some(("pre_ln", "denseformer"), ("hyper_connections:dynamic", "attnres", "attnres:block"))
)
def test_gradient_is_that_of_a_nudge_to_the_stream(name):
    model, tokens = make(ALL[name], length=8, depth=2), text(1)
    stack = model.stack
    subject = Subject(model, tokens, step=3)
    context, (run,) = subject.context, stack.plan
    numbers = stack.numbers(run, context)

    def nats(nudges):
        stream = stack.carry.open(stack.ends, model.embedded(jnp.asarray(tokens[0, :, :-1]), context), stack.units)
        for i in range(2):
            stream = nudged(stream, nudges[i], i)
            here = [{name: value[i] for name, value in row.items()} for row in numbers]
            stream, _, _ = stack.block(i)(stream, Layer(i, here, None), context)
        last = stack.carry.close(stack.ends, nudged(stream, nudges[2], 2))
        return loss(model.logits(model.final(last, context)), jnp.asarray(tokens[0, :, 1:]))

    # rows of a buffer: one a block, one a site, or one a group of sites (here of one)
    rows = {"denseformer": 1, "attnres": 2, "attnres:block": 2}.get(name)

    def nudged(stream, nudge, block):
        return stream + nudge if rows is None else stream.at[rows * block].add(nudge)

    shape = (4, 3, 8, 8) if name.startswith("hyper") else (3, 8, 8)
    wanted = np.stack(fast(jax.grad(nats))([jnp.zeros(shape)] * 3)).astype(np.float64)
    found = STUDIES["gradient"].run(subject)
    axes = (1, 4) if name.startswith("hyper") else (3,)
    sizes = np.sqrt(np.square(wanted).sum(axis=axes)).reshape(3, -1)
    np.testing.assert_allclose(found["size"], 24 * sizes.mean(axis=1), rtol=1e-4)
    flat = wanted.reshape(3, -1)
    cosines = flat[:2] @ flat[2] / np.linalg.norm(flat[:2], axis=1) / np.linalg.norm(flat[2])
    np.testing.assert_allclose(found["identity_share"], cosines, atol=1e-5)
    assert found["spread"] == pytest.approx(found["size"].max() / found["size"].min())


@pytest.mark.parametrize("name", some(("no_branch",), ("rezero",)))
def test_all_of_the_gradient_comes_straight_down_where_branches_add_nothing(name):
    found = study("gradient", make(NO_BRANCH, length=8) if name == "no_branch" else start("rezero", length=8))
    np.testing.assert_allclose(found["identity_share"], 1, atol=1e-6)
    np.testing.assert_allclose(found["size"], found["size"][0], rtol=1e-5)
    assert found["slope"] == pytest.approx(0, abs=1e-5) and found["spread"] == pytest.approx(1, abs=1e-5)


def test_branches_take_their_share_of_the_gradient():
    assert (study("gradient", make(PRE_LN, length=8, depth=2))["identity_share"] < 0.99).all()


def test_a_skip_of_a_half_halves_the_gradient_at_every_site():
    """X41: 0.5^54 = 5.6e-17."""
    model = make(PRE_LN.but(name="half", skip=0.5, scale=0.0, final_norm=None), length=8, depth=27)
    found = study("gradient", model)
    assert found["size"][0] / found["size"][-1] == pytest.approx(0.5**54, rel=1e-5)
    assert found["size"][0] / found["size"][-1] == pytest.approx(5.55e-17, rel=1e-3)
    assert found["slope"] == pytest.approx(2 * np.log(2), rel=1e-5)
    np.testing.assert_allclose(found["identity_share"], 1, atol=1e-6)


# ------------------------------------------------------------------ Jacobian


@pytest.mark.parametrize("name", some(("no_branch",), ("rezero",)))
def test_a_block_that_adds_nothing_is_the_identity(name):
    found = study("jacobian", make(NO_BRANCH, length=8) if name == "no_branch" else start("rezero", length=8))
    for figure in ("largest", "median", "smallest", "mean_square", "singular"):
        np.testing.assert_allclose(found[figure], 1, atol=1e-6)
    np.testing.assert_array_equal(found["places"], [2, 5, 7])  # of 8, one for each of 3 sequences


@pytest.mark.parametrize("name", some(("pre_ln",), ("post_ln", "denseformer")))
def test_jacobian_is_that_of_one_token_by_itself(name):
    model, tokens = (
        start(name, length=8, depth=2) if name == "denseformer" else make(name, length=8, depth=2),
        text(1, 2),
    )
    subject = Subject(model, tokens)
    found, stack, context = STUDIES["jacobian"].run(subject), model.stack, subject.context
    # at its start a DenseFormer is Pre-LN: the rows of its buffer are the streams
    block, layer = stack.block(0), Layer(0, [{}, {}], None)
    h = model.embedded(jnp.asarray(tokens[0, :, :-1]), context)
    places = [3, 7]

    def after(x, b):
        stream = h.at[b, places[b]].set(x)
        buffer = stack.carry.open(stack.ends, stream, stack.units)
        stream = block(buffer, layer, context)[0]
        return (stream[1] if name == "denseformer" else stream)[b, places[b]]

    both = fast(lambda x: [jax.jacrev(after)(x[b, places[b]], b) for b in (0, 1)])(h)
    values = np.stack([np.linalg.svd(np.asarray(one, np.float64), compute_uv=False) for one in both])
    assert found["largest"][0] == pytest.approx(values.max(), rel=1e-4)
    assert found["mean_square"][0] == pytest.approx(np.mean(values**2), rel=1e-4)
    np.testing.assert_allclose(found["singular"][0], np.quantile(values, np.linspace(0, 1, 11)), rtol=1e-3, atol=1e-5)


def test_wide_streams_are_sketched(monkeypatch):
    model = make(PRE_LN, length=8, depth=1)
    exact = study("jacobian", model)
    monkeypatch.setattr(jacobian, "EXACT", 7)
    found = study("jacobian", model)
    assert found["exact"] is False and np.isnan(found["median"]).all() and np.isnan(found["singular"]).all()
    np.testing.assert_allclose(found["largest"], exact["largest"], rtol=0.02)
    np.testing.assert_allclose(found["mean_square"], exact["mean_square"], rtol=0.15)


def test_of_many_blocks_some():
    found = study("jacobian", make(NO_BRANCH, length=8, depth=9), most=3)
    np.testing.assert_array_equal(found["blocks"], [0, 4, 8])
    assert found["largest"].shape == (3,)


# ------------------------------------------------------------------ update


def origin(**parts):
    return SimpleNamespace(folder=None, **parts)


def test_update_is_the_change_of_logits_by_hand():
    model, tokens = make(PRE_LN, length=8), text()
    other = jax.tree.map(lambda x: x + 0.01 * jnp.sign(x), model)
    subject = Subject(model, tokens, origin=origin(next_model=lambda: other, next_rate=0.25))
    forward = fast(lambda m, batch: m(batch[:, :-1], subject.context)[0])
    before, after = (np.stack([np.asarray(forward(m, batch), np.float64) for batch in tokens]) for m in (model, other))
    found = STUDIES["update"].run(subject)
    change = np.linalg.norm(after - before, axis=-1).mean()
    assert found["change"] == pytest.approx(change, rel=1e-4) and change > 0.01
    assert found["relative"] == pytest.approx(change / np.linalg.norm(before, axis=-1).mean(), rel=1e-4)
    assert found["tokens"] == 48 and found["lr"] == 0.25


def test_without_a_run_or_a_next_step_there_is_no_update():
    model = make(PRE_LN, length=8)
    for of in (None, origin(next_model=lambda: None, next_rate=0.1)):
        found = study("update", model, origin=of)
        assert np.isnan(found["change"]) and np.isnan(found["relative"])


# ------------------------------------------------------------------ steadiness


def test_steadiness_of_a_model_that_did_not_move():
    """Losses of a frozen model are all batches: the ratio is 1, in training and with what training draws."""
    model = make(PRE_LN, length=8)
    batches = {step: text(1, 3, seed=step)[0] for step in range(1, 101)}
    subject = Subject(model, text(), step=100)
    nats = fast(lambda batch: model.objective(batch, replace(subject.context, train=True))[0])
    rows = [{"step": step, "loss": float(nats(jnp.asarray(batch)))} for step, batch in batches.items()]
    subject = replace(
        subject, rows=[*rows, {"step": 101, "loss": 9.0}], origin=origin(training_batch=batches.__getitem__)
    )
    found = STUDIES["steadiness"].run(subject)
    assert found["ratio"] == pytest.approx(1, abs=1e-4) and found["chance"] > 0.01
    np.testing.assert_array_equal(found["steps"], range(61, 101))
    assert json.dumps(to_json(found), allow_nan=False)
    without = STUDIES["steadiness"].run(replace(subject, origin=None))
    assert np.isnan(without["ratio"]) and without["lag1"] == found["lag1"]
    assert np.isnan(STUDIES["steadiness"].run(replace(subject, rows=[]))["lag1"])
