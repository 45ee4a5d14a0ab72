"""What lies between one scheme and the next? Branch scale 0.1, 0.3, 1; the norm moved; a learnable gate; no skip: 63 cells.

    python -m resjax.sweep --config=configs/grid_between.py --profiles=1,30,end
    python -m resjax.sweep --config=configs/grid_between.py --dry-run

Seven arms at three rates and three seeds; the arms of a seed see the same batches and start from the same draw. The dry
run says how long it will take on this machine. One cell as an ordinary run:

    python -m resjax.main --config=configs/grid_between.py

Expected: about 15 s on 2 cores, 0.15 nats below the bigram baseline that it prints.
"""

from resjax.config import recipes
from resjax.sweeps.combine import chain, product

VARIANTS = recipes.VARIANTS


def get_config(variant=None):
    return recipes.grid(variant)


def sweep():
    arms = chain(
        {"residual.scale": [1.0, 0.3, 0.1]},
        {"residual.name": ["post_ln", "sandwich_branch"]},  # the norm after the add; a second one after the branch
        {"residual.scale": 0.1, "residual.scale_kind": "scalar"},  # a learnable gate
        {"residual.skip": 0.0},
    )
    return product(arms, {"optimizer.lr": [1e-3, 3e-3, 1e-2], "seed": range(3)})
