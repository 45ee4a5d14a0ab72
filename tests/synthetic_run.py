"""A run's folder without a run: plausible files for tests of what reads them, and for looking at reports.

python tests/synthetic_run.py FOLDER --depth=24 --rows=50 --scheme=pre_ln [--trouble] [--more]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from resjax.health.diagnosis import Case
from resjax.health.record import HealthRecord

BASELINES = {"uniform": 5.545, "unigram": 3.325, "bigram": 2.514, "trigram": 1.987}


def probe_rows(depth: int, rows: int, scheme: str = "pre_ln", seed: int = 0) -> dict[str, np.ndarray]:
    """All probe arrays of a healthy run, float32, the recorded step in front, as the scheme's equation suggests."""
    rng = np.random.default_rng(seed)
    site = np.arange(2 * depth).reshape(1, depth, 2)
    done = np.linspace(0, 1, rows).reshape(-1, 1, 1)
    noise = lambda size=0.06: np.exp(rng.normal(0, size, (rows, depth, 2)))  # noqa: E731
    opened = 1 - np.exp(-6 * done)
    kind = np.array([0.5, 1.3])
    branch = kind * (0.35 + 0.9 * opened * np.exp(-3 * site / (2 * depth)))
    if scheme == "rezero":
        branch = branch * opened * 0.3
    if scheme == "layerscale":
        branch = branch * (1e-5 + 0.2 * opened)
    normed = scheme in ("post_ln", "deepnorm", "sandwich_trunk")
    stream = (
        np.ones((rows, depth, 2))
        if normed
        else np.sqrt(0.3 + np.cumsum((branch**2).reshape(rows, -1), 1).reshape(branch.shape) / depth**0.5)
    )
    before = stream if normed else np.sqrt(stream**2 - branch**2 / depth**0.5)
    update = branch / depth**0.25
    arrays = {
        "update_ratio": update / before * noise(),
        "stream_rms": stream * noise(0.01),
        "update_rms": update * noise(),
        "update_cosine": np.clip(
            0.35 * opened * np.sin(site / (2 * depth) * 5 - 1) + rng.normal(0, 0.03, stream.shape), -1, 1
        ),
        "token_cosine": np.clip(
            0.05 + 0.5 * site / (2 * depth) * (1 - 0.5 * done) + rng.normal(0, 0.01, stream.shape), -1, 1
        ),
        "stream_max": stream * 4.5 * noise(0.1) * (1 + 6 * done),
        "update_max": update * 5 * noise(0.1) + 1e-9 * (scheme != "rezero"),
        "finite": np.ones_like(stream),
        "swallowed": np.clip(4e-8 / np.maximum(update / before, 1e-9), 0, 1) * noise(0.3),
        "stream_grad": 0.02 * (1 + 4 * np.exp(-4 * site / (2 * depth))) * (1.2 - 0.7 * done) * noise(0.12),
    }
    if scheme == "plain":
        arrays |= {name: np.full(stream.shape, np.nan) for name in ("update_ratio", "update_cosine", "swallowed")}
    if scheme == "rezero":
        arrays["update_cosine"][0] = arrays["swallowed"][0] = np.nan
    arrays["update_ratio_block"] = (
        np.sqrt((arrays["update_ratio"] ** 2).sum(2)) if scheme != "plain" else 1.4 * noise()[..., 0]
    )
    arrays["param_grad_block"] = arrays["stream_grad"].mean(2) * 9
    flat = done.reshape(-1)
    arrays |= {
        "embed_rms": 0.55 + 0.3 * flat,
        "embed_grad": 0.2 - 0.1 * flat + 0.01 * rng.random(rows),
        "final_rms": np.full(rows, np.nan) if normed or scheme == "rezero" else 1 + 0.2 * flat,
        "moved": np.full(rows, 0.999),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}


ROLES = ("q", "k", "v", "write", "fc_in", "norm_scale")


def more_rows(depth: int, rows: int, seed: int = 2) -> dict[str, np.ndarray]:
    """The arrays of all groups that health.groups adds, as a healthy run might have them."""
    rng = np.random.default_rng(seed)
    deep, done = np.linspace(0, 1, 2 * depth).reshape(1, depth, 2), np.linspace(0, 1, rows).reshape(-1, 1, 1)
    noise = lambda *shape: np.exp(rng.normal(0, 0.06, shape or (rows, depth, 2)))  # noqa: E731
    role = np.geomspace(0.3, 3, len(ROLES))
    by_role = lambda value: value * role * noise(rows, depth, len(ROLES))  # noqa: E731
    attention = np.array([1.0, np.nan])
    ratio = 0.3 * np.exp(-2 * deep) * noise()
    arrays = {
        "token_cosine_centred": 0.1 * deep * (1 - done) + rng.normal(0, 0.01, (rows, depth, 2)),
        "residual_frobenius": (0.98 - 0.3 * deep * done) * np.ones((rows, depth, 2)),
        "residual_composite": (1.01 - 0.3 * deep * done) * noise(),
        "growth": np.sqrt(1 + ratio**2),
        "update_ratio_frobenius": ratio,
        "effective_rank": 55 * (1 - 0.5 * deep * done) * noise(),
        "stable_rank": 12 * (1 - 0.5 * deep * done) * noise(),
        "participation_ratio": 30 * (1 - 0.5 * deep * done) * noise(),
        "rank_collapse": 0.12 + 0.4 * deep * done * noise(),
        "update_error": 2.5e-8 / ratio,
        "effective_bits": -np.log2(2.5e-8 / ratio),
        "mean_error": 2.1e-8 * noise(),
        "signed_error": rng.normal(0, 1e-10, (rows, depth, 2)),
        "headroom": 125 - 3 * deep * noise(),
        "attention_entropy": (0.98 - 0.5 * deep * done * noise()) * attention,
        "attention_largest_logit": (1 + 12 * done * noise()) * attention,
        "attention_logit_std": (0.3 + 1.2 * done * noise()) * attention,
        "role_grad": by_role(0.1 * (2 - deep[..., :1])),
        "role_rms": by_role(0.05 + 0.02 * done),
        "role_change": by_role(1e-3 * (1.1 - done)),
        "role_moved": np.minimum(1, by_role(0.9 + 0 * done)),
        "role_signal": 0.6 - 0.5 * done + rng.normal(0, 0.1, (rows, depth, len(ROLES))),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def studies_of(depth: int, seed: int = 3, most: int = 64) -> dict[str, dict]:
    """What all studies of a state that have something to draw might find in a healthy network, as the doctor holds it."""
    rng = np.random.default_rng(seed)
    noise = lambda *shape: np.exp(rng.normal(0, 0.1, shape))  # noqa: E731
    blocks = np.unique(np.linspace(0, depth - 1, min(depth, most)).round().astype(int))
    points = np.unique(np.linspace(0, depth, min(depth + 1, most)).round().astype(int))
    share, deep = points / depth, np.arange(depth) / depth
    between = np.abs(share[:, None] - share[None])
    size = 0.02 * (1 + 4 * np.exp(-4 * np.arange(depth + 1) / depth))
    ratio = 0.3 * np.exp(-2 * deep)[:, None] * noise(depth, 2)
    delta = 0.3 * np.exp(-30 * blocks / depth) + 0.01 * noise(len(blocks))
    targets = ["current token", "previous token", "position", "next token", "bracket depth"]
    return {
        "ablation": {
            "blocks": blocks, "loss": 2.24, "delta": delta, "delta_site": delta[:, None] * np.array([0.3, 0.8]),
            "effective_depth": 0.4 * depth, "dead": np.zeros(len(blocks), bool),
        },
        "order": {"blocks": blocks[:-1], "swap": 0.02 * noise(max(0, len(blocks) - 1))},
        "lens": {"blocks": points, "loss": 4 - 1.76 * share, "settled": 0.1 + 0.9 * share},
        "similarity": {
            "blocks": points, "angular": 0.45 * between**0.5, "cka": 1 - 0.9 * between, "influence": 0.3 * np.exp(-4 * deep) * noise(depth),
            "late": 0.11,
        },
        "massive": {"largest": 5 + 300 * deep * noise(depth), "median": 0.7 + deep},
        "gradient": {"size": size, "spread": 4.9, "slope": -0.01, "identity_share": 0.4 + 0.5 * deep},
        "rounding": {
            "formats": {
                name: {"loss": cost, "effective_bits": bits - np.log2(1 / ratio)}
                for name, cost, bits in (("bfloat16", 4e-3, 8), ("float16", 1e-4, 11), ("bfloat16 truncating", 0.08, 7))
            }
        },
        "jacobian": {
            "blocks": blocks, "largest": 1 + noise(len(blocks)), "median": noise(len(blocks)), "smallest": 0.2 * noise(len(blocks)),
        },
        "decoding": {
            "targets": targets, "points": points, "chance": np.array([0.06, 0.06, 0.008, 0.06, 0.4]),
            "accuracy": np.array([0.99 - 0.4 * share, 0.2 + 0.6 * share, 0.9 - 0.8 * share, 0.1 + 0.3 * share, 0.5 + 0.2 * share]),
        },
        "update": {"change": 0.031},
        "steadiness": {"ratio": 1.02},
    }  # fmt: skip


def start_of(depth: int, seeds: int = 2) -> dict[str, np.ndarray]:
    """The probes of a scheme's start under two seeds, (seeds, block, site)."""
    first = [probe_rows(depth, 2, seed=seed) for seed in range(seeds)]
    return {name: np.stack([one[name][0] for one in first]) for name in ("update_ratio", "update_rms", "stream_rms")}


def record_of(arrays: dict[str, np.ndarray], every: int = 10) -> HealthRecord:
    """The arrays as a record, one row every so many steps from step 0."""
    record = HealthRecord(roles=ROLES if "role_grad" in arrays else ())
    for i in range(len(arrays["finite"])):
        record.append(i * every, {name: value[i] for name, value in arrays.items()})
    return record


def config_of(depth: int, scheme: str = "pre_ln", steps: int = 500, **residual: object) -> dict:
    """Resolved fields of a run, nested."""
    return {
        "seed": 0,
        "data": {"source": "stdlib", "length": 128, "batch": 16},
        "model": {
            "family": "lm",
            "depth": depth,
            "width": 64,
            "heads": 4,
            "mlp": "gelu",
            "norm": "layernorm",
            "scan": True,
            "remat": "auto",
        },
        "residual": {"name": scheme, "scale": None, **residual},
        "precision": {"param": "float32", "compute": "float32", "stream": "float32"},
        "optimizer": {"name": "adamw", "lr": 0.003, "schedule": "cosine", "warmup": 50, "weight_decay": 0.1},
        "train": {"steps": steps, "eval_every": 50, "save_every": 100},
        "health": {"every": 10},
    }


def case_of(depth: int, name: str = "run", seed: int = 0, rows: int = 31, **changes: object) -> Case:
    """A run that went well with all probes, all studies and the range of its start, as the doctor holds it."""
    steps = 10 * (rows - 1)
    made = Case(
        name,
        record_of(probe_rows(depth, rows, seed=seed) | more_rows(depth, rows, seed + 2)),
        config_of(depth, steps=steps),
        rows=[{"step": step, "loss": 2.2 + 3.3 * 0.98**step} for step in range(0, steps + 1, 5)],
        summary={"steps": steps, "train_loss": 2.201, "eval_loss": 2.243, "baselines": BASELINES},
        start=start_of(depth),
        studies=studies_of(depth, seed + 3),
        state=steps,
        saved=[steps // 3, steps],
        path=f"runs/{name}",
    )
    return replace(made, **changes)


def write_run(
    folder: Path,
    depth: int = 12,
    rows: int = 51,
    scheme: str = "pre_ln",
    every: int = 10,
    trouble: bool = False,
    done: bool = True,
    more: bool = False,
) -> Path:
    """A whole run's folder; with ``trouble`` it has a NaN cell, one branch driven high, and a non-finite end; with ``more`` the
    probes of all groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays, steps = probe_rows(depth, rows, scheme), (rows - 1) * every
    arrays |= more_rows(depth, rows) if more else {}
    if trouble:
        arrays["update_ratio"][rows // 2, depth // 3, 1] = 80
        arrays["stream_grad"][rows // 3, depth // 2, 0] = np.nan
        arrays["token_cosine"][rows // 2 :, -max(1, depth // 8) :] = 0.993
        for name, value in arrays.items():
            if value.ndim == 3:
                value[-2:, depth // 2 :] = 0 if name == "finite" else np.nan
    record = record_of(arrays, every)
    record.flush(folder / "health")
    config = config_of(depth, scheme, steps)
    facts = {
        **config,
        "versions": {"python": "3.11.8", "jax": "0.10.2"},
        "device_kind": "cpu",
        "corpus_hash": "sha256:0123abcd",
        "git_commit": None,
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=1))
    rng, lines = np.random.default_rng(1), []
    for step in range(0, steps + 1, 5):
        share = step / max(1, steps)
        loss = 2.2 + 3.3 * np.exp(-7 * share) + 0.04 * rng.normal() + (0.5 if 0.6 < share < 0.61 else 0)
        rate = 0.003 * min(1, step / max(1, 0.1 * steps)) * (0.55 + 0.45 * np.cos(np.pi * share))
        row = {
            "step": step,
            "loss": round(float(loss), 4),
            "lr": rate,
            "grad_norm": float(0.6 + 2 * np.exp(-9 * share) + 0.1 * rng.random()),
        }
        row |= {"tokens_per_s": 21000 + 900 * float(rng.normal()) if step else 4000}
        if trouble and share > 0.985:
            row |= {"loss": "nan", "grad_norm": "inf"}
        lines.append(row)
        if step % 50 == 0 and step and not (trouble and share > 0.985):
            lines.append({"step": step, "eval_loss": round(float(loss) + 0.05, 4)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    if done:
        summary = {
            "steps": steps,
            "train_loss": 2.201,
            "eval_loss": 2.243,
            "baselines": BASELINES,
            "tokens_per_s": 21034.2,
            "stream_dtype": "float32",
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--rows", type=int, default=51)
    parser.add_argument("--scheme", default="pre_ln")
    parser.add_argument("--trouble", action="store_true")
    parser.add_argument("--unfinished", action="store_true")
    parser.add_argument("--more", action="store_true")
    given = parser.parse_args()
    how = {"trouble": given.trouble, "done": not given.unfinished, "more": given.more}
    write_run(given.folder, given.depth, given.rows, given.scheme, **how)
