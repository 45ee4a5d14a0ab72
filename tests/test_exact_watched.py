"""Do the exact properties of networks show in what a user's tools tell: watching and studying foreign models, stacks of ours?

X.. are the exact and analytic properties; the same of arrays, without a model around, are in test_metrics.
"""

from itertools import product
from math import comb, log, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from kit import fast, stack
from resjax import watch
from resjax.branches import MLP, Attention
from resjax.branches.attention import shown
from resjax.health import probes
from resjax.health.geometry import composite_norm
from resjax.residual import CATALOGUE, Context, Init, Knob
from test_metrics import aligned
from test_properties import BARE
from ways import normal

pytestmark = pytest.mark.usefixtures("quickly")
RELU = aligned(10)
# In 10 layers of width 256, the mean of 16 draws: the 0.03 of the arrays of test_metrics.
ALIGNED = 0.03


# ---- tokens that become alike (X20, X24)


def test_tokens_align_in_a_foreign_mlp_without_skips():
    """X20: the watched token cosine of He's ReLU MLP, layer by layer, in a scan in a compiled step."""
    width, layers, draws = 256, 10, 16
    plan = watch.Plan(layers, ("mlp",))
    tokens = 16 * jnp.eye(width).reshape(32, 8, width)

    def layer(h: jax.Array, row: tuple) -> tuple[jax.Array, None]:
        weights, i = row
        return watch.change(h, jax.nn.relu(h @ weights), block=i, site="mlp"), None

    def total(weights: jax.Array, taps: watch.Taps) -> jax.Array:
        with watch.into(taps):
            return jnp.mean(lax.scan(layer, tokens, (weights, jnp.arange(layers)))[0])

    step, found = jax.jit(jax.grad(total, argnums=1)), []
    for seed in range(draws):
        weights = sqrt(2 / width) * jax.random.normal(jax.random.key(seed), (layers, width, width))
        found.append(watch.row(step(weights, plan.taps()))["token_cosine"][:, 0])
    np.testing.assert_allclose(np.mean(found, axis=0), RELU, atol=ALIGNED)


def test_tokens_align_in_a_stack_of_ours_without_skips():
    """X20: ten scanned blocks of the scheme 'plain' without its norm; the second matrix of each turns and stretches all tokens alike."""
    width, layers, draws = 256, 10, 16
    scheme = CATALOGUE["plain"].but(norm_in=None)
    tokens = 16 * jnp.eye(width).reshape(32, 8, width)

    def cosines(key: jax.Array) -> jax.Array:
        branch = lambda kind, key: MLP(width, width, "relu", key=key)  # noqa: E731
        made = stack(scheme, branch, layers, width, ("mlp",), init=Init("gain", gain=2**0.25, out_scale=1.0), key=key)
        return made(tokens, Context(measure=probes.measure))[1]["token_cosine"][:, 0]

    found = fast(lambda keys: lax.map(cosines, keys))(jax.random.split(jax.random.key(0), draws))
    np.testing.assert_allclose(np.mean(found, axis=0), RELU, atol=ALIGNED)


def test_a_foreign_attention_alone_collapses_by_cubes():
    """X24: what watching calls the residual obeys the bound of Dong et al. and falls as the cube from layer to layer, to round-off.

    In float64, in which the numbers go below 1e-14 before they end.
    """
    tokens, width, layers = 8, 16, 4
    rng = np.random.default_rng(0)
    query_keys = rng.normal(size=(layers, width, width)) * 0.02
    values = rng.normal(size=(layers, width, width)) / sqrt(width)
    start = rng.normal(size=(1, tokens, width))
    plan = watch.Plan(layers, ("attention",), groups=("tokens",))

    def layer(h: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
        query_key, value, i = row
        mixed = jax.nn.softmax(h @ query_key @ h.swapaxes(1, 2), axis=-1) @ h
        h = watch.change(h, mixed @ value, block=i, site="attention")
        return h, h

    def total(taps: watch.Taps) -> tuple[jax.Array, jax.Array]:
        with watch.into(taps):
            last, streams = lax.scan(layer, jnp.asarray(start), (query_keys, values, jnp.arange(layers)))
            return jnp.sum(last), streams

    with jax.enable_x64(True):
        found, streams = jax.jit(jax.grad(total, has_aux=True))(plan.taps())
        assert watch.stream_dtype(found) == "float64"
        sizes = np.asarray(composite_norm(streams))[:, 0]
        norms = np.asarray(composite_norm(jnp.asarray(values)))
    left = watch.row(found)["residual_composite"][:, 0].astype(np.float64)
    residuals = left * sizes
    for i in range(1, layers):
        beta = np.abs(query_keys[i]).sum(0).max() * norms[i]
        assert residuals[i] <= 4 * sqrt(tokens) * beta * residuals[i - 1] ** 3 or left[i] < 1e-14
        if left[i] > 1e-14:
            assert log(left[i]) / log(left[i - 1]) > 2.9
    assert left[0] < 0.5 and left[1] < 1e-3 and left[2] < 1e-11 and left[3] < 1e-14


# ---- averaging (X22)


@pytest.mark.parametrize("later", [False, True])
def test_our_attention_narrows_every_coordinate_of_its_values(later):
    """X22: of each head, max - min over queries of what it gives is at most tau times that of the values; in a scan in a program.

    Random scores stand in the place of its own. The first query sees one key only, so that tau is large; of the later half it is less.
    """
    length, draws = 6, 100
    branch = Attention(8, 2, key=jax.random.key(0))
    for linear in (branch.qkv, branch.write):
        linear.kernel[...] = jnp.asarray(normal(*linear.kernel.shape, seed=1))

    def inside(x: jax.Array, scores: jax.Array) -> tuple[jax.Array, ...]:
        seen = {}

        def at(name: str, value: jax.Array) -> jax.Array:
            seen[name] = scores if name == "scores" else value
            return seen[name]

        at.whole_scores = True  # type: ignore[attr-defined]
        branch(x, at)
        weights = jax.nn.softmax(shown(scores, 0, length), axis=-1)
        return seen["v"].swapaxes(1, 2), seen["heads"].swapaxes(1, 2), weights

    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-1.5, 1.5, size=(draws, 1, 1, 1, 1)).astype(np.float32)
    scores = sizes * normal(draws, 1, 2, length, length, seed=2)
    rows = normal(draws, 1, length, 8, seed=3), scores
    values, means, weights = jax.jit(lambda rows: lax.scan(lambda _, row: (None, inside(*row)), None, rows)[1])(rows)
    queries = slice(length // 2 if later else 0, length)
    values, means, weights = (
        np.asarray(values),
        np.asarray(means)[..., queries, :],
        np.asarray(weights)[..., queries, :],
    )
    tau = 1 - np.minimum(weights[..., :, None, :], weights[..., None, :, :]).sum(-1).min((-2, -1))
    shares = np.ptp(means, axis=-2) / (tau[..., None] * np.ptp(values, axis=-2))
    # tau of nearly uniform weights is a small difference of numbers near 1
    assert shares.max() < 1 + 1e-5
    assert shares.max() > 0.9, "a bound that is nearly reached"
    assert not later or tau.min() < 0.2


# ---- paths (X23, X53)


def heads(skip: bool, tokens: int = 4, width: int = 4, layers: int = 3, count: int = 2, constant: bool = False) -> Any:
    """A foreign network of frozen attention: its loss, linear in the stream, its numbers and its input.

    ``constant``: every path carries 1 to every token and feature, so that the loss counts paths.
    """
    rng = np.random.default_rng(0)
    mixing = rng.dirichlet(np.ones(tokens), size=(layers, count, tokens)).astype(np.float32)
    maps = rng.normal(size=(layers, count, width, width)).astype(np.float32)
    x = rng.normal(size=(1, tokens, width)).astype(np.float32)
    readout = rng.normal(size=(tokens, width)).astype(np.float32)
    if constant:
        mixing, x, readout = np.full_like(mixing, 1 / tokens), np.ones_like(x), np.full_like(readout, 1 / readout.size)
        maps = np.broadcast_to(np.eye(width, dtype=np.float32), maps.shape)

    def layer(h: jax.Array, row: tuple) -> tuple[jax.Array, None]:
        mix, value, i = row
        read, h = h, h if skip else jnp.zeros_like(h)
        for head in range(count):
            h = watch.add(h, mix[head] @ read @ value[head], block=i, site=f"head {head}")
        return h, None

    @jax.jit
    def f(numbers: tuple, x: jax.Array) -> jax.Array:
        return jnp.sum(readout * lax.scan(layer, x, (*numbers, jnp.arange(layers)))[0])

    return f, (mixing, maps), x, readout


def walked(skip: bool, numbers: tuple, x: np.ndarray, readout: np.ndarray) -> dict[tuple, float]:
    """What each path adds to the loss; a path is the head that it takes in each layer, None where it goes past."""
    mixing, maps = (np.asarray(part, np.float64) for part in numbers)
    found = {}
    for path in product((None, *range(mixing.shape[1])) if skip else range(mixing.shape[1]), repeat=len(mixing)):
        h = np.asarray(x[0], np.float64)
        for layer, head in enumerate(path):
            h = h if head is None else mixing[layer, head] @ h @ maps[layer, head]
        found[path] = float(np.sum(readout * h))
    return found


PLAN = watch.Plan(3, ("head 0", "head 1"))


@pytest.mark.parametrize("skip", [True, False])
def test_a_study_of_a_foreign_network_sees_its_paths(skip):
    """X23: the loss is the sum over paths, what a head or a block is worth the sum over those that go through it, and what is read out
    before a block the sum over those that take none from there on. H = 2, L = 3: 27 paths, 1 + 6 + 12 + 8, or 8 without a skip.
    """
    f, numbers, x, readout = heads(skip)
    paths = walked(skip, numbers, x, readout)
    lengths = np.bincount([sum(head is not None for head in path) for path in paths], minlength=4).tolist()
    assert lengths == ([comb(3, l) * 2**l for l in range(4)] if skip else [0, 0, 0, 8])
    found = watch.study(f, numbers, [x], plan=PLAN, names=("ablation", "lens"))
    through = lambda taken: sum(value for path, value in paths.items() if taken(path))  # noqa: E731
    close = dict(rtol=1e-5, atol=1e-5 * sum(map(abs, paths.values())))
    np.testing.assert_allclose(found["ablation"]["loss"], sum(paths.values()), **close)
    for block in range(3):
        worth = [-through(lambda path, b=block, i=i: path[b] == i) for i in range(2)]
        np.testing.assert_allclose(found["ablation"]["delta_site"][block], worth, **close)
        np.testing.assert_allclose(found["ablation"]["delta"][block], sum(worth), **close)
    early = [through(lambda path, b=b: all(head is None for head in path[b:])) for b in range(4)]
    np.testing.assert_allclose(found["lens"]["loss"], early, **close)


def test_a_study_of_a_foreign_network_counts_its_paths():
    """X23: where each path carries 1, exactly: 27 paths, 9 through each head; 8 without a skip, and none that ends early."""
    for skip in (True, False):
        f, numbers, x, _ = heads(skip, constant=True)
        found = watch.study(f, numbers, [x], plan=PLAN, names=("ablation", "lens"))
        assert found["ablation"]["loss"] == (27 if skip else 8)
        np.testing.assert_array_equal(found["ablation"]["delta_site"], np.full((3, 2), -9 if skip else -4))
        np.testing.assert_array_equal(found["ablation"]["delta"], np.full(3, -18 if skip else -8))
        assert found["lens"]["loss"].tolist() == ([1, 3, 9, 27] if skip else [0, 0, 0, 8])


PLAN_OF_24 = watch.Plan(12, ("attention", "mlp"))


def test_one_branch_of_24_is_on_half_of_all_paths():
    """X53: 2^24 paths, exactly half of them without a branch, a quarter without both of a block."""

    def layer(h: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        for site in PLAN_OF_24.sites:
            h = watch.add(h, h, block=i, site=site)
        return h, None

    f = jax.jit(lambda model, x: lax.scan(layer, x, jnp.arange(12))[0].mean())
    found = watch.study(f, None, [np.ones((1, 2, 4), np.float32)], plan=PLAN_OF_24, names=("ablation", "lens"))
    assert found["ablation"]["loss"] == 2**24
    np.testing.assert_array_equal(found["ablation"]["delta_site"], np.full((12, 2), -(2**23)))
    np.testing.assert_array_equal(found["ablation"]["delta"], np.full(12, -3 * 2**22))
    assert found["lens"]["loss"].tolist() == [4**l for l in range(13)]


class Same(nnx.Module):
    """A branch that gives what it reads."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def test_lengths_of_the_paths_of_a_stack_of_ours():
    """X53: with branches t x the stream is a polynomial in t whose l-th coefficient counts the paths of length l: Binomial(24, 1/2).

    Through the stack's derivatives by t, scanned and compiled: mean 12, variance 6, and the third moment about the mean is 0.
    """

    with jax.enable_x64(True):
        made = stack(BARE.but(scale=Knob("t")), lambda kind, key: Same(), 12, 1)

        def log_paths(s: jax.Array) -> jax.Array:
            """The logarithm of the generating function at t = e^s: its derivatives are the cumulants of the lengths."""
            context = Context(compute=jnp.float64, knobs={"t": jnp.exp(s)})
            return jnp.log(made(jnp.ones((1, 1, 1)), context)[0].sum())

        derivatives = [log_paths]
        for _ in range(3):
            derivatives.append(jax.grad(derivatives[-1]))
        paths, mean, variance, third = jax.jit(lambda s: [f(s) for f in derivatives])(jnp.float64(0.0))
    assert float(paths) == pytest.approx(24 * log(2), rel=1e-12)
    assert [float(mean), float(variance)] == pytest.approx([12, 6], rel=1e-12)
    assert sqrt(float(variance)) == pytest.approx(2.45, abs=1e-3) and float(third) == pytest.approx(0, abs=1e-9)
