"""How do measurements become part of a cell's line? As lists and numbers to four digits that JSON can hold."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

DIGITS = 4


def profile(probes: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """The probes of a step called ``names`` (None = all): by block and site, by block and role, by block, and single numbers."""
    return {name: rounded(np.asarray(value)) for name, value in probes.items() if names is None or name in names}


def rounded(value: Any) -> Any:
    """Numbers that are not whole to four digits, NaN as None, arrays and tuples as lists; names, truth and infinities as they are.

    Raises:
      TypeError: a key that is no text, or a value of another kind.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string")
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if not isinstance(value, float):
        if not hasattr(value, "__array__"):
            raise TypeError(f"a {type(value).__name__} cannot be kept: {value!r:.80}")
        array = np.asarray(value)
        if array.ndim:
            return [rounded(one) for one in array]
        if not np.issubdtype(array.dtype, np.inexact) and array.dtype.kind != "V":  # V: bfloat16
            return array.item()
        value = float(array)
    return None if np.isnan(value) else float(f"{value:.{DIGITS}g}")
