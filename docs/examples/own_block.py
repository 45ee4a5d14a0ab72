"""A block of one's own under three residual schemes, through the public resjax.residual, and resjax.stack that runs them.

    python docs/examples/own_block.py

The block is a gated convolution over time, written once in NNX and once in Linen; neither knows of residuals. Each stack of 12 is
trained for a few steps to repeat a sequence with a delay of one, and prints its loss before and after.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from resjax.branches.linen import FromLinen
from resjax.residual import CATALOGUE, Context, Init, NormDefaults
from resjax.stack import Stack

DEPTH, WIDTH, LENGTH = 12, 16, 24


class Mixer(nnx.Module):
    """(batch, length, width) -> the same: each step sees itself and the one before, through a gate."""

    def __init__(self, width: int, key: jax.Array):
        rngs = nnx.Rngs(key)
        self.now, self.before, self.gate = (nnx.Linear(width, width, rngs=rngs) for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return jax.nn.sigmoid(self.gate(x)) * (self.now(x) + self.before(shifted))


class LinenMixer(nn.Module):
    """The same in Linen."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return nn.sigmoid(nn.Dense(self.width)(x)) * (nn.Dense(self.width)(x) + nn.Dense(self.width)(shifted))


def of_nnx(kind: str, key: jax.Array) -> nnx.Module:
    return Mixer(WIDTH, key)


def of_linen(kind: str, key: jax.Array) -> nnx.Module:
    return FromLinen(LinenMixer(WIDTH), jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.float32), key)


def train(scheme: str, make_branch, steps: int = 60) -> tuple[float, float]:
    """Loss before and after ``steps`` steps of Adam."""
    stack = Stack(
        CATALOGUE[scheme], ("mixer", "mixer"), DEPTH, WIDTH, make_branch, NormDefaults(), Init(), key=jax.random.key(0)
    )
    graph, params = nnx.split(stack)
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    def loss(params: nnx.State, x: jax.Array) -> jax.Array:
        y, _ = nnx.merge(graph, params)(x, Context(train=True))
        return jnp.mean(jnp.square(y[:, 1:] - x[:, :-1]))

    @jax.jit
    def step(params: nnx.State, state: optax.OptState, key: jax.Array) -> tuple:
        value, grads = jax.value_and_grad(loss)(params, jax.random.normal(key, (8, LENGTH, WIDTH)))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    values = []
    for key in jax.random.split(jax.random.key(1), steps):
        params, state, value = step(params, state, key)
        values.append(float(value))
    return values[0], values[-1]


def main() -> None:
    for name, make_branch in (("NNX", of_nnx), ("Linen", of_linen)):
        for scheme in ("pre_ln", "rezero", "hyper_connections"):
            first, last = train(scheme, make_branch)
            print(f"{name:5s} under {scheme:17s}: loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
