"""What does a step do to the weights of each role in each block? Gradients, sizes, changes, and how much of a gradient is signal.

Everything is (depth, roles), float32, the roles in the order of :func:`block_roles`; NaN where a block has no weight of a role. A fused
kernel counts for each of its parts.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.parameters import ROLES, is_variable


def block_roles(params: nnx.State) -> tuple[str, ...]:
    """The roles of the weights in blocks, those that resjax knows first, in its order."""
    found = {role for _, leaf in _leaves(params) for role in leaf.role}
    return (*(role for role in ROLES if role in found), *sorted(found.difference(ROLES)))


def _leaves(params: nnx.State) -> Iterator[tuple[int, nnx.Variable]]:
    """The variables of the blocks, with the number of their run."""
    runs = params["stack"]["runs"]
    for number in sorted(runs):
        for leaf in jax.tree.leaves(runs[number], is_leaf=is_variable):
            yield number, leaf


def _table(roles: tuple[str, ...], states: tuple[nnx.State, ...], of: Callable[..., jax.Array]) -> jax.Array:
    """Sums by block and role of ``of(part, ...)``, one (n, ...) part of each state -> the same shape or (n,); NaN where there is none."""
    runs: dict[int, dict[str, jax.Array]] = {}
    lengths: dict[int, int] = {}
    for pairs in zip(*map(_leaves, states), strict=True):
        number, leaf = pairs[0]
        arrays = [variable[...] for _, variable in pairs]
        lengths[number] = len(arrays[0])
        for i, role in enumerate(leaf.role):
            parts = arrays if len(leaf.role) == 1 else [array[..., i, :] for array in arrays]
            value = of(*(part.reshape(len(part), -1) for part in parts))
            sums = runs.setdefault(number, {})
            sums[role] = sums[role] + value if role in sums else value
    missing = {number: jnp.full(length, jnp.nan, jnp.float32) for number, length in lengths.items()}
    return jnp.concatenate(
        [jnp.stack([runs[number].get(role, missing[number]) for role in roles], axis=1) for number in sorted(runs)]
    )


def squares(state: nnx.State) -> jax.Array:
    """Sums of squares."""
    return _table(block_roles(state), (state,), lambda w: jnp.sum(jnp.square(w.astype(jnp.float32)), axis=1))


def counts(state: nnx.State) -> jax.Array:
    """Numbers of elements."""
    return _table(block_roles(state), (state,), lambda w: jnp.full(len(w), w.shape[1], jnp.float32))


def sizes(params: nnx.State) -> jax.Array:
    """Root mean squares of the weights."""
    return jnp.sqrt(squares(params) / counts(params))


def changes(new: nnx.State, old: nnx.State) -> dict[str, jax.Array]:
    """Of a step: ``role_change`` |new - old| / |old|, NaN for weights of zeros; ``role_moved``, the share of elements that are not what
    they were.
    """
    roles = block_roles(old)

    def moved_by(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32)), axis=1)

    def moved(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum((a != b).astype(jnp.float32), axis=1)

    apart, size = _table(roles, (new, old), moved_by), squares(old)
    return {
        "role_change": jnp.sqrt(apart) / jnp.sqrt(jnp.where(size > 0, size, jnp.nan)),
        "role_moved": _table(roles, (new, old), moved) / counts(old),
    }


def signal(of_slices: jax.Array, of_batch: jax.Array, slices: int) -> jax.Array:
    """Which share of a batch's squared gradient is signal, from the squared norms of its slices (their mean) and of the whole.

    With slices of b samples, a batch of B = n b, and E|G_b|^2 = |G|^2 + tr(S) / b (McCandlish et al. 2018, 1812.06162, appendix A.1):
    the estimate of |G|^2 over |G_B|^2 is s = (n - |G_b|^2 / |G_B|^2) / (n - 1). 1: the slices agree; 0: nothing but noise, below it by
    chance. The simple noise scale, in samples, is tr(S) / |G|^2 = B (1 - s) / s; of one step it is a noisy estimate, average s first.
    NaN for one slice, and for a gradient of zeros.
    """
    if slices < 2:
        return jnp.full_like(of_batch, jnp.nan)
    return (slices - of_slices / of_batch) / (slices - 1)
