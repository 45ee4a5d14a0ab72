"""Is every number of a run strict JSON, complete, and the same when read back, also after a kill or a full disk?"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from resjax.errors import Refused
from resjax.train.writers import (
    JsonlWriter,
    MemoryWriter,
    MultiWriter,
    TensorBoardWriter,
    parse,
    read_json,
    read_metrics,
    to_json,
    write_json,
)

ROOT = Path(__file__).parent.parent


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or a == b


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5])
def test_non_finite_numbers_survive_strict_json_in_every_type(tmp_path, kind, value):
    """A41: strict parsers read every line, and the meaning comes back."""
    path = tmp_path / "metrics.jsonl"
    given = jnp.asarray(value, kind) if kind in (jnp.bfloat16, jnp.float32) else kind(value)
    writer, memory = JsonlWriter(path), MemoryWriter()
    MultiWriter(writer, memory).scalars(np.int32(3), {"loss": given, "list": [given], "nested": {"x": given}})
    line = path.read_text()
    assert line.endswith("}\n") and line.count("\n") == 1

    def refuse(constant):
        raise AssertionError(constant)

    raw = json.loads(line, parse_constant=refuse)
    assert raw["loss"] == (value if math.isfinite(value) else {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(value)])
    for row in (*read_metrics(path), *memory.rows):
        assert row["step"] == 3 and all(same(x, value) for x in (row["loss"], row["list"][0], row["nested"]["x"]))
    writer.close()


def test_to_json_keeps_kinds_and_digits():
    row = to_json(
        {
            "i": np.int64(2**40),
            "b": np.bool_(True),
            "j": jnp.asarray(7, jnp.int32),
            "f": np.float32(0.1),
            "a": np.asarray([[1.0, math.nan]]),
            "t": (1, None, "x"),
            "p": Path("a/b"),
        }
    )
    assert json.loads(json.dumps(row)) == {
        "i": 2**40, "b": True, "j": 7, "f": float(np.float32(0.1)),
        "a": [[1.0, "nan"]], "t": [1, None, "x"], "p": "a/b",
    }  # fmt: skip
    assert type(row["b"]) is bool and type(row["j"]) is int
    for bad in ({1: 2}, {"x": object()}, {"x": {3}}):
        with pytest.raises(TypeError):
            to_json(bad)


def test_parse_refuses_what_only_python_accepts():
    for text in ("NaN", "[Infinity]", '{"a": -Infinity}', "{"):
        with pytest.raises(ValueError):
            parse(text)


def test_a_reopened_file_goes_on_and_loses_only_the_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2):
        writer.scalars(step, {"loss": step / 2})
    writer.close()
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    writer = JsonlWriter(path)
    writer.scalars(3, {"loss": 1.5})
    writer.flush()
    writer.close()
    assert [row["loss"] for row in read_metrics(path)] == [0.5, 1.0, 1.5]
    path.write_text('{"step": 1}\n{"step": NaN}\n')
    with pytest.raises(Refused, match=r"line 2 of .* is not strict JSON"):
        read_metrics(path)


def test_drop_after_rewrites_every_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    jsonl, memory, board = JsonlWriter(path), MemoryWriter(), TensorBoardWriter(tmp_path)
    writers = MultiWriter(jsonl, memory, board)
    for step in range(1, 6):
        writers.scalars(step, {"loss": float(step)})
    writers.scalars(5, {"eval_loss": 5.5})
    writers.drop_after(3)
    assert [row["step"] for row in read_metrics(path)] == [row["step"] for row in memory.rows] == [1, 2, 3]
    writers.scalars(4, {"loss": 40.0})
    writers.flush()
    writers.close()
    assert [row["loss"] for row in read_metrics(path)] == [1.0, 2.0, 3.0, 40.0]
    assert read_metrics(path) == memory.rows
    assert sorted(p.name[:6] for p in tmp_path.iterdir()) == ["events", "events", "metric"]


def test_drop_after_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(4):
        writer.scalars(step, {})
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        writer.drop_after(1)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]
    writer.scalars(4, {})
    assert len(read_metrics(path)) == 5
    writer.close()


def test_a_full_disk_leaves_whole_lines_and_the_old_json(tmp_path):
    path, config = tmp_path / "metrics.jsonl", tmp_path / "config.json"
    write_json(config, {"old": 1})
    writer = JsonlWriter(path)
    writer.scalars(1, {"text": "x" * 500})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, limits[1]))
    try:
        with pytest.raises(OSError):
            writer.scalars(2, {"text": "y" * 500})
        with pytest.raises(OSError):
            write_json(config, {"new": "z" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.scalars(3, {})
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    assert read_json(config) == {"old": 1}
    assert sorted(os.listdir(tmp_path)) == ["config.json", "metrics.jsonl"]


def test_rows_are_in_the_file_before_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys\nfrom resjax.train.writers import JsonlWriter\nw = JsonlWriter(sys.argv[1])\n"
        "for step in range(10**9):\n    w.scalars(step, {'loss': 1.0})\n    print(step, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "0\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    last = [0, *map(int, process.stdout.read().split("\n")[:-1])][-1]
    process.stdout.close()
    process.wait()
    JsonlWriter(path).close()
    steps = [row["step"] for row in read_metrics(path)]
    assert steps == list(range(len(steps))) and len(steps) > last


def test_write_json_round_trip(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"train_loss": jnp.asarray(jnp.nan), "steps": np.int32(3), "name": "αβ", "lr": 1e-300})
    text = path.read_text()
    assert parse(text)["train_loss"] == "nan" and "αβ" in text and text.endswith("}\n")
    back = read_json(path)
    assert math.isnan(back.pop("train_loss")) and back == {"steps": 3, "name": "αβ", "lr": 1e-300}
    assert os.listdir(tmp_path) == ["summary.json"]


def events(folder):
    """(step, tag, value) and session starts of all event files, in the order of their names."""
    out = []
    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.HasField("session_log"):
                out.append(("start", event.step))
            out += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return out


def test_tensorboard_gets_every_number_and_the_purge_step(tmp_path):
    board = TensorBoardWriter(tmp_path)
    board.scalars(1, {"loss": jnp.asarray(2.5, jnp.bfloat16), "lr": 0.25, "note": "text", "finite": np.bool_(True)})
    board.scalars(np.int64(2), {"loss": math.inf})
    board.close()
    board = TensorBoardWriter(tmp_path, purge_step=2)  # within the same second: another file all the same
    board.scalars(2, {"loss": 2.0})
    board.flush()
    assert events(tmp_path) == [
        (1, "loss", 2.5), (1, "lr", 0.25), (1, "finite", 1.0), (2, "loss", math.inf), ("start", 2), (2, "loss", 2.0),
    ]  # fmt: skip
    board.close()


def test_tensorboard_on_a_full_disk_raises_and_does_not_hang(tmp_path):
    board = TensorBoardWriter(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError):
            for step in range(1000):
                board.scalars(step, {"loss": 1.0})
                board.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    board.close()
