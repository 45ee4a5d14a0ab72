"""What becomes of every scheme on the Markov text? The best of three rates, then five seeds; docs/outcomes.md.

    python -m benchmarks.outcomes [NAME ...]         train what is not done yet, then write the table
    python -m benchmarks.outcomes --share=1/2        the same for every second scheme: one process a core
    python -m benchmarks.outcomes --table            write the table from results/outcomes.json

24 blocks of width 32 on windows of 32 symbols, batch 16, 600 steps of AdamW; seven or eight runs a scheme. Pre-LN takes 30 s a run on
one core, and a second core for the same run gains nothing. Stopped and given again it goes on; what ended is kept in
benchmarks/results/outcomes.json, so that it can be done in pieces.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from resjax.residual import CATALOGUE
from resjax.residual.entries import FORMS
from resjax.train.writers import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "outcomes.json"
PAGE = ROOT / "docs" / "outcomes.md"
RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1, 2, 3, 4)
SQRT_WIDTH = 32**0.5
HIGHWAYS = "benchmarks/schemes_outcomes.py"
Plan = tuple[dict[str, Any], tuple[float, ...]]  # fields, and rates to choose from
TRIED: dict[str, Plan] = {  # what could mend a scheme that did not train
    **{
        f"{name}+embeddings": ({"residual.name": name, "init.embed_gain": SQRT_WIDTH}, RATES)
        for name in ("dyt", "derf")
    },
    "highway+bias-3": ({"residual.name": f"{HIGHWAYS}:HIGHWAY_3"}, RATES),
    "highway+bias-4": ({"residual.name": f"{HIGHWAYS}:HIGHWAY_4"}, RATES),
    "highway+bias-3+embeddings": ({"residual.name": f"{HIGHWAYS}:HIGHWAY_3", "init.embed_gain": SQRT_WIDTH}, RATES),
    "b2t+lower-rates": ({"residual.name": "b2t"}, RATES[:2]),
}
WHY = {  # why some seeds of these schemes do not end trained: expected, or a fault that was mended
    "`plain`": "Expected: without skips all tokens become the same, and the model learns only how frequent symbols are.",
    "`b2t`": "A Post-LN scheme at the edge of the rates that it can bear: one seed of five collapses at 1e-2, none at 3e-3.",
    "`dyt`, `derf`": "They replace every norm by a function of each number, so that nothing brings a stream that starts small (RMS 0.25 "
    "at width 32) to the size at which the function bends. The authors scale the embeddings of language models up by sqrt(width); with "
    "init.embed_gain at sqrt(32) all seeds of both train, and neither collapses at 1e-2 any more.",
    "`highway`": "No norm either, and a carry of 0.88 a site at b = -2, so that 0.2 % of the embedding arrives after 48 sites; its authors "
    "want a lower b for a deeper stack. From b = -3 most seeds reach the bigram line, b = -4 is no better; with the embeddings scaled up "
    "too all train. At 1e-2 every form leaves the numbers.",
}
KEPT = ("outcome", "train_loss", "eval_loss", "last_loss", "seconds", "error")
CONFIG = """
from resjax.config import default


def get_config():
    config = default()
    config.data.source, config.data.length, config.data.batch = "markov", 32, 16
    config.model.depth, config.model.width, config.model.heads = 24, 32, 4
    config.train.steps, config.train.eval_every, config.train.eval_batches = 600, 0, 16
    config.health.every = 100
    return config


def sweep():
    return {cells!r}
"""


def schemes() -> dict[str, dict[str, str]]:
    """Every entry and form, by label: the fields that choose it."""
    found = {}
    for name, scheme in CATALOGUE.items():
        for form, made in FORMS.get(name, {"": scheme}).items():
            plain = made == scheme
            found[name if plain else f"{name}:{form}"] = {"residual.name": name} | (
                {} if plain else {"residual.form": form}
            )
    return found


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def merged(label: str, found: dict[str, Any]) -> None:
    """Put the cells of one scheme into the results file, whoever else writes to it."""
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read()
        rows[label] = rows.get(label, {}) | found
        whole = RESULTS.with_suffix(".new")
        whole.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        os.replace(whole, RESULTS)


def train(label: str, fields: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    """Train the cells of one scheme that are not kept yet, and keep them."""
    done = read().get(label, {})
    left = [cell for cell in cells if key(cell) not in done]
    if not left:
        return
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "outcomes.py"
        config.write_text(CONFIG.replace("{cells!r}", repr([fields | cell for cell in left])))
        # the second call, for the seeds, finds the program of the first
        cached = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "resjax_outcomes_programs")
        }
        command = [sys.executable, "-m", "resjax.sweep", f"--config={config}", f"--workdir={place}/sweep"]
        subprocess.run(command, cwd=ROOT, env=cached, check=False, stdout=subprocess.DEVNULL)
        lines = read_metrics(Path(place) / "sweep" / "results.jsonl")
        cells_of = {key(line["fields"]): {name: line.get(name) for name in KEPT} for line in lines}
        merged(label, cells_of)


def key(cell: dict[str, Any]) -> str:
    return f"lr={cell['optimizer.lr']:g},seed={cell['seed']}"


def best(rows: dict[str, Any]) -> float | None:
    """The rate with the lowest held-out loss at the first seed; None where none ended finite."""
    losses = {rate: rows.get(key({"optimizer.lr": rate, "seed": 0}), {}).get("eval_loss") for rate in RATES}
    finite = {rate: loss for rate, loss in losses.items() if known(loss)}
    return min(finite, key=finite.__getitem__) if finite else None


def known(loss: Any) -> bool:
    return isinstance(loss, float) and isfinite(loss)


def page(rows: dict[str, Any]) -> str:
    """The table: of each scheme its best rate, the outcomes of its seeds there, and the median held-out loss."""
    lines = [
        "# What becomes of every scheme on the Markov text",
        "",
        "Made by `python -m benchmarks.outcomes` from [the numbers](../benchmarks/results/outcomes.json). 24 blocks of width 32, "
        "windows of 32 symbols, batch 16, 600 steps; the best of the rates 1e-3, 3e-3 and 1e-2 at one seed, then five seeds. "
        "A model that sees no context cannot go below 2.845 nats, one that sees a symbol below 2.326, none below 1.787. "
        "Classes: trained (below 2.326 by more than 0.03), bigram (there), collapsed (at 2.845 with equal tokens), diverged, "
        "nonfinite, partial (anything else).",
        "",
        *head("scheme"),
    ]
    lines += [row(label, rows) for label in schemes()]
    lines += ["", "## Those that do not all end trained", ""]
    lines += [line for names, why in WHY.items() for line in (f"**{names}.** {why}", "")]
    lines += head("what was tried")
    lines += [row(label, rows) for label in TRIED]
    return "\n".join([*lines, ""])


def head(first: str) -> list[str]:
    """The head of a table."""
    return [
        f"| {first} | best rate | outcomes of the seeds | held-out loss, median | smallest to largest |",
        "|---|---|---|---|---|",
    ]


def row(label: str, rows: dict[str, Any]) -> str:
    """The line of a scheme in a table."""
    return f"| `{label}` | {' | '.join(summary(rows.get(label, {})))} |"


def unexplained(rows: dict[str, Any]) -> list[str]:
    """The schemes of which some run at the best rate does not end trained, or none ends finite, and of which nothing is said."""
    said = ", ".join(WHY)
    return [label for label in schemes() if label in rows and f"`{label}`" not in said and not trains(rows[label])]


def trains(mine: dict[str, Any]) -> bool:
    """Whether every seed at the best rate ends trained."""
    rate = best(mine)
    return rate is not None and all(seen["outcome"] == "trained" for seen in at(mine, rate))


def at(mine: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """The runs at a rate, by seed."""
    return [mine[k] for seed in SEEDS if (k := key({"optimizer.lr": rate, "seed": seed})) in mine]


def summary(mine: dict[str, Any]) -> tuple[str, str, str, str]:
    """Of one scheme the best rate, the outcomes of the seeds there, the median loss and its range."""
    rate = best(mine)
    if rate is None:
        return "-", ", ".join(sorted({row["outcome"] or "?" for row in mine.values()})) or "not run yet", "-", "-"
    seeds = at(mine, rate)
    losses = [row["eval_loss"] for row in seeds if known(row["eval_loss"])]
    names = [row["outcome"] or "?" for row in seeds]
    counted = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    return f"{rate:g}", counted, f"{statistics.median(losses):.3f}", f"{min(losses):.3f} to {max(losses):.3f}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outcomes", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="every N-th scheme, from the K-th")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args(words)
    every = {label: (fields, RATES) for label, fields in schemes().items()} | TRIED
    if unknown := sorted(set(arguments.names) - set(every)):
        parser.error(f"there is no scheme '{unknown[0]}'; there are {', '.join(every)}")
    first, _, every_so_many = arguments.share.partition("/")
    if not (first.isdigit() and every_so_many.isdigit() and 1 <= int(first) <= int(every_so_many)):
        parser.error(f"--share is '{arguments.share}', which is not k/n with k from 1 to n, such as 1/2")
    chosen = [label for label in every if not arguments.names or label in arguments.names]
    for label in [] if arguments.table else chosen[int(first) - 1 :: int(every_so_many)]:
        fields, rates = every[label]
        train(label, fields, [{"optimizer.lr": rate, "seed": 0} for rate in rates])
        if (rate := best(read().get(label, {}))) is not None:
            train(label, fields, [{"optimizer.lr": rate, "seed": seed} for seed in SEEDS])
        print(f"{label}: {summary(read().get(label, {}))}", flush=True)
    PAGE.write_text(page(read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
