"""Train a deep model under a residual scheme, or continue a run.

python -m resjax.main --config=FILE[:variant] [--workdir=DIR] [--from=RUN[@STEP]] [--config.FIELD=VALUE ...]
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from resjax.errors import Refused, nearest

BAD_INPUT, OUTSIDE_FAULT, INTERRUPTED = 2, 1, 130
PREFIX = "--config."
OPTIONS = ("config", "workdir", "from", "evaluate", "profile", "parameters", "config_help", "help")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message.removeprefix('argument ')}; --help shows how the command is used")


def parser() -> Parser:
    made = Parser(
        prog="python -m resjax.main",
        description="Train a deep model under any residual scheme, and watch its residual health. "
        "The same command continues a run.",
        epilog="Any field of the config can be set: --config.model.depth=48; --config_help lists them. "
        "While it trains, a SIGUSR1 prints the table by depth and writes report.html; Ctrl-C or SIGTERM saves and "
        "stops. Exit codes: 0 done, 1 the machine failed (disk full), 2 bad input, 4 non-finite value, 130 and 143 "
        "saved after Ctrl-C and SIGTERM.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--config", metavar="FILE[:variant]", help="config file, with a variant if it has some; or the folder of a run"
    )
    made.add_argument(
        "--workdir", metavar="DIR", help="the run's folder (default: runs/, with the config's name and the overrides)"
    )
    made.add_argument(
        "--from", dest="source", metavar="RUN[@STEP]", help="start from a saved state of another run, under this config"
    )
    made.add_argument(
        "--evaluate",
        metavar="STEP",
        nargs="?",
        const="newest",
        help="only evaluate a saved step of --workdir, and print its held-out loss",
    )
    made.add_argument(
        "--profile", action="store_true", help="write a profiler trace of a few steps into the run's folder"
    )
    made.add_argument(
        "--parameters",
        action="store_true",
        help="only list the parameters that the config gives: role, shape, whether they decay, factor on the rate",
    )
    made.add_argument(
        "--config_help", action="store_true", help="list every config field with type, default and meaning"
    )
    return made


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words that are ``--config.FIELD=VALUE`` (or two words), as pairs, apart from the others."""
    others, pairs = [], []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith(PREFIX):
            others.append(word)
            continue
        field, equals, value = word[len(PREFIX) :].partition("=")
        if not equals:
            if not left or left[0].startswith("--"):
                raise Refused(f"{word} has no value; write {word}=VALUE")
            value = left.pop(0)
        pairs.append((field, value))
    return others, pairs


def refuse_unknown(words: Sequence[str], options: Sequence[str] = OPTIONS) -> None:
    """Refuse words that are no option of the command, with what was probably meant."""
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        tail = f"={value}" if equals else ""
        if not word.startswith("-"):
            hint = f"; did you mean --config={word}?" if word.partition(":")[0].endswith(".py") else ""
        elif close := nearest(name, options):
            hint = close.replace("'", "--", 1).replace("'", tail, 1)
        else:
            from resjax.config.schema import FIELDS, SECTIONS

            field = name if name in FIELDS or name.partition(".")[0] in SECTIONS else ""
            hint = f"; did you mean --config.{field}{tail}?" if field else ""
        raise Refused(f"'{word}' is no option of this command{hint or '; --help lists them'}")


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    if words is None:
        listen()
    return answer(lambda: _train(sys.argv[1:] if words is None else words))


def _train(words: Sequence[str]) -> int:
    others, overrides = split_overrides(words)
    arguments, unknown = parser().parse_known_args(others)
    refuse_unknown(unknown)
    if arguments.config_help:
        from resjax.config.listing import help_text

        print(help_text())
        return 0
    if not arguments.config:
        raise Refused("--config is missing: name a config file, such as --config=configs/deep_preln.py")
    for option in ("source", "profile"):
        if arguments.evaluate is not None and getattr(arguments, option):
            name = "from" if option == "source" else option
            raise Refused(f"--evaluate and --{name} contradict one another: --evaluate trains nothing")
    from resjax.config.load import load

    spec = os.path.expanduser(arguments.config)
    config = load(spec, overrides)
    if arguments.workdir == "":
        raise Refused("--workdir is empty; name a folder, or leave it out")
    from resjax.config.folder import default_folder

    workdir = arguments.workdir or default_folder(spec, overrides)
    from resjax.train import session  # loads JAX

    if arguments.parameters:
        return session.parameters(config)
    if arguments.evaluate is not None:
        return session.evaluate(config, workdir, arguments.evaluate)
    return session.train(config, workdir, arguments.source, arguments.profile)


def listen() -> None:
    """Until training listens to signals: raised while JAX loads, a KeyboardInterrupt is lost, or told as another error."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def answer(command: Callable[[], int]) -> int:
    """The exit code of ``command``; a refusal, a fault of the machine or an interrupt as its sentence and code."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for what it lacks
    try:
        return command()
    except Refused as refused:
        print(f"resjax: {refused}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(
            f"resjax: {os.strerror(error.errno) if error.errno else error}{where}; what was saved before is intact",
            file=sys.stderr,
        )
        return OUTSIDE_FAULT
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
