"""What do a norm, an attention and a feed-forward do to tokens at the start, and to a gradient on its way back, in the mean?

Forward a part maps the tokens' Gram matrix K (see :mod:`resjax.propagation.moments`). Backward it maps that of their gradients, G, by
the expected products of its derivatives (Yang and Schoenholz 2017, 1712.08969); what flows through the attention's scores is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from resjax.models.lm import Shape
from resjax.propagation.moments import Array, activated, averaged, gated, normalised, shares, size
from resjax.residual import Init, Inside, Learned, Scheme, Site, evaluate
from resjax.residual.gains import Knob, is_rule
from resjax.residual.norms import STEEPNESS

SCORES = ("q", "k", "q_turned", "k_turned")  # points that move scores only


class NoTheory(Exception):
    """Why no expectation is known, as the end of a sentence."""


def scaled(G: Array, by: Any) -> Array:
    """G after factors on the squares: a number, one a token, or one a pair of tokens."""
    if np.ndim(by) == 1:
        root = np.sqrt(by)
        return G * np.outer(root, root)
    return G * by


@dataclass(frozen=True, eq=False)
class Back:
    """One branch on the way back: ``G' = before . mix( after . G )``, factors as :func:`scaled` takes them.

    ``mix`` is None, or what of the square of independent tokens attention leaves in each mean (see ``shares``).
    """

    before: tuple[Any, ...]
    after: tuple[Any, ...]
    mix: Array | None

    def __call__(self, G: Array) -> Array:
        for factor in reversed(self.after):
            G = scaled(G, factor)
        if self.mix is not None:
            G = spread_back(G, self.mix)
        for factor in reversed(self.before):
            G = scaled(G, factor)
        return G


def spread_back(G: Array, kept: Array) -> Array:
    """The transpose of causal averaging: token u gets from each token t >= u its share 1 / t; squares go by the squared weights."""
    count = np.arange(1, len(G) + 1)
    even = G / np.outer(count, count)
    own = np.diagonal(G) * (kept - 1 / count) / count  # what uneven weights add to a token's own square
    after = np.cumsum(np.cumsum(even[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    return after + np.diag(np.cumsum(own[::-1])[::-1])


def norm_kind(name: str | None, shape: Shape) -> str | None:
    """The norm that a name means; None where there is none."""
    kind = shape.norms.kind if name == "norm" else name
    return None if kind == "none" else kind


def norm(K: Array, kind: str | None, shape: Shape) -> tuple[Array, Any]:
    """After a norm at its start, and the factor on the squares of a gradient."""
    if kind is None:
        return K, 1.0
    if kind in ("dyt", "derf"):
        K, slope, _ = activated(kind, STEEPNESS**2 * K)
        return K, STEEPNESS**2 * slope
    share = 1 / shape.width if kind == "unit" else 1.0
    return share * normalised(K, shape.norms.eps), share / (np.diagonal(K) + shape.norms.eps)


def numbers(gain: Any, places: Site) -> Array:
    """The values of a gain at step 0 on a vector of blocks; a learned one at its start."""
    if isinstance(gain, Knob):
        raise NoTheory(f"'{gain.name}' is a knob")
    if isinstance(gain, Learned):
        if gain.shape == "none":
            return np.ones(np.shape(places.block))
        first = numbers(gain.start, places)
        return first if gain.through is None else np.asarray(gain.through(jnp.asarray(first, jnp.float32)), np.float64)
    value = evaluate(gain, places) if is_rule(gain) else gain
    return np.broadcast_to(np.asarray(value, np.float64), np.shape(places.block))


def weight(role: str, fans: tuple[int, int], scheme: Scheme, init: Init, places: Site) -> Array:
    """Variance times fan-in of the matrices of one role, on a vector of blocks."""
    rule = scheme.init.get(role)
    std = np.asarray(init.of(role, fans, places, rule), np.float64)
    if rule is not None and rule.family == "identity":
        raise NoTheory(f"the matrices '{role}' start as the identity, not at random")
    return np.broadcast_to(std**2 * fans[0], np.shape(places.block))


def weights(kind: str, scheme: Scheme, shape: Shape, init: Init, places: Site) -> dict[str, Array]:
    """:func:`weight` of all matrices of a sub-layer that the stream goes through."""
    width = shape.width
    if kind == "attention":
        fans = dict.fromkeys(("q", "k", "v", "write"), (width, width))
    elif kind == "mlp":
        hidden = round(shape.mlp_ratio * width)
        fans = {"fc_in": (width, hidden), "write": (hidden, width)}
    else:
        raise NoTheory(f"'{kind}' is no sub-layer that the theory knows")
    return {role: weight(role, pair, scheme, init, places) for role, pair in fans.items()}


def branch(kind: str, K: Array, scheme: Scheme, shape: Shape, by: Mapping[str, float]) -> tuple[Array, Back]:
    """After one sub-layer whose matrices have the weights ``by``; and its way back."""
    return attention(K, scheme, shape, by) if kind == "attention" else mlp(K, scheme, shape, by)


def attention(K: Array, scheme: Scheme, shape: Shape, by: Mapping[str, float]) -> tuple[Array, Back]:
    """Scores that are independent Gaussians."""
    values, of_values = point("v", by["v"] * K, scheme, shape)
    spread = score_spread(K, scheme, by)
    mixed, of_heads = point("heads", averaged(values, spread), scheme, shape)
    mixed, of_joined = point("pre_o", mixed, scheme, shape)
    back = Back((by["v"], of_values), (of_heads, of_joined, by["write"]), shares(len(K), spread))
    return by["write"] * mixed, back


def mlp(K: Array, scheme: Scheme, shape: Shape, by: Mapping[str, float]) -> tuple[Array, Back]:
    """Gaussian weights, no biases."""
    inner, of_inner = point("fc_in", by["fc_in"] * K, scheme, shape)
    if shape.mlp == "swiglu":
        gate, slope, _ = activated("silu", inner)
        (hidden, slope), mean = gated(inner, gate, slope), 0.0
    else:
        hidden, slope, mean = activated(shape.mlp, inner)
    hidden, of_hidden = point("hidden", hidden, scheme, shape, mean)
    back = Back((by["fc_in"], of_inner, slope.astype(np.float32)), (of_hidden, by["write"]), None)
    return by["write"] * hidden, back


def point(name: str, K: Array, scheme: Scheme, shape: Shape, mean: float = 0.0) -> tuple[Array, Any]:
    """What a scheme puts at a point inside a branch: Gram matrix, and factor on a gradient's squares; ``mean`` is that of a feature."""
    spec = scheme.inside.get(name)
    if spec is None:
        return K, 1.0
    assert isinstance(spec, Inside)
    kind = norm_kind(spec.norm, shape)
    if kind == "layernorm":
        K = K - mean**2
    K, slope = norm(K, kind, shape)
    factor: Any = spec.gain
    if isinstance(factor, Learned):
        factor = 1.0 if factor.shape == "none" else factor.start
    if callable(factor) or spec.gain_of is not None or spec.times is not None:
        raise NoTheory(f"the gain at '{name}' is not a number")
    return factor**2 * K, factor**2 * slope


def known(scheme: Scheme) -> None:
    """Refuse what stands inside branches and is no norm or gain.

    Raises:
      NoTheory: values or scores are shared between blocks, or attention is of another form.
    """
    if scheme.share:
        raise NoTheory(f"blocks share their '{next(iter(scheme.share))}'")
    for name, spec in scheme.inside.items():
        if not isinstance(spec, Inside):
            raise NoTheory(f"attention is of another form at '{name}'")


def score_spread(K: Array, scheme: Scheme, by: Mapping[str, float]) -> float:
    """Standard deviation of the attention's scores."""
    if any(getattr(scheme.inside.get(name), "norm", None) for name in SCORES):
        return 1.0
    return float(np.sqrt(by["q"] * by["k"])) * size(K)
