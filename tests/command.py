"""The command, with a Markov text that is drawn at once: for tests of other processes, where seconds add up."""

import sys

from resjax.data import markov

markov.TRAIN_SYMBOLS, markov.HELD_OUT_SYMBOLS = 1 << 16, 1 << 14

if __name__ == "__main__":
    from resjax.main import main

    sys.exit(main())
