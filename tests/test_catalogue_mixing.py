"""Which share has every earlier output in a branch's input and at the top? Mixing matrices are read off and compared with closed forms.

As in test_catalogue, but a branch gives its marker and a share of what it reads, so that the read weights show as well: all is linear.
"""

from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import EVALUATION, perturbed, stack
from oracle_forms import gelu, softmax
from resjax.config.entry import entry
from resjax.residual import Scheme
from test_catalogue import ALL, at

VIEWS = "qkv"
EPS = 1e-6  # of the stack's norms


class Echo(nnx.Module):
    """A branch that returns a marker and shares of its inputs, of queries, keys and values apart where it is given those."""

    views = True

    def __init__(self, width: int):
        self.marker = nnx.Param(jnp.zeros(width), role=("gain",))
        self.share = nnx.Param(jnp.zeros(3), role=("gain",))

    def __call__(self, x: Any) -> jax.Array:
        parts = [x[view] for view in VIEWS] if isinstance(x, dict) else [x]
        shares = [self.share[i] * part for i, part in enumerate(parts)]
        return self.marker[...] + sum(shares)


class Fixed(nnx.Module):
    """In the place of the norm that token-dependent weights are made of: the same whatever the tokens are."""

    def __init__(self, shape: tuple[int, ...]):
        self.value = nnx.Param(jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32), role=("gain",))

    def __call__(self, x: jax.Array) -> jax.Array:
        value = self.value[...]
        if value.ndim == 2:  # one a stream
            value = value.reshape(len(value), *(1,) * (x.ndim - 2), -1)
        return jnp.broadcast_to(value, x.shape)


class Net:
    """A stack of echoes whose embedding and markers are unit vectors: e the first, the marker of site s the one with number s + 1."""

    def __init__(self, scheme: Scheme, depth: int = 3):
        self.depth, self.M = depth, 2 * depth
        self.width = 4 * -(-(self.M + 1) // 4)  # for fractions
        self.ones = np.eye(self.width)
        bare = scheme.but(norm_in=None)
        self.stack = perturbed(lambda: stack(bare, lambda kind, key: Echo(self.width), depth, self.width))
        (self.blocks,) = self.stack.runs
        for pos, site in enumerate(self.blocks.sites):
            rows = self.ones[pos + 1 : self.M + 1 : 2]
            site.branch.marker[...] = jnp.asarray(rows, jnp.float32)

    def top(self) -> np.ndarray:
        out, _ = self.stack(jnp.asarray(self.ones[0], jnp.float32).reshape(1, 1, -1), EVALUATION)
        return np.asarray(out, np.float64).reshape(-1)

    def carry(self, s: int) -> Any:
        return self.blocks.sites[s % 2].carry

    def weights(self, s: int, *names: str) -> list[np.ndarray]:
        """Of the site's carry."""
        return [at(getattr(self.carry(s), name), s // 2) for name in names]

    def branch(self, s: int, *inputs: np.ndarray) -> np.ndarray:
        """What site s gives for one input, or for those of queries, keys and values."""
        shares = at(self.blocks.sites[s % 2].branch.share, s // 2)
        return self.ones[s + 1] + sum(share * x for share, x in zip(shares, inputs, strict=False))

    def block(self, l: int, H: np.ndarray, *views: np.ndarray) -> np.ndarray:
        """A Pre-LN block (from 0) on the stream H, without norms."""
        H = H + self.branch(2 * l, *(views or (H,)))
        return H + self.branch(2 * l + 1, H)

    def compare(self, want: np.ndarray, rtol: float = 1e-5) -> None:
        got = self.top()
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * np.abs(want).max())


# ---- several streams


@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections(dynamic):
    """8.3, 8.4: u = sum_i Am_i S_i, S'_i = sum_j Ar_ji S_j + B_i y; the token-dependent parts are made constant, one a stream."""
    net = Net(ALL["hyper_connections:dynamic" if dynamic else "hyper_connections"])
    if dynamic:
        for site in net.blocks.sites:
            site.carry.norm = Fixed((net.depth, 4, net.width))
    S = np.stack([net.ones[0]] * 4)
    for s in range(net.M):
        Am, Ar, B = net.weights(s, "pick", "mix", "spread")
        if dynamic:
            W_m, W_r, W_b, s_a, s_b = net.weights(s, "pick_by", "mix_by", "spread_by", "pick_scale", "spread_scale")
            Sn = at(net.carry(s).norm.value, s // 2)
            Am, Ar, B = Am + s_a * np.tanh(Sn @ W_m), Ar + s_a * np.tanh(Sn @ W_r), B + s_b * np.tanh(Sn @ W_b)
        S = Ar.T @ S + np.outer(B, net.branch(s, Am @ S))
    net.compare(S.sum(0))


def test_fractions():
    """8.7: u = Y^T S, S' = A^T S + B y, on the parts of the width."""
    net = Net(ALL["frac_connections"])
    S = net.ones[0].reshape(4, -1)
    for s in range(net.M):
        Y, A, B = net.weights(s, "pick", "mix", "spread")
        y = net.branch(s, (Y.T @ S).reshape(-1)).reshape(4, -1)
        S = A.T @ S + B[:, None] * y
    net.compare(S.reshape(-1))


def test_laurel_with_weights():
    """8.10: H' = a F(H) + b H."""
    net = Net(ALL["laurel:rw"])
    H = net.ones[0]
    for s in range(net.M):
        (logits,) = net.weights(s, "logits")
        a, b = 2 * softmax(logits, 0)
        assert abs(a - b) > 0.01
        H = a * net.branch(s, H) + b * H
    net.compare(H)


def test_laurel_of_low_rank():
    """8.10: H' = F(H) + H + B A H; of a row vector, H A B."""
    net = Net(ALL["laurel"])
    H = net.ones[0]
    for s in range(net.M):
        A, B = net.weights(s, "down", "up")
        H = net.branch(s, H) + H @ (np.eye(net.width) + A @ B)
    net.compare(H)


# ---- history


def test_muddformer():
    """8.9: four sums of all block outputs, for q, k, v and the skip; the weights' token-dependent part is made constant."""
    net = Net(ALL["muddformer"])
    outer, ends = net.blocks.outer, net.stack.ends
    outer.norm, ends.norm = Fixed((net.depth, net.width)), Fixed((net.width,))

    def weights(part: Any, block: int | None) -> np.ndarray:
        x, W1, W2, a = (
            np.asarray(v[...], np.float64) if block is None else at(v, block)
            for v in (part.norm.value, part.inner, part.outer, part.static)
        )
        return (gelu(x @ W1) @ W2).reshape(a.shape) + a

    X = [net.ones[0]]
    for l in range(net.depth):
        r, q, k, v = weights(outer, l)[:, : l + 1] @ np.stack(X)
        X.append(net.block(l, r, q, k, v))
    (top,) = weights(ends, None) @ np.stack(X)
    net.compare(top)


def test_deep_cross_attention():
    """8.18: u_c = sum_j (b_j + ReLU(<w, v_j>)) v_j for q, k, v and the skip, v_j what block j added."""
    net = Net(ALL["deep_cross_attention"])
    outer, ends = net.blocks.outer, net.stack.ends

    def read(b: np.ndarray, w: np.ndarray, v: np.ndarray) -> np.ndarray:
        return (b[:, : len(v)] + np.maximum(w @ v.T, 0)) @ v

    added = [net.ones[0]]
    for l in range(net.depth):
        r, q, k, v = read(at(outer.static, l), at(outer.query, l), np.stack(added))
        added.append(net.block(l, r, q, k, v) - r)
    (top,) = read(*(np.asarray(v[...], np.float64) for v in (ends.static, ends.query)), np.stack(added))
    net.compare(top)


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_depth_attention_in_groups(groups):
    """8.16: sources are e, the sums of finished groups of sites, and the own group's so far, which its first site does not have.

    Groups of 3 sites (a boundary falls between attention and feed-forward), of 2, of 1.
    """
    net = Net(entry("attnres", "block", groups=groups))
    size = net.M // groups

    def read(pick: Any, block: int | None, b: list[np.ndarray]) -> np.ndarray:
        g, w = (np.asarray(v[...], np.float64) if block is None else at(v, block) for v in (pick.gain, pick.query))
        scores = np.array([(g * w) @ v / sqrt((v**2).mean() + EPS) for v in b])
        return softmax(scores, 0) @ np.stack(b)

    b = [net.ones[0]]
    for s in range(net.M):
        v = net.branch(s, read(net.carry(s).pick, s // 2, b))
        b = [*b, v] if s % size == 0 else [*b[:-1], b[-1] + v]
    assert len(b) == groups + 1
    net.compare(read(net.stack.ends, None, b))


def test_x0_mixing():
    """8.13: before each block x = lambda x + mu x0, x0 = rms(e)."""
    net = Net(ALL["x0_mixing"])
    x = x0 = net.ones[0] / sqrt(1 / net.width + 1e-6)
    for l in range(net.depth):
        keep, anchor = at(net.blocks.outer.keep, l), at(net.blocks.outer.anchor, l)
        x = net.block(l, keep * x + anchor * x0)
    net.compare(x)


@pytest.mark.parametrize("depth", [4, 5])
def test_ladder(depth):
    """8.13: the first half pushes what it gives, the second half reads x + w pop(); with an odd depth the middle block does neither."""
    net = Net(ALL["x0_mixing:ladder"], depth)
    x, pushed = net.ones[0], []
    for l in range(depth):
        if l >= depth - depth // 2:
            x = x + at(net.blocks.outer.weight, l) * pushed.pop()
        x = net.block(l, x)
        if l < depth // 2:
            pushed.append(x)
    assert not pushed
    net.compare(x)


def test_pre_ln_and_denseformer():
    """1.3, 8.2: the same reading of two that test_catalogue reads at the top, with what the branches read."""
    net = Net(ALL["pre_ln"])
    x = net.ones[0]
    for l in range(net.depth):
        x = net.block(l, x)
    net.compare(x)
    net = Net(ALL["denseformer"])
    X = [net.ones[0]]
    for l in range(net.depth):
        row = np.ones(1) if l == 0 else at(net.blocks.outer.row.weights, l)[: l + 1]
        X.append(net.block(l, row @ np.stack(X)))
    net.compare(np.asarray(net.stack.ends.weights[...], np.float64) @ np.stack(X))
