"""A deep language model without any norm: ReZero, one learned gain a branch, from 0.

    python -m resjax.main --config=configs/deep_rezero.py

Each branch starts shut and opens as it learns, so the model starts as the embedding and the head alone.

Expected: about 4.5 min on 2 cores, 0.15 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_rezero.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("rezero", variant)
