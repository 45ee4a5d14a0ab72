"""Does ``--from`` start from exactly the saved state, under exactly the changed configuration?"""

import json
import shutil

import pytest

import runs
from resjax.train.fork import parse
from runs import STEPS, arrays, files, health, recorded_batches, rows, run, same, state_hash, steps, summary

pytestmark = pytest.mark.usefixtures("quick")


def recorded(config, folder, **fields):
    """20 steps without a stop, with a checkpoint at 5, 10, 15, 20: (folder, hashes of its batches)."""
    with recorded_batches() as batches:
        assert run(config, folder, **fields) == 0
    return folder, batches


@pytest.fixture(scope="module")
def random_run(config, tmp_path_factory):
    return recorded(config, tmp_path_factory.mktemp("random") / "run")


@pytest.fixture(scope="module")
def whole(calm, tmp_path_factory):
    return recorded(calm, tmp_path_factory.mktemp("whole") / "run", **ROPE)


ROPE = {"model__positions": "rope"}


def lineage(folder):
    return json.loads((folder / "config.json").read_text())["lineage"]


def parameters(folder, step):
    return {path: array for path, array in arrays(folder, step).items() if path.startswith("params/")}


@pytest.mark.parametrize("origin", ["@15", ""])
def test_an_unchanged_fork_is_the_run(origin, config, random_run, tmp_path):
    """Bit for bit, from a step or from the newest, with all that is random."""
    whole, source = random_run, tmp_path / "source"
    shutil.copytree(whole[0], source)
    if not origin:
        for step in (15, 20):
            shutil.rmtree(source / f"checkpoints/{step}")
    before, first = files(source), int(origin[1:] or 10)
    with recorded_batches() as used:
        assert run(config, tmp_path / "fork", f"--from={source}{origin}") == 0
    assert used == whole[1][first:]
    assert rows(tmp_path / "fork") == rows(whole[0])[first:]
    assert rows(tmp_path / "fork", "eval_loss") == [row for row in rows(whole[0], "eval_loss") if row["step"] >= first]
    expected = {name: values[health(whole[0])["steps"] > first] for name, values in health(whole[0]).items()}
    assert same(health(tmp_path / "fork"), expected)
    assert state_hash(tmp_path / "fork", STEPS) == state_hash(whole[0], STEPS)
    assert summary(tmp_path / "fork")["param_hash"] == summary(whole[0])["param_hash"]
    recorded = lineage(tmp_path / "fork")
    assert recorded["run"] == str(source) and recorded["step"] == first and recorded["changed"] == {}
    assert recorded["hash"] == state_hash(whole[0], first)
    assert lineage(whole[0]) is None
    assert files(source) == before


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        (
            {"train__steps": 14, "optimizer__lr": 0.01, "optimizer__schedule": "constant"},
            {
                "train.steps": {"was": 20, "is": 14},
                "optimizer.lr": {"was": 0.003, "is": 0.01},
                "optimizer.schedule": {"was": "cosine", "is": "constant"},
            },
        ),
        ({"precision__param": "bfloat16"}, {"precision.param": {"was": "float32", "is": "bfloat16"}}),
        (
            {"data__length": 24, "data__batch": 8},
            {"data.length": {"was": 16, "is": 24}, "data.batch": {"was": 4, "is": 8}},
        ),
        ({"residual__name": "scaled"}, {"residual.name": {"was": "pre_ln", "is": "scaled"}}),
        ({"seed": 3}, {"seed": {"was": 0, "is": 3}}),
    ],
)
def test_a_changed_configuration_takes_over_the_state(fields, changed, calm, whole, tmp_path, capfd):
    fork = tmp_path / "fork"
    fields = {"train__steps": 12, **ROPE, **fields}
    with recorded_batches() as batches:
        assert run(calm, fork, f"--from={whole[0]}@10", **fields) == 0
    assert f"starting in {fork} from step 10 of {whole[0]}" in capfd.readouterr().out
    assert changed.items() <= lineage(fork)["changed"].items()
    first, old = parameters(fork, 10), parameters(whole[0], 10)
    if "precision__param" in fields:
        assert {array.dtype.name for array in first.values()} == {"bfloat16"}
        old = {path: array.astype(first[path].dtype) for path, array in old.items()}
    assert same(first, old)
    assert [row["step"] for row in rows(fork)] == list(range(11, fields["train__steps"] + 1))
    own_data = {"data__length", "data__batch", "seed"} & fields.keys()
    assert (batches[:2] == whole[1][10:12]) != bool(own_data)
    assert int(arrays(fork, 10)["cursor"]) == (0 if own_data else 10)
    if "optimizer__schedule" in fields:
        assert [row["lr"] for row in rows(fork)] == pytest.approx([0.01] * 4)


def test_more_steps_continue_the_schedule_of_the_new_end(calm, whole, tmp_path):
    """As an uninterrupted run with that end would have had it from here on."""
    assert run(calm, tmp_path / "fork", f"--from={whole[0]}", train__steps=30, **ROPE) == 0
    assert run(calm, tmp_path / "other", train__steps=30, **ROPE) == 0
    rates = [[row["lr"] for row in rows(tmp_path / name)] for name in ("fork", "other")]
    assert rates[0] == rates[1][20:]
    assert summary(tmp_path / "fork")["steps"] == 30


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model__depth": 3}, ["model.depth is 2 in the checkpoint and 3 here", "[2, ", "[3, "]),
        ({"model__depth": 1}, ["model.depth is 2 in the checkpoint and 1 here"]),
        ({"model__width": 16}, ["model.width is 8 in the checkpoint and 16 here"]),
        ({"residual__name": "post_ln"}, ["residual.name is pre_ln in the checkpoint and post_ln here", "norm"]),
        ({"residual__name": "layerscale"}, ["residual.name is pre_ln in the checkpoint and layerscale here", "gains"]),
        ({"optimizer__name": "sgd"}, ["optimizer.name is adamw in the checkpoint and sgd here", "opt_state"]),
        ({"model__positions": "learned"}, ["model.positions is rope in the checkpoint and learned here", "positions"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_list(fields, words, calm, whole, tmp_path, capsys):
    """Both values of the field that explains it, and the leaves; nothing is written (A2)."""
    before = files(whole[0])
    assert run(calm, tmp_path / "fork", f"--from={whole[0]}@10", **{**ROPE, "train__steps": 30, **fields}) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert "does not fit" in said and "Traceback" not in said
    assert not (tmp_path / "fork").exists()
    assert files(whole[0]) == before


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ("nowhere", ["holds no run", "config.json"]),
        ("{run}@11", ["checkpoint 11", "other steps: 5, 10, 15, 20"]),
        ("{run}@latest", ["'latest' is not a step", "RUN@STEP"]),
        ("{run}@-1", ["'-1' is not a step"]),
        ("{run}@", ["'' is not a step"]),
        ("", ["names no run"]),
        ("{run}/config.json", ["holds no run"]),
        ("{run}@20", ["train.steps is 20", "has done 20", "more steps"]),
        ("gs://bucket/run", ["no local folder"]),
    ],
)
def test_a_bad_origin_is_refused(origin, words, calm, whole, tmp_path, capsys):
    assert run(calm, tmp_path / "fork", f"--from={origin.format(run=whole[0])}", **ROPE) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert said.count("\n") == 1
    assert not (tmp_path / "fork").exists()


def test_a_name_with_an_at_sign_is_a_name(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "a@10")
    for text, step in (("a@10", None), ("a@10@15", 15)):
        origin = parse(str(tmp_path / text))
        assert origin.folder.path == tmp_path / "a@10" and origin.step == step


def test_a_fork_goes_on_with_and_without_its_origin(calm, whole, tmp_path, capfd):
    """The same command, or the command without --from; the origin may have moved on, or be gone."""
    source, fork = tmp_path / "source", tmp_path / "fork"
    shutil.copytree(whole[0], source)
    fields = {"train__steps": 25, **ROPE}
    assert runs.stopped(calm, fork, 2, f"--from={source}", **fields) == 143
    before = lineage(fork)
    shutil.rmtree(source / "checkpoints/20")
    assert runs.stopped(calm, fork, 1, f"--from={source}", **fields) == 143
    assert f"continuing in {fork} from step 22" in capfd.readouterr().out
    assert run(calm, fork, f"--from={source}@15", **fields) == 2
    assert "was started from" in capfd.readouterr().err
    assert run(calm, fork, f"--from={whole[0]}", **fields) == 2
    shutil.rmtree(source)
    assert run(calm, fork, **fields) == 0
    assert lineage(fork) == before
    assert run(calm, tmp_path / "once", f"--from={whole[0]}", **fields) == 0
    assert rows(fork) == rows(tmp_path / "once")
    assert state_hash(fork, 25) == state_hash(tmp_path / "once", 25)
    assert run(calm, whole[0], f"--from={fork}", **ROPE) == 2
    assert "without --from" in capfd.readouterr().err


@pytest.mark.parametrize("with_origin", [True, False])
def test_a_fork_killed_before_its_first_save_starts_again_from_its_origin(with_origin, calm, whole, tmp_path, capfd):
    """It never silently starts from step 0."""
    fork, options = tmp_path / "fork", [f"--from={whole[0]}@10"]
    assert run(calm, fork, *options, **ROPE) == 0
    expected = state_hash(fork, STEPS)
    for name in ("checkpoints", "health"):
        shutil.rmtree(fork / name)
    for name in ("summary.json", "report.html", "metrics.jsonl"):
        (fork / name).unlink()
    capfd.readouterr()
    assert run(calm, fork, *(options if with_origin else []), **ROPE) == 0
    assert f"starting in {fork} from step 10 of {whole[0]}" in capfd.readouterr().out
    assert state_hash(fork, STEPS) == expected == state_hash(whole[0], STEPS)
    assert rows(fork) == rows(whole[0])[10:]


def test_a_fork_without_a_save_whose_origin_is_gone_is_refused(calm, whole, tmp_path, capsys):
    source, fork = tmp_path / "source", tmp_path / "fork"
    shutil.copytree(whole[0], source)
    assert run(calm, fork, f"--from={source}@10", **ROPE) == 0
    shutil.rmtree(fork / "checkpoints")
    (fork / "summary.json").unlink()
    shutil.rmtree(source / "checkpoints/10")
    assert run(calm, fork, **ROPE) == 2
    assert "checkpoint 10" in capsys.readouterr().err
    shutil.rmtree(source)
    assert run(calm, fork, **ROPE) == 2
    assert "no longer there" in capsys.readouterr().err


def test_a_fork_saves_before_it_compiles(calm, whole, tmp_path, monkeypatch):
    from resjax.train import session

    def fails(*arguments):
        raise RuntimeError("a kill")

    with monkeypatch.context() as patch:
        patch.setattr(session, "compile_programs", fails)
        with pytest.raises(RuntimeError, match="a kill"):
            run(calm, tmp_path / "fork", f"--from={whole[0]}@10", **ROPE)
    assert steps(tmp_path / "fork") == [10]
    assert same(arrays(tmp_path / "fork", 10), arrays(whole[0], 10))
