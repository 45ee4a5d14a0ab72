"""How long does each config file take, and how far below the bigram baseline does it end?

    python -m benchmarks.configs [NAME ...]       run them (all by default), one after the other, on an idle machine
    python -m benchmarks.configs --headers        write what was measured on top of the config files
    python -m benchmarks.configs --check RUN      is a finished run as the header of its config file says?

Each run goes through the command that its file names, in a temporary folder; results/configs.json keeps one row a
config. tests/test_config_headers.py keeps headers and rows together.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "configs.json"
NATS = 0.05  # how far a header's nats may be from a run's
TIMES = 2.0  # and by which factor its time
UNMEASURED = "to be measured"
HEADER = re.compile(r"^Expected:.*?(?=\n\n|\n?\"\"\")", re.DOTALL | re.MULTILINE)
SENTENCE = re.compile(
    r"about (?P<time>[\d.]+) (?P<unit>s|min) on (?P<cores>\d+) cores, "
    r"(?P<nats>[\d.]+) nats (?P<side>below|above) the bigram baseline"
)


class Expected(NamedTuple):
    """What a header says: seconds of the whole command, and nats per token below the bigram baseline of the run."""

    seconds: float
    nats: float


def names() -> list[str]:
    """The config files, by name."""
    return sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def header(name: str) -> str:
    """The paragraph of a config file that begins with 'Expected:', as one line.

    Raises:
      ValueError: it has none, or several.
    """
    found = HEADER.findall((ROOT / "configs" / f"{name}.py").read_text())
    if len(found) != 1:
        raise ValueError(f"configs/{name}.py has {len(found)} paragraphs that begin with 'Expected:'; it must have one")
    return " ".join(found[0].split())


def expected(name: str) -> Expected | None:
    """What the header of a config file says in numbers; None where it is still to be measured.

    Raises:
      ValueError: it says neither.
    """
    text = header(name)
    if UNMEASURED in text:
        return None
    match = SENTENCE.search(text)
    if not match:
        raise ValueError(f"configs/{name}.py says '{text}', which is not of the form '{sentence(240.0, 0.3, 2)}'")
    seconds = float(match["time"]) * (60 if match["unit"] == "min" else 1)
    return Expected(seconds, float(match["nats"]) * (1 if match["side"] == "below" else -1))


def sentence(seconds: float, nats: float, cores: int) -> str:
    """The header of a config that took so long and ended so far below the bigram baseline."""
    fives, halves = max(5, 5 * round(seconds / 5)), round(2 * seconds / 60) / 2
    spent = f"{fives} s" if seconds < 90 else f"{halves:g} min"
    side = "below" if nats >= 0 else "above"
    return f"Expected: about {spent} on {cores} cores, {abs(nats):.2f} nats {side} the bigram baseline that it prints."


def disagreements(name: str, nats: float, seconds: float | None = None) -> list[str]:
    """In which ways a run is not what its config's header says; empty where it is, or where nothing is said yet."""
    said = expected(name)
    if said is None:
        return []
    found = []
    if not abs(nats - said.nats) <= NATS:
        found.append(
            f"configs/{name}.py says {said.nats:+.2f} nats below the bigram baseline; a run ends at {nats:+.3f}"
        )
    if seconds is not None and not 1 / TIMES <= seconds / said.seconds <= TIMES:
        found.append(f"configs/{name}.py says {said.seconds:g} s; a run takes {seconds:.0f} s")
    return found


def nats_below(folder: Path) -> float:
    """Of a finished run: bigram baseline minus held-out loss."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["baselines"]["bigram"] - summary["eval_loss"]


def measure(name: str) -> dict[str, Any]:
    """Run a config as its file says; the row to keep."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        command = [sys.executable, "-m", "resjax.main", f"--config=configs/{name}.py", f"--workdir={folder}"]
        began = time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True)
        seconds = time.monotonic() - began
        summary = json.loads((folder / "summary.json").read_text())
        facts = json.loads((folder / "config.json").read_text())
        return {
            "date": datetime.date.today().isoformat(),
            "commit": facts["git_commit"],
            "machine": f"{platform.system()} {platform.machine()}",
            "cores": cores(),
            "versions": facts["versions"],
            "corpus_sha256": facts["corpus"]["sha256"],
            "steps": summary["steps"],
            "seconds": round(seconds, 1),
            "compile_seconds": round(summary["compile_seconds"], 1),
            "tokens_per_s": round(summary["tokens_per_s"]),
            "eval_loss": round(summary["eval_loss"], 4),
            "bigram": round(summary["baselines"]["bigram"], 4),
            "nats_below_bigram": round(nats_below(folder), 4),
            "verdict": summary["health"]["verdict"],
        }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read() -> dict[str, dict[str, Any]]:
    """The rows by config; empty where nothing was measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(rows: Mapping[str, Any]) -> None:
    """Put ``rows`` among those that are kept already."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(read() | rows, indent=2, sort_keys=True) + "\n")


def write_headers() -> None:
    """Say on top of the config files what was measured."""
    for name, row in read().items():
        path = ROOT / "configs" / f"{name}.py"
        text = textwrap.fill(sentence(row["seconds"], row["nats_below_bigram"], row["cores"]), 118)
        path.write_text(HEADER.sub(lambda _, text=text: text, path.read_text()))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.configs", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--headers", action="store_true", help="write the results into the config files")
    parser.add_argument("--check", metavar="RUN", help="compare a finished run, in a folder with its config's name")
    arguments = parser.parse_args(words)
    if arguments.check:
        folder = Path(arguments.check)
        nats = nats_below(folder)
        found = disagreements(folder.name, nats)
        print("\n".join(found) or f"{folder}: {nats:+.3f} nats below the bigram baseline; {header(folder.name)}")
        return 1 if found else 0
    if unknown := sorted(set(arguments.names) - set(names())):
        parser.error(f"there is no config '{unknown[0]}'; there are {', '.join(names())}")
    if arguments.headers:
        write_headers()
        return 0
    for name in arguments.names or names():
        row = measure(name)
        keep({name: row})
        print(f"{name}: {sentence(row['seconds'], row['nats_below_bigram'], row['cores'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
