"""Do studies of a foreign model say what they say of our own? The same model both ways, known answers, every way to run blocks."""

import functools
import json
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packaging.version import Version

from kit import fast, make
from resjax import watch
from resjax.errors import Refused
from resjax.health.studies import STUDIES, Subject
from resjax.models.lm import LM, loss
from resjax.residual import CATALOGUE, Context
from resjax.watch import linen
from test_doctor import said
from test_studies import TEXT, silenced
from test_watch import DEPTH, SITES, WAYS, block, inputs, kept_by_hand, plainly, unrolled, weights
from test_watch import PLAN as FOREIGN
from test_watch import loss as loss_of_numbers
from test_watch_use import Scanned

pytestmark = pytest.mark.usefixtures("quickly")
PLAN = watch.Plan(4, ("attention", "mlp"))
OWN = ("probes", "gradient", "rounding", "ablation")  # whose numbers come another way
SAME = (*OWN, "similarity", "massive", "decoding")


def written_out(model: LM, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A language model of ours as somebody else might have written it: its parts, a rematerialised scan over blocks, and the calls."""
    context = Context()
    (run,), (blocks,) = model.stack.plan, model.stack.runs

    @jax.checkpoint
    def block(h, row):
        block, numbers, i = row
        before = h
        for connection, site, number in zip(block.sites, block.places(i), numbers, strict=True):
            update, *_ = connection.produce(h, site, number, context)
            if connection.norm_after is None:
                h = watch.add(h, update, block=i, site=site.kind)
            else:
                h = watch.joined(connection.norm_after, kept=h, update=update, block=i, site=site.kind)
        return watch.block(before, h, block=i), None

    h = watch.embedded(model.embedded(batch[:, :-1], context))
    h, _ = jax.lax.scan(block, h, (blocks, model.stack.numbers(run, context), jnp.arange(model.stack.depth)))
    logits = model.logits(watch.final(model.final(h, context)))
    return loss(logits, batch[:, 1:]), logits


def same(found, want, where=""):
    """Equal but for the order of sums."""
    if isinstance(want, dict):
        for name in want:
            same(found[name], want[name], f"{where} {name}")
        return
    if isinstance(want, list) and want and isinstance(want[0], str):
        assert found == want, where
        return
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(want, np.float64), rtol=2e-4, atol=2e-6, err_msg=where
    )


@pytest.mark.parametrize("scheme", ["pre_ln", pytest.param("post_ln", marks=pytest.mark.slow)])
def test_both_ways_are_one(scheme):
    model = silenced(make(CATALOGUE[scheme], width=16), 2)
    names = (*OWN, "lens") if scheme == "pre_ln" else SAME
    found = watch.study(
        written_out, model, TEXT, plan=PLAN, names=names, tokens=lambda batch: batch, memory=2 * 3 * 6 * 16 * 4
    )
    for name in names:
        want = STUDIES[name].run(Subject(model, TEXT))
        if name == "probes":
            want = {key: value for key, value in want.items() if not key.startswith("attention")}
        same(found[name], want, f"{scheme} {name}")
    if scheme == "pre_ln":
        assert list(found["ablation"]["dead"]) == [False, False, True, False] and found["ablation"]["delta"][2] == 0


# ---- every way to run blocks


@functools.cache
def by_hand() -> dict[str, Any]:
    """Streams, gradients and losses of the model of test_watch, without any watching."""
    w, x = weights(), inputs()
    flows, grads = kept_by_hand(w, x)
    streams = np.stack([*(flow["kept"] for flow in flows[::2]), flows[-1]["after"]]).astype(np.float32)
    pure = fast(lambda w: loss_of_numbers(unrolled(plainly, w, x)))
    without = lambda i, names: {s: w[s].at[i].set(0) if s in names else w[s] for s in SITES}  # noqa: E731
    whole = float(pure(w))
    rises = [[float(pure(without(i, names))) - whole for names in (SITES, *zip(SITES))] for i in range(DEPTH)]
    ends = grads[1::2].astype(np.float64)
    return {"streams": streams, "ends": ends, "rises": np.array(rises), "whole": whole}


def check_ways(f: Any) -> None:
    """Streams, losses without a block, and gradients of a way to run the blocks are those of plain code."""
    want = by_hand()
    found = watch.study(f, weights(), [inputs()], plan=FOREIGN, names=("similarity", "massive", "ablation", "gradient"))
    streams = watch.study_streams(want["streams"])
    for name in streams:
        same(found[name], streams[name], name)
    rises = np.column_stack([found["ablation"]["delta"], found["ablation"]["delta_site"]])
    np.testing.assert_allclose(rises, want["rises"], rtol=1e-3, atol=1e-4)
    # a mean of sines that cancel; JAX 0.12 fuses them otherwise, which makes 7e-6
    assert found["ablation"]["loss"] == pytest.approx(want["whole"], rel=1e-5, abs=2e-5)
    size = np.linalg.norm(want["ends"], axis=-1).sum(axis=(1, 2))
    np.testing.assert_allclose(found["gradient"]["size"], [np.nan, *size], rtol=1e-4)
    assert found["gradient"]["spread"] == pytest.approx(size.max() / size.min(), rel=1e-4)
    last = want["ends"][-1].ravel()
    cosines = [one.ravel() @ last / np.linalg.norm(one) / np.linalg.norm(last) for one in want["ends"][:-1]]
    np.testing.assert_allclose(found["gradient"]["identity_share"], [np.nan, *cosines], rtol=1e-4)


MOST_USED = ("checkpoint in scan",)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in MOST_USED else pytest.mark.slow) for way in WAYS if "vmap" not in way]
)
def test_a_study_goes_through_what_a_model_is_made_of(way):
    check_ways(lambda w, x: loss_of_numbers(WAYS[way](block, w, x)))


def test_a_study_of_samples_one_at_a_time_is_refused():
    with pytest.raises(Refused, match=r"the adds stand inside jax\.vmap"):
        watch.study(
            lambda w, x: loss_of_numbers(WAYS["vmap over samples"](block, w, x)), weights(), [inputs()], plan=FOREIGN
        )


class Layer(nn.Module):
    gain: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.gain * nn.tanh(nn.Dense(x.shape[-1])(x))


class Decoder(nn.Module):
    """Knows nothing of being watched; its last two blocks do nothing."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(11, 8)(tokens)
        for i, gain in enumerate((1.0, 1.0, 0.0, 0.0)):
            x = Layer(gain, name=f"layer_{i}")(x)
        return nn.Dense(11)(nn.LayerNorm()(x))


@pytest.fixture(scope="module")
def untouched():
    """Every study of a Linen model that is met by the names of its blocks, and what it was made of."""
    batches = list(np.random.default_rng(0).integers(0, 11, (2, 6, 9)).astype(np.int32))
    params = fast(Decoder().init)(jax.random.key(0), batches[0][:, :-1])

    def f(params: Any, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        with linen.blocks(r"layer_(\d+)"):
            logits = Decoder().apply(params, batch[:, :-1])
        return loss(logits, batch[:, 1:]), logits

    doubled = jax.tree_util.tree_map_with_path(lambda path, x: 2 * x if "'Dense_0'" in str(path[1]) else x, params)
    rows = [{"step": step, "loss": 2 + np.sin(step)} for step in range(1, 101)]
    found = watch.study(
        f,
        params,
        batches,
        tokens=lambda batch: batch,
        next_model=doubled,
        rows=rows,
        batch_of=lambda step: batches[step % 2],
    )
    return found, f, params, batches


def test_a_linen_model_that_knows_of_nothing(untouched):
    found, f, params, batches = untouched
    assert found.notes == [] and set(found) == set(STUDIES) - set(watch.studies.OWN_ONLY)
    assert list(found["ablation"]["dead"]) == [False, False, True, True]
    whole = np.mean([float(f(params, batch)[0]) for batch in batches])
    assert found["ablation"]["loss"] == pytest.approx(whole, rel=1e-6)
    assert found["lens"]["loss"][-1] == pytest.approx(whole, rel=1e-6) and found["lens"]["settled"][-1] == 1
    assert found["lens"]["loss"][2] == found["lens"]["loss"][4] and found["similarity"]["influence"][2] < 1e-12
    assert np.isnan(found["rounding"]["formats"]["bfloat16"]["swallowed"]).all()
    assert (
        found["rounding"]["formats"]["float32"]["stream_error"]
        == 0
        < found["rounding"]["formats"]["bfloat16"]["stream_error"]
    )


def test_what_is_asked_of_a_run(untouched):
    """The logits of twice the head, which has no bias yet, move by their own length; a planted period is found."""
    found = untouched[0]
    assert found["update"]["relative"] == pytest.approx(1, rel=1e-5) and np.isnan(found["update"]["lr"])
    assert found["update"]["tokens"] == 2 * 6 * 8
    assert found["steadiness"]["period"] == pytest.approx(2 * np.pi, rel=0.1) and found["steadiness"]["chance"] < 0.01
    assert found["steadiness"]["logged"] == 40 and np.isfinite(found["steadiness"]["ratio"])


def test_a_scanned_linen_model():
    """As the same written without Linen: its scan traces a block in a way of its own."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    params = jax.jit(Scanned().init)(jax.random.key(1), x)
    dense = params["params"]["blocks"]["Dense_0"]

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = watch.add(x, jnp.tanh(x @ dense["kernel"][i] + dense["bias"][i]), block=i, site="mlp")
        return jnp.mean(jnp.sin(x))

    names = ("similarity", "ablation", "gradient")
    want = watch.study(by_hand, params, [x], names=names)

    def scanned(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(Scanned().apply(params, x)))

    if Version(flax.__version__) < Version("0.12.12"):
        same(watch.study(scanned, params, [x], plan=watch.Plan(3, "mlp"), names=names), want)
    else:
        with pytest.raises(Refused, match=r"nn\.scan does not let a study look into its body; .* watch\.study_streams"):
            watch.study(scanned, params, [x], plan=watch.Plan(3, "mlp"), names=names)


class Normed(nnx.Module):
    def __init__(self, index: int, rngs: nnx.Rngs):
        self.index, self.linear = index, nnx.Linear(8, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return watch.add(h, self.drop(jnp.tanh(self.linear(self.norm(h)))), block=self.index, site="mlp")


class Tied(nnx.Module):
    """State of every kind: a table that is used twice, means of batches, a stream of random numbers."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(11, 8, rngs=rngs)
        self.blocks = nnx.List([Normed(i, rngs) for i in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = watch.embedded(self.table(tokens))
        for one in self.blocks:
            h = one(h)
        return self.table.attend(h)


@pytest.mark.slow
def test_modules_with_state_are_left_as_they_are():
    """Also under ``nnx.jit``, in training, as a state without its graph; and a model that is not finite is studied like any other."""
    batches = list(np.random.default_rng(0).integers(0, 11, (2, 6, 9)).astype(np.int32))

    def f(model: Tied, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(batch[:, :-1])
        return loss(logits, batch[:, 1:]), logits

    with jax.numpy_dtype_promotion("standard"):  # of nnx
        model = Tied(nnx.Rngs(0))
        before = jax.tree.map(np.asarray, nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
        names = ("ablation", "gradient")
        training = watch.study(f, model, batches, names=names)
        model.eval()
        found = watch.study(f, model, batches, names=names)
        graph, state = nnx.split(model)
        same(watch.study(nnx.jit(f), model, batches, names=names), found)
        same(watch.study(lambda state, batch: f(nnx.merge(graph, state), batch), state, batches, names=names), found)
        assert training["ablation"]["delta"][0] != found["ablation"]["delta"][0]
        assert np.isfinite(found["gradient"]["size"]).all() and found["gradient"]["identity_share"][0] < 1
        after = jax.tree.map(np.asarray, nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
        jax.tree.map(np.testing.assert_array_equal, before, after)
        model.blocks[1].linear.kernel[...] = jnp.full((8, 8), jnp.inf)
        broken = watch.study(f, model, batches, tokens=lambda batch: batch, next_model=model)
    assert (
        len(broken.notes) == 1 and np.isnan(broken["ablation"]["loss"]) and np.isnan(broken["gradient"]["size"]).all()
    )


# ---- what is known exactly


def test_updates_at_right_angles_and_attention_that_averages(r=0.3):
    """X38: the angles of updates at right angles to a stream of unit vectors. X21: an average over tokens leaves no direction."""

    def f(model: None, tokens: jax.Array) -> jax.Array:
        h = start = jnp.eye(8, 16)[tokens]
        for i in range(3):
            h = watch.add(h, r * jnp.roll(start, 8, axis=-1), block=i, site="mlp")
        h = watch.change(h, jnp.broadcast_to(jnp.mean(h, axis=1, keepdims=True), h.shape), block=2, site="mean")
        return jnp.sum(h)

    tokens = np.array([[0, 1, 2, 3], [4, 4, 5, 6]], np.int32)
    found = watch.study(f, None, [tokens], names=("similarity", "probes"), partial=True)
    turn = np.arctan(r * np.arange(3)) / np.pi
    np.testing.assert_allclose(found["similarity"]["angular"][:3, :3], np.abs(np.subtract.outer(turn, turn)), atol=1e-6)
    np.testing.assert_allclose(found["similarity"]["influence"][:2], 1 - np.cos(np.pi * np.diff(turn)), atol=1e-6)
    probes = found["probes"]
    assert probes["growth"][0, 0] == pytest.approx(np.sqrt(1 + r**2), rel=1e-6)
    assert np.isnan(probes["growth"][:2, 1]).all(), "a site that only the last block has"
    for name, value in {"rank_collapse": 1, "effective_rank": 0, "residual_frobenius": 0, "token_cosine": 1}.items():
        assert probes[name][2, 1] == pytest.approx(value, abs=1e-6), name
    # what the first sample adds up to is 4 directions, the second's 3: all centred, 3 and 2 are left of them
    assert 3 < probes["effective_rank"][0, 0] <= 5


# ---- what is refused, each in one sentence


def one_block(h: jax.Array, **how: Any) -> jax.Array:
    return jnp.sum(watch.joined(jnp.tanh(2 * h), kept=h, update=h, block=0, site="mlp"))


REFUSED = {
    "order": (
        dict(names="order"),
        "study 'order' is of resjax's own models only, whose blocks change places; there are probes",
    ),
    "name": (dict(names=["lense"]), "names is 'lense', which is none of .* did you mean 'lens'"),
    "ablation": (
        dict(names=["ablation"]),
        "'mlp' cannot be left out: watch.joined was given the stream; give it what makes it",
    ),
    "lens": (dict(names=["lens"]), "'mlp' makes something else of its sum"),
    "rounding": (dict(names=["rounding"]), "'mlp' is watched by the stream it makes"),
    "bfloat16": (
        dict(names=["rounding"], model=jnp.bfloat16),
        "the stream is bfloat16, and adds are rounded from float32",
    ),
    "tokens": (dict(names=["decoding"]), "no tokens are given"),
    "shape": (
        dict(names=["massive"], tokens=lambda x: np.ones((2, 5), int)),
        r"tokens are int64\[2, 5\], .* integers \[2, 6\]",
    ),
    "update": (dict(names=["update"]), "there is no next_model"),
    "rows": (dict(names=["steadiness"]), "no rows with the training loss"),
    "batches": (dict(batches=[]), "batches is empty"),
    "forms": (dict(batches=[np.ones((2, 5, 3)), np.ones((1, 5, 3))]), r"batch 1 has the form .*\[1, 5, 3\]"),
    "most": (dict(most=1), "most is 1"),
    "nothing": (dict(f=lambda model, x: jnp.sum(x)), r"no watch\.add in it"),
    "loss": (
        dict(f=lambda model, x: watch.add(x, x, block=0, site="mlp")),
        r"returns float32\[2, 5, 3\], and has to return the loss",
    ),
    "twice": (dict(f=lambda model, x: one_block(x) + one_block(x)), "'mlp' of block 0 was passed 2 times"),
    "missing": (dict(plan=watch.Plan(2, ("mlp",))), "'mlp' of block 1 was not passed"),
    "site": (dict(plan=watch.Plan(1, ("mpl",))), "site is 'mlp', which is none of mpl"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    given, words = REFUSED[case]
    given = (
        dict(f=lambda model, x: one_block(x.astype(model)), model=jnp.float32, batches=[np.ones((2, 5, 3), np.float32)])
        | given
    )
    given["f"], model = functools.partial(called, given["f"], given.pop("model")), None
    with pytest.raises(Refused, match=words):
        watch.study(model=model, **given)


def called(f: Any, dtype: Any, model: None, x: jax.Array) -> jax.Array:
    return f(dtype, x)


def test_streams_of_several_shapes_are_not_compared():
    def f(model: None, x: jax.Array) -> jax.Array:
        h = watch.add(x, x, block=0, site="wide")
        return jnp.mean(watch.add(h[..., :4], jnp.ones(()), block=0, site="narrow"))

    x = np.ones((2, 3, 8), np.float32)
    with pytest.raises(Refused, match=r"the stream is \[2, 3, 8\] at 'wide' and \[2, 3, 4\] at 'narrow'"):
        watch.study(f, None, [x], names=["similarity"])
    found = watch.study(f, None, [x], names=["ablation"])
    np.testing.assert_allclose(found["ablation"]["delta_site"], [[-1, -1]], rtol=1e-6)


def blocks(*sites: tuple[str, ...]) -> Any:
    """The loss of a model with these adds in its blocks, each of one more than the last."""

    def f(model: None, x: jax.Array) -> jax.Array:
        for i, names in enumerate(sites):
            for name in names:
                x = watch.add(x, x + 1, block=i, site=name)
        return jnp.mean(x)

    return f


def test_the_order_of_adds_is_that_in_which_they_are_passed():
    x = np.ones((2, 3, 4), np.float32)
    for sites, order in (
        ((("mlp",), ("attention", "mlp")), ("attention", "mlp")),
        ((("attention", "mlp"), ("attention", "cross", "mlp")), ("attention", "cross", "mlp")),
    ):
        f = blocks(*sites)
        assert watch.find(f, None, x).sites == order
        end = watch.study(f, None, [x], names=["gradient"], partial=True)["gradient"]
        assert end["identity_share"][-1] == pytest.approx(1)
    with pytest.raises(Refused, match="contrary orders in two blocks"):
        watch.find(blocks(("attention", "mlp"), ("mlp", "attention")), None, x)
    with pytest.raises(Refused, match="'attention' is passed before 'mlp' in a block, and the plan has them"):
        watch.study(blocks(("attention", "mlp")), None, [x], plan=watch.Plan(1, ("mlp", "attention")))


def test_a_study_that_a_function_does_not_let_be_made_is_left_out():
    def f(model: None, x: jax.Array) -> jax.Array:
        x = watch.add(x, jnp.sin(x), block=0, site="mlp")
        return jnp.mean(jax.lax.while_loop(lambda y: jnp.max(y) < 10, lambda y: 2 * y, x))

    found = watch.study(f, None, [np.ones((2, 3, 4), np.float32)])
    assert {"similarity", "ablation"} <= set(found) and "gradient" not in found
    assert any(note.startswith("study 'gradient' left out: ") for note in found.notes)
    with pytest.raises(ValueError, match="while_loop"):
        watch.study(f, None, [np.ones((2, 3, 4), np.float32)], names=["gradient"])


def test_streams_that_were_kept():
    with pytest.raises(Refused, match=r"streams are \[2, 3\], and have to be"):
        watch.study_streams(np.ones((2, 3)))
    with pytest.raises(Refused, match=r"tokens are int64\[3, 4\], and have to be integers \[3, 5\]"):
        watch.study_streams(np.ones((2, 3, 4, 5)), np.ones((3, 4), int))
    code = np.eye(4, dtype=np.float32)[np.random.default_rng(0).integers(0, 4, (9, 9))]
    found = watch.study_streams([code[:, :-1], 0 * code[:, :-1]], code.argmax(axis=-1))
    assert found["decoding"]["accuracy"][0, 0] == 1 > found["decoding"]["accuracy"][0, 1]
    assert set(found) == {"similarity", "massive", "decoding"} and found["massive"]["largest"] == [0]


# ---- the doctor


def test_the_doctor_shows_what_was_studied(tmp_path, capfd, untouched):
    """Findings, numbers and pictures from a folder of watch.Log, of the newest state by then."""
    found, folder = untouched[0], tmp_path / "theirs"
    with watch.Log(folder, sites=("block",)) as log:
        for step in (10, 20, 30):
            h = np.random.default_rng(step).normal(size=(4, 2, 3, 4)).astype(np.float32)
            log.write(step, watch.from_arrays(h, 0.2 * h), loss=3.0)
        log.studied(20, found)
        with pytest.raises(Refused, match=r"a study is 'ablatoin', which is none of .* did you mean 'ablation'"):
            log.studied(20, {"ablatoin": {}})
    assert [row["step"] for row in log.rows] == [10, 20, 30]
    code, out, err = said(capfd, folder)
    assert code == 0 and not err and "state of step 20" in out
    assert (
        "idle depth: blocks 2-3, step 20" in out and "2 of 4 blocks studied are worth less than 0.002 nats each" in out
    )
    page = (folder / "doctor.html").read_text()
    for words in (
        "Loss without a block",
        "Angular distance",
        "Logit lens",
        "adds in bfloat16",
        "Decodability",
        "watch.study was given",
    ):
        assert words in page, words
    held = json.loads((folder / "doctor.json").read_text())
    assert (
        held["studied_step"] == 20 and set(held["studies"]) == set(found) and held["studies"]["update"]["lr"] == "nan"
    )
    assert held["studies"]["ablation"]["delta"] == found["ablation"]["delta"].tolist()
    for words in (("--step=10",), ("--studies=none",)):
        assert "no state studied" in said(capfd, folder, *words)[1]
    (folder / "studies" / "00000030.json").write_text("{")
    assert "00000030.json: cannot be read" in said(capfd, folder)[1]
    with watch.Log(folder, after=10):
        pass
    assert list((folder / "studies").iterdir()) == []
