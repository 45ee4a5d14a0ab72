"""What does residual.at say? Ranges of blocks, each with overrides, as in '0-3:skip=0;20-:mlp.scale=0.1'."""

import re
from dataclasses import dataclass, field
from typing import Any

from resjax.config.schema import FIELDS, KINDS
from resjax.errors import Refused, nearest

EXAMPLE = "'0-3:skip=0;20-:mlp.scale=0.1,attention.norm_out=rmsnorm'"


@dataclass
class Clause:
    """Blocks ``first`` to ``last`` (from 0, both included) and their overrides, by kind of sub-layer (None = all)."""

    text: str
    first: int
    last: int
    changes: dict[str | None, dict[str, Any]] = field(default_factory=dict)


def parse(text: str, depth: int, family: str = "lm") -> list[Clause]:
    """The clauses in order; later ones win.

    Raises:
      Refused: bad form, a range outside of the depth, an unknown field or value.
    """
    clauses = [_clause(part.strip(), depth, KINDS[family]) for part in text.split(";") if part.strip()]
    if not clauses:
        raise Refused(f"residual.at is '{text}'; write RANGE:FIELD=VALUE, such as {EXAMPLE}")
    return clauses


def _clause(text: str, depth: int, kinds: tuple[str, ...]) -> Clause:
    blocks, colon, assignments = text.partition(":")
    if not colon or not assignments.strip():
        raise Refused(f"residual.at has '{text}'; write RANGE:FIELD=VALUE, such as {EXAMPLE}")
    clause = Clause(text, *_range(blocks.strip(), depth))
    for assignment in assignments.split(","):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise Refused(f"residual.at has '{assignment.strip()}'; write FIELD=VALUE, such as {EXAMPLE}")
        kind, dot, leaf = name.rpartition(".")
        if dot and kind not in kinds:
            raise Refused(f"residual.at has '{name}', and '{kind}' is none of {', '.join(kinds)}{nearest(kind, kinds)}")
        # The fields of one kind are those that can differ between sites (final_norm and name cannot).
        here = {
            path.rpartition(".")[2]: entry for path, entry in FIELDS.items() if entry.section == f"residual.{kinds[0]}"
        }
        if leaf not in here:
            near = nearest(leaf, here)
            raise Refused(
                f"residual.at has '{name}', which cannot be overridden for a range; {', '.join(here)} can{near}"
            )
        try:
            parsed = here[leaf].parse(value)
        except Refused as error:
            raise Refused(str(error).replace(here[leaf].path, f"{name} in residual.at", 1)) from None
        if parsed is None:
            raise Refused(f"residual.at has '{assignment.strip()}'; leave the field out to keep what the scheme has")
        clause.changes.setdefault(kind or None, {})[leaf] = parsed
    return clause


def _range(text: str, depth: int) -> tuple[int, int]:
    if text == "all":
        return 0, depth - 1
    match = re.fullmatch(r"(\d+)(-(\d*))?", text)
    if not match:
        raise Refused(
            f"residual.at has the range '{text}'; write a block as 3, a range as 0-3, the rest as 20-, or all"
        )
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else depth - 1
    if first >= depth or last >= depth:
        raise Refused(
            f"residual.at has the range '{text}', but model.depth is {depth}: its blocks are 0 to {depth - 1}"
        )
    if first > last:
        raise Refused(f"residual.at has the range '{text}', which ends before it begins")
    return first, last
