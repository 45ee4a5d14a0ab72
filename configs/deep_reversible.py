"""A deep language model under reversible.

    python -m resjax.main --config=configs/deep_reversible.py

A reversible stack: its streams are computed backwards, so memory does not grow with depth.

Expected: about 3.5 min on 2 cores, 0.47 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_reversible.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("reversible", variant)
