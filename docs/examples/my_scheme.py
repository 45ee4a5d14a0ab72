"""A residual scheme of one's own: Pre-LN whose branches fade in with depth and end in a learned vector.

python -m resjax.catalogue --check=docs/examples/my_scheme.py:fading
python -m resjax.main --config=configs/smoke.py --config.residual.name=docs/examples/my_scheme.py:fading
"""

from resjax.residual import CATALOGUE, Learned


def by_depth(site):
    """A rule: any function of the site; blocks count from 1 (site.l) to site.L."""
    return 1.0 - 0.5 * site.l / site.L


fading = CATALOGUE["pre_ln"].but(
    name="fading",
    equation="H' = H + gamma . F((1 - l / 2L) N(H)), gamma a learned vector from 1; a final norm",
    paper="an example",
    in_scale=by_depth,
    scale=Learned(1.0, "vector"),
)
