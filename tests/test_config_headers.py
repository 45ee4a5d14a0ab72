"""Do the config files say what a run of them gives? Headers against benchmarks/results/configs.json."""

import json

import pytest

from benchmarks import configs

ROWS = configs.read()


@pytest.mark.parametrize("name", configs.names())
def test_a_header_names_its_command_and_what_to_expect(name):
    text = (configs.ROOT / "configs" / f"{name}.py").read_text()
    assert f"    python -m resjax.main --config=configs/{name}.py\n" in text
    said = configs.expected(name)
    if said is None:
        assert name not in ROWS, (
            f"configs/{name}.py was measured: write it down with python -m benchmarks.configs --headers"
        )
        pytest.skip("not measured yet")
    assert name in ROWS, f"configs/{name}.py states numbers that benchmarks/results/configs.json does not hold"


@pytest.mark.parametrize("name", ROWS)
def test_a_header_is_honest(name):
    row = ROWS[name]
    assert name in configs.names(), f"configs.json holds '{name}', which is no config file"
    assert configs.disagreements(name, row["nats_below_bigram"], row["seconds"]) == []
    assert row["nats_below_bigram"] == pytest.approx(row["bigram"] - row["eval_loss"], abs=2e-4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project of one config and one row."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(configs, "ROOT", tmp_path)
    monkeypatch.setattr(configs, "RESULTS", tmp_path / "benchmarks" / "results" / "configs.json")
    (tmp_path / "configs" / "one.py").write_text('"""One.\n\nExpected: to be measured\n"""\n')
    (tmp_path / "configs" / "two.py").write_text('"""Two.\n\nExpected: to be\nmeasured\n\nMore.\n"""\n')
    return tmp_path


@pytest.mark.parametrize(
    ("seconds", "nats", "text"),
    [
        (13.0, -1.7, "about 15 s on 2 cores, 1.70 nats above the bigram baseline"),
        (250.0, 0.321, "about 4 min on 2 cores, 0.32 nats below the bigram baseline"),
        (1500.0, 0.2, "about 25 min on 2 cores, 0.20 nats below the bigram baseline"),
    ],
)
def test_what_is_written_is_what_is_read(folder, seconds, nats, text):
    row = {"seconds": seconds, "nats_below_bigram": nats, "cores": 2}
    configs.keep({"one": row})
    configs.keep({"two": row})
    assert configs.expected("one") is None and configs.expected("two") is None
    configs.write_headers()
    assert text in configs.header("one") and text in configs.header("two")
    assert (folder / "configs" / "two.py").read_text().endswith('\n\nMore.\n"""\n')
    assert configs.disagreements("one", nats, seconds) == configs.disagreements("two", nats, seconds) == []
    off = configs.NATS + 0.01
    assert len(configs.disagreements("one", nats + off)) == len(configs.disagreements("one", nats - off)) == 1
    for slower in (3.0, 1 / 3.0):
        assert len(configs.disagreements("one", nats, slower * seconds)) == 1
    assert configs.disagreements("one", float("nan")) != []


def test_a_header_that_says_neither_is_an_error(folder):
    (folder / "configs" / "one.py").write_text('"""One.\n\nExpected: soon\n"""\n')
    with pytest.raises(ValueError, match="not of the form"):
        configs.expected("one")
    (folder / "configs" / "one.py").write_text('"""One."""\n')
    with pytest.raises(ValueError, match="must have one"):
        configs.expected("one")


def test_a_run_is_compared_with_its_header(folder, capsys):
    configs.keep({"one": {"seconds": 60.0, "nats_below_bigram": 0.3, "cores": 2}})
    configs.write_headers()
    for loss, code in ((2.12, 0), (2.3, 1)):
        run = folder / "runs" / "one"
        run.mkdir(parents=True, exist_ok=True)
        (run / "summary.json").write_text(json.dumps({"baselines": {"bigram": 2.4}, "eval_loss": loss}))
        assert configs.main(["--check", str(run)]) == code
        assert "bigram baseline" in capsys.readouterr().out
