"""Is README.md true? Its commands parse, its links lead somewhere, its lists are complete, its own scheme works."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from resjax import catalogue, compare, doctor, main, propagate, replay, sample, sweep
from resjax.config.load import load
from resjax.config.schema import FIELDS
from resjax.config.scheme import describe
from resjax.residual.entries import FAMILIES
from resjax.sweeps.grid import from_flags

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line)
    for language, text in BLOCKS
    if language == "bash"
    for line in re.split(r"\n| && ", text)
    if line.strip()
]
MODULES = [words[words.index("-m") + 1 :] for words in COMMANDS if "-m" in words]


def setup_cfg() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


def marked(name: str) -> str:
    """The block behind a mark, as .ci/run takes it."""
    found = re.search(rf"^<!-- {re.escape(name)} -->\n```\w+\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no block marked '{name}'"
    return found[1]


@pytest.mark.parametrize(
    "words", [words for words in MODULES if words[0] == "resjax.main"], ids=lambda words: " ".join(words)
)
def test_training_commands_parse_and_their_configs_load(words, tmp_path, monkeypatch):
    others, overrides = main.split_overrides(words[1:])
    arguments = main.parser().parse_args(others)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my_schemes.py").write_text(marked("file: my_schemes.py"))
    monkeypatch.chdir(tmp_path)
    assert describe(load(arguments.config, overrides))


def test_saved_steps_that_commands_name_are_kept():
    """Of a finished run of deep_preln.py the newest ``train.keep`` saves are there."""
    train = load(str(ROOT / "configs" / "deep_preln.py")).train
    saves = sorted({*range(train.save_every, train.steps, train.save_every), train.steps})[-train.keep :]
    named = re.findall(r"runs/deep_preln@(\d+)|--evaluate=(\d+)", README)
    assert len(named) >= 2
    assert {int(one or other) for one, other in named} <= set(saves)


def test_the_other_commands_are_known_and_parse():
    assert {words[0] for words in MODULES} == {"venv", "resjax.main", "resjax.sample", "resjax.sweep", "pytest"}
    for words in MODULES:
        if words[0] == "resjax.sample":
            sample.check(sample.parser().parse_args(words[1:]))
        if words[0] == "resjax.sweep":
            grids = from_flags(sweep.parser().parse_args(words[1:]).grid)
            assert [len(values) for values in grids.values()] == [2, 2]


def test_the_two_commands_are_one_line_each_and_use_what_is_declared():
    extras = setup_cfg()["options.extras_require"]
    for name in ("train", "test"):
        command = marked(f"command: {name}")
        assert command.count("\n") == 1 and command.startswith("python3 -m venv .venv && ")
    assert "-e '.[test]'" in marked("command: test")
    assert set(re.findall(r"'\.\[(\w+)\]'", README)) <= set(extras)
    assert any(Requirement(one).name == "pytest-xdist" for one in extras["test"].split("\n") if one), "-n needs it"


def test_fields_and_flags_that_the_text_names_exist():
    fields = set(re.findall(r"--config\.([a-z_0-9.]*[a-z_0-9])", README))
    assert len(fields) > 5 and fields <= set(FIELDS), fields - set(FIELDS)
    known = (
        main.parser().format_help()
        + sample.parser().format_help()
        + catalogue.parser().format_help()
        + sweep.parser().format_help()
        + propagate.parser().format_help()
        + replay.parser().format_help()
        + doctor.parser().format_help()
        + compare.parser().format_help()
    )
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z_]*)", README)) - {"--config.", "--no"}
    assert {flag for flag in flags if flag not in known} == set()
    for section in ("precision", "mesh"):
        for field in re.findall(rf"`({section}\.\w+)`", README):
            assert field in FIELDS


def test_the_catalogue_is_complete():
    want = "\n".join(
        f"- {family}: {', '.join(f'`{one.name}`' for one in entries)}" for family, entries in FAMILIES.items()
    )
    found = re.search(r"<!-- catalogue -->\n(.*?)\n?<!-- end of the catalogue -->", README, re.DOTALL)
    assert found and found[1] == want, f"put this between the marks:\n{want}"


def test_links_and_pictures_lead_to_files():
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_config_file_is_listed():
    linked = set(re.findall(r"\]\(configs/(\w+)\.py\)", README))
    assert linked == {path.stem for path in (ROOT / "configs").glob("*.py")}


def test_tested_versions_are_inside_the_declared_ranges():
    options = setup_cfg()["options"]
    lines = filter(None, options["install_requires"].split("\n"))
    needs = {need.name: need.specifier for need in map(Requirement, lines)}
    pairs = re.findall(r"Python (\S+) with jax (\S+) and flax ([\d.]+\d)", README)
    assert len(pairs) == 2
    for python, jax, flax in pairs:
        assert jax in needs["jax"] and flax in needs["flax"]
        assert f"{python}.1" in SpecifierSet(options["python_requires"])


def test_the_markov_floors_are_those_of_the_source():
    from resjax.data import markov

    floors = markov.floors(markov.law())
    for value in (floors.unigram, floors.bigram, floors.trigram):
        assert f"{value:.3f}" in README


def test_the_first_screen_has_the_picture_and_both_commands():
    first = README.split("\n## ")[0]
    assert len(first.splitlines()) < 40
    assert all(part in first for part in ("docs/health_report.png", "configs/deep_preln.py", "-m pytest"))
