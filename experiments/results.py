"""Where do an experiment's results lie, and what do they hold? One JSON file a scale: how they were made, and a line a run.

    experiments/results/e18_norm_and_skip.cpu.json
      {"experiment", "scale", "command", "versions", "frozen", "common", "measured": {name: rows}, "rows": [...]}

``common`` are the fields that all runs have alike, beside the defaults; a row's ``config`` holds the others.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.experiment import FOLDER, Experiment, Measured
from experiments.runs import Runs
from resjax.errors import Refused
from resjax.train.writers import to_json

PLACE = FOLDER / "results"
KEPT = (
    "cell", "fields", "status", "error", "outcome", "train_loss", "eval_loss", "first_loss", "last_loss", "steps",
    "seconds", "token_cosine", "spikes", "floors", "config", "curve", "profiles", "roles", "studies", "looks",
)  # fmt: skip
DIGITS = 6
PACKAGES = ("jax", "flax", "optax", "numpy", "scipy")


@dataclass(frozen=True)
class Results:
    """What is kept of an experiment at a scale.

    Attributes:
      about: how it was made.
      runs: what was trained.
      measured: what was measured without training, by name.
    """

    about: Mapping[str, Any]
    runs: Runs
    measured: Measured


def place(experiment: Experiment, scale: str) -> Path:
    """The committed file."""
    return PLACE / f"{experiment.stem}.{scale}.json"


def read(path: Path) -> Results:
    """What a file holds.

    Raises:
      Refused: it is missing, or none of ours.
    """
    try:
        whole = json.loads(path.read_text())
        common = whole.pop("common")
        rows = [row | {"config": common | row["config"]} if "config" in row else row for row in whole.pop("rows")]
        return Results(whole, Runs(rows), whole.pop("measured"))
    except FileNotFoundError:
        raise Refused(f"there is no '{path}'; python -m experiments.run makes it") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refused(f"'{path}' holds no results of an experiment") from None


def digest(found: Results) -> str:
    """SHA-256 of the rows and measurements, by which a figure says what it was drawn from."""
    text = json.dumps([list(found.runs), found.measured], sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write(path: Path, about: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], measured: Measured) -> None:
    """A file anew, whole or not at all; one that holds the same rows and measurements stays as it was made."""
    kept = [{name: row[name] for name in KEPT if name in row} for row in rows]
    configs = [row["config"] for row in kept if "config" in row]
    common = (
        {k: v for k, v in configs[0].items() if all(k in one and one[k] == v for one in configs)} if configs else {}
    )
    for row in kept:
        if "config" in row:
            row["config"] = {k: v for k, v in row["config"].items() if k not in common}
    lines = [_line(row) for row in kept]
    found = [f'"common": {_line(common)}', f'"measured": {_listed(measured)}', f'"rows": [\n{_joined(lines)}\n]']
    ending = ",\n".join(found) + "\n}\n"
    if path.exists() and path.read_text().endswith(ending):
        return
    parts = [f'"{name}": {_line(value)}' for name, value in about.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_text("{\n" + "".join(f"{part},\n" for part in parts) + ending)
    os.replace(whole, path)


def made_by(experiment: Experiment, scale: str, frozen: str) -> dict[str, Any]:
    """How results are made: the command, versions, the device, and the hash of what was frozen."""
    import jax

    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "experiment": experiment.name,
        "scale": scale,
        "command": f"python -m experiments.run {experiment.name} --scale={scale}",
        "versions": {"python": platform.python_version(), **versions, "commit": commit.stdout.strip() or None},
        "device": jax.devices()[0].device_kind,
        "frozen": frozen,
    }


def _line(value: Any) -> str:
    return json.dumps(rounded(to_json(value)), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def rounded(value: Any) -> Any:
    """A value as it is kept: numbers to ``DIGITS`` digits."""
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _joined(lines: list[str]) -> str:
    return ",\n".join(lines)


def _listed(measured: Measured) -> str:
    parts = [f"{json.dumps(name)}: [\n{_joined([_line(row) for row in rows])}\n]" for name, rows in measured.items()]
    return "{" + ",\n".join(parts) + "}"
