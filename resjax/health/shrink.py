"""How does a large depth-by-step array become a small picture without losing the odd cell?

Neighbouring steps and rows are binned until the array fits the pixels. A bin shows the median of its values, unless one
value lies far outside what bins usually span, or is the smallest or largest of the whole array: then it shows that
value. A single bad cell among a million stays visible.
"""

import base64
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

Scale = Literal["log", "linear", "signed"]

TOP = 65000  # codes 0..TOP span the values; above are the cells without one
NONE, BAD, ZERO = 65535, 65534, 65533  # no value; non-finite; exactly 0 on a logarithmic scale
FAR = 6.0  # an outlier lies this many times farther from its bin's median than the values of a usual bin do ...
FAR_OF_RANGE = 0.08  # ... and this share of the whole range


@dataclass(frozen=True)
class Picture:
    """A binned array: ``codes`` (rows, columns) uint16, and what they mean.

    Attributes:
      codes: 0..TOP from ``low`` to ``high`` (log10 of the values on a log scale), or NONE, BAD, ZERO.
      low, high: ends of the code range; equal where all values are.
      step_bins, row_bins: index of the first step and row of every bin, and the end.
    """

    codes: np.ndarray
    low: float
    high: float
    step_bins: np.ndarray
    row_bins: np.ndarray

    def packed(self) -> str:
        """The codes as base64 of little-endian uint16, row by row."""
        return base64.b64encode(self.codes.astype("<u2").tobytes()).decode("ascii")


def bins(count: int, most: int) -> np.ndarray:
    """Edges of at most ``most`` bins of equal size (the last may be smaller) over ``count`` items."""
    size = -(-count // most)
    return np.append(np.arange(0, count, size), count)


def shrink(values: np.ndarray, bad: np.ndarray, scale: Scale, rows: int, columns: int) -> Picture:
    """The picture of ``values`` (steps, rows of depth); ``bad`` marks the cells to show as non-finite.

    Where a bin holds several kinds, non-finite wins over exactly 0 (log scale), that over a value, and that over none.
    """
    step_bins, row_bins = bins(len(values), columns), bins(values.shape[1], rows)
    z = height(values, scale)
    z[bad] = np.nan
    cells = _grouped(z, step_bins, row_bins, np.nan)
    ordered = np.sort(cells, axis=-1)  # NaN last
    count = np.isfinite(ordered).sum(axis=-1)
    pick = lambda index: np.take_along_axis(ordered, np.clip(index, 0, None)[..., None], axis=-1)[..., 0]  # noqa: E731
    middle, low, high = pick((count - 1) // 2), pick(np.zeros_like(count)), pick(count - 1)
    known = count > 0
    ends = (float(low[known].min()), float(high[known].max())) if known.any() else (0.0, 0.0)
    below, above = middle - low, high - middle
    far = np.where(above >= below, high, low)
    distance = np.maximum(above, below)
    usual = float(np.median(distance[count > 1])) if (count > 1).any() else 0.0
    shown = np.where(distance > max(FAR * usual, FAR_OF_RANGE * (ends[1] - ends[0])), far, middle)
    shown = np.where(low == ends[0], low, shown)
    shown = np.where(high == ends[1], high, shown)
    span = ends[1] - ends[0]
    codes = np.full(shown.shape, NONE, np.uint16)
    codes[known] = np.round((shown[known] - ends[0]) * (TOP / span if span else 0.0)).astype(np.uint16)
    if scale == "log":
        codes[_grouped((values == 0) & ~bad, step_bins, row_bins, False).any(axis=-1)] = ZERO
    codes[_grouped(bad, step_bins, row_bins, False).any(axis=-1)] = BAD
    return Picture(np.ascontiguousarray(codes.T), *ends, step_bins, row_bins)


def height(values: np.ndarray, scale: Scale) -> np.ndarray:
    """What the colour is read from: log10 of positive values on a log scale, else the value; NaN for none."""
    z = values.astype(np.float64)
    if scale == "log":
        z = np.log10(z, where=(z > 0) & np.isfinite(z), out=np.full(z.shape, np.nan))
    z[~np.isfinite(z)] = np.nan
    return z


def colour_range(picture: Picture, scale: Scale, reach: tuple[float, float] | None = None) -> tuple[float, float]:
    """Ends of the colour scale, in the units of ``low`` and ``high``: symmetric for signed values, at most 6 decades to
    either side of the median for logarithmic ones (beyond, cells take the end's colour), at least ``reach``, and
    never empty.
    """
    low, high = picture.low, picture.high
    if reach:
        low, high = min(low, reach[0]), max(high, reach[1])
    if reach and scale != "signed":
        return low, high
    if scale == "signed":
        most = max(abs(low), abs(high), 1e-3)
        return -most, most
    if scale == "log":
        codes = picture.codes[picture.codes <= TOP]
        middle = low + (high - low) * float(np.median(codes)) / TOP if codes.size else low
        low, high = max(low, middle - 6), min(high, middle + 6)
        return (low, high) if high - low > 0.02 else (low - 0.5, high + 0.5)
    pad = 0.5 * abs(high) or 0.5
    return (low, high) if high - low > 1e-9 * abs(high) else (low - pad, high + pad)


def thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """A curve of about ``most`` points with the same look: every bin's first, smallest, largest and last point."""
    if len(x) <= most:
        return x, y
    edges = bins(len(x), most // 4)
    keep: set[int] = set()
    for first, end in pairwise(edges):
        part = y[first:end]
        keep |= {int(first), int(end) - 1, int(first + part.argmin()), int(first + part.argmax())}
    index = np.array(sorted(keep))
    return x[index], y[index]


def _grouped(array: np.ndarray, step_bins: np.ndarray, row_bins: np.ndarray, fill: float | bool) -> np.ndarray:
    """(steps, rows) -> (step bins, row bins, values of a bin), the last bins filled up."""
    steps, rows = int(step_bins[1]), int(row_bins[1])
    shape = ((len(step_bins) - 1) * steps, (len(row_bins) - 1) * rows)
    full = np.full(shape, fill, array.dtype)
    full[: array.shape[0], : array.shape[1]] = array
    return (
        full.reshape(len(step_bins) - 1, steps, len(row_bins) - 1, rows)
        .swapaxes(1, 2)
        .reshape(len(step_bins) - 1, len(row_bins) - 1, -1)
    )
