"""Does a comparison say what is known of runs with planted numbers, write one page and nothing else, and refuse what is no run?"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from math import inf

import numpy as np
import pytest

import browser
from resjax import compare as command
from resjax.health.comparison import compare, labels, read, settings
from resjax.health.comparison.charts import by_depth, over_steps
from resjax.health.comparison.page import DASHES, HUES, page
from resjax.health.comparison.told import groups, print_comparison
from resjax.health.page import made_by
from resjax.health.reading import at_end
from resjax.health.record import HealthRecord
from resjax.train.writers import parse
from runs import ROOT, environment, files
from synthetic_run import BASELINES, config_of, probe_rows, record_of, write_run

STEPS = np.arange(1, 201)
SHA = {"corpus": {"source": "stdlib", "sha256": "a" * 64}}


def write(folder, loss=5 - 0.01 * STEPS, every=1, done=True, depth=4, scheme="pre_ln", facts=SHA, rows=6, **sections):
    """A run's folder with this loss a row, one every so many steps; ``sections`` go over those of its config."""
    folder.mkdir(parents=True)
    steps = every * np.arange(1, len(loss) + 1)
    config = config_of(depth, scheme, int(steps[-1]))
    for name, fields in sections.items():
        config[name] = {**config[name], **fields} if isinstance(fields, dict) else fields
    (folder / "config.json").write_text(json.dumps(config | facts))
    text = [
        {"step": int(step), "loss": float(value) if np.isfinite(value) else str(float(value)), "tokens_per_s": 1000.0}
        for step, value in zip(steps, loss, strict=True)
    ]
    text.append({"step": int(steps[-1]), "eval_loss": 2.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    record_of(probe_rows(depth, rows, scheme)).flush(folder / "health")
    if done:
        summary = {
            "status": "finished",
            "steps": int(steps[-1]),
            "eval_loss": 2.25,
            "train_loss": 2.5,
            "baselines": BASELINES,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def of(*folders, target=None):
    """The comparison of runs in these folders."""
    sides, notes = read([str(folder) for folder in folders])
    return compare(sides, target, notes)


def said(capfd, *words):
    """Exit code, standard output, standard error."""
    capfd.readouterr()
    code = command.main([str(word) for word in words])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def two(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two", optimizer={"lr": 0.01})
    return tmp_path / "one", tmp_path / "two"


# ---- numbers


def test_steps_to_the_first_runs_loss_at_half(tmp_path):
    """The mean of 20 steps of a line lies 9.5 steps behind it."""
    first = write(tmp_path / "first")
    fast = write(tmp_path / "fast", 5 - 0.02 * STEPS)
    never = write(tmp_path / "never", np.full(200, 5.0))
    found = of(first, fast, never)
    assert found.target == pytest.approx(4 + 0.095) and "step 100, half of its run" in found.target_is
    assert [run["steps_to_target"] for run in found.runs] == [100, 55, inf]
    assert [run["steps_to_target"] for run in of(first, fast, target=4.5).runs] == [60, 35]
    assert of(first, fast, target=4.5).target_is == "as asked for"


def test_a_loss_every_ten_steps_is_the_mean_of_two(tmp_path):
    first = write(tmp_path / "first", 5 - 0.1 * np.arange(1, 21), every=10)
    found = of(first, write(tmp_path / "same", 5 - 0.1 * np.arange(1, 21), every=10))
    assert found.target == pytest.approx(4.05) and found.runs[1]["steps_to_target"] == 100
    assert any("a loss every 10 steps in all runs: a mean over 20 steps is of 2 losses" in note for note in found.notes)


def test_a_first_run_without_a_finite_loss_has_no_target(tmp_path, two):
    broken = write(tmp_path / "broken", np.full(200, np.nan))
    found = of(broken, *two)
    assert not found.target_is and all(run["steps_to_target"] is None for run in found.runs)
    assert any("give one by --target" in note for note in found.notes)
    assert of(broken, *two, target=4.5).runs[0]["steps_to_target"] == inf


def test_planted_spikes(tmp_path, two):
    rng = np.random.default_rng(0)
    loss = 3 + 0.01 * rng.normal(size=400)
    loss[100:104], loss[300:] = 4.0, 3.5
    quiet = write(tmp_path / "quiet", 3 + 0.01 * rng.normal(size=400), every=2)
    found = of(quiet, write(tmp_path / "spiky", loss, every=2)).runs
    assert found[0]["spikes"] == {"score": 0.0, "fatal": 0, "episodes": []}
    spikes = found[1]["spikes"]
    first, second = spikes["episodes"]
    assert (first["first"], first["last"], first["peak"], first["outcome"]) == (202, 208, 4.0, "recovered")
    assert (second["first"], second["outcome"], spikes["fatal"]) == (602, "fatal", 1)
    assert first["before"] == pytest.approx(3, abs=0.01) and spikes["score"] > 0


def test_results_of_runs_that_ended(two):
    run = of(*two).runs[0]
    assert (run["eval_loss"], run["train_loss"], run["tokens_per_s"]) == (2.25, 2.5, None)
    assert (run["status"], run["steps"], run["planned"], run["eval_step"]) == ("finished", 200, 200, 200)
    assert run["baselines"] == BASELINES and run["health"] == {"verdict": "healthy", "findings": []}
    lines = groups(of(*two))[0].lines
    assert lines["held-out - bigram"] == ["-0.264"] * 2 and lines["state"] == ["finished, 200 steps"] * 2


def test_profiles_are_those_of_the_end(two):
    found, record = of(*two).runs[0], HealthRecord.load(two[0] / "health")
    for probe in ("update_ratio", "stream_rms", "token_cosine", "stream_grad"):
        end = at_end(record[probe])
        assert found["profiles"][probe] == {"attention": end[:, 0].tolist(), "mlp": end[:, 1].tolist()}
    assert found["measured_steps"] == [10, 50]


def test_only_settings_that_differ_by_section(tmp_path):
    one = write(tmp_path / "one", health={"every": 10})
    two = write(
        tmp_path / "two", optimizer={"lr": 0.01}, health={"every": 5}, residual={"attention": {"skip": 0.5}}, seed=3
    )
    assert of(one, two).settings == {
        "run": {"seed": [0, 3]},
        "residual.attention": {"residual.attention.skip": [None, 0.5]},
        "optimizer": {"optimizer.lr": [0.003, 0.01]},
        "health": {"health.every": [10, 5]},
    }
    three = write(tmp_path / "three", facts=SHA | {"versions": {"jax": "0.99"}, "git_commit": "c" * 40 + "+"})
    assert of(one, three).settings == {
        settings.RAN: {"version of jax": [None, "0.99"], "git commit": [None, "c" * 12 + "+"]}
    }


def test_a_field_that_an_older_version_lacked_is_at_its_default(tmp_path):
    one, two = write(tmp_path / "one"), write(tmp_path / "two", data={"field": None})
    facts = json.loads((one / "config.json").read_text())
    del facts["optimizer"]["weight_decay"]
    (one / "config.json").write_text(json.dumps(facts))
    assert of(one, two).settings == {"optimizer": {"optimizer.weight_decay": [0.0, 0.1]}}


@pytest.mark.parametrize(
    "facts, data, seed, why",
    [
        ({"corpus": {"sha256": "b" * 64}}, {"source": "files:x"}, 0, ["its text is files:x, not stdlib"]),
        ({"corpus": {"sha256": "b" * 64}}, {}, 0, [f"its text is another stdlib (sha256 {'b' * 12}, not {'a' * 12})"]),
        (SHA, {"source": "files:copy"}, 0, []),
        ({}, {"source": "files:x"}, 0, ["its text is files:x, not stdlib"]),
        (SHA, {}, 5, []),
        (SHA, {"length": 64}, 0, ["its data.length is 64, not 128"]),
        (
            {},
            {"source": "markov", "length": 64},
            0,
            ["its text is markov, not stdlib", "its data.length is 64, not 128"],
        ),
    ],
)
def test_losses_that_do_not_compare_are_told_with_the_reason(tmp_path, facts, data, seed, why):
    found = of(write(tmp_path / "one"), write(tmp_path / "two", facts=facts, data=data, seed=seed))
    assert found.not_comparable == ({"two": why} if why else {})
    assert found.warning == (f"losses do not compare with those of one: two: {', '.join(why)}" if why else "")
    assert bool(found.baselines) is not any("text" in one for one in why)


def test_another_seed_draws_another_markov_text(tmp_path):
    one, two = (
        write(tmp_path / f"{seed}", data={"source": "markov"}, seed=seed, facts={"corpus": {"sha256": f"{seed}" * 64}})
        for seed in (1, 2)
    )
    assert of(one, two).not_comparable == {
        "2": ["its training text was drawn with seed 2, not 1 (the held-out text is the same)"]
    }


def test_equal_parameters_at_the_end_are_told(two):
    for folder in two:
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"param_hash": "d" * 64}))
    assert "one and two ended with the same parameters, bit for bit" in of(*two).notes


# ---- runs that go on, are damaged, or are not resjax's own


def test_a_run_under_way_counts_as_far_as_it_is(tmp_path, two):
    going = write(tmp_path / "going", 5 - 0.01 * STEPS[:120], done=False, train={"steps": 200})
    with open(going / "metrics.jsonl", "a") as file:
        file.write('{"step": 121, "lo')
    found = of(two[0], going)
    run, lines = found.runs[1], groups(found)[0].lines
    assert (run["status"], run["steps"], run["steps_to_target"], run["tokens_per_s"]) == ("unfinished", 120, 100, 1000)
    assert run["train_loss"] == pytest.approx(np.mean(5 - 0.01 * STEPS[110:120]))
    assert lines["state"][1] == "unfinished, step 120 of 200" and lines["held-out - bigram"][1] == "-0.264"
    assert "going: metrics.jsonl: 1 unfinished or unreadable lines, skipped" in found.notes and page(found)


def test_a_run_that_was_killed_before_its_first_row(tmp_path, two):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(two[0] / "config.json", empty)
    for folders in ((two[0], empty), (empty, two[0])):
        found = of(*folders)
        text = page(found)
        print_comparison(found, io.StringIO())
        assert "unfinished, step 0" in text and "No step was recorded: empty." in text


def test_a_run_that_broke(tmp_path):
    broken = write_run(
        tmp_path / "broken", trouble=True, done=False
    )  # so that nothing says how its loss lies to a baseline
    found = of(write_run(tmp_path / "well"), broken)
    text = page(found)
    assert found.runs[1]["spikes"]["fatal"] == 1 and "not finite" in text and "Token collapse" in text
    assert groups(found)[0].lines["health"] == ["healthy", "non-finite value; token collapse"]
    loss = next(chart for chart in over_steps(found) if chart["id"] == "loss")["series"]
    assert [one["bad"] for one in loss if not one.get("faint")] == [[], [495, 500]]
    summed = of(write_run(tmp_path / "other"), write_run(tmp_path / "summed", trouble=True))
    assert groups(summed)[0].lines["health"] == ["healthy", "non-finite value"], "its loss is below the bigram baseline"


def test_models_that_are_not_resjaxs_own(tmp_path, two):
    from resjax import watch

    for name, width in (("mine", 8), ("theirs", 16)):
        with watch.Log(tmp_path / name, config={"model": {"depth": 3, "width": width}}, sites=("mlp",)) as log:
            rng = np.random.default_rng(0)
            for step in range(1, 4):
                streams, updates = rng.normal(size=(2, 3, 2, 16, 8))
                log.write(step, watch.from_arrays({"mlp": streams}, {"mlp": updates}), loss=3.0 / step)
            log.close()
    found = of(tmp_path / "mine", tmp_path / "theirs", two[0])
    assert found.settings["model"]["model.width"] == [8, 16, 64]
    assert set(found.runs[0]["profiles"]["update_ratio"]) == {"mlp"} and page(found)
    charts = {chart["id"]: chart for chart, _ in by_depth(found)}
    assert [one["run"] for one in charts["update_ratio-attention"]["series"]] == [2]
    why = "is a model that is not resjax's own, and says nothing of its text"
    assert found.not_comparable == {"one": [f"mine {why}"]} and not found.baselines
    assert of(two[0], tmp_path / "theirs").not_comparable == {"theirs": [f"theirs {why}"]}


def test_a_network_of_another_kind_stands_beside_a_transformer(tmp_path, two, capfd):
    """Other sub-layers, other data, another depth: each in rows of its own, and a line that the losses do not compare."""
    from resjax import watch

    with watch.Log(tmp_path / "resnet", config={"data": {"set": "cifar10"}}, sites=("conv",)) as log:
        rng = np.random.default_rng(0)
        for step in range(1, 4):
            streams, updates = rng.normal(size=(2, 3, 2, 16, 8))
            log.write(step, watch.from_arrays({"conv": streams}, {"conv": updates}), loss=3.0 / step)
        log.close()
    code, out, err = said(capfd, two[0], tmp_path / "resnet", f"--out={tmp_path / 'x.html'}")
    assert code == 0 and not err and "None" not in out
    first = out.splitlines()[0]
    assert first.startswith("* losses do not compare with those of one: resnet: resnet is a model that is not resjax's")
    assert re.search(r"^\| Update/stream ratio, conv +\| +- \| +[\d.]+ +[\d.]+ +[\d.]+ \|$", out, re.M)
    assert re.search(r"^\| Update/stream ratio, mlp +\| +[\d.]+ +[\d.]+ +[\d.]+ \| +- \|$", out, re.M)


# ---- the page


def data_of(text):
    """What the page draws."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


def test_curves_of_all_runs_lie_over_one_another(two):
    text = page(of(*two))
    data = data_of(text)
    charts = {chart["id"]: chart for chart in data["charts"]}
    assert data["runs"] == ["one", "two"]
    assert list(charts) == [
        "loss", "eval_loss", "tokens_per_s", "update_ratio-attention", "update_ratio-mlp", "stream_rms", "token_cosine", "stream_grad",
    ]  # fmt: skip
    assert all({one["run"] for one in chart["series"]} == {0, 1} for chart in charts.values())
    mean = next(one for one in charts["loss"]["series"] if not one.get("faint"))
    assert mean["x"][0] == 20 and mean["y"][0] == pytest.approx(5 - 0.01 * 20 + 0.095)
    assert charts["loss"]["lines"][-1] == {"name": "target", "y": pytest.approx(4.095)}
    assert {line["name"] for line in charts["eval_loss"]["lines"]} == set(BASELINES)
    assert all(f'data-chart="{name}"' in text for name in charts)
    assert charts["stream_rms"]["sites"] == ["attention", "mlp"] and charts["stream_rms"]["axis"] == ["block", "block"]
    assert charts["stream_rms"]["series"][0]["x"] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]


def test_other_depths_are_drawn_over_the_share_of_the_depth(tmp_path, two):
    found = of(two[0], write(tmp_path / "deep", depth=8))
    charts = {chart["id"]: chart for chart, _ in by_depth(found)}
    ratio, rms = charts["update_ratio-mlp"], charts["stream_rms"]
    assert ratio["axis"][0] == "share of the depth" and "sites" not in rms and not rms["whole"]
    assert ratio["series"][0]["x"] == [0.125, 0.375, 0.625, 0.875]
    assert ratio["series"][1]["x"] == pytest.approx((np.arange(8) + 0.5) / 8)
    assert "differ in depth" in page(found)


def test_many_runs_look_different(tmp_path):
    runs = [write(tmp_path / f"run{n}", 5 - 0.001 * n * STEPS, optimizer={"lr": 0.001 * (n + 1)}) for n in range(9)]
    text = page(of(*runs))
    looks = re.findall(r'class="curve run (h\d dash\d)"', text.split("</table>")[0])
    assert len(looks) == len(set(looks)) == 9
    assert f"HUES = {HUES}, DASHES = {DASHES}" in text
    style = text[text.index("<style>") : text.index("</style>")]
    colours = re.findall(r"--h(\d): (#\w{6})", style)
    assert sorted(hue for hue, _ in colours) == sorted(2 * [str(hue) for hue in range(HUES)])
    assert len({colour for _, colour in colours}) == 2 * HUES, "light and dark"
    assert all(f".dash{dash} " in style for dash in range(1, DASHES))


def test_the_page_escapes_and_asks_nothing_of_the_network(tmp_path, two):
    evil = "</script><script>alert(1)</script>"
    strange = write(tmp_path / "a<b>&'x", facts=SHA | {"git_commit": evil}, data={"source": f"files:{evil}"})
    found = of(strange, two[0])
    text = page(found)
    assert text.count("<script") == 2 and "alert(1)" in text and "a<b>" not in text.replace(json.dumps("a<b>"), "")
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "url(" not in text and "https:" not in text
    assert "default-src 'none'" in text


@pytest.mark.slow
@browser.needed
def test_a_browser_draws_it_without_an_error(tmp_path, two):
    (tmp_path / "page.html").write_text(page(of(*two, write(tmp_path / "deep", depth=8))))
    done = browser.browse(tmp_path / "page.html", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert len(re.findall(r'<path d="M[^"]+" class="curve run h2 dash0"', done.stdout)) >= 8
    assert "NaN" not in done.stdout


# ---- the table


def test_few_runs_are_columns_and_many_are_rows(tmp_path, two, capfd):
    code, out, _ = said(capfd, *two, f"--out={tmp_path / 'x.html'}")
    assert code == 0 and re.search(r"^\| +\| +one \| +two \|$", out, re.M)
    assert re.search(r"^\| optimizer.lr +\| +0.003 \| +0.01 \|$", out, re.M)
    many = [write(tmp_path / f"run{n}", optimizer={"lr": 0.001 * (n + 1)}) for n in range(6)]
    _, out, _ = said(capfd, *many, f"--out={tmp_path / 'x.html'}")
    assert re.search(r"^\| run0 +\| finished, 200 steps \|", out, re.M) and re.search(
        r"^\| run5 +\| +0.006 \|$", out, re.M
    )


def test_a_narrow_terminal_gets_rows_in_several_tables(two, tmp_path):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    found, shown = of(*two), Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "60")
        patch.setenv("TERM", "xterm")
        print_comparison(found, shown)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert "tokens a second" not in plain  # nobody has it
    assert all(word in plain for word in ("steps to target", "optimizer.lr", "Token cosine, mlp"))
    assert all(len(line) <= 60 for line in plain.splitlines() if "─" in line)


# ---- the command


def test_the_page_is_written_and_nothing_else(two, tmp_path, capfd, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = [files(folder) for folder in two]
    for _ in range(2):  # its own page is written over
        code, out, err = said(capfd, *two)
        assert code == 0 and not err and out.splitlines()[-1] == "written: compare.html"
    assert [files(folder) for folder in two] == before
    assert os.listdir() == ["compare.html"] and made_by(tmp_path / "here" / "compare.html") == "resjax.compare"


def test_json_is_the_same_and_writes_a_page_only_if_asked(two, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capfd, *two, "--json", "--target=0.5")
    told = parse(out)
    assert code == 0 and not (tmp_path / "compare.html").exists()
    assert set(told) == {"target", "baselines", "not_comparable", "runs", "settings", "notes"}
    assert told["target"] == {"loss": 0.5, "is": "as asked for"} and told["runs"][0]["steps_to_target"] == "inf"
    assert told["settings"] == {"optimizer": {"optimizer.lr": [0.003, 0.01]}}
    code, out, _ = said(capfd, *two, "--json", "--out=page.html")
    assert code == 0 and parse(out) and (tmp_path / "page.html").exists()


def test_a_run_that_is_given_twice_is_shown_once(two, tmp_path, capfd):
    (tmp_path / "link").symlink_to(two[0])
    code, out, _ = said(capfd, two[0], two[1], two[0], tmp_path / "link", f"--out={tmp_path / 'x.html'}")
    assert code == 0 and f"{two[0]} is given twice; it is shown once" in out
    assert f"{tmp_path / 'link'} is the same run as {two[0]}" in out and re.search(r"\| +one \| +two \|", out)
    code, _, err = said(capfd, two[0], two[0], f"--out={tmp_path / 'y.html'}")
    assert code == 2 and "one run only" in err and not (tmp_path / "y.html").exists()


def test_runs_of_one_name_are_told_apart(tmp_path):
    one, two = write(tmp_path / "a" / "run"), write(tmp_path / "b" / "run")
    assert of(one, two).names == ["a/run", "b/run"]
    assert labels([one, two, tmp_path / "c" / "d" / "run"]) == ["a/run", "b/run", "d/run"]


BAD = {
    "one": (["ONE"], "one run only"),
    "none": ([], "RUN"),
    "no such folder": (["ONE", "nowhere"], "'nowhere' holds no run"),
    "a file": (["ONE", "ONE/config.json"], "is a file; name the folder of a run"),
    "empty": (["ONE", ""], "a RUN is empty"),
    "a sweep": (["ONE", "sweep"], "the folder of a sweep"),
    "a folder of runs": (["ONE", "."], "holds runs and is none; name them, such as *"),
    "damaged": (["ONE", "damaged"], "cannot be read"),
    "unknown field": (["ONE", "later"], "what this version does not know"),
    "no number": (["ONE", "TWO", "--target=low"], "--target is 'low'"),
    "not finite": (["ONE", "TWO", "--target=nan"], "--target is 'nan'"),
    "option": (["ONE", "TWO", "--targett=3"], "did you mean --target=3"),
    "no out": (["ONE", "TWO", "--out="], "--out is empty"),
    "a folder": (["ONE", "TWO", "--out=sweep"], "which is a folder"),
    "no parent": (["ONE", "TWO", "--out=x/y.html"], "there is no folder 'x'"),
    "not ours": (["ONE", "TWO", "--out=ONE/metrics.jsonl"], "was not written by this command"),
    "a report": (["ONE", "TWO", "--out=report.html"], "was not written by this command"),
}  # fmt: skip


@pytest.mark.parametrize("words, tells", BAD.values(), ids=list(BAD))
def test_bad_input_gets_one_sentence_and_leaves_nothing(words, tells, two, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("damaged", "{"), ("later", '{"model": {"flux": 3}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "results.jsonl").write_text("")
    from resjax.health.report import write_report

    shutil.move(write_report(write_run(tmp_path / "other", depth=2, rows=3)), tmp_path / "report.html")
    before = files(tmp_path)
    code, out, err = said(capfd, *[word.replace("ONE", str(two[0])).replace("TWO", str(two[1])) for word in words])
    assert code == 2 and tells in err and not out and len(err.splitlines()) == 1
    assert files(tmp_path) == before


@pytest.mark.parametrize("place", [".", "health"])
def test_nothing_is_written_into_a_run_unasked(place, two, capfd, monkeypatch):
    monkeypatch.chdir(two[0] / place)
    code, _, err = said(capfd, two[0], two[1])
    assert code == 2 and "this is the folder of a run" in err and not (two[0] / place / "compare.html").exists()
    code, _, _ = said(capfd, two[0], two[1], "--out=asked.html")
    assert code == 0 and (two[0] / place / "asked.html").exists()


def test_a_full_disk_is_told_after_the_table(two, tmp_path, capfd, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("resjax.train.writers.write_bytes", full)
    code, out, err = said(capfd, *two, f"--out={tmp_path / 'x.html'}")
    assert code == 1 and "steps to target" in out and "No space left" in err and "Traceback" not in err


def test_jax_is_not_needed_and_help_needs_nothing(two, tmp_path):
    script = (
        "import sys, resjax.compare as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "assert c.main(sys.argv[1:]) == 0 and not {'jax', 'flax', 'matplotlib'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", script, *map(str, two), f"--out={tmp_path / 'x.html'}"]
    done = subprocess.run(words, env=environment(quick=False), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
