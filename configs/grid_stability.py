"""Which place of the norm needs a warm-up, and up to which rate? Rate x warm-up x place of the norm, 48 cells.

    python -m resjax.sweep --config=configs/grid_stability.py --curves
    python -m resjax.sweep --config=configs/grid_stability.py --dry-run

The dry run says how long it will take on this machine. --grid seed=0,1,2 adds seeds. One cell as an ordinary run:

    python -m resjax.main --config=configs/grid_stability.py

Expected: about 15 s on 2 cores, 0.15 nats below the bigram baseline that it prints.
"""

from resjax.config import recipes
from resjax.sweeps.combine import product

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.grid(variant)


def sweep():
    return product(
        {"residual.name": ["pre_ln", "post_ln", "sandwich_branch", "sandwich_trunk"], "optimizer.warmup": [0, 30, 90]},
        {"optimizer.lr": [1e-3, 3e-3, 1e-2, 3e-2]},
    )
