"""Does the rotation of slow tests reach every test, and only slow ones?"""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slow_share import parse, part_of

ALONE = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # which may name a share itself
ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest
def test_quick(): pass
@pytest.mark.slow
@pytest.mark.parametrize("i", range(8))
def test_slow(i): pass
"""
QUICK = """@pytest.mark.parametrize("i", range(12))
def test_quick(i): pass
"""
DAY = datetime.date(2026, 12, 30)


def test_some_days_in_a_row_run_each_part_once_also_over_new_year():
    days = [DAY + datetime.timedelta(days=i) for i in range(5)]
    assert sorted(parse("5", day) for day in days) == [(part, 5) for part in range(1, 6)]


def test_the_parts_are_about_equal():
    parts = [part_of(f"tests/test_x.py::test_y[{i}]", 5) for i in range(500)]
    assert set(parts) == {1, 2, 3, 4, 5}
    assert all(70 < parts.count(part) < 130 for part in set(parts))


@pytest.mark.parametrize("text", ["0", "0/5", "6/5", "a", "1/", "-1", "1/2/3"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="PART/PARTS"):
        parse(text, DAY)


def test_a_share_of_the_quick_tests_touches_no_slow_ones(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS.replace("def test_quick(): pass", QUICK))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    counts = []
    for part in (1, 2):
        words = [
            "-q",
            "-p",
            "tests.slow_share",
            f"--quick-share={part}/2",
            "--rootdir",
            tmp_path,
            "-c",
            tmp_path / "pytest.ini",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, tmp_path], capture_output=True, text=True, cwd=ROOT, env=ALONE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"quick tests: share {part} of 2" in done.stdout
        counts.append(int(done.stdout.split(" passed")[0].split()[-1]))
    assert sum(counts) == 12 + 2 * 8 and min(counts) > 8, counts


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_slow_tests_run_in_one_part_and_others_in_all(tmp_path, workers):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    counts = []
    for part in (1, 2):
        words = [
            "-q",
            "-p",
            "tests.slow_share",
            f"--slow-share={part}/2",
            "--rootdir",
            tmp_path,
            "-c",
            tmp_path / "pytest.ini",
            tmp_path,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *workers], capture_output=True, text=True, cwd=ROOT, env=ALONE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"slow tests: share {part} of 2" in done.stdout
        counts.append(int(done.stdout.split(" passed")[0].split()[-1]))
    assert sum(counts) == 8 + 2 and min(counts) >= 2, counts
