"""How far does the best rate, and what becomes of a run, move with depth? Depth x rate x scheme, 64 cells.

    python -m resjax.sweep --config=configs/grid_depth.py --curves
    python -m resjax.sweep --config=configs/grid_depth.py --dry-run

The dry run says how long it will take on this machine. --grid seed=0,1,2 adds seeds. One cell as an ordinary run:

    python -m resjax.main --config=configs/grid_depth.py

Expected: about 20 s on 2 cores, 0.15 nats below the bigram baseline that it prints.
"""

from resjax.config import recipes
from resjax.sweeps.combine import product

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.grid(variant)


def sweep():
    return product(
        {"model.depth": [6, 12, 24, 48], "residual.name": ["pre_ln", "post_ln", "deepnorm", "rezero"]},
        {"optimizer.lr": [3e-4, 1e-3, 3e-3, 1e-2]},
    )
