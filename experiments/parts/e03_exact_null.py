"""Is a factor on the branches more than a learning rate? The same small run in both forms, its losses compared step by step."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments.parts.e03_schemes import PRE_LN, matched
from experiments.shared.sizes import SEEDS, sized
from resjax.config.validate import resolve
from resjax.residual import Scheme
from resjax.train.assemble import assemble, quick_start
from resjax.train.numbers import with_numbers
from resjax.train.step import make_step

EXACT = (0.5, 0.25, 0.125)  # powers of 2, by which floating-point numbers are multiplied exactly
ROUNDED = (0.3, 0.1)
ONE_ROUNDING = 1 + 2.0**-22  # a few roundings of float32 in the start of the matrices that write to the stream
VOCAB, STEPS = 32, 50


def compared(seeds: Sequence[int] = SEEDS, steps: int = STEPS, exact: Sequence[float] = EXACT) -> Iterator[dict]:
    """Rows {arm, scale, seed, largest}: the largest difference of a training loss from that of plain Pre-LN, nats.

    Arms: matched (rate, start and eps of the scaled matrices undo the factor); shared rate (nothing does); one rounding (plain Pre-LN
    whose start is rounded otherwise: how far float32 alone carries two runs apart).
    """
    plain = losses(PRE_LN, seeds, steps)
    arms = [("matched", scale, losses(matched(scale), seeds, steps)) for scale in (*exact, *ROUNDED)]
    arms.append(("shared rate", ROUNDED[0], losses(PRE_LN.but(scale=ROUNDED[0]), seeds, steps)))
    arms.append(("one rounding", 1.0, losses(PRE_LN, seeds, steps, ONE_ROUNDING)))
    for arm, scale, found in arms:
        for seed, mine, other in zip(seeds, found, plain, strict=True):
            yield {"arm": arm, "scale": scale, "seed": seed, "largest": float(np.abs(mine - other).max())}


def losses(scheme: Scheme, seeds: Sequence[int], steps: int, written: float = 1.0) -> np.ndarray:
    """Training losses (seeds, steps), float32 in float64: 2 blocks of width 16 on tokens drawn at random, Adam with its usual eps.

    ``written`` is a factor on the start of the matrices that write to the stream.
    """
    config = resolve(_config(steps, written), jax.default_backend())
    parts = assemble(config, VOCAB, scheme)
    quick = quick_start(parts.abstract.params)
    first = jax.jit(lambda seed: with_numbers(parts, {"seed": seed}).start(), compiler_options=quick)
    step = jax.jit(make_step(parts.graphdef, parts.optimizer, parts.schedule, parts.recipe))
    found = np.zeros((len(seeds), steps))
    for row, seed in zip(found, seeds, strict=True):
        state, tokens = first(np.uint32(seed)), np.random.default_rng(seed)
        shape = (config.data.batch, config.data.length + 1)
        for i in range(steps):
            batch = tokens.integers(0, VOCAB, shape).astype(np.int32)
            state, metrics, _ = step(state, batch, np.asarray(False))
            row[i] = float(metrics["loss"])
    return found


def _config(steps: int, written: float) -> Any:
    config = sized("cpu-S", model__depth=2, model__width=16, model__heads=2, data__length=8, data__batch=4)
    config.train.steps, config.optimizer.warmup, config.health.groups = steps, steps // 10, ()
    config.init.out_scale = written / np.sqrt(2 * config.model.depth)
    return config
