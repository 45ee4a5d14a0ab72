"""What is each leaf of a tree called, and what is the tree's fingerprint? Paths and hashes that know no Flax class."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.residual.parameters import is_variable


def named(tree: Any) -> dict[str, Any]:
    """The leaves by path (``params/stack/runs/0/...``), in the order of ``jax.tree.leaves``.

    An ``nnx.Variable`` counts as the one leaf inside it, so that the name is the same for a State and for the plain
    dict of it.

    Raises:
      ValueError: two leaves with one name (a key that contains '/').
    """
    leaves: dict[str, Any] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for leaf in jax.tree.leaves(node):
            if name in leaves:
                raise ValueError(f"two leaves are called '{name}'")
            leaves[name] = leaf
    return leaves


def is_key(leaf: Any) -> bool:
    """Is this a typed random key (or the abstract value of one)?"""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_kind(leaf: Any) -> str:
    """The generator of a typed key, concrete or abstract: 'threefry2x32', 'rbg', ..."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return str(kinds[0])


def signature(leaf: Any) -> list[Any]:
    """[dtype, [sizes]] of an array or an abstract array, as in a checkpoint; of a key, dtype 'key:threefry2x32'."""
    return [f"key:{key_kind(leaf)}" if is_key(leaf) else str(np.dtype(leaf.dtype)), list(leaf.shape)]


def to_host(leaf: Any) -> np.ndarray:
    """A copy in host memory; the words of a key. A copy, because a donated device buffer may soon be written again."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.is_fully_replicated:
            leaf = leaf.addressable_data(0)
        else:  # spread over several hosts
            from jax.experimental import multihost_utils

            leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.array(leaf)


def to_hosts(leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """:func:`to_host` of every leaf, with all transfers under way at once."""
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and not is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    return {path: to_host(leaf) for path, leaf in leaves.items()}


def signatures(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """:func:`signature` of every leaf.

    Raises:
      TypeError: a leaf that is no array, such as a Python number.
    """
    for path, leaf in leaves.items():
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"'{path}' is a {type(leaf).__name__}, not an array: {leaf!r}")
    return {path: signature(leaf) for path, leaf in leaves.items()}


def fingerprint(arrays: Mapping[str, np.ndarray], described: Mapping[str, list[Any]]) -> str:
    """SHA-256 over host arrays in path order, each as path, dtype, shape and little-endian bytes."""
    digest = hashlib.sha256()
    for path in sorted(arrays):
        dtype, shape = described[path]
        digest.update(f"{path}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
        array = np.ascontiguousarray(arrays[path])
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def tree_hash(tree: Any) -> str:
    """SHA-256 of a tree of arrays, in path order: the same wherever the arrays lie.

    ``param_hash`` is that of the parameters.
    """
    leaves = named(tree)
    described = signatures(leaves)
    return fingerprint(to_hosts(leaves), described)


def nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of :func:`named` as plain dicts."""
    tree: dict[str, Any] = {}
    for path, array in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


def placed(array: np.ndarray, like: Any) -> Any:
    """Host numbers in the form of ``like``: array or key, dtype, sharding.

    In memory of its own, so it can be donated.
    """
    if is_key(like):
        out = jax.random.wrap_key_data(jnp.array(array), impl=key_kind(like))
    elif isinstance(like, (np.ndarray, np.generic)):
        return array.astype(like.dtype)
    else:
        out = jnp.array(array, dtype=like.dtype)
    sharding = like.sharding if getattr(like, "committed", True) else None
    return out if sharding is None else jax.device_put(out, sharding)


def rebuilt(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """The inverse of :func:`to_hosts` of :func:`named`: a tree in the form of ``like``, in memory of its own; see :func:`placed`."""
    leaves = [placed(arrays[path], leaf) for path, leaf in named(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
