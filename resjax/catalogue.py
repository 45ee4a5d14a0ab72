"""List the residual schemes, or check a scheme of one's own.

python -m resjax.catalogue [--filter=TEXT] [--json | --markdown] [--check=FILE.py:NAME]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from resjax.errors import Refused, nearest
from resjax.main import Parser, answer, refuse_unknown

OPTIONS = ("filter", "json", "markdown", "check", "help")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m resjax.catalogue",
        description="The residual schemes: equation, what is carried, parameters, rules, paper.",
        epilog="Exit codes: 0 done, 1 a check failed, 2 bad input.",
        allow_abbrev=False,
    )
    made.add_argument("--filter", metavar="TEXT", help="only schemes with this text in name, equation or paper")
    made.add_argument("--json", action="store_true", help="as JSON")
    made.add_argument("--markdown", action="store_true", help="as the page docs/catalogue.md")
    made.add_argument(
        "--check",
        metavar="FILE.py:NAME",
        help="check a scheme (one's own, an entry, or NAME:FORM of one): what holds and what fails, in words",
    )
    return made


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return answer(lambda: _list(sys.argv[1:] if words is None else words))


def _list(words: Sequence[str]) -> int:
    arguments, unknown = parser().parse_known_args(words)
    refuse_unknown(unknown, OPTIONS)
    if arguments.json and arguments.markdown:
        raise Refused("--json and --markdown exclude each other")
    if arguments.check is not None:
        if arguments.filter or arguments.json or arguments.markdown:
            raise Refused("--check stands alone: leave out --filter, --json and --markdown")
        return check(arguments.check)
    rows = found(arguments.filter)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print(markdown(rows) if arguments.markdown else listing(rows), end="")
    return 0


def found(text: str | None) -> list[dict[str, Any]]:
    """The rows that contain ``text``; all without it.

    Raises:
      Refused: no row does.
    """
    from resjax.listing import rows

    every = rows()
    kept = [row for row in every if text is None or text.lower() in json.dumps(row, ensure_ascii=False).lower()]
    if not kept:
        raise Refused(
            f"--filter is '{text}', which is in no scheme{nearest(text or '', [row['name'] for row in every])}"
        )
    return kept


def listing(rows: list[dict[str, Any]]) -> str:
    """A paragraph a scheme."""
    lines: list[str] = []
    for row in rows:
        name = row["name"] + (f" (form {row['form']})" if row["form"] else "")
        lines += [name, f"    {row['equation']}"]
        facts = [f"carries {row['carries']}", f"final norm: {row['final_norm'] or 'none'}", row["parameters"]]
        lines.append(f"    {'; '.join(facts)}")
        lines += [f"    {label}: {row[key]}" for label, key in (("starts", "init"), ("optimizer", "optim")) if row[key]]
        lines.append(f"    {row['paper']}" + (f". Not verified: {row['unverified']}" if row["unverified"] else ""))
        lines.append("")
    return "\n".join([*lines, f"{len(rows)} schemes and forms", ""])


def markdown(rows: list[dict[str, Any]]) -> str:
    """The generated page."""
    from resjax.residual import KERNEL_ROLES

    text = [
        "# The catalogue of residual schemes",
        "",
        "Made by `python -m resjax.catalogue --markdown > docs/catalogue.md`; a test keeps it true. H is the stream, F the branch, N the "
        "model's norm, e the embedding, y the branch's result, L blocks, M sites (2 L here), l a block from 1, s a site from 0. "
        "Parameters are those beside Pre-LN's, of 12 blocks of width 64. Matrices start as the run's init fields say, whatever start a "
        "paper used, but where a row has a rule for them.",
        "",
        f"Unless a rule below says otherwise, weight decay acts on the model's own matrices only ({', '.join(KERNEL_ROLES)}): embeddings, "
        "gains, biases, gates and all that mixes streams or depths do not decay. Stacks have one kind of block, as a decoder alone; "
        "constants that papers give for an encoder with a decoder (DeepNorm, Sub-LN, T-Fixup) are not here.",
    ]
    family = None
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            text += ["", f"## {family[0].upper()}{family[1:]}", ""]
            text += [
                "| scheme | equation | carries | final norm | parameters | rules | source |",
                "|---|---|---|---|---|---|---|",
            ]
        name = f"`{row['name']}`" + (f", form `{row['form']}`" if row["form"] else "")
        rules = "; ".join(part for part in (row["init"], row["optim"]) if part)
        source = row["paper"] + (f". *Not verified: {row['unverified']}*" if row["unverified"] else "")
        cells = [name, row["equation"], row["carries"], row["final_norm"] or "none", row["parameters"], rules, source]
        text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*text, ""])


def check(name: str) -> int:
    """Run the checks on one scheme, a line each; 1 if one fails."""
    from resjax.check import checks
    from resjax.config.entry import entry
    from resjax.residual import CATALOGUE

    base, _, form = name.partition(":")
    scheme, failed = entry(base, form) if base in CATALOGUE and form else entry(name), 0
    print(f"{name}: {scheme.equation}")
    for outcome in checks(scheme):
        print(
            f"  fails  {outcome.asked}: {outcome.fails}" if outcome.fails else f"  holds  {outcome.asked}", flush=True
        )
        failed += bool(outcome.fails)
    print(f"{failed} of the checks fail" if failed else "all checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
