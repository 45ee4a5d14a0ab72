"""What do the parts of a sub-layer make of the tokens' Gram matrix, in the mean over the weights of a wide network at its start?

``K[t, u]`` is the mean over features of ``x_t x_u`` for the tokens t, u of one sequence. A matrix with independent Gaussian weights
multiplies K by (its variance times its fan-in); an activation maps variances and correlations (Cho and Saul 2009; Poole et al. 2016,
1606.05340); attention with equal scores averages over the tokens before (Dong et al. 2021, 2103.03404; Noci et al. 2022, 2206.03126).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Array = np.ndarray
NODES = 24  # of the Gauss-Hermite rule, on either axis
CORRELATIONS = np.sin(np.linspace(-np.pi / 2, np.pi / 2, 65))  # dense at both ends, where ReLU's map bends
DIGITS = 3  # to which variances share a table
LARGEST = 1e30  # a variance beyond is no network's
DRAWS = 1000  # of attention scores


def gelu(z: Array) -> Array:
    """The tanh form, as in :class:`resjax.branches.MLP`."""
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def silu(z: Array) -> Array:
    return z / (1 + np.exp(-z))


def relu(z: Array) -> Array:
    return np.maximum(z, 0)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "relu": relu,
    "silu": silu,
    "dyt": np.tanh,
    "derf": np.vectorize(math.erf, otypes=[float]),
}


@dataclass(frozen=True, eq=False)
class Dual:
    """What an activation makes of Gaussians of one variance v.

    Attributes:
      covariance, slopes: E f(a) f(b), and E f'(a) f'(b), at each of ``CORRELATIONS``.
      mean: E f(a).
    """

    covariance: Array
    slopes: Array
    mean: float

    def of(self, correlation: Array) -> Array:
        return np.interp(correlation, CORRELATIONS, self.covariance)

    def slope_of(self, correlation: Array) -> Array:
        return np.interp(correlation, CORRELATIONS, self.slopes)


def dual(kind: str, variance: float) -> Dual:
    """The table of one of ``FUNCTIONS``, at the variance to ``DIGITS`` digits and scaled to the exact one."""
    near = float(f"{variance:.{DIGITS - 1}e}")
    if near <= 0:
        return Dual(np.zeros_like(CORRELATIONS), np.zeros_like(CORRELATIONS), 0.0)
    found, factor = _table(kind, near), variance / near
    return Dual(found.covariance * factor, found.slopes, found.mean * math.sqrt(factor))


@lru_cache(maxsize=4096)
def _table(kind: str, variance: float) -> Dual:
    f, std = FUNCTIONS[kind], math.sqrt(variance)
    x, w = np.polynomial.hermite_e.hermegauss(NODES)
    w = w / w.sum()
    if kind == "relu":  # its kink makes the quadrature slow; the closed form is that of Cho and Saul
        c, angle = CORRELATIONS, np.pi - np.arccos(CORRELATIONS)
        covariance = variance * (np.sqrt(1 - c**2) + angle * c) / (2 * np.pi)
        return Dual(covariance, angle / (2 * np.pi), std / math.sqrt(2 * np.pi))
    along = CORRELATIONS[:, None, None] * x[:, None]
    second = std * (along + np.sqrt(1 - CORRELATIONS**2)[:, None, None] * x)  # (correlation, first node, second node)

    def expected(f: Callable[[Array], Array]) -> Array:
        return np.einsum("i,j,i,cij->c", w, w, f(std * x), f(second))

    def slope(z: Array) -> Array:
        step = 1e-4 * (1 + std)
        return (f(z + step) - f(z - step)) / (2 * step)

    return Dual(expected(f), expected(slope), float(w @ f(std * x)))


def size(K: Array) -> float:
    """The mean square of an element."""
    return float(np.mean(np.diagonal(K)))


def correlation(K: Array) -> Array:
    """The cosines between tokens; 0 where a token is 0."""
    lengths = np.sqrt(np.diagonal(K))
    c = K / np.outer(lengths, lengths)
    return np.where(np.isfinite(c), np.clip(c, -1, 1), 0)


def normalised(K: Array, eps: float) -> Array:
    """After a LayerNorm or RMSNorm without gain, of features whose mean is small beside their spread."""
    lengths = np.sqrt(np.diagonal(K) + eps)
    return K / np.outer(lengths, lengths)


def activated(kind: str, K: Array) -> tuple[Array, Array, float]:
    """After an activation: the Gram matrix, that of the derivatives, and the mean of a feature.

    Tokens of different lengths are taken at their mean length and scaled back, which is exact for ReLU.
    """
    v = size(K)
    if not 0 < v < LARGEST:
        nothing = np.full_like(K, 0.0 if v == 0 else np.nan)
        return nothing, nothing, 0.0
    table, c, lengths = dual(kind, v), correlation(K), np.sqrt(np.diagonal(K) / v)
    return table.of(c) * np.outer(lengths, lengths), table.slope_of(c), table.mean


def averaged(K: Array, spread: float = 0.0) -> Array:
    """After causal attention with Gaussian scores of standard deviation ``spread``: token t is a mean of the tokens up to t.

    Scores of two tokens are independent, so that two means have in common what they would with equal scores; of one mean the
    weights are uneven, and count as fewer tokens.
    """
    count = np.arange(1, len(K) + 1)
    even = np.cumsum(np.cumsum(K, axis=0) / count[:, None], axis=1) / count
    own = np.cumsum(np.diagonal(K)) / count
    between = np.where(count > 1, (np.diagonal(even) * count - own) / np.maximum(count - 1, 1), own)
    kept = shares(len(K), spread)
    np.fill_diagonal(even, kept * own + (1 - kept) * between)
    return even


def shares(length: int, spread: float = 0.0) -> Array:
    """The expected sum of squared attention weights over 1 .. length tokens: 1 / n for equal scores."""
    return _shares(length, float(f"{spread:.1e}"))


@lru_cache(maxsize=1024)
def _shares(length: int, spread: float) -> Array:
    if spread == 0:
        return 1 / np.arange(1, length + 1)
    scores = spread * np.random.default_rng(0).normal(size=(DRAWS, length))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.mean(np.cumsum(weights**2, axis=1) / np.cumsum(weights, axis=1) ** 2, axis=0)


def gated(K: Array, gate: Array, slope: Array) -> tuple[Array, Array]:
    """SwiGLU's product of an activated map (Gram matrices ``gate``, of the derivatives ``slope``) and a linear one (Gram K)."""
    return gate * K, slope * K + gate
