"""A deep language model with LayerScale: a learned gain a feature on every branch, from 1e-5 at 24 blocks.

    python -m resjax.main --config=configs/deep_layerscale.py

The start follows from the depth (0.1 to 18 blocks, 1e-5 to 24, 1e-6 beyond); --config.residual.scale sets another.

Expected: about 4.5 min on 2 cores, 0.59 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_layerscale.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("layerscale", variant)
