"""How is a matrix applied? As one two-dimensional product, tokens by width: up to 3 times faster on a CPU than multi-axis kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual import constant, kernel
from resjax.residual.precision import exact


class Linear(nnx.Module):
    """A linear map of the last axis; several roles fuse several matrices of one shape into one product.

    Shapes: (..., fan_in) -> (..., fan_out), or (..., parts, fan_out) for several roles. Parameters are cast to the input's dtype.
    """

    def __init__(self, fan_in: int, fan_out: int, *roles: str, bias: bool = False, key: jax.Array):
        self.kernel = kernel(key, fan_in, fan_out, *roles)
        self.bias = constant(0.0, self.kernel.shape[1:], "bias") if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return apply(x, self.kernel[...], None if self.bias is None else self.bias[...])

    def part(self, index: int) -> Callable[[jax.Array], jax.Array]:
        """One of several fused maps, by itself."""
        bias = None if self.bias is None else self.bias[index]
        return lambda x: apply(x, self.kernel[:, index], bias)


def apply(x: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
    """(..., in) through weights (in, out) or (in, parts, out), in x's dtype."""
    weights = weights.astype(x.dtype)
    y = jnp.matmul(x.reshape(-1, x.shape[-1]), weights.reshape(weights.shape[0], -1))
    y = y.reshape(*x.shape[:-1], *weights.shape[1:])
    if bias is None:
        return y
    wide = exact(y)  # so that the bias's gradient, a sum over all tokens, is one in float32
    return (wide + bias.astype(wide.dtype)).astype(y.dtype)
