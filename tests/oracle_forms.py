"""What is the equation of every residual scheme? Each is written out here from the papers, on NumPy arrays.

A form sees one site as a :class:`oracle.Place` ``s``: the branch ``s.F``, its norms, gains and parameters. ``FORMS`` holds one for
each entry of the catalogue, and one for each further form of an entry as ``name:form``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import ceil, factorial, floor, log, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

# site, what is carried, the same at the block's start -> what is carried then
Step = Callable[[Any, Any, Any], Any]
Array = np.ndarray


class Size(NamedTuple):
    """A model with LayerNorms without bias and a feed-forward that is not gated: width, blocks, hidden size, heads, vocabulary."""

    d: int
    L: int
    h: int
    H: int
    V: int


@dataclass(frozen=True)
class Form:
    """A scheme's equation, written out.

    Attributes:
      step: one site.
      final: the norm between the last block and the head; 'norm' is the model's own kind, None is none.
      norms: norms at each site, where that is one number.
      gains: learned numbers at each site, from the width.
      identity: a stack that has just been made returns its input.
      open: what is carried before the first site, from the embedding and the parameters of the ends.
      close: one array from what is carried out of the last.
      enter, leave: of a scheme that acts on blocks: what a block reads (an array, or 'r', 'q', 'k', 'v' by name) and what
        ``leave`` wants to know of that; what is carried after a block. In between, ``step`` acts on the block's own stream.
      view: the one array that stands for what is carried.
      logits: what is done to the logits, with a gain and the width.
      extra: how many parameters there are beside the matrices of branches, embeddings, positions and head.
    """

    step: Step
    final: str | None
    norms: int | None = None
    gains: Callable[[int], float] = lambda width: 0
    identity: bool = False
    open: Callable[[Array, Any], Any] = lambda e, ends: e
    close: Callable[[Any, Any], Array] = lambda S, ends: S
    enter: Callable[[Any, Any], tuple[Any, Any]] = lambda s, S: (S, None)
    leave: Callable[[Any, Any, Any, Array], Any] = lambda s, S, memo, H: H
    view: Callable[[Any], Array] = lambda S: S
    logits: Callable[[Array, Array, int], Array] | None = None
    extra: Callable[[Size], int] | None = None


# ---- functions


def normalised(x: Array, kind: str, eps: float) -> Array:
    if kind == "layernorm":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    if kind == "rmsnorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    if kind == "unit":
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + eps**2)
    assert kind == "none", kind
    return x


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rms(x: Array) -> Array:
    return np.sqrt((x**2).mean(-1, keepdims=True))


def summed(weights: Any, arrays: Any) -> Array:
    """sum_j w_j v_j; a weight is one number, or one a token."""
    return sum(np.asarray(w)[..., None] * v for w, v in zip(weights, arrays, strict=True))


# ---- where the norms stand


def pre_ln(s: Any, H: Array, H0: Array) -> Array:
    return H + s.F(s.norm("in", H))


def post_ln(s: Any, H: Array, H0: Array) -> Array:
    return s.norm("after", H + s.F(H))


def gemma(s: Any, H: Array, H0: Array) -> Array:
    return H + s.norm("out", s.F(s.norm("in", H, "zero_centred")), "zero_centred")


def olmo2(s: Any, H: Array, H0: Array) -> Array:
    def whole(name: str) -> Callable[[Array], Array]:
        """Over the features of all heads at once."""
        return lambda x: s.point_norm(name, x.reshape(*x.shape[:2], -1), "rmsnorm").reshape(x.shape)

    return H + s.norm("out", s.F(H, q=whole("q"), k=whole("k")))


def normformer(s: Any, H: Array, H0: Array) -> Array:
    n = s.norm("in", H)
    if s.kind == "attention":
        return H + s.norm("out", s.F(n, heads=lambda x: s.point("heads.gain.gain").reshape(-1, 1) * x))
    return H + s.F(n, hidden=lambda x: s.point_norm("hidden", x))


def subln(s: Any, H: Array, H0: Array) -> Array:
    points = {name: lambda x, name=name: s.point_norm(name, x) for name in ("pre_o", "hidden")}
    return H + s.F(s.norm("in", H), **points)


def mix_ln(s: Any, H: Array, H0: Array) -> Array:
    return (post_ln if s.l <= floor(0.25 * s.L) else pre_ln)(s, H, H0)


def hybrid(star: bool) -> Step:
    def step(s: Any, H: Array, H0: Array) -> Array:
        special = star and s.l == 1
        if s.kind == "attention":
            points = {name: lambda x, name=name: s.point_norm(name, x, "rmsnorm") for name in "qkv"}
            return H + s.F(s.norm("in", H) if special else H, **points)
        n = s.norm("in", H)
        return (H if special else n) + s.F(n)

    return step


def b2t(s: Any, H: Array, H0: Array) -> Array:
    return s.norm("after", H + s.F(H) + (H0 if s.last else 0))


def resi_dual(s: Any, S: tuple[Array, Array], S0: Any) -> tuple[Array, Array]:
    x, d = S
    y = s.F(x)
    return s.norm("after", x + y), d + y


def siamese(s: Any, S: tuple[Array, Array], S0: Any) -> tuple[Array, Array]:
    """Our choice of the index: l counts blocks from 1."""
    X, Y = S
    y = s.F(s.norm("in", X + s.normed(Y, "carry.norm_pre")))
    return s.norm("after", X + y / sqrt(s.l + 1)), Y + y


def keel(s: Any, H: Array, H0: Array) -> Array:
    y = s.F(s.norm("in", H))
    if s.s == 0:
        return H + y
    return s.norm("after", (1 if s.s == 1 else s.M) * H + y)


def span_norm(s: Any, H: Array, H0: Array) -> Array:
    if s.kind == "attention":
        return s.norm("after", H + s.F(s.norm("in", H) if s.l == 1 else H))
    return s.norm("after", H0 + s.F(H))


def ngpt(s: Any, H: Array, H0: Array) -> Array:
    """Numbers that are stored at 1 / sqrt(d) act as 1 there: a times 0.05, s_qk. Of a feed-forward without a gate, u is its one half."""
    d = H.shape[-1]

    def turned(x: Array) -> Array:
        return s.point("q_turned.gain.gain") * sqrt(d) * normalised(x, "unit", s.options.eps)

    points = {
        "q_turned": turned,
        "k_turned": turned,
        "scores": lambda x: (
            x * d / s.options.heads
        ),  # divided by the root of the head size so far: nGPT multiplies by it
        "fc_in": lambda x: s.point("fc_in.gain.gain") * sqrt(d) * x,
    }
    a = np.abs(s.value("carry.rate")) * 0.05 * sqrt(d)
    return unit(H + a * (s.norm("out", s.F(H, **points), "unit") - H))


def pointwise(kind: str) -> Step:
    return lambda s, H, H0: H + s.F(s.norm("in", H, kind))


# ---- scaling; L_0, the base depth of depth-muP and CompleteP, is 4


def admin(s: Any, H: Array, H0: Array) -> Array:
    return s.norm("after", sqrt((s.M + 1) / log(s.M + 1) - 1) * H + s.F(H))


def fixup(s: Any, H: Array, H0: Array) -> Array:
    """A number is added before each matrix and before the activation, and after the branch, which one more number scales."""
    shifts = {name: lambda x, name=name: x + s.point(f"{name}.gain.offset") for name in ("pre_o", "fc_in", "hidden")}
    return H + s.gain("scale") * s.F(H + s.offset("in_scale"), **shifts) + s.offset("scale")


def rezero(s: Any, H: Array, H0: Array) -> Array:
    return H + s.gain("scale") * s.F(H)


def gpas(s: Any, H: Array, H0: Array) -> Array:
    h, g = H + s.F(s.norm("in", H)), s.value("carry.gate")
    return h * (1 - g * sigmoid(g))


def times(factor: Callable[[Any], float]) -> Step:
    """Pre-LN with a constant on the branch."""
    return lambda s, H, H0: H + factor(s) * s.F(s.norm("in", H))


# ---- gates, parallel and reversible blocks; chance, in evaluation


def highway(s: Any, H: Array, H0: Array) -> Array:
    T = sigmoid(H @ s.value("carry.by") + s.value("carry.bias"))
    return T * s.F(H) + (1 - T) * H


def gtrxl(s: Any, x: Array, H0: Array) -> Array:
    y = np.maximum(s.F(s.norm("in", x)), 0)
    W, U = (np.moveaxis(s.value(f"carry.{name}"), 1, 0) for name in ("of_update", "of_stream"))
    r = sigmoid(y @ W[0] + x @ U[0])
    z = sigmoid(y @ W[1] + x @ U[1] - s.value("carry.bias"))
    h = np.tanh(y @ W[2] + (r * x) @ U[2])
    return (1 - z) * x + z * h


def reversible(s: Any, S: tuple[Array, Array], S0: Any) -> tuple[Array, Array]:
    x1, x2 = S
    if s.kind == "attention":
        return x1 + s.F(s.norm("in", x2)), x2
    return x1, x2 + s.F(s.norm("in", x1))


def orthogonal(s: Any, H: Array, H0: Array) -> Array:
    y = s.F(s.norm("in", H))
    return H + y - (y * H).sum(-1, keepdims=True) / ((H * H).sum(-1, keepdims=True) + 1e-6) * H


# ---- several streams: S is (n, B, T, d)


def copies(e: Array, ends: Any) -> Array:
    return np.stack([e] * 4)


def joined(s: Any, S: Array, read: Any, mix: Any, spread: Any) -> Array:
    """``u = sum_i r_i S_i``, ``S'_i = sum_j A_ij S_j + b_i y``."""
    y = s.F(s.norm("in", summed(read, S)))
    return np.stack([summed(row, S) + np.asarray(b)[..., None] * y for row, b in zip(mix, spread, strict=True)])


def hyper(dynamic: bool) -> Step:
    def step(s: Any, S: Array, S0: Any) -> Array:
        Am, Ar, B = (s.value(f"carry.{name}") for name in ("pick", "mix", "spread"))
        n = len(S)
        if not dynamic:
            return joined(s, S, Am, [[Ar[j, i] for j in range(n)] for i in range(n)], B)
        Sn = s.normed(S, "carry.norm", "layernorm")
        s_a, s_b = s.value("carry.pick_scale"), s.value("carry.spread_scale")
        W_m, W_r, W_b = (s.value(f"carry.{name}_by") for name in ("pick", "mix", "spread"))
        read = [s_a * np.tanh(Sn[i] @ W_m) + Am[i] for i in range(n)]
        spread = [s_b * np.tanh(Sn[i] @ W_b) + B[i] for i in range(n)]
        from_each = [s_a * np.tanh(Sn[j] @ W_r) + Ar[j] for j in range(n)]  # (B, T, n), to each stream
        return joined(s, S, read, [[from_each[j][..., i] for j in range(n)] for i in range(n)], spread)

    return step


def manifold(lite: bool) -> Step:
    def step(s: Any, S: Array, S0: Any) -> Array:
        n = len(S)
        x = normalised(np.concatenate(list(S), -1), "rmsnorm", s.options.eps)
        phi, b, alpha = (s.value(f"carry.{name}") for name in ("by", "bias", "scales"))
        pre, post, res = (
            alpha[k] * (x @ phi[:, part]) + b[part]
            for k, part in enumerate((slice(0, n), slice(n, 2 * n), slice(2 * n, None)))
        )
        A = np.zeros((*x.shape[:-1], n, n))
        if lite:
            weights = softmax(res, -1)
            for k, order in enumerate(permutations(range(n))):
                for i, j in enumerate(order):
                    A[..., i, j] += weights[..., k]
        else:
            A[:] = np.exp(res).reshape(A.shape)
            for _ in range(20):
                A /= A.sum(-2, keepdims=True)  # columns
                A /= A.sum(-1, keepdims=True)  # rows, last: what comes into a stream sums to 1
        pre, post = np.moveaxis(sigmoid(pre), -1, 0), np.moveaxis(2 * sigmoid(post), -1, 0)
        return joined(s, S, pre, np.moveaxis(A, (-2, -1), (0, 1)), post)

    return step


def frac(s: Any, H: Array, H0: Array) -> Array:
    Y, A, B = (s.value(f"carry.{name}") for name in ("pick", "mix", "spread"))
    m = len(B)
    S = np.split(H, m, -1)
    u = np.concatenate([summed(Y[:, i], S) for i in range(m)], -1)
    y = np.split(s.F(s.norm("in", u)), m, -1)
    return np.concatenate([summed(A[:, i], S) + B[i] * y[i] for i in range(m)], -1)


def laurel_lr(s: Any, H: Array, H0: Array) -> Array:
    return s.F(s.norm("in", H)) + H + H @ s.value("carry.down") @ s.value("carry.up")


def laurel_rw(s: Any, H: Array, H0: Array) -> Array:
    """The two weights are bounded by a softmax, times 2."""
    a, b = 2 * softmax(s.value("carry.logits"), 0)
    return a * s.F(s.norm("in", H)) + b * H


def altup_open(e: Array, ends: Any) -> list[Array]:
    kernels = np.moveaxis(ends.value("into"), 1, 0)
    return [e, *(rms(e) / rms(e @ W) * (e @ W) for W in kernels)]


def altup_close(S: list[Array], ends: Any) -> Array:
    kernels = np.moveaxis(ends.value("out_of"), 1, 0)
    back = [x @ W for x, W in zip(S[1:], kernels, strict=True)]
    return sum([S[0], *(rms(S[0]) / rms(x) * x for x in back)]) / len(S)


def altup_coefficients(s: Any, x: Array, name: str) -> Array:
    router = s.outer.value("router")
    of = np.tanh(s.outer.normed(x, "norm", "rmsnorm") @ router / x.shape[-1])
    return of @ np.clip(s.outer.value(name), -120, 120)


def altup_enter(s: Any, S: list[Array]) -> tuple[Array, list[Array]]:
    n = len(S)
    p = altup_coefficients(s, S[0], "predict")
    guess = [S[i] + summed([p[..., n * i + j] for j in range(n)], S) for i in range(n)]
    return guess[0], guess


def altup_leave(s: Any, S: list[Array], guess: list[Array], z: Array) -> list[Array]:
    c = altup_coefficients(s, z, "correct")
    return [x + (1 + c[..., i, None]) * (z - guess[0]) for i, x in enumerate(guess)]


# ---- history: S is the list of what was written so far


def started(e: Array, ends: Any) -> list[Array]:
    return [e]


def depth_softmax(part: Any, path: str, sources: list[Array]) -> Array:
    w, gain = part.value(f"{path}query"), part.value(f"{path}gain")
    scores = [gain * normalised(v, "rmsnorm", part.options.eps) @ w for v in sources]
    return summed(softmax(np.stack(scores), 0), sources)


def attnres(s: Any, S: list[Array], S0: Any) -> list[Array]:
    return [*S, s.F(s.norm("in", depth_softmax(s, "carry.pick.", S)))]


def attnres_block(s: Any, S: list[Array], S0: Any) -> list[Array]:
    """8 groups of sites, or as many as ceil(M / 8) sites each make: S is the embedding and the sum of each group so far."""
    v = s.F(s.norm("in", depth_softmax(s, "carry.pick.", S)))
    return [*S, v] if s.s % ceil(s.M / 8) == 0 else [*S[:-1], S[-1] + v]


def appended(s: Any, S: list[Array], memo: Any, H: Array) -> list[Array]:
    return [*S, H]


def dense_enter(s: Any, S: list[Array]) -> tuple[Array, None]:
    """Rows are stored in the length of the last one; the first block, whose row is stored too, reads the embedding as it is."""
    row = s.outer.value("row.weights")
    return (S[0] if s.l == 1 else summed(row[: len(S)], S)), None


def mudd_views(part: Any, path: str, S: list[Array], names: str, ppn: bool) -> dict[str, Array]:
    """After the newest output X: the sums for each name. Weights are stored for the rows of all blocks; later ones do nothing."""
    eps = part.options.eps
    W1, W2, a = (part.value(f"{path}{name}") for name in ("inner", "outer", "static"))
    w = gelu(normalised(S[-1], "rmsnorm", eps) @ W1) @ W2
    w = w.reshape(*w.shape[:-1], *a.shape) + a
    sources = [normalised(x, "rmsnorm", eps) for x in S] if ppn else S
    Z = {c: summed([w[..., i, j] for j in range(len(S))], sources) for i, c in enumerate(names)}
    if ppn:
        Z["r"] = S[-1] + part.value(f"{path}small") * normalised(Z["r"], "rmsnorm", eps)
    return Z


def cross_views(part: Any, path: str, S: list[Array], names: str) -> dict[str, Array]:
    b, w = part.value(f"{path}static"), part.value(f"{path}query")
    return {c: summed([b[i, j] + np.maximum(v @ w[i], 0) for j, v in enumerate(S)], S) for i, c in enumerate(names)}


def cross_enter(s: Any, S: list[Array]) -> tuple[dict[str, Array], Array]:
    views = cross_views(s.outer, "", S, "rqkv")
    return views, views["r"]


def viewed_pre_ln(s: Any, H: Array, H0: Array) -> Array:
    if s.views is None:
        return pre_ln(s, H, H0)
    return H + s.F({name: s.norm("in", x, view=name) for name, x in s.views.items()})


def anchored_open(e: Array, ends: Any) -> tuple[Array, Array]:
    x0 = e / np.sqrt((e**2).mean(-1, keepdims=True) + 1e-6)
    return x0, x0


def anchored_enter(s: Any, S: tuple[Array, Array]) -> tuple[Array, None]:
    return s.outer.value("keep") * S[0] + s.outer.value("anchor") * S[1], None


def ladder_enter(s: Any, S: list[Array]) -> tuple[Array, None]:
    """The first floor(L / 2) blocks push what they give, the last as many pop; a weight is stored for every block."""
    w, half = s.outer.value("weight"), s.L // 2
    return (S[-1] + w * S[s.L - s.l + 1] if s.l > s.L - half else S[-1]), None


# ---- inside attention


def value_residual(mix: Callable[[Any, Array, Array], Array]) -> Step:
    def step(s: Any, H: Array, H0: Array) -> Array:
        def values(V: Array) -> Array:
            return s.side.setdefault("v", V) if s.l == 1 else mix(s, s.side["v"], V)

        return H + s.F(s.norm("in", H), v=values)

    return step


def realformer(s: Any, H: Array, H0: Array) -> Array:
    def scores(own: Array) -> Array:
        s.side["scores"] = own + s.side.get("scores", 0)
        return s.side["scores"]

    return s.norm("after", H + s.F(H, scores=scores))


def shaped(s: Any, H: Array, H0: Array) -> Array:
    n = s.norm("in", H)
    if s.kind == "mlp":
        return s.gain("skip") * H + s.gain("scale") * s.F(n)
    seen = {}

    def heads(x: Array) -> Array:
        alpha, beta, gamma = (s.point(f"heads.{name}").reshape(-1, 1) for name in ("alpha", "beta", "gamma"))
        V, length = seen["v"], x.shape[1]
        C = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
        return alpha * V + beta * x - gamma * np.einsum("ts,bshc->bthc", C, V)

    return s.F(n, v=lambda V: seen.setdefault("v", V), heads=heads)


# ---- how many parameters; of DenseFormer, MUDD and DeepCrossAttention those that are stored: rows are padded to the longest


def pre(z: Size) -> int:
    """A norm at each site and at the end."""
    return (2 * z.L + 1) * z.d


def post(z: Size) -> int:
    return 2 * z.L * z.d


def more(base: Callable[[Size], int], each: Callable[[Size], int]) -> Callable[[Size], int]:
    """Over a base, so many at each of the 2 L sites."""
    return lambda z: base(z) + 2 * z.L * each(z)


def mudd_extra(ppn: bool) -> Callable[[Size], int]:
    """Each block has three norms before attention in place of one."""

    def count(z: Size) -> int:
        K = 64 * ceil(4 * (z.L + 2) / 64)
        each = [z.d * K + C * (K + 1) * (z.L + 1) + (z.d if ppn else 0) for C in (4, 1)]
        return pre(z) + z.L * (2 * z.d + each[0]) + each[1]

    return count


# ---- the table


def two(e: Array, ends: Any) -> tuple[Array, Array]:
    return e, e


def first(S: Any) -> Array:
    return S[0]


def newest(S: Any) -> Array:
    return S[-1]


def dual_close(S: Any, ends: Any) -> Array:
    return S[0] + ends.normed(S[1], "")


STREAMS: dict[str, Any] = dict(open=copies, close=lambda S, ends: S.sum(0), view=lambda S: S.sum(0), final="norm")
OUTPUTS: dict[str, Any] = dict(open=started, leave=appended, final="norm")
DEPTH: dict[str, Any] = dict(open=started, close=lambda S, ends: depth_softmax(ends, "", S), view=newest, final="norm")


def mudd(ppn: bool) -> Form:
    return Form(
        viewed_pre_ln,
        enter=lambda s, S: (mudd_views(s.outer, "", S, "rqkv", ppn), None),
        close=lambda S, ends: mudd_views(ends, "", S, "r", ppn)["r"],
        extra=mudd_extra(ppn),
        **OUTPUTS,
    )


def hyper_static(z: Size) -> int:
    return 4 * (4 + 2)


FORMS: dict[str, Form] = {
    "plain": Form(lambda s, H, H0: s.F(s.norm("in", H)), "norm", norms=1, extra=pre),
    "pre_ln": Form(pre_ln, "norm", norms=1, extra=pre),
    "post_ln": Form(post_ln, None, norms=1, extra=post),
    "sandwich_branch": Form(
        lambda s, H, H0: H + s.norm("out", s.F(s.norm("in", H))), "norm", norms=2, extra=more(pre, lambda z: z.d)
    ),
    "sandwich_trunk": Form(
        lambda s, H, H0: s.norm("after", H + s.F(s.norm("in", H))), None, norms=2, extra=more(post, lambda z: z.d)
    ),
    "gemma": Form(gemma, "zero_centred", norms=2, extra=more(pre, lambda z: z.d)),
    "olmo2": Form(olmo2, "norm", extra=lambda z: pre(z) + z.L * 2 * z.d),
    "normformer": Form(normformer, "norm", extra=lambda z: pre(z) + z.L * (z.d + z.H + z.h)),
    "subln": Form(subln, "norm", extra=lambda z: pre(z) + z.L * (z.d + z.h)),
    "mix_ln": Form(mix_ln, "norm", extra=pre),
    "hybrid_norm": Form(hybrid(False), "norm", extra=lambda z: z.L * (3 * z.d // z.H + z.d) + z.d),
    "hybrid_norm_star": Form(hybrid(True), "norm", extra=lambda z: z.L * (3 * z.d // z.H + z.d) + 2 * z.d),
    "b2t": Form(b2t, None, extra=post),
    "resi_dual": Form(resi_dual, None, open=two, close=dual_close, view=first, extra=pre),
    "siamese_norm": Form(siamese, None, open=two, close=dual_close, view=first, extra=more(pre, lambda z: 2 * z.d)),
    "keel": Form(keel, None, extra=lambda z: (4 * z.L - 1) * z.d),
    "span_norm": Form(span_norm, None, extra=lambda z: post(z) + z.d),
    "ngpt": Form(
        ngpt,
        None,
        open=lambda e, ends: unit(e),
        logits=lambda logits, s_z, d: s_z * sqrt(d) * logits,
        extra=lambda z: 3 * z.L * z.d + z.L * z.h + z.V,
    ),
    "dyt": Form(pointwise("dyt"), "dyt", extra=lambda z: (2 * z.L + 1) * (2 * z.d + 1)),
    "derf": Form(pointwise("derf"), "derf", extra=lambda z: (2 * z.L + 1) * (2 * z.d + 2)),
    "scaled": Form(times(lambda s: 1 / sqrt(2 * s.L)), "norm", norms=1, extra=pre),
    "deepnorm": Form(lambda s, H, H0: s.norm("after", (2 * s.L) ** 0.25 * H + s.F(H)), None, norms=1, extra=post),
    "admin": Form(admin, None, extra=post),
    "admin:profiled": Form(
        lambda s, H, H0: s.norm("after", H * s.gain("skip") + s.F(H)), None, extra=more(post, lambda z: z.d)
    ),
    "fixup": Form(fixup, None, identity=True, extra=lambda z: z.L * (4 + 5)),
    "tfixup": Form(lambda s, H, H0: H + s.F(H), None, extra=lambda z: 0),
    "skipinit": Form(rezero, None, identity=True, extra=lambda z: 2 * z.L),
    "rezero": Form(rezero, None, norms=0, gains=lambda d: 1, identity=True, extra=lambda z: 2 * z.L),
    "layerscale": Form(
        lambda s, H, H0: H + s.gain("scale") * s.F(s.norm("in", H)),
        "norm",
        norms=1,
        gains=lambda d: d,
        extra=more(pre, lambda z: z.d),
    ),
    "lns": Form(lambda s, H, H0: H + s.F(s.norm("in", H) / sqrt(s.l)), "norm", extra=pre),
    "gpas": Form(gpas, "norm", extra=more(pre, lambda z: 1)),
    "depth_mup": Form(times(lambda s: sqrt(4 / s.L)), "norm", extra=pre),
    "completep": Form(times(lambda s: 4 / s.L), "norm", extra=pre),
    "ds_init": Form(post_ln, None, extra=post),
    "branchnorm": Form(
        lambda s, H, H0: s.norm("after", H + min(1, (s.options.step + 1) / 4000) * s.F(H)), None, extra=post
    ),
    "prores": Form(times(lambda s: min(s.options.step / (1000 * s.l), 1)), "norm", extra=pre),
    "zero_init": Form(pre_ln, "norm", identity=True, extra=pre),
    "gpt2_init": Form(pre_ln, "norm", extra=pre),
    "highway": Form(highway, None, extra=lambda z: 2 * z.L * (z.d**2 + z.d)),
    "gtrxl": Form(gtrxl, "norm", extra=more(pre, lambda z: 6 * z.d**2 + z.d)),
    "stochastic_depth": Form(pre_ln, "norm", extra=pre),
    "layer_drop": Form(pre_ln, "norm", extra=pre),
    "parallel": Form(pre_ln, "norm", extra=lambda z: z.L * z.d + z.d),
    "reversible": Form(reversible, "norm", open=two, close=lambda S, ends: (S[0] + S[1]) / 2, view=first, extra=pre),
    "orthogonal_update": Form(orthogonal, "norm", extra=pre),
    "hyper_connections": Form(hyper(False), extra=more(pre, hyper_static), **STREAMS),
    "hyper_connections:dynamic": Form(
        hyper(True), extra=more(pre, lambda z: hyper_static(z) + z.d * (4 + 2) + z.d + 2), **STREAMS
    ),
    "mhc": Form(manifold(False), extra=more(pre, lambda z: (4 * z.d + 1) * (4 * 4 + 2 * 4) + 3), **STREAMS),
    "mhc_lite": Form(manifold(True), extra=more(pre, lambda z: (4 * z.d + 1) * (factorial(4) + 2 * 4) + 3), **STREAMS),
    "frac_connections": Form(frac, "norm", extra=more(pre, lambda z: 4 * (2 * 4 + 1))),
    "laurel": Form(laurel_lr, "norm", extra=more(pre, lambda z: 2 * 4 * z.d)),
    "laurel:rw": Form(laurel_rw, "norm", extra=more(pre, lambda z: 2)),
    "altup": Form(
        pre_ln,
        "norm",
        open=altup_open,
        close=altup_close,
        enter=altup_enter,
        leave=altup_leave,
        extra=lambda z: pre(z) + z.L * (z.d + 4 * z.d + 4**3 + 4**2) + 2 * 3 * z.d**2,
    ),
    "denseformer": Form(
        pre_ln,
        enter=dense_enter,
        close=lambda S, ends: summed(ends.value("weights"), S),
        extra=lambda z: pre(z) + (z.L + 1) ** 2,
        **OUTPUTS,
    ),
    "muddformer": mudd(False),
    "muddformer:ppn": mudd(True),
    "attnres": Form(attnres, extra=lambda z: pre(z) + (2 * z.L + 1) * 2 * z.d, **DEPTH),
    "attnres:block": Form(attnres_block, extra=lambda z: pre(z) + (2 * z.L + 1) * 2 * z.d, **DEPTH),
    "deep_cross_attention": Form(
        viewed_pre_ln,
        enter=cross_enter,
        close=lambda S, ends: cross_views(ends, "", S, "r")["r"],
        extra=lambda z: pre(z) + z.L * (2 * z.d + 4 * (z.L + 1 + z.d)) + z.L + 1 + z.d,
        **(OUTPUTS | {"leave": lambda s, S, r, H: [*S, H - r]}),
    ),
    "x0_mixing": Form(
        pre_ln,
        "norm",
        open=anchored_open,
        enter=anchored_enter,
        leave=lambda s, S, memo, H: (H, S[1]),
        close=lambda S, ends: S[0],
        extra=lambda z: pre(z) + 2 * z.L,
    ),
    "x0_mixing:ladder": Form(
        pre_ln, enter=ladder_enter, close=lambda S, ends: S[-1], extra=lambda z: pre(z) + z.L, **OUTPUTS
    ),
    "value_residual": Form(value_residual(lambda s, V1, V: 0.5 * V1 + 0.5 * V), "norm", extra=pre),
    "value_residual:learned": Form(
        value_residual(
            lambda s, V1, V: (
                s.value("points.share.v.gains.of_first.gain") * V1 + s.value("points.share.v.gains.own.gain") * V
            )
        ),
        "norm",
        extra=lambda z: pre(z) + 2 * (z.L - 1),
    ),
    # the paper's has no projection of values but in the first block, (L - 1) d^2 fewer; here the others are stored, unused
    "value_residual:svformer": Form(value_residual(lambda s, V1, V: V1), "norm", extra=pre),
    "realformer": Form(realformer, None, extra=post),
    "shaped_skipless": Form(shaped, "norm", extra=lambda z: pre(z) + z.L * (3 * z.H + 2)),
}
