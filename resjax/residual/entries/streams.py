"""Schemes with several streams, and schemes that mix over depth."""

from collections.abc import Callable
from math import sqrt

from resjax.residual.entries.placement import PRE_LN
from resjax.residual.gates import LowRank, Weighted
from resjax.residual.history import BlockDepthAttention, DepthAttention
from resjax.residual.hyper import AltUp, Fractions, Hyper, Manifold
from resjax.residual.outer import Anchored, Dense, DepthCross, Ladder, Mudd
from resjax.residual.rules import InitRule, OptRule
from resjax.residual.scheme import Frozen, Scheme

DECAYED = Frozen({"mixer_dynamic": OptRule(decay=True)})


def hyper(n: int = 4, dynamic: bool = False) -> Scheme:
    return PRE_LN.but(
        name="hyper_connections",
        equation=f"u = a.S, S'_i = sum_j R_ji S_j + b_i F(N(u)), n = {n} streams; at the top their sum; a final norm"
        + ("; a, R, b plus s tanh(N(S) W), W from 0, s from 0.01" if dynamic else ""),
        paper="Zhu et al. 2024, 2409.19606; output matrices start smaller by sqrt(n)",
        unverified="the direction of the sqrt(n) on output matrices is our reading",
        carry=Hyper(n, dynamic),
        init=Frozen({"write": InitRule(1 / sqrt(n))}),
        optim=DECAYED if dynamic else Frozen(),
    )


def mhc(n: int = 4) -> Scheme:
    return PRE_LN.but(
        name="mhc",
        equation="u = sigmoid(.).S, S' = A S + 2 sigmoid(.) F(N(u)), A doubly stochastic by 20 Sinkhorn steps, "
        f"n = {n} streams; a final norm",
        paper="Xie et al. 2025, 2512.24880; DeepSeek-V4, 2606.19348",
        unverified="how phi and b start is unpublished: here phi normal by fan-in, b = 0",
        carry=Manifold(n),
        optim=DECAYED,
    )


def mhc_lite(n: int = 4) -> Scheme:
    if n > MOST_ARRANGED:
        raise ValueError(f"mhc_lite has n! permutations: n is {n}, and {MOST_ARRANGED} (720 of them) is the most")
    return mhc(n).but(
        name="mhc_lite",
        equation=f"as mhc, but A a softmax-weighted sum of all n! permutations of n = {n} streams",
        paper="2601.05732, from the code of MaxText",
        carry=Manifold(n, lite=True),
    )


def fractions(m: int = 4) -> Scheme:
    return PRE_LN.but(
        name="frac_connections",
        equation=f"the width in m = {m} fractions S: u = Y S, S' = A S + b . F(N(u)); a final norm",
        paper="Zhu et al. 2025, 2503.14125 (static form)",
        carry=Fractions(m),
    )


def altup(n: int = 4) -> Scheme:
    return PRE_LN.but(
        name="altup",
        equation=f"{n} streams, predicted from one another; the block (Pre-LN) sees the first, and its change corrects all; a final norm",
        paper="AltUp: Baykal et al. 2023, 2301.13310, in the form of Gemma 3n (without its per-layer embeddings)",
        outer=AltUp(n),
        optim=DECAYED,
    )


def attnres_block(groups: int = 8) -> Scheme:
    return ATTNRES.but(
        equation=f"as full, over the sums of {groups} groups of consecutive sites and the sum so far of the own group",
        carry=BlockDepthAttention(groups),
    )


MOST_ARRANGED = 6
HYPER_CONNECTIONS, MHC, MHC_LITE, FRAC_CONNECTIONS, ALTUP = hyper(), mhc(), mhc_lite(), fractions(), altup()
LAUREL = PRE_LN.but(
    name="laurel",
    equation="H' = H + H A B + F(N(H)), A (d, 4) orthonormal, B from 0; a final norm",
    paper="LAuReL-LR: Menghani et al. 2024, 2411.07501",
    carry=LowRank(4),
    optim=DECAYED,
)
DENSEFORMER = PRE_LN.but(
    name="denseformer",
    equation="block i reads sum_{j<i} a_ij X_j, X_0 = e, X_j the output of block j (Pre-LN); the top reads row L; a final norm",
    paper="Pagliardini et al. 2024, 2402.02622 (dilation 1, period 1; weights do not decay here, in the authors' code they do)",
    outer=Dense(),
)
MUDDFORMER = PRE_LN.but(
    name="muddformer",
    equation="queries, keys, values and skip of a block are four token-dependent sums of all earlier block outputs; a final norm",
    paper="MUDDFormer: Xiao et al. 2025, 2502.12170; one hidden size for all blocks, and no feed-forward that widens with depth",
    outer=Mudd(),
    optim=DECAYED,
)
ATTNRES = Scheme(
    name="attnres",
    equation="u_s = sum_{j<s} softmax_j(<w_s, rms(v_j)>) v_j, v_s = F(N(u_s)), v_0 = e; one more read at the top; a final norm",
    paper="Attention Residuals: Kimi team 2026, 2603.15031",
    norm_in="norm",
    final_norm="norm",
    carry=DepthAttention(),
)
DEEP_CROSS_ATTENTION = PRE_LN.but(
    name="deep_cross_attention",
    equation="queries, keys, values, skip of a block: sum_j (b_j + relu(<w, v_j>)) v_j over earlier updates, v_0 = e; a final norm",
    paper="DeepCrossAttention: Heddes et al. 2025, 2502.06785",
    unverified="read from a secondary source and a port; that the skip is a sum of its own too is our reading",
    outer=DepthCross(),
)
X0_MIXING = PRE_LN.but(
    name="x0_mixing",
    equation="before each block x = a x + b x0, x0 = rms(e), (a, b) learned from (1, 0); Pre-LN blocks; a final norm",
    paper="modded-nanoGPT and nanochat (2025, 2026)",
    outer=Anchored(),
)

ENTRIES = (
    *(HYPER_CONNECTIONS, MHC, MHC_LITE, FRAC_CONNECTIONS, LAUREL, ALTUP, DENSEFORMER, MUDDFORMER, ATTNRES),
    *(DEEP_CROSS_ATTENTION, X0_MIXING),
)
FORMS: dict[str, dict[str, Scheme]] = {
    "hyper_connections": {
        "static": HYPER_CONNECTIONS,
        "dynamic": hyper(dynamic=True),
    },
    "laurel": {
        "lr": LAUREL,
        "rw": LAUREL.but(
            equation="H' = a F(N(H)) + b H, (a, b) = 2 softmax of two learned numbers; a final norm",
            paper="LAuReL-RW: Menghani et al. 2024, 2411.07501",
            carry=Weighted(),
            optim=Frozen(),
        ),
    },
    "muddformer": {
        "plain": MUDDFORMER,
        "ppn": MUDDFORMER.but(
            equation=MUDDFORMER.equation + "; sources normalised before the mix, the skip X + N(mix) from 1e-3",
            outer=Mudd(ppn=True),
        ),
    },
    "attnres": {
        "full": ATTNRES,
        "block": attnres_block(),
    },
    "x0_mixing": {
        "x0": X0_MIXING,
        "ladder": X0_MIXING.but(
            equation="U-shaped skips: block i of the upper half reads x + w_i X_(L-1-i), w from 1; Pre-LN blocks; a final norm",
            outer=Ladder(),
        ),
    },
}

# Entries that can be had with other numbers of streams, or of groups: (form, number) -> scheme.
STREAMS: dict[str, Callable[[str | None, int], Scheme]] = {
    "hyper_connections": lambda form, n: hyper(n, form == "dynamic"),
    "mhc": lambda form, n: mhc(n),
    "mhc_lite": lambda form, n: mhc_lite(n),
    "frac_connections": lambda form, n: fractions(n),
    "altup": lambda form, n: altup(n),
}
GROUPS: dict[str, Callable[[int], Scheme]] = {"attnres": attnres_block}
