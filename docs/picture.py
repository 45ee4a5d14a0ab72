"""The pictures of README.md and docs/reports.md: the head of a run's report and its first figures, as a browser draws them.

    python docs/picture.py RUN docs/health_report.png
    python docs/picture.py RUN docs/reports/NAME_light.png --full
    python docs/picture.py RUN docs/reports/NAME_dark.png --full --dark

Needs Chromium.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FIGURE = "update_ratio"
WIDTH, HEIGHT, SCALE = 1120, 820, 1.5
FULL_WIDTH = 1280  # as high as what it shows
ONLY = f"""
main > section:not(:has(#{FIGURE})), .maps > :not(#{FIGURE}), section:has(#{FIGURE}) > :is(h2, p) {{ display: none }}
main {{ padding-top: 24px }} main > section:has(#{FIGURE}) {{ margin-top: 20px; padding-top: 0; border: 0 }}
#{FIGURE} {{ margin-top: 8px }}
"""
FULL = f"""
main > section:not(:has(#loss, #{FIGURE})), .maps > :not(#{FIGURE}), .small {{ display: none }}
main {{ padding-bottom: 28px }} main > section {{ margin-top: 28px }} figure {{ margin-top: 14px }}
"""
MEASURE = '<script>document.body.dataset.height = Math.ceil(document.querySelector("main").offsetHeight)</script>'
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--hide-scrollbars"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


def main() -> int:
    parser = argparse.ArgumentParser(description="A picture of a run's report.")
    parser.add_argument("run", help="folder of a run that has a report.html")
    parser.add_argument("picture", help="the PNG file to write")
    parser.add_argument(
        "--full", action="store_true", help="also the loss; as wide as a desktop's window and as high as needed"
    )
    parser.add_argument("--dark", action="store_true", help="as a browser shows it that prefers dark pages")
    asked = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium on this machine", file=sys.stderr)
        return 1
    page = (Path(asked.run) / "report.html").read_text()
    page = page.replace("</style>", f"{FULL if asked.full else ONLY}</style>", 1)
    with tempfile.TemporaryDirectory() as place:
        shown = Path(place) / "report.html"
        shown.write_text(page.replace("</body>", f"{MEASURE}</body>"))
        width, height, scale = (FULL_WIDTH, HEIGHT, 1) if asked.full else (WIDTH, HEIGHT, SCALE)
        flags = [
            *FLAGS,
            f"--user-data-dir={place}/profile",
            f"--blink-settings=preferredColorScheme={0 if asked.dark else 1}",
        ]

        def browse(*more: str) -> str:
            command = [browser, *flags, *more, shown.as_uri()]
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

        if asked.full:
            found = re.search(r'data-height="(\d+)"', browse(f"--window-size={width},{height}", "--dump-dom"))
            height = int(found[1]) if found else height
        picture = Path(asked.picture).absolute()
        browse(f"--window-size={width},{height}", f"--force-device-scale-factor={scale}", f"--screenshot={picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
