"""Which tests run today? A pytest plugin that keeps a share of the slow ones, or of the others.

    python -m pytest -p tests.slow_share --slow-share=5

runs one fifth of the slow tests. The share moves on by a day, so five days in a row run every slow test once; ``--slow-share=3/5``
names a share, to repeat what another day has found. Tests that are not marked slow are not touched; ``--quick-share`` is for
those, and touches no slow ones.
"""

import datetime
import hashlib
import re

import pytest

KINDS = {"slow": "marked slow", "quick": "not marked slow"}


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
    for kind, which in KINDS.items():
        text = f"run a share of the tests {which}: PARTS (the day chooses which) or PART/PARTS"
        parser.addoption(f"--{kind}-share", metavar="SHARE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHARES] = {}
    for kind in KINDS:
        if text := config.getoption(f"--{kind}-share"):  # read once, so that a run over midnight keeps its share
            config.stash[SHARES][kind] = share = parse(text, datetime.date.today())
            # workers of a distributed run get the options of the controller
            setattr(config.option, f"{kind}_share", "{}/{}".format(*share))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for kind, share in config.stash[SHARES].items():
        terminalreporter.write_line("{2} tests: share {0} of {1} (--{2}-share={0}/{1} repeats it)".format(*share, kind))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, away = [], []
    for item in items:
        share = config.stash[SHARES].get("slow" if item.get_closest_marker("slow") else "quick")
        other = share is not None and part_of(item.nodeid, share[1]) != share[0]
        (away if other else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=away)


SHARES = pytest.StashKey[dict[str, tuple[int, int]]]()
