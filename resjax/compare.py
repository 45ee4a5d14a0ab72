"""How do runs stand beside one another: losses, health by depth, spikes, steps to a target, settings that differ?

python -m resjax.compare RUN RUN ... [--target=NATS] [--out=FILE] [--json]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from resjax.errors import Refused
from resjax.main import Parser, answer, refuse_unknown

OPTIONS = ("target", "out", "json", "help")
OUT = "compare.html"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m resjax.compare",
        description="Any number of runs side by side: losses, health by depth, spikes, steps to a target, and the settings that differ. "
        "Reads the folders of resjax.main (or those that resjax.watch filled), finished or under way, and writes nothing into them. "
        "Prints a table, and writes a page with the curves.",
        epilog="Exit codes: 0 done, 1 the machine failed, 2 bad input, 130 stopped by Ctrl-C.",
        allow_abbrev=False,
    )
    made.add_argument(
        "runs", metavar="RUN", nargs="+", help="folders of runs, two or more; the others are held against the first"
    )
    made.add_argument(
        "--target",
        metavar="NATS",
        help="loss that steps are counted to (default: the first run's at half of its steps)",
    )
    made.add_argument(
        "--out",
        metavar="FILE",
        help=f"where the page goes (default: {OUT} in this folder; with --json only if asked for)",
    )
    made.add_argument(
        "--json", action="store_true", help="print what the table says, and profiles by depth, as JSON and nothing else"
    )
    return made


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return answer(lambda: _compare(sys.argv[1:] if words is None else words))


def _compare(words: Sequence[str]) -> int:
    arguments, unknown = parser().parse_known_args(words)
    refuse_unknown(unknown, OPTIONS)
    if "" in arguments.runs:
        raise Refused("a RUN is empty; name the folder of a run")
    target = None if arguments.target is None else nats(arguments.target)
    out = place(arguments.out, arguments.runs, arguments.json)
    from resjax.health.comparison import compare, read
    from resjax.health.comparison.page import page
    from resjax.health.comparison.told import print_comparison
    from resjax.train.writers import to_json, write_bytes

    sides, notes = read(arguments.runs)
    comparison = compare(sides, target, notes)
    if arguments.json:
        print(json.dumps(to_json(comparison.as_dict()), indent=1, allow_nan=False))
    else:
        print_comparison(comparison)
    if out is not None:
        write_bytes(out, page(comparison).encode())
        if not arguments.json:
            print(f"written: {out}")
    return 0


def nats(text: str) -> float:
    """The loss that --target asks for.

    Raises:
      Refused: it is no number.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise Refused(f"--target is '{text}'; it must be a number, a loss in nats per token")
    return value


def place(given: str | None, runs: Sequence[str], quiet: bool) -> Path | None:
    """Where the page goes; None where none is asked for.

    Raises:
      Refused: something else is there, it cannot be there, or nobody asked for it in the folder of a run.
    """
    if given is None and quiet:
        return None
    if given == "":
        raise Refused("--out is empty; name a file, or leave it out")
    path = Path(OUT if given is None else given).expanduser()
    configs = [config for run in runs if (config := Path(run).expanduser().resolve() / "config.json").is_file()]
    inside = any(Path.cwd().is_relative_to(config.parent) for config in configs)
    if given is None and (inside or Path("metrics.jsonl").exists()):
        raise Refused(
            "this is the folder of a run, and nothing is written into a run unasked; say by --out=FILE where the page goes"
        )
    if path.is_dir():
        raise Refused(f"--out is '{path}', which is a folder; name a file")
    if not path.parent.is_dir():
        raise Refused(f"--out is '{path}', and there is no folder '{path.parent}'")
    if path.exists():
        from resjax.health.comparison.page import MAKER
        from resjax.health.page import made_by

        if not path.is_file() or made_by(path) != MAKER:
            raise Refused(f"--out is '{path}', which is there and was not written by this command; name another file")
    return path


if __name__ == "__main__":
    sys.exit(main())
