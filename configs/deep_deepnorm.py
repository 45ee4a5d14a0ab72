"""A deep Post-LN language model made trainable: DeepNorm, the stream amplified by (2 L)^(1/4) before each norm.

    python -m resjax.main --config=configs/deep_deepnorm.py

Its weights start by its own rule, smaller with depth: init.out_scale has no place here and is refused.

Expected: about 5 min on 2 cores, 0.57 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_deepnorm.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("deepnorm", variant)
