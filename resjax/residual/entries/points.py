"""Schemes that act inside attention."""

from resjax.residual.entries.placement import POST_LN, PRE_LN
from resjax.residual.gains import Learned
from resjax.residual.inside import Chain, First
from resjax.residual.scheme import Frozen, Scheme

VALUE_RESIDUAL = PRE_LN.but(
    name="value_residual",
    equation="Pre-LN, with values V_l = 0.5 V_1 + 0.5 V_l after the first block; a final norm",
    paper="ResFormer: Zhou et al. 2024, 2410.17897",
    share=Frozen({"v": First(0.5, 0.5)}),
)
REALFORMER = POST_LN.but(
    name="realformer",
    equation="Post-LN, with attention scores S_l = q k / sqrt(c) + S_(l-1), before the mask",
    paper="RealFormer: He et al. 2020, 2012.11747 (read from a third party's code)",
    share=Frozen({"scores": Chain()}),
)

ENTRIES = (VALUE_RESIDUAL, REALFORMER)
FORMS: dict[str, dict[str, Scheme]] = {
    "value_residual": {
        "fixed": VALUE_RESIDUAL,
        "learned": VALUE_RESIDUAL.but(
            equation="Pre-LN, with values V_l = a V_1 + b V_l, a and b learned from 0.5; a final norm",
            share=Frozen({"v": First(Learned(0.5, "scalar"), Learned(0.5, "scalar"))}),
        ),
        "svformer": VALUE_RESIDUAL.but(
            equation="Pre-LN, with the first block's values in all blocks; a final norm",
            share=Frozen({"v": First(1.0, 0.0)}),
        ),
    }
}
