"""Schemes by how branches are scaled and how weights start.

Stacks here have one kind of block, as a decoder or an encoder alone. The constants that some papers give for an encoder and a decoder
that attends to it (DeepNorm, Sub-LN, T-Fixup) are not here, nor T-Fixup's for an encoder.
"""

from math import log, sqrt
from typing import Any

import jax.numpy as jnp

from resjax.residual.entries.placement import MATRICES, POST_LN, PRE_LN, XAVIER
from resjax.residual.gains import DepthPower, Learned
from resjax.residual.gates import Shrunk
from resjax.residual.inside import Inside
from resjax.residual.rules import InitRule, OptRule
from resjax.residual.scheme import Frozen, Scheme
from resjax.residual.site import Site

UNSCALED = InitRule(family="unscaled")
BASE_DEPTH = 4.0  # L of the base model, for rules that speak of a ratio of depths


def deepnorm_alpha(site: Site) -> float:
    """(2 L)^(1/4) for a decoder-only (or encoder-only) stack of L blocks: 2.2134 at 12, 3.7606 at 100."""
    return (2.0 * site.L) ** 0.25


def deepnorm_beta(site: Site) -> float:
    """(8 L)^(-1/4): 0.3195 at 12, 0.2259 at 48, 0.1880 at 100."""
    return (8.0 * site.L) ** -0.25


def layerscale_start(site: Site) -> float:
    """The CaiT rule by depth: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond (Touvron et al. 2021; deit issues 122 and 127)."""
    return 0.1 if site.L <= 18 else 1e-5 if site.L <= 24 else 1e-6


def one_over_sqrt_sites(site: Site) -> float:
    """1 / sqrt(2 L) for blocks of attention and MLP."""
    return 1.0 / sqrt(site.M)


def admin_omega(site: Site) -> float:
    """sqrt((M + 1) / ln(M + 1) - 1), M sites: 2.6013 at 24, 3.0408 at 36 (admin-torch, output change O(log n))."""
    return sqrt((site.M + 1) / log(site.M + 1) - 1)


def fixup_factor(branches: int, matrices: int) -> float:
    """L^(-1 / (2 m - 2)), L residual branches in the network and m matrices in each: 0.1361 at 54 of 2, 0.5 at 16 of 3."""
    return float(branches ** (-1.0 / (2.0 * matrices - 2.0)))


def fixup_gain(site: Site) -> float:
    """He times Fixup's factor, on 1 / sqrt(fan_in), for M branches with m = 2 matrices each."""
    return sqrt(2.0) * fixup_factor(site.M, 2)


def tfixup_gain(site: Site) -> float:
    """(9 L)^(-1/4) of a decoder of L blocks: 0.3689 at 6."""
    return (9.0 * site.L) ** -0.25


def one_over_sqrt_block(site: Site) -> Any:
    """1 / sqrt(l), l the block from 1."""
    return 1.0 / jnp.sqrt(site.l)


def branchnorm_alpha(site: Site) -> Any:
    """min(1, (t + 1) / 4000), t the optimizer steps done: never 0, where no branch would have a gradient."""
    return jnp.minimum((site.step + 1.0) / 4000.0, 1.0)


def prores_alpha(site: Site) -> Any:
    """min(t / (1000 l), 1), l the block from 1, t the optimizer steps done: deeper blocks open later."""
    return jnp.minimum(site.step / (1000.0 * site.l), 1.0)


DEEPNORM_START = InitRule(deepnorm_beta, "xavier")

SCALED = PRE_LN.but(
    name="scaled",
    equation="H' = H + c F(N(H)), c constant (1 / sqrt(2 L) unless given); a final norm",
    paper="Szegedy et al. 2016, 1602.07261; MiniCPM and Granite use 1.4 / sqrt(L) and 0.22 at 40 blocks; "
    "weights start without a factor on output matrices, which would be the same scale once more",
    unverified="the values of Szegedy et al., 0.1 to 0.3, from memory",
    scale=one_over_sqrt_sites,
    init=Frozen({"write": UNSCALED}),
)
DEEPNORM = Scheme(
    name="deepnorm",
    equation="H' = N(alpha H + F(H)), alpha = (2 L)^(1/4); v, output and feed-forward weights start at (8 L)^(-1/4) Xavier",
    paper="Wang et al. 2022, 2203.00555; of a gated feed-forward all three matrices get beta (our choice: the paper has no gate)",
    norm_after="norm",
    skip=deepnorm_alpha,
    init=Frozen({"q": XAVIER, "k": XAVIER} | dict.fromkeys(("v", "write", "fc_in"), DEEPNORM_START)),
)
ADMIN = POST_LN.but(
    name="admin",
    equation="H' = N(omega H + F(H)), omega = sqrt((M + 1) / ln(M + 1) - 1), constant",
    paper="Admin: Liu et al. 2020, 2004.08249; the closed form is that of admin-torch",
    skip=admin_omega,
)
SHIFT = Inside(gain=Learned(shape="none", offset="scalar"))
FIXUP = Scheme(
    name="fixup",
    equation="H' = H + a F(H + b) + c, one learned number each and more between the matrices of F; no norm",
    paper="Fixup: Zhang et al. 2019, 1901.09321; inner matrices start at M^(-1/2) He, last ones and head at 0, numbers learn at lr / 10",
    unverified="the authors' rule for Transformers in detail; here m = 2 matrices a branch and M branches",
    in_scale=Learned(shape="none", offset="scalar"),
    scale=Learned(1.0, "scalar", offset="scalar"),
    inside=Frozen({"pre_o": SHIFT, "fc_in": SHIFT, "hidden": SHIFT}),
    init=Frozen(
        dict.fromkeys(("q", "k", "v", "fc_in"), InitRule(fixup_gain, "fan_in"))
        | dict.fromkeys(("write", "head"), InitRule(0.0))
    ),
    optim=Frozen(dict.fromkeys(("gain", "gain_offset"), OptRule(lr=0.1, decay=False))),
)
T_FIXUP = Scheme(
    name="tfixup",
    equation="H' = H + F(H); no norm, no warm-up",
    paper="T-Fixup: Huang et al. 2020 (ICML); v, output and feed-forward at (9 L)^(-1/4) Xavier, embeddings at (9 L)^(-1/4) d^(-1/2)",
    init=Frozen(
        {"q": XAVIER, "k": XAVIER, "emb": InitRule(tfixup_gain, "fan_in")}
        | dict.fromkeys(("v", "write", "fc_in"), InitRule(tfixup_gain, "xavier"))
    ),
)
REZERO = Scheme(
    name="rezero",
    equation="H' = H + a F(H), one learned a per site from 0; no norm",
    paper="Bachlechner et al. 2020, 2003.04887 (the released code shares one a per block)",
    scale=Learned(0.0, "scalar"),
)
HE = InitRule(sqrt(2.0), "fan_in")
SKIPINIT = REZERO.but(
    name="skipinit",
    equation="H' = H + a F(H), one learned a per site from 0, weights from He; no norm",
    paper="De and Smith 2020, 2002.10444",
    init=Frozen(dict.fromkeys(MATRICES, HE)),
)
LAYERSCALE = PRE_LN.but(
    name="layerscale",
    equation="H' = H + gamma . F(N(H)), gamma a learned vector from 0.1, 1e-5 or 1e-6 by depth; a final norm",
    paper="Touvron et al. 2021, 2103.17239",
    unverified="the rule by depth, from memory; its values agree with the released models",
    scale=Learned(layerscale_start, "vector"),
)
LNS = PRE_LN.but(
    name="lns",
    equation="H' = H + F(N(H) / sqrt(l)), l the block from 1; a final norm, not scaled",
    paper="LayerNorm Scaling: Sun et al. 2025, 2502.05795; weights start without a factor on output matrices",
    in_scale=one_over_sqrt_block,
    init=Frozen({"write": UNSCALED}),
)
GPAS = PRE_LN.but(
    name="gpas",
    equation="h = H + F(N(H)), H' = h - silu(g) sg(h), g learned from 0, sg stops the gradient; a final norm",
    paper="GPAS: Chen et al. 2025, 2506.22049; the gate's gradient is clipped at 0.01, as advised for large models",
    carry=Shrunk(),
    optim=Frozen({"gate_bias": OptRule(decay=False, clip=0.01)}),
)
DEPTH_MUP = PRE_LN.but(
    name="depth_mup",
    equation="H' = H + sqrt(L_0 / L) F(N(H)), learning rate of blocks times sqrt(L_0 / L), L_0 = 4; a final norm",
    paper="Yang et al. 2023, 2310.02244; Bordelon et al. 2023, 2309.16620 (from a secondary source)",
    unverified="whether L counts blocks or adds; the width part of the rules, and the rate of norm gains, are left out",
    scale=DepthPower(-0.5, BASE_DEPTH),
    init=Frozen({"write": UNSCALED}),
    optim=Frozen(dict.fromkeys((*MATRICES, "bias"), OptRule(lr=DepthPower(-0.5, BASE_DEPTH)))),
)
COMPLETEP = PRE_LN.but(
    name="completep",
    equation="H' = H + L_0 / L F(N(H)), Adam's eps times L_0 / L, the same learning rate at every depth, L_0 = 4; a final norm",
    paper="CompleteP (alpha = 1): Dey et al. 2025, 2505.01618; at the base width, where its rules for the width are all 1",
    unverified="whether the embedding's eps is scaled too (it is in the released code, and here)",
    scale=DepthPower(-1.0, BASE_DEPTH),
    init=Frozen({"write": UNSCALED}),
    optim=Frozen(
        dict.fromkeys(
            ("emb", "pos", "head", *MATRICES, "bias", "norm_scale", "norm_bias"),
            OptRule(eps=DepthPower(-1.0, BASE_DEPTH)),
        )
    ),
)
DS_INIT = POST_LN.but(
    name="ds_init",
    equation="H' = N(H + F(H)); every matrix of block l starts at l^(-1/2) Xavier",
    paper="Zhang et al. 2019, 1908.11365 (the paper's exponent; the released code gives l^(-1/4)); drawn from a truncated normal",
    init=Frozen(dict.fromkeys(MATRICES, InitRule(one_over_sqrt_block, "xavier"))),
)
BRANCHNORM = POST_LN.but(
    name="branchnorm",
    equation="H' = N(H + a_t F(H)), a_t = min(1, (t + 1) / 4000) at step t",
    paper="Liu et al. 2023, 2305.02790",
    unverified="the schedule and its length are from memory",
    scale=branchnorm_alpha,
)
PRORES = PRE_LN.but(
    name="prores",
    equation="H' = H + min(t / (1000 l), 1) F(N(H)) at step t, l the block from 1; a final norm",
    paper="ProRes 2026, 2603.05369",
    scale=prores_alpha,
)
ZERO_INIT = PRE_LN.but(
    name="zero_init",
    equation="H' = H + F(N(H)), matrices that write to the stream start at 0; a final norm",
    paper="as in modded-nanoGPT, DiT, the DDPM U-Net and Fixup",
    init=Frozen({"write": InitRule(0.0)}),
)
GPT2_INIT = PRE_LN.but(
    name="gpt2_init",
    equation="H' = H + F(N(H)), matrices that write to the stream start smaller by 1 / sqrt(2 L), whatever init.out_scale; a final norm",
    paper="Radford et al. 2019 (GPT-2); Shoeybi et al. 2019, 1909.08053; the default init.out_scale makes pre_ln the same",
    init=Frozen({"write": InitRule(one_over_sqrt_sites, "unscaled")}),
)

ENTRIES = (
    *(SCALED, DEEPNORM, ADMIN, FIXUP, T_FIXUP, SKIPINIT, REZERO, LAYERSCALE, LNS, GPAS, DEPTH_MUP, COMPLETEP, DS_INIT),
    *(BRANCHNORM, PRORES, ZERO_INIT, GPT2_INIT),
)
FORMS: dict[str, dict[str, Scheme]] = {
    "admin": {
        "closed": ADMIN,
        "profiled": ADMIN.but(
            equation="H' = N(omega . H + F(H)), omega a learned vector that one batch sets before training",
            skip=Learned(1.0, "vector"),
            calibrate=True,
        ),
    }
}
