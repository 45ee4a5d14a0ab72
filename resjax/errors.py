"""How does resjax say no? One clear sentence, exit code 2, nothing left behind."""

import difflib
from collections.abc import Iterable


class Refused(Exception):
    """Bad input. The message is one sentence naming the field, what was given, what is allowed, and the nearest valid name."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'pre_ln'?``, or an empty string where no valid name is near."""
    close = difflib.get_close_matches(str(given), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def not_one_of(field: str, given: object, allowed: Iterable[str]) -> Refused:
    """The refusal of a name that is not in a closed list."""
    allowed = list(allowed)
    return Refused(f"{field} is '{given}', which is none of {', '.join(allowed)}{nearest(str(given), allowed)}")
