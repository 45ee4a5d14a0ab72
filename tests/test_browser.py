"""Are the pages right in a browser? At 12 blocks and at 1,000, light and dark: no complaint, no words that overlap or are hardly seen."""

import pytest

import browser
import synthetic_run
from resjax.health import report
from resjax.health.comparison import compare, read
from resjax.health.comparison.page import page as compared
from resjax.health.diagnosis import diagnose
from resjax.health.diagnosis.page import page as diagnosed
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
    runs = [
        synthetic_run.write_run(folder / name, blocks, 31, scheme)
        for name, blocks, scheme in (("short", depth, "pre_ln"), ("a run of a longer name", 24, "post_ln"))
    ]
    sides, notes = read([str(run) for run in runs])
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
