"""What is a study? A name, a function of a subject, and what to say about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resjax.health.studies.subject import Subject

TOKENS = 4096


@dataclass(frozen=True)
class Study:
    """A measurement on a state.

    Attributes:
      name: as in ``STUDIES``.
      run: the subject -> results by name: NumPy arrays, floats, strings and lists.
      title: in a few words.
      what: one sentence, with the source.
      cost: quick (a few forward passes), or slow (one a block).
      tokens: held-out tokens that it wants at least.
    """

    name: str
    run: Callable[[Subject], dict[str, Any]]
    title: str
    what: str
    cost: str
    tokens: int = TOKENS
