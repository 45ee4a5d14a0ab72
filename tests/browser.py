"""What is wrong with a page in a browser? Chromium opens a copy of it, which measures its own words and says what it found."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

WIDTH, HEIGHT = 1280, 900  # pixels of the window
CONTRAST = 4.5  # of text to what is behind it, WCAG 2.2, 1.4.3
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0")
SCRIPT = Path(__file__).with_name("browser.js")


@cache
def chromium() -> str | None:
    """The browser; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needed = pytest.mark.skipif(chromium() is None, reason="needs Chromium")


def faults(page: str, folder: Path, dark: bool = False, width: int = WIDTH) -> list[str]:
    """A sentence for everything that is wrong: console messages, words that overlap, that are cut off, that are hardly seen.

    Args:
      page: HTML of a whole page.
      folder: where a copy may be written.
    """
    copy = folder / f"{'dark' if dark else 'light'}{width}.html"
    script = f"<script>const CONTRAST = {CONTRAST};\n{SCRIPT.read_text()}</script>"
    # a page without a script of its own forbids all of them
    page = (
        page
        if "script-src" in page
        else page.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    )
    before, end, after = page.rpartition("</body>")
    copy.write_text(before + script + end + after)
    found = browse(copy, "--dump-dom", dark=dark, width=width)
    said = re.search(r'<script type="application/json" id="seen">(.*?)</script>', found.stdout, re.DOTALL)
    assert said, f"the page did not come to its end: {found.stderr[-2000:]}"
    seen = json.loads(said[1])
    assert seen["words"] > 10, "the page is empty"
    return [line for line in found.stderr.splitlines() if "CONSOLE" in line] + seen["faults"]


def picture(page: str, path: Path, dark: bool = False, width: int = WIDTH, height: int = HEIGHT) -> None:
    """A page as a browser shows it, as PNG, for people to look at."""
    copy = path.with_suffix(".html")
    copy.write_text(page)
    browse(copy, f"--screenshot={path.absolute()}", dark=dark, width=width, height=height)


def browse(
    path: Path, *more: str, dark: bool = False, width: int = WIDTH, height: int = HEIGHT
) -> subprocess.CompletedProcess[str]:
    """The browser's output and what it logged, console messages included, after it has opened a file."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    own = (f"--user-data-dir={path.parent / 'profile'}", f"--window-size={width},{height}", scheme)
    command = [str(chromium()), *FLAGS, *own, *more, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
