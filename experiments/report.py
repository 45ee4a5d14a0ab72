"""What do the kept results say about the 83 claims? The page of verdicts, made from them.

python -m experiments.report             write experiments/REPORT.md, report.html, the figures, and the lines of README.md
python -m experiments.report --check     write nothing; exit code 1 where REPORT.md, README.md or a figure is not what the results give
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resjax.main import answer, listen
from resjax.train.writers import write_bytes

if TYPE_CHECKING:
    from experiments.page.evidence import Evidence

FOLDER = Path(__file__).resolve().parent
MARKDOWN, PAGE, README = FOLDER / "REPORT.md", FOLDER / "report.html", FOLDER.parent / "README.md"
BLOCK = re.compile(r"(<!-- verdicts -->\n).*?(<!-- end of the verdicts -->)", re.DOTALL)
DIFFERS = 1


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    if words is None:
        listen()
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the files are not as the results say"
    )
    arguments = parser.parse_args(words)
    return answer(lambda: check() if arguments.check else write())


def texts(evidence: "Evidence") -> dict[Path, str]:
    """The files that are words alone, and what they should hold."""
    from experiments.page import content, markdown

    found = {MARKDOWN: markdown.text(content.page(evidence), evidence)}
    if README.exists():
        lines = content.readme(evidence)
        found[README] = BLOCK.sub(lambda block: f"{block[1]}{lines}{block[2]}", README.read_text(encoding="utf-8"))
    return found


def check() -> int:
    """Whether the files are what the results give; figures are drawn again for that."""
    from experiments.page import drawings
    from experiments.page.evidence import gather

    evidence = gather()
    others = {
        path.name: ""
        for path, text in texts(evidence).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    others |= {one.picture.name: why for one in evidence.kept if (why := drawings.differs(one))}
    for name, why in others.items():
        print(f"{name} is not what the results give{f' ({why})' if why else ''}: python -m experiments.report")
    return DIFFERS if others else 0


def write() -> int:
    """All files anew."""
    from experiments.page import drawings
    from experiments.page.evidence import gather

    evidence = gather()
    figures = {one.picture: drawings.drawn(one) for one in evidence.kept}
    for path, drawing in figures.items():
        whole(path, drawing)
    page = drawn_page(evidence, {path.name: drawing.decode() for path, drawing in figures.items()})
    for path, text in {**texts(evidence), PAGE: page}.items():
        whole(path, text.encode())
    counts = ", ".join(f"{count} {status}" for status, count in evidence.counts().items() if count)
    apart = sum(evidence.counts(construction=True).values())
    print(f"{counts}, {apart} by construction; written: {MARKDOWN.name}, {PAGE.name}, {len(figures)} figures")
    return 0


def drawn_page(evidence: "Evidence", figures: Mapping[str, str]) -> str:
    """The page for a browser.

    Args:
      figures: SVG by the name of its file.
    """
    from experiments.page import content, html

    return html.text(content.page(evidence), evidence, figures)


def whole(path: Path, data: bytes) -> None:
    """A file anew, whole or not at all; one that holds the same stays."""
    if not path.exists() or path.read_bytes() != data:
        write_bytes(path, data)


if __name__ == "__main__":
    sys.exit(main())
