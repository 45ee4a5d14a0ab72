"""The picture on top of README.md: the head of a run's report and one of its figures, as a browser draws them.

    python docs/picture.py RUN docs/health_report.png

Needs Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FIGURE = "update_ratio"
WIDTH, HEIGHT, SCALE = 1120, 820, 1.5
ONLY = f"""
main {{ padding-top: 24px }} main > section {{ display: none }}
main > section:has(#{FIGURE}) {{ display: block; margin-top: 20px; padding-top: 0; border: 0 }}
section:has(#{FIGURE}) > :is(h2, p), .maps > :not(#{FIGURE}) {{ display: none }}
#{FIGURE} {{ margin-top: 8px }}
"""


def main(run: str, picture: str) -> int:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium on this machine", file=sys.stderr)
        return 1
    page = (Path(run) / "report.html").read_text().replace("</style>", f"{ONLY}</style>", 1)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "report.html").write_text(page)
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        options += [f"--force-device-scale-factor={SCALE}", f"--screenshot={Path(picture).absolute()}"]
        subprocess.run([browser, *options, f"file://{place}/report.html"], check=True, capture_output=True, timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
