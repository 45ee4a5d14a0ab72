"""What is a finding? One sentence's worth of trouble: where, since when, by which figure, against which range, and why it matters."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Finding:
    """One finding of the doctor.

    Attributes:
      kind: its short name; see :data:`resjax.health.diagnosis.remedies.KINDS`.
      where: blocks, sites, direction, in words.
      step: the step that it speaks of.
      evidence: what was measured, in words.
      advice: what to look at first.
      reason: why it is a fault and not a habit of the scheme.
      figure, value: name and value of what was measured; None where no one number says it.
      range: the bounds that the value should keep; None = open on that side.
      source: where the bounds come from.
      since: the step since which the value does not keep them.
      at: the sites (block, site) that it speaks of, where it names some.
    """

    kind: str
    where: str
    step: int
    evidence: str
    advice: str = ""
    reason: str = ""
    figure: str | None = None
    value: float | None = None
    range: tuple[float | None, float | None] | None = None
    source: str = ""
    since: int | None = None
    at: np.ndarray | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Finding":
        """A finding of :func:`resjax.health.findings.examine`."""
        one = cls(**{name: value for name, value in found.items() if name in cls.__dataclass_fields__})
        return one if one.range is None else replace(one, range=(one.range[0], one.range[1]))

    def as_dict(self) -> dict[str, Any]:
        """The same for machines, without what is not known; its sites are those of ``where``."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "at"}
        return {name: value for name, value in values.items() if value not in (None, "")}

    def bounds(self) -> str:
        """The range in words: ``0.02 to 0.4``, ``at least 0.001``, ``at most 0.98``; empty where there is none."""
        if self.range is None:
            return ""
        low, high = self.range
        if low is None or high is None:
            return f"at least {low:.3g}" if low is not None else f"at most {high:.3g}" if high is not None else ""
        return f"{low:.3g} to {high:.3g}"
