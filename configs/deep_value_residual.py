"""A deep language model under value_residual.

    python -m resjax.main --config=configs/deep_value_residual.py

Value residuals: attention of every block also sees the values of the first.

Expected: about 4 min on 2 cores, 0.60 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_value_residual.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("value_residual", variant)
