"""What can be told without a context? Probes as values of their own: of one add, of rows that a scan stacked, of arrays kept anywhere."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.errors import Refused
from resjax.health.geometry import magnitude
from resjax.health.probes import measure_block
from resjax.health.record import FORWARD_PROBES
from resjax.residual.taps import tap as gradient_tap
from resjax.watch.tap import held, of_site

Row = dict[str, jax.Array]


def site(stream: jax.Array, update: jax.Array, tap: jax.Array | None = None) -> tuple[jax.Array, Row]:
    """``stream + update`` and the forward probes of this add, float32 scalars: a value to be returned, as from the body of a scan.

    Args:
      stream, update: (batch, ..., width).
      tap: a float32 zero to differentiate the loss by: its gradient is the square of stream_grad here.
    """
    after = stream + update
    if tap is not None:
        after = gradient_tap(after, tap, jnp.asarray(True))
    return after, of_site(jax.lax.stop_gradient(held(after, {"kept": stream, "update": update})))


def rows(by_site: Mapping[str, Any], taps: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Probe arrays (block, site) from what :func:`site` gave.

    Args:
      by_site: for each site, in order, its probes stacked over blocks ((block,) each, as a scan returns them) or a list with one a
        block.
      taps: for each site the gradients of its taps, (block,).

    Raises:
      Refused: sites have different numbers of blocks, or other names than :func:`site` gives.
    """
    columns = {}
    for name, row in by_site.items():
        if isinstance(row, Sequence):
            row = {probe: [one[probe] for one in row] for probe in (row[0] if row else {})}
        columns[name] = {probe: np.asarray(jax.device_get(values), np.float32) for probe, values in row.items()}
        if set(columns[name]) != set(FORWARD_PROBES):
            raise Refused(f"the rows of '{name}' are not those of watch.site: {', '.join(columns[name]) or 'none'}")
    shapes = {name: values["stream_rms"].shape for name, values in columns.items()}
    if not shapes or any(shape != (len(next(iter(columns.values()))["stream_rms"]),) for shape in shapes.values()):
        raise Refused(f"the rows have to be (block,) with as many blocks at each site, and are {shapes}")
    found = {probe: np.stack([values[probe] for values in columns.values()], axis=1) for probe in FORWARD_PROBES}
    if taps is not None:
        if set(taps) != set(columns):
            raise Refused(f"taps are given for {', '.join(taps) or 'no site'}, and rows for {', '.join(columns)}")
        found["stream_grad"] = np.sqrt(np.stack([np.asarray(taps[name], np.float32) for name in columns], axis=1))
    return found


def from_arrays(before: Any, update: Any, after: Any = None, grads: Any = None) -> dict[str, np.ndarray]:
    """Probe arrays from the stream and the updates of one forward pass, wherever they come from.

    Args:
      before: the stream before each add, (layer, batch, ..., width); (layer, site, batch, ..., width) needs a mapping
        instead: one array a site, in order.
      update: what is added there, alike.
      after: the stream after each add; by default the sum in the dtype of the two.
      grads: gradient of the loss by the stream after each add, for stream_grad.

    Returns:
      The probes (layer, site), and update_ratio_block (layer,) from the first site's ``before`` and the last one's ``after``.

    Raises:
      Refused: shapes, or the sites' names, differ.
    """
    given = {"before": before, "update": update, "after": after, "grads": grads}
    parts = {name: x if isinstance(x, Mapping) else {"": x} for name, x in given.items() if x is not None}
    sites, shape = list(parts["before"]), np.shape(next(iter(parts["before"].values()), 0))
    if len(shape) < 3:
        raise Refused(f"before has the shape {shape}, and has to be (layer, batch, ..., width)")
    for name, arrays in parts.items():
        if list(arrays) != sites:
            raise Refused(f"{name} has the sites {', '.join(arrays)}, and before has {', '.join(sites)}")
        for one, x in arrays.items():
            if np.shape(x) != shape:
                where = f"{name} of '{one}'" if one else name
                raise Refused(f"{where} has the shape {np.shape(x)}, and before has {shape}")
    layers = []
    for i in range(shape[0]):
        here = {name: [jnp.asarray(arrays[one][i]) for one in sites] for name, arrays in parts.items()}
        layers.append(jax.device_get(_layer(here)))
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


@jax.jit
def _layer(parts: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    before, update = parts["before"], parts["update"]
    after = parts.get("after") or [h + u for h, u in zip(before, update, strict=True)]
    seen = [
        of_site({"kept": h.astype(out.dtype), "update": u.astype(out.dtype), "after": out})
        for h, u, out in zip(before, update, after, strict=True)
    ]
    found = {name: jnp.stack([one[name] for one in seen]) for name in FORWARD_PROBES}
    found |= measure_block(before[0], after[-1])
    if "grads" in parts:
        found["stream_grad"] = jnp.stack([magnitude(g).astype(jnp.float32) for g in parts["grads"]])
    return found


def gradient_norms(blocks: Any) -> jax.Array:
    """Norm of the gradient of each block's parameters, (block,) float32, for param_grad_block; works inside jit.

    Args:
      blocks: a list with the gradient of each block; or one tree whose leaves have the blocks in front, as of scanned blocks.
    """
    trees = list(blocks) if isinstance(blocks, list | tuple) else None
    if trees is not None:
        return jnp.stack([jnp.sqrt(sum(map(_square, jax.tree.leaves(tree)))) for tree in trees])
    leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(blocks)]
    return jnp.sqrt(functools.reduce(jnp.add, [jax.vmap(_square)(leaf) for leaf in leaves]))


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))
