"""How large are the runs of an experiment? The protocol's models and recipe at each scale; what an experiment varies is its own."""

from typing import Any

from resjax.config import default
from resjax.errors import not_one_of

RATES4 = (1e-3, 3e-3, 1e-2, 3e-2)  # the middle of the seven below, where width 32 trains; the articles name no rates
RATES7 = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # of Wortsman et al. 2023
SEEDS = (0, 1, 2, 3, 4)
WARMUP = 0.1  # of the steps
SIZES: dict[str, dict[str, Any]] = {
    "cpu-S": {
        "model.width": 32, "model.heads": 4, "data.length": 32, "data.batch": 16, "train.steps": 600,
    },
    "cpu-M": {
        "model.width": 64, "model.heads": 4, "data.length": 64, "data.batch": 16, "train.steps": 1500,
    },
    "acc-S": {
        "model.width": 256, "model.heads": 8, "data.length": 256, "data.batch": 64, "train.steps": 5000,
        "precision.compute": "bfloat16",
    },
    "acc-M": {
        "model.width": 512, "model.heads": 8, "data.length": 512, "data.batch": 64, "train.steps": 20000,
        "precision.compute": "bfloat16",
    },
}  # fmt: skip


def sized(name: str, **fields: Any) -> Any:
    """A configuration of the protocol: Pre-LN of 12 blocks on the Markov source, Adam without decay or clipping, a tenth of the steps
    warm-up, then a cosine to 10 %.

    Args:
      name: one of ``SIZES``.
      fields: further fields, with two underscores for the dot: ``model__depth=24``.

    Raises:
      Refused: no such size.
    """
    if name not in SIZES:
        raise not_one_of("the size", name, SIZES)
    config = default()
    given = SIZES[name] | {path.replace("__", "."): value for path, value in fields.items()}
    usual = {
        "data.source": "markov", "model.depth": 12,
        "optimizer.name": "adamw", "optimizer.lr": 3e-3, "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0,
        "optimizer.b1": 0.9, "optimizer.b2": 0.95, "optimizer.eps": 1e-8, "optimizer.schedule": "cosine",
        "optimizer.warmup": round(WARMUP * given["train.steps"]),
        "train.eval_every": 0, "train.eval_batches": 16, "health.every": max(1, round(given["train.steps"] / 10)),
    }  # fmt: skip
    for path, value in (usual | given).items():
        section, _, leaf = path.rpartition(".")
        (config[section] if section else config)[leaf] = value
    return config
