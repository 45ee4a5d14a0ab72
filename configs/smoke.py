"""Does everything work here? 4 blocks of width 16, 30 steps: seconds, and nothing learnt.

    python -m resjax.main --config=configs/smoke.py

Expected: about 10 s on 2 cores, 1.70 nats above the bigram baseline that it prints.
"""

from resjax.config import default


def get_config():
    config = default()
    config.model.depth, config.model.width, config.model.heads = 4, 16, 2
    config.data.length, config.data.batch = 32, 8
    config.train.steps = 30
    config.train.eval_every, config.train.eval_batches, config.train.save_every = 10, 2, 10
    config.train.log_every = 1
    config.health.every = 5
    return config
