"""Does the notebook run from top to bottom, and does training work where a notebook may call it?"""

import ast
import importlib
import re
import signal
import threading
from pathlib import Path

import nbformat
import pytest

from resjax.train.signals import Signals

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PATH, HEALTH, VERDICTS = (NOTEBOOKS / f"{name}.ipynb" for name in ("quickstart", "health", "verdicts"))
LARGEST = 300_000  # bytes of the file, figures included


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(PATH, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    """What a cell has printed, displayed and returned, as text."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)


@pytest.mark.parametrize("path", [PATH, HEALTH, VERDICTS], ids=lambda path: path.stem)
def test_the_notebook_is_valid_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    for cell in code_of(notebook):
        assert not any(output.output_type == "error" for output in cell.outputs)
        assert not re.search(r"/(tmp|home|root|Users|var)/", text_of(cell)), "a path of one machine is in the outputs"


def test_what_the_notebook_imports_is_there(notebook):
    found = 0
    for cell in code_of(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("resjax"):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")
                found += 1
    assert found > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's and the client's own
def test_the_notebook_runs(notebook, tmp_path):
    from nbclient import NotebookClient

    fresh = nbformat.from_dict(notebook)
    for cell in code_of(fresh):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(fresh, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = {cell.source: text_of(cell) for cell in code_of(fresh)}

    def of(words):
        return next(text for source, text in texts.items() if words in source)

    assert of("train(config").strip().endswith("\n0"), "the exit code of training"
    assert "Residual health: layerscale, 12 blocks" in of("train(config")
    here, recorded = map(float, re.findall(r"(\d\.\d+) (?:here|in the last)", of("jnp.linalg.norm")))
    assert 0.5 < here / recorded < 2, "the branch followed by hand is not the one that was measured"
    assert len(of("generate(model")) > 50
    pictures = [output for cell in code_of(fresh) for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
    assert not list(tmp_path.iterdir()), "the notebook leaves nothing beside itself"


FOUND = {  # the run, and what the doctor finds in it
    "healthy": "no findings",
    "no_skips": "token collapse: block 11",
    "shouting": "rewriting layers: mlp of block 6",
    "rounded": "swallowed updates: attention",
    "broken": "non-finite value: forward pass, block 7, mlp, scale of the update",
}


def told_in(notebook):
    """What each run's doctor says, by the run's name."""
    return {name: next(text_of(cell) for cell in code_of(notebook) if f'ask("{name}"' in cell.source) for name in FOUND}


def test_the_stored_notebook_finds_each_fault():
    told = told_in(nbformat.read(HEALTH, as_version=4))
    assert all(FOUND[name] in told[name] for name in FOUND), told


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's and the client's own
def test_the_notebook_of_faults_runs_and_finds_each(tmp_path):
    from nbclient import NotebookClient

    fresh = nbformat.read(HEALTH, as_version=4)
    for cell in code_of(fresh):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(fresh, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = told_in(fresh)
    assert all(FOUND[name] in told[name] for name in FOUND), told
    assert not list(tmp_path.iterdir()), "the notebook leaves nothing beside itself"


def test_the_stored_notebook_of_verdicts_is_of_all_results():
    """To be run anew where results are added: its outputs are stored."""
    kept = len(list((NOTEBOOKS.parent / "experiments" / "results").glob("*.json")))
    stored = nbformat.read(VERDICTS, as_version=4)
    assert any(f"{kept} files of results" in text_of(cell) for cell in code_of(stored))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's and the client's own
def test_the_notebook_of_verdicts_runs_whatever_results_there_are(tmp_path):
    from nbclient import NotebookClient

    from experiments.page.evidence import gather

    fresh = nbformat.read(VERDICTS, as_version=4)
    for cell in code_of(fresh):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(fresh, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = "".join(map(text_of, code_of(fresh)))
    evidence = gather()
    assert f"{len(evidence.kept)} files of results; {evidence.tested} of 83 claims tested" in texts
    assert "exit code 0" in texts and texts.count("depth 6, rate") == 4, texts
    assert any("image/png" in output.get("data", {}) for output in code_of(fresh)[-1].outputs)
    assert not list(tmp_path.iterdir()), "the notebook leaves nothing beside itself"


def test_signals_are_left_alone_in_a_thread():
    """Python allows signal handlers in the main thread only; a run elsewhere works without them."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def inside():
        with Signals() as signals:
            seen.append((signals.stop, signals.exit_code, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [(None, 0, before)]
    assert signal.getsignal(signal.SIGTERM) == before
