"""Does a sweep's line keep what is asked for, the same as a run's own, without changing what is trained?"""

import json
from dataclasses import replace

import numpy as np
import pytest

from resjax.config.load import load
from resjax.config.validate import resolve
from resjax.errors import Refused
from resjax.health.record import MORE_PROBES
from resjax.health.studies import STUDIES
from resjax.sweeps import one
from resjax.sweeps.kept import profile, rounded
from resjax.sweeps.one import spikes
from resjax.sweeps.wanted import ENDS_ONLY, PROBES, Looks, Wanted, from_config
from resjax.train.subject import subject_of
from test_studies_shared import compilations
from test_sweep import LR_AND_SEED, STEPS, by_fields, lines, ordinary, swept

pytestmark = pytest.mark.usefixtures("quick")
KEEP = """
import jax, jax.numpy as jnp
import numpy as np

mean_of = jax.jit(lambda x: jnp.mean(x, axis=(0, 1)))

def look(subject, before):
    rate, batch = subject.origin.next_rate, subject.origin.training_batch(1)
    after = subject.origin.next_model()
    mean = jnp.mean(jnp.stack([mean_of(stream[-1]) for stream in subject.streams([subject.depth])]), axis=0)
    embed = subject.model.embed[...]
    found = {
        "drift": None if before is None else np.linalg.norm(np.asarray(mean) - before["mean"]),
        "stayed": None if before is None else bool(np.array_equal(embed, before["embed"])),
        "moves": float(jnp.max(jnp.abs(after.embed[...] - embed))),
        "seen": [subject.step, len(subject.rows), subject.tokens, rate, batch.shape],
    }
    return found | {"_memory": {"mean": mean, "embed": embed}}

def keep():
    return {
        "curves": True,
        "profiles": (2, "end"),
        "probes": ("update_ratio", "embed_rms"),
        "studies": ("ablation", "update", "steadiness"),
        "looks": {"steps": (2, 4, "end", 900), "look": look},
    }
"""


@pytest.fixture(scope="module")
def config(calm):
    return calm


def keeping(config, folder, text=KEEP):
    path = folder / "keeping.py"
    path.write_text(config.read_text() + text)
    return path


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    """The lines of 2 rates and 2 seeds with their curves, and no more."""
    folder = tmp_path_factory.mktemp("plain") / "sweep"
    assert swept(config, folder, "--curves", *LR_AND_SEED) == 0
    return lines(folder)


@pytest.fixture(scope="module")
def kept(config, tmp_path_factory):
    """The same with all that can be kept."""
    folder = tmp_path_factory.mktemp("kept")
    assert swept(keeping(config, folder), folder / "sweep", *LR_AND_SEED) == 0
    return folder


# ------------------------------------------------------------------ what there is


def test_what_is_kept_changes_no_number(plain, kept):
    rows = by_fields(lines(kept / "sweep"))
    for key, row in by_fields(plain).items():
        assert {name: rows[key][name] for name in row} == row, "bit for bit, all losses of all steps included"
        assert set(rows[key]) - set(row) == {"profiles", "probes", "studies", "look", "looks"}


def test_profiles_have_the_probes_that_are_asked_for(kept):
    row = lines(kept / "sweep")[0]
    assert row["probes"] == ["update_ratio", "embed_rms"] and set(row["profiles"]) == {"2", str(STEPS)}
    assert set(row["profiles"]["2"]) == set(row["probes"])
    assert np.shape(row["profiles"]["2"]["update_ratio"]) == (2, 2) and row["profiles"]["2"]["embed_rms"] > 0


def test_studies_of_a_cell_are_those_of_its_ordinary_run(kept, config, tmp_path):
    (row,) = [row for row in lines(kept / "sweep") if row["fields"] == {"optimizer.lr": 1e-2, "seed": 1}]
    run = ordinary(config, tmp_path / "run", optimizer__lr=1e-2, seed=1)
    assert run["eval_loss"] == pytest.approx(row["eval_loss"], rel=3e-7)
    looked = subject_of(tmp_path / "run")
    assert list(row["studies"]) == ["ablation", "update", "steadiness"] and row["studies"]["update"]["change"] > 0
    for name, found in row["studies"].items():
        assert same(found, rounded(STUDIES[name].run(looked))), name


def same(a, b):
    """To the last of four digits or the one before it, small differences of losses within their rounding."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == pytest.approx(b, rel=2e-3, abs=2e-6) if isinstance(a, float) else a == b


def test_looks_see_the_state_and_what_the_one_before_remembered(kept):
    for row in lines(kept / "sweep"):
        looks = row["looks"]
        assert row["look"] == "look" and list(looks) == ["2", "4", str(STEPS)]
        assert [look["seen"][:2] for look in looks.values()] == [[2, 2], [4, 4], [STEPS, STEPS]]
        assert all(look["seen"][2] >= 4096 and look["seen"][4] == [4, 17] for look in looks.values())
        assert looks["2"]["drift"] is None and looks["4"]["drift"] > 0 and looks["4"]["stayed"] is False
        assert looks["2"]["moves"] > 0 and "_memory" not in looks["2"]
        curve = [one["loss"] for one in row["curve"] if "loss" in one]
        assert row["spikes"] == {"score": 0.0, "episodes": 0, "fatal": 0, "max_loss": max(curve)}


def test_the_same_again_trains_nothing_and_more_trains_anew(kept, config, tmp_path, monkeypatch):
    path = keeping(config, tmp_path)
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "results.jsonl").write_bytes((kept / "sweep" / "results.jsonl").read_bytes())
    trained = []
    monkeypatch.setattr(one, "train", lambda config, *more: trained.append(config) or {})
    monkeypatch.setattr("resjax.sweeps.worker.compile_shared", lambda *_: pytest.fail("compiled"))
    assert swept(path, folder, "--studies=steadiness,ablation", "--profiles=2", *LR_AND_SEED) == 0
    assert swept(config, folder, *LR_AND_SEED) == 0, "less is there already"
    row, cell = lines(folder)[0], resolve(load(str(config), [("train.steps", STEPS)]), "cpu")
    asked = from_config({"profiles": (2, "end"), "probes": ("embed_rms",), "studies": "ablation"}, "x")
    assert asked.held(row, cell)
    for more in (
        {"studies": ("lens",)},
        {"profiles": (3,)},
        {"probes": None},
        {"probes": ("stream_rms",)},
        {"looks": Looks((2,), named("other"))},
        {"looks": Looks((3,), named("look"))},
    ):
        assert not replace(asked, **more).held(row, cell), more
    assert replace(asked, looks=Looks((2, 0, 900), named("look"))).held(row, cell)
    early = row | {"error": "step 5: not finite", "steps": 4, "studies": {}, "looks": {"2": {}}, "profiles": {"2": {}}}
    assert replace(asked, studies=("lens",), looks=Looks((2, 4, 0), named("look"))).held(early, cell)
    assert not replace(asked, looks=Looks((3,), named("look"))).held(early, cell)
    old = {name: value for name, value in row.items() if name not in ("probes", "spikes", "studies", "looks", "look")}
    assert replace(asked, studies=()).held(old, cell) and ENDS_ONLY.held(old, cell) and not asked.held(old, cell)


def named(name):
    def look(subject, before):
        return {}

    look.__name__ = name
    return look


# ------------------------------------------------------------------ faults


def test_what_fails_says_so_and_fails_no_cell(config, tmp_path, monkeypatch):
    def fails(subject):
        raise Refused("there is nothing to see")

    monkeypatch.setitem(STUDIES, "massive", replace(STUDIES["massive"], run=fails))
    text = """
def look(subject, before):
    if subject.step == 1:
        return {"kept": before, "_memory": 7}
    return {"kept": before, "at": object()} if subject.step == 2 else [1] if subject.step == 3 else {"kept": before}

def keep():
    return {"studies": ("massive", "lens", "decoding"), "looks": {"steps": (1, 2, 3, 4), "look": look}}
"""
    close, counts = one.close, []

    def counted(*given):
        with compilations() as seen:
            row = close(*given)
        counts.append(len(seen))
        return row

    monkeypatch.setattr(one, "close", counted)
    assert swept(keeping(config, tmp_path, text), tmp_path / "sweep", "--grid", "residual.scale=0.5,1.0") == 0
    row, other = lines(tmp_path / "sweep")
    assert counts[0] > 0 and counts[1] == 0, "studies of a second cell, with another gain, compile nothing"
    for each in (row, other):
        assert each["studies"]["lens"]["loss"][-1] == pytest.approx(each["eval_loss"], abs=0.1)
    assert row["studies"]["lens"]["loss"] != other["studies"]["lens"]["loss"]
    assert row["studies"]["massive"] == {"error": "there is nothing to see"}
    accuracy = np.array(row["studies"]["decoding"]["accuracy"])
    assert np.shape(accuracy) == (4, 3) and accuracy[0, 0] > 0.5 and row["studies"]["decoding"]["training"] > 7000
    assert row["looks"]["1"] == {"kept": None} and row["looks"]["4"] == {"kept": 7}
    assert row["looks"]["2"]["error"].startswith("TypeError: a object cannot be kept")
    assert row["looks"]["3"] == {"error": "look returns [1]; it must return a dict"}


@pytest.mark.parametrize("policy", ["stop", pytest.param("skip", marks=pytest.mark.slow)])
def test_a_cell_that_leaves_the_numbers_has_no_studies(config, tmp_path, policy, monkeypatch):
    path = keeping(config, tmp_path)
    fields = {"optimizer__lr": 1e38, "optimizer__warmup": 0, "train__on_nonfinite": policy, "train__steps": 40}
    assert swept(path, tmp_path / "sweep", "--grid", "seed=0", **fields) == 1
    (row,) = lines(tmp_path / "sweep")
    assert row["status"] == "diverged" and row["studies"] == {} and row["spikes"]["max_loss"] == "inf"
    assert row["spikes"]["fatal"] == 1 and all(int(step) <= row["steps"] for step in row["looks"])
    monkeypatch.setattr(one, "train", lambda *_: pytest.fail("trained again"))
    assert swept(path, tmp_path / "sweep", "--grid", "seed=0", **fields) == 1


# ------------------------------------------------------------------ forms


def test_profiles_of_probes_by_role_and_of_single_numbers():
    probes = {"role_rms": np.full((2, 3), 0.123456), "embed_rms": np.float32(2.0), "moved": np.float32(np.nan)}
    assert profile(probes) == {"role_rms": [[0.1235] * 3] * 2, "embed_rms": 2.0, "moved": None}
    assert profile(probes, ("embed_rms",)) == {"embed_rms": 2.0}


@pytest.mark.slow
def test_profiles_of_all_groups(config, tmp_path):
    options = ("--profiles=1", "--grid", "residual.scale=0.5,1.0")
    groups = "forward,backward," + ",".join(MORE_PROBES)
    assert swept(config, tmp_path / "sweep", *options, train__steps=2, health__groups=groups) == 0
    rows = lines(tmp_path / "sweep")
    for row in rows:
        shown = row["profiles"]["1"]
        assert set(shown) == set(PROBES) - {"moved"} and "probes" not in row
        assert row["roles"] == ["q", "k", "v", "write", "fc_in", "norm_scale", "norm_bias"][: len(row["roles"])]
        for name, value in shown.items():
            by_block = {"update_ratio_block": (2,), "param_grad_block": (2,)}
            shape = (2, len(row["roles"])) if name.startswith("role_") else by_block.get(name, (2, 2))
            assert np.shape(value) == (() if name.startswith(("embed_", "final_")) else shape), name
        assert shown["attention_entropy"][0][0] > 0 and shown["attention_entropy"][0][1] is None
        assert all(change > 0 for change in shown["role_change"][0][:5]) and shown["effective_rank"][1][1] > 1
    assert rows[0]["profiles"]["1"]["update_rms"] != rows[1]["profiles"]["1"]["update_rms"]


def test_rounded_is_json():
    found = rounded(
        {"a": np.float32(1.23456), "b": np.array([[np.nan, np.inf]]), "c": (np.int64(123456), True, None, "x", [])}
    )
    assert found == {"a": 1.235, "b": [[None, np.inf]], "c": [123456, True, None, "x", []]}
    assert rounded(np.array([123456, 7])) == [123456, 7] and rounded(np.bool_(True)) is True
    with pytest.raises(TypeError, match="cannot be kept"):
        rounded({"a": object()})
    with pytest.raises(TypeError, match="is not a string"):
        rounded({1: 2})
    json.dumps(rounded({"a": np.float32(1)}))


def test_spikes_of_a_run():
    draw = np.random.default_rng(0).normal(size=400)
    calm = [2 + 0.01 * x for x in draw]
    assert spikes(calm) == {"score": 0.0, "episodes": 0, "fatal": 0, "max_loss": max(calm)}
    jump = [*calm[:200], 5.0, *calm[201:]]
    assert spikes(jump) == {"score": 0.25, "episodes": 1, "fatal": 0, "max_loss": 5.0}
    gone = [*calm[:200], *[3.0] * 200]
    assert spikes(gone)["fatal"] == 1 and spikes([2.0, float("nan")])["max_loss"] == np.inf


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "body, options, sentence",
    [
        ("return 3", (), "keep() of"),
        ("return {'curve': True}", (), "did you mean 'curves'?"),
        ("return {'curves': 1}", (), "give True or False"),
        ("return {'profiles': (1, 'last')}", (), "has 'last'; give steps from 1"),
        ("return {'profiles': (1, 0)}", (), "has '0'; give steps from 1"),
        ("return {'profiles': 1, 'probes': ('update_ration',)}", (), "did you mean 'update_ratio'?"),
        ("return {'probes': ('update_ratio',)}", (), "no profiles are kept"),
        ("return {'profiles': 1, 'probes': 'effective_rank'}", (), "add ranks"),
        ("return {'profiles': 1, 'probes': 'moved'}", (), "other than float32"),
        ("return {}", ("--profiles=1", "--config.health.groups=none"), "nothing is measured"),
        ("return {'studies': ('abletion',)}", (), "did you mean 'ablation'?"),
        ("return {'studies': {'lens': 1}}", (), "give a tuple"),
        ("return {}", ("--studies=lenz",), "did you mean 'lens'?"),
        ("return {}", ("--studies=",), "a study of --studies is ''"),
        ("return {'looks': {'steps': (1,)}}", (), "a function of (subject, before)"),
        ("return {'looks': {'steps': (), 'look': print}}", (), "has no steps"),
        ("return {'looks': {'steps': 1.5, 'look': print}}", (), "give a tuple"),
        ("return {'studies': 1 / 0}", (), "ZeroDivisionError"),
    ],
)
def test_bad_input_is_told_in_one_sentence(config, tmp_path, capsys, body, options, sentence):
    path = keeping(config, tmp_path, f"\ndef keep():\n    {body}\n")
    assert swept(path, tmp_path / "sweep", "--grid", "seed=0", *options) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and not (tmp_path / "sweep").exists()


def test_the_command_line_adds_to_the_file():
    of_file = from_config({"profiles": ("end", 3), "studies": "lens"}, "x")
    assert of_file.more(True, "1,3", "all") == Wanted(True, (0, 1, 3), None, tuple(STUDIES), None)
    assert of_file.more(False, None, None) == of_file and from_config(None, "x") == ENDS_ONLY
    assert of_file.more(False, None, "ablation").studies == ("lens", "ablation"), "in the order of STUDIES"
