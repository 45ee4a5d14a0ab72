"""A deep language model under hyper_connections.

    python -m resjax.main --config=configs/deep_hyper.py

Hyper-Connections: four streams, mixed at every site by learned matrices.

Expected: about 5.5 min on 2 cores, 0.60 nats below the bigram baseline that it prints.

The same depth at width 1024, for accelerators with 8 chips (for another number, give data.batch twice the number):

    python -m resjax.main --config=configs/deep_hyper.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.deep("hyper_connections", variant)
