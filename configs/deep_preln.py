"""A deep Pre-LN language model: 24 blocks of width 64 on the source of the standard library, byte by byte.

    python -m resjax.main --config=configs/deep_preln.py

Pre-LN keeps an untouched path from the embedding to the final norm: the scheme to compare the others with.

Expected: about 4.5 min on 2 cores, 0.47 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_preln.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("pre_ln", variant)
