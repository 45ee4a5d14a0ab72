"""What do the benchmarks share? A compiled training step of any size, timed rounds that alternate, results as JSON."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from resjax.config.tree import assign, default
from resjax.config.validate import resolve, validate
from resjax.train.assemble import Parts, assemble
from resjax.train.step import make_step

RESULTS = Path(__file__).parent / "results"
# The arithmetic of the peer: Pre-LN with RMSNorm, no positions, no clipping, no probes, constant rate.
PLAIN = {
    "model.norm": "rmsnorm",
    "model.positions": "none",
    "optimizer.clip": 0.0,
    "optimizer.schedule": "constant",
    "optimizer.warmup": 0,
    "optimizer.lr": 1e-3,
    "health.groups": (),
    "mesh.data": 1,
}


class Step:
    """A compiled training step on random bytes, with its state."""

    def __init__(self, fields: dict[str, Any]):
        config = default()
        for path, value in (PLAIN | fields).items():
            assign(config, path, value)
        validate(config)
        self.config = resolve(config, jax.default_backend())
        self.parts: Parts = assemble(self.config, 256)
        step = make_step(self.parts.graphdef, self.parts.optimizer, self.parts.schedule, self.parts.recipe)
        shape = (self.config.data.batch, self.config.data.length + 1)
        self.batch = np.random.default_rng(0).integers(0, 256, shape, np.int32)
        self.state = self.parts.initial(lambda _: self.batch)
        began = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(self.state, self.batch, False)
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - began
        self.count = 0
        self.run(2)

    def run(self, steps: int, every: int = 0) -> float:
        """Milliseconds a step over ``steps`` steps; probes in each ``every``-th (0 = never)."""
        start = time.perf_counter()
        for _ in range(steps):
            self.count += 1
            on = bool(every) and self.count % every == 0
            self.state, metrics, _ = self.compiled(self.state, self.batch, np.asarray(on))
        float(metrics["loss"])
        jax.block_until_ready(self.state)
        return 1e3 * (time.perf_counter() - start) / steps


def pairs(first: Callable[[], float], second: Callable[[], float], count: int = 7) -> dict[str, Any]:
    """``count`` alternating measurements of both; the median of the ratios first / second, and all of them."""
    rows = []
    for i in range(count):
        if i % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        rows.append((a, b))
    ratios = sorted(a / b for a, b in rows)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "first_ms": round(statistics.median(a for a, _ in rows), 2),
        "second_ms": round(statistics.median(b for _, b in rows), 2),
    }


def keep(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Keep ``result`` in results/<name>.json with the versions that it was measured with; what is kept, so."""
    made = {
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("jax", "flax", "optax")}},
        **result,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    return made


def write(name: str, result: dict[str, Any]) -> None:
    """Keep ``result`` and print it."""
    print(json.dumps(keep(name, result), indent=1))
