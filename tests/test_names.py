"""Does a name mean one thing in the package? Of those that once meant several."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "resjax"
HOMES = {"Seen": [], "number": ["sweeps/lines.py"]}  # name: where a class or function is called so


@pytest.mark.parametrize("name", HOMES)
def test_a_name_has_one_home(name):
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                found.append(file.relative_to(PACKAGE).as_posix())
    assert found == HOMES[name]
