"""How are a scheme's numbers set from data before training? Admin's profiling: one forward pass that fills the skip gains.

Admin (Liu et al. 2020, 2004.08249): from the first site to the last, with r = 1 at the start,

    omega = r for all features;   v = Var[omega . H] + Var[F(H)] over all elements;   r = sqrt(v)

and the pass goes on with the gains as they are being set. In float32, without dropout.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from resjax.block import Block
from resjax.residual import Context
from resjax.stack import Stack


def calibrate(stack: Stack, embedded: jax.Array, knobs: Mapping[str, Any] = MappingProxyType({})) -> Stack:
    """The stack with the learned vectors of ``skip`` set from one batch (batch, ..., width), as it enters the first block."""
    context = Context(compute=jnp.float32, knobs=knobs)
    stream, root = embedded.astype(jnp.float32), jnp.float32(1)
    for run, blocks in zip(stack.plan, stack.runs, strict=True):
        numbers = stack.numbers(run, context)

        def body(carried: tuple, x: tuple) -> tuple[tuple, list[jax.Array]]:
            stream, root = carried
            block, index, numbers = x
            entry, omegas = stream, []
            for i, (connection, site) in enumerate(zip(block.sites, block.places(index), strict=True)):
                update, memo, _ = connection.produce(stream, site, numbers[i], context)
                gain = connection.gains["skip"].gain
                assert gain is not None
                gain[...] = jnp.full(gain.shape, root)
                omegas.append(root)
                root = jnp.sqrt(jnp.var(root * stream) + jnp.var(update))
                last = entry if site.last_in_block else None
                stream, _ = connection.write(stream, memo, update, site, numbers[i], last, context)
            return (stream, root), omegas

        layers = (blocks, jnp.arange(run.first, run.first + run.length), numbers)
        (stream, root), omegas = jax.lax.scan(body, (stream, root), layers)
        fill(blocks, omegas)
    return stack


def fill(blocks: Block, omegas: list[jax.Array]) -> None:
    """Write one number a block into the skip gains of each site."""
    for connection, numbers in zip(blocks.sites, omegas, strict=True):
        gain = connection.gains["skip"].gain
        assert gain is not None
        gain[...] = jnp.broadcast_to(numbers[:, None], gain.shape)
