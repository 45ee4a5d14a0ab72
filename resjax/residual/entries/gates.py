"""Schemes with gates, with chance, with parallel or reversible blocks."""

from resjax.residual.entries.placement import PRE_LN
from resjax.residual.gains import Linear
from resjax.residual.gates import GRU, Highway, Orthogonal
from resjax.residual.outer import Dropped
from resjax.residual.reversible import Pair
from resjax.residual.rules import OptRule
from resjax.residual.scheme import Frozen, Scheme

GATES = Frozen({"gate": OptRule(decay=True)})  # matrices as those of the branches; their biases do not decay
HIGHWAY = Scheme(
    name="highway",
    equation="H' = T . F(H) + (1 - T) . H, T = sigmoid(H W + b), b from -2",
    paper="Srivastava et al. 2015, 1505.00387",
    unverified="from memory and ports; the paper's branch is one dense layer",
    carry=Highway(),
    optim=GATES,
)
GTRXL = PRE_LN.but(
    name="gtrxl",
    equation="y = relu(F(N(H))); r, z = sigmoid(y W + H U [- b]), h = tanh(y W_g + (r . H) U_g), H' = (1 - z) . H + z . h; a final norm",
    paper="Parisotto et al. 2019, 1910.06764; b from 2",
    carry=GRU(),
    optim=GATES,
)
STOCHASTIC_DEPTH = PRE_LN.but(
    name="stochastic_depth",
    equation="H' = H + m / (1 - p) F(N(H)), m one draw a sample with P(m = 0) = p = 0.1 l / L; in evaluation H + F(N(H)); a final norm",
    paper="Huang et al. 2016, 1603.09382 (which scales at test time instead)",
    drop=Linear(0.1),
)
LAYER_DROP = PRE_LN.but(
    name="layer_drop",
    equation="Pre-LN; in training each block is left out with probability 0.2, for the whole batch",
    paper="Fan et al. 2019, 1909.11556",
    unverified="the rate, from memory",
    outer=Dropped(0.2),
)
PARALLEL = PRE_LN.but(
    name="parallel",
    equation="H' = H + Attn(N(H)) + F(N(H)), one norm; a final norm",
    paper="GPT-J (Wang and Komatsuzaki 2021); PaLM, 2204.02311",
    fuse=True,
)
REVERSIBLE = PRE_LN.but(
    name="reversible",
    equation="a' = a + Attn(N(b)), b' = b + F(N(a')); both from e, at the top their mean; a final norm",
    paper="RevNet: Gomez et al. 2017, 1707.04585; Reformer: Kitaev et al. 2020, 2001.04451",
    carry=Pair(),
)
ORTHOGONAL_UPDATE = PRE_LN.but(
    name="orthogonal_update",
    equation="H' = H + y - <y, H> / <H, H> H, y = F(N(H)); a final norm",
    paper="2505.11881",
    unverified="read from a secondary source",
    carry=Orthogonal(),
)

ENTRIES = (HIGHWAY, GTRXL, STOCHASTIC_DEPTH, LAYER_DROP, PARALLEL, REVERSIBLE, ORTHOGONAL_UPDATE)
FORMS: dict[str, dict[str, Scheme]] = {}
