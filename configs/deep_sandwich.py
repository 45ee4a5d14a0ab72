"""A deep language model under sandwich_branch.

    python -m resjax.main --config=configs/deep_sandwich.py

Peri-LN (Sandwich-LN): a norm on each branch's output, so that every update has the size of a learned gain.

Expected: about 5 min on 2 cores, 0.17 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_sandwich.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("sandwich_branch", variant)
