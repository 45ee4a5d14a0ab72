"""A deep Post-LN language model: the original Transformer's norm after each add, at a third of the usual rate.

    python -m resjax.main --config=configs/deep_postln.py

At the rate of deep_preln.py a stack of this depth collapses more often than it trains; try --config.optimizer.lr=3e-3.

Expected: about 5 min on 2 cores, 0.36 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_postln.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    config = recipes.deep("post_ln", variant)
    config.optimizer.lr /= 3
    return config
