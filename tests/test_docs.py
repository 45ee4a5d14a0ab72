"""Are the pages of docs true? The generated catalogue, the examples, the code that the guidance shows."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest

from benchmarks import outcomes, pages
from resjax import catalogue, check
from resjax.config.entry import entry
from resjax.config.schema import HEALTH_GROUPS
from resjax.health.record import FORWARD_PROBES, MORE_PROBES
from resjax.listing import rows

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def test_the_page_of_the_catalogue_is_as_the_code_says():
    want = catalogue.markdown(rows())
    assert (DOCS / "catalogue.md").read_text() == want, "python -m resjax.catalogue --markdown > docs/catalogue.md"


def test_the_pages_of_measured_numbers_are_as_the_numbers_say():
    overhead = pages.overhead(json.loads(pages.OVERHEAD.read_text())["sizes"])
    assert pages.PAGE.read_text() == overhead, "python -m benchmarks.pages"
    if pages.PROBES.exists():
        text, numbers = pages.PROBES_PAGE.read_text(), json.loads(pages.PROBES.read_text())["sizes"]
        assert pages.probes(text, numbers) == text, "python -m benchmarks.pages"
    if pages.SWEEPS.exists():
        text = pages.SWEEPS_PAGE.read_text()
        assert pages.sweeps(text, json.loads(pages.SWEEPS.read_text())) == text, "python -m benchmarks.pages"
    else:
        assert pages.MEASURED not in pages.SWEEPS_PAGE.read_text(), "numbers that nothing has measured"
    assert outcomes.PAGE.read_text() == outcomes.page(outcomes.read()), "python -m benchmarks.outcomes --table"


def test_the_page_of_probes_names_all_of_them():
    text = pages.PROBES_PAGE.read_text()
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| (.*?) \|", text, re.MULTILINE))
    assert tuple(rows) == HEALTH_GROUPS
    for group, names in MORE_PROBES.items():
        assert tuple(re.findall(r"`(\w+)`", rows[group])) == names
    assert {*FORWARD_PROBES} < {*re.findall(r"`(\w+)`", rows["forward"])}
    made = pages.probes(text, {"1x8x8x1": {"health off": {"temporary_mib": 1.0, "compile_seconds": 2.0}}})
    assert made.startswith(text.partition(pages.MEASURED)[0]) and "| 1x8x8x1 | health off | 1 |" in made


def test_the_guidance_shows_the_example_and_names_what_exists():
    text = (DOCS / "guidance.md").read_text()
    shown = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert shown in (DOCS / "examples" / "my_scheme.py").read_text()
    assert len([line for line in shown.splitlines() if line.strip()]) <= 15
    for name in re.findall(r"^\|.*?\| (`.*?) \|", text, re.MULTILINE):
        for one in re.findall(r"`(\w+)`", name):
            assert entry(one).name == one
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (DOCS / target).exists(), target


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("made", ["of_nnx", "of_linen"])
def test_a_block_of_ones_own_learns(made):
    example = loaded(DOCS / "examples" / "own_block.py")
    with jax.numpy_dtype_promotion("standard"):  # of optax
        first, last = example.train("rezero", getattr(example, made), 40)
    assert last < 0.9 * first


@pytest.mark.slow
def test_the_example_runs(capsys):
    with jax.numpy_dtype_promotion("standard"):
        loaded(DOCS / "examples" / "own_block.py").main()
    assert len(capsys.readouterr().out.splitlines()) == 6


BROKEN = '''
import jax.numpy as jnp
from resjax.residual import CATALOGUE, Around, Carry, CarrySpec, Flow
from dataclasses import dataclass


@dataclass(frozen=True)
class Loud(CarrySpec):
    """Widens the stream, lets tokens see later ones, and is not undone by its undo."""

    uses = frozenset({"skip"})

    def build(self, width, site, norms, key):
        return LoudSite()


class LoudSite(Carry):
    def read(self, stream, site):
        return stream, None

    def write(self, stream, memo, update, around):
        after = stream + update + jnp.mean(stream, axis=1, keepdims=True)
        after = after.astype(jnp.float32)
        return after, Flow(stream, after, stream, update, stream, stream)


loud = CATALOGUE["pre_ln"].but(name="loud", equation="", carry=Loud())
'''


def test_the_check_says_in_words_what_fails(tmp_path, monkeypatch, capsys):
    path = tmp_path / "loud.py"
    path.write_text(BROKEN)
    kept = ("it has a name", "the stream keeps", "no position sees", "it is a value")
    monkeypatch.setattr(check, "CHECKS", {k: v for k, v in check.CHECKS.items() if k.startswith(kept)})
    assert catalogue.main([f"--check={path}:loud"]) == 1
    out = capsys.readouterr().out
    assert "equation is empty" in out
    assert "with a bfloat16 stream" in out or "TypePromotionError" in out or "TypeError" in out
    assert "an earlier position, or another sample, sees a later token" in out
    assert "holds  it is a value" in out and "3 of the checks fail" in out


@pytest.mark.slow
def test_the_check_of_the_example_holds(capsys):
    assert catalogue.main([f"--check={DOCS / 'examples' / 'my_scheme.py'}:fading"]) == 0
    assert "all checks hold" in capsys.readouterr().out
