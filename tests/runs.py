"""What do the tests of whole runs share? A tiny configuration, quick runs here and in other processes, looks inside."""

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kit import quick_options
from resjax import data, main
from resjax.config.entry import source as scheme_source
from resjax.config.tree import flat
from resjax.health.record import HealthRecord
from resjax.train import rebuild, session
from resjax.train.assemble import assemble
from resjax.train.checkpoint import Checkpoints
from resjax.train.program import Programs, StepProgram, compile_programs, compile_step
from resjax.train.writers import read_json, read_metrics

ROOT = Path(__file__).parent.parent
STEPS = 20
TINY = """
from resjax.config import default

def get_config():
    config = default()
    config.data.source, config.data.length, config.data.batch = "markov", 16, 4
    config.model.depth, config.model.width, config.model.heads = 2, 8, 2
    config.train.steps, config.train.log_every = 20, 1
    config.train.eval_every, config.train.eval_batches = 5, 2
    config.train.save_every, config.train.keep = 5, 30
    config.health.every = 3
"""
CHANCE = """
    config.model.dropout, config.residual.drop_path, config.train.accumulate = 0.2, 0.1, 2
"""
CACHE = Path(tempfile.gettempdir()) / f"resjax-tests-{os.getpid()}"  # of compiled programs, for this test session
OPTIONS = {
    "jax_disable_most_optimizations": True,
    "jax_compilation_cache_dir": str(CACHE),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
# What a run is assembled of and its programs, by all that they depend on: compiled once in a test session.
KNOWN: dict[tuple, Any] = {}
ASIDE = ("train.save_every", "train.keep", "train.log_every", "train.eval_every", "train.eval_batches", "health.every")


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Programs compile quickly, and the same one once; the Markov text is drawn once.

    Tests that change the code of a step ask for :func:`compiled_anew`.
    """
    before = {name: jax.config.values[name] for name in OPTIONS}
    for name, value in OPTIONS.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    compile_ = jax.stages.Lowered.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_markov", functools.partial(once, data._markov))
        patch.setattr(jax.stages.Lowered, "compile", lambda lowered: compile_(lowered, quick_options()))
        patch.setattr(session, "assemble", lambda config, vocab: replace(known(assemble, config, vocab), config=config))
        patch.setattr(session, "compile_programs", lambda parts, state: known(programs, parts.config, parts))
        patch.setattr(rebuild, "assemble", lambda config, vocab: replace(known(assemble, config, vocab), config=config))
        patch.setattr(rebuild, "compile_step", lambda parts, *_: known(step_alone, parts.config, parts))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Nothing that was assembled or compiled before is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "KNOWN", {})
        yield


def once(make: Callable[..., Any], *arguments: Any) -> Any:
    """``make(*arguments)``, made once."""
    key = (make, *arguments)
    if key not in KNOWN:
        KNOWN[key] = make(*arguments)
    return KNOWN[key]


def known(make: Callable[..., Any], config: Any, *arguments: Any) -> Any:
    """``make(...)``, made once for all configurations that differ only in what no program depends on."""
    key = key_of(make, config)
    if key not in KNOWN:
        KNOWN[key] = make(config, *arguments)
    return KNOWN[key]


def key_of(make: Callable[..., Any], config: Any) -> tuple:
    fields = {path: value for path, value in flat(config).items() if path not in ASIDE}
    own_scheme = scheme_source(config) if ".py" in config.residual.name else None
    return make, repr(fields), repr(own_scheme)


def programs(config: Any, parts: Any) -> Programs:
    del config
    return compile_programs(parts, parts.abstract)


def step_alone(config: Any, parts: Any) -> StepProgram:
    """The step; that of a run, if it was compiled."""
    return KNOWN.get(key_of(programs, config)) or compile_step(parts, parts.abstract)


def calm(folder: Path) -> Path:
    """The tiny configuration, as a file in ``folder``, without chance and accumulation: compiled in half the time."""
    path = folder / "calm.py"
    path.write_text(TINY + "    return config\n")
    return path


def tiny(folder: Path) -> Path:
    """The tiny configuration, as a file in ``folder``, with dropout, stochastic depth and accumulation."""
    path = folder / "tiny.py"
    path.write_text(TINY + CHANCE + "    return config\n")
    return path


def words(config: Path, workdir: Path | str, *options: str, **fields: Any) -> list[str]:
    """A command line; ``train__steps=3`` is --config.train.steps=3."""
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]
    return [f"--config={config}", f"--workdir={workdir}", *options, *flags]


def run(config: Path, workdir: Path | str, *options: str, **fields: Any) -> int:
    """The command in this process."""
    return main.main(words(config, workdir, *options, **fields))


@contextlib.contextmanager
def at_batch(number: int, act: Callable[[], None]) -> Iterator[None]:
    """``act`` when the training batch ``number`` (from 1) of this session goes to the devices: before that step."""
    original, seen = Programs.batch, []

    def batch(self: Programs, tokens: np.ndarray) -> jax.Array:
        seen.append(tokens)
        if len(seen) == number:
            act()
        return original(self, tokens)

    Programs.batch = batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        Programs.batch = original  # type: ignore[method-assign]


def stopped(config: Path, workdir: Path, after: int, *options: str, number: int = signal.SIGTERM, **fields: Any) -> int:
    """The command in this process, told by a signal to stop after so many steps of this session."""
    with at_batch(after, lambda: os.kill(os.getpid(), number)):
        return run(config, workdir, *options, **fields)


@contextlib.contextmanager
def recorded_batches() -> Iterator[list[int]]:
    """Hashes of the training batches, in the order in which they are used."""
    original, seen = Programs.batch, []

    def batch(self: Programs, tokens: np.ndarray) -> jax.Array:
        seen.append(hashlib.sha256(tokens.tobytes()).hexdigest()[:8])
        return original(self, tokens)

    Programs.batch = batch  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Programs.batch = original  # type: ignore[method-assign]


def fill(place: Path, leave: int = 0) -> None:
    """Fill a file system up, to ``leave`` bytes."""
    with open(place / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() - leave))


# ------------------------------------------------------------------ other processes


def environment(quick: bool = True, flags: str = "", **more: str) -> dict[str, str]:
    """Variables for another process; ``quick`` as above, ``flags`` for XLA."""
    options = {}
    if quick:
        options = {name.upper(): str(value) for name, value in OPTIONS.items()}
        flags += "".join(f" --{name}={str(value).lower()}" for name, value in quick_options().items())
    base = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200", "XLA_FLAGS": flags}
    return {**os.environ, **base, **options, **more}


COMMAND = (str(ROOT / "tests" / "command.py"),)  # with a short Markov text
REAL = ("-m", "resjax.main")


def start(
    *arguments: Any, environ: dict[str, str] | None = None, script: tuple[str, ...] = COMMAND, **options: Any
) -> subprocess.Popen:
    """The command in a process of its own, its output piped together."""
    return subprocess.Popen(
        [sys.executable, *script, *map(str, arguments)],
        env=environ or environment(),
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.STDOUT),
        text=True,
        **options,
    )


def command(
    *arguments: Any, environ: dict[str, str] | None = None, script: tuple[str, ...] = COMMAND, timeout: float = 240
) -> subprocess.CompletedProcess:
    """The command in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, *script, *map(str, arguments)],
        env=environ or environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def until(process: subprocess.Popen, word: str) -> list[str]:
    """The lines of a process up to the first that contains ``word``."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"'{word}' was never said:\n{''.join(lines)}")


# ------------------------------------------------------------------ what a folder holds


def rows(folder: Path, kind: str = "loss") -> list[dict[str, Any]]:
    """The rows that hold ``kind``, without what is measured in seconds."""
    found = [row for row in read_metrics(folder / "metrics.jsonl") if kind in row]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in found]


def summary(folder: Path) -> dict[str, Any]:
    return read_json(folder / "summary.json")


def steps(folder: Path) -> list[int]:
    """The saved steps."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


def state_hash(folder: Path, step: int) -> str:
    """Of a saved state: parameters, moments, step, place in the data, random key, loss scale."""
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        return checkpoints.meta(step)["hash"]
    finally:
        checkpoints.close()


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a saved state, by path; read whole, so that damage shows."""
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        return checkpoints._read_arrays(step, checkpoints._read_meta(step))
    finally:
        checkpoints.close()


def health(folder: Path) -> dict[str, np.ndarray]:
    record = HealthRecord.load(folder / "health")
    assert not record.notes
    return {"steps": record.steps, **{name: record[name] for name in record}}


def files(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file and folder: when changed, and hash of its content."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Bit for bit, NaN included."""
    return a.keys() == b.keys() and all(
        np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f") for name in a
    )
