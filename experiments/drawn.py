"""How does the figure of an experiment become a file? SVG whose bytes depend on nothing but what it shows."""

import io
from pathlib import Path
from typing import Any

SALT = "resjax"  # of the names inside a file, which are random otherwise


def svg(figure: Any) -> bytes:
    """A matplotlib figure as an SVG file."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": SALT}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def save(figure: Any, path: Path) -> None:
    """A figure as a file, its folder being made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(svg(figure))
