"""What do all pages have in common? One head, one look, one way to draw: each is a file that opens offline and asks for nothing."""

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = (
    '<p class="mark"><svg viewBox="0 0 40 16" width="40" height="16" aria-hidden="true"><path d="M0 8H40"/>'
    '<path d="M6 8c0-7 4-7 8-7s8 0 8 7" class="thin"/><circle cx="22" cy="8" r="3"/></svg>resjax, {}</p>'
)


def whole_page(
    title: str,
    maker: str,
    body: str,
    styles: Iterable[Path] = (),
    data: Mapping[str, Any] | None = None,
    scripts: Iterable[Path] = (),
) -> str:
    """The whole page as text.

    Args:
      title: of the window, plain text.
      maker: the module that makes it; :func:`made_by` finds it again.
      body: what stands on it, HTML.
      styles: CSS files beside page.css.
      data: what page.js and ``scripts`` draw; without it the page has no script at all.
      scripts: JavaScript files beside page.js.
    """
    script = ""
    if data is not None:
        code = "".join(_text(path) for path in (HERE / "page.js", *scripts))
        script = (
            '<div id="tip" role="status" hidden></div>\n'
            f'<script type="application/json" id="data">{embedded(data)}</script>\n'
            f'<script>"use strict";\n(() => {{\n{code}start();\n}})();</script>\n'
        )
    fill = {
        "script_source": "script-src 'unsafe-inline'; " if script else "",
        "maker": escape(maker),
        "title": escape(title),
        "css": "".join(_text(path) for path in (HERE / "page.css", *styles)),
        "body": body,
        "script": script,
    }
    return filled(HERE / "page.html", fill)


def filled(template: Path, fill: Mapping[str, str]) -> str:
    """The template with HTML in its holes ``{{name}}``."""
    # One pass: what is filled in is not looked at again, so that it cannot ask for more.
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: fill[hole[1]], _text(template))


def mark(what: str) -> str:
    """The line above a page's title: resjax, and what the page is."""
    return MARK.format(escape(what))


def made_by(path: Path) -> str:
    """The ``maker`` of the page in a file; empty where the file is none of ours."""
    with open(path, "rb") as file:
        head = file.read(2048).decode("utf-8", errors="replace")
    found = re.search(r'<meta name="generator" content="(resjax\.[\w.]+)">', head)
    return found[1] if head.startswith("<!doctype html>") and found else ""


def embedded(data: Mapping[str, Any]) -> str:
    """Strict JSON that may stand inside a script element, whatever its strings hold."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
