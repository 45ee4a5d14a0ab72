"""Which schemes does E03 compare that no field says? Scaled branches under matched rates, and norms moved in a part of the blocks."""

from resjax.residual import CATALOGUE, Frozen, InitRule, OptRule, Portion, Scheme, Where

PRE_LN = CATALOGUE["pre_ln"]


def matched(scale: float) -> Scheme:
    """Pre-LN with a factor on its branches, and what undoes it under Adam: s W with W from W_0 / s at rate lr / s is W_0 at rate lr.

    Adam's direction does not change with the size of the gradient, but for eps; times s it stands to the gradient of the scaled matrix
    as it does to that of the plain one. With s a power of 2 nothing is rounded otherwise, and the losses are those of Pre-LN bit for bit.
    """
    return PRE_LN.but(
        name=f"matched_{scale:g}",
        equation=f"H' = H + {scale:g} F(N(H)); matrices that write to the stream start at 1 / {scale:g}, learn at lr / {scale:g} with "
        f"{scale:g} eps; a final norm",
        scale=scale,
        init=Frozen({"write": InitRule(1 / scale)}),
        optim=Frozen({"write": OptRule(lr=1 / scale, eps=scale)}),
    )


def moved(share: float) -> Scheme:
    """Pre-LN whose first blocks, this share of them, are Post-LN (Mix-LN has a quarter: Li et al. 2024, 2412.13795)."""
    return PRE_LN.but(
        name=f"moved_{share:g}",
        equation=f"the first {share:.0%} of the blocks: H' = N(H + F(H)); the others: H' = H + F(N(H)); a final norm",
    ).but(Where(None, Portion(0.0, share)), norm_in=None, norm_after="norm")


MATCHED_HALF, MATCHED_QUARTER, MATCHED_EIGHTH = matched(0.5), matched(0.25), matched(0.125)  # exact in floating point
MATCHED_03, MATCHED_01 = matched(0.3), matched(0.1)
MOVED_25, MOVED_50, MOVED_75 = moved(0.25), moved(0.5), moved(0.75)
