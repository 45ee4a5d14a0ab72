"""Does a sweep whose folder, disk or user fails it say so in a sentence, and leave every line as it was?"""

import os
import signal
import tempfile
from types import SimpleNamespace

import pytest

import runs
from resjax import sweep
from resjax.sweeps import one
from resjax.sweeps.results import Results
from resjax.train.runfolder import RunFolder
from runs import at_batch
from test_sweep import STEPS, lines, swept

pytestmark = pytest.mark.usefixtures("quick")
SEEDS = ("--grid", "seed=0,1")


@pytest.fixture(scope="module")
def config(calm):
    return calm


def refused(capsys, config, folder, *options, **fields):
    """The one sentence that the command says; it has said nothing else."""
    capsys.readouterr()
    assert swept(config, folder, *options, **fields) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("resjax: ") and not captured.out
    return captured.err


# ------------------------------------------------------------------ folders


def test_a_folder_that_is_a_file_or_lies_in_one(config, tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert f"--workdir is '{file}', which is a file; give a folder" in refused(capsys, config, file, *SEEDS)
    assert "which cannot be written (Not a directory)" in refused(capsys, config, file / "sweep", *SEEDS)
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["notes.txt"]


def test_a_folder_that_cannot_be_made(config, capsys):
    """Where root cannot, either."""
    assert "--workdir is '/proc/new', which cannot be written" in refused(capsys, config, "/proc/new", *SEEDS)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_folder_or_a_file_that_may_be_read_only(config, tmp_path, capsys, monkeypatch, what):
    """What is finished is told all the same; what is not, is not begun."""
    folder = tmp_path / "sweep"
    assert swept(config, folder, "--grid", "seed=0") == 0
    before, open_ = (folder / "results.jsonl").read_bytes(), open

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    def no_appending(path, mode="r", *rest, **more):
        return (
            denied() if str(path) == str(folder / "results.jsonl") and "a" in mode else open_(path, mode, *rest, **more)
        )

    if what == "folder":
        monkeypatch.setattr(tempfile, "mkdtemp", denied)
    else:
        monkeypatch.setattr("builtins.open", no_appending)
    monkeypatch.setattr(one, "train", lambda *_: pytest.fail("trained"))
    assert swept(config, folder, "--grid", "seed=0") == 0
    capsys.readouterr()
    assert swept(config, folder, *SEEDS) == 2
    told = capsys.readouterr().err
    assert (
        "cannot be written (Permission denied); give another" in told and str(folder) in told and told.count("\n") == 1
    )
    assert os.listdir(folder) == ["results.jsonl"] and (folder / "results.jsonl").read_bytes() == before


def test_a_folder_with_lines_of_another_sweep_says_which_and_keeps_them(config, tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert swept(config, folder, *SEEDS, data__length=8, train__steps=2) == 0
    theirs = (folder / "results.jsonl").read_bytes()
    for words in (("--dry-run",), ()):
        capsys.readouterr()
        assert swept(config, folder, "--grid", "seed=1,2", *words, train__steps=2) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert first.endswith(
            "results.jsonl keeps lines of 2 cells that are not of this sweep: data.length was 8, is 16"
        )
    assert (folder / "results.jsonl").read_bytes().startswith(theirs) and len(lines(folder)) == 4
    assert swept(config, folder, "--grid", "seed=2,3", train__steps=2) == 0
    out = capsys.readouterr().out
    assert "lines of 3 cells that are not of this sweep\n" in out and "2 cells, 1 of them finished" in out
    assert swept(config, folder, "--grid", "seed=1,2,3", train__steps=2, data__length=8) == 0
    assert "lines of 4 cells" in capsys.readouterr().out and len(lines(folder)) == 7


def test_a_sweep_that_another_one_overtook_begins_nothing(config, tmp_path):
    """Between reading the folder and taking it."""
    first, second = (Results(RunFolder(tmp_path / "sweep")) for _ in range(2))
    assert first.open() == []
    first.add({"cell": "a", "status": "done"})
    first.close()
    first._folder.close()
    with pytest.raises(sweep.Refused, match=r"another process has swept in .* just now; give the command again"):
        second.open()
    assert len(lines(tmp_path / "sweep")) == 1


def test_refused_cells_are_counted_before_anything_is_trained(config, tmp_path, capsys):
    assert swept(config, tmp_path / "sweep", "--grid", "model.heads=2,3", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "2 cells, 0 of them finished, 1 refused; 1 architecture" in out
    assert (
        "refused: model.heads=3: model.width is 8, which model.heads=3 does not divide; the nearest are 6 or 9" in out
    )


# ------------------------------------------------------------------ stops


@pytest.mark.parametrize("at", [1, STEPS + 2], ids=["in the first cell", "in the second"])
def test_ctrl_c_says_how_to_go_on(config, tmp_path, capfd, at):
    folder = tmp_path / "sweep"
    with at_batch(at, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert swept(config, folder, *SEEDS) == 130
    captured = capfd.readouterr()
    done = at // STEPS
    assert captured.out.splitlines()[-1] == f"stopped by SIGINT: {done} of 2 cells finished; the same command goes on"
    assert "Traceback" not in captured.out + captured.err and "a second one stops at once" in captured.err
    assert [row["status"] for row in lines(folder)] == ["done"] * done and os.listdir(folder) == ["results.jsonl"]


# ------------------------------------------------------------------ a full disk


def test_a_full_disk_leaves_whole_lines_and_the_same_command_goes_on(config, small_disk, capfd):
    place, enlarge = small_disk
    folder, seeds = place / "sweep", ("--grid", "seed=0,1,2,3")
    fields = {"train__steps": 2, "health__groups": "none"}
    with at_batch(3, lambda: runs.fill(place)):
        assert swept(config, folder, *seeds, **fields) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "No space left on device" in err and "what was saved before is intact" in err
    whole = (folder / "results.jsonl").read_bytes()
    there = lines(folder)
    assert whole.endswith(b"\n") and [row["status"] for row in there] == ["done"] * len(there) and 1 <= len(there) < 4
    enlarge()
    assert swept(config, folder, *seeds, **fields) == 0
    assert (folder / "results.jsonl").read_bytes().startswith(whole)
    assert sorted(row["fields"]["seed"] for row in lines(folder)) == list(range(4))
    assert os.listdir(folder) == ["results.jsonl"]


def test_a_disk_that_takes_half_a_line_loses_that_line_only(tmp_path):
    """Where no small disk can be mounted, too."""
    results = Results(RunFolder(tmp_path / "sweep"))
    results.open()
    results.add({"cell": "a", "status": "done"})
    whole, file = (tmp_path / "sweep" / "results.jsonl").read_bytes(), results._file._file
    left = [20]

    def write(line):
        if not left[0]:
            raise OSError(28, os.strerror(28))
        taken, left[0] = min(left[0], len(line)), 0
        return file.write(line[:taken])

    results._file._file = SimpleNamespace(write=write, seek=file.seek, truncate=file.truncate, close=file.close)
    with pytest.raises(OSError, match="No space left"):
        results.add({"cell": "b", "status": "done", "text": "x" * 50})
    assert (tmp_path / "sweep" / "results.jsonl").read_bytes() == whole and list(results.rows) == ["a"]
    results.close()
