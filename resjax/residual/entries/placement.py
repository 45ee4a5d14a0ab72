"""Schemes by where the norms stand."""

from math import log, sqrt

from resjax.residual.gains import Learned
from resjax.residual.gates import Sphere
from resjax.residual.inside import Inside, Shape
from resjax.residual.rules import InitRule, OptRule
from resjax.residual.scheme import Blocks, Frozen, Portion, Scheme, Where
from resjax.residual.site import Site
from resjax.residual.streams import Dual, Siamese

MATRICES = ("q", "k", "v", "write", "fc_in")
XAVIER = InitRule(family="xavier")
FIRST = Blocks(0, 0)
ATTENTION, MLP = Where("attention"), Where("mlp")


def subln_gain(site: Site) -> float:
    """sqrt(ln(2 L)) for an encoder-only or decoder-only stack of L blocks: 1.7827 at 12."""
    return sqrt(log(2 * site.L))


def all_sites(site: Site) -> int:
    """M, the number of sites (2 L for blocks of attention and feed-forward)."""
    return site.M


def one_over_sqrt_depth(site: Site) -> float:
    return site.L**-0.5


def head_size(shape: Shape, width: int) -> float:
    """Softmax(s q.k) with s = sqrt(head size), where attention divides by that root."""
    return float(shape[-1])


def sqrt_width(shape: Shape, width: int) -> float:
    return sqrt(width)


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
GEMMA = Scheme(
    name="gemma",
    equation="H' = H + N_out(F(N_in(H))), N RMSNorm with its gain stored as g and applied as 1 + g; a final norm",
    paper="Gemma 2 and 3: 2408.00118, 2503.19786 (query-key norms of Gemma 3: model.qk_norm; their sqrt(d) on embeddings is not here)",
    norm_in="zero_centred",
    norm_out="zero_centred",
    final_norm="zero_centred",
)
QK_WHOLE = Inside(norm="rmsnorm", whole=True)
OLMO2 = Scheme(
    name="olmo2",
    equation="H' = H + N(F(H)), queries and keys RMS-normalised over all heads; a final norm",
    paper="OLMo 2, 2501.00656",
    norm_out="norm",
    inside=Frozen({"q": QK_WHOLE, "k": QK_WHOLE}),
    final_norm="norm",
)
NORMFORMER = PRE_LN.but(
    name="normformer",
    equation="attention: H' = H + N(a F(N(H)), each head times a learned number); feed-forward: H' = H + W2 N(phi(W1 N(H))); a final norm",
    paper="Shleifer et al. 2021, 2110.09456, head scale before the output matrix as in the paper (fairseq has it after); without ResScale",
    inside=Frozen({"heads": Inside(gain=Learned(1.0, "first")), "hidden": Inside(norm="norm")}),
).but(ATTENTION, norm_out="norm")
SUBLN = PRE_LN.but(
    name="subln",
    equation="H' = H + W_out N(... N(H)): a norm before the last matrix of each branch too; a final norm",
    paper="Sub-LN, Magneto: Wang et al. 2022, 2210.06423; v, output and feed-forward weights start at sqrt(ln 2L) Xavier",
    inside=Frozen({"pre_o": Inside(norm="norm"), "hidden": Inside(norm="norm")}),
    init=Frozen({"q": XAVIER, "k": XAVIER} | dict.fromkeys(("v", "write", "fc_in"), InitRule(subln_gain, "xavier"))),
)
MIX_LN = PRE_LN.but(
    name="mix_ln",
    equation="the first quarter of the blocks: H' = N(H + F(H)); the others: H' = H + F(N(H)); a final norm",
    paper="Li et al. 2024, 2412.13795",
).but(Where(None, Portion(0.0, 0.25)), norm_in=None, norm_after="norm")
PER_HEAD = Inside(norm="rmsnorm")
HYBRID_NORM = Scheme(
    name="hybrid_norm",
    equation="attention: H' = H + Attn(N q, N k, N v) from raw H, RMSNorm a head; feed-forward: n = N(H), H' = n + F(n); a final norm",
    paper="Zhuo et al. 2025, 2503.04598",
    inside=Frozen({"q": PER_HEAD, "k": PER_HEAD, "v": PER_HEAD}),
    final_norm="norm",
).but(MLP, norm_in="norm", keep_normed=True)
HYBRID_NORM_STAR = (
    HYBRID_NORM.but(
        name="hybrid_norm_star",
        equation="as hybrid_norm, but in the first block a norm before attention too, and H' = H + F(N(H)) in its feed-forward",
    )
    .but(Where("attention", FIRST), norm_in="norm")
    .but(Where("mlp", FIRST), keep_normed=False)
)
B2T = POST_LN.but(
    name="b2t",
    equation="H' = N(H + F(H)); in the block's last site H' = N(H + F(H) + H_block)",
    paper="Takase et al. 2022, 2206.00330; all matrices of blocks start smaller by L^(-1/2), as in the released code",
    entry=1.0,
    init=Frozen(dict.fromkeys(MATRICES, InitRule(one_over_sqrt_depth, "unscaled"))),
)
RESI_DUAL = Scheme(
    name="resi_dual",
    equation="x' = N(x + y), d' = d + y, y = F(x); at the top x + N(d)",
    paper="Xie et al. 2023, 2304.14802",
    norm_after="norm",
    carry=Dual(),
)
SIAMESE_NORM = Scheme(
    name="siamese_norm",
    equation="y = F(N(X + N_Y(Y))); X' = N_X(X + y / sqrt(l + 1)), Y' = Y + y; at the top X + N(Y)",
    paper="SiameseNorm 2026, 2602.08064",
    unverified="read from a secondary source; whether l counts blocks or sites, from 0 or 1 (here blocks from 1); "
    "its norms on queries, keys and values, which it shares with hybrid_norm, are left out",
    norm_in="norm",
    norm_after="norm",
    carry=Siamese(),
)
KEEL = (
    Scheme(
        name="keel",
        equation="H' = N_o(M H + F(N_i(H))), M = 2 L sites; the first attention without N_o and M, the first feed-forward without M",
        paper="Keel 2026, 2601.19895",
        norm_in="norm",
        norm_after="norm",
        skip=all_sites,
    )
    .but(Where("attention", FIRST), skip=1.0, norm_after=None)
    .but(Where("mlp", FIRST), skip=1.0)
)
SPAN_NORM = (
    POST_LN.but(
        name="span_norm",
        equation="y = N(H + Attn(H)), H' = N(H + F(y)): the second skip spans the block; the first attention reads N(H)",
        paper="SpanNorm 2026, 2601.22580",
        unverified="equations from a third party's port; the paper's depth-dependent initialisation is unknown and left out",
    )
    .but(MLP, entry=1.0, skip=0.0)
    .but(Where("attention", FIRST), norm_in="norm")
)
TURNED = Inside(norm="unit", gain=Learned(1.0, "vector", root=True), times=head_size)
NGPT = Scheme(
    name="ngpt",
    equation="H' = unit(H + |a| (unit(F(H)) - H)); unit queries and keys with a gain, softmax times sqrt(head size); weights of norm 1",
    paper="nGPT: Loshchilov et al. 2024, 2410.01131; run it without weight decay and warm-up",
    norm_out="unit",
    carry=Sphere(),
    inside=Frozen(
        {
            "q_turned": TURNED,
            "k_turned": Inside(norm="unit", gain_of="q_turned"),
            "fc_in": Inside(gain=Learned(1.0, "vector"), times=sqrt_width),
        }
    ),
    logit_gain=Learned(1.0, "vector", root=True),
    optim=Frozen(dict.fromkeys((*MATRICES, "head"), OptRule(decay=False))),
    project=Frozen(dict.fromkeys(("emb", "head", "q", "k", "v", "fc_in"), "in") | {"write": "out"}),
)
DYT = PRE_LN.but(
    name="dyt",
    equation="H' = H + F(D(H)), D(x) = gamma . tanh(alpha x) + beta in place of every norm, the last one too",
    paper="Zhu et al. 2025, 2503.10622, alpha from 0.5 (LLaMA-sized models start lower, by width)",
    norm_in="dyt",
    final_norm="dyt",
)
DERF = DYT.but(
    name="derf",
    equation="H' = H + F(D(H)), D(x) = gamma . erf(alpha x + s) + beta in place of every norm, the last one too",
    paper="Derf 2025, 2512.10938",
    unverified="read from a port and a secondary source",
    norm_in="derf",
    final_norm="derf",
)

ENTRIES = (
    *(PLAIN, PRE_LN, POST_LN, SANDWICH_BRANCH, SANDWICH_TRUNK, GEMMA, OLMO2, NORMFORMER, SUBLN, MIX_LN, HYBRID_NORM),
    *(HYBRID_NORM_STAR, B2T, RESI_DUAL, SIAMESE_NORM, KEEL, SPAN_NORM, NGPT, DYT, DERF),
)
FORMS: dict[str, dict[str, Scheme]] = {}
