"""What does a run leave behind, on request and at its end? The table by depth, report.html, summary.json."""

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from resjax.data import Corpus
from resjax.health.findings import examine, located
from resjax.health.record import HealthRecord
from resjax.health.report import write_report
from resjax.health.table import print_health
from resjax.train.leaves import tree_hash
from resjax.train.program import Programs
from resjax.train.runfolder import RunFolder
from resjax.train.state import TrainState
from resjax.train.writers import read_metrics, write_json

SUMMED_ROWS = 10  # rows of metrics.jsonl that the summary's training loss is the mean of


def against_bigram(corpus: Corpus, loss: float) -> str:
    """How far a held-out loss is from the bigram baseline: whether anything was learnt beyond the previous token."""
    gap = corpus.baselines.bigram - loss
    return f"{abs(gap):.3f} {'below' if gap > 0 else 'above'} the bigram baseline"


def report(folder: RunFolder, config: Any, stream_dtype: str, health: Mapping[str, Any] | None = None) -> str:
    """Print the table by depth and write report.html from what the folder holds; returns a line that names the file.

    ``health`` is the verdict, if it is known.
    """
    record = HealthRecord.load(folder.health)
    print_health(record, health or examine(record, config.to_dict(), stream_dtype), config.residual.name)
    return f"report: {write_report(folder.path)}"


def summarize(
    folder: RunFolder,
    config: Any,
    corpus: Corpus,
    programs: Programs,
    state: TrainState,
    status: str,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Write summary.json and return what it holds.

    Args:
      status: 'finished' or 'nonfinite'.
      more: further entries; 'nonfinite' also goes into the findings.
    """
    rows = read_metrics(folder.metrics)
    losses = [row["loss"] for row in rows if "loss" in row]
    evaluations = [row["eval_loss"] for row in rows if "eval_loss" in row]
    speeds = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
    record = HealthRecord.load(folder.health)
    health = examine(record, config.to_dict(), programs.stream_dtype, losses, corpus.baselines.bigram)
    summary = {
        "status": status,
        "steps": int(state.step),
        "train_loss": fmean(losses[-SUMMED_ROWS:]) if losses else None,
        "eval_loss": evaluations[-1] if evaluations else None,
        "baselines": corpus.baselines.as_dict(),
        "tokens_per_s": median(speeds) if speeds else None,
        "compile_seconds": programs.seconds,
        "param_hash": tree_hash(state.params),
        "stream_dtype": programs.stream_dtype,
        "health": located(health, more.get("nonfinite")),
        **more,
    }
    write_json(folder.summary, summary)
    return summary
