"""Do the rails of experiments hold? Runs are chosen and lined up, predicates frozen, results kept and read back, on synthetic runs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import again, frozen, rehearsal, results, source
from experiments import experiment as files
from experiments import run as command
from experiments.experiment import every, read
from experiments.judge import in_ropes, share
from experiments.runs import Runs, ending, losses_of, mean_between, profile, value_of
from experiments.shared.sizes import SIZES, sized
from resjax.config.load import from_file
from resjax.config.validate import validate
from resjax.data import markov
from resjax.errors import Refused
from resjax.sweeps.cells import architectures, build
from resjax.sweeps.estimate import Estimate
from resjax.sweeps.grid import from_config
from resjax.sweeps.grid import settings as grid_settings
from resjax.sweeps.wanted import from_config as what_is_kept

FAILED = rehearsal.failed({})
TOY = '''
"""E90: is a larger rate better?"""
import matplotlib
matplotlib.rcParams["svg.hashsalt"] = "resjax"
from matplotlib.figure import Figure
from experiments.experiment import Finding
from experiments.judge import Predicate, difference
from experiments.shared.sizes import sized
from resjax.sweeps.combine import product

QUESTION = "Is a larger rate better?"
PREDICATES = {"C40": (Predicate("loss at the larger rate less that at the smaller", "below", 0.0, seeds=2),)}
SETTINGS = {"cpu": "toy"}
CUT = ()
VARIANTS = ("accelerator",)
MANY, SIZES_OF = 3, {0.5: "half"}
MEASURES = {"numbers": lambda scale: ({"n": n, "root": n**0.5} for n in range(MANY))}


def get_config(variant=None):
    config = sized("cpu-S", train__steps=4, train__eval_batches=1, model__depth=1, model__width=8, model__heads=2)
    config.data.length, config.data.batch, config.optimizer.warmup = 8, 2, 0
    return config


def sweep(variant=None):
    return product({"optimizer.lr": [1e-3, 1e-2], "seed": [0, 1]})


def judge(runs, measured):
    low, high = (part.losses([0, 1]) for part in runs.split("optimizer.lr").values())
    yield Finding("C40", (difference(high, low),), notes=(f"{len(measured['numbers'])} numbers",))


def figure(runs, measured):
    drawn = Figure()
    drawn.subplots().plot(runs.values("eval_loss") if len(runs) == 2 else [row["eval_loss"] for row in runs])
    return drawn
'''


def row(loss, seed=0, rate=1e-3, outcome="trained", **more):
    fields = {"optimizer.lr": rate, "seed": seed}
    return {"fields": fields, "config": {"train.steps": 100}, "status": "done", "outcome": outcome} | {
        "eval_loss": loss, "first_loss": 3.5, **more,
    }  # fmt: skip


def grid(losses):
    """Runs by rate and seed."""
    return Runs(row(loss, seed, rate) for rate, seeds in losses.items() for seed, loss in enumerate(seeds))


# ------------------------------------------------------------------ which runs, and their numbers


def test_a_field_that_is_not_said_has_its_default():
    one = row(2.0)
    assert value_of(one, "residual.name") == "pre_ln" and value_of(one, "train.steps") == 100
    with pytest.raises(Refused, match=r"optimizer\.rate"):
        value_of(one, "optimizer.rate")
    assert len(Runs([one]).where({"residual.name": "post_ln"})) == 0
    assert len(Runs([one]).where({"optimizer.lr": (1e-3, 3e-3), "residual.name": "pre_ln"})) == 1


def test_numbers_line_up_by_seed_and_what_is_missing_is_nan():
    runs = Runs([row(2.2, 2), row(2.0, 0), row(None, 1, outcome="nonfinite")])
    np.testing.assert_equal(runs.losses(), [2.0, np.nan, 2.2])
    np.testing.assert_equal(runs.losses([0, 3]), [2.0, np.nan])
    assert runs.outcomes() == {"trained": 2, "nonfinite": 1} and runs.trained() == pytest.approx(2 / 3)


def test_two_runs_of_one_seed_are_refused_with_what_they_differ_in():
    with pytest.raises(Refused, match=r"seed 0 has several of these runs, which differ in optimizer\.lr"):
        Runs([row(2.0), row(2.1, rate=1e-2)]).losses()


def test_the_best_rate_is_that_of_the_lowest_mean_and_lost_seeds_make_none_best():
    best = grid({1e-3: [2.5, 2.5], 3e-3: [2.2, 2.3], 1e-2: [2.0, None]}).best()
    assert best.value == 3e-3 and best.edge == "" and best.runs.losses() == [2.2, 2.3]
    assert "edge" in grid({1e-3: [2.5], 3e-3: [2.2], 1e-2: [2.0]}).best().edge


def test_the_highest_rate_needs_four_seeds_of_five():
    runs = Runs(
        row(2.0, seed, rate, "trained" if seed < good else "collapsed")
        for rate, good in ((1e-3, 5), (3e-3, 4), (1e-2, 3))
        for seed in range(5)
    )
    assert runs.highest_rate() == 3e-3
    assert Runs([row(3.0, outcome="diverged")]).highest_rate() == 0


def test_sensitivity_is_of_each_seed_over_the_grid():
    runs = grid({1e-3: [2.0, 2.0], 1e-2: [2.4, None]})
    np.testing.assert_allclose(runs.sensitivity(), [0.2, 0.75])  # one lost seed counts as its start: (0 + 1.5) / 2


def test_curves_and_profiles_are_read_as_far_as_they_go():
    curve = [{"step": s, "loss": 3 - s / 100} for s in range(10, 101, 10)] + [{"step": 100, "eval_loss": 2.0}]
    one = row(2.0, curve=curve, profiles={"1": {"update_ratio": [[1.0, None]]}, "100": {"update_ratio": [[2.0, 3.0]]}})
    steps, losses = losses_of(one)
    assert steps[-1] == 100 and losses[-1] == 2.0
    assert mean_between(one, 0.05, 0.2) == pytest.approx(2.85)
    assert np.isnan(mean_between(row(2.0, curve=curve[:3]), 0.2, 0.9))
    np.testing.assert_equal(profile(one, 1, "update_ratio"), [[1.0, np.nan]])
    np.testing.assert_equal(profile(one, "end", "update_ratio"), [[2.0, 3.0]])
    assert profile(one, "end", "token_cosine").size == 0


def test_a_run_that_failed_is_counted_as_such():
    assert ending({"fields": {}, "status": "failed"}) == "failed"


def test_differences_in_ropes_and_shares():
    found = in_ropes([2.1, 2.1], [2.0, 2.0])
    assert found.values == pytest.approx((10.0, 10.0))
    np.testing.assert_equal(share([True, False, np.nan]).values, (1.0, 0.0, np.nan))
    assert share([1, np.nan]).interval == (share([1, 0]).interval.low, share([1, 1]).interval.high)


@pytest.mark.parametrize("name", SIZES)
def test_the_sizes_are_configurations(name):
    config = sized(name, model__depth=6)
    validate(config)
    assert config.model.depth == 6 and config.optimizer.warmup == config.train.steps / 10


# ------------------------------------------------------------------ an experiment, from its file to its verdict


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An experiment in a folder of its own, with nowhere else to write to."""
    path = tmp_path / "e90_rate.py"
    path.write_text(TOY)
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "PLACE", tmp_path / "results")
    monkeypatch.setattr(frozen, "FILE", tmp_path / "frozen.json")
    monkeypatch.setattr(markov, "TRAIN_SYMBOLS", 1 << 14)
    monkeypatch.setattr(markov, "HELD_OUT_SYMBOLS", 1 << 12)
    monkeypatch.chdir(tmp_path)
    return path


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_experiment_is_done_kept_and_judged(toy, capsys):
    assert command.main(["E90"]) == 2 and "not frozen yet" in capsys.readouterr().err
    assert frozen.main(["E90"]) == 0
    assert command.main(["e90", "--dry-run"]) == 0 and "4 cells" in capsys.readouterr().out
    assert not (toy.parent / "results").exists()

    assert command.main(["E90"]) == 0
    out = capsys.readouterr().out
    assert "C40: " in out and "note: 3 numbers" in out
    kept = toy.parent / "results" / "e90_rate.cpu.json"
    found = results.read(kept)
    assert len(found.runs) == 4 and found.runs.seeds == [0, 1] and list(found.measured) == ["numbers"]
    assert value_of(found.runs[0], "model.width") == 8  # what all have alike is kept once, and is there when read
    assert "model.width" not in json.loads(kept.read_text())["rows"][0]["config"]
    assert found.about["frozen"] == frozen.digest() and found.about["command"].endswith("E90 --scale=cpu")
    (settled,) = read(toy).settle(found.runs, found.measured, "cpu")
    assert settled.claim == "C40" and settled.reading == "" and settled.settings == "toy"

    # again: nothing is trained, and the bytes are the same, also where commit and frozen file are others by now
    before = kept.read_bytes(), kept.with_suffix(".svg").read_bytes()
    frozen.FILE.write_text(frozen.FILE.read_text() + "\n")
    assert command.main(["E90"]) == 0
    assert (kept.read_bytes(), kept.with_suffix(".svg").read_bytes()) == before


def test_workers_are_handed_to_the_sweep(toy, monkeypatch):
    handed = []
    monkeypatch.setattr(command.sweep, "main", lambda words: handed.append(words) or 2)
    assert frozen.main(["E90"]) == 0
    for words in (["E90", "--workers=3"], ["E90", "--workers=3", "--scale=smoke", "--dry-run"], ["E90"]):
        assert command.main(words) == 2
    assert [[word for word in words if word.startswith("--workers")] for words in handed] == [
        ["--workers=3"],
        ["--workers=3"],
        [],
    ]


def test_cells_that_workers_of_another_platform_trained_are_found(toy):
    """On an accelerator a cell computes in bfloat16, and has another name; the process that collects them may have none."""
    experiment, folder = read(toy), toy.parent / "cells"
    folder.mkdir()
    settings = list(grid_settings(from_config(experiment.cells("cpu"), str(toy)), {}))
    made = [cell.name for cell in build(experiment.spec("cpu"), (), settings, "gpu")]
    assert made != [cell.name for cell in build(experiment.spec("cpu"), (), settings, "cpu")]
    (folder / "results.jsonl").write_text("".join(json.dumps({"cell": name}) + "\n" for name in reversed(made)))
    assert [row["cell"] for row in command.trained(experiment, "cpu", folder)] == made
    (folder / "results.jsonl").write_text(json.dumps({"cell": made[0]}) + "\n")
    with pytest.raises(Refused, match="lacks cells of E90"):
        command.trained(experiment, "cpu", folder)


@pytest.mark.slow
def test_smoke_keeps_and_judges_nothing(toy, capsys):
    assert command.main(["E90", "--scale=smoke"]) == 0
    assert "C40" not in capsys.readouterr().out
    assert not (toy.parent / "results").exists() and not frozen.FILE.exists()


def test_what_was_frozen_changes_only_with_a_reason(toy, capsys):
    assert frozen.main(["E90"]) == 0
    before = frozen.digest()
    edited(toy, '"below", 0.0', '"below", 0.1')
    edited(toy, "[1e-3, 1e-2]", "[1e-3, 3e-3]")
    assert command.main(["E90"]) == 2
    assert "predicates C40, grids accelerator, grids cpu" in capsys.readouterr().err
    assert frozen.main(["E90"]) == 2 and frozen.digest() == before
    assert frozen.main(["E90", "--change=the threshold was a slip"]) == 0
    assert frozen.digest() != before
    (change,) = frozen.read()["changes"]
    assert change["why"] == "the threshold was a slip" and change["experiment"] == "E90"
    assert frozen.main([]) == 0 and frozen.digest() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("config.optimizer.warmup = 8, 2, 0", "config.optimizer.warmup = 8, 2, 1", "grids accelerator, grids cpu"),
        ("model__width=8", "model__width=16", "grids accelerator, grids cpu"),
        ("MANY, SIZES_OF = 3,", "MANY, SIZES_OF = 4,", "constants MANY"),
        ('"below", 0.0, seeds=2', '"below", 0.0, seeds=3', "predicates C40"),
    ],
)
def test_all_that_decides_is_frozen(toy, capsys, old, new, named):
    """Also the settings that all cells share, and what says how much is measured without training."""
    assert frozen.main(["E90"]) == 0
    edited(toy, old, new)
    assert command.main(["E90"]) == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a larger rate", "a higher rate"),
        ('cpu": "toy', 'cpu": "a toy'),
        ("drawn = Figure()", "drawn = Figure((3, 2))"),
    ],
)
def test_words_and_figures_are_not_frozen(toy, old, new):
    assert frozen.main(["E90"]) == 0
    edited(toy, old, new)
    frozen.check(read(toy))


def test_every_claim_with_predicates_is_told_and_no_other(toy):
    runs, measured = grid({1e-3: [2.0, 2.0], 1e-2: [2.1, 2.1]}), {"numbers": []}
    experiment = read(toy)
    assert experiment.claims == ["C40"]
    assert [one.verdict for one in experiment.settle(runs, measured, "cpu")] == ["refuted"]
    edited(toy, 'yield Finding("C40"', 'yield Finding("C04"')
    with pytest.raises(Refused, match="did you mean 'C40'"):
        read(toy).settle(runs, measured, "cpu")
    edited(toy, 'yield Finding("C04"', 'return\n    yield Finding("C40"')
    with pytest.raises(Refused, match="nothing was found about C40"):
        read(toy).settle(runs, measured, "cpu")


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ('"C40": (Predicate', '"C99": (Predicate', "there is no claim C99"),
        ('"C40": (Predicate', '"C12/nrom": (Predicate', "of C12 there are the readings norm"),
        ("seeds=2),)}", "seeds=2))}", r"PREDICATES\['C40'\] has to be a tuple of predicates"),
        ("CUT = ()", 'CUT = ("no depths")', "CUT has to be a tuple of sentences"),
        ('"below", 0.0', '"bellow", 0.0', "the side of the predicate .* did you mean 'below'"),
        ('"optimizer.lr": [1e-3', '"optimizer.rl": [1e-3', "optimizer.rl"),
        (
            "low, high = (part",
            "low, middle, high = (part",
            r"judge\(\) failed in .*e90_rate.py, line \d+: ValueError: not enough values",
        ),
        ("    yield Finding(", "    return Finding(", r"judge\(\) failed in .*TypeError"),
        ("drawn.subplots()", "drawn.subplots(0)", r"figure\(\) failed in .*, line \d+: ValueError"),
    ],
)
def test_a_faulty_experiment_is_found_before_it_is_frozen_or_trained(toy, capsys, old, new, sentence):
    assert old in toy.read_text()
    edited(toy, "MEASURES =", "UNUSED =")  # a figure that needs measurements is not rehearsed
    edited(toy, "{len(measured['numbers'])}", "0")
    edited(toy, old, new)
    assert frozen.main(["E90"]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1
    assert not frozen.FILE.exists()
    assert command.main(["E90", "--scale=smoke"]) == 2 and not Path("sweeps").exists()


def test_names_of_files_are_not_ambiguous(toy):
    (toy.parent / "e90_copy.py").write_text(toy.read_text())
    with pytest.raises(Refused, match="are both E90"):
        files.paths()
    (toy.parent / "e90_copy.py").rename(toy.parent / "e9_copy.py")
    with pytest.raises(Refused, match="is no name of an experiment"):
        files.paths()
    (toy.parent / "e9_copy.py").unlink()
    assert files.named("e90_rate").name == files.named("E90").name == "E90"
    with pytest.raises(Refused, match="did you mean 'e90_rate'"):
        files.named("e90_rato")


def test_a_finding_has_an_effect_for_each_predicate(toy):
    edited(toy, "(difference(high, low),)", "(difference(high, low),) * 2")
    with pytest.raises(Refused, match="has 1 predicates, and 2 effects"):
        read(toy).settle(grid({1e-3: [2.0, 2.0], 1e-2: [2.1, 2.1]}), {"numbers": []}, "cpu")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["E91"], "the experiment is 'E91'"),
        (["e90_rate.py"], "has no QUESTION"),
    ],
)
def test_bad_names_and_files_are_told_in_one_sentence(toy, capsys, words, sentence):
    edited(toy, "QUESTION =", "ANSWER =")
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    with pytest.raises(Refused, match="makes it"):
        results.read(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(Refused, match="holds no results"):
        results.read(tmp_path / "other.json")


# ------------------------------------------------------------------ those there are


@pytest.mark.parametrize("experiment", every(), ids=lambda one: one.name)
def test_experiments_are_as_frozen_and_fit_their_grid(experiment):
    if experiment.name in frozen.read()["experiments"]:
        frozen.check(experiment)
    assert experiment.cells("cpu") or experiment.measures
    assert all(key[:1] == "C" and key[1:3].isdigit() for key in experiment.predicates)


@pytest.mark.parametrize("experiment", [one for one in every() if one.cells()], ids=lambda one: one.name)
@pytest.mark.parametrize("case", rehearsal.ENDS)
def test_an_experiment_judges_and_draws_whatever_its_runs_did(experiment, case):
    """All claims are told of; where nothing was trained, none is supported but by runs that are meant to be lost."""
    settled = rehearsal.rehearse(experiment, case)
    assert {one.claim for one in settled} == set(experiment.claims)
    assert all(one.told() for one in settled)
    if case == "failed":
        assert "supported" not in [one.verdict for one in settled]


MINUTES = 30.0
FROZEN = [one for one in every() if one.cells() and one.name in frozen.read()["experiments"]]


@pytest.mark.parametrize("experiment", FROZEN, ids=lambda one: one.name)
def test_a_dry_run_says_half_an_hour_at_most(experiment):
    """With two workers and nothing trained yet, by the rule for 2 CPU cores; what looks and studies take only done cells can tell."""
    settings = grid_settings(from_config(experiment.cells("cpu"), str(experiment.path)), {})
    groups = architectures(build(experiment.spec("cpu"), (), settings, "cpu"))
    wanted = what_is_kept(from_file(experiment.spec("cpu"), "keep"), str(experiment.path))
    seconds = Estimate(groups, wanted).left([(group, group.cells) for group in groups], workers=2)
    assert seconds is not None and 0 < seconds / 60 <= MINUTES


# ------------------------------------------------------------------ once more


def test_a_cell_comes_out_again(toy, capsys):
    frozen.main(["E90"])
    command.main(["E90"])
    capsys.readouterr()
    assert again.main(["E90"]) == 0
    out = capsys.readouterr().out
    assert "all 6 digits that are kept" in out and "optimizer.lr=0.001 seed=0" in out
    kept = results.place(read(toy), "cpu")
    last = results.read(kept).runs[-1]
    assert again.main(["E90", f"--cell={last['cell']}"]) == 0 and "seed=1" in capsys.readouterr().out
    kept.write_text(kept.read_text().replace(f'"eval_loss":{last["eval_loss"]}', '"eval_loss":9.0'))
    assert again.main(["E90", f"--cell={last['cell']}"]) == 1 and "its loss was 9" in capsys.readouterr().out
    assert again.main(["E90", "--cell=0000"]) == 2 and "--cell" in capsys.readouterr().err


def test_another_class_a_lost_loss_and_a_large_difference_are_told():
    was = row(2.0)
    assert set(again.differences(was, row(2.019))) == {"same"}
    assert set(again.differences(was, row(2.021))) == {"loss"}
    assert set(again.differences(was, row(None))) == {"loss"}
    assert set(again.differences(was, row(2.0, outcome="bigram"))) == {"outcome"}
    assert set(again.differences(row(None), row(None))) == {"same"}
    assert set(again.differences(was, was | FAILED)) == {"outcome", "loss"}


def test_what_is_measured_comes_out_again(toy, capsys):
    kept = {"numbers": [{"n": 0, "root": 0.0}, {"n": 1, "root": 5.0}]}  # the first row alone is made again
    assert again.remeasured(read(toy), "cpu", kept) == 0
    assert "the first row of numbers" in capsys.readouterr().out
    assert again.remeasured(read(toy), "cpu", {"numbers": [{"n": 0, "root": 0.5}]}) == 1
    assert "another root: it was 0.5, and is now 0.0" in capsys.readouterr().out
    with pytest.raises(Refused, match="measures numbers, and kept are roots"):
        again.remeasured(read(toy), "cpu", {"roots": []})


def test_where_nothing_is_trained_there_is_no_cell(capsys):
    assert again.main(["E13", "--cell=7be1658709ef"]) == 2
    assert (
        "E13 trains nothing, so it has no cell '7be1658709ef'; without --cell it is measured again"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("was", "now", "apart"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1.002, 0.002 / 1.002),
        (1e-17, -3e-16, 0.0),  # both the rounding of a 0
        ([1.0, [2.0, 3.0]], [1.0, [2.0, 2.7]], 0.1),
        ([1.0], [1.0, 2.0], np.inf),
        ("nan", 1.0, np.inf),
        (True, 1, 0.0),
        (True, 2, np.inf),
        (None, 0.0, np.inf),
    ],
)
def test_how_far_measured_values_are_apart(was, now, apart):
    assert again.distance(was, now) == pytest.approx(apart)


def test_rounding_is_told_and_is_no_other_result():
    assert again.unlike({"a": 1.0, "b": 2}, {"a": 1.0005, "b": 2}) == ["a differs by 0.0005 of itself"]
    assert again.unlike({"a": 1.0}, {"b": 1.0}) == [
        "another a: it was 1.0, and is now None",
        "another b: it was None, and is now 1.0",
    ]


def test_a_measurement_of_which_one_row_is_taken_is_ended():
    """Else what it has set while it was under way, such as JAX's 64 bits, would stay so."""
    under_way = []

    def rows(scale):
        under_way.append(scale)
        try:
            yield {"value": 1 / 3}
            raise AssertionError("the second row was made")
        finally:
            under_way.pop()

    assert again.first_row(SimpleNamespace(measures={"some": rows}), "some", "cpu") == {"value": 0.333333}
    assert under_way == []


KEPT = [one for one in every() if results.place(one, "cpu").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", KEPT, ids=lambda one: one.name)
def test_what_is_kept_comes_out_again(experiment):
    """The same class, the loss within 0.02 nat; of what is only measured the same numbers."""
    assert again.main([experiment.name]) == 0


# ------------------------------------------------------------------ measured once, and anew where the code is another


def test_a_measurement_is_made_once_and_anew_where_its_code_has_changed(toy, capsys):
    path = toy.parent / "numbers.json"

    def measured():
        return [row["root"] for row in command.measure(path, read(toy), "numbers", "cpu")]

    assert measured() == [0, 1, 2**0.5]
    path.write_text(path.read_text().replace('"root": 1.0', '"root": 7.0'))
    assert measured() == [0, 7, 2**0.5], "it was kept"
    edited(toy, "drawn = Figure()", "drawn = Figure(figsize=(3, 2))  # smaller")
    assert measured() == [0, 7, 2**0.5] and capsys.readouterr().out == ""
    edited(toy, "n**0.5", "n**2")
    assert measured() == [0, 1, 4] and "measuring numbers anew: its code has changed" in capsys.readouterr().out
    edited(toy, "MANY, SIZES_OF = 3,", "MANY, SIZES_OF = 2,")  # which the code uses
    assert measured() == [0, 1]
    for text in ("[", "[1, 2]", '{"rows": []}'):
        path.write_text(text)
        assert measured() == [0, 1] and "does not say which code made it" in capsys.readouterr().out


SHARED = """
FEW = 2

def used():
    return FEW

def other():
    return 3
"""
USING = """
from experiments.shared import parts
from experiments.shared.parts import used as borrowed

def one(scale):
    return [parts.used()]

def two(scale):
    return [borrowed()]

def three(scale):
    return []

MEASURES = {"one": one, "two": two, "three": three}
"""


@pytest.mark.parametrize(
    ("where", "old", "new", "changed"),
    [
        ("parts", "FEW = 2", "FEW = 4", {"one", "two"}),
        ("parts", "return FEW", "return -FEW", {"one", "two"}),
        ("parts", "return 3", "return 4", set()),
        ("parts", "return FEW", '"""A word."""\n    # and another\n    return (FEW)', set()),
        ("using", "[borrowed()]", "[borrowed(), 1]", {"two"}),
        ("using", '"three": three', '"three": one', {"three"}),
    ],
)
def test_the_code_of_a_measurement_is_all_that_it_uses(tmp_path, monkeypatch, where, old, new, changed):
    package = tmp_path / "experiments"
    files = {"parts": package / "shared" / "parts.py", "using": package / "e90_using.py"}
    files["parts"].parent.mkdir(parents=True)
    files["parts"].write_text(SHARED)
    files["using"].write_text(USING)
    monkeypatch.setattr(source, "PACKAGE", package)

    def digests():
        return {name: source.digest(SimpleNamespace(path=files["using"]), name) for name in ("one", "two", "three")}

    before = digests()
    edited(files[where], old, new)
    after = digests()
    assert {name for name in before if before[name] != after[name]} == changed


def test_a_measurement_that_reads_results_is_made_of_them(tmp_path, monkeypatch):
    package = tmp_path / "experiments"
    (package / "results").mkdir(parents=True)
    (package / "results.py").write_text("def read(path):\n    return path\n")
    using = package / "e90_using.py"
    using.write_text(
        "from experiments import results\n\ndef pool(scale):\n    return [results.read(scale)]\n\n"
        'MEASURES = {"pool": pool, "none": lambda scale: []}\n'
    )
    monkeypatch.setattr(source, "PACKAGE", package)

    def digests(name, text):
        (package / "results" / name).write_text(text)
        return [source.digest(SimpleNamespace(path=using), measure) for measure in ("pool", "none")]

    first, others = digests("e91_other.cpu.json", "1"), digests("e91_other.cpu.json", "2")
    assert first[0] != others[0] and first[1] == others[1]
    assert digests("e90_using.cpu.json", "1") == others  # its own are not read


def test_every_measurement_has_code():
    """Also where it is a function without a name, or MEASURES is put together."""
    digests = [source.digest(one, name) for one in every() for name in one.measures]
    assert len(digests) == len(set(digests)) > 10
