"""Does a run with a scheme of the user's own keep where it came from, and refuse to go on under a changed one?"""

import hashlib
import shutil

import pytest

from resjax.errors import Refused
from resjax.train.saved import load_run
from resjax.train.writers import read_json
from runs import files, run, state_hash, steps, stopped, summary

pytestmark = pytest.mark.usefixtures("quick")

SCHEME = '''"""Half of every update; α of the paper."""
from resjax.residual import CATALOGUE

HALF = CATALOGUE["pre_ln"].but(name="half", equation="H' = H + α F(N(H))", paper="none", scale=0.5)
'''
CHANGED = SCHEME.replace("scale=0.5", "scale=0.25")  # the same parameters: the saved state would fit


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def begun(calm, tmp_path_factory):
    """A run of 6 steps that was stopped after 3, and the file of its scheme."""
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SCHEME, encoding="utf-8")
    folder = path.parent / "run"
    assert stopped(calm, folder, 3, residual__name=f"{path}:HALF", train__steps=6) == 143
    return folder, path


@pytest.fixture
def again(begun):
    """The same, a copy of the folder; the scheme's file is put back afterwards."""
    folder, path = begun
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    yield copy, path
    path.write_text(SCHEME, encoding="utf-8")
    shutil.rmtree(copy)


def test_the_folder_keeps_source_and_hash(begun):
    folder, path = begun
    facts = read_json(folder / "config.json")
    assert facts["scheme_source"] == {"path": str(path), "sha256": sha256(path), "text": path.read_text("utf-8")}
    assert facts["residual"]["name"] == f"{path}:HALF"


def test_an_entry_of_the_catalogue_has_no_source(calm, tmp_path):
    assert stopped(calm, tmp_path / "run", 1, train__steps=6) == 143
    assert read_json(tmp_path / "run/config.json")["scheme_source"] is None


def test_it_goes_on_under_the_unchanged_file(again, calm, capfd):
    """To what the run comes to that was not stopped; the source is kept."""
    folder, path = again
    fields = {"residual__name": f"{path}:HALF", "train__steps": 6}
    before = read_json(folder / "config.json")["scheme_source"]
    assert run(calm, folder, **fields) == 0
    assert "continuing" in capfd.readouterr().out and steps(folder)[-1] == 6
    assert read_json(folder / "config.json")["scheme_source"] == before
    whole = folder.parent / "whole"
    assert run(calm, whole, **fields) == 0
    assert state_hash(folder, 6) == state_hash(whole, 6)
    assert summary(folder)["param_hash"] == summary(whole)["param_hash"]


@pytest.mark.parametrize("options", [(), ("--evaluate",)], ids=["train", "evaluate"])
def test_a_changed_file_is_refused(options, again, calm, capfd):
    """With one sentence that names both hashes; nothing in the folder changes, and with the old text it goes on."""
    folder, path = again
    was = sha256(path)
    before = files(folder)
    path.write_text(CHANGED, encoding="utf-8")
    fields = {"residual__name": f"{path}:HALF", "train__steps": 6}
    capfd.readouterr()
    assert run(calm, folder, *options, **fields) == 2
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    sentence, line = err.strip().splitlines()
    assert f"the run in '{folder}' cannot go on under another configuration; give a new --workdir" in sentence
    assert line.strip() == f"the file of residual.name had sha256 {was[:12]}, has now {sha256(path)[:12]}"
    assert files(folder) == before
    assert run(calm, folder, *options, **fields) == 2, "a second try is refused like the first"
    path.write_text(read_json(folder / "config.json")["scheme_source"]["text"], encoding="utf-8")
    assert run(calm, folder, *options, **fields) == 0


def test_a_model_is_not_looked_into_under_a_changed_file(again):
    """What samples and studies load: the configuration comes from the folder, the scheme from the file."""
    folder, path = again
    was = sha256(path)
    assert load_run(folder).step == 3
    before = files(folder)
    path.write_text(CHANGED, encoding="utf-8")
    with pytest.raises(Refused) as refused:
        load_run(folder)
    said = str(refused.value)
    assert f"the file of residual.name, '{path}', has changed since the run was made" in said and "\n" not in said
    assert was[:12] in said and sha256(path)[:12] in said and "scheme_source" in said
    path.unlink()
    with pytest.raises(Refused, match=r"the file of residual\.name .* does not exist"):
        load_run(folder)
    assert files(folder) == before


def test_a_missing_file_is_refused(again, calm, capfd):
    folder, path = again
    before = files(folder)
    path.unlink()
    capfd.readouterr()
    assert run(calm, folder, residual__name=f"{path}:HALF", train__steps=6) == 2
    out, err = capfd.readouterr()
    assert out == "" and "does not exist" in err and err.count("\n") == 1
    assert files(folder) == before
