"""Which weights are held to a norm? Projections by role, after every step and once before the first (nGPT)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from resjax.residual.parameters import is_variable

TINY = 1e-30  # below the norm of any matrix that is not 0


def project(params: Any, axes: Mapping[str, str]) -> Any:
    """The parameters with the matrices of some roles scaled to norm 1 along an axis, in float32; of a fused kernel part by part.

    Args:
      params: an ``nnx.State`` whose variables have roles.
      axes: by role, 'in' (every column of a kernel (in, out) has norm 1; every row of a table) or 'out' (every row of a kernel).
    """
    if not axes:
        return params

    def one(variable: Any) -> Any:
        if not any(role in axes for role in variable.role):
            return variable
        value = variable[...]
        parts = [value] if len(variable.role) == 1 else list(jnp.moveaxis(value, -2, 0))
        held = [_unit(x, axes.get(role), role) for x, role in zip(parts, variable.role, strict=True)]
        return variable.replace(held[0] if len(held) == 1 else jnp.stack(held, axis=-2))

    return jax.tree.map(one, params, is_leaf=is_variable)


def _unit(matrix: jax.Array, axis: str | None, role: str) -> jax.Array:
    if axis is None:
        return matrix
    wide = matrix.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=place(role, axis), keepdims=True))
    return (wide / jnp.maximum(norm, TINY)).astype(matrix.dtype)


def place(role: str, axis: str) -> int:
    """The array axis that is 'in' or 'out' of a single matrix: kernels are (..., in, out), tables (rows, in)."""
    return -1 if role in ("emb", "pos") or axis == "out" else -2
