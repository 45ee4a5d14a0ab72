"""Which code makes a measurement? Its function and all that this uses in the experiments' files, as text that a hash can be taken of.

Read off the files, nothing is run; names come from other files by ``from experiments... import``. Comments, docstrings and layout do not
count; neither does what is imported from elsewhere, such as resjax itself, whose versions the results name. A measurement that reads the
results of other experiments is made of these as well.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from experiments.experiment import Experiment

PACKAGE = Path(__file__).resolve().parent
MEASURES = "MEASURES"
RESULTS = "results"  # the file whose ``read`` gives the results of an experiment, and the folder where these are
Place = tuple[Path, str]  # a file, and a name at its top level


def digest(experiment: Experiment, measure: str) -> str:
    """SHA-256 of the code of one of an experiment's measurements, and of the kept results of others where it reads such."""
    path = experiment.path.resolve()
    root = _entry(path, measure)
    parts, seen, waiting = [_text(root)], set[Place](), list(_used(path, root))
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        for node in _defined(place[0]).get(place[1], ()):
            parts.append(f"{place[0].name}:{place[1]}\n{_text(node)}")
            waiting += _used(place[0], node)
    if (PACKAGE / f"{RESULTS}.py", "read") in seen:
        parts += _results_of_others(path)
    return hashlib.sha256("\n".join([parts[0], *sorted(parts[1:])]).encode()).hexdigest()


def _results_of_others(path: Path) -> list[str]:
    kept = (PACKAGE / RESULTS).glob("*.json")
    return [
        f"{one.name}: {hashlib.sha256(one.read_bytes()).hexdigest()}"
        for one in kept
        if one.name.partition(".")[0] != path.stem
    ]


def _entry(path: Path, measure: str) -> ast.AST:
    """What MEASURES has under a name; all of MEASURES where it is no plain dictionary."""
    (whole,) = _defined(path)[MEASURES]
    value = getattr(whole, "value", None)
    if isinstance(value, ast.Dict):
        for key, one in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == measure:
                return one
    return whole


def _tree(path: Path) -> ast.Module:
    return _parsed(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    """A file without its docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None and body:
            node.body = body[1:] or [ast.Pass()]
    return tree


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _defined(path: Path) -> dict[str, list[ast.stmt]]:
    """The statements that give each name at the top level of a file its value."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in _tree(path).body:
        names = []
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def _imported(path: Path) -> dict[str, Place]:
    """Names from other files of the experiments: where each is from; of a whole file, with an empty name."""
    found = {}
    for statement in ast.walk(_tree(path)):
        if not isinstance(statement, ast.ImportFrom) or (statement.module or "").partition(".")[0] != PACKAGE.name:
            continue
        folder = PACKAGE.joinpath(*(statement.module or "").split(".")[1:])
        module = folder.with_suffix(".py") if folder.with_suffix(".py").is_file() else folder / "__init__.py"
        for alias in statement.names:
            whole = folder / f"{alias.name}.py"
            found[alias.asname or alias.name] = (whole, "") if whole.is_file() else (module, alias.name)
    return found


def _used(path: Path, node: ast.AST) -> Iterator[Place]:
    """The names that a piece of a file uses, as places in the experiments' files; of a whole file the names that are asked of it."""
    imported = _imported(path)
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            place = imported.get(part.id, (path, part.id))
            if place[1]:
                yield place
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            place = imported.get(part.value.id, (path, part.value.id))
            if not place[1]:
                yield place[0], part.attr
