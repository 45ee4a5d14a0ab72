"""What must a language model compute under each residual scheme? NumPy, float64; no JAX, no code of the library.

An equation is written here a second time, from the papers, as a :class:`Form`: how one site turns the stream H into the
next, in terms of the branch F, the norms and the gains. ``FORMS`` holds one for each entry of the catalogue, and what a
paper claims of it that can be counted. Parameters are read from the model by (block, site).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Any

import numpy as np


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


def normalised(x: np.ndarray, kind: str, eps: float) -> np.ndarray:
    if kind == "layernorm":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    if kind == "rmsnorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    if kind == "unit":
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + eps**2)
    assert kind == "none", kind
    return x


def affine(x: np.ndarray, module: Any, read: Reader, index: int | None) -> np.ndarray:
    """Gain and bias of a norm, where it has them."""
    if module is None:
        return x
    if module.gain is not None:
        x = x * read(module.gain, index)
    if module.bias is not None:
        x = x + read(module.bias, index)
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
    """Rotary positions on (B, T, C): features i and i + C/2 are one complex number, turned by t * 10000^(-2i/C)."""
    _, length, size = x.shape
    half = size // 2
    z = x[..., :half] + 1j * x[..., half:]
    angles = np.outer(np.arange(length), 10_000.0 ** (-2.0 * np.arange(half) / size))
    z = z * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


def attention(x: np.ndarray, module: Any, read: Reader, index: int | None, options: Options) -> np.ndarray:
    """Causal softmax attention, one head and one query at a time."""
    if module.fused:
        q, k, v = (linear(x, module.qkv, read, index, part) for part in range(3))
    else:
        q, k, v = (linear(x, part, read, index) for part in (module.q, module.k, module.v))
    length, width = x.shape[1:]
    size = width // options.heads
    mixed = np.zeros_like(x)
    for head in range(options.heads):
        here = slice(head * size, (head + 1) * size)
        qh, kh, vh = q[..., here], k[..., here], v[..., here]
        if module.norm_q is not None:
            qh = affine(normalised(qh, "rmsnorm", options.eps), module.norm_q, read, index)
            kh = affine(normalised(kh, "rmsnorm", options.eps), module.norm_k, read, index)
        if options.rope:
            qh, kh = turned(qh), turned(kh)
        for t in range(length):
            scores = np.einsum("bc,bkc->bk", qh[:, t], kh[:, : t + 1]) / sqrt(size)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed[:, t, here] = np.einsum("bk,bkc->bc", weights, vh[:, : t + 1])
    return linear(mixed, module.write, read, index)


def mlp(x: np.ndarray, module: Any, read: Reader, index: int | None, options: Options) -> np.ndarray:
    if options.mlp == "swiglu":
        gate, up = (linear(x, module.fc_in, read, index, part) for part in range(2))
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = linear(x, module.fc_in, read, index)
        if options.mlp == "relu":
            hidden = np.maximum(hidden, 0)
        else:
            assert options.mlp == "gelu", options.mlp
            hidden = 0.5 * hidden * (1 + np.tanh(sqrt(2 / pi) * (hidden + 0.044715 * hidden**3)))
    return linear(hidden, module.write, read, index)


@dataclass
class Place:
    """One site, as a form sees it: blocks are counted by ``l`` from 1 to ``L``, sites by ``s`` from 0 to ``M`` - 1."""

    kind: str
    l: int
    L: int
    s: int
    M: int
    last: bool
    connection: Any
    index: int
    read: Reader
    options: Options

    def F(self, x: np.ndarray) -> np.ndarray:
        branch = attention if self.kind == "attention" else mlp
        return branch(x, self.connection.branch, self.read, self.index, self.options)

    def norm(self, place: str, x: np.ndarray, kind: str = "norm") -> np.ndarray:
        """The norm called ``place`` (in, out, after), of the model's own kind unless another is given."""
        module = getattr(self.connection, f"norm_{place}")
        return affine(
            normalised(x, self.options.norm if kind == "norm" else kind, self.options.eps),
            module,
            self.read,
            self.index,
        )

    def gain(self, name: str) -> np.ndarray:
        return self.read(self.connection.gains[name].gain, self.index)

    def offset(self, name: str) -> np.ndarray:
        return self.read(self.connection.gains[name].offset, self.index)


Step = Callable[[Place, np.ndarray, np.ndarray], np.ndarray]  # site, stream, stream at the block's start -> next stream


@dataclass(frozen=True)
class Form:
    """A scheme's equation, written out.

    Attributes:
      step: one site.
      final: the norm between the last block and the head; 'norm' is the model's own kind, None is none.
      norms: norms at each site.
      gains: learned numbers at each site, from the width.
      identity: a stack that has just been made returns its input.
    """

    step: Step
    final: str | None
    norms: int
    gains: Callable[[int], int] = lambda width: 0
    identity: bool = False


FORMS: dict[str, Form] = {
    "plain": Form(lambda s, H, H0: s.F(s.norm("in", H)), final="norm", norms=1),
    "post_ln": Form(lambda s, H, H0: s.norm("after", H + s.F(H)), final=None, norms=1),
    "pre_ln": Form(lambda s, H, H0: H + s.F(s.norm("in", H)), final="norm", norms=1),
    "scaled": Form(lambda s, H, H0: H + s.F(s.norm("in", H)) / sqrt(2 * s.L), final="norm", norms=1),
    "rezero": Form(
        lambda s, H, H0: H + s.gain("scale") * s.F(H), final=None, norms=0, gains=lambda d: 1, identity=True
    ),
    "layerscale": Form(
        lambda s, H, H0: H + s.gain("scale") * s.F(s.norm("in", H)), final="norm", norms=1, gains=lambda d: d
    ),
    "sandwich_branch": Form(lambda s, H, H0: H + s.norm("out", s.F(s.norm("in", H))), final="norm", norms=2),
    "sandwich_trunk": Form(lambda s, H, H0: s.norm("after", H + s.F(s.norm("in", H))), final=None, norms=2),
    "deepnorm": Form(lambda s, H, H0: s.norm("after", (2 * s.L) ** 0.25 * H + s.F(H)), final=None, norms=1),
}


def run_stack(stack: Any, h: np.ndarray, form: Step, options: Options, read: Reader) -> list[np.ndarray]:
    """The stream before the first site and after each one."""
    lengths = [len(read(blocks.sites[0].branch.write.kernel)) for blocks in stack.runs]
    depth, kinds = sum(lengths), ("attention", "mlp")
    streams = [h]
    for block in range(depth):
        run = next(r for r in range(len(lengths)) if block < sum(lengths[: r + 1]))
        entry = streams[-1]
        for pos, connection in enumerate(stack.runs[run].sites):
            place = Place(
                kind=kinds[pos],
                l=block + 1,
                L=depth,
                s=2 * block + pos,
                M=2 * depth,
                last=pos == 1,
                connection=connection,
                index=block - sum(lengths[:run]),
                read=read,
                options=options,
            )
            streams.append(form(place, streams[-1], entry))
    return streams


def language_model(
    model: Any, tokens: np.ndarray, form: Form, options: Options
) -> tuple[np.ndarray, list[np.ndarray], Reader]:
    """Logits (B, T, V), the streams, and what was read."""
    read = Reader()
    h = read(model.embed)[tokens]
    if model.positions is not None:
        h = h + read(model.positions)[: tokens.shape[1]]
    streams = run_stack(model.stack, h, form.step, options, read)
    last = streams[-1]
    if form.final:
        kind = options.norm if form.final == "norm" else form.final
        last = affine(normalised(last, kind, options.eps), model.final_norm, read, None)
    head = read(model.embed).T if model.head is None else read(model.head)
    return last @ head, streams, read
