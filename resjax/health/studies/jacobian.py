"""How does one block stretch a token's stream? Singular values of the Jacobian of the stream after it by the stream before it.

Of one token by itself: how its stream after the block depends on its own stream before, all other tokens held. A block whose branches
are zero is the identity: all singular values 1. Saxe et al. 2014 (1312.6120), Pennington et al. 2017 (1711.04735): a network whose
blocks have them all near 1 keeps gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.studies.buffers import newest
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject
from resjax.health.studies.walk import State, Walk

EXACT = 256  # numbers a token's stream may have for its Jacobian to be had whole
CHUNK = 32  # of its rows are worked out at once
QUANTILES = np.linspace(0, 1, 11)
PROBES, ROUNDS = 32, 30  # random directions, and rounds towards the largest one, where it is not
TOKENS, LENGTH = 4, 32  # one token a sequence, each at another place; sequences are cut to so many

Map = Callable[[Any], Any]


def jacobian(subject: Subject) -> dict[str, Any]:
    """Singular values of single blocks' Jacobians, over four tokens together, within the first 32 of their sequences.

    n streams of a token are one vector. Of a buffer of earlier outputs it is how what the next block reads (the end: what close makes of
    it) depends on the row written last; where all that is ever added to the buffer is updates of sites, as in Attention Residuals, no
    row is a stream, and all is NaN.

    Returns:
      largest, median, smallest, mean_square: (blocks,).
      singular: (blocks, 11), their quantiles from 0 to 1 in tenths.
      blocks: which.
      exact: False where a token has more than 256 numbers: then largest and mean_square are from random directions, the others NaN.
      places: of the tokens in their sequences, one each of the first sequences.
    """
    walk, blocks = subject.walk, subject.blocks
    tokens = subject.batches[0, :TOKENS, :-1][:, :LENGTH]
    count, length = tokens.shape
    place = (np.arange(1, count + 1) * length + count - 1) // count - 1
    exact, found, state = True, [], walk.open(tokens)
    for block in blocks:
        state = walk.to(state, block)
        if walk.stack.carry.rows and walk.stack.scheme.outer is None:
            found.append(nothing())
            continue
        figures, exact = of_block(walk, state, jnp.asarray(place))
        found.append(figures)
    return {name: np.array([one[name] for one in found]) for name in found[0]} | {
        "blocks": np.array(blocks),
        "exact": exact,
        "places": place,
    }


def of_block(walk: Walk, state: State, place: jax.Array) -> tuple[dict[str, Any], bool]:
    """Figures of the block after ``state`` at those tokens, one a sequence; and whether they are exact."""
    after = walk.to(state, state.place + 1)
    rows = walk.stack.carry.rows
    held = jax.tree.map(jnp.zeros_like, after.side)

    def back(cotangent: Any) -> Any:
        stream = walk.pull_seen(after, cotangent) if rows else cotangent
        return newest(walk, walk.pull(state, (stream, held))[0], state.place)

    def forth(tangent: Any) -> Any:
        return walk.push(state, (tangent, jax.tree.map(jnp.zeros_like, state.side)))[0]

    before, then = newest(walk, state.stream, state.place), walk.seen(after) if rows else after.stream
    numbers, dtype = own(then, place).shape[1], jax.tree.leaves(then)[0].dtype
    pull = through(back, then, place)
    if numbers <= EXACT or rows:
        return spectrum(whole(pull, len(place), numbers, dtype)), True
    return sketched(pull, through(forth, before, place), len(place), numbers, dtype), False


def own(stream: Any, place: jax.Array) -> jax.Array:
    """What belongs to one token of each sequence, (batch, numbers); arrays (..., batch, tokens, width), places (batch,)."""
    rows = jnp.arange(len(place))
    parts = [jnp.moveaxis(leaf[..., rows, place, :], -2, 0) for leaf in jax.tree.leaves(stream)]
    return jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def put(stream: Any, place: jax.Array, numbers: jax.Array) -> Any:
    """``stream`` with other numbers for those tokens: the inverse of :func:`own`."""
    rows, leaves = jnp.arange(len(place)), []
    flat, structure = jax.tree.flatten(stream)
    for leaf in flat:
        shape = (len(place), *leaf.shape[:-3], leaf.shape[-1])
        size = int(np.prod(shape[1:]))
        part, numbers = numbers[:, :size].reshape(shape), numbers[:, size:]
        leaves.append(leaf.at[..., rows, place, :].set(jnp.moveaxis(part, 0, -2).astype(leaf.dtype)))
    return jax.tree.unflatten(structure, leaves)


def through(linear: Map, given: Any, place: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A linear map of streams as one of the tokens' own numbers: vectors (k, batch, numbers) of one -> of the other.

    Args:
      linear: a Jacobian (stream before -> after), or its transpose.
      given: a stream of the form that it takes.
      place: which token of each sequence, (batch,).
    """
    nothing_else = jax.tree.map(jnp.zeros_like, given)
    return lambda numbers: _own(jax.vmap(linear)(_put(nothing_else, place, numbers)), place)


# for several vectors at once, compiled once for all blocks
_own = jax.jit(jax.vmap(own, (0, None)))
_put = jax.jit(jax.vmap(put, (None, None, 0)))


def whole(pull: Callable[[jax.Array], jax.Array], batch: int, numbers: int, dtype: Any) -> np.ndarray:
    """The Jacobians, (batch, out, in), from ``pull``: vectors (k, batch, numbers) -> ``J^T`` of each."""
    found, many = [], min(CHUNK, numbers)
    for first in range(0, numbers, many):
        units = np.eye(numbers)[first : first + many]
        units = np.concatenate([units, np.zeros((many - len(units), numbers))])  # one program for all
        vectors = jnp.asarray(np.broadcast_to(units[:, None], (many, batch, numbers)), dtype)
        found.append(np.asarray(pull(vectors), np.float64)[: numbers - first])
    return np.moveaxis(np.concatenate(found), 0, 1)


def spectrum(jacobians: np.ndarray) -> dict[str, Any]:
    """Figures of Jacobians (tokens, out, in): all singular values together; NaN where one is not finite."""
    if not np.isfinite(jacobians).all():
        return nothing()
    values = np.linalg.svd(jacobians, compute_uv=False)
    return {
        "largest": float(values.max()),
        "median": float(np.median(values)),
        "smallest": float(values.min()),
        "mean_square": float(np.mean(np.square(values))),
        "singular": np.quantile(values, QUANTILES),
    }


def sketched(
    pull: Callable[[jax.Array], jax.Array],
    push: Callable[[jax.Array], jax.Array],
    batch: int,
    numbers: int,
    dtype: Any,
    seed: int = 0,
) -> dict[str, Any]:
    """The same from random directions: the mean square without bias, the largest from below by power iteration, the others NaN."""
    rng = np.random.default_rng(seed)
    vectors = jnp.asarray(rng.choice([-1.0, 1.0], (PROBES, batch, numbers)), dtype)
    squares = np.square(np.asarray(pull(vectors), np.float64)).sum(axis=-1)
    here = rng.normal(size=(1, batch, numbers))
    length = np.zeros((1, batch, 1))
    for _ in range(ROUNDS):
        here = np.asarray(pull(push(jnp.asarray(here, dtype))), np.float64)
        length = np.linalg.norm(here, axis=-1, keepdims=True)
        here = here / np.where(length > 0, length, 1)
    found = nothing() | {"largest": float(np.sqrt(length.max())), "mean_square": float(squares.mean() / numbers)}
    return found if np.isfinite(squares).all() and np.isfinite(length).all() else nothing()


def nothing() -> dict[str, Any]:
    """Figures where there is nothing to tell."""
    names = ("largest", "median", "smallest", "mean_square")
    return {name: np.nan for name in names} | {"singular": np.full(len(QUANTILES), np.nan)}


STUDY = Study(
    "jacobian",
    jacobian,
    "how blocks stretch the stream",
    "Singular values of single blocks' Jacobians of a token's stream after by its stream before (Saxe et al. 2014, "
    "1312.6120; Pennington et al. 2017, 1711.04735).",
    "slow",
)
