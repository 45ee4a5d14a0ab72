"""Which closed forms of the literature hold for a scheme at its start? Each as a curve over the sites, with source and assumption.

All speak of tokens that stay as unlike as they start, so that every branch adds an update of known variance. Where the init is not the
paper's, its branch variances are those of the actual weights (:mod:`resjax.propagation.branches`), and the curve says so.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from resjax.models.lm import KINDS, Shape
from resjax.propagation.branches import NoTheory, branch, known, norm, norm_kind, numbers, weights
from resjax.propagation.meanfield import embedded
from resjax.propagation.moments import Array, size
from resjax.residual import Init, OneStream, Scheme, Site
from resjax.residual.gates import Sphere

REAL = ("layernorm", "rmsnorm", "zero_centred")
XIONG = "Xiong et al. 2020 (2002.04745), lemma 2"


@dataclass(frozen=True, eq=False)
class Curve:
    """One theory curve.

    Attributes:
      quantity: the probe that it is of.
      name: what a legend calls it.
      source: paper.
      holds: the assumption under which it is right.
      departs: where this network departs from that; empty = nowhere.
      values: (depth, sites), NaN where it says nothing.
      drawn: whether the figure draws it: 'line', 'band' (one edge of a pair) or 'none'.
      relative: values are over that after the last site.
    """

    quantity: str
    name: str
    source: str
    holds: str
    departs: str
    values: Array
    drawn: str = "line"
    relative: bool = False


@dataclass(eq=False)
class _Sites:
    """What the additive and the multiplicative law need of every site, (depth, sites) each."""

    added: Array  # variance of the update, for unlike tokens, on a stream of variance 1 (or normalised)
    alike: Array  # the same for tokens that are all one
    ratio: Array  # mean over tokens of the update's length, over its root mean square
    inner: Array  # in_scale squared
    scale: Array  # scale squared
    skip: Array
    norms: list[tuple[str | None, str | None, str | None]] = field(default_factory=list)


def closed_forms(scheme: Scheme, shape: Shape, init: Init, length: int) -> list[Curve]:
    """The curves that apply; none where none does."""
    with np.errstate(all="ignore"):  # where a network overflows, so may its theory
        return _closed_forms(scheme, shape, init, length)


def _closed_forms(scheme: Scheme, shape: Shape, init: Init, length: int) -> list[Curve]:
    curves = trunk_norm(scheme, shape)
    try:
        if type(scheme.carry) is not OneStream or scheme.outer is not None:
            return curves
        v0 = size(embedded(scheme, shape, init, length))
        sites = _sites(scheme, shape, init, length, v0)
    except NoTheory:
        return curves
    if np.all(sites.skip == 1):
        if all(after is None and (out or enter) for enter, out, after in sites.norms):
            curves += additive(sites, v0, scheme, shape, init)
        elif all(found == (None, None, None) for found in sites.norms):
            curves += multiplicative(sites, v0, shape)
    return curves


def trunk_norm(scheme: Scheme, shape: Shape) -> list[Curve]:
    """RMS 1 after every norm that follows the add."""
    count = len(scheme.sites(KINDS))
    values = np.full((shape.depth, count), np.nan)
    if isinstance(scheme.carry, Sphere):
        values[:] = shape.width**-0.5
    elif "norm_after" in scheme.carry.uses and scheme.outer is None:
        for run in scheme.runs(KINDS, shape.depth):
            for pos, resolved in enumerate(run.sites):
                kind = norm_kind(resolved.norm_after, shape)
                if kind in REAL or kind == "unit":
                    values[run.first : run.first + run.length, pos] = 1.0 if kind in REAL else shape.width**-0.5
    if np.isnan(values).all():
        return []
    holds = "by construction, for any weights: the norm follows the add, and its gain starts at 1"
    departs = "where the sum before the norm is not far above model.norm_eps, RMS is below"
    if isinstance(scheme.carry, Sphere):
        return [Curve("stream_rms", "norm on the trunk", "Loshchilov et al. 2024 (2410.01131)", holds, "", values)]
    return [Curve("stream_rms", "norm on the trunk", f"{XIONG} and 3", holds, departs, values)]


def additive(sites: _Sites, v0: float, scheme: Scheme, shape: Shape, init: Init) -> list[Curve]:
    """Every branch reads or gives a normalised stream: variances add."""
    enter = sites.norms[0][0]
    scaled = sites.scale * sites.added
    q = v0 + np.cumsum(scaled).reshape(sites.added.shape)
    before = q - scaled
    ratio = sites.ratio * np.sqrt(scaled / before)
    start = f"v_0 = {v0:.2g}, the first block's branches {_pair(scaled[0])}"
    departs = "tokens grow more alike with depth, and attention then passes more on"
    if all(norms[1] for norms in sites.norms):
        name, source = "sum of normalised branches", "Kim et al. 2025 (2502.02732)"
        holds = "rms^2 = v_0 + the sum of scale^2 over the sites so far, whatever the size of the branch's weights"
        departs = ""
    elif np.ptp(sites.inner) > 0:
        name, source = "harmonic growth", "Sun et al. 2025 (2502.05795)"
        holds = f"rms^2 = v_0 + v_b (1 + 1/2 + ... + 1/l) for branches of which F(c x) = c F(x) ({start})"
        if shape.mlp != "relu":
            departs = f"F(c x) = c F(x) does not hold for the feed-forward's {shape.mlp}; {departs}"
    else:
        name, source = "linear growth", f"{XIONG}; Radford et al. 2019 for out_scale = 1/sqrt(2 L)"
        holds = (
            f"rms^2 = v_0 + the sum of the branches' variances, of tokens that stay as unlike as they start ({start}); "
            "with out_scale = 1/sqrt(2 L) the sum over all blocks is the same at every depth"
        )
    curves = [
        Curve("stream_rms", name, source, holds, departs, np.sqrt(q), "none"),
        Curve(
            "update_ratio",
            f"{name}: sqrt(v_b / (v_0 + l v_b))",
            f"{source}; Kimi team 2026 (2603.15031) on the dilution",
            "the same, branches over the stream before them",
            departs,
            ratio,
            "none",
        ),
    ]
    if all(norms == (enter, None, None) for norms in sites.norms) and np.ptp(sites.inner) == 0 and not scheme.inside:
        curves += bounds(sites, v0, shape, init)
    return curves


def bounds(sites: _Sites, v0: float, shape: Shape, init: Init) -> list[Curve]:
    """Xiong et al.: attention adds between nothing (many unlike tokens) and a whole value (one token, or all alike)."""
    low = sites.scale * np.where([kind == "attention" for kind in KINDS], 0.0, sites.added)
    high = sites.scale * sites.alike
    departs = (
        "the paper has Xavier weights, W_Q = W_K = 0, a d x d ReLU feed-forward and embeddings of variance 1, which gives "
        f"(1 + l/2) d to (1 + 3 l/2) d; here init.kind={init.kind}, {shape.mlp} of {shape.mlp_ratio:g} d, embeddings of "
        f"variance {v0:.2g}, and a block adds {low[0].sum():.2g} to {high[0].sum():.2g}"
    )
    holds = "attention with equal scores on a normalised stream: many unlike tokens below, tokens all alike above"
    return [
        Curve("stream_rms", f"{side} bound", XIONG, holds, departs, np.sqrt(v0 + np.cumsum(x).reshape(x.shape)), "band")
        for side, x in (("lower", low), ("upper", high))
    ]


def multiplicative(sites: _Sites, v0: float, shape: Shape) -> list[Curve]:
    """No norm anywhere: variances multiply."""
    gains = sites.scale * sites.added / v0
    q = v0 * np.cumprod(1 + gains).reshape(gains.shape)
    source = "De and Smith 2020 (2002.10444); Zhang et al. 2019 (1901.09321)"
    still = not gains.any()
    holds = (
        "every branch starts at 0, so that the stream is the embedding at any depth, exactly"
        if still
        else f"rms^2 = v_0 times the product of 1 + scale^2 g, branches of gain g ({_pair(gains[0])}) on unlike tokens"
    )
    odd = "" if shape.mlp == "relu" or still else f"g of the {shape.mlp} is that at the embedding's size; "
    departs = "" if still else f"{odd}tokens grow more alike with depth"
    ratio = sites.ratio * np.sqrt(gains)
    return [
        Curve("stream_rms", "product of gains", source, holds, departs, np.sqrt(q), "none"),
        Curve("update_ratio", "product of gains: sqrt(g)", source, holds, departs, ratio, "none"),
    ]


def _pair(row: Array) -> str:
    return " and ".join(f"{value:.2g}" for value in row)


def _sites(scheme: Scheme, shape: Shape, init: Init, length: int, v0: float) -> _Sites:
    """Branches on unlike and on equal tokens, at every site; rules in vectors over the blocks of a run."""
    count = len(scheme.sites(KINDS))
    arrays = {name: np.zeros((shape.depth, count)) for name in ("added", "alike", "ratio", "inner", "scale", "skip")}
    norms: list[tuple[str | None, str | None, str | None]] = []
    for run in scheme.runs(KINDS, shape.depth):
        here = slice(run.first, run.first + run.length)
        blocks = jnp.arange(run.first, run.first + run.length, dtype=jnp.float32)
        for pos, resolved in enumerate(run.sites):
            known(resolved)
            if resolved.entry != 0.0 or resolved.keep_normed or "+" in scheme.sites(KINDS)[pos]:
                raise NoTheory("the site adds more than one branch to the stream")
            kind = scheme.sites(KINDS)[pos]
            places = Site(kind, pos, count, shape.depth, blocks, jnp.float32(0))
            kinds = [norm_kind(getattr(resolved, f"norm_{name}"), shape) for name in ("in", "out", "after")]
            if any(one not in (None, *REAL) for one in kinds):
                raise NoTheory("a norm is not homogeneous")
            norms.append((kinds[0], kinds[1], kinds[2]))
            inner = numbers(resolved.in_scale, places) ** 2
            by = weights(kind, resolved, shape, init, places)
            arrays["inner"][here, pos] = inner
            arrays["scale"][here, pos] = numbers(resolved.scale, places) ** 2
            arrays["skip"][here, pos] = numbers(resolved.skip, places)
            enter = 1.0 if kinds[0] else v0
            table: dict[tuple[float, ...], tuple[float, float, float]] = {}
            for block in range(run.length):
                first = tuple(float(v[block]) for v in by.values())
                if first not in table:
                    table[first] = _added(kind, resolved, shape, dict(zip(by, first, strict=True)), enter, length)
                unlike, alike, ratio = table[first]
                factor = 1.0 if kinds[1] else inner[block]  # as if homogeneous
                arrays["added"][run.first + block, pos] = unlike * factor
                arrays["alike"][run.first + block, pos] = alike * factor
                arrays["ratio"][run.first + block, pos] = ratio
    return _Sites(**arrays, norms=norms)


def _added(
    kind: str, scheme: Scheme, shape: Shape, by: dict[str, float], enter: float, length: int
) -> tuple[float, float, float]:
    """The variance that a branch adds for unlike tokens and for equal ones, and its mean length over its root mean square."""
    found = []
    for K in (np.eye(length), np.ones((length, length))):
        made, _ = branch(kind, enter * K, scheme, shape, by)
        made, _ = norm(made, norm_kind(scheme.norm_out, shape), shape)
        found.append(np.diagonal(made))
    unlike, alike = (float(one.mean()) for one in found)
    ratio = float(np.mean(np.sqrt(found[0]))) / np.sqrt(unlike) if unlike > 0 else 1.0
    return unlike, alike, ratio
