"""The sweep's command, for tests that stop or kill it: a Markov text that is drawn at once, cells that say that they begin, slow lines.

Environment: BEGUN is a file that gets a line 'PID CELL' for each cell that begins, in whichever process; HOLD are seconds that each cell
takes more; PAUSE are seconds between two parts of a line of results, of which each is half of what is left. Without them all is as usual.
"""

import contextlib
import os
import sys
import time

from resjax.data import markov

markov.TRAIN_SYMBOLS, markov.HELD_OUT_SYMBOLS = 1 << 16, 1 << 14


def say(cell):
    if place := os.environ.get("BEGUN"):
        with open(place, "a") as file:
            file.write(f"{os.getpid()} {cell.name}\n")
    time.sleep(float(os.environ.get("HOLD", 0)))


class Slow:
    """A file that takes half of what it is given, and waits."""

    def __init__(self, file):
        self.file = file

    def write(self, line):
        taken = self.file.write(line[: max(1, len(line) // 2)])
        time.sleep(float(os.environ["PAUSE"]))
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


def with_slow_lines():
    from resjax.train.writers import JsonlWriter

    open_ = JsonlWriter._open
    JsonlWriter._open = lambda self: Slow(open_(self))


def with_cells_that_say_so():
    """In this process, and in workers of Ray: that class goes to them by value, and is made once Ray has begun, before which JAX may not
    be loaded."""
    from resjax.sweeps import cluster

    connected = cluster.connected

    @contextlib.contextmanager
    def telling(*arguments):
        with connected(*arguments) as ray:
            from resjax.sweeps import crew

            class Remote(crew.Remote):
                def __init__(self, *arguments):
                    from resjax.data import markov

                    markov.TRAIN_SYMBOLS, markov.HELD_OUT_SYMBOLS = 1 << 16, 1 << 14
                    super().__init__(*arguments)

                def train(self, group, cell):
                    say(cell)
                    return super().train(group, cell)

            crew.Remote = Remote
            yield ray

    cluster.connected = telling
    if not any(word.startswith("--workers") for word in sys.argv):
        from resjax.sweeps.worker import Worker

        one = Worker.one
        Worker.one = lambda self, group, cell, signals: (say(cell), one(self, group, cell, signals))[1]


if __name__ == "__main__":
    with_cells_that_say_so()
    if "PAUSE" in os.environ:
        with_slow_lines()
    from resjax.sweep import main

    sys.exit(main())
