"""What is the median, the largest, the smallest of what is known? NaN where nothing is, and no warning of it."""

from typing import Any

import numpy as np


def _over(reduce: Any, values: np.ndarray, axis: int | None) -> Any:
    found = reduce(np.ma.masked_invalid(np.asarray(values, np.float64)), axis=axis)
    filled = np.ma.filled(np.ma.asarray(found, np.float64), np.nan)
    return float(filled) if filled.ndim == 0 else filled


def median(values: np.ndarray, axis: int | None = None) -> Any:
    """Of the finite values."""
    return _over(np.ma.median, values, axis)


def largest(values: np.ndarray, axis: int | None = None) -> Any:
    """Of the finite values."""
    return _over(np.ma.max, values, axis)


def smallest(values: np.ndarray, axis: int | None = None) -> Any:
    """Of the finite values."""
    return _over(np.ma.min, values, axis)
