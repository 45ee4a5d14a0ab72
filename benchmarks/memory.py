"""How does memory grow with depth under every scheme, and how far does a reversible stack drift back in bfloat16?

    python -m benchmarks.memory [NAME ...]

Temporary bytes of the compiled gradient with respect to parameters and embedding, full remat, batch 4, length 64, width 64, float32,
as the slope from 16 to 64 blocks in arrays of (batch, length, width) a block. Parameter gradients are outputs, not temporaries.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bench import write
from resjax.block import Layer
from resjax.branches import MLP, Attention
from resjax.residual import CATALOGUE, Context, Init, NormDefaults, Scheme
from resjax.residual.entries import FORMS
from resjax.stack import Stack

WIDTH, LENGTH, BATCH, HEADS = 64, 64, 4, 4
DEPTHS = (16, 64)
UNIT = BATCH * LENGTH * WIDTH * 4


def branch(kind: str, key: jax.Array) -> Any:
    return Attention(WIDTH, HEADS, key=key) if kind == "attention" else MLP(WIDTH, 4 * WIDTH, key=key)


def stack(scheme: Scheme, depth: int) -> Stack:
    return Stack(
        scheme, ("attention", "mlp"), depth, WIDTH, branch, NormDefaults(), Init(), remat="full", key=jax.random.key(0)
    )


def temporary(scheme: Scheme, depth: int) -> int:
    """Temporary bytes of the gradient at one depth."""

    def loss(stack: Stack, h: jax.Array) -> jax.Array:
        out, _ = stack(h, Context())
        return jnp.sum(out * jnp.linspace(-1.0, 1.0, WIDTH))

    made = jax.eval_shape(lambda: stack(scheme, depth))
    h = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(made, h).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def slope(scheme: Scheme) -> float:
    """How many arrays of (batch, length, width) a block more takes."""
    low, high = (temporary(scheme, depth) for depth in DEPTHS)
    return (high - low) / (DEPTHS[1] - DEPTHS[0]) / UNIT


def drift(dtype: str, depth: int = 64) -> float:
    """Largest error of the reconstructed embedding of a reversible stack over its largest element, at the start."""
    made = jax.jit(lambda: stack(CATALOGUE["reversible"], depth))()
    h = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH)).astype(dtype)

    @jax.jit
    def there_and_back(made: Stack, h: jax.Array) -> jax.Array:
        context = Context(compute=jnp.dtype(dtype))
        (blocks,) = made.runs

        def up(stream: Any, x: tuple) -> tuple[Any, None]:
            block, index = x
            stream, _, _ = block(stream, Layer(index, [{}, {}], None), context)
            return stream, None

        def down(stream: Any, x: tuple) -> tuple[Any, None]:
            block, index = x
            layer = Layer(index, [{}, {}], None)
            for unit in (1, 0):
                update, *_ = block.produce(unit, stream, layer, context)
                stream = block.undo(unit, stream, update, layer)
            return stream, None

        layers = (blocks, jnp.arange(depth))
        top, _ = jax.lax.scan(up, made.carry.open(None, h, 2 * depth), layers)
        (a, b), _ = jax.lax.scan(down, top, layers, reverse=True)
        return jnp.stack([a, b])

    back = there_and_back(made, h).astype(jnp.float32)
    wide = h.astype(jnp.float32)
    return float(jnp.max(jnp.abs(back - wide)) / jnp.max(jnp.abs(wide)))


def main() -> None:
    schemes = {
        name if made == scheme else f"{name}:{form}": made
        for name, scheme in CATALOGUE.items()
        for form, made in FORMS.get(name, {"": scheme}).items()
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    slopes = {}
    for name in names or schemes:
        slopes[name] = round(slope(schemes[name]), 2)
        print(f"{name:26s} {slopes[name]:6.2f} arrays a block", flush=True)
    reversible = {dtype: float(f"{drift(dtype):.2g}") for dtype in ("float32", "bfloat16")}
    print(reversible)
    if not names:
        write("memory", {"arrays_a_block": slopes, "reversible_drift_at_64_blocks": reversible})


if __name__ == "__main__":
    main()
