"""E19: does attention compress, and is it averaging that makes tokens alike? Before training, and the rank also after it.

python -m experiments.run E19
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import nnls

from experiments.experiment import Finding, Measured, Rows
from experiments.judge import Predicate, effect
from experiments.runs import Runs, number
from experiments.shared import starts
from experiments.shared.sizes import SEEDS, sized
from resjax.branches.attention import shown
from resjax.health.geometry import centred, composite_norm, token_cosine
from resjax.health.spectra import ranks_on_host
from resjax.health.studies import Subject
from resjax.propagation.measured import measured
from resjax.residual import CATALOGUE, Connection, Context, Frozen, InitRule
from resjax.sweeps.combine import product

QUESTION = "Does attention compress what it reads, and do tokens become alike because it averages?"
DEPTH, HEADS, SEQUENCES = 12, 4, 2
SIZE = {"model__width": 64, "model__heads": HEADS, "data__length": 64, "model__depth": DEPTH}
LOGITS = (0.1, 1.0, 4.0, 16.0)  # standard deviation of the attention's logits at the start
SIMPLE_TOKENS, SIMPLE_WIDTH, DONG_LAYERS = 32, 256, 4
NETS = {  # networks of one kind of sub-layer, with the source of their theory
    "mean over tokens, skip, no norm": "Noci et al. 2022",
    "mean over tokens, skip, Pre-LN": "Noci et al. 2022, with the norm",
    "ReLU feed-forward, no skip": "Cho and Saul 2009",
}
PREDICATES = {
    "C23": (Predicate("effective rank of what attention gives over that of its values, at the start", "below", 0.8),),
    "C28/averages contract": (
        Predicate(
            "spread of attention's means of values over Dobrushin's bound on it, largest coordinate", "below", 1.001
        ),
    ),
    "C28/stays in the hull of its inputs": (
        Predicate("distance of attention's output from the hull of the inputs, over its length", "below", 0.01),
    ),
    "C28/averaging is the essence": (
        Predicate("token cosine after 12 blocks without skips, with softmax attention", "above", 0.95),
        Predicate("the same with a random rotation over the tokens in its place", "below", 0.5, other=0.9),
    ),
}
CUT = ("of trained networks only the rank is measured, and it is no predicate",)
SETTINGS = {
    "cpu": "12 blocks, width 64, 64 random tokens, gain 1; trained: cpu-S",
    "accelerator": "12 blocks, width 64, 64 random tokens, gain 1; trained: acc-S",
}
VARIANTS = ("accelerator",)


def get_config(variant: str | None = None) -> Any:
    return sized("acc-S" if variant == "accelerator" else "cpu-S", model__depth=DEPTH)


def sweep(variant: str | None = None) -> list[dict[str, Any]]:
    return product({"data.source": ["markov", "stdlib"], "seed": SEEDS})


def keep(variant: str | None = None) -> dict[str, Any]:
    return {"looks": {"steps": ("end",), "look": rank_ratio}}


def rank_ratio(subject: Subject, before: Any) -> dict[str, Any]:
    """The mean over blocks, heads and some held-out sequences of the rank of attention's means over that of its values."""
    streams = next(subject.streams(list(range(subject.depth))))[:, :SEQUENCES]
    seen = [attention(site_of(subject, i), stream) for i, stream in enumerate(streams)]
    return {"rank_ratio": float(np.mean([ratio_of_ranks(one) for one in seen]))}


# ---- what attention does to what it reads


def site_of(subject: Subject, block: int) -> Connection:
    """The attention of one block, with the norm in front of it."""
    return subject.model.stack.block(block).sites[0]


@jax.jit
def attention(site: Connection, stream: jax.Array) -> dict[str, jax.Array]:
    """Input and output (B, T, D) of an attention, its values and their means (B, H, T, C), and the weights of these (B, H, T, T)."""
    seen = {}

    def at(name: str, value: jax.Array) -> jax.Array:
        seen[name] = value
        return value

    at.whole_scores = True  # type: ignore[attr-defined]
    read = site.norm_in(stream)
    given = site.branch(read, at)
    length = stream.shape[1]
    weights = jax.nn.softmax(shown(seen["scores"], 0, length), axis=-1)
    values, means = (seen[name].swapaxes(1, 2) for name in ("v", "heads"))
    return {"read": read, "given": given, "values": values, "means": means, "weights": weights}


def ratio_of_ranks(seen: dict[str, jax.Array]) -> float:
    """Effective rank of the means over that of the values, each about its mean token; mean over sequences and heads."""
    means, values = (ranks_on_host(np.asarray(seen[name]))["effective_rank"] for name in ("means", "values"))
    return float(np.mean(means / values))


def over_dobrushin(seen: dict[str, jax.Array]) -> float:
    """Largest over coordinates of (max - min of the means) over tau (max - min of the values), tau = 1 - least overlap of two rows."""
    weights, means, values = (np.asarray(seen[name], np.float64) for name in ("weights", "means", "values"))
    overlap = np.minimum(weights[..., :, None, :], weights[..., None, :, :]).sum(-1)
    tau = 1 - overlap.min((-2, -1))
    return float(np.max(np.ptp(means, axis=-2) / (tau[..., None] * np.ptp(values, axis=-2))))


def from_hull(point: np.ndarray, corners: np.ndarray) -> float:
    """Distance of a point (D,) from the convex hull of corners (N, D), over the point's length."""
    weight = 1e3 * np.abs(corners).max()  # on the condition that shares sum to 1
    matrix = np.concatenate([corners.T, np.full((1, len(corners)), weight)])
    shares, _ = nnls(matrix, np.append(point, weight))
    return float(np.linalg.norm(corners.T @ shares - point) / np.linalg.norm(point))


def attentions(scale: str) -> Iterator[dict[str, Any]]:
    """Of every seed, at several sizes of the logits: ranks, contraction and hulls, over all blocks of Pre-LN."""
    for logits in LOGITS:
        rules = Frozen({"q": InitRule(logits, "fan_in"), "k": InitRule(1.0, "fan_in")})
        case = starts.case(unit(), starts.seeds(scale), CATALOGUE["pre_ln"].but(init=rules))
        for seed, subject in starts.subjects(case):
            streams = next(subject.streams(list(range(DEPTH))))[:, :SEQUENCES]
            seen = [attention(site_of(subject, i), stream) for i, stream in enumerate(streams)]
            row = {"logits": logits, "seed": seed, "rank_ratio": float(np.mean([ratio_of_ranks(one) for one in seen]))}
            row |= {"over_bound": max(over_dobrushin(one) for one in seen)}
            first = {name: np.asarray(array, np.float64) for name, array in seen[0].items()}
            of_inputs = [from_hull(one[-1], into) for one, into in zip(first["given"], first["read"], strict=True)]
            means, values = (first[name].reshape(-1, *first[name].shape[2:]) for name in ("means", "values"))
            of_values = [from_hull(one[-1], into) for one, into in zip(means, values, strict=True)]
            yield row | {"from_inputs": float(np.mean(of_inputs)), "from_values": float(np.mean(of_values))}


def unit(**fields: Any) -> Any:
    """Weights of gain 1, embeddings of variance 1."""
    return sized("cpu-M", init__gain=1.0, init__out_scale=1.0, init__embed_gain=8.0, **SIZE, **fields)


# ---- what makes tokens alike


def mixers(scale: str) -> Iterator[dict[str, Any]]:
    """Token cosine after 12 blocks without skips, with softmax attention and with a rotation over tokens, with and without
    feed-forwards."""
    case = starts.case(unit(residual__name="plain"), starts.seeds(scale))
    for feed_forward in (True, False):
        run = jax.jit(partial(mixed, feed_forward=feed_forward), static_argnames="rotated")
        for seed, subject in starts.subjects(case):
            for rotated in (False, True):
                cosines = run(subject.model, subject.batches[0, :, :-1], jax.random.key(seed), rotated=rotated)
                row = {"mixer": "rotation" if rotated else "softmax", "feed_forward": feed_forward, "seed": seed}
                yield row | {"cosine": float(cosines[-1]), "cosines": starts.sites(cosines)}


def mixed(model: Any, tokens: jax.Array, key: jax.Array, rotated: bool, feed_forward: bool) -> jax.Array:
    """Token cosine after every block, each the sub-layers one after the other; a rotation has the size of the attention it replaces."""
    h = model.embedded(tokens, Context())
    cosines = []
    for i in range(model.stack.depth):
        attend, feed = model.stack.block(i).sites
        turn = rotation(jax.random.fold_in(key, i), tokens.shape[1])
        h = attend.branch(attend.norm_in(h), turned(turn) if rotated else None)
        h = feed.branch(feed.norm_in(h)) if feed_forward else h
        cosines.append(token_cosine(h))
    return jnp.stack(cosines)


def rotation(key: jax.Array, size: int) -> jax.Array:
    """A rotation of ``size`` dimensions: the exponential of a random skew matrix, which needs no QR."""
    drawn = jax.random.normal(key, (size, size))
    return jax.scipy.linalg.expm(drawn - drawn.T)


def turned(turn: jax.Array) -> Any:
    """What stands at the points of an attention so that it gives its values, rotated over the tokens, at its own size."""
    seen = {}

    def at(name: str, value: jax.Array) -> jax.Array:
        seen[name] = value
        if name != "heads":
            return value
        instead = jnp.einsum("tu,buhc->bthc", turn, seen["v"])
        return instead * jnp.linalg.norm(value) / jnp.linalg.norm(instead)

    return at


def profiles(scale: str) -> Iterator[dict[str, Any]]:
    """Token cosine by site of the whole network with and without skips, and what mean-field theory expects."""
    for name in ("pre_ln", "plain"):
        case = starts.case(unit(residual__name=name), starts.seeds(scale))
        for seed, cosine in zip(case.seeds, measured(case).sites["token_cosine"], strict=True):
            yield {"scheme": name, "curve": "measured", "seed": seed, "cosines": starts.sites(cosine)}
        for curve in starts.theory(case, "token_cosine"):
            yield {"scheme": name, "curve": curve.name, "cosines": starts.sites(curve.values)}


def simple(scale: str) -> Iterator[dict[str, Any]]:
    """Token cosine by layer of networks of one kind of sub-layer, in float64, and the closed form of each."""
    n, d = SIMPLE_TOKENS, SIMPLE_WIDTH
    for name in NETS:
        for seed in starts.seeds(scale):
            rng = np.random.default_rng(seed)
            h, found = rng.normal(size=(n, d)), []
            for _ in range(DEPTH):
                matrix = rng.normal(size=(d, d)) / np.sqrt(d)
                if "mean" in name:
                    read = h if "no norm" in name else h / np.sqrt(np.mean(h**2, axis=1, keepdims=True))
                    h = h + np.mean(read, axis=0) @ matrix
                else:
                    h = np.maximum(h @ matrix * np.sqrt(2), 0)
                unit = h / np.linalg.norm(h, axis=1, keepdims=True)
                found.append((np.sum(np.sum(unit, axis=0) ** 2) - n) / (n * (n - 1)))
            yield {"net": name, "curve": "measured", "seed": seed, "cosines": starts.sites(found)}
        yield {"net": name, "curve": "theory", "cosines": starts.sites(closed(name))}


def closed(name: str) -> list[float]:
    """The closed forms: p and q are the mean of the tokens' Gram matrix over all pairs, and its diagonal."""
    n, found = SIMPLE_TOKENS, []
    p, q, c = 1 / n, 1.0, 0.0
    for _ in range(DEPTH):
        added = p if "no norm" in name else p / q
        p, q = p + added, q + added
        c = (np.sqrt(1 - c * c) + (np.pi - np.arccos(c)) * c) / np.pi
        found.append((n * p - q) / ((n - 1) * q) if "mean" in name else c)
    return found


def cubes(scale: str) -> Iterator[dict[str, Any]]:
    """How far tokens are from being one, layer after layer of attention alone with small weights, in float64 (Dong et al. 2021)."""
    tokens, width = 8, 16
    with jax.enable_x64(True):
        for seed in starts.seeds(scale):
            rng = np.random.default_rng(seed)
            x, found = rng.normal(size=(tokens, width)), []
            for _ in range(DONG_LAYERS):
                logits = x @ (rng.normal(size=(width, width)) * 0.02) @ x.T
                weights = np.exp(logits - logits.max(1, keepdims=True))
                x = weights / weights.sum(1, keepdims=True) @ x @ rng.normal(size=(width, width)) / np.sqrt(width)
                found.append(float(composite_norm(centred(jnp.asarray(x))) / composite_norm(jnp.asarray(x))))
            yield {"seed": seed, "left": found}


MEASURES = {"attentions": attentions, "mixers": mixers, "profiles": profiles, "simple": simple, "cubes": cubes}


# ---- verdicts


def judge(runs: Runs, measured: Measured) -> Iterator[Finding]:
    rows, trained = measured["attentions"], notes_of_trained(runs)
    for logits in LOGITS:
        found = {name: starts.values(rows, name, logits=logits) for name in ("rank_ratio", "over_bound", "from_inputs")}
        where, near = f"logits of SD {logits:g}", max(starts.values(rows, "from_values", logits=logits), default=np.nan)
        yield Finding("C23", (effect(found["rank_ratio"]),), where, notes=trained if logits == 1.0 else ())
        yield Finding("C28/averages contract", (effect(found["over_bound"]),), where, construction=True)
        notes = (f"the means of values, before the output matrix, are {near:.1g} from the hull of the values at most",)
        yield Finding("C28/stays in the hull of its inputs", (effect(found["from_inputs"]),), where, notes=notes)
    for feed_forward in (True, False):
        effects = tuple(
            effect(starts.values(measured["mixers"], "cosine", mixer=mixer, feed_forward=feed_forward))
            for mixer in ("softmax", "rotation")
        )
        where = f"gain 1, {'with' if feed_forward else 'without'} feed-forwards"
        yield Finding("C28/averaging is the essence", effects, where)


def notes_of_trained(runs: Runs) -> tuple[str, ...]:
    """The rank after training, by source, with the runs that have none."""
    said = []
    for source, part in runs.split("data.source").items() if len(runs) else ():
        found = [number(last_look(row), "rank_ratio") for row in part]
        known = [value for value in found if np.isfinite(value)]
        lost = f", {len(found) - len(known)} of {len(found)} runs without it" if len(known) < len(found) else ""
        value = f"{np.mean(known):.3g} (from {min(known):.3g} to {max(known):.3g})" if known else "not known"
        ends = ", ".join(f"{count} {name}" for name, count in sorted(part.outcomes().items()))
        said.append(f"after training on {source} it is {value}{lost}; runs: {ends}")
    return tuple(said)


def last_look(row: Any) -> dict[str, Any]:
    looks = row.get("looks") or {}
    return looks.get(max(looks, key=int), {}) if looks else {}


# ---- panel 2


def figure(runs: Runs, measured: Measured) -> Figure:
    """The map of collapse: token cosine by layer before training, with theory over it."""
    drawn = Figure(figsize=(12.0, 3.8), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    for name, colour, label in (("pre_ln", "C0", "with skips"), ("plain", "C3", "without skips")):
        found = starts.profiles(measured["profiles"], "cosines", scheme=name, curve="measured")
        depth = np.arange(1, found.shape[1] + 1) / 2
        left.plot(depth, found.T, ".", color=colour, alpha=0.4, markersize=3)
        for curve in starts.profiles(measured["profiles"], "cosines", scheme=name, curve="mean field"):
            left.plot(depth, curve, color=colour, label=f"{label}, mean-field theory")
    for i, (name, source) in enumerate(NETS.items()):
        found = starts.profiles(measured["simple"], "cosines", net=name, curve="measured")
        (theory,) = starts.profiles(measured["simple"], "cosines", net=name, curve="theory")
        layers = np.arange(1, len(theory) + 1)
        middle.plot(layers, found.T, ".", color=f"C{i}", alpha=0.4, markersize=3)
        middle.plot(layers, theory, color=f"C{i}", label=f"{name} ({source})")
    draw_mixers(right, measured["mixers"])
    inset = right.inset_axes((0.42, 0.56, 0.5, 0.28))
    lefts = starts.profiles(measured["cubes"], "left")
    inset.semilogy(
        np.arange(1, lefts.shape[1] + 1), lefts.T, ".-", color="black", alpha=0.4, linewidth=0.6, markersize=3
    )
    inset.set_title("attention alone: |res| / |X|", fontsize=7)
    inset.tick_params(labelsize=6)
    left.set(xlabel="blocks", title="Whole network")
    middle.set(xlabel="layers", title="Layers of one kind")
    right.set(xlabel="blocks", title="Without skips, another mixer")
    for axis in (left, middle, right):
        axis.set(ylabel="token cosine", ylim=(-0.1, 1.05))
        axis.title.set_size(10)
    left.legend(frameon=False, fontsize=6, loc="center right", bbox_to_anchor=(1.0, 0.75))
    middle.legend(frameon=False, fontsize=6, loc="lower right")
    right.legend(frameon=False, fontsize=6, loc="center right", bbox_to_anchor=(1.0, 0.41))
    trained = [number(last_look(row), "rank_ratio") for row in runs]
    if trained:
        drawn.supxlabel(
            f"rank of attention's means over its values after training, by seed: {say(trained)}", fontsize=7
        )
    return drawn


def say(found: list[float]) -> str:
    return ", ".join(f"{value:.2f}" if np.isfinite(value) else "none" for value in found)


def draw_mixers(axis: Any, rows: Rows) -> None:
    for mixer, colour in (("softmax", "C3"), ("rotation", "C2")):
        for feed_forward, style in ((True, "-"), (False, "--")):
            found = starts.profiles(rows, "cosines", mixer=mixer, feed_forward=feed_forward)
            blocks = np.arange(1, found.shape[1] + 1)
            axis.plot(blocks, found.T, style, color=colour, alpha=0.4, linewidth=0.7)
            label = f"{mixer}, {'with' if feed_forward else 'without'} feed-forwards"
            axis.plot([], [], style, color=colour, label=label)
