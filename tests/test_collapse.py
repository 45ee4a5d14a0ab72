"""Is a collapse of the tokens told, and told from what only looks like one, by probes of streams as a step measures them?"""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit import fast
from resjax import watch
from resjax.checkup import case_of
from resjax.config import default
from resjax.config.validate import resolve
from resjax.health.collapse import shared_offset
from resjax.health.comparison.side import Side
from resjax.health.diagnosis import Case, diagnose, recorded
from resjax.health.diagnosis.case import recorded_in
from resjax.health.findings import examine
from resjax.health.probes import measure, measure_ranks, measure_tokens, ranks
from resjax.health.record import HealthRecord
from resjax.health.report import page as report_page
from resjax.residual import Flow
from resjax.sweeps.one import SoFar, close
from resjax.train.closing import summarize
from resjax.train.runfolder import RunFolder
from resjax.train.writers import read_json, write_json

DEPTH, BATCH, TOKENS, WIDTH = 6, 2, 16, 8
SHARE = np.linspace(1, 0, DEPTH)  # of what sets the tokens apart, by block


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape or (DEPTH, BATCH, TOKENS, WIDTH))


@cache
def measured(dtype: str, tokens: int):
    """The forward, token and rank probes of one stream after the other; a program for each form."""

    def probes(stream):
        flow = Flow(stream, stream, None, None, stream, None)
        found = measure_ranks(flow)
        return measure(flow) | measure_tokens(flow) | ranks(*found.values())

    return fast(lambda streams: jax.lax.map(probes, streams))


def record_of(streams: np.ndarray, dtype: str = "float32", only: tuple[str, ...] = ()) -> HealthRecord:
    """Twice the probes of streams (depth, batch, tokens, width); of ``only`` these names where some are given."""
    found = measured(dtype, streams.shape[2])(jnp.asarray(streams, dtype))
    row = {name: np.asarray(values)[:, None] for name, values in found.items() if not only or name in only}
    record = HealthRecord()
    for step in (1, 2):
        record.append(step, row)
    return record


def kinds(record: HealthRecord, dtype: str = "float32") -> list[str]:
    return [one["kind"] for one in examine(record, {"model": {"width": WIDTH}}, dtype)["findings"]]


def each_its_own() -> np.ndarray:
    """The tokens of each sequence fall onto a mean of their own."""
    return noise(1, BATCH, 1, WIDTH) + np.maximum(SHARE, 0.05)[:, None, None, None] ** 3 * noise()


def on_one_line() -> np.ndarray:
    """What sets the tokens apart falls onto one direction."""
    along = noise(1, BATCH, TOKENS, 1) * noise(WIDTH)
    return along + 0.01 * noise(1, BATCH, 1, WIDTH) + (SHARE[:, None, None, None] ** 2 + 1e-6) * noise()


def one_token_apart() -> np.ndarray:
    """A massive activation: one element of one token outweighs all others, from block 2 on."""
    streams = noise()
    streams[2:, 0, 0, 3] = 3e3
    return streams


def padded() -> np.ndarray:
    streams = noise()
    streams[:, :, TOKENS // 2 :] = noise(WIDTH)
    return streams


def with_rows(value: float, blocks: slice = slice(None), tokens: slice = slice(0, 2)) -> np.ndarray:
    streams = noise()
    streams[blocks, :, tokens] = value
    return streams


STREAMS = {
    "unlike tokens": (noise, "float32", []),
    "an offset that all share": (lambda: noise() + 20, "float32", []),
    "a huge offset": (lambda: noise() + 900, "float32", []),
    "the same of bfloat16": (lambda: noise() + 20, "bfloat16", []),
    "an offset that bfloat16 cannot see beside": (lambda: 1e-4 * noise() + 20, "bfloat16", ["token collapse"]),
    "identical tokens at the end": (lambda: with_rows(2.0, slice(3, None), slice(None)), "float32", ["token collapse", "rank collapse"]),
    "identical tokens throughout": (lambda: with_rows(2.0, tokens=slice(None)), "float32", ["token collapse"]),
    "each sequence onto its own mean": (each_its_own, "float32", ["token collapse"]),
    "onto one line": (on_one_line, "float32", ["rank collapse"]),
    "one huge element": (one_token_apart, "float32", []),
    "padding": (padded, "float32", []),
    "tokens of zeros": (lambda: with_rows(0.0), "float32", []),
    "nothing but zeros": (lambda: 0 * noise(), "float32", []),
    "zeros at the end": (lambda: with_rows(0.0, slice(4, None), slice(None)), "float32", ["rank collapse"]),
    "one token": (lambda: noise(DEPTH, BATCH, 1, WIDTH), "float32", []),
    "a token of NaN": (lambda: with_rows(np.nan, slice(3, None)), "float32", ["non-finite value"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_a_collapse_and_what_only_looks_like_one(name):
    streams, dtype, want = STREAMS[name]
    assert kinds(record_of(streams(), dtype), dtype) == want


def test_where_a_rank_collapses_since_when_and_by_how_much():
    streams = on_one_line()
    record = HealthRecord()
    for step, block in ((1, noise()), (2, streams), (3, streams)):
        seen = record_of(block)
        record.append(step, {name: seen[name][0] for name in seen})
    (found,) = examine(record)["findings"]
    assert found["kind"] == "rank collapse" and found["where"] == "block 5" and found["since"] == 2
    assert found["figure"] == "effective_rank" and found["value"] < 2 == found["range"][0]


def test_a_collapse_is_since_its_last_stretch_though_the_last_row_is_an_odd_one():
    record = HealthRecord()
    for step, cosine in enumerate((0.3, 0.99, 0.3, 0.99, 0.99, 0.99, 0.97), 1):
        record.append(step, {"token_cosine": np.full((4, 2), cosine), "finite": np.ones((4, 2))})
    (found,) = examine(record)["findings"]
    assert found["kind"] == "token collapse" and found["since"] == found["step"] == 4


RAW = ("token_cosine", "stream_max", "stream_rms", "finite")


def test_with_the_raw_cosine_alone_the_doubt_is_told():
    (found,) = examine(record_of(noise() + 20, only=RAW))["findings"]
    assert found["kind"] == "token collapse" and "was not measured" in found["evidence"]
    (sure,) = examine(record_of(each_its_own()))["findings"]
    assert "about their mean 1, 0.00015 of" in sure["evidence"] and "was not measured" not in sure["evidence"]


def state_of(streams: np.ndarray) -> dict[str, np.ndarray]:
    record = record_of(streams)
    return {name: record[name][-1] for name in record}


def test_what_a_run_did_not_record_is_asked_of_its_state():
    raw = record_of(noise() + 20, only=RAW)
    for state, want in ((noise() + 20, []), (each_its_own(), ["token collapse"])):
        found = diagnose(Case("run", raw, studies={"probes": state_of(state)}, state=2))
        assert [one.kind for one in found.findings] == want
        assert any("common offset" in note for note in found.case.notes) == (not want)
    quiet = record_of(noise(), only=RAW)
    (found,) = diagnose(Case("run", quiet, studies={"probes": state_of(on_one_line())}, state=2)).findings
    assert found.kind == "rank collapse" and found.step == found.since == 2


def test_a_loss_below_the_bigram_baseline_needs_tokens_apart():
    raw = record_of(noise() + 20, only=RAW)
    for last, want in ((2.0, []), (3.0, ["token collapse"])):
        rows = [{"step": i, "loss": loss} for i, loss in enumerate(np.linspace(5.0, last, 30), 1)]
        found = diagnose(Case("run", raw, rows=rows, summary={"baselines": {"bigram": 2.5}}))
        assert [one.kind for one in found.findings] == want
        assert any("below the bigram baseline" in note for note in found.case.notes) == (not want)


def test_no_offset_is_spoken_of_where_there_is_none():
    assert shared_offset(record_of(noise()), {}) == shared_offset(HealthRecord(), {}) == ""
    assert shared_offset(record_of(each_its_own()), {}) == ""
    told = shared_offset(record_of(noise() + 20), {})
    assert told.startswith("block 5") and "effective rank about the mean" in told


# ---- one verdict, whoever gives it


def ended(path: Path, record: HealthRecord, last: float) -> Path:
    """The folder of a run with these probes and with losses down to ``last``, the bigram baseline being 2.5, as its end leaves it."""
    folder, config = RunFolder(path), resolve(default(), "cpu")
    record.flush(folder.health)
    write_json(folder.path / "config.json", config.to_dict())
    rows = [{"step": i, "loss": loss} for i, loss in enumerate(np.linspace(5.0, last, 30).tolist(), 1)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    floors = SimpleNamespace(bigram=2.5, as_dict=lambda: {"bigram": 2.5})
    programs, state = SimpleNamespace(seconds=0.0, stream_dtype="float32"), SimpleNamespace(step=30, params={})
    summarize(folder, config, SimpleNamespace(baselines=floors), programs, state, "finished", {})
    return path


def verdicts(path: Path) -> dict[str, list[str]]:
    """Kinds of what each way finds that judges a run's folder, of what :func:`examine` looks for."""
    case = recorded_in(str(path))
    without = Side("run", replace(case, summary={"baselines": case.summary["baselines"]})).health()
    lines = re.findall(r"<li><h3>(.*?) <span>", report_page(path))
    return {
        "summary.json": [one["kind"] for one in case.summary["health"]["findings"]],
        "the doctor": [one.kind for one in recorded(case)],
        "a comparison": [one["kind"] for one in without["findings"]],
        "report.html": [line[:1].lower() + line[1:] for line in lines],
    }


@pytest.mark.parametrize(
    ("streams", "only", "last", "want"),
    [
        (lambda: noise() + 20, RAW, 2.0, []),
        (lambda: noise() + 20, RAW, 3.0, ["token collapse"]),
        (lambda: noise() + 20, (), 3.0, []),
        (each_its_own, (), 3.0, ["token collapse"]),
    ],
    ids=["loss below bigram", "nothing tells", "cosine about the mean tells", "a collapse"],
)
def test_of_the_same_facts_all_say_the_same(tmp_path, streams, only, last, want):
    found = verdicts(ended(tmp_path / "run", record_of(streams(), only=only), last))
    assert found == dict.fromkeys(found, want)
    closing = read_json(tmp_path / "run" / "summary.json")["health"]["findings"]
    assert all(
        ("was not measured" in one["evidence"] and "doctor" in one["advice"]) == (only == RAW) for one in closing
    )


@pytest.mark.parametrize(("last", "want"), [(2.0, []), (3.0, ["token collapse"])])
def test_a_cell_of_a_sweep_is_judged_as_a_run_is(last, want):
    config = resolve(default(), "cpu")
    seen = SoFar(config, losses=np.linspace(5.0, last, 30).tolist(), record=record_of(noise() + 20, only=RAW))
    seen.curve = [{"step": i, "loss": loss} for i, loss in enumerate(seen.losses, 1)]
    shared = SimpleNamespace(programs=lambda numbers: None, numbers=lambda config: None, stream_dtype="float32")
    looking = SimpleNamespace(wanted=None, shared=shared, pipeline=None, kept={})
    corpus = SimpleNamespace(baselines=SimpleNamespace(bigram=2.5, floors=None))
    row = close(SimpleNamespace(step=30), seen, looking, corpus, None, loss=last)
    assert row["health"]["findings"] == want


@pytest.mark.parametrize(
    ("last", "told", "want"), [(2.0, False, []), (3.0, True, []), (3.0, False, ["token collapse"])]
)
def test_a_log_of_another_model_knows_what_its_folder_holds(tmp_path, last, told, want):
    """Its losses and the baselines that it is closed with, and the studies that were kept."""
    row, folder = record_of(noise() + 20, only=RAW), tmp_path / "theirs"
    with watch.Log(folder, sites=("block",), width=WIDTH) as log:
        for step, loss in enumerate(np.linspace(5.0, last, 30), 1):
            log.write(step, {name: row[name][0] for name in row}, loss=loss)
        if told:
            log.studied(30, {"probes": state_of(noise() + 20)})
        summary = log.close(baselines={"bigram": 2.5})
    case = case_of(str(folder), studies=("probes",))
    ways = summary["health"], log.examine(), {"findings": [one.as_dict() for one in recorded(case)]}
    assert [[one["kind"] for one in way["findings"]] for way in ways] == [want] * 3
