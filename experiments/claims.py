"""What do the two articles claim? Their 83 claims in our words, what tests each, and what has been published about it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("claims.toml")
KINDS = ("experiment", "construction", "exact", "survey")
STANCES = ("agrees", "disagrees", "differs")
TAGS = ("V", "S")  # read in full; read in a summary. What is only remembered is no reference.


@dataclass(frozen=True)
class Literature:
    """What has been published about a claim.

    Attributes:
      stance: one of ``STANCES``; 'differs' where the answer is another one in another regime.
      note, source: what was found, and where.
      tag: one of ``TAGS``.
    """

    stance: str
    note: str
    source: str
    tag: str


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
      id: 'C01' to 'C83'.
      article: 'A' or 'B'; ``sections`` of it.
      text: the claim.
      kind: how it can be told, one of ``KINDS``.
      experiments: names of those that test it, whether there is a file of them or not.
      readings: of a text that can be read in several ways, or says several things, {name: what it says}; each has its own verdict.
    """

    id: str
    article: str
    sections: tuple[str, ...]
    text: str
    kind: str
    experiments: tuple[str, ...]
    readings: Mapping[str, str]
    literature: tuple[Literature, ...]


@cache
def claims() -> Mapping[str, Claim]:
    """All of them by id, in order."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: Claim(
            id=name,
            article=one["article"],
            sections=tuple(one["sections"]),
            text=one["claim"],
            kind=one["kind"],
            experiments=tuple(one["experiments"]),
            readings=one.get("readings", {}),
            literature=tuple(Literature(**note) for note in one.get("literature", ())),
        )
        for name, one in tables.items()
    }


def allowed(key: str) -> str:
    """Why an experiment may not judge by a key such as 'C17/branch off'; empty where it may."""
    name, _, reading = key.partition("/")
    if name not in claims():
        return f"{key}: there is no claim {name}"
    readings = claims()[name].readings
    if reading and not readings:
        return f"{key}: {name} has one reading only (experiments/claims.toml)"
    if reading and reading not in readings:
        return f"{key}: of {name} there are the readings {', '.join(readings)} (experiments/claims.toml)"
    return ""
