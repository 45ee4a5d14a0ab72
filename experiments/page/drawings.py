"""Is a figure's file what the results give? Drawn again and compared: of which results it is, what it draws, and every number of it.

Bytes differ between versions of matplotlib, which names itself and rounds in the file. So two files are the same if they hold the same
elements, words, colours, opacities, widths of lines, factors and angles in the same order, and no coordinate differs by more than ``NEAR``.
"""

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from experiments import results
from experiments.page.evidence import Kept

NEAR = 0.01  # units of the file, points of 1/72 inch: a hundredth of the thinnest line
NUMBER = re.compile(r"(?P<colour>#[0-9a-fA-F]+)|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# Attributes whose numbers are coordinates; and of the parts of a transform, from which of its numbers on they are.
ENDS = ("x", "y", "x1", "y1", "x2", "y2", "cx", "cy")
COORDINATES = frozenset(("d", "points", "viewBox", *ENDS, "r", "rx", "ry", "width", "height"))
FIRST = {"translate": 0, "rotate": 1}
TRANSFORM = re.compile(r"(\w+)\s*\(([^)]*)\)")
METADATA, IDENTIFIER = "metadata", "{http://purl.org/dc/elements/1.1/}identifier"
Element = tuple[str, str, list[float]]  # tag, what it says but for its coordinates, and these


def drawn(kept: Kept) -> bytes:
    """The figure of some results, which says what it was drawn from."""
    return kept.experiment.picture(kept.found.runs, kept.found.measured, results.digest(kept.found))


def differs(kept: Kept) -> str:
    """Why the file is not the figure of these results, in words; empty where it is."""
    try:
        there = kept.picture.read_bytes()
    except FileNotFoundError:
        return "it is not there"
    now = drawn(kept)
    return "" if there == now else difference(there, now)


def difference(one: bytes, other: bytes) -> str:
    """The first thing in which two drawings differ; empty where there is none."""
    try:
        left, right = ElementTree.fromstring(one), ElementTree.fromstring(other)
    except ElementTree.ParseError as error:
        return f"it is no SVG ({error})"
    if left.findtext(f".//{IDENTIFIER}") != right.findtext(f".//{IDENTIFIER}"):
        return "it was drawn from other results"
    before, now = list(elements(left)), list(elements(right))
    for (tag, says, numbers), (other_tag, other_says, others) in zip(before, now, strict=False):
        if (tag, says, len(numbers)) != (other_tag, other_says, len(others)):
            return f"where it has {tag}, there should be another {other_tag}"
        if off := [abs(a - b) for a, b in zip(numbers, others, strict=True) if not abs(a - b) <= NEAR]:
            return f"numbers of a {tag} are off by up to {max(off):.3g}"
    return "" if len(before) == len(now) else f"it has {len(before)} elements, and there should be {len(now)}"


def elements(root: ElementTree.Element) -> Iterator[Element]:
    """All there is to see, in order; names that only lead from one element to another are numbered in the order in which they come."""
    names = {node.attrib["id"]: str(i) for i, node in enumerate(root.iter()) if "id" in node.attrib}
    known = re.compile("|".join(sorted(map(re.escape, names), key=len, reverse=True)) or r"(?!)")
    parts = [child for child in root if not child.tag.endswith(METADATA)]
    for node in (root, *(node for part in parts for node in part.iter())):
        tag = node.tag.rpartition("}")[2]
        said = [(node.text or "").strip(), (node.tail or "").strip()]
        numbers: list[float] = []
        for name, value in sorted(node.attrib.items()):
            if name == "id" or value.startswith(("#", "url(#")):
                said.append(f"{name}: {known.sub(lambda found: names[found[0]], value)}")
                continue
            words, coordinates = taken_apart(name, " ".join(value.split()))
            said.append(f"{name}: {words}")
            numbers += coordinates
        yield tag, " | ".join(said), numbers


def taken_apart(name: str, value: str) -> tuple[str, list[float]]:
    """What an attribute says but for its coordinates, and these."""
    if name in COORDINATES:
        numbers = [float(found[0]) for found in NUMBER.finditer(value) if not found["colour"]]
        return NUMBER.sub(lambda found: found["colour"] or "0", value), numbers
    if name != "transform":
        return value, []
    words, coordinates = [], []
    for what, given in TRANSFORM.findall(value):
        numbers = [float(found[0]) + 0.0 for found in NUMBER.finditer(given)]
        first = FIRST.get(what, len(numbers))
        words.append(f"{what}{numbers[:first]}")
        coordinates += numbers[first:]
    return " ".join(words), coordinates
