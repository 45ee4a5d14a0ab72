"""In what do runs differ, and may their losses be held against one another?"""

from collections.abc import Mapping, Sequence
from typing import Any

from resjax.config.schema import FIELDS
from resjax.config.tree import flat
from resjax.health.comparison.side import Side
from resjax.health.findings import section

RAN = "how it ran"  # the group of what is no field
SHORT = 12  # characters of a hash
ASIDE = ("recorded_by",)  # of a model that is not ours: what is no setting


def fields(side: Side) -> dict[str, Any]:
    """The settings of a run, path -> value; of a model that is not ours whatever it was logged with."""
    if side.case.config:
        return flat(side.case.config)
    return {path: value for path, value in flat(side.facts).items() if path not in ASIDE}


def ran(side: Side) -> dict[str, Any]:
    """What else may tell two runs apart: the text, the scheme's own file, where it came from, versions, devices."""
    if not side.case.config:
        return {}
    facts, lineage = side.facts, section(side.facts, "lineage")
    found = {
        "started from": f"{lineage.get('run')}@{lineage.get('step')}" if lineage else None,
        "sha256 of the text": section(facts, "corpus").get("sha256"),
        "sha256 of the scheme's file": section(facts, "scheme_source").get("sha256"),
        **{f"version of {name}": value for name, value in section(facts, "versions").items()},
        **{f"device {name}": value for name, value in section(facts, "device").items()},
        "git commit": facts.get("git_commit"),
    }
    hashes = ("sha256 of the text", "sha256 of the scheme's file", "git commit")
    return {name: short(value) if value and name in hashes else value for name, value in found.items()}


def short(value: Any) -> str:
    """The start of a hash, and the '+' of a commit that files differ from."""
    text = str(value)
    return text[:SHORT] + "+" * text.endswith("+")


def differing(sides: Sequence[Side]) -> dict[str, dict[str, list[Any]]]:
    """Section -> path -> a value a run, None where it has none: only what is not the same in all."""
    found: dict[str, dict[str, list[Any]]] = {}
    for group, every in (("", [fields(side) for side in sides]), (RAN, [ran(side) for side in sides])):
        paths = list(dict.fromkeys(path for one in every for path in one))
        known = [path for path in FIELDS if path in paths]
        for path in [*known, *(path for path in paths if path not in FIELDS)]:
            values = [_plain(one.get(path)) for one in every]
            if any(value != values[0] for value in values[1:]):
                found.setdefault(group or path.rpartition(".")[0] or "run", {})[path] = values
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def not_comparable(sides: Sequence[Side]) -> dict[str, list[str]]:
    """Runs whose losses mean something else than those of the first, by name: why."""
    found = {side.name: reasons(sides[0], side) for side in sides[1:]}
    return {name: why for name, why in found.items() if why}


def reasons(first: Side, other: Side) -> list[str]:
    """Why the losses of the other run cannot be held against those of the first; none = they can."""
    lengths = [section(side.case.config, "data").get("length") for side in (other, first)]
    found = [other_text(first, other)]
    if lengths[0] != lengths[1] and all(lengths):
        found.append(f"its data.length is {lengths[0]}, not {lengths[1]}")
    return [why for why in found if why]


def other_text(first: Side, other: Side) -> str:
    """In what the texts of two runs differ; empty where they are the same, as far as is known."""
    unknown = [side.name for side in (other, first) if not side.case.config]
    if len(unknown) == 1:
        return f"{unknown[0]} is a model that is not resjax's own, and says nothing of its text"
    sources = [section(side.case.config, "data").get("source") for side in (other, first)]
    hashes = [str(section(side.facts, "corpus").get("sha256") or "")[:SHORT] for side in (other, first)]
    if hashes[0] == hashes[1] if all(hashes) else sources[0] == sources[1]:
        return ""
    if sources[0] != sources[1]:
        return f"its text is {sources[0]}, not {sources[1]}"
    if sources[0] == "markov":  # the only source that a seed draws
        seeds = [side.case.config.get("seed") for side in (other, first)]
        return f"its training text was drawn with seed {seeds[0]}, not {seeds[1]} (the held-out text is the same)"
    return f"its text is another {sources[0]} (sha256 {hashes[0]}, not {hashes[1]})"


def same_end(sides: Sequence[Side]) -> list[list[str]]:
    """Names of runs that ended with the same parameters, bit for bit."""
    groups: dict[str, list[str]] = {}
    for side in sides:
        value: Any = side.case.summary.get("param_hash")
        if isinstance(value, str) and value:
            groups.setdefault(value, []).append(side.name)
    return [names for names in groups.values() if len(names) > 1]


def shown(value: Any) -> str:
    """A setting as a table shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
