"""Which weights are held to a norm? Projections by role, after every step and once before the first (nGPT)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from resjax.residual.parameters import is_variable

AXES = ("in", "out")


def project(params: Any, axes: Mapping[str, str]) -> Any:
    """The parameters with the matrices of some roles scaled to norm 1 along an axis, in float32.

    Args:
      params: an ``nnx.State`` whose variables have roles.
      axes: by role, 'in' (every column of a kernel (in, out) has norm 1; every row of a table) or 'out' (every row of a kernel).
    """
    if not axes:
        return params

    def one(variable: Any) -> Any:
        found = {axes[role] for role in variable.role if role in axes}
        if not found:
            return variable
        (axis,) = found
        value = variable[...]
        wide = value.astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=place(variable, axis), keepdims=True))
        return variable.replace((wide / norm).astype(value.dtype))

    return jax.tree.map(one, params, is_leaf=is_variable)


def place(variable: Any, axis: str) -> int:
    """The array axis that is 'in' or 'out' of a matrix: kernels are (..., in, out) or (..., in, parts, out), tables (rows, in)."""
    if variable.role[0] in ("emb", "pos") or axis == "out":
        return -1
    return -2 if len(variable.role) == 1 else -3
