"""Write text with a trained language model.

python -m resjax.sample RUN --prompt=TEXT [--step=N] [--length=N] [--temperature=T] [--top_k=K] [--seed=N]
"""

import argparse
import codecs
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from resjax.errors import Refused

BAD_INPUT, OUTSIDE_FAULT, NONFINITE = 2, 1, 4
LARGEST_SEED = 2**32 - 1
UNPRINTABLE = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m resjax.sample",
        description="Text from a trained language model, byte by byte; the prompt is printed in front of it.",
        epilog="Exit codes: 0 done, 1 the machine failed, 2 bad input, 4 the model gives non-finite values, "
        "130 after Ctrl-C.",
        allow_abbrev=False,
    )
    option = made.add_argument
    option("run", metavar="RUN", help="the run's folder")
    option(
        "--prompt", metavar="TEXT", required=True, help="the text to go on from; of a long one the model reads the end"
    )
    option("--step", metavar="N", type=int, help="a saved step (default: the newest)")
    option("--length", metavar="N", type=int, default=500, help="bytes to write (default 500)")
    scale = "0 = always the likeliest byte, 1 = as the model says (default 0.8)"
    option("--temperature", metavar="T", type=float, default=0.8, help=scale)
    option("--top_k", metavar="K", type=int, help="draw among the K likeliest bytes only (default: among all)")
    option("--seed", metavar="N", type=int, default=0, help="another seed, another text (default 0)")
    return made


def check(arguments: argparse.Namespace) -> None:
    """Refuse what is out of bounds, before anything is loaded."""
    if not arguments.prompt:
        raise Refused("--prompt is empty; give at least one character to go on from")
    if not 0 <= arguments.temperature < float("inf"):
        raise Refused(
            f"--temperature is {arguments.temperature}; it must be a number from 0 (always the likeliest byte)"
        )
    if arguments.length < 1:
        raise Refused(f"--length is {arguments.length}; it must be 1 or more bytes")
    if arguments.top_k is not None and not 1 <= arguments.top_k <= 256:
        raise Refused(f"--top_k is {arguments.top_k}; it must be from 1 to 256, the number of bytes")
    if not 0 <= arguments.seed <= LARGEST_SEED:
        raise Refused(f"--seed is {arguments.seed}; it must be from 0 to {LARGEST_SEED}")


def write(arguments: argparse.Namespace, out: TextIO, notes: TextIO) -> int:
    """Load the run and print the text as it is drawn; returns the exit code."""
    import jax

    from resjax.config.validate import BYTES
    from resjax.models.generate import NOT_FINITE, generate
    from resjax.train.saved import load_run

    run = load_run(arguments.run, arguments.step)
    if run.vocab != BYTES:
        source = run.config.data.source
        raise Refused(f"'{arguments.run}' was trained on data.source '{source}', whose {run.vocab} symbols are no text")
    for line in run.notes:
        print(line, file=notes)
    limit = f", top_k {arguments.top_k}" if arguments.top_k else ""
    how = f"temperature {arguments.temperature:g}{limit}, seed {arguments.seed}"
    print(f"{run.folder}, step {run.step}: {how}", file=notes, flush=True)
    prompt = os.fsencode(arguments.prompt)
    text = Text(out)
    text.put(prompt)
    for token in generate(
        run.model,
        list(prompt),
        arguments.length,
        key=jax.random.key(arguments.seed),
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        vocab=BYTES,
        step=run.step,
        compute=run.compute,
    ):
        if token == NOT_FINITE:
            text.end()
            print(f"resjax: the model of step {run.step} gives values that are not finite after this text", file=notes)
            return NONFINITE
        text.put(bytes([token]))
    text.end()
    return 0


class Text:
    """Bytes, printed as UTF-8 as they come.

    What is no UTF-8 shows as the replacement character; on a terminal control characters do, too.
    """

    def __init__(self, out: TextIO):
        self.out, self.terminal = out, out.isatty()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, more: bytes, final: bool = False) -> None:
        text = self.decoder.decode(more, final)
        self.out.write(text.translate(UNPRINTABLE) if self.terminal else text)
        if self.terminal:
            self.out.flush()

    def end(self) -> None:
        self.put(b"", final=True)
        self.out.write("\n")
        self.out.flush()


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        arguments = parser().parse_args(words)
        check(arguments)
        if reconfigure := getattr(sys.stdout, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for what it lacks
        return write(arguments, sys.stdout, sys.stderr)
    except Refused as refused:
        print(f"resjax: {refused}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # whoever read the text has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"resjax: {os.strerror(error.errno) if error.errno else error} ({error.filename})", file=sys.stderr)
        return OUTSIDE_FAULT
    except KeyboardInterrupt:
        print()
        return 130


if __name__ == "__main__":
    sys.exit(main())
