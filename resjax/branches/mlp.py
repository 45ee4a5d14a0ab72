"""What is the feed-forward branch? (..., D) -> (..., D), no norm and no skip inside."""

import jax
from flax import nnx

from resjax.branches.attention import At, unchanged
from resjax.branches.linear import Linear

KINDS = ("gelu", "relu", "swiglu")


class MLP(nnx.Module):
    """Two matrices around an activation: gelu (tanh form, as GPT-2), relu; or swiglu: ``W2 ( silu(W1 x) . W3 x )`` with W1, W3 fused.

    Points at which a scheme may act: 'fc_in' before the activation, (..., hidden), or (..., 2, hidden) for swiglu; 'hidden' after it.

    Args:
      width: D.
      hidden: size of the hidden layer.
      kind: gelu, relu or swiglu (Shazeer 2020, 2002.05202).
    """

    def __init__(self, width: int, hidden: int, kind: str = "gelu", *, bias: bool = False, key: jax.Array):
        if kind not in KINDS:
            raise ValueError(f"mlp kind '{kind}' is none of {', '.join(KINDS)}")
        self.kind = kind
        k_in, k_out = jax.random.split(key)
        roles = ("fc_in", "fc_in") if kind == "swiglu" else ("fc_in",)
        self.fc_in = Linear(width, hidden, *roles, bias=bias, key=k_in)
        self.write = Linear(hidden, width, "write", bias=bias, key=k_out)

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        """The points and their feature shapes."""
        inner = tuple(self.fc_in.kernel.shape[-2:]) if self.kind == "swiglu" else tuple(self.fc_in.kernel.shape[-1:])
        return {"fc_in": inner, "hidden": inner[-1:]}

    def __call__(self, x: jax.Array, at: At | None = None) -> jax.Array:
        at = at or unchanged
        with jax.named_scope("hidden"):
            hidden = at("fc_in", self.fc_in(x))
            match self.kind:
                case "gelu":
                    hidden = jax.nn.gelu(hidden, approximate=True)
                case "relu":
                    hidden = jax.nn.relu(hidden)
                case "swiglu":
                    hidden = jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]
            hidden = at("hidden", hidden)
        with jax.named_scope("output"):
            return self.write(hidden)
