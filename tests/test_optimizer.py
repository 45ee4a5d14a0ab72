"""Does one step change exactly the weights that it should, by the right amount, in every layout of the parameters?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from resjax.errors import Refused
from resjax.residual import OptRule
from resjax.train import optimizer
from resjax.train.leaves import named
from resjax.train.optimizer import apply_updates, build, clip_scale, decay_mask, listing

D, H, N = 8, 12, 3
GAINS = ("norm_scale", "norm_bias", "gain", "gain_offset", "bias", "emb", "pos")


class Block(nnx.Module):
    """A block with every role and the kernels fused as the models fuse them; ``lead`` is (n,) for a stack of n."""

    def __init__(self, rng, lead=()):
        def drawn(*shape):
            return jnp.asarray(rng.normal(size=lead + shape), jnp.float32)

        def filled(value, *shape):
            return jnp.full(lead + shape, value)

        self.qkv = nnx.Param(drawn(D, 3, D), role=("q", "k", "v"))
        self.out = nnx.Param(drawn(D, D), role=("write",))
        self.up = nnx.Param(drawn(D, 2, H), role=("fc_in", "fc_in"))
        self.down = nnx.Param(drawn(H, D), role=("write",))
        self.norm = nnx.Param(filled(1.0, D), role=("norm_scale",))
        self.norm_bias = nnx.Param(filled(0.5, D), role=("norm_bias",))
        self.bias = nnx.Param(filled(0.25, D), role=("bias",))
        self.scale = nnx.Param(filled(0.3), role=("gain",))  # ReZero: stacked it has one axis
        self.layerscale = nnx.Param(filled(0.1, D), role=("gain",))  # stacked it has two, like a kernel
        self.offset = nnx.Param(filled(0.2, D), role=("gain_offset",))


class Model(nnx.Module):
    def __init__(self, stacked):
        rng = np.random.default_rng(0)
        self.emb = nnx.Param(jnp.asarray(rng.normal(size=(16, D)), jnp.float32), role=("emb",))
        self.pos = nnx.Param(jnp.asarray(rng.normal(size=(4, D)), jnp.float32), role=("pos",))
        self.head = nnx.Param(jnp.asarray(rng.normal(size=(D, 16)), jnp.float32), role=("head",))
        self.blocks = Block(rng, (N,)) if stacked else nnx.List([Block(rng) for _ in range(N)])


@functools.cache
def parameters(stacked=True, dtype=jnp.float32):
    return jax.tree.map(lambda x: x.astype(dtype), nnx.state(Model(stacked)))


def config(name="adamw", **fields):
    base = dict(lr=0.1, schedule="constant", warmup=0, weight_decay=0.0, clip=None)
    return ConfigDict({"name": name, "b1": None, "b2": None, "eps": None, "momentum": None, **base, **fields})


def one(name, params, role, dtype=jnp.float32):
    """A tree with the single named parameter."""
    return nnx.State({name: nnx.Param(jnp.asarray(params, dtype), role=(role,))})


def arrays(tree):
    return {path: np.asarray(leaf) for path, leaf in named(tree).items()}


def roles(params):
    return {row.path: row.role for row in listing(params)}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", optimizer.NAMES)
def test_decay_reaches_kernels_and_nothing_else(name, stacked):
    """A6: one step, zero gradients, lr 0.1, decay 0.1: kernels times 0.99, every other leaf bit-identical."""
    params = parameters(stacked)
    tx = build(config(name, weight_decay=0.1), 10, params)
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    before, after = arrays(params), arrays(apply_updates(params, updates))
    seen = set()
    for path, role in roles(params).items():
        seen.update(role.split(","))
        if role in GAINS:
            assert before[path].tobytes() == after[path].tobytes(), path
        else:
            np.testing.assert_allclose(after[path], 0.99 * before[path], rtol=1e-6, err_msg=path)
    assert seen == {"q", "k", "v", "write", "fc_in", "head", *GAINS}


def test_the_mask_is_the_same_stacked_and_unrolled():
    stacked, unrolled = named(decay_mask(parameters(True))), named(decay_mask(parameters(False)))
    assert len(unrolled) > len(stacked)
    for path, decays in unrolled.items():
        assert (
            decays
            == stacked[path.replace("blocks/0", "blocks").replace("blocks/1", "blocks").replace("blocks/2", "blocks")]
        )


def test_listing_has_one_row_a_leaf_and_splits_parts_that_differ():
    params = parameters()
    rows = {row.path: row for row in listing(params)}
    assert set(rows) == set(named(params))
    assert rows["blocks/qkv"] == ("blocks/qkv", "q,k,v", (N, D, 3, D), True, 1.0, 1.0, None)
    assert rows["blocks/layerscale"] == ("blocks/layerscale", "gain", (N, D), False, 1.0, 1.0, None)
    rules = {
        "q": OptRule(lr=0.5),
        "v": OptRule(decay=False, eps=2.0),
        "gain": OptRule(lr=0.1, decay=True, clip=0.5),
    }
    rows = {row.path: row for row in listing(params, rules)}
    assert rows["blocks/qkv[0]"] == ("blocks/qkv[0]", "q", (N, D, D), True, 0.5, 1.0, None)
    assert rows["blocks/qkv[1]"] == ("blocks/qkv[1]", "k", (N, D, D), True, 1.0, 1.0, None)
    assert rows["blocks/qkv[2]"] == ("blocks/qkv[2]", "v", (N, D, D), False, 1.0, 2.0, None)
    assert rows["blocks/scale"] == ("blocks/scale", "gain", (N,), True, 0.1, 1.0, 0.5)


def test_rules_split_a_fused_leaf_by_part():
    params = parameters()
    rules = {"q": OptRule(decay=False), "v": OptRule(lr=0.5)}
    tx = build(config("sgd", weight_decay=0.1, momentum=0.0), 10, params, rules)
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    before, after = arrays(params)["blocks/qkv"], arrays(apply_updates(params, updates))["blocks/qkv"]
    np.testing.assert_array_equal(after[:, :, 0], before[:, :, 0])
    np.testing.assert_allclose(after[:, :, 1], 0.99 * before[:, :, 1], rtol=1e-6)
    np.testing.assert_allclose(after[:, :, 2], 0.995 * before[:, :, 2], rtol=1e-6)


def test_rate_multiplier_is_exact_under_sgd():
    """A14: gates with multiplier 1/8 move by exactly an eighth, all else as before."""
    params = parameters()
    gradients = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)
    moved = {}
    for factor in (1.0, 0.125):
        tx = build(config("sgd", momentum=0.0), 10, params, {"gain": OptRule(lr=factor)})
        moved[factor] = arrays(jax.jit(tx.update)(gradients, tx.init(params), params)[0])
    for path, role in roles(params).items():
        factor = 0.125 if role == "gain" else 1.0
        np.testing.assert_array_equal(moved[0.125][path], factor * moved[1.0][path], err_msg=path)


@pytest.mark.parametrize("name", optimizer.NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_state_is_float32_abstractly_the_same_and_stable(name, dtype):
    params = parameters(dtype=dtype)
    abstract = jax.eval_shape(lambda: params)
    tx = build(config(name, weight_decay=0.1, schedule="cosine", warmup=2), 10, abstract, {"q": OptRule(lr=0.5)})
    state = tx.init(params)

    def form(tree):
        leaves = named(tree).items()
        return jax.tree.structure(tree), [(path, x.shape, x.dtype, x.weak_type) for path, x in leaves]

    with jax.numpy_dtype_promotion("strict"):
        updates, after = jax.jit(tx.update)(params, state, params)
    assert form(jax.eval_shape(tx.init, abstract)) == form(state) == form(after)
    assert {x.dtype for x in jax.tree.leaves(state)} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(apply_updates(params, updates))} == {jnp.dtype(dtype)}


def test_the_tree_of_state_does_not_depend_on_decay_or_rules():
    params = parameters()
    plain = build(config(), 10, params).init(params)
    other = build(config(weight_decay=0.1, schedule="linear"), 20, params, {"gain": OptRule(lr=0.1)}).init(params)
    assert list(named(plain)) == list(named(other))


def trajectory(lr, start, factor, eps, steps=50, name="adamw"):
    """Weights W after each step on the loss of (factor W), a smooth function whose gradient never vanishes."""
    fields = dict(eps=eps) if name == "adamw" else dict(momentum=0.0)
    params = one("w", start, "write")
    tx = build(config(name, lr=lr, **fields), steps, params)

    def loss(p):
        x = factor * p["w"][...]
        return jnp.sum(jnp.exp(0.3 * x) + 0.1 * jnp.roll(x, 1) * x + 0.7 * x)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return apply_updates(params, updates), state

    state, path = tx.init(params), []
    for _ in range(steps):
        params, state = step(params, state)
        path.append(np.asarray(params["w"][...]))
    return np.stack(path)


def test_a_multiplier_on_the_weights_is_a_rate_under_adam():
    """X36: multiplier s at rate lr on W is weights sW at rate s lr, step for step; SGD needs s² lr."""
    start = np.linspace(-1, 1, 6, dtype=np.float32)
    s = 0.25  # a power of two: nothing rounds differently, so equality is to the bit
    np.testing.assert_array_equal(s * trajectory(0.01, start, s, 0.0), trajectory(s * 0.01, s * start, 1.0, 0.0))
    s = 0.3
    scaled = s * trajectory(0.01, start, s, 0.0)
    np.testing.assert_allclose(scaled, trajectory(s * 0.01, s * start, 1.0, 0.0), rtol=0, atol=2e-6)
    assert np.abs(scaled - trajectory(0.01, s * start, 1.0, 0.0)).max() > 0.1
    close = s * trajectory(0.01, start, s, 1e-8) - trajectory(s * 0.01, s * start, 1.0, 1e-8)
    assert np.abs(close).max() < 1e-4
    sgd = s * trajectory(0.01, start, s, None, name="sgd")
    np.testing.assert_allclose(sgd, trajectory(s**2 * 0.01, s * start, 1.0, None, name="sgd"), rtol=0, atol=2e-6)


def test_the_first_adam_step_is_the_rate_times_the_sign():
    """X37: -lr sign(g), whatever the size of g."""
    gradient = np.asarray([1e-12, -1e-6, 1e-3, -1.0, 1e6], np.float32)
    params = one("w", np.zeros(5), "write")
    tx = build(config(lr=0.1, eps=0.0), 10, params)
    updates, _ = tx.update(one("w", gradient, "write"), tx.init(params), params)
    np.testing.assert_allclose(arrays(updates)["w"], -0.1 * np.sign(gradient), rtol=1e-5)


def test_bfloat16_parameters_do_not_move_and_float32_ones_do():
    """A28: gain 1, constant gradient, Adam at 6e-4, 100 steps: 0.94 in float32; bfloat16 rounds back to 1 each time."""
    ends = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        params = one("g", 1.0, "gain", dtype)
        tx = build(config(lr=6e-4), 100, params)

        def step(carry, _, tx=tx):
            params, state = carry
            updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
            return (apply_updates(params, updates), state), None

        (params, _), _ = jax.jit(lambda carry, step=step: jax.lax.scan(step, carry, length=100))(
            (params, tx.init(params))
        )
        ends[dtype] = float(params["g"][...])
    assert ends[jnp.float32] == pytest.approx(0.94, abs=1e-3)
    assert ends[jnp.bfloat16] == 1.0


@jax.jit
def separate_muon(gradient):
    """What optax's Muon makes of one plain matrix, by itself: the reference for every matrix of a stack."""
    tx = optax.contrib.muon(1.0, beta=0.95, consistent_rms=0.2)
    params = {"w": jnp.zeros_like(gradient)}
    with jax.numpy_dtype_promotion("standard"):  # optax itself is not strict
        return tx.update({"w": gradient}, tx.init(params), params)[0]["w"]


def test_muon_orthogonalises_each_matrix_of_a_stack_by_itself():
    params = parameters()
    rng = np.random.default_rng(7)

    def ill_conditioned(x):
        """Matrices over the last two axes whose singular values run from 1 to 0.2."""
        u, s, v = np.linalg.svd(rng.normal(size=x.shape), full_matrices=False)
        return jnp.asarray((u * np.linspace(1, 0.2, s.shape[-1])) @ v, jnp.float32)

    gradients = jax.tree.map(jnp.ones_like, params)
    for name, fused in {"qkv": True, "out": False, "up": True, "down": False}.items():
        shape = gradients["blocks"][name].shape  # (N, in, out) or (N, in, parts, out)
        single = np.zeros((N, shape[2], shape[1], shape[3])) if fused else np.zeros(shape)
        drawn = ill_conditioned(single)
        gradients["blocks"][name][...] = jnp.moveaxis(drawn, 1, 2) if fused else drawn
    tx = build(config("muon", lr=1.0), 10, params)
    updates = arrays(jax.jit(tx.update)(gradients, tx.init(params), params)[0])
    given = arrays(gradients)
    count = 0
    for path, parts in {"blocks/qkv": 3, "blocks/out": 1, "blocks/up": 2, "blocks/down": 1}.items():
        for n in range(N):
            for part in range(parts):
                index = (n, slice(None), part) if parts > 1 else (n,)
                update = updates[path][index]
                np.testing.assert_allclose(update, separate_muon(given[path][index]), rtol=0, atol=2e-5)
                # Orthogonal up to Newton-Schulz's tolerance: singular values of about 0.7 to 1.2, all 1 being exact.
                values = np.linalg.svd(update / (0.2 * np.sqrt(max(update.shape))), compute_uv=False)
                assert values.min() > 0.6 and values.max() < 1.3, (path, values)
                count += 1
    assert count == 7 * N


def test_muon_leaves_everything_else_to_adam():
    params = parameters()
    gradients = jax.tree.map(lambda x: jnp.sin(1.0 + jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)
    out = {}
    for name in ("muon", "adamw"):
        tx = build(config(name), 10, params)
        state = tx.init(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(gradients, state, params)
        out[name] = arrays(updates)
    for path, role in roles(params).items():
        same = np.array_equal(out["muon"][path], out["adamw"][path])
        assert same == (role in (*GAINS, "head")), path


def test_lion_moves_by_the_sign_and_sgd_by_its_momentum():
    gradient = one("w", [3.0, -0.5, 2.0], "write")
    params = one("w", [0.0, 0.0, 0.0], "write")
    tx = build(config("lion", lr=0.1), 10, params)
    np.testing.assert_allclose(
        arrays(tx.update(gradient, tx.init(params), params)[0])["w"], [-0.1, 0.1, -0.1], rtol=1e-6
    )
    tx = build(config("sgd", lr=0.1, momentum=0.5), 10, params)
    state = tx.init(params)
    for factor in (1.0, 1.5, 1.75):
        updates, state = tx.update(gradient, state, params)
        np.testing.assert_allclose(arrays(updates)["w"], -0.1 * factor * arrays(gradient)["w"], rtol=1e-6)


def test_clip_scale():
    assert clip_scale(jnp.asarray(5.0), None) == clip_scale(jnp.asarray(5.0), 0.0) == 1.0
    assert float(clip_scale(jnp.asarray(4.0), 1.0)) == 0.25
    assert float(clip_scale(jnp.asarray(0.5), 1.0)) == 1.0
    assert float(clip_scale(jnp.asarray(0.0), 1.0)) == 1.0
    for bad in (jnp.nan, jnp.inf):
        assert not jnp.isfinite(bad * clip_scale(jnp.asarray(bad), 1.0))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(name="adam"), ["optimizer.name", "'adam'", "did you mean 'adamw'"]),
        (dict(schedule="cosin"), ["optimizer.schedule", "did you mean 'cosine'"]),
        (dict(momentum=0.9), ["optimizer.momentum", "adamw", "leave it unset"]),
        (dict(name="sgd", b2=0.9), ["optimizer.b2", "sgd"]),
        (dict(b1=1.0), ["optimizer.b1", "1.0"]),
        (dict(eps=-1e-8), ["optimizer.eps"]),
        (dict(weight_decay=-0.1), ["optimizer.weight_decay", "-0.1"]),
        (dict(clip=float("nan")), ["optimizer.clip", "nan"]),
    ],
)
def test_bad_input_is_refused_in_one_sentence(fields, words):
    with pytest.raises(Refused) as refusal:
        build(config(**fields), 10, parameters())
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)


def test_bad_rules_and_parameters_without_role_are_refused():
    with pytest.raises(Refused, match=r"'gian'.*did you mean 'gain'"):
        build(config(), 10, parameters(), {"gian": OptRule(lr=0.1)})
    with pytest.raises(Refused, match=r"'gain'.*-1\.0"):
        build(config(), 10, parameters(), {"gain": OptRule(lr=-1.0)})
    with pytest.raises(Refused, match="'w' has no role"):
        build(config(), 10, nnx.State({"w": nnx.Param(jnp.zeros(3))}))
