"""Is a collapse of the tokens told, and told from what only looks like one, by probes of streams as a step measures them?"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit import fast
from resjax.health.collapse import shared_offset
from resjax.health.diagnosis import Case, diagnose
from resjax.health.findings import examine
from resjax.health.probes import measure, measure_ranks, measure_tokens, ranks
from resjax.health.record import HealthRecord
from resjax.residual import Flow

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
