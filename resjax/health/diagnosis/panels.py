"""How is a profile over depth drawn? As a small SVG with axes, ranges and a line a series, in the colours of the page."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, log10

import matplotlib
import matplotlib.image
import numpy as np

WIDTH, HEIGHT = 530, 236
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 40
POINTS = 500  # of a line; more blocks than that are thinned, extremes kept
DOTS = 24  # blocks up to which each has a dot
DECADES = 6.0  # to either side of the median: beyond, a line leaves the frame
BLOCK, BEFORE, SHARE = "block", "before block", "share of the depth"  # what a horizontal axis counts
MINUS = "\u2212"


@dataclass(frozen=True, eq=False)
class Line:
    """One line: values by block (NaN where there is none), its name and its look: of a time 'early' or 'late'; of one of several
    runs or quantities 'q0' to 'q4'. ``each``: how many of its values a block has."""

    name: str
    values: np.ndarray
    look: str
    blocks: np.ndarray | None = None
    each: int = 1

    def places(self) -> np.ndarray:
        """Where its values stand on the axis of blocks: their own number where nothing else is said."""
        return np.arange(len(self.values)) if self.blocks is None else np.asarray(self.blocks)


@dataclass(frozen=True, eq=False)
class Range:
    """What values should keep to: low and high by block, its name, and its look ('range'; 'first' or 'second' where two runs have one)."""

    low: np.ndarray
    high: np.ndarray
    name: str
    look: str = "range"
    blocks: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Panel:
    """One quantity over depth.

    Attributes:
      title, unit, what: as printed.
      lines: of one run or of two.
      log: logarithmic axis.
      ranges: what values should keep to, drawn behind.
      claimed: the span of the rule 0.01 to 0.1, drawn behind.
      reach: what the vertical axis spans at least, so that values far below what matters do not look lively.
      axis: what the horizontal axis counts; ``SHARE`` of networks of unlike depth.
      missing: of runs that have no line a sentence each.
    """

    title: str
    unit: str
    what: str
    lines: Sequence[Line]
    log: bool = False
    ranges: Sequence[Range] = ()
    claimed: bool = False
    reach: tuple[float, float] | None = None
    axis: str = BLOCK
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Frame:
    """What the axes of a panel span.

    Attributes:
      low, high: vertically; logarithms on a logarithmic axis.
      last: horizontally, from 0.
    """

    low: float
    high: float
    last: float


CLAIMED = (0.01, 0.1)
CLAIMED_NAME = "0.01–0.1, often called healthy"


def drawn(panel: Panel, frame: Frame | None = None) -> str:
    """The figure: title, picture, legend; on the axes of ``frame``, by default on those that fit it."""
    frame = frame or frame_of([panel])
    return figure(panel.title, panel.unit, panel.what, _svg(panel, frame), _legend(panel, frame))


def side_by_side(panels: Sequence[Panel]) -> str:
    """Figures of one quantity on the same vertical axis, each as far as its own blocks go; one without a value says what it lacks."""
    whole = [panel for panel in panels if told(panel)]
    frame = frame_of(whole)
    return "".join(
        drawn(panel, replace(frame, last=frame_of([panel]).last)) if panel in whole else empty(panel)
        for panel in panels
    )


def empty(panel: Panel) -> str:
    """The place of a figure that cannot be drawn."""
    why = " ".join(panel.missing) or "No value is finite."
    return figure(panel.title, panel.unit, panel.what, f'<p class="nothing">{escape(why)}</p>', "")


def figure(title: str, unit: str, what: str, picture: str, legend: str) -> str:
    """Title, sentence, picture, legend; the last two are HTML."""
    head = f'<h3>{escape(title)} <span class="unit">{escape(unit)}</span></h3>'
    return (
        f'<figure class="profile">{head}<p class="what">{escape(what)}</p>{picture}'
        f"<figcaption>{legend}</figcaption></figure>"
    )


def told(panel: Panel) -> bool:
    """Whether there is a value to draw."""
    return any(np.isfinite(line.values).any() for line in panel.lines)


def _heights(values: np.ndarray, log: bool) -> np.ndarray:
    """Where values stand: their logarithms, or themselves; NaN where they have no place."""
    values = np.asarray(values, np.float64)
    if not log:
        return np.where(np.isfinite(values), values, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isfinite(values) & (values > 0), np.log10(values), np.nan)


def frame_of(panels: Sequence[Panel]) -> Frame:
    """The axes on which all of ``panels``, of one quantity, can be drawn."""
    log, lines = panels[0].log, [line for panel in panels for line in panel.lines]
    known = [heights[np.isfinite(heights)] for line in lines if len(heights := _heights(line.values, log))]
    every = np.concatenate(known) if known else np.zeros(0)
    if not len(every):
        every = np.zeros(1)
    low, high = float(every.min()), float(every.max())
    if log:
        middle = float(np.median(every))
        low, high = max(low, middle - DECADES), min(high, middle + DECADES)
    edges = [_heights(edge, log) for panel in panels for one in panel.ranges for edge in (one.low, one.high)]
    limits = np.concatenate([edge[np.isfinite(edge)] for edge in edges]) if edges else np.zeros(0)
    if len(limits):  # a range is shown as far as it goes, up to twice the lines' own span
        reach = max(high - low, 0.5 if log else 1e-9)
        low, high = max(min(low, limits.min()), low - reach), min(max(high, limits.max()), high + reach)
    if panels[0].reach is not None and not log:
        low, high = min(low, panels[0].reach[0]), max(high, panels[0].reach[1])
    pad = 0.06 * (high - low) or (0.3 if log else 0.5 * abs(high) or 0.5)
    last = max([1, *(line.places()[-1] for line in lines if len(line.values))])
    return Frame(low - pad, high + pad, 1.0 if panels[0].axis == SHARE else float(last))


def _svg(panel: Panel, frame: Frame) -> str:
    low, high, last = frame.low, frame.high, frame.last
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(block: float) -> float:
        return LEFT + (right - LEFT) * block / last

    def y(height: float) -> float:
        return bottom - (bottom - TOP) * (min(max(height, low), high) - low) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)} over depth">']
    if _claimed_in(panel, frame):
        top, foot = (y(log10(edge)) for edge in reversed(CLAIMED))
        parts.append(f'<rect x="{LEFT}" y="{top:.1f}" width="{right - LEFT}" height="{foot - top:.1f}" class="band"/>')
    for height, text in _ticks(low, high, panel.log):
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y(height):.1f}" y2="{y(height):.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(height) + 4:.1f}" text-anchor="end">{text}</text>')
    parts += [_area(one, panel.log, x, y) for one in panel.ranges]
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="axis"/>')
    for tick, text in _even(0, 1, 5) if panel.axis == SHARE else _whole_ticks(last):
        parts.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    parts.append(
        f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(panel.axis)}</text>'
    )
    for line in panel.lines:
        parts.append(_line(line, panel.log, x, y))
    return "".join([*parts, "</svg>"])


def _line(line: Line, log: bool, x, y) -> str:  # type: ignore[no-untyped-def]
    heights, blocks = _heights(line.values, log), line.places()
    if len(heights) > POINTS:  # of every bin its smallest and largest
        size = ceil(len(heights) / (POINTS // 2))
        keep = []
        for first in range(0, len(heights), size):
            part = heights[first : first + size]
            if np.isfinite(part).any():
                keep += sorted({first + int(np.nanargmin(part)), first + int(np.nanargmax(part))})
        heights, blocks = heights[keep], blocks[keep]
    path, open_ = [], True
    for block, height in zip(blocks, heights, strict=True):
        if not np.isfinite(height):
            open_ = True
            continue
        path.append(f"{'M' if open_ else 'L'}{x(block):.1f} {y(height):.1f}")
        open_ = False
    made = f'<path d="{"".join(path)}" class="curve {line.look}"/>'
    if len(heights) <= DOTS:
        for block, height, value in zip(blocks, heights, np.asarray(line.values), strict=True):
            if np.isfinite(height):
                tip = f"{escape(line.name)}, {block:g}: {value:.3g}"
                made += f'<circle cx="{x(block):.1f}" cy="{y(height):.1f}" r="2.4" class="dot {line.look}"><title>{tip}</title></circle>'
    return made


def _area(one: Range, log: bool, x, y) -> str:  # type: ignore[no-untyped-def]
    low, high = (_heights(edge, log) for edge in (one.low, one.high))
    blocks = np.arange(len(low)) if one.blocks is None else one.blocks
    known = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    if not len(known):
        return ""
    if len(known) > POINTS:
        known = known[np.linspace(0, len(known) - 1, POINTS).astype(int)]
    there = [f"{x(blocks[i]):.1f} {y(high[i]):.1f}" for i in known]
    back = [f"{x(blocks[i]):.1f} {y(low[i]):.1f}" for i in known[::-1]]
    return f'<path d="M{"L".join(there + back)}Z" class="{one.look}"/>'


def _claimed_in(panel: Panel, frame: Frame) -> bool:
    """Whether something of the rule's span is inside the axes."""
    low, high = map(log10, CLAIMED)
    return panel.claimed and panel.log and frame.low < high and low < frame.high


def _legend(panel: Panel, frame: Frame) -> str:
    keys = [f'<span><i class="key line {line.look}"></i>{escape(line.name)}</span>' for line in panel.lines]
    keys += [f'<span><i class="key {one.look}"></i>{escape(one.name)}</span>' for one in panel.ranges]
    if _claimed_in(panel, frame):
        keys.append(f'<span><i class="key claimed"></i>{CLAIMED_NAME}</span>')
    keys += [f"<span>{escape(text)}</span>" for text in panel.missing]
    return "".join(keys)


def tick_text(value: float) -> str:
    """A tick's text."""
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 1e5:
        return f"{value:.6g}".replace("-", MINUS)
    digits, _, exponent = f"{value:.2g}".partition("e") if "e" in f"{value:.2g}" else (f"{value:.0e}".partition("e"))
    raised = str(int(exponent)).translate(
        str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
    )
    return ("10" if digits in ("1", "1.0") else f"{digits}·10") + raised


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """Three to eight ticks: heights and their texts."""
    if log:
        decades = range(ceil(low - 1e-9), floor(high + 1e-9) + 1)
        if len(decades) >= 3:
            every = max(1, round(len(decades) / 6))
            return [(float(e), tick_text(10.0**e)) for e in decades if e % every == 0]
        for digits in ((1, 2, 5), (1, 2, 3, 5, 7), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            found = [e + log10(d) for e in range(floor(low), ceil(high) + 1) for d in digits]
            found = [at for at in found if low <= at <= high]
            if len(found) >= 3:
                return [(at, tick_text(float(f"{10**at:.2g}"))) for at in found]
        return [(log10(value), text) for value, text in _even(10**low, 10**high, 4) if value > 0]
    return _even(low, high, 5)


def _even(low: float, high: float, count: int) -> list[tuple[float, str]]:
    rough = (high - low) / count
    base = 10.0 ** floor(log10(rough)) if rough > 0 else 1.0
    step = next(m * base for m in (1, 2, 5, 10) if m * base >= rough * 0.999)
    return [
        (i * step, tick_text(float(f"{i * step:.8g}")))
        for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    ]


def _whole_ticks(last: float) -> list[tuple[float, str]]:
    return [(value, text) for value, text in _even(0, last, 7) if float(value).is_integer()]


# ---- matrices


def matrix(
    title: str, unit: str, what: str, values: np.ndarray, span: tuple[float, float], blocks: Sequence[int]
) -> str:
    """A figure of (points, points): what one depth has to do with another, depth 0 at the lower left."""
    image = io.BytesIO()
    shown = np.repeat(np.repeat(values[::-1], _cell(values), 0), _cell(values), 1)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0))  # no value: the page shows through
    matplotlib.image.imsave(image, np.ma.masked_invalid(shown), vmin=span[0], vmax=span[1], cmap=colours, format="png")
    data = base64.b64encode(image.getvalue()).decode("ascii")
    side = HEIGHT - TOP - BOTTOM
    first, last = int(blocks[0]), int(blocks[-1])
    right = LEFT + side
    strip = io.BytesIO()
    matplotlib.image.imsave(strip, np.linspace(1, 0, 64)[:, None].repeat(4, 1), cmap="viridis", format="png")
    bar = base64.b64encode(strip.getvalue()).decode("ascii")
    marks = (
        (LEFT - 6, TOP + side, "end", str(first)),
        (LEFT - 6, TOP + 9, "end", str(last)),
        (LEFT, HEIGHT - BOTTOM + 16, "start", str(first)),
        (right, HEIGHT - BOTTOM + 16, "end", str(last)),
        (LEFT + side / 2, HEIGHT - 6, "middle", BEFORE),
        (right + 46, TOP + 9, "start", tick_text(span[1])),
        (right + 46, TOP + side, "start", tick_text(span[0])),
    )
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in marks)
    texts += f'<text text-anchor="middle" transform="translate(14 {TOP + side / 2}) rotate(-90)">{BEFORE}</text>'
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<image href="data:image/png;base64,{data}" x="{LEFT}" y="{TOP}" width="{side}" height="{side}" preserveAspectRatio="none"/>'
        f'<image href="data:image/png;base64,{bar}" x="{right + 28}" y="{TOP}" width="12" height="{side}" preserveAspectRatio="none"/>'
        f"{texts}</svg>"
    )
    return figure(title, unit, what, picture, f"<span>{last}: after all blocks</span>")


def _cell(values: np.ndarray) -> int:
    """Pixels a side of a cell, so that a picture of few cells is not blurred."""
    return max(1, 390 // len(values))
