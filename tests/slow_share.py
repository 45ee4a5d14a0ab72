"""Which slow tests run today? A pytest plugin that keeps a share of them.

    python -m pytest -p tests.slow_share --slow-share=5

runs one fifth. The share moves on by a day, so five days in a row run every slow test once; ``--slow-share=3/5`` names
a share, to repeat what another day has found. Tests that are not marked slow are not touched.
"""

import datetime
import hashlib
import re

import pytest


def part_of(test: str, parts: int) -> int:
    """The part, from 1, that a test belongs to: by a hash of its id, so that tests which come and go move no others."""
    return int.from_bytes(hashlib.sha256(test.encode()).digest()[:8]) % parts + 1


def parse(text: str, today: datetime.date) -> tuple[int, int]:
    """'PARTS' or 'PART/PARTS' as (part, parts); without a part, that of the day."""
    match = re.fullmatch(r"(?:(\d+)/)?(\d+)", text)
    part, parts = (int(match[1] or 0), int(match[2])) if match else (0, 0)
    if parts and not (match and match[1]):
        part = today.toordinal() % parts + 1
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--slow-share is '{text}'; write PARTS, such as 5, or PART/PARTS, such as 3/5")
    return part, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run a share of the tests marked slow: PARTS (the day chooses which) or PART/PARTS"
    parser.addoption("--slow-share", metavar="SHARE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if text := config.getoption("--slow-share"):  # read once, so that a run over midnight keeps its share
        config.stash[SHARE] = parse(text, datetime.date.today())
        # workers of a distributed run get the options of the controller
        config.option.slow_share = "{}/{}".format(*config.stash[SHARE])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if share := config.stash.get(SHARE, None):
        terminalreporter.write_line("slow tests: share {0} of {1} (--slow-share={0}/{1} repeats it)".format(*share))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.stash.get(SHARE, None)
    if not share:
        return
    part, parts = share
    kept, away = [], []
    for item in items:
        other = item.get_closest_marker("slow") and part_of(item.nodeid, parts) != part
        (away if other else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=away)


SHARE = pytest.StashKey[tuple[int, int]]()
