"""What does the page show, and in which order? Panels, the two paradigms and the articles' sections, as page.toml has them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("page.toml")


@dataclass(frozen=True)
class Panel:
    """A headline panel.

    Attributes:
      title, about: its question, and what its figure shows.
      experiment: whose figure it is.
      claims: whose verdicts stand below it.
      mind: what would overturn the answer.
      readme: whether README.md shows it.
    """

    title: str
    experiment: str
    claims: tuple[str, ...]
    about: str
    mind: str
    readme: bool = False


@dataclass(frozen=True)
class Side:
    """What one paradigm says in a row, and the claims that say so."""

    says: str
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Paradigms:
    """A row of the table of the two paradigms."""

    row: str
    gradient: Side
    information: Side


@dataclass(frozen=True)
class Section:
    """A section of an article, in our words."""

    article: str
    name: str
    says: str


@dataclass(frozen=True)
class Outline:
    """All of it; ``experiments`` are the questions of all that are planned, by name."""

    articles: Mapping[str, str]
    experiments: Mapping[str, str]
    panels: tuple[Panel, ...]
    paradigms: tuple[Paradigms, ...]
    sections: tuple[Section, ...]


@cache
def outline() -> Outline:
    """What page.toml says."""
    whole = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return Outline(
        articles=whole["articles"],
        experiments=whole["experiments"],
        panels=tuple(Panel(**one | {"claims": tuple(one["claims"])}) for one in whole["panels"]),
        paradigms=tuple(
            Paradigms(one["row"], _side(one["gradient"]), _side(one["information"])) for one in whole["paradigms"]
        ),
        sections=tuple(Section(**one) for one in whole["sections"]),
    )


def _side(table: Mapping) -> Side:
    return Side(table["says"], tuple(table["claims"]))
