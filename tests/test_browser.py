"""Are the pages right in a browser? At 12 blocks and at 1,000, light and dark: no complaint, no words that overlap or are hardly seen.

Runs are made up (see synthetic_run.py), nothing is trained.
"""

import numpy as np
import pytest

import browser
import runs
import synthetic_run
from experiments.page.evidence import gather
from experiments.report import drawn_page
from resjax.health import report
from resjax.health.comparison import compare, read
from resjax.health.comparison.page import page as compared
from resjax.health.diagnosis import diagnose
from resjax.health.diagnosis.page import page as diagnosed
from resjax.propagation.cases import build
from resjax.propagation.figure import svg
from resjax.propagation.measured import ENDS, SITE, Measured
from resjax.propagation.result import study
from synthetic_run import case_of

pytestmark = [browser.needed, pytest.mark.slow]
NARROW = 560  # pixels


def one(depth, folder):
    return diagnosed(diagnose(case_of(depth)))


def two(depth, folder):
    return diagnosed(diagnose(case_of(depth, "left")), diagnose(case_of(depth, "right", seed=1)))


def unlike(depth, folder):
    """Of a run without trouble beside one of another depth, in which much is found and no state was studied."""
    arrays = synthetic_run.probe_rows(7, 31, seed=5)
    arrays["update_ratio"][:, 3, 1] *= 30
    arrays["token_cosine"][:, -1:] = 0.993
    arrays["swallowed"][:] = 0.3
    record = synthetic_run.record_of(arrays)
    troubled = case_of(7, "troubled", record=record, studies={}, state=None, dtype="bfloat16")
    return diagnosed(diagnose(case_of(depth, "left")), diagnose(troubled))


def of_run(depth, folder):
    run = synthetic_run.write_run(folder / "run", depth, 31, more=True, trouble=True)
    return report.page(run)


def of_runs(depth, folder):
    folders = [
        synthetic_run.write_run(folder / name, blocks, 31, scheme)
        for name, blocks, scheme in (("short", depth, "pre_ln"), ("a run of a longer name", 24, "post_ln"))
    ]
    sides, notes = read([str(run) for run in folders])
    return compared(compare(sides, notes=notes))


PAGES = {"doctor": one, "doctor of two": two, "doctor of two unlike": unlike, "report": of_run, "compare": of_runs}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("depth", [12, 1000])
@pytest.mark.parametrize("name", PAGES)
def test_pages_of_runs(name, depth, dark, tmp_path):
    assert not browser.faults(PAGES[name](depth, tmp_path), tmp_path, dark)


@pytest.mark.parametrize("name", PAGES)
def test_pages_of_runs_in_a_narrow_window(name, tmp_path):
    assert not browser.faults(PAGES[name](12, tmp_path), tmp_path, width=NARROW)


# ---- the page of verdicts, and figures that are files of their own


@pytest.fixture(scope="module")
def verdicts():
    """As the committed results and figures give it."""
    evidence = gather()
    drawn = {one.picture.name: one.picture.read_text(encoding="utf-8") for one in evidence.kept}
    return drawn_page(evidence, drawn)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [browser.WIDTH, NARROW])
def test_the_page_of_verdicts(verdicts, width, dark, tmp_path):
    assert not browser.faults(verdicts, tmp_path, dark, width)


FRAME = '<!doctype html><html><head><link rel="icon" href="data:,"></head><body style="margin: 0">{}</body></html>'


def propagation(depths, folder):
    """Propagate's figure of three schemes; what is measured is made up, theory is not."""
    studies = []
    for name in ("pre_ln", "post_ln", "hyper_connections"):
        plans = build(str(runs.calm(folder)), [], name, depths, 2)
        made = [plan.case() for plan in plans]
        studies.append(study(made, [made_up(one.depth) for one in made]))
    drawing = svg(studies, "Signal propagation").decode()
    return FRAME.format(drawing[drawing.index("<svg") :])


def made_up(depth, seeds=2):
    """Something smooth with noise of every quantity."""
    rng, deep = np.random.default_rng(0), np.linspace(0, 1, 2 * depth).reshape(1, depth, 2)
    sites = {name: (0.1 + 0.3 * deep) * np.exp(rng.normal(0, 0.1, (seeds, depth, 2))) for name in SITE}
    sites["finite"] = np.ones((seeds, depth, 2))
    return Measured(sites, {name: np.exp(rng.normal(-2, 0.1, seeds)) for name in ENDS}, 1.0, 1.0)


def test_the_figure_of_propagation(tmp_path):
    page = propagation((12, 1000), tmp_path)
    assert not browser.faults(page, tmp_path, width=1400)  # 14 inches


# ---- the check itself


PAGE = """<!doctype html><html><head>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<style>body {{ background: #fff; color: #000 }} p, svg {{ display: block; height: 30px; margin: 0; width: 400px }}
text {{ font-size: 11px }}</style></head>
<body>{}</body></html>"""
RIGHT = (  # each with words of its own, and nothing wrong
    *(f"<p>line {i}</p>" for i in range(12)),
    '<svg><text x="0" y="12">one axis</text><text x="0" y="26">another axis</text></svg>',
    '<p style="overflow-x: auto; white-space: nowrap">' + "far and " * 200 + "</p>",
    '<div style="background: #fff; filter: invert(.9) hue-rotate(180deg)"><p>turned round</p></div>',
    '<p style="visibility: hidden; color: #fff">not to be seen</p>',
)
WRONG = (
    ('<svg><text x="0" y="20">first label</text><text x="30" y="22">second label</text></svg>', "overlap"),
    ('<svg><text x="380" y="20">a label at the edge</text></svg>', '"a label at the edge" is cut off'),
    ('<p style="margin-left: 1200px; white-space: nowrap">a sentence that goes far beyond</p>', "leaves the window"),
    ('<p style="color: #999">pale words</p>', '"pale words" has a contrast of 2.85'),
    ('<div style="background: #222"><p>dark on dark</p></div>', '"dark on dark" has a contrast of 1.3'),
    ('<img src="https://example.org/none.png" alt="">', "violates the following Content Security Policy"),
)


def test_what_is_right_is_passed_over(tmp_path):
    assert browser.faults(PAGE.format("".join(RIGHT)), tmp_path) == []


def test_what_is_wrong_is_told(tmp_path):
    found = browser.faults(PAGE.format("".join([*RIGHT, *(planted for planted, _ in WRONG)])), tmp_path)
    assert all(any(told in one for one in found) for _, told in WRONG) and len(found) == len(WRONG), found
