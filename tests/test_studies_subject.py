"""Is a network, gone through block by block, the network? All schemes, pieces left out, blocks moved, derivatives; runs as subjects."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runs
from kit import TOKENS, fast, forward, make, relative
from resjax.errors import Refused
from resjax.health.studies import Subject, Walk
from resjax.health.studies.subject import spread
from resjax.models.lm import loss
from resjax.residual import Context
from resjax.train.subject import held_out, subject_of
from test_catalogue import ALL

CONTEXT = Context(step=jnp.int32(7))
EXACT = 1e-6  # of the largest: programs that are cut otherwise round otherwise
# One each of the ways to carry: one stream, gates, n streams, buffers of rows by block and by site, pairs, values handed on.
QUICK = (
    *("pre_ln", "highway", "hyper_connections:dynamic", "denseformer", "attnres", "reversible", "value_residual"),
    "realformer",
)
OTHERS = ("post_ln", "ngpt", "attnres:block", "muddformer", "x0_mixing:ladder", "altup", "resi_dual")


def some(quick, others):
    """Parameters of a test, most of them left to the slow ones."""
    return pytest.mark.parametrize("name", [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in others)])


pytestmark = pytest.mark.usefixtures("quickly")


def subject(name, depth=3, batches=1, **shape):
    tokens = np.random.default_rng(3).integers(0, 11, (batches, 2, 7)).astype(np.int32)
    return Subject(make(ALL[name], depth=depth, **shape), tokens, step=7)


@some(QUICK, [name for name in ALL if name not in QUICK])
def test_the_walk_gives_the_models_own_logits(name):
    model = make(ALL[name], depth=3)
    walk = Walk(model, CONTEXT)
    state = walk.open(TOKENS)
    for place in (1, 3):  # one block, then two at once
        state = walk.to(state, place)
    assert state.place == 3
    assert relative(walk.logits(walk.seen(state)), forward(model, CONTEXT)) < EXACT


@some(("pre_ln", "attnres"), ("highway", "realformer", "denseformer"))
def test_gradients_block_by_block_are_those_of_the_model(name):
    subject_ = subject(name)
    walk, model, batch = subject_.walk, subject_.model, subject_.batches[0]
    tokens, targets = jnp.asarray(batch[:, :-1]), jnp.asarray(batch[:, 1:])
    states = walk.states(tokens)
    cotangent = walk.gradient(states[-1], targets)
    for state in reversed(states[:-1]):
        cotangent = walk.pull(state, cotangent)

    def nats(embedded):
        return loss(model.logits(model.final(model.stack(embedded, CONTEXT)[0], CONTEXT)), targets)

    want = targets.size * fast(jax.grad(nats))(model.embedded(tokens, CONTEXT))
    rows = walk.stack.carry.rows
    got = cotangent[0][0] if rows else cotangent[0]  # of the buffer's rows, the first is the embedding
    assert relative(got, want) < 1e-5
    if rows:
        assert not np.any(cotangent[0][1:])  # rows that are not written before the first block


@some(("pre_ln",), ("hyper_connections:dynamic",))
def test_push_and_pull_are_one_jacobian(name):
    walk = subject(name).walk
    state = walk.to(walk.open(TOKENS), 1)
    draw = np.random.default_rng(1).normal
    tangent, cotangent = (jnp.asarray(draw(size=state.stream.shape), jnp.float32) for _ in range(2))
    forwards, backwards = walk.push(state, (tangent, {}))[0], walk.pull(state, (cotangent, {}))[0]
    assert float(jnp.vdot(forwards, cotangent)) == pytest.approx(float(jnp.vdot(tangent, backwards)), rel=1e-4)


def test_a_buffer_of_rows_has_no_push():
    walk = subject("denseformer").walk
    state = walk.open(TOKENS)
    with pytest.raises(NotImplementedError, match="use pull"):
        walk.push(state, state.parts)


@some(("denseformer", "reversible"), (*[name for name in QUICK if name not in ("denseformer", "reversible")], *OTHERS))
def test_what_is_seen_before_a_block_and_its_cotangent(name):
    """Of the streams that can be seen, the last is what the head gets; a cotangent of it comes back by the chain rule."""
    walk = subject(name).walk
    state = walk.to(walk.open(TOKENS), 2)
    seen = walk.seen(state)
    assert seen.shape == (2, 6, 8) and bool(jnp.any(seen != 0))
    back = walk.pull_seen(state, jnp.ones_like(seen))
    assert jax.tree.structure(back) == jax.tree.structure(state.stream)
    nudge = jax.tree.map(
        lambda x: 1e-3 * jnp.asarray(np.random.default_rng(2).normal(size=x.shape), x.dtype), state.stream
    )
    if walk.stack.carry.rows:  # rows that are not written are not read
        nudge = jax.tree.map(lambda x, g: jnp.where(g == 0, 0, x), nudge, back)
    ahead, behind = (
        walk.seen(replace(state, stream=jax.tree.map(lambda x, d, s=s: x + s * d, state.stream, nudge)))
        for s in (1, -1)
    )
    want = float(jnp.sum(ahead - behind)) / 2
    got = sum(float(jnp.vdot(a, b)) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(nudge), strict=True))
    assert got == pytest.approx(want, rel=2e-2, abs=1e-5)


@some(("post_ln", "highway", "denseformer"), ("pre_ln", "ngpt", "reversible", "layer_drop", "altup"))
def test_a_block_without_updates_is_a_block_with_branches_of_zeros(name):
    """In gates nothing changes; elsewhere what is added is 0, as with writing matrices of zeros."""
    walk = subject(name).walk
    keep = np.ones((3, 2), np.float32)
    keep[1] = 0
    before = walk.to(walk.open(TOKENS), 1)
    without = walk.to(before, 2, keep)
    if name in ("highway", "ngpt"):
        assert bool(jnp.all(without.stream == before.stream))
        return
    silent = silenced(make(ALL[name], depth=3), 1)
    other = Walk(silent, CONTEXT)
    want = other.to(other.to(other.open(TOKENS), 1), 2)
    assert relative(walk.seen(without), other.seen(want)) < EXACT
    assert relative(walk.seen(without), walk.seen(walk.to(before, 2))) > 1e-3


def silenced(model, block):
    """The model with the matrices of zeros that write in one block."""

    def one(variable):
        if variable.role != ("write",):
            return variable
        return variable.replace(variable[...].at[block].set(0))

    model.stack.runs[0] = jax.tree.map(one, model.stack.runs[0], is_leaf=lambda x: hasattr(x, "role"))
    return model


def test_the_model_itself_takes_keep_and_store():
    """What the walk does to a block, a forward pass does too: they are fields of the context."""
    model = make(ALL["post_ln"], depth=3)
    keep = np.ones((3, 2), np.float32)
    keep[1, 0] = 0
    walk = Walk(model, CONTEXT)
    want = walk.logits(walk.seen(walk.to_end(walk.open(TOKENS), keep)))
    assert relative(forward(model, replace(CONTEXT, keep=jnp.asarray(keep))), want) < EXACT
    doubled = replace(CONTEXT, store=lambda x, number: 2 * x)
    walk = Walk(make(ALL["pre_ln"], depth=3), doubled)
    state = walk.open(TOKENS)
    assert bool(jnp.all(state.stream == 2 * walk.model.embedded(TOKENS, CONTEXT)))
    assert relative(walk.to(state, 1).stream, forward_by_hand(walk, state.stream)) < EXACT


def forward_by_hand(walk, stream):
    """A block whose norms are before its branches, every sum doubled."""
    for connection in walk.model.stack.block(0).sites:
        stream = 2 * (stream + connection.branch(connection.norm_in(stream)))
    return stream


@some(("denseformer", "value_residual"), ("pre_ln", "attnres", "mix_ln", "realformer"))
def test_a_block_in_its_own_place_and_in_another(name):
    subject_ = subject(name, depth=4)
    walk = subject_.walk
    state = walk.to(walk.open(TOKENS), 1)
    own, other = walk.other(state, 1), walk.other(state, 2)
    assert (own.place, other.place) == (2, 2)
    assert relative(walk.seen(own), walk.seen(walk.to(state, 2))) < EXACT
    assert relative(walk.seen(other), walk.seen(own)) > 1e-3
    if "value" in name or name == "realformer":  # the first block hands on what the second wants
        assert walk.other(walk.open(TOKENS), 1) is None


def test_equal_blocks_may_change_places():
    model = make(ALL["pre_ln"], depth=3)
    model.stack.runs[0] = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), model.stack.runs[0])
    walk = Walk(model, CONTEXT)
    state = walk.open(TOKENS)
    for block in (1, 0, 2):
        state = walk.other(state, block)
    assert bool(jnp.all(state.stream == walk.to_end(walk.open(TOKENS)).stream))


@some(("pre_ln", "hyper_connections"), ("attnres", "highway"))
def test_what_is_captured_is_what_flowed(name):
    subject_ = subject(name, batches=2)
    found = list(subject_.captured("before", "after", "kept", "update"))
    assert len(found) == 2
    one = found[1]
    streams = (4,) if name == "hyper_connections" else ()
    assert one["before"].shape == one["after"].shape == (3, 2, 2, 6, 8)
    assert one["update"].shape == (3, 2, *streams, 2, 6, 8)
    if name in ("pre_ln", "hyper_connections"):
        total = one["kept"] + one["update"]
        assert relative(total.sum(axis=2) if streams else total, one["after"]) < EXACT
        assert relative(one["after"][0, 0], one["before"][0, 1]) < EXACT
    elif name == "highway":
        assert relative(one["before"] + one["update"], one["after"]) < EXACT
    assert np.isnan(one["kept"]).all() == (name in ("attnres", "highway"))
    with pytest.raises(ValueError, match="'middle' is none of before"):
        next(subject_.captured("middle"))


def test_the_streams_and_the_loss():
    subject_ = subject("pre_ln", depth=3, batches=2)
    streams = list(subject_.streams())
    assert [x.shape for x in streams] == [(4, 2, 6, 8)] * 2
    assert subject_.tokens == 24 and subject_.kinds == ("attention", "mlp")
    want = [
        float(loss(forward(subject_.model, CONTEXT, batch[:, :-1]), jnp.asarray(batch[:, 1:])))
        for batch in subject_.batches
    ]
    assert subject_.loss == pytest.approx(np.mean(want), rel=1e-6)
    with pytest.raises(ValueError, match="batches are"):
        replace(subject_, batches=TOKENS)


def test_a_thousand_blocks_are_looked_at_at_sixty_four():
    assert spread(5, 64) == [0, 1, 2, 3, 4]
    some = spread(1000, 64)
    assert len(some) == 64 and (some[0], some[-1]) == (0, 999)
    assert set(np.diff(some)) <= {15, 16}


# ------------------------------------------------------------------ of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subject")
    with runs.quick():
        assert runs.run(runs.calm(folder), folder / "run", train__steps=10) == 0
    return folder / "run"


def listed(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_a_run_is_a_subject_and_its_folder_stays_as_it_is(run):
    before = listed(run)
    with runs.quick():
        found = subject_of(run)
        earlier = subject_of(run, step=5, tokens=40, most=2)
        loss_ = found.loss
    assert listed(run) == before
    assert (found.step, earlier.step, earlier.most) == (10, 5, 2)
    assert found.tokens == 4096 and found.batches.shape == (64, 4, 17)
    assert earlier.batches.shape == (1, 3, 17)
    assert np.array_equal(found.batches[0, :3], earlier.batches[0])
    assert [row["step"] for row in earlier.rows if "loss" in row] == [1, 2, 3, 4, 5]
    logged = [row["eval_loss"] for row in found.rows if "eval_loss" in row][-1]
    assert loss_ == pytest.approx(logged, abs=0.1)  # of other windows of the same text
    assert found.origin.folder == run and found.config.model.depth == 2


def test_the_step_after_a_subject_is_the_runs_own(run):
    with runs.quick():
        earlier = subject_of(run, step=5, tokens=40)
        stepped = earlier.origin.next_model()
        row = next(row for row in runs.rows(run) if row["step"] == 7)
        batch = jnp.asarray(earlier.origin.training_batch(7))
        value = float(stepped.objective(batch, Context(step=jnp.int32(6)))[0])
    assert value == pytest.approx(row["loss"], rel=1e-5)  # of step 7, before its update


def test_short_texts_and_wrong_folders(run, tmp_path):
    with pytest.raises(Refused, match="holds no run"):
        subject_of(tmp_path / "none")
    with runs.quick():
        pipeline = subject_of(run, tokens=1).origin.again.pipeline
    there = (len(pipeline.corpus.held_out) - 1) // 16
    everything = held_out(pipeline, 10**9)
    assert everything.shape == (there // 4, 4, 17)
    assert len({row.tobytes() for row in everything.reshape(-1, 17)}) > 0.99 * there
