"""Does a sweep say how long it will take, and mark what a kill ended?"""

import os
import re

import pytest

import runs
from resjax import sweep
from resjax.config.load import load
from resjax.config.tree import flat
from resjax.config.validate import resolve
from resjax.sweeps import cells, estimate
from resjax.sweeps.estimate import Estimate, rule
from resjax.train.writers import parse, read_json, write_json
from runs import ROOT, at_batch

pytestmark = pytest.mark.usefixtures("quick")
GRID = ("--grid", "model.depth=1,2", "--grid", "optimizer.lr=1e-3,1e-2")
BARE = {"train__steps": 4, "health__groups": "none"}


def swept(config, folder, *options, **fields):
    return sweep.main(runs.words(config, folder, "--no-figures", *options, **(BARE | fields)))


def lines(folder):
    return [parse(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ time


MEASURED = read_json(ROOT / "benchmarks" / "results" / "configs.json")
# seconds of a run beside its steps: start, compiling, saving, figures; and more of that a block
ABOUT, ABOUT_A_BLOCK = 10.0, 0.03


OVERHEAD = read_json(ROOT / "benchmarks" / "results" / "overhead.json")["sizes"]["24x64x64x16"]


@pytest.mark.parametrize("name", MEASURED)
def test_the_rule_fits_what_was_measured(name):
    """The rule knows nothing of schemes, so what is compared is the rule times what the scheme costs beside Pre-LN; 1.25, because these
    costs are medians of pairs at one size (of reversible, the farthest: 1.2)."""
    fields = flat(resolve(load(str(ROOT / "configs" / f"{name}.py"), []), "cpu"))
    took, cores = MEASURED[name]["seconds"], MEASURED[name]["cores"]
    scheme = OVERHEAD.get(fields["residual.name"], {}).get("time", 1.0)
    beside = ABOUT + ABOUT_A_BLOCK * fields["model.depth"]
    assert cores == 2 and 1 / 1.25 < (rule(fields, curves=True) * scheme + beside) / took < 1.25


def test_the_rule_grows_with_work(calm):
    def seconds(**fields):
        overrides = [(name.replace("__", "."), str(value)) for name, value in fields.items()]
        return rule(flat(resolve(load(str(calm), overrides), "cpu")))

    steps = [seconds(train__steps=100 * i) for i in (1, 2, 3)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    assert seconds(model__depth=96) > 4 * seconds(model__depth=4)  # of which most is beside the blocks
    deeper = [seconds(model__depth=depth) for depth in (4, 8, 96)]
    assert deeper[2] - deeper[0] == pytest.approx(23 * (deeper[1] - deeper[0]))
    # passes over the stream grow by 8, products by 64
    assert seconds(model__width=512, model__heads=8) > 8 * seconds(model__width=64, model__heads=8)


def groups(config):
    settings = [{"model.depth": depth, "optimizer.lr": rate} for depth in (2, 4, 64) for rate in (1e-3, 1e-2, 1e-1)]
    return cells.architectures(cells.build(str(config), [], settings, "cpu"))


def line(cell, seconds, **more):
    config = {path: value for path, value in flat(cell.config).items()}
    row = {"cell": cell.name, "status": "done", "device": "cpu", "seconds": seconds, "config": config}
    return row | {"compile_seconds": 0.0} | more


def test_an_estimate_is_of_its_own_cells_then_of_others_then_of_the_rule(calm):
    small, middle, large = groups(calm)
    made = Estimate([small, middle, large])
    by_rule = {group.name: made.guess(group).cell for group in (small, middle, large)}
    assert made.guess(small).basis == "by a rule for 2 CPU cores"
    made.learn([line(small.cells[0], 5.0, compile_seconds=3.0), line(small.cells[1], 7.0)])
    assert made.guess(small) == estimate.Guess(6.0, 3.0, "as 2 of its cells took")
    assert made.guess(middle).cell == pytest.approx(6.0 * by_rule[middle.name] / by_rule[small.name])
    assert made.guess(middle).basis == "from cells of other sizes"
    made.learn([line(large.cells[0], 1000.0)])
    assert made.guess(middle).cell < 100, "the nearest size counts"
    assert made.left([(small, small.cells), (large, large.cells[:1])]) == pytest.approx(3 * 6 + 1000 + 2 * 3)
    assert made.left([(small, small.cells), (large, ())], 2, small.name) == pytest.approx(9)


def test_what_tells_nothing_is_left_out(calm):
    (small, *_) = groups(calm)
    made = Estimate([small])
    before = made.guess(small)
    made.learn([line(small.cells[0], 5.0, status="diverged"), line(small.cells[0], 5.0, device="TPU v5 lite")])
    made.learn([{"cell": "x", "status": "failed", "error": "no"}])
    assert made.guess(small) == before
    elsewhere = Estimate([small], device="TPU v5 lite")
    assert elsewhere.guess(small) is None and elsewhere.left([(small, small.cells)]) is None
    assert estimate.about(None) == "unknown"
    assert elsewhere.learn([line(small.cells[0], 5.0, device="TPU v5 lite")]).guess(small).cell == 5.0


def test_a_dry_run_and_every_line_tell_the_time(calm, tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert swept(calm, folder, *GRID, "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"^time: about \d+ s$", out, re.MULTILINE) and "by a rule for 2 CPU cores" in out
    assert swept(calm, folder, "--grid", "model.depth=1", "--grid", "optimizer.lr=1e-3,1e-2") == 0
    first, second = re.findall(r"^  \d/2 .*\)(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r", about \d+ s left", first) and second == ""
    assert swept(calm, folder, *GRID, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "from cells of other sizes" in out and out.count("(finished)") == 2
    assert swept(calm, folder, "--grid", "optimizer.lr=1e-3,1e-2", "--dry-run", model__depth=1) == 0
    assert "time: nothing is left to train" in capsys.readouterr().out


def test_steps_are_timed_if_asked(calm, tmp_path, capsys, monkeypatch):
    timed = []
    monkeypatch.setattr(estimate, "timed", lambda group, _: timed.append(group) or (30.0 * len(timed), 2.0))
    options = ("--grid", "model.depth=1,2,3", "--dry-run", "--measure")
    assert swept(calm, tmp_path / "sweep", *options) == 0
    out = capsys.readouterr().out
    assert [group.cells[0].config.model.depth for group in timed] == [1, 3]
    assert out.count("timed steps") == 2 and "from cells of other sizes" in out and not (tmp_path / "sweep").exists()


def test_timed_steps_are_of_a_size_with_what_training_takes(calm):
    (group,) = cells.architectures(cells.build(str(calm), [], [{"model.depth": 1, "train.steps": 400}], "cpu"))
    seconds, compiling = estimate.timed(group, estimate.ENDS_ONLY)
    assert 0.01 < seconds < 400 and compiling > 0


# ------------------------------------------------------------------ kills


def test_a_cell_that_was_under_way_at_a_kill_is_marked_and_trained_again(calm, tmp_path, capsys):
    folder = tmp_path / "sweep"
    noted = []
    with at_batch(6, lambda: noted.append(read_json(folder / "under_way.json"))):
        assert swept(calm, folder, "--grid", "seed=0,1") == 0
    first, second = lines(folder)
    assert [row["cell"] for row in noted[0]] == [second["cell"]] and sorted(os.listdir(folder)) == ["results.jsonl"]
    (folder / "results.jsonl").write_text((folder / "results.jsonl").read_text().splitlines(keepends=True)[0])
    write_json(folder / "under_way.json", [{name: second[name] for name in ("cell", "fields", "scale", "config")}])
    capsys.readouterr()
    assert swept(calm, folder, "--grid", "seed=0,1") == 0
    kept, killed, again = lines(folder)
    assert kept == first and killed["status"] == "killed" and "was killed while" in killed["error"]
    assert (killed["cell"], killed["fields"], killed["config"]) == (second["cell"], {"seed": 1}, second["config"])
    assert again["status"] == "done" and again["eval_loss"] == second["eval_loss"]
    assert "seed=1" in capsys.readouterr().out.splitlines()[0]
    assert sorted(os.listdir(folder)) == ["results.jsonl"]


def test_a_cell_that_ended_just_before_the_kill_is_not_marked(calm, tmp_path):
    folder = tmp_path / "sweep"
    assert swept(calm, folder, "--grid", "seed=0") == 0
    before = lines(folder)
    write_json(folder / "under_way.json", [{"cell": before[0]["cell"], "fields": {"seed": 0}}])
    assert swept(calm, folder, "--grid", "seed=0,1") == 0
    assert lines(folder)[0] == before[0] and [row["status"] for row in lines(folder)] == ["done", "done"]
