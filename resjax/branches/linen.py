"""How does a Flax Linen module become a branch? A thin adapter: its parameters as NNX variables, its apply as the call."""

from typing import Any

import jax
from flax import nnx


class FromLinen(nnx.Module):
    """A Linen module (one array in, one out, parameters only) as an NNX one.

    Args:
      module: the Linen module.
      like: an array, or the abstract value of one, of the shape that it will be called with.
      key: for its parameters.
    """

    def __init__(self, module: Any, like: jax.Array | jax.ShapeDtypeStruct, key: jax.Array):
        self.module = module
        variables = module.init(key, jax.numpy.zeros(like.shape, like.dtype))
        if extra := set(variables) - {"params"}:
            raise ValueError(
                f"the Linen module {type(module).__name__} has {', '.join(sorted(extra))} beside its params"
            )
        leaves, self.structure = jax.tree.flatten(variables["params"])
        self.leaves = nnx.List([nnx.Param(leaf, role=("foreign",)) for leaf in leaves])

    def __call__(self, x: jax.Array) -> jax.Array:
        params = jax.tree.unflatten(self.structure, [leaf[...] for leaf in self.leaves])
        return self.module.apply({"params": params}, x)
