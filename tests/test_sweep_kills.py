"""Is no cell lost, and none run twice, whenever a sweep is killed, also in the middle of a line?"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import pytest

import runs
from resjax.train.writers import parse

GRID = ("--no-figures", "--grid", "model.depth=1,2", "--grid", "optimizer.lr=1e-3,2e-3,3e-3,5e-3,7e-3,1e-2,2e-2,3e-2")
FIELDS = {"train__steps": 150, "health__groups": "none"}
CELLS, KILLS, PAUSE = 16, 6, 0.02
PATIENCE = 600  # seconds, on a busy machine


class Killed:
    """A sweep in processes that are killed.

    Args:
      seconds: that all its cells take.

    Attributes:
      results: its file of lines.
      chance: what decides on the moments; RESJAX_KILL_SEED sets its seed, which a test that fails prints.
    """

    def __init__(self, config, place, *options, seconds=0.0):
        seed = int(os.environ.get("RESJAX_KILL_SEED") or time.time_ns() % 2**32)
        print(f"RESJAX_KILL_SEED={seed} gives these moments again")
        self.chance = random.Random(seed)
        self.folder, self._begun = place / "sweep", place / "begun"
        self.results = self.folder / "results.jsonl"
        self._seconds = seconds
        self._words = runs.words(config, self.folder, *GRID, *options, **FIELDS)
        self._begun.touch()

    def start(self, pause=PAUSE):
        script = str(runs.ROOT / "tests" / "sweep_command.py")
        environ = runs.environment(BEGUN=str(self._begun), PAUSE=str(pause))
        return subprocess.Popen(
            [sys.executable, script, *self._words],
            env=environ, cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def content(self):
        return self.results.read_bytes() if self.results.exists() else b""

    def begun(self):
        """Process and cell of each beginning, in order."""
        return [tuple(line.split()) for line in self._begun.read_text().splitlines()]

    def until(self, process, found):
        """Wait until ``found()`` is true, or the sweep is over."""
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and not found():
            assert time.monotonic() < deadline, "the sweep goes no further"
            time.sleep(0.005)

    def kill_in_a_line(self, process):
        """The second one of this session, or the third."""
        wanted = self.content().count(b"\n") + 1 + self.chance.randrange(2)
        self.until(process, lambda: (text := self.content()).count(b"\n") >= wanted and text[-1:] not in b"\n")
        time.sleep(self.chance.uniform(0, 0.1))
        process.kill()

    def kill_at_a_moment(self, process):
        """After a cell has begun in this session, lest it take for ever, and within a quarter of them all."""
        before = len(self.begun())
        self.until(process, lambda: len(self.begun()) > before)
        end = time.monotonic() + self.chance.uniform(0, self._seconds / 4)
        self.until(process, lambda: time.monotonic() > end)
        process.kill()


def rows(text):
    return [parse(line) for line in text.splitlines()]


def alive(process):
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class Session:
    """What one process left, or came to.

    Attributes:
      code: its exit code, that of SIGKILL negative.
      before, after: whole lines of the results.
      torn: whether a piece of a line was behind them.
      begun: cells that it began.
      left: processes that went on without it.
    """

    code: int
    before: bytes
    after: bytes
    torn: bool
    begun: tuple[str, ...]
    left: frozenset[str]


def sessions(sweep):
    """Kill it at some moments, the last time let it come to its end."""
    text = b""
    for kill in range(KILLS + 1):
        before, already = text, len(sweep.begun())
        process = sweep.start(PAUSE if kill < KILLS else 0)
        if kill < KILLS:
            (sweep.kill_in_a_line, sweep.kill_at_a_moment)[kill % 2](process)
        out = process.communicate(timeout=PATIENCE)[0]
        print(out)
        deadline = time.monotonic() + 60
        while any(alive(process) for process, _ in sweep.begun()) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = frozenset(process for process, _ in sweep.begun() if alive(process))
        content = sweep.content()
        text = content[: content.rfind(b"\n") + 1]
        begun = tuple(cell for _, cell in sweep.begun()[already:])
        yield Session(process.returncode, before, text, content != text, begun, left)
        if process.returncode != -signal.SIGKILL:
            return


def numbers(rows):
    """What a cell came to, by its name."""
    return {
        row["cell"]: [row[name] for name in ("fields", "train_loss", "eval_loss", "last_loss", "outcome", "steps")]
        for row in rows
        if row["status"] == "done"
    }


@pytest.fixture(scope="module")
def undisturbed(calm, tmp_path_factory):
    """The lines of the cells without a kill."""
    sweep = Killed(calm, tmp_path_factory.mktemp("undisturbed"))
    process = sweep.start(pause=0)
    out = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, out
    return rows(sweep.content())


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--workers=2",)], ids=["one process", "two workers"])
def test_no_cell_is_lost_or_run_twice_whenever_the_sweep_is_killed(calm, tmp_path, undisturbed, options):
    if options:
        pytest.importorskip("ray")
    seconds = sum(row["seconds"] + 10 * PAUSE for row in undisturbed)
    sweep, torn, kills, code = Killed(calm, tmp_path, *options, seconds=seconds), 0, 0, None
    some_done = False
    for session in sessions(sweep):
        assert session.after.startswith(session.before), "a line has changed, or is gone"
        ended = {row["cell"] for row in rows(session.before) if row["status"] == "done"}
        assert not ended.intersection(session.begun), "a cell that was done began again"
        assert not session.left, "a worker goes on without its sweep"
        some_done |= bool(ended) and session.code < 0
        code, kills, torn = session.code, kills + (session.code < 0), torn + session.torn
    assert code == 0 and kills >= 3, "some kills, and the end"
    assert torn >= 1 and some_done, "at least one met a line, and one a sweep with cells that were done"
    lines = rows(sweep.content())
    done = Counter(row["cell"] for row in lines if row["status"] == "done")
    assert done == {row["cell"]: 1 for row in undisturbed}, "each cell has one line"
    assert len(done) == CELLS and numbers(lines) == numbers(undisturbed)
    killed = Counter(row["cell"] for row in lines if row["status"] == "killed")
    assert killed.total() >= 1 and len(lines) == CELLS + killed.total()
    begun = Counter(cell for _, cell in sweep.begun())
    assert set(begun) == set(done) and all(begun[cell] <= 1 + killed[cell] for cell in begun), "each again is marked"
    assert os.listdir(sweep.folder) == ["results.jsonl"]
