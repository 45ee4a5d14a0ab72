"""What must a language model compute under each residual scheme? NumPy, float64; no JAX, no code of the library.

The equations of the schemes stand in :mod:`oracle_forms`, written a second time from the papers; here is the model around them:
branches with their points, norms, blocks in order. Parameters are read from the model by (block, site).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import erf, sqrt
from typing import Any

import numpy as np

from oracle_forms import FORMS, Form, Size, Step, gelu, normalised

__all__ = ["FORMS", "Form", "Options", "Place", "Reader", "Size", "language_model", "run_stack"]

Points = dict[str, Callable[[np.ndarray], np.ndarray]]  # what a scheme does inside a branch, by point


@dataclass(frozen=True)
class Options:
    """The model around the scheme, in words of its own."""

    heads: int = 2
    mlp: str = "gelu"
    norm: str = "layernorm"
    eps: float = 1e-3
    rope: bool = False
    train: bool = False
    step: float = 0.0
    knobs: dict[str, float] = field(default_factory=dict)


class Reader:
    """Values as float64, and a list of the parameters that were read."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, variable: Any, index: int | None = None) -> np.ndarray:
        self.seen.add(id(variable))
        value = np.asarray(variable[...], np.float64)
        return value if index is None else value[index]


def inside(module: Any, path: str) -> Any:
    """What stands at a dotted path, such as 'carry.pick.query'; attributes and entries of mappings alike."""
    for name in path.split("."):
        module = getattr(module, name) if hasattr(module, name) else module[name]
    return module


@dataclass
class Part:
    """Some parameters of the model: those below ``root``, of block ``index`` of its run (None: they are not stacked)."""

    root: Any
    index: int | None
    read: Reader
    options: Options

    def value(self, path: str) -> np.ndarray:
        return self.read(inside(self.root, path), self.index)

    def normed(self, x: np.ndarray, path: str, kind: str = "norm") -> np.ndarray:
        """The norm at ``path``, of the model's own kind unless another is given."""
        return self.by(inside(self.root, path) if path else self.root, x, kind)

    def by(self, module: Any, x: np.ndarray, kind: str = "norm") -> np.ndarray:
        kind = self.options.norm if kind == "norm" else kind
        if kind == "dyt":
            x = np.tanh(self.read(module.steepness, self.index) * x)
        elif kind == "derf":
            x = self.read(module.steepness, self.index) * x + self.read(module.shift, self.index)
            x = np.vectorize(erf)(x)
        else:
            x = normalised(x, "rmsnorm" if kind == "zero_centred" else kind, self.options.eps)
        if module is None:
            return x
        if module.gain is not None:
            x = x * (self.read(module.gain, self.index) + (1 if kind == "zero_centred" else 0))
        if module.bias is not None:
            x = x + self.read(module.bias, self.index)
        return x


def linear(x: np.ndarray, module: Any, read: Reader, index: int | None, part: int | None = None) -> np.ndarray:
    w = read(module.kernel, index)
    w = w if part is None else w[:, part]
    y = np.einsum("...i,io->...o", x, w)
    if module.bias is not None:
        b = read(module.bias, index)
        y = y + (b if part is None else b[part])
    return y


def turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions on (B, T, H, C): features i and i + C/2 are one complex number, turned by t * 10000^(-2i/C)."""
    _, length, _, size = x.shape
    half = size // 2
    z = x[..., :half] + 1j * x[..., half:]
    angles = np.outer(np.arange(length), 10_000.0 ** (-2.0 * np.arange(half) / size))
    z = z * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def attention(x: Any, module: Any, part: Part, points: Points) -> np.ndarray:
    """Causal softmax attention, one head and one query at a time; ``x`` is one input, or those of q, k and v by name.

    Points: q, k, v (B, T, H, C); q_turned and k_turned the same after the model's own norms and positions; scores (B, H, T, T),
    those that a later mask hides included; heads (B, T, H, C); pre_o (B, T, D).
    """

    def at(name: str, a: np.ndarray) -> np.ndarray:
        return points[name](a) if name in points else a

    read, index, options = part.read, part.index, part.options
    views = x if isinstance(x, dict) else dict.fromkeys("qkv", x)
    found = {}
    for i, name in enumerate("qkv"):
        fused = module.fused
        a = linear(views[name], module.qkv if fused else getattr(module, name), read, index, i if fused else None)
        found[name] = at(name, a.reshape(*a.shape[:2], options.heads, -1))
    q, k, v = found.values()
    if module.norm_q is not None:
        q, k = part.by(module.norm_q, q, "rmsnorm"), part.by(module.norm_k, k, "rmsnorm")
    if options.rope:
        q, k = turned(q), turned(k)
    q, k = at("q_turned", q), at("k_turned", k)
    scores = at("scores", np.einsum("bqhc,bkhc->bhqk", q, k) / sqrt(q.shape[-1]))
    mixed = np.zeros_like(v)
    for head in range(options.heads):
        for t in range(v.shape[1]):
            row = scores[:, head, t, : t + 1]
            weights = np.exp(row - row.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed[:, t, head] = np.einsum("bk,bkc->bc", weights, v[:, : t + 1, head])
    joined = at("heads", mixed).reshape(*mixed.shape[:2], -1)
    return linear(at("pre_o", joined), module.write, read, index)


def mlp(x: np.ndarray, module: Any, part: Part, points: Points) -> np.ndarray:
    """Points: fc_in (B, T, hidden) before the activation, (B, T, 2, hidden) if gated; hidden after it."""
    kind, read, index = part.options.mlp, part.read, part.index
    if kind == "swiglu":
        hidden = np.stack([linear(x, module.fc_in, read, index, i) for i in range(2)], -2)
    else:
        hidden = linear(x, module.fc_in, read, index)
    if "fc_in" in points:
        hidden = points["fc_in"](hidden)
    if kind == "swiglu":
        gate, up = hidden[..., 0, :], hidden[..., 1, :]
        hidden = gate / (1 + np.exp(-gate)) * up
    elif kind == "relu":
        hidden = np.maximum(hidden, 0)
    else:
        assert kind == "gelu", kind
        hidden = gelu(hidden)
    if "hidden" in points:
        hidden = points["hidden"](hidden)
    return linear(hidden, module.write, read, index)


@dataclass
class Place(Part):
    """One site, as a form sees it: blocks are counted by ``l`` from 1 to ``L``, sites by ``s`` from 0 to ``M`` - 1.

    ``root`` is the site's connection. ``outer`` are the parameters of the block around it; ``views`` what an outer form gives
    queries, keys and values to read; ``side`` what blocks hand to later ones.
    """

    kind: str
    l: int
    L: int
    s: int
    M: int
    last: bool
    outer: Part
    side: dict[str, np.ndarray]
    views: dict[str, np.ndarray] | None = None

    @property
    def connection(self) -> Any:
        return self.root

    def F(self, x: Any, **points: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The branch, with something done at its points; of a block that is one site, the sum of both branches."""
        branch = self.root.branch
        if self.kind == "attention+mlp":
            first, second = branch.branches
            return attention(x, first, self, points) + mlp(x, second, self, points)
        return (attention if self.kind == "attention" else mlp)(x, branch, self, points)

    def norm(self, place: str, x: np.ndarray, kind: str = "norm", view: str | None = None) -> np.ndarray:
        """The norm called ``place`` (in, out, after), of the model's own kind unless another is given."""
        module = getattr(self.root, f"norm_{place}")
        return self.by(module if view is None or module is None else module[view], x, kind)

    def gain(self, name: str) -> np.ndarray:
        return self.value(f"gains.{name}.gain")

    def offset(self, name: str) -> np.ndarray:
        return self.value(f"gains.{name}.offset")

    def point(self, name: str) -> np.ndarray:
        """A parameter inside the branch, such as 'heads.gain.gain'."""
        return self.value(f"points.inside.{name}")

    def point_norm(self, name: str, x: np.ndarray, kind: str = "norm") -> np.ndarray:
        """The norm at a point inside the branch, over the last axis."""
        return self.normed(x, f"points.inside.{name}.norm", kind)


def _blocks(stack: Any, read: Reader) -> Iterator[tuple[Any, int, int, int]]:
    """Each block in order: the run it is stored in, its index there, its number from 1, and how many blocks there are."""

    def length(blocks: Any) -> int:
        branch = blocks.sites[0].branch
        branch = branch.branches[0] if hasattr(branch, "branches") else branch
        return len(read(branch.write.kernel))

    lengths = [length(blocks) for blocks in stack.runs]
    number = 0
    for blocks, count in zip(stack.runs, lengths, strict=True):
        for index in range(count):
            number += 1
            yield blocks, index, number, sum(lengths)


def _run(stack: Any, e: np.ndarray, form: Form, options: Options, read: Reader) -> tuple[Any, list[np.ndarray]]:
    """What is carried out of the last block, and the streams of :func:`run_stack`."""
    ends, side = Part(stack.ends, None, read, options), {}
    S = form.open(e, ends)
    streams = [e]
    for blocks, index, l, L in _blocks(stack, read):
        per_block = len(blocks.sites)
        outer = Part(blocks.outer, index, read, options)
        whole = Place(blocks, index, read, options, "block", l, L, l - 1, L, True, outer, side)
        H, memo = form.enter(whole, S)
        views = {name: H[name] for name in "qkv"} if isinstance(H, dict) else None
        H = start = H["r"] if isinstance(H, dict) else H
        for pos, connection in enumerate(blocks.sites):
            kind = "attention+mlp" if per_block == 1 else ("attention", "mlp")[pos]
            number, last = (l - 1) * per_block + pos, pos == per_block - 1
            site = Place(connection, index, read, options, kind, l, L, number, L * per_block, last, outer, side)
            site.views = views if pos == 0 else None
            H = form.step(site, H, start)
            streams.append(form.view(H))
        S = form.leave(whole, S, memo, H)
    return S, streams


def run_stack(stack: Any, h: np.ndarray, form: Form | Step, options: Options, read: Reader) -> list[np.ndarray]:
    """The stream before the first site and after each one.

    Where several arrays are carried, one that stands for them: the sum of n streams, the half or the stream that branches read,
    the newest of all outputs. A block's own stream where the scheme acts on blocks.
    """
    return _run(stack, h, form if isinstance(form, Form) else Form(form, None), options, read)[1]


def language_model(
    model: Any, tokens: np.ndarray, form: Form, options: Options
) -> tuple[np.ndarray, list[np.ndarray], Reader]:
    """Logits (B, T, V), the streams, and what was read."""
    read = Reader()
    h = read(model.embed)[tokens]
    if model.positions is not None:
        h = h + read(model.positions)[: tokens.shape[1]]
    carried, streams = _run(model.stack, h, form, options, read)
    last = form.close(carried, Part(model.stack.ends, None, read, options))
    if form.final:
        last = Part(model, None, read, options).normed(last, "final_norm", form.final)
    head = read(model.embed).T if model.head is None else read(model.head)
    logits = last @ head
    if form.logits is not None:
        logits = form.logits(logits, read(model.logit_gain.gain), h.shape[-1])
    return logits, streams, read
