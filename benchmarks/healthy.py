"""What do runs that go well look like? The set that the doctor compares with, and that it must find nothing wrong with.

    python -m benchmarks.healthy [NAME ...]     train those that are not there yet, keep what the doctor reads of them
    python -m benchmarks.healthy --starts       measure the starts of those that were kept without, which needs no training
    python -m benchmarks.healthy --set          make resjax/health/diagnosis/healthy.json of what is kept

Each is a run of 300 steps on the Markov text or on Python's own source, half a minute or so on one core, that ends `trained` (or, on
source text, below the bigram baseline). benchmarks/results/healthy/NAME.json keeps its fields, losses, probes to three digits, the
start of its scheme under the ordinary init, and of the studies on its last state what the doctor's findings read.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resjax import data
from resjax.checkup import Start, case_of, ordinary, start_on, theory_of
from resjax.config.scheme import scheme as scheme_of
from resjax.config.tree import from_dict
from resjax.health.diagnosis import Case, healthy
from resjax.health.diagnosis.starts import START_FIGURES
from resjax.health.reading import at_end, at_start
from resjax.health.record import HealthRecord
from resjax.train.assemble import model_shape
from resjax.train.subject import held_out
from resjax.train.writers import to_json

ROOT = Path(__file__).resolve().parent.parent
STUDIED = {  # study: what the doctor's findings read of it
    "similarity": ("late",),
    "massive": ("largest", "median", "feature", "position"),
    "rounding": ("formats",),
    "ablation": ("blocks", "delta", "dead", "effective_depth"),
}
READ = (  # what the doctor reads of a record
    "update_ratio", "update_rms", "stream_rms", "token_cosine", "stream_max", "finite", "swallowed", "stream_grad",
    "update_ratio_block", "param_grad_block", "token_cosine_centred", "residual_frobenius", "effective_rank", "rank_collapse",
    "attention_entropy", "attention_largest_logit", "mean_error", "signed_error", "role_change",
)  # fmt: skip
BANDS = (  # what healthy.json has of the start and the end
    "update_ratio", "update_rms", "stream_rms", "token_cosine", "stream_max", "finite", "swallowed", "stream_grad", "attention_entropy",
    "attention_largest_logit", "mean_error", "signed_error",
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
        folder, config = f"{place}/{name}", config_in(place)
        flags = [f"--config.{path}={value}" for path, value in fields.items()]
        command = [sys.executable, "-m", "resjax.main", f"--config={config}", f"--workdir={folder}", *flags]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        case = case_of(folder, None, tuple(STUDIED), start=False)
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
            "start": own_start(name),
            "studies": {name: of_study(case.studies[name], keys) for name, keys in STUDIED.items()},
        }


def of_study(found: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What is kept of a study: of the precision replay the losses."""
    kept = {key: found[key] for key in keys}
    if "formats" in kept:
        kept["formats"] = {name: {"loss": one["loss"]} for name, one in kept["formats"].items()}
    return {key: nested(value) for key, value in kept.items()}


def nested(value: Any) -> Any:
    """A study's figure as JSON has it: numbers to four digits, flags and whole numbers as they are."""
    if isinstance(value, Mapping):
        return {key: nested(one) for key, one in value.items()}
    if np.ndim(value):
        return [nested(one) for one in value]
    return (
        value
        if isinstance(value, bool | int)
        else bool(value)
        if isinstance(value, np.bool_)
        else rounded(np.asarray(value), 4)
    )


def own_start(name: str) -> dict[str, Any]:
    """The start of a run's scheme under the ordinary init, as its file keeps it; nothing is trained."""
    fields = SMALL | RUNS[name]
    with tempfile.TemporaryDirectory() as place:
        pairs = [(path, str(value)) for path, value in fields.items() if path != "data.batch"]
        case = ordinary(str(config_in(place)), fields["model.depth"], fields["data.length"], pairs)
    section, seed = case.config.data, case.config.seed
    corpus = data.load(section.source, section.field, seed)
    text = held_out(data.Pipeline(corpus, fields["data.length"], fields["data.batch"], seed), case.batch * case.length)
    return kept_start(start_on(case, text))


def kept_start(start: Start) -> dict[str, Any]:
    """What is kept of a start: the figures that the doctor compares, and how often tokens repeat, for theory."""
    return {"figures": {probe: rounded(start.measured[probe]) for probe in START_FIGURES}, "kinds": start.kinds}


def case_of_kept(kept: Mapping[str, Any]) -> Case:
    """A kept run as the doctor looks at it, with its start by theory and as measured, and what was studied of its state."""
    rows = [{name: float(value) for name, value in row.items()} | {"step": row["step"]} for row in kept["rows"]]
    config, summary = kept["config"], kept["summary"]
    fields = from_dict(config | {"mesh": {}})
    shape = model_shape(fields, 0, "none", "float32")
    theory = theory_of(fields, scheme_of(fields), shape, config["data"]["length"], kept["start"]["kinds"])
    return Case(
        kept["name"],
        record_of(kept),
        config,
        rows,
        summary,
        summary["stream_dtype"],
        start={probe: np.array(drawn, np.float64) for probe, drawn in kept["start"].get("figures", {}).items()},
        theory=theory,
        studies=known(kept["studies"]),
        state=summary["steps"],
    )


def known(study: Any) -> Any:
    """A kept study with NaN where nothing is."""
    if isinstance(study, Mapping):
        return {key: known(value) for key, value in study.items()}
    return [known(one) for one in study] if isinstance(study, list) else np.nan if study is None else study


def config_in(folder: str) -> Path:
    """The default configuration as a file in a folder."""
    path = Path(folder, "default.py")
    path.write_text("from resjax.config import default\n\n\ndef get_config():\n    return default()\n")
    return path


def rounded(values: np.ndarray, digits: int = 3) -> Any:
    """Nested lists of numbers of three significant digits; None for NaN."""
    if values.ndim == 0:
        value = float(values)
        return None if np.isnan(value) else float(f"{value:.{digits}g}") if np.isfinite(value) else value
    return [rounded(one, digits) for one in values]


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
        over = [probe for probe in BANDS if probe in record]
        model, data = config["model"], config["data"]
        made.append(
            {
                "label": name,
                "scheme": config["residual"]["name"],
                "depth": model["depth"],
                "start": {probe: rounded(at_start(record[probe])) for probe in over},
                "end": {probe: rounded(at_end(record[probe])) for probe in over},
                "studies": {"late": kept["studies"]["similarity"]["late"]},
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


def kept_text(kept: Mapping[str, Any]) -> str:
    """What a file of a kept run holds."""
    return json.dumps(to_json(kept), allow_nan=False, separators=(",", ":")) + "\n"


def text_of(found: dict[str, Any]) -> str:
    return json.dumps(to_json(found), allow_nan=False, separators=(",", ":")).replace('{"label"', '\n{"label"') + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.healthy", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--set", action="store_true", help="only make healthy.json")
    only.add_argument("--starts", action="store_true", help="measure the starts that are missing, and train nothing")
    arguments = parser.parse_args(words)
    if unknown := sorted(set(arguments.names) - set(RUNS)):
        parser.error(f"there is no run '{unknown[0]}'; there are {', '.join(RUNS)}")
    KEPT.mkdir(parents=True, exist_ok=True)
    for path in sorted(KEPT.glob("*.json")) if arguments.starts else []:
        kept = json.loads(path.read_text(), parse_constant=float)
        if "figures" not in kept.get("start", {}) and kept["name"] in (arguments.names or RUNS):
            path.write_text(kept_text(kept | {"start": own_start(kept["name"])}))
            print(path.stem, flush=True)
    for name in [] if arguments.set or arguments.starts else arguments.names or RUNS:
        path = KEPT / f"{name}.json"
        if not path.is_file() or name in arguments.names:
            try:
                kept = train(name)
            except ValueError as reason:
                print(reason, flush=True)
                continue
            path.write_text(kept_text(kept))
            print(name, flush=True)
    healthy.PATH.write_text(text_of(the_set()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
