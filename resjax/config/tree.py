"""What is a configuration? A locked ConfigDict of the fields of schema.py, checked at every assignment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict, FieldReference

from resjax.config.schema import FIELDS, SECTIONS, find, unknown
from resjax.errors import Refused

FILE, FLAG = 1, 2  # who said it: the config file (or a program), the command line


@dataclass
class Log:
    """What was said of a configuration, and by whom; outside its fields, so that it is never stored.

    Attributes:
      level: who is speaking now.
      given: who set each path that was set since the defaults.
      notes: settings of the file that a flag made void and that were therefore taken back, one sentence each.
    """

    level: int = FILE
    given: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Section(ConfigDict):
    """A section of a configuration, or the whole. Assigning checks name, type, bounds and choices (``Refused``)."""

    def __init__(self, path: str = "", log: Log | None = None):
        super().__init__(type_safe=False, sort_keys=False)  # the schema knows the types, also of fields that are None
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_log", log or Log())

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else str(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.is_locked:
            super().__setitem__(key, value)
            return
        path = self._at(key)
        if path in SECTIONS:
            if not isinstance(value, Mapping | ConfigDict):
                raise unknown(path)
            for name, item in value.items():
                self[key][name] = item
            return
        entry = find(path)
        if isinstance(value, FieldReference):
            entry.check(value.get())
        else:
            value = entry.check(value)
        if isinstance(self._fields[key], FieldReference):
            super().__setitem__(key, value)
        else:
            self._fields[key] = value  # not by super(), which casts to the type of the value before
        self._log.given[path] = self._log.level

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self:
            return super().__getattr__(name)
        raise AttributeError(str(unknown(self._at(name))))

    def __reduce__(self) -> tuple:
        return _restore, (self._path, self.to_dict(), dict(self._log.given), list(self._log.notes))

    def copy_and_resolve_references(self, visit_map: dict | None = None) -> "Section":
        return _restore(self._path, self.to_dict(), dict(self._log.given), list(self._log.notes))


def _restore(path: str, values: dict, given: dict[str, int], notes: list[str]) -> "Section":
    root = default()
    section = root[path] if path else root
    for key, value in values.items():
        section[key] = value
    root._log.given, root._log.notes = given, notes
    return section


def default() -> Section:
    """Every field at its default: typed, locked."""
    root = Section()
    for path in SECTIONS:
        parent, _, name = path.rpartition(".")
        (root[parent] if parent else root)[name] = Section(path, root._log)
    for entry in FIELDS.values():
        (root[entry.section] if entry.section else root)[entry.leaf] = entry.default
    root.lock()
    return root


def assign(config: ConfigDict, path: str, value: Any) -> None:
    """Set one field by its path."""
    entry = find(path)
    (config[entry.section] if entry.section else config)[entry.leaf] = value


def flat(config: ConfigDict | Mapping) -> dict[str, Any]:
    """path -> value, in the order of the schema; paths that it does not know come last."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping | ConfigDict):
                walk(value, f"{path}.")
            else:
                found[path] = value

    walk(config, "")
    return {path: found[path] for path in FIELDS if path in found} | found


def given(config: ConfigDict) -> Mapping[str, int]:
    """Which paths were set since the defaults, and by whom (FILE or FLAG)."""
    return config._log.given if isinstance(config, Section) else {}


def notes(config: ConfigDict) -> list[str]:
    """What a person should be told of how the configuration came about, one sentence each."""
    return list(config._log.notes) if isinstance(config, Section) else []


def to_dict(config: ConfigDict) -> dict[str, Any]:
    """The fields as nested plain dicts that JSON can hold."""
    nested: dict[str, Any] = {}
    for path, value in flat(config).items():
        *sections, leaf = path.split(".")
        node = nested
        for name in sections:
            node = node.setdefault(name, {})
        node[leaf] = list(value) if isinstance(value, tuple) else value
    return nested


def from_dict(values: Mapping[str, Any]) -> Section:
    """The configuration of :func:`to_dict`; fields that are missing (from an earlier version) have their defaults.

    Raises:
      Refused: an unknown field, or a value that its field cannot have.
    """
    config = default()
    for path, value in flat(values).items():
        if path in SECTIONS:
            raise Refused(f"'{path}' is {value!r}, not a section of fields")
        assign(config, path, value)
    config._log.given.clear()
    return config
