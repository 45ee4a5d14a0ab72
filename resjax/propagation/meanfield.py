"""What profile does mean-field theory expect of a network at its start? The tokens' Gram matrix, from site to site.

For wide layers with independent Gaussian weights the sub-layers' updates have nothing in common with the stream, so Gram matrices add:

    K' = N_after( skip^2 K + scale^2 N_out( F( in_scale^2 N_in(K) ) ) )

with the maps of :mod:`resjax.propagation.branches`. From K follow the stream's RMS, the update ratio and the token cosine. Gradients
have a Gram matrix too, which goes back through the same sites. Of the skips alone follows the identity path.
"""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from resjax.models.lm import KINDS, Shape
from resjax.propagation.branches import (
    Back,
    NoTheory,
    branch,
    known,
    norm,
    norm_kind,
    numbers,
    scaled,
    weight,
    weights,
)
from resjax.propagation.moments import Array, correlation, normalised, size
from resjax.residual import Init, OneStream, Run, Scheme, Site
from resjax.residual.gates import LowRank, Shrunk, Weighted
from resjax.residual.hyper import Fractions, Hyper
from resjax.residual.outer import Anchored, Dense, DepthCross, Mudd

# At their start these carry what one stream would: their own weights are 0 or 1.
ONE_STREAM = (OneStream, Shrunk, LowRank, Weighted, Fractions)
ONE_OUTER = (Dense, Mudd, DepthCross, Anchored)
ANCHOR_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class Expected:
    """Profiles (depth, sites), float64; NaN where a scheme has no such thing.

    Attributes:
      stream_rms, update_rms, update_ratio, token_cosine: as the probes of these names; no update_rms of several streams.
      stream_grad: norm of the gradient, over that after the last site.
      identity_path: the part of it that takes the skips alone.
    """

    stream_rms: Array
    update_rms: Array
    update_ratio: Array
    token_cosine: Array
    stream_grad: Array
    identity_path: Array


@dataclass(eq=False)
class _Site:
    """One site on the way back: ``G = skip . after . G' + sum over branches``; factors as :func:`scaled` takes them."""

    skip: tuple[Any, ...]
    after: Any
    branches: list[tuple[tuple[Any, ...], Back, tuple[Any, ...]]] = field(default_factory=list)

    def __call__(self, G: Array) -> Array:
        """The Gram matrix of gradients before the site."""
        G = scaled(G, self.after)
        total = self._times(G, self.skip)
        for enter, back, leave in self.branches:
            total = total + self._times(back(self._times(G, leave)), enter)
        return total

    def alone(self, G: Array) -> Array:
        """The same by the skip alone."""
        return self._times(scaled(G, self.after), self.skip)

    def _times(self, G: Array, factors: tuple[Any, ...]) -> Array:
        for factor in factors:
            G = scaled(G, factor)
        return G


def expected(scheme: Scheme, shape: Shape, init: Init, length: int) -> Expected:
    """The profiles under ``scheme`` at step 0, for sequences of ``length`` random tokens, in training.

    Raises:
      NoTheory: the scheme has something that the theory does not know.
    """
    with np.errstate(all="ignore"):  # where a network overflows, so may its theory
        return _expected(scheme, shape, init, length)


def _expected(scheme: Scheme, shape: Shape, init: Init, length: int) -> Expected:
    streams = refuse_unknown(scheme)
    K = embedded(scheme, shape, init, length)
    if isinstance(scheme.outer, Anchored):
        K = normalised(K, ANCHOR_EPS)
    count = len(scheme.sites(KINDS))
    rows: dict[str, Array] = {
        name: np.full((shape.depth, count), np.nan)
        for name in ("stream_rms", "update_rms", "update_ratio", "token_cosine")
    }
    way: list[_Site] = []
    root = 1.0
    pairs = ~np.eye(length, dtype=bool)
    for run in scheme.runs(KINDS, shape.depth):
        parts = [_parts(run, pos, scheme, shape, init) for pos in range(count)]
        for block in range(run.first, run.first + run.length):
            for pos, (resolved, kinds, gains) in enumerate(zip(run.sites, _kinds(scheme), parts, strict=True)):
                now = {name: {role: float(v[block - run.first]) for role, v in g.items()} for name, g in gains.items()}
                if scheme.calibrate:
                    now["gains"]["skip"] = root
                before = size(K)
                K, ratio, back, of_update = _through(K, resolved, kinds, now, shape)
                root = float(np.sqrt(root**2 * before + of_update))
                way.append(back)
                rows["stream_rms"][block, pos] = streams * np.sqrt(size(K))
                rows["update_ratio"][block, pos] = ratio
                if streams == 1:
                    rows["update_rms"][block, pos] = np.sqrt(enlarged(now["gains"]["drop"]) * of_update)
                if length > 1 and size(K) > 0:
                    rows["token_cosine"][block, pos] = correlation(K)[pairs].mean()
    top = norm(K, norm_kind(scheme.final_norm, shape), shape)[1]
    top = np.diagonal(scaled(np.eye(length), top))
    total, alone = _back(way, top / top.mean(), (shape.depth, count))
    if streams > 1:  # of several streams each has a gradient of its own
        total = np.full_like(total, np.nan)
        alone = total
    return Expected(**rows, stream_grad=total, identity_path=alone)


def refuse_unknown(scheme: Scheme) -> int:
    """How many equal streams the probes see as their sum.

    Raises:
      NoTheory: the carry is none that starts as one stream.
    """
    carry = scheme.carry
    streams = carry.n if isinstance(carry, Hyper) else 1
    if not isinstance(carry, Hyper) and type(carry) not in ONE_STREAM:
        raise NoTheory(f"it carries {scheme.carried} by {type(carry).__name__}, which does not start as one stream")
    outer = scheme.outer
    if outer is not None and (not isinstance(outer, ONE_OUTER) or getattr(outer, "ppn", False)):
        raise NoTheory(f"its blocks are joined by {type(outer).__name__}, which does not start as one stream")
    return streams


def embedded(scheme: Scheme, shape: Shape, init: Init, length: int) -> Array:
    """The Gram matrix of the embeddings: tokens drawn evenly from the vocabulary, each at its own position."""
    if "emb" in scheme.project:
        raise NoTheory("the embeddings are held to norm 1")
    ends = Site("ends", 0, 1, shape.depth, np.zeros(1, np.float32))
    table = float(weight("emb", (shape.width, shape.vocab), scheme, init, ends)[0]) / shape.width
    own, same = np.eye(length), 1 / shape.vocab  # that two tokens are the same one
    K = table * (own * (1 - same) + same)
    if shape.positions == "learned":
        K = K + own * float(weight("pos", (shape.width, shape.length), scheme, init, ends)[0]) / shape.width
    return _dropped(K, shape.dropout)


def _kinds(scheme: Scheme) -> list[tuple[str, ...]]:
    """The sub-layers at each site of a block."""
    return [tuple(site.split("+")) for site in scheme.sites(KINDS)]


def _parts(run: Run, pos: int, scheme: Scheme, shape: Shape, init: Init) -> dict[str, dict[str, Array]]:
    """The gains at one site of a run, and the weights of its sub-layers; a vector over blocks each."""
    resolved, sites = run.sites[pos], scheme.sites(KINDS)
    known(resolved)
    if resolved.entry != 0.0:
        raise NoTheory("the stream joins what entered its block, with which it has much in common")
    blocks = jnp.arange(run.first, run.first + run.length, dtype=jnp.float32)
    places = Site(sites[pos], pos, len(sites), shape.depth, blocks, jnp.float32(0))
    gains = {name: numbers(getattr(resolved, name), places) for name in ("in_scale", "scale", "skip", "drop")}
    return {"gains": gains} | {kind: weights(kind, resolved, shape, init, places) for kind in _kinds(scheme)[pos]}


def _through(
    K: Array, scheme: Scheme, kinds: tuple[str, ...], now: dict[str, dict[str, float]], shape: Shape
) -> tuple[Array, float, _Site, float]:
    """One site: the Gram matrix after it, its update ratio, its way back, and the mean square of its update."""
    gains = now["gains"]
    skip, scale, inner = gains["skip"] ** 2, gains["scale"] ** 2, gains["in_scale"] ** 2
    normed, of_in = norm(K, norm_kind(scheme.norm_in, shape), shape)
    updates, branches = [], []
    for kind in kinds:
        made, back = branch(kind, inner * normed, scheme, shape, now[kind])
        updates.append(made)
        branches.append(back)
    update, of_out = norm(np.sum(updates, axis=0), norm_kind(scheme.norm_out, shape), shape)
    chance = enlarged(gains["drop"])
    leave = (scale * chance / (1 - shape.dropout), of_out)
    update = scale * _dropped(update, shape.dropout)
    base, of_base = (normed, of_in) if scheme.keep_normed else (K, 1.0)
    kept = skip * base
    ratio = float(np.mean(np.sqrt(np.diagonal(update) / np.diagonal(kept)))) if skip > 0 else np.nan
    joined = kept + chance * update
    after, of_after = norm(joined, norm_kind(scheme.norm_after, shape), shape)
    way = _Site((skip, of_base), of_after, [((inner, of_in), back, leave) for back in branches])
    return after, ratio, way, size(update)


def enlarged(drop: float) -> float:
    """By how much stochastic depth makes the mean square of an update larger."""
    return 1 / (1 - drop) if drop < 1 else 0.0


def _dropped(K: Array, rate: float) -> Array:
    """After dropout: the squares grow by 1 / (1 - rate), what two tokens have in common stays."""
    return K + np.diag(np.diagonal(K)) * (1 / (1 - rate) - 1) if rate > 0 else K


def _back(way: list[_Site], top: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """The norm of the gradient after each site, in all and by the skips alone, over that after the last.

    ``top`` is the mean square after the last site of each token's gradient, of mean 1.
    """
    total, alone = np.ones(len(way)), np.ones(len(way))
    G = identity = np.diag(top)
    for i in range(len(way) - 1, 0, -1):
        G, identity = way[i](G), way[i].alone(identity)
        total[i - 1], alone[i - 1] = size(G), size(identity)
    return np.sqrt(total).reshape(shape), np.sqrt(alone).reshape(shape)
