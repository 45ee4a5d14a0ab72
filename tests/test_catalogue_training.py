"""Does training keep what a scheme says? Rules by role, projections, starts from data, runs that stop and go on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import runs
from kit import SMALL, abstract, fast, make, relative, stack, start, variables
from resjax.branches import MLP, Attention
from resjax.calibrate import calibrate
from resjax.config.load import load
from resjax.config.validate import resolve
from resjax.models.lm import Shape
from resjax.residual import Context, Init, InitRule
from resjax.residual.parameters import is_variable
from resjax.train.assemble import assemble
from resjax.train.leaves import named
from resjax.train.optimizer import listing
from resjax.train.project import place
from resjax.train.step import make_step
from test_catalogue import ALL

pytestmark = pytest.mark.usefixtures("quick")
QUICKLY = ("ngpt", "admin:profiled", "attnres", "reversible", "layer_drop", "realformer")  # what runs whenever tests do


@pytest.fixture(scope="module")
def config(calm):
    return calm


def fields(name: str) -> dict[str, Any]:
    entry, _, form = name.partition(":")
    return {"residual__name": entry} | ({"residual__form": form} if form else {})


@pytest.mark.parametrize("name", [n if n in QUICKLY else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_a_run_goes_on_bit_for_bit(config, tmp_path, name):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = fields(name) | {"train__steps": 4, "train__save_every": 0, "train__eval_every": 0}
    assert runs.run(config, whole, **options) == 0
    assert runs.stopped(config, parts, 2, **options) == 143
    assert runs.run(config, parts, **options) == 0
    assert runs.state_hash(whole, 4) == runs.state_hash(parts, 4)
    assert runs.summary(whole)["param_hash"] == runs.summary(parts)["param_hash"]
    assert runs.rows(whole) == runs.rows(parts)


def assembled(name: str, *pairs: tuple[str, str]) -> Any:
    entry, _, form = name.partition(":")
    own = [("residual.name", entry)] + ([("residual.form", form)] if form else [])
    base = [("data.source", "markov"), ("data.length", "8"), ("data.batch", "4"), ("model.depth", "2")]
    more = [("model.width", "16"), ("model.heads", "2"), ("health.groups", "none"), ("optimizer.warmup", "0")]
    path = str(runs.ROOT / "configs" / "smoke.py")
    return assemble(resolve(load(path, [*base, *more, *own, *pairs]), "cpu"), 32)


def trained(parts: Any, count: int) -> Any:
    """The state after some steps on random tokens."""
    step = fast(make_step(parts.graphdef, parts.optimizer, parts.schedule, parts.recipe))
    rng = np.random.default_rng(0)
    state = parts.initial(lambda i: rng.integers(0, 32, (4, 9)).astype(np.int32))
    for _ in range(count):
        state, *_ = step(state, rng.integers(0, 32, (4, 9)).astype(np.int32), np.asarray(False))
    return state


def test_ngpt_holds_its_matrices_to_norm_one():
    """11.5.9: before the first step and after each; other parameters are free."""
    parts = assembled("ngpt", ("optimizer.lr", "0.05"), ("model.mlp", "swiglu"))
    for count in (0, 3):
        params = trained(parts, count).params
        held = 0
        for variable in jax.tree.leaves(params, is_leaf=is_variable):
            value = np.asarray(variable[...])
            matrices = [value] if len(variable.role) == 1 else list(np.moveaxis(value, -2, 0))
            for role, matrix in zip(variable.role, matrices, strict=True):
                if axis := parts.scheme.project.get(role):
                    held += 1
                    np.testing.assert_allclose(np.linalg.norm(matrix, axis=place(role, axis)), 1, atol=1e-5)
        assert held == 2 + 3 + 2 + 2  # embedding and head; q, k, v; the gate's two; two that write


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_has_one_treatment_and_no_residual_number_decays(name):
    """11.5.11: gains, norms, static mixers, queries, gate biases: no decay, whatever the shape they are stacked in."""
    scheme = ALL[name]
    params = nnx.state(abstract(scheme, depth=2))
    rows = listing(params, scheme.optim, depth=2)
    assert {row.path.partition("[")[0] for row in rows} == set(named(params))
    free = {
        "norm_scale",
        "norm_bias",
        "gain",
        "gain_offset",
        "mixer_static",
        "mixer_query",
        "gate_bias",
        "bias",
        "emb",
        "pos",
    }
    for row in rows:
        roles = set(row.role.split(","))
        if roles & free or name == "ngpt":
            assert not row.decayed, row
        else:
            assert row.decayed, row


def test_rules_that_depend_on_the_depth():
    for name, depth, roles, lr, eps in (
        ("completep", 64, {"q,k,v", "write", "emb"}, 1.0, 1 / 16),
        ("depth_mup", 64, {"q,k,v", "write", "fc_in"}, 0.25, 1.0),
        ("fixup", 8, {"gain", "gain_offset"}, 0.1, 1.0),
    ):
        rows = listing(nnx.state(abstract(ALL[name], depth=2)), ALL[name].optim, depth=depth)
        found = [row for row in rows if row.role in roles]
        assert {row.role for row in found} == roles
        assert all((row.lr, row.eps) == (lr, eps) for row in found)
    gate, _ = [
        row for row in listing(nnx.state(abstract(ALL["gpas"], depth=1)), ALL["gpas"].optim) if "carry" in row.path
    ]
    assert (gate.clip, gate.decayed) == (0.01, False)


def test_eps_and_rate_by_role_act():
    """Adam's first step is lr g / (|g| + eps): with eps far above the gradient it is proportional to 1 / eps."""
    moved = {}
    freely = (("optimizer.clip", "0"), ("optimizer.lr", "100"))  # so that the change is far above rounding
    for depth in ("4", "16"):
        parts = assembled("completep", ("model.depth", depth), ("optimizer.eps", "1e3"), *freely)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 32, (4, 9)).astype(np.int32)
        before = parts.initial()
        gradients = fast(
            jax.grad(lambda p, t, parts=parts: nnx.merge(parts.graphdef, p).objective(t, Context(train=True))[0])
        )
        g = named(gradients(before.params, tokens))["head"]
        step = fast(make_step(parts.graphdef, parts.optimizer, parts.schedule, parts.recipe))
        after, *_ = step(before, tokens, np.asarray(False))
        change = np.asarray(named(after.params)["head"] - named(before.params)["head"])
        moved[depth] = float(np.max(np.abs(change)) / np.max(np.abs(g)))
    assert moved["16"] / moved["4"] == pytest.approx(4.0, rel=1e-3)


def test_admin_profiles_its_gains():
    """variants.md 6.3, by hand in NumPy: omega grows by the variance of each branch's output."""
    model = start("pre_ln", Init(), 1, depth=3)  # only for an embedding of some size
    h = model.embedded(jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 6))), Context())

    def branch(kind: str, key: jax.Array) -> Any:
        return Attention(8, 2, key=key) if kind == "attention" else MLP(8, 32, key=key)

    made = stack(ALL["admin:profiled"], branch, 3, 8)
    done = calibrate(made, h)
    stream, root, block_index = np.asarray(h, np.float64), 1.0, 0
    for index in range(3):
        block = done.block(index)
        for site in block.sites:
            omega = np.asarray(site.gains["skip"].gain[...])
            np.testing.assert_allclose(omega, root, rtol=1e-4)
            y = np.asarray(site.branch(jnp.asarray(stream, jnp.float32)), np.float64)
            root = float(np.sqrt((root * stream).var() + y.var()))
            added = omega * stream + y
            mean = added.mean(-1, keepdims=True)
            stream = (added - mean) / np.sqrt(added.var(-1, keepdims=True) + 1e-6)
        block_index += 1
    assert block_index == 3


def test_a_profiled_run_differs_from_the_first_value_of_its_gains():
    parts = assembled("admin:profiled")
    gains = [v for v in variables(trained(parts, 0).params) if v.role == ("gain",)]
    flat = np.concatenate([np.asarray(v[...]).reshape(-1) for v in gains])
    assert 1.0 in flat and len(np.unique(flat)) == 4, "one number a site, 1 at the first"
    with pytest.raises(ValueError, match="starts from data"):
        parts.initial()


def test_identity_start_of_shaped_attention():
    """W_Q = 0 and W_V = W_O = I: attention gives back what it reads (X, variants.md 4.1)."""
    made = stack(ALL["shaped_skipless"], lambda kind, key: Attention(8, 2, key=key), 1, 8, kinds=("attention",))
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    site = made.block(0).sites[0]
    at, _ = site.points.on({})
    np.testing.assert_allclose(site.branch(x, at), x, atol=2e-6)


def test_reversible_gradients_are_those_of_plain_backpropagation():
    """11.5.10: by undoing, and through the unrolled stack that stores everything; 16 blocks."""
    grads = []
    for scan in (True, False):
        model = make("reversible", depth=16, scan=scan, out_scale=0.2)
        tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 6)))
        grads.append(fast(jax.grad(lambda m, t: m.objective(t, Context())[0]))(model, tokens))
    pairs = zip(jax.tree.leaves(grads[0]), jax.tree.leaves(grads[1]), strict=True)
    assert max(relative(a, b) for a, b in pairs) < 1e-4


def test_stochastic_layers_are_replayed_alike_when_undone():
    """Dropout inside an undone stack: the same masks on the way up and down."""
    sizes = SMALL | {"dropout": 0.5}
    assert Shape(**sizes).dropout == 0.5
    grads = []
    context = Context(train=True, key=jax.random.key(4))
    for scan in (True, False):
        model = make("reversible", depth=4, scan=scan, dropout=0.5)
        tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 6)))
        grads.append(fast(jax.grad(lambda m, t: m.objective(t, context)[0]))(model, tokens))
    pairs = zip(jax.tree.leaves(grads[0]), jax.tree.leaves(grads[1]), strict=True)
    assert max(relative(a, b) for a, b in pairs) < 1e-4


def test_init_by_kind():
    """An init rule may hold for one kind of sub-layer only."""
    scheme = ALL["pre_ln"].but(where=None, init={"write": InitRule(0.0)})
    assert all(not np.any(v[...]) for v in variables(start(scheme, depth=2).stack) if v.role == ("write",))
