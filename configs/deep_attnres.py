"""A deep language model under attnres.

    python -m resjax.main --config=configs/deep_attnres.py

Attention Residuals: each site reads a softmax-weighted sum of all earlier outputs; there is no other skip.

Expected: about 14 min on 2 cores, 0.57 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_attnres.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("attnres", variant)
