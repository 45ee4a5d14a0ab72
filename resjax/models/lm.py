"""What is the language model? Embedding, a stack of residual blocks, a final norm, a head: a causal decoder."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.block import Probes
from resjax.branches import MLP, Attention
from resjax.residual import Branch, Context, Init, NormDefaults, Scheme, Site, build_norm, start, table, tap
from resjax.residual.connection import dropout, measured
from resjax.residual.gains import LearnedGain
from resjax.residual.norms import POINTWISE
from resjax.residual.parameters import kernel
from resjax.residual.precision import ROUNDING, ROUNDINGS, as_stored, exact, rms, wide
from resjax.stack import Stack

KINDS = ("attention", "mlp")
EMBED_DROPOUT = 2  # use of the step's key outside the sites; the sites fold in their number first
POSITIONS = ("learned", "rope", "none")


@dataclass(frozen=True)
class Shape:
    """The options of a language model; sizes in elements.

    Attributes:
      vocab, length: size of the vocabulary and longest sequence (learned positions have ``length`` rows).
      depth, width, heads: blocks, width of the stream, attention heads.
      mlp, mlp_ratio: kind of feed-forward, and its hidden size over the width.
      norms: what 'norm' means.
      positions: learned, rope or none.
      tied: the head uses the embedding's table.
      bias: biases in the linear maps (and LayerNorms).
      dropout: on the embedding and on every branch's output.
      scan, remat: how the stack runs.
      stream: dtype of the residual stream.
    """

    vocab: int
    length: int
    depth: int
    width: int
    heads: int
    mlp: str = "gelu"
    mlp_ratio: float = 4.0
    norms: NormDefaults = NormDefaults()
    positions: str = "learned"
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    scan: bool = True
    remat: str = "none"
    stream: str = "float32"
    rounding: str = "none"


class LM(nnx.Module):
    """Causal language model under any residual scheme; see :class:`Shape`."""

    def __init__(self, shape: Shape, scheme: Scheme, init: Init, *, key: jax.Array):
        if shape.positions not in POSITIONS:
            raise ValueError(f"positions are '{shape.positions}', which is none of {', '.join(POSITIONS)}")
        self.shape = shape
        self._qk_norm = scheme.norm_in if shape.qk_norm and scheme.norm_in in POINTWISE else shape.qk_norm
        k_emb, k_pos, k_head, k_stack = jax.random.split(key, 4)
        self.embed = table(k_emb, shape.vocab, shape.width, "emb")
        self.positions = table(k_pos, shape.length, shape.width, "pos") if shape.positions == "learned" else None
        self.head = None if shape.tied else kernel(k_head, shape.width, shape.vocab, "head")
        ends = Site("ends", 0, 1, shape.depth)
        start([self.embed, self.positions, self.head], init, ends, scheme.init)
        self.stack = Stack(
            scheme,
            KINDS,
            shape.depth,
            shape.width,
            self._branch,
            shape.norms,
            init,
            dropout=shape.dropout,
            scan=shape.scan,
            remat=shape.remat,
            key=k_stack,
        )
        self.final_norm = build_norm(scheme.final_norm, shape.width, shape.norms)
        gain = scheme.logit_gain
        self.logit_gain = None if gain is None else LearnedGain(gain, shape.vocab, ends, shape.width)

    def _branch(self, kind: str, key: jax.Array) -> Branch:
        shape = self.shape
        if kind == "attention":
            return Attention(
                shape.width,
                shape.heads,
                rope=shape.positions == "rope",
                qk_norm=self._qk_norm,
                bias=shape.bias,
                eps=shape.norms.eps,
                key=key,
            )
        return MLP(shape.width, round(shape.mlp_ratio * shape.width), shape.mlp, bias=shape.bias, key=key)

    def __call__(
        self, tokens: jax.Array, context: Context, embed_tap: jax.Array | None = None
    ) -> tuple[jax.Array, Probes]:
        """Logits and probes.

        Args:
          tokens: (B, T) integers below the vocabulary's size, T at most ``shape.length``.
          context: see :class:`resjax.residual.Context`.
          embed_tap: a zero whose gradient is the squared gradient norm of the stream before the first block.

        Returns:
          Logits (B, T, V) in float32, and the probes: sites (depth, sites), blocks (depth,), and scalars ``embed_rms`` (the stream
          before the first block) and ``final_rms`` (after the final norm, so never part of the stream's own profile).
        """
        context = self.told(context)
        with jax.named_scope("embedding"):
            h = self.embedded(tokens, context)
        if embed_tap is not None:
            h = tap(h, embed_tap, jnp.asarray(context.on))
        last, probes = self.stack(h, context)
        with jax.named_scope("final_norm"):
            final = self.final(last, context)
        if context.measure is not None:
            probes = probes | measured(context, ends, h, final)
        with jax.named_scope("head"):
            return self.logits(final), probes

    def told(self, context: Context) -> Context:
        """``context``, with how the model rounds what its sites store; a context that says how to store keeps that."""
        return rounding(context, self.shape.rounding)

    def embedded(self, tokens: jax.Array, context: Context) -> jax.Array:
        """The stream before the first block, (B, T, D)."""
        shape = self.shape
        # Narrowed last: the gradient of a row is a sum over all its tokens, which a bfloat16 table would swallow.
        h = self.embed[...].astype(wide(shape.stream))[tokens]
        if self.positions is not None:
            h = h + self.positions[...].astype(h.dtype)[: tokens.shape[1]]
        h = h.astype(shape.stream)
        if context.train and shape.dropout > 0.0:
            if context.key is None:
                raise ValueError("dropout needs a key: give one in the context, or train=False")
            after_all_sites = jax.random.fold_in(context.key, len(KINDS) * shape.depth)
            h = dropout(jax.random.fold_in(after_all_sites, EMBED_DROPOUT), h, shape.dropout)
        return h

    def objective(
        self, batch: jax.Array, context: Context, embed_tap: jax.Array | None = None
    ) -> tuple[jax.Array, Probes]:
        """What training minimises, and the probes: mean nats per token of a batch (B, T + 1) of sequences, each token from those before."""
        logits, probes = self(batch[:, :-1], context, embed_tap)
        with jax.named_scope("loss"):
            return loss(logits, batch[:, 1:]), probes

    def final(self, last: jax.Array, context: Context) -> jax.Array:
        """(B, T, D) after the last block -> the head's input."""
        return last.astype(context.compute) if self.final_norm is None else self.final_norm(last, context.compute)

    def logits(self, final: jax.Array) -> jax.Array:
        """(B, T, D) after the final norm -> (B, T, V), float32 sums."""
        weights = self.embed[...].T if self.head is None else self.head[...]
        flat = final.reshape(-1, final.shape[-1])
        logits = jnp.matmul(flat, weights.astype(flat.dtype), preferred_element_type=exact(flat).dtype)
        logits = logits.reshape(*final.shape[:-1], -1)
        return logits if self.logit_gain is None else self.logit_gain(logits)


def rounding(context: Context, name: str) -> Context:
    """See :meth:`LM.told`; ``name`` is of the model's shape."""
    code = context.knobs.get(ROUNDING, ROUNDINGS.index(name))
    if context.store is not None or (isinstance(code, int) and code == 0):
        return context
    return replace(context, store=lambda x, number: as_stored(x, code))


def ends(embedded: jax.Array, final: jax.Array) -> Probes:
    """The probes of both ends of the stack."""
    return {"embed_rms": rms(embedded).astype(jnp.float32), "final_rms": rms(final).astype(jnp.float32)}


def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token; logits (B, T, V), targets (B, T)."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
