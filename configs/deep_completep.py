"""A deep language model under completep.

    python -m resjax.main --config=configs/deep_completep.py

CompleteP: branch scale, rate and eps by rule, so that a rate found at one depth serves another.

Expected: about 5 min on 2 cores, 0.50 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_completep.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("completep", variant)
