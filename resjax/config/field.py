"""What is one field of a configuration, and how is its value read from Python or from text?"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resjax.errors import Refused, not_one_of

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
UNSET = ("none", "null")
NAMES = {
    "int": "a whole number (int)",
    "float": "a number (float)",
    "bool": "true or false (bool)",
    "str": "a text (str)",
}


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
      path: where it stands, such as 'model.depth'.
      kind: int, float, bool, str; 'steps' (a whole number of steps, or a share of all steps below 1); or 'names' (a
        tuple of some of ``choices``).
      default: its value where nothing is said. None makes the field optional: what decides then is said in ``help``.
      help: one sentence.
      choices: the closed list of a str or of names.
      words: texts that a number may also be.
      low, high: bounds that the value may reach.
      below: a bound that it may not reach.
      short: other spellings, such as fp32 for float32.
    """

    path: str
    kind: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    below: float | None = None
    short: Mapping[str, str] | None = None

    @property
    def optional(self) -> bool:
        return self.default is None

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]

    def type_text(self) -> str:
        """The type, as a listing shows it."""
        if self.kind == "names":
            text = ",".join((*self.choices, "all", "none"))
        elif self.choices:
            text = "|".join(self.choices)
        else:
            text = "|".join((*self.words, "steps or share" if self.kind == "steps" else self.kind)) + self._bounds()
        return f"{text} or None" if self.optional else text

    def allowed(self) -> str:
        """What the field may be, as the end of a sentence."""
        if self.choices:
            text = f"{'some of ' if self.kind == 'names' else 'one of '}{', '.join(self.choices)}"
        elif self.kind == "steps":
            text = "a whole number of steps, or a share of the steps below 1"
        else:
            text = " or ".join((*self.words, NAMES[self.kind])) + self._bounds()
        return f"{text}, or None" if self.optional else text

    def _bounds(self) -> str:
        upper = (
            f"below {self.below:g}" if self.below is not None else f"{self.high:.10g}" if self.high is not None else ""
        )
        if self.low is None:
            return f" {upper}" if upper else ""
        if not upper:
            return f", {self.low:g} or above"
        return f" from {self.low:g} {'and' if self.below is not None else 'to'} {upper}"

    def refuse(self, given: Any) -> Refused:
        return Refused(f"{self.path} is {show(given)}; it must be {self.allowed()}")

    def check(self, value: Any) -> Any:
        """``value`` (from a program) in the field's own type.

        Raises:
          Refused: wrong type, out of bounds, not in the list.
        """
        if value is None:
            if self.optional:
                return None
            raise self.refuse(value)
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # NumPy's, too
            if self.kind != "bool":
                raise self.refuse(bool(value))
            return bool(value)
        if self.kind == "names":
            return self._check_names(value)
        if isinstance(value, str):
            return self._check_text(value)
        if not isinstance(value, numbers.Real) or self.kind in ("bool", "str") or not math.isfinite(value):
            raise self.refuse(value)
        return self._check_number(value)

    def _check_text(self, value: str) -> str:
        value = (self.short or {}).get(value, value)
        if value in self.words:
            return value
        if self.kind != "str" or not value:
            raise self.refuse(value)
        if self.choices and value not in self.choices:
            raise not_one_of(self.path, value, self.choices)
        return value

    def _check_number(self, given: Any) -> int | float:
        value: int | float = int(given) if isinstance(given, numbers.Integral) else float(given)
        whole = int(value) if value == int(value) else None
        if self.kind == "steps":
            if value < 0 or (value > 1 and whole is None):
                raise self.refuse(given)
            return value if whole is None else whole
        if self.kind == "int":
            if whole is None:
                raise self.refuse(given)
            value = whole
        else:
            value = float(value)
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        if not inside or (self.below is not None and value >= self.below):
            raise self.refuse(given)
        return value

    def _check_names(self, value: Any) -> tuple[str, ...]:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple | set | frozenset):
            raise self.refuse(value)
        wanted = [name.strip() if isinstance(name, str) else name for name in names]
        if wanted in (["all"], ["none"]):
            return self.choices if wanted == ["all"] else ()
        for name in wanted:
            if name not in self.choices:
                raise not_one_of(self.path, name, (*self.choices, "all", "none"))
        return tuple(name for name in self.choices if name in wanted)

    def parse(self, text: str) -> Any:
        """The value that ``text`` (from a command line) means.

        Optional fields are unset by None or none. Where 'none' is itself one of the choices it is that choice, and only
        None, as in Python, unsets.

        Raises:
          Refused: as :meth:`check`.
        """
        given, text = text, text.strip()
        if self.optional and (text == "None" or (text.lower() in UNSET and text not in self.choices)):
            return None
        if text == "None" and ("none" in self.choices or self.kind == "names"):
            text = "none"
        if self.kind == "names":
            return self.check(text.strip("()[]").rstrip(","))
        if self.kind == "str" or text in self.words:
            return self.check(text)
        if self.kind == "bool":
            if text.lower() not in TRUE + FALSE:
                raise self.refuse(given)
            return text.lower() in TRUE
        try:
            number: int | float = int(text)
        except ValueError:
            try:
                number = float(text)
            except ValueError:
                raise self.refuse(given) from None
        if not math.isfinite(number):
            raise self.refuse(given)
        return self._check_number(number)


def show(value: Any) -> str:
    """A value in a sentence: text in quotes, numbers bare."""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return f"'{value}'" if isinstance(value, str) else str(value)
