"""Schemes that act inside attention."""

from resjax.residual.entries.placement import POST_LN, PRE_LN
from resjax.residual.gains import Learned
from resjax.residual.inside import Chain, First, Shaped
from resjax.residual.rules import InitRule
from resjax.residual.scheme import Frozen, Scheme, Where

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
IDENTITY = InitRule(family="identity")
SHAPED_SKIPLESS = (
    PRE_LN.but(
        name="shaped_skipless",
        equation="attention: H' = F(N(H)), a head alpha v + beta softmax v - gamma mean v; feed-forward: H' = a H + b F(N(H))",
        paper="SAS: He et al. 2023, 2302.10322; He and Hofmann 2023, 2311.01906; queries start at 0, a and b at 1 and 0.1, a final norm",
        unverified="the authors remove value and output matrices of attention; here they start as the identity and are trained",
        inside=Frozen({"heads": Shaped()}),
    )
    .but(Where("attention"), skip=0.0, init=Frozen({"q": InitRule(0.0), "v": IDENTITY, "write": IDENTITY}))
    .but(Where("mlp"), skip=Learned(1.0, "scalar"), scale=Learned(0.1, "scalar"))
)

ENTRIES = (VALUE_RESIDUAL, REALFORMER, SHAPED_SKIPLESS)
FORMS: dict[str, dict[str, Scheme]] = {
    "value_residual": {
        "fixed": VALUE_RESIDUAL,
        "learned": VALUE_RESIDUAL.but(
            equation="Pre-LN, with values V_l = a V_1 + b V_l, a and b learned from 0.5; a final norm",
            share=Frozen({"v": First(Learned(0.5, "scalar"), Learned(0.5, "scalar"))}),
        ),
        "svformer": VALUE_RESIDUAL.but(
            equation="Pre-LN, with the first block's values in all blocks "
            "(the paper's others have no value matrices, (L - 1) d^2 parameters fewer; here they stand, unused); a final norm",
            share=Frozen({"v": First(1.0, 0.0)}),
        ),
    }
}
