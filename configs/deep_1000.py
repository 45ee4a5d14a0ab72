"""A language model of 1,000 blocks (2,000 sub-layers) of width 32, which a laptop trains.

    python -m resjax.main --config=configs/deep_1000.py

One block is compiled, whatever the depth, and each is computed again in the backward pass, so memory grows by one
stream a block.

Expected: about 2.5 min on 2 cores, 0.88 nats above the bigram baseline that it prints.

1,000 blocks of width 1024, for planning and for accelerators:

    python -m resjax.main --config=configs/deep_1000.py:accelerator
"""

from resjax.config import recipes

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    config = recipes.deep("pre_ln", variant)
    config.model.depth = 1000
    config.model.remat = "full"
    if variant is None:
        config.model.width = 32
        config.data.length, config.data.batch = 64, 4
        config.train.steps = 100
        config.train.eval_every = config.train.save_every = 50
        config.train.eval_batches = 8
        config.optimizer.lr = 1e-3
    return config
