"""How do runs stand beside one another? What each came to, where they differ, and whether their losses may be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from resjax.errors import Refused
from resjax.health.comparison import settings
from resjax.health.comparison.side import SPAN, Side
from resjax.health.diagnosis.case import recorded_in
from resjax.health.report import BASELINES, read_json


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side.

    Attributes:
      sides: the runs, the first one is what the others are held against.
      runs: what is said of each, see :meth:`Side.as_dict`.
      target: the loss that steps are counted to, nats per token; NaN where there is none.
      target_is: the target in words.
      settings: section -> field -> a value a run; only those that differ.
      not_comparable: of runs whose losses cannot be held against the first one's: why, by name.
      notes: a line for everything that was left out or should be known.
    """

    sides: Sequence[Side]
    runs: Sequence[Mapping[str, Any]]
    target: float
    target_is: str
    settings: Mapping[str, Mapping[str, Sequence[Any]]]
    not_comparable: Mapping[str, Sequence[str]]
    notes: Sequence[str]

    @property
    def names(self) -> list[str]:
        return [side.name for side in self.sides]

    @property
    def warning(self) -> str:
        """The line on losses that do not compare; empty where all do."""
        told = "; ".join(f"{name}: {', '.join(why)}" for name, why in self.not_comparable.items())
        return f"losses do not compare with those of {self.names[0]}: {told}" if told else ""

    @property
    def baselines(self) -> dict[str, float]:
        """The baselines that all runs share; empty where they have not the same, or none states any."""
        stated = [run["baselines"] for run in self.runs if run["baselines"]]
        one_text = not any(settings.other_text(self.sides[0], side) for side in self.sides)
        shared = stated and one_text and all(one == stated[0] for one in stated)
        return {name: stated[0][name] for name in BASELINES if name in stated[0]} if shared else {}

    def as_dict(self) -> dict[str, Any]:
        """All of it for machines."""
        return {
            "target": {"loss": self.target if isfinite(self.target) else None, "is": self.target_is},
            "baselines": self.baselines,
            "not_comparable": {name: list(why) for name, why in self.not_comparable.items()},
            "runs": [dict(run) for run in self.runs],
            "settings": {name: dict(rows) for name, rows in self.settings.items()},
            "notes": list(self.notes),
        }


def read(folders: Sequence[str]) -> tuple[list[Side], list[str]]:
    """The runs in these folders, each once, and a line for each that was given again.

    Raises:
      Refused: a folder holds no run, or all are one.
    """
    found: dict[Path, tuple[str, Side]] = {}
    notes = []
    for folder in folders:
        path = Path(folder).expanduser()
        if path.is_file():
            raise Refused(f"'{folder}' is a file; name the folder of a run")
        if (path / "results.jsonl").is_file() and not (path / "config.json").is_file():
            raise Refused(f"'{folder}' is the folder of a sweep, which keeps no runs; name folders of resjax.main")
        if not (path / "config.json").is_file() and any(path.glob("*/config.json")):
            raise Refused(f"'{folder}' holds runs and is none; name them, such as {path / '*'}")
        place = path.resolve()
        if place in found:
            again = found[place][0]
            notes.append(
                f"{folder} is {'given twice' if folder == again else f'the same run as {again}'}; it is shown once"
            )
            continue
        case = recorded_in(folder)
        facts = read_json(path / "config.json", [])
        found[place] = folder, Side(case.name, case, facts)
    if len(found) < 2:
        (only,) = found
        raise Refused(f"there is one run only to compare, '{found[only][0]}'; name two or more different ones")
    names = labels(list(found))
    return [Side(name, side.case, side.facts) for name, (_, side) in zip(names, found.values(), strict=True)], notes


def labels(places: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them all apart."""
    longest = max(len(place.parts) for place in places)
    for count in range(1, longest):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def compare(sides: Sequence[Side], target: float | None = None, notes: Sequence[str] = ()) -> Comparison:
    """The runs side by side.

    Args:
      target: loss to count steps to, nats per token; None = the first run's at half of its steps.
      notes: lines that were told before.
    """
    first, told = sides[0], list(notes)
    if target is None:
        target, step = first.half_way()
        said = f"the mean loss of {first.name} over the {SPAN} steps up to step {step}, half of its run"
        if not isfinite(target):
            said = ""
            told.append(
                f"no steps to a target: {first.name} has no finite loss at half of its run; give one by --target"
            )
    else:
        said = "as asked for"
    told += sparse(sides)
    told += [f"{' and '.join(names)} ended with the same parameters, bit for bit" for names in settings.same_end(sides)]
    told += [f"{side.name}: {note}" for side in sides for note in side.case.notes]
    runs = [side.as_dict(target) for side in sides]
    return Comparison(sides, runs, target, said, settings.differing(sides), settings.not_comparable(sides), told)


def sparse(sides: Sequence[Side]) -> list[str]:
    """A line for runs that do not log each step: of how many losses their means are."""
    groups: dict[tuple[float, int], list[str]] = {}
    for side in sides:
        if side.spacing > 1:
            groups.setdefault((side.spacing, side.window), []).append(side.name)
    whose = {
        names: "all runs" if len(names) == len(sides) else " and ".join(names) for names in map(tuple, groups.values())
    }
    return [
        f"a loss every {spacing:g} steps in {whose[tuple(names)]}: a mean over {SPAN} steps is of {count} loss{'es' * (count > 1)}"
        for (spacing, count), names in groups.items()
    ]
