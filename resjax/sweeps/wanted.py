"""What is kept of a cell beside its ends? The losses over the steps, and profiles by depth at some steps, if asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from resjax.errors import Refused

END = "end"
DIGITS = 4


@dataclass(frozen=True)
class Wanted:
    """What a line holds beside the ends.

    Attributes:
      curves: the losses over the steps.
      profiles: steps, or 0 for the last, whose probes are kept; one beyond a cell's end means its end.
    """

    curves: bool = False
    profiles: tuple[int, ...] = ()

    @classmethod
    def of(cls, curves: bool, profiles: str | None) -> "Wanted":
        """From the command line: ``1,30,end``.

        Raises:
          Refused: a step is no whole number from 1, nor 'end'.
        """
        if profiles is None:
            return cls(curves)
        words = [word.strip() for word in profiles.split(",")]
        for word in words:
            if word != END and not (word.isascii() and word.isdigit() and int(word) >= 1):
                raise Refused(
                    f"--profiles has '{word}'; give steps from 1, and end, with commas between them, such as 1,30,end"
                )
        return cls(curves, tuple(sorted({0 if word == END else int(word) for word in words})))

    def steps(self, config: Any) -> frozenset[int]:
        """The steps of a cell whose probes are kept."""
        last = config.train.steps
        return frozenset(min(step, last) if step else last for step in self.profiles)

    def held(self, row: Mapping[str, Any], config: Any) -> bool:
        """Whether the line of a cell has it all; one that ended early has the steps that it came to."""
        there = row.get("profiles") or {}
        missing = [step for step in self.steps(config) if str(step) not in there and step <= row.get("steps", 0)]
        return ("curve" in row or not self.curves) and not missing


ENDS_ONLY = Wanted()


def profile(probes: Mapping[str, Any]) -> dict[str, Any]:
    """The probes of a step by block and site, and those by block, to four digits; NaN is None."""
    return {name: _rounded(np.asarray(value, np.float64)) for name, value in probes.items() if np.ndim(value)}


def _rounded(values: np.ndarray) -> Any:
    if values.ndim:
        return [_rounded(one) for one in values]
    value = float(values)
    return None if np.isnan(value) else float(f"{value:.{DIGITS}g}") if np.isfinite(value) else value
