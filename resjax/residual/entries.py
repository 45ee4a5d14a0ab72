"""The catalogue: every residual scheme that resjax knows, by name, as one record each."""

from math import sqrt

from resjax.residual.equation import Frozen, InitRule, Learned, Scheme
from resjax.residual.site import Site


def deepnorm_alpha(site: Site) -> float:
    """(2 L)^(1/4) for a decoder-only (or encoder-only) stack of L blocks: 2.2134 at 12, 3.7606 at 100."""
    return (2.0 * site.L) ** 0.25


def deepnorm_beta(site: Site) -> float:
    """(8 L)^(-1/4): 0.3195 at 12, 0.1880 at 100."""
    return (8.0 * site.L) ** -0.25


def layerscale_start(site: Site) -> float:
    """The CaiT rule by depth: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond (Touvron et al. 2021; deit issues 122 and 127)."""
    return 0.1 if site.L <= 18 else 1e-5 if site.L <= 24 else 1e-6


def one_over_sqrt_sites(site: Site) -> float:
    """1 / sqrt(2 L) for blocks of attention and MLP."""
    return 1.0 / sqrt(site.M)


XAVIER = InitRule(family="xavier")
DEEPNORM = InitRule(deepnorm_beta, "xavier")

PLAIN = Scheme(
    name="plain",
    equation="H' = F(N(H))",
    paper="no skip; the negative control of He et al. 2015, 1512.03385, and Dong et al. 2021, 2103.03404",
    norm_in="norm",
    skip=0.0,
    final_norm="norm",
)
POST_LN = Scheme(
    name="post_ln",
    equation="H' = N(H + F(H))",
    paper="Vaswani et al. 2017, 1706.03762; Xiong et al. 2020, 2002.04745",
    norm_after="norm",
)
PRE_LN = Scheme(
    name="pre_ln",
    equation="H' = H + F(N(H)); a final norm",
    paper="Baevski and Auli 2018, 1809.10853; Wang et al. 2019, 1906.01787; Xiong et al. 2020, 2002.04745",
    norm_in="norm",
    final_norm="norm",
)
SCALED = PRE_LN.but(
    name="scaled",
    equation="H' = H + c F(N(H)), c constant (1 / sqrt(2 L) unless given); a final norm",
    paper="Szegedy et al. 2016, 1602.07261 (values from memory); MiniCPM and Granite use 1.4 / sqrt(L) and 0.22 at 40 blocks",
    scale=one_over_sqrt_sites,
)
REZERO = Scheme(
    name="rezero",
    equation="H' = H + a F(H), one learned a per site from 0; no norm",
    paper="Bachlechner et al. 2020, 2003.04887 (the released code shares one a per block)",
    scale=Learned(0.0, "scalar"),
)
LAYERSCALE = PRE_LN.but(
    name="layerscale",
    equation="H' = H + gamma . F(N(H)), gamma a learned vector from 0.1, 1e-5 or 1e-6 by depth; a final norm",
    paper="Touvron et al. 2021, 2103.17239 (the rule by depth from memory; its values agree with the released models)",
    scale=Learned(layerscale_start, "vector"),
)
SANDWICH_BRANCH = PRE_LN.but(
    name="sandwich_branch",
    equation="H' = H + N_out(F(N_in(H))); a final norm",
    paper="Sandwich-LN: Ding et al. 2021, 2105.13290; Peri-LN: Kim et al. 2025, 2502.02732",
    norm_out="norm",
)
SANDWICH_TRUNK = Scheme(
    name="sandwich_trunk",
    equation="H' = N_o(H + F(N_i(H)))",
    paper="a norm on the trunk beside the one before the branch: how Sandwich-LN is sometimes retold, not the published one",
    norm_in="norm",
    norm_after="norm",
)
DEEPNORM_SCHEME = Scheme(
    name="deepnorm",
    equation="H' = N(alpha H + F(H)), alpha = (2 L)^(1/4); v, output and feed-forward weights start at (8 L)^(-1/4) Xavier",
    paper="Wang et al. 2022, 2203.00555; of a gated feed-forward all three matrices get beta (our choice: the paper has no gate)",
    norm_after="norm",
    skip=deepnorm_alpha,
    init=Frozen({"q": XAVIER, "k": XAVIER, "v": DEEPNORM, "write": DEEPNORM, "fc_in": DEEPNORM}),
)

CATALOGUE: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (PLAIN, POST_LN, PRE_LN, SCALED, REZERO, LAYERSCALE, SANDWICH_BRANCH, SANDWICH_TRUNK, DEEPNORM_SCHEME)
}
