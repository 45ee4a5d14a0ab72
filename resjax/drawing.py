"""How does a drawn figure look, and how does it become a file? One style; SVG with text as text, the same bytes each time."""

import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

FAINT, NOTE = "#666666", "#444444"  # words in place of data; words below it
WHOLE_DECADES = 2.5  # from so many on, powers of ten are marks enough
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "resjax",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}

styled = matplotlib.rc_context(STYLE)
"""A decorator of functions that draw."""


def svg(figure: Figure, title: str, identifier: str | None = None) -> bytes:
    """The figure as an SVG file that needs nothing else; the same figure gives the same bytes.

    Args:
      title, identifier: what the file says of itself.
    """
    out = io.BytesIO()
    about = {"Date": None, "Title": plain(title), "Identifier": identifier}
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            out, format="svg", metadata={name: text for name, text in about.items() if text or name == "Date"}
        )
    return out.getvalue()


def steps_colours(count: int) -> list[Any]:
    """Colours of a sequence, from light to dark, also in grey."""
    darkest, lightest = 0.1, 0.85
    shares = [lightest + (darkest - lightest) * i / max(1, count - 1) for i in range(count)]
    return [matplotlib.colormaps["viridis"](share) for share in shares]


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Marks of a logarithmic axis as plain numbers, more of them where it spans little."""
    few = np.log10(high / low) < WHOLE_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12 if few else 7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def plain(text: str) -> str:
    """Text that is never taken for a formula."""
    return text.replace("$", r"\$")
