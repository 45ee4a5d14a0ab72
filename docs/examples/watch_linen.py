"""Two Linen models watched: one at its adds, inside nn.remat and nn.scan; one from outside, without a change to its code.

    python docs/examples/watch_linen.py [FOLDER]

Both learn to tell sequences by their sum, and are studied at the end. FOLDER (runs/linen) then holds ``scanned/report.html`` and
``untouched/report.html``; in the second model the output of block 2 is thirty times too large. Takes a minute on a CPU.
"""

import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from resjax import watch
from resjax.watch import linen

DEPTH, WIDTH, LENGTH, CLASSES = 5, 32, 16, 8


class MixerBlock(nn.Module):
    """Mixes over time, then over features. Scanned: called with the stream and the number of the block."""

    @nn.compact
    def __call__(self, x, number):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(LENGTH)(nn.gelu(nn.Dense(2 * LENGTH)(y))).swapaxes(1, 2)
        x = watch.add(x, y, block=number, site="time")
        y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return watch.add(x, y, block=number, site="features"), None


class ScannedMixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = watch.embedded(nn.Dense(WIDTH)(x))
        blocks = nn.scan(
            nn.remat(MixerBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH, in_axes=0
        )
        x, _ = blocks()(x, jnp.arange(DEPTH))
        return nn.Dense(CLASSES)(watch.final(nn.LayerNorm()(x)).mean(axis=1))


class Residual(nn.Module):
    """A block from some library."""

    gain: float = 1.0

    @nn.compact
    def __call__(self, x):
        return x + self.gain * nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


class Untouched(nn.Module):
    """Knows nothing of being watched."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        for i in range(DEPTH):
            x = Residual(gain=30.0 if i == 2 else 1.0, name=f"block_{i}")(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=1))


def sequences(key, count=64):
    """Sequences of single numbers, and into which of eight ranges their sum falls."""
    x = jax.random.normal(key, (count, LENGTH, 1))
    return x, jnp.digitize(x.sum(axis=(1, 2)), jnp.linspace(-6, 6, CLASSES - 1))


def train(model, plan, log, steps):
    x, _ = sequences(jax.random.key(0))
    state = TrainState.create(
        apply_fn=model.apply, params=jax.jit(model.init)(jax.random.key(1), x)["params"], tx=optax.adam(2e-3)
    )

    def objective(params, batch):
        x, y = batch
        with linen.blocks(r"block_(\d+)"):
            logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(state, key, taps):
        def watched(params, taps):
            with watch.into(taps):
                return objective(params, sequences(key))

        loss, (grads, found) = jax.value_and_grad(watched, argnums=(0, 1))(state.params, taps)
        return state.apply_gradients(grads=grads), loss, found

    for number, key in enumerate(jax.random.split(jax.random.key(2), steps), 1):
        state, loss, found = step(state, key, plan.taps(on=number % 5 == 1))
        log.write(number, found, loss=loss)
    log.studied(steps, watch.study(objective, state.params, [sequences(jax.random.key(3))], plan=plan))


def main(folder: str = "runs/linen", steps: int = 100) -> dict:
    cases = {
        "scanned": (ScannedMixer(), watch.Plan(DEPTH, ("time", "features"))),
        "untouched": (Untouched(), watch.Plan(DEPTH, ("block",))),
    }
    records = {}
    for name, (model, plan) in cases.items():
        with watch.Log(Path(folder) / name, config={"model": {"depth": DEPTH, "width": WIDTH}}) as log:
            train(model, plan, log, steps)
        records[name] = log.record
        ratios = records[name]["update_ratio"][-1].max(axis=1)
        print(f"{log.report()}: largest update/stream ratio of each block {ratios.round(2).tolist()}")
    return records


if __name__ == "__main__":
    main(*sys.argv[1:2])
