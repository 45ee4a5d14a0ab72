"""Does the table of outcomes say what the runs say, and do several processes keep their rows side by side?"""

import json
import threading

import pytest

from benchmarks import outcomes

ROWS = {
    "lr=0.001,seed=0": {"outcome": "bigram", "eval_loss": 2.3},
    "lr=0.003,seed=0": {"outcome": "trained", "eval_loss": 2.0},
    "lr=0.003,seed=1": {"outcome": "trained", "eval_loss": 2.1},
    "lr=0.003,seed=2": {"outcome": "nonfinite", "eval_loss": "nan"},
    "lr=0.01,seed=0": {"outcome": "nonfinite", "eval_loss": "nan"},
}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(outcomes, "RESULTS", tmp_path / "outcomes.json")
    monkeypatch.setattr(outcomes, "PAGE", tmp_path / "outcomes.md")
    return tmp_path


def test_the_best_rate_is_that_of_the_lowest_finite_loss_at_the_first_seed():
    assert outcomes.best(ROWS) == 3e-3
    assert outcomes.best({"lr=0.001,seed=0": ROWS["lr=0.01,seed=0"]}) is None
    assert outcomes.best({}) is None


def test_a_row_counts_the_seeds_at_the_best_rate_only():
    assert outcomes.summary(ROWS) == ("0.003", "2 trained, 1 nonfinite", "2.050", "2.000 to 2.100")
    assert outcomes.summary({}) == ("-", "not run yet", "-", "-")
    assert outcomes.summary({"lr=0.01,seed=0": ROWS["lr=0.01,seed=0"]})[1] == "nonfinite"


def test_every_scheme_and_form_has_a_line():
    page = outcomes.page({"pre_ln": ROWS})
    assert "| `pre_ln` | 0.003 | 2 trained, 1 nonfinite |" in page
    for label in ("plain", "hyper_connections:dynamic", "attnres:block"):
        assert f"| `{label}` | - | not run yet |" in page


def test_a_scheme_that_does_not_train_needs_a_word(monkeypatch):
    monkeypatch.setattr(outcomes, "WHY", {"`plain`": "Expected."})
    trained = {"lr=0.01,seed=0": {"outcome": "trained", "eval_loss": 2.0}}
    rows = {"plain": ROWS, "pre_ln": trained, "post_ln": ROWS, "keel": {"lr=0.01,seed=0": ROWS["lr=0.01,seed=0"]}}
    assert outcomes.unexplained(rows) == ["post_ln", "keel"]
    assert "**`plain`.** Expected." in outcomes.page(rows)


def test_of_every_kept_scheme_that_does_not_train_the_page_says_why():
    assert outcomes.unexplained(outcomes.read()) == []


def test_rows_written_at_once_are_all_kept(kept):
    def write(i):
        outcomes.merged(f"scheme{i % 3}", {f"lr=0.001,seed={i}": {"outcome": "trained"}})

    writers = [threading.Thread(target=write, args=(i,)) for i in range(12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = json.loads(outcomes.RESULTS.read_text())
    assert sorted(key for row in rows.values() for key in row) == sorted(f"lr=0.001,seed={i}" for i in range(12))


def test_what_is_kept_is_not_trained_again(kept, monkeypatch):
    called = []
    monkeypatch.setattr(outcomes.subprocess, "run", lambda *a, **k: called.append(a))
    for rate in outcomes.RATES:
        for seed in outcomes.SEEDS:
            outcomes.merged("plain", {f"lr={rate:g},seed={seed}": {"outcome": "bigram", "eval_loss": 2.3}})
    assert outcomes.main(["plain"]) == 0
    assert not called
    assert "| `plain` | 0.001 | 5 bigram |" in outcomes.PAGE.read_text()


@pytest.mark.parametrize("share", ("3/2", "0/2", "half", "1", "1/0"))
def test_a_share_that_is_none_is_refused(share, kept, capsys):
    with pytest.raises(SystemExit) as stopped:
        outcomes.main([f"--share={share}"])
    assert stopped.value.code == 2
    assert f"--share is '{share}'" in capsys.readouterr().err


def test_shares_cover_every_scheme_once(kept, monkeypatch):
    trained = []
    monkeypatch.setattr(outcomes, "train", lambda label, fields, cells: trained.append(label))
    for share in ("1/3", "2/3", "3/3"):
        outcomes.main([f"--share={share}"])
    assert sorted(trained) == sorted([*outcomes.schemes(), *outcomes.TRIED])
