"""What do runs that go well look like? The set that the doctor compares with, and that it must find nothing wrong with.

    python -m benchmarks.healthy [NAME ...]     train those that are not there yet, keep what the doctor reads of them
    python -m benchmarks.healthy --set          make resjax/health/diagnosis/healthy.json of what is kept

Each is a run of 300 steps on the Markov text or on Python's own source, half a minute or so on one core, that ends `trained` (or, on
source text, below the bigram baseline). benchmarks/results/healthy/NAME.json keeps its fields, losses, probes to three digits, and
some numbers of studies on its last state.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resjax.checkup import case_of
from resjax.health.diagnosis import healthy
from resjax.health.findings import at_end, at_start
from resjax.health.record import HealthRecord
from resjax.train.writers import to_json

ROOT = Path(__file__).resolve().parent.parent
STUDIED = ("similarity",)
READ = (  # what the doctor reads of a record
    "update_ratio", "update_rms", "stream_rms", "token_cosine", "stream_max", "finite", "swallowed", "stream_grad",
    "update_ratio_block", "param_grad_block", "attention_entropy", "attention_largest_logit", "mean_error", "signed_error",
    "role_change",
)  # fmt: skip
KEPT = ROOT / "benchmarks" / "results" / "healthy"
SMALL = {
    "data.source": "markov",
    "data.length": 32,
    "data.batch": 16,
    "model.depth": 12,
    "model.width": 32,
    "model.heads": 4,
}
COMMON = {"train.steps": 300, "health.every": 15, "health.groups": "all", "train.eval_every": 0}
# name: what differs from SMALL
RUNS: dict[str, dict[str, Any]] = {
    "pre_ln_6": {"model.depth": 6},
    "pre_ln_12": {},
    "pre_ln_12_lr_1e-2": {"optimizer.lr": 1e-2},
    "pre_ln_24": {"model.depth": 24},
    "pre_ln_12_source": {"data.source": "stdlib", "data.length": 64, "model.width": 64},
    "post_ln_6": {"residual.name": "post_ln", "model.depth": 6},
    "post_ln_12": {"residual.name": "post_ln"},
    "sandwich_branch_12": {"residual.name": "sandwich_branch"},
    "sandwich_trunk_12": {"residual.name": "sandwich_trunk"},
    "deepnorm_12": {"residual.name": "deepnorm"},
    "scaled_12": {"residual.name": "scaled"},
    "lns_12": {"residual.name": "lns"},
    "rezero_12": {"residual.name": "rezero", "optimizer.lr": 1e-2},
    "layerscale_12": {"residual.name": "layerscale", "optimizer.lr": 1e-2},
    "olmo2_12": {"residual.name": "olmo2"},
    "highway_6": {"residual.name": "highway", "model.depth": 6, "optimizer.lr": 1e-2},
    "ngpt_12": {"residual.name": "ngpt", "optimizer.lr": 1e-2},
    "hyper_connections_12": {"residual.name": "hyper_connections"},
    "denseformer_12": {"residual.name": "denseformer"},
    "attnres_12": {"residual.name": "attnres"},
    "value_residual_12": {"residual.name": "value_residual"},
    "pre_ln_12_bfloat16_stream": {"precision.stream": "bfloat16"},
}


def train(name: str) -> dict[str, Any]:
    """Train one, and what is kept of it.

    Raises:
      ValueError: it did not end as a healthy run does.
    """
    fields = SMALL | COMMON | RUNS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = f"{place}/{name}"
        config = Path(place, f"{name}.py")
        config.write_text("from resjax.config import default\n\n\ndef get_config():\n    return default()\n")
        flags = [f"--config.{path}={value}" for path, value in fields.items()]
        command = [sys.executable, "-m", "resjax.main", f"--config={config}", f"--workdir={folder}", *flags]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        case = case_of(folder, None, STUDIED, start=False)
        eval_loss, bigram = case.summary["eval_loss"], case.baseline("bigram")
        if not eval_loss < bigram:
            raise ValueError(
                f"{name} ends at {eval_loss:.3f} nats, not below the bigram baseline of {bigram:.3f}: left out"
            )
        return {
            "name": name,
            "command": " ".join(["python -m resjax.main --config=FILE", *flags]),
            "config": {key: value for key, value in case.config.items() if key != "mesh"},
            "summary": {key: case.summary.get(key) for key in ("steps", "eval_loss", "baselines", "stream_dtype")},
            "rows": [{key: row[key] for key in ("step", "loss", "grad_norm", "lr") if key in row} for row in case.rows],
            "steps": case.record.steps.tolist(),
            "probes": {probe: rounded(case.record[probe]) for probe in READ if probe in case.record},
            "studies": {"late": float(f"{case.studies['similarity']['late']:.4g}")},
        }


def rounded(values: np.ndarray) -> Any:
    """Nested lists of three significant digits; None for NaN."""
    if values.ndim == 0:
        value = float(values)
        return None if np.isnan(value) else float(f"{value:.3g}") if np.isfinite(value) else value
    return [rounded(one) for one in values]


def record_of(kept: dict[str, Any]) -> HealthRecord:
    """The probes of a kept run."""
    arrays = {name: np.array(rows, np.float32) for name, rows in kept["probes"].items()}
    record = HealthRecord()
    for i, step in enumerate(kept["steps"]):
        record.append(step, {name: rows[i] for name, rows in arrays.items()})
    return record


def the_set() -> dict[str, Any]:
    """What healthy.json holds, of everything that is kept."""
    made = []
    for name in RUNS:
        if not (KEPT / f"{name}.json").is_file():
            continue
        kept = json.loads((KEPT / f"{name}.json").read_text())
        record, config = record_of(kept), kept["config"]
        over = [probe for probe in record if record[probe].ndim == 3 and probe != "role_change"]
        model, data = config["model"], config["data"]
        made.append(
            {
                "label": name,
                "scheme": config["residual"]["name"],
                "depth": model["depth"],
                "start": {probe: rounded(at_start(record[probe])) for probe in over},
                "end": {probe: rounded(at_end(record[probe])) for probe in over},
                "studies": kept["studies"],
                "facts": {
                    "width": model["width"],
                    "data": data["source"],
                    "length": data["length"],
                    "lr": config["optimizer"]["lr"],
                    "steps": kept["summary"]["steps"],
                    "eval_loss": round(kept["summary"]["eval_loss"], 4),
                    "bigram": round(kept["summary"]["baselines"]["bigram"], 4),
                },
            }
        )
    return {"made by": "python -m benchmarks.healthy --set", "runs": made}


def text_of(found: dict[str, Any]) -> str:
    return json.dumps(to_json(found), allow_nan=False, separators=(",", ":")).replace('{"label"', '\n{"label"') + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.healthy", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--set", action="store_true", help="only make healthy.json")
    arguments = parser.parse_args(words)
    if unknown := sorted(set(arguments.names) - set(RUNS)):
        parser.error(f"there is no run '{unknown[0]}'; there are {', '.join(RUNS)}")
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.set else arguments.names or RUNS:
        path = KEPT / f"{name}.json"
        if not path.is_file() or name in arguments.names:
            try:
                kept = to_json(train(name))
            except ValueError as reason:
                print(reason, flush=True)
                continue
            path.write_text(json.dumps(kept, allow_nan=False, separators=(",", ":")) + "\n")
            print(name, flush=True)
    healthy.PATH.write_text(text_of(the_set()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
