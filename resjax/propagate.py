"""How does a signal propagate through a network at its start, forward and backward? No training; schemes side by side.

python -m resjax.propagate --config=FILE[:variant] [--schemes=a,b|all] [--depths=12,48] [--seeds=N] [--out=DIR] [--json]
"""

import os
import signal
import sys
from collections.abc import Sequence

from resjax.errors import Refused
from resjax.main import Parser, answer, listen, refuse_unknown, split_overrides

OPTIONS = ("config", "schemes", "depths", "seeds", "out", "json", "help")
DEPTHS = (12, 48, 192, 1000)
DEEPEST, MOST_SEEDS = 100_000, 1000
# What only training reads; and what the study sets itself.
VOID = ("optimizer.", "train.", "health.", "mesh.", "model.scan", "data.field")


def parser() -> Parser:
    made = Parser(
        prog="python -m resjax.propagate",
        description="Signal propagation at the start of training, without any: stream RMS, update ratio, token cosine, rank "
        "and gradient profile against depth, as mean and spread over seeds, with theory where there is some. Tokens are "
        "random: drawn evenly from the vocabulary of the config's data, none of which is read.",
        epilog="Any field of the config can be set, such as --config.residual.scale=0.3, also for all --schemes. Without "
        "--config.data.batch and --config.data.length a study chooses few tokens and seeds, so that a scheme takes a minute "
        "or two on 2 CPU cores, and says which. --out gets propagate.json (all numbers) and propagate.svg (the figure). Exit "
        "codes: 0 done, 1 the machine failed (disk full), 2 bad input, 130 stopped by Ctrl-C.",
        allow_abbrev=False,
    )
    option = made.add_argument
    option("--config", metavar="FILE[:variant]", help="config file, with a variant if it has some")
    option(
        "--schemes",
        metavar="a,b|all",
        help="names of the catalogue (NAME:FORM for a form), joins such as post_ln+prores, FILE.py:NAME; all = every entry "
        "(default: the config's scheme)",
    )
    option("--depths", metavar="12,48", help=f"blocks (default: {','.join(map(str, DEPTHS))})")
    option("--seeds", metavar="N", help="seeds, counted up from the config's (default: by the time that they take)")
    option("--out", metavar="DIR", help="folder of the two files (default: propagation/, with the config's name)")
    option(
        "--json", action="store_true", help="print the numbers as JSON and nothing else; files only where --out says"
    )
    return made


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    if words is None:
        listen()
    return answer(lambda: _propagate(sys.argv[1:] if words is None else words, words is None))


def _propagate(words: Sequence[str], alone: bool) -> int:
    others, overrides = split_overrides(words)
    arguments, unknown = parser().parse_known_args(others)
    refuse_unknown(unknown, OPTIONS)
    if not arguments.config:
        raise Refused("--config is missing: name a config file, such as --config=configs/deep_preln.py")
    if arguments.out == "":
        raise Refused("--out is empty; name a folder, or leave it out")
    depths = chosen_depths(arguments.depths, overrides)
    seeds = None if arguments.seeds is None else whole("--seeds", arguments.seeds, MOST_SEEDS)
    refuse_void(overrides, arguments.schemes)
    spec = os.path.expanduser(arguments.config)

    from resjax.propagation import folder

    asked = [("schemes", arguments.schemes), ("depths", arguments.depths), ("seeds", arguments.seeds)]
    out = None
    if arguments.out is not None or not arguments.json:
        out = folder.Folder(arguments.out or folder.default(spec, overrides, asked))

    from resjax.propagation import run  # loads JAX

    if alone:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run.run(spec, overrides, arguments.schemes, depths, seeds, out, arguments.json)


def chosen_depths(text: str | None, overrides: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """The depths, in order, each once.

    Raises:
      Refused: one is no number of blocks, or --config.model.depth says another thing.
    """
    said = [value for field, value in overrides if field == "model.depth"]
    if said and text is not None:
        raise Refused(f"--depths={text} and --config.model.depth={said[-1]} contradict one another; give one of them")
    if text is None and not said:
        return DEPTHS
    words = (text if text is not None else said[-1]).split(",")
    return tuple(sorted({whole("--depths", word.strip(), DEEPEST) for word in words}))


def whole(option: str, text: str, most: int) -> int:
    """A whole number from 1."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise Refused(f"{option} has '{text}'; it must be a whole number from 1 to {most:,}")
    return int(text)


def refuse_void(overrides: Sequence[tuple[str, str]], schemes: str | None) -> None:
    """Refuse fields that change nothing here.

    Raises:
      Refused: naming the first.
    """
    for field, value in overrides:
        if field.startswith(VOID):
            raise Refused(f"--config.{field}={value} has no effect here: nothing is trained, no data is read")
        if field in ("residual.name", "residual.form") and schemes is not None:
            raise Refused(f"--config.{field}={value} and --schemes={schemes} contradict one another; give one of them")


if __name__ == "__main__":
    sys.exit(main())
