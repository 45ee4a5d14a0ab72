"""Is every scheme of the catalogue what its paper says? Each entry and form against its equation, its claims, its check values.

Whenever tests run, for every row: the equation at 2 blocks, and at the depth from which a scheme has all its parts where that is more
(Mix-LN's Post-LN blocks, groups of several sites); at such a depth also that the model, scanned and mapped over two sets of parameters,
is the unrolled one on one set after the other; strict dtypes. For rows whose updates the backward pass takes back also their gradient,
scanned against unrolled, and that undoing gives the stream back. In the slow set, of which a tenth runs a day: the equation at 1, 6 and
24 blocks; scan against unrolled and vmap against loop each by itself; the gradient of the other rows, and of all rematerialised; half
precision; 256 blocks; parameters that do nothing, tokens that see later ones. The contract is checked at 2 blocks, at 3 or the
depth of all parts where blocks differ.
"""

import dataclasses
import json
import pickle
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import (
    EVALUATION,
    KINDS,
    SMALL,
    TOKENS,
    abstract,
    fast,
    forward,
    functional,
    make,
    perturbed,
    relative,
    stack,
    start,
    variables,
)
from oracle import FORMS, Options, language_model
from resjax import catalogue, check
from resjax.check import CHECKS, whole
from resjax.config.entry import entry
from resjax.residual import CATALOGUE, Blocks, Context, Init, Learned, Scheme, Site, Where
from resjax.residual import entries as families
from resjax.residual.entries import scaling
from resjax.residual.history import DepthAttentionSite
from resjax.residual.hyper import arrangements, sinkhorn
from resjax.residual.outer import Rows
from resjax.residual.parameters import is_variable
from resjax.residual.reversible import PairSite

ALL: dict[str, Scheme] = {}
for _name, _scheme in CATALOGUE.items():
    for _form, _made in families.FORMS.get(_name, {"": _scheme}).items():
        ALL[_name if _made == _scheme else f"{_name}:{_form}"] = _made
CHEAP = ("it has a name", "it is a value", "the stream keeps its dtype")
UNDONE = (
    "scanned and unrolled, the gradient",
    "where the backward pass",
)  # cheap enough for the rows that they are about
every = pytest.mark.parametrize("name", ALL)


def test_every_scheme_has_its_equation_in_the_oracle():
    assert set(FORMS) == set(ALL)
    assert [name for name, scheme in CATALOGUE.items() if scheme.name != name] == []


# Relative errors at 24 blocks are 1e-7 to 3e-6, dynamic Hyper-Connections 6e-6, LAuReL 9e-6. MUDDFormer's is 8e-5: mixes of mixes, whose
# weights are computed from their own sums, make more of each rounding; see the test in float64.
LOOSER = {("muddformer", 24): 1e-4}


@pytest.mark.parametrize(
    ("name", "depth"),
    [(name, depth) for name in ALL for depth in sorted({2, whole(ALL[name], 2)})]
    + [pytest.param(name, depth, marks=pytest.mark.slow) for name in ALL for depth in (1, 6, 24)],
)
def test_the_equation(name, depth):
    """In evaluation, at step 7: output against NumPy in float64, all parameters away from their start and all of them read."""
    step = 7
    model = make(ALL[name], depth=depth, out_scale=1 / sqrt(2 * depth))
    want, _, read = language_model(model, TOKENS, FORMS[name], Options(step=float(step)))
    got = forward(model, Context(step=step))
    assert relative(got, want) < LOOSER.get((name, depth), 1e-5)
    unread = {id(v) for v in variables(model)} - read.seen
    assert not unread or depth == 1, "a parameter that the equation does not have"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muddformer", "laurel", "hyper_connections:dynamic"])
def test_what_float32_loses_over_24_blocks_is_rounding(name):
    """The rows with the largest errors are their equations in float64: to 4e-14, 2e-14 and 1e-14."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        model = make(ALL[name], depth=24, out_scale=1 / sqrt(48), stream="float64")
        model = jax.tree.map(lambda v: v.replace(jnp.asarray(v[...], jnp.float64)), model, is_leaf=is_variable)
        want, _, _ = language_model(model, TOKENS, FORMS[name], Options(step=7.0))
        got = forward(model, Context(step=7, compute=jnp.dtype("float64")))
        assert got.dtype == jnp.float64
        assert relative(got, want) < 1e-12


def test_schemes_are_checked_with_all_their_parts():
    """Depths at which a scheme first has all the forms that its blocks ever have, and groups of sites that are more than one."""
    deeper = {name: whole(scheme) for name, scheme in ALL.items() if whole(scheme) > 2}
    assert deeper == {"mix_ln": 4, "attnres:block": 9}
    assert [run.length for run in check.model(ALL["mix_ln"]).stack.plan] == [1, 3]
    assert ALL["attnres:block"].carry.length(2 * 9) == 3
    late = ALL["pre_ln"].but(where=Where(blocks=Blocks(6, 7)), skip=0.5)
    assert (whole(late), whole(ALL["keel"]), whole(ALL["keel"], 3), whole(ALL["pre_ln"])) == (7, 2, 3, 1)
    assert [check.enough(scheme) for scheme in (ALL["keel"], ALL["pre_ln"], late)] == [3, 2, 7]


def runs_always(name: str, asked: str) -> bool:
    if asked.startswith(UNDONE):
        return (
            ALL[name].written.undoable and name != "muddformer:ppn"
        )  # the costliest, and made of what the others have
    return asked.startswith(CHEAP)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        pytest.param(name, asked, marks=() if runs_always(name, asked) else pytest.mark.slow, id=f"{name}-{i}")
        for name in ALL
        for i, asked in enumerate(CHECKS)
    ],
)
def test_the_contract(name, asked):
    assert CHECKS[asked](ALL[name]) == ""


@every
def test_scanned_and_mapped_is_unrolled_and_looped(name):
    """Two programs for what are two checks of the contract: what is scanned alone is the equation, by the test of that."""
    depth = check.enough(ALL[name])
    scanned, unrolled = ([make(ALL[name], seed, depth=depth, scan=scan) for seed in (0, 1)] for scan in (True, False))
    run = lambda model: model(jnp.asarray(TOKENS), Context(step=7))[0]  # noqa: E731
    got = fast(jax.vmap(run))(jax.tree.map(lambda *leaves: np.stack(leaves), *scanned))
    one_by_one = fast(run)
    assert relative(got, np.stack([one_by_one(model) for model in unrolled])) < 1e-5
    assert relative(got[0], got[1]) > 0.1


def other_half(pair: Any, update: jax.Array, site: Site) -> Any:
    return (pair[0], pair[1] - update) if site.pos == 0 else (pair[0] - update, pair[1])


def wrong_sign(pair: Any, update: jax.Array, site: Site) -> Any:
    return (pair[0] + update, pair[1]) if site.pos == 0 else (pair[0], pair[1] + update)


@pytest.mark.parametrize(
    ("name", "place", "method", "wrong"),
    [
        pytest.param("reversible", PairSite, "undo", lambda pair, update, site: pair, id="its argument"),
        pytest.param("reversible", PairSite, "undo", wrong_sign, id="wrong sign"),
        pytest.param("reversible", PairSite, "undo", other_half, id="other half"),
        pytest.param("reversible", PairSite, "undo", lambda pair, update, site: (pair[0] * jnp.nan, pair[1]), id="nan"),
        pytest.param(
            "reversible", PairSite, "read", lambda pair, site: (pair[site.pos], None), id="reads what it writes"
        ),
        pytest.param(
            "attnres", DepthAttentionSite, "undo", lambda rows, update, site: rows.at[site.s].set(0), id="wrong row"
        ),
        pytest.param("denseformer", Rows, "undo", lambda rows, update, site: jnp.roll(rows, 1, axis=0), id="moved"),
        pytest.param("denseformer", Rows, "undo", lambda rows, update, site: rows.at[0].add(update), id="embedding"),
        # right: what is taken back is not written, and rows that are not written may hold anything
        pytest.param(
            "attnres", DepthAttentionSite, "undo", lambda rows, update, site: rows.at[site.s + 1].set(9), id="right"
        ),
    ],
)
def test_a_wrong_undo_is_named(name, place, method, wrong, monkeypatch, request):
    """variants.md 11.5.10: undo gives the stream back, to 1e-4 in float32, all the way down."""
    (undone,) = [check_ for asked, check_ in CHECKS.items() if asked.startswith("where the backward pass")]
    monkeypatch.setattr(place, method, lambda self, *given: wrong(*given))
    says = "undoing block 1 does not give the stream before it back: it is off by"
    if method == "read":
        says = "what block 0 reads changes by"
    got = undone(ALL[name])
    assert got == "" if request.node.callspec.id == "right" else got.startswith(says)


@every
def test_a_scheme_is_a_value(name):
    scheme = ALL[name]
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert scheme.describe(KINDS, 5)
    config_name, _, form = name.partition(":")
    assert entry(config_name, form or None) == scheme


SPECIAL = ("pre_ln", "mix_ln", "hybrid_norm_star", "value_residual", "reversible", "mhc", "attnres", "muddformer")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SPECIAL else pytest.mark.slow) for n in ALL])
def test_the_program_does_not_grow_with_depth(name):
    """As many operations at 16 blocks as at 8, forward and backward, special first and last blocks included."""

    def operations(depth: int) -> int:
        gradient = jax.grad(lambda model: functional(model(jnp.asarray(TOKENS), EVALUATION)[0]))
        return counted(jax.make_jaxpr(gradient)(abstract(ALL[name], depth=depth)).jaxpr)

    assert operations(8) == operations(16)


def counted(jaxpr: Any) -> int:
    """Operations of a program, those of its loops and calls included."""
    inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program)]
    return len(jaxpr.eqns) + sum(counted(getattr(x, "jaxpr", x)) for x in inner if is_program(x))


def is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


# ---- variants.md 11.5: what holds at the start


SAME_AS_PRE_LN = [
    "hyper_connections",
    "hyper_connections:dynamic",
    "frac_connections",
    "muddformer",
    "denseformer",
    "laurel",
    "laurel:rw",
    "deep_cross_attention",
    "gpas",
    "layer_drop",
    "stochastic_depth",
    "prores",
]


def shared(scheme: str | Scheme, **shape: Any) -> tuple[Any, Any]:
    """The scheme's model as it starts, and a Pre-LN model with the same weights."""
    scheme = ALL[scheme] if isinstance(scheme, str) else scheme
    theirs, ours = start(scheme, Init(), 3, **shape), start("pre_ln", Init(), 3, **shape)

    def take(mine: Any, their: Any) -> None:
        mine.branch = their.branch

    for run in ours.stack.runs:
        assert len(theirs.stack.runs) == 1
        for mine, their in zip(run.sites, theirs.stack.runs[0].sites, strict=True):
            take(mine, their)
    ours.embed, ours.positions, ours.head = theirs.embed, theirs.positions, theirs.head
    return theirs, ours


@pytest.mark.parametrize("name", SAME_AS_PRE_LN)
def test_equal_to_pre_ln_at_the_start(name):
    """With the same weights; ProRes once its warm-up is over (11.5.2, X42, X43)."""
    # the sum of 4 equal streams is 4 times the stream, so the final norm's eps must not count
    theirs, ours = shared(name, depth=4, norms=dataclasses.replace(SMALL["norms"], eps=1e-9))
    assert relative(forward(theirs, Context(step=10**9)), forward(ours)) < 1e-5


GAIN_OF_ONE = ALL["layerscale"].but(scale=Learned(1.0, "vector"))


@pytest.mark.parametrize(
    ("scheme", "depth", "other"),
    [
        pytest.param("completep", 4, 5, id="completep"),  # m_L = L / 4
        pytest.param("lns", 1, 2, id="lns"),
        pytest.param(GAIN_OF_ONE, 4, None, id="layerscale"),
    ],
)
def test_equal_to_pre_ln_in_one_case(scheme, depth, other):
    """11.5.2: CompleteP at the base depth, LNS with one block, LayerScale with gains of 1; at another depth they are not."""
    theirs, ours = shared(scheme, depth=depth)
    assert relative(forward(theirs), forward(ours)) < 1e-6
    if other is not None:
        theirs, ours = shared(scheme, depth=other)
        assert relative(forward(theirs), forward(ours)) > 1e-3


def test_x0_mixing_is_pre_ln_on_the_normalised_embedding_at_the_start():
    """11.5.2: (lambda, mu) = (1, 0). What it opens with is x0 = e / rms(e) (8.13); on e itself it is another function."""
    theirs, ours = shared("x0_mixing", depth=4)
    e = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32) * 3
    x0 = e / np.sqrt((e.astype(np.float64) ** 2).mean(-1, keepdims=True)).astype(np.float32)
    stream = fast(lambda m, h: m.stack(h, EVALUATION)[0])
    assert relative(stream(theirs, e), stream(ours, x0)) < 1e-5
    assert relative(stream(theirs, e), stream(ours, e)) > 0.1


def test_manifold_connections_are_pre_ln_at_the_start_up_to_their_small_dynamic_part():
    """With phi = 0 too, every stream stays equal; the factor in front of the branch's input its norm takes out."""
    for name in ("mhc", "mhc_lite"):
        theirs, ours = shared(name, depth=4, norms=dataclasses.replace(SMALL["norms"], eps=1e-9))
        for site in theirs.stack.runs[0].sites:
            site.carry.by[...] = jnp.zeros_like(site.carry.by[...])
        assert relative(forward(theirs), forward(ours)) < 1e-5


@pytest.mark.parametrize("name", ["rezero", "skipinit", "zero_init", "fixup"])
def test_identity_at_the_start(name):
    model = start(ALL[name], Init(), 1, depth=4)
    h = jax.random.normal(jax.random.key(1), (2, 6, 8))
    out, _ = fast(lambda m, h: m.stack(h, EVALUATION))(model, h)
    np.testing.assert_array_equal(out, h)


def test_depth_attention_starts_as_a_mean_and_finds_its_weights():
    """11.5.3: w = 0 is the mean of the sources; groups of one site are the full form."""
    model = start("attnres", Init(), 1, depth=3)
    rows = np.random.default_rng(0).normal(size=(7, 2, 6, 8)).astype(np.float32)
    pick = model.stack.block(1).sites[1].carry.pick
    got, _ = pick(jnp.asarray(rows), 3)
    np.testing.assert_allclose(got, rows[:4].mean(0), rtol=2e-6, atol=1e-6)
    full, block = make("attnres", depth=3), make(entry("attnres", "block", groups=6), depth=3)
    np.testing.assert_allclose(forward(full), forward(block), rtol=1e-5, atol=1e-5)


# ---- variants.md 11.5.4: read the mixing matrix off


class Marker(nnx.Module):
    """A branch that returns the same vector whatever it reads."""

    views = True

    def __init__(self, width: int):
        self.vector = nnx.Param(jnp.zeros(width), role=("gain",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x["q"] if isinstance(x, dict) else x
        return jnp.broadcast_to(self.vector[...], x.shape).astype(x.dtype)


def mixing(scheme: Scheme, depth: int = 3, seed: int = 0) -> tuple[np.ndarray, Any]:
    """The last row of the depth-mixing matrix (what of e and of each branch is in the stream at the top), and the stack.

    Branch s returns the unit vector s + 1, the embedding is the unit vector 0; all parameters are away from their start.
    """
    width = 2 * depth + 2  # even, for fractions
    made = perturbed(lambda: stack(scheme, lambda kind, key: Marker(width), depth, width), seed)
    ones = np.eye(width, dtype=np.float32)
    (run,) = made.runs
    for pos, site in enumerate(run.sites):
        site.branch.vector[...] = jnp.asarray([ones[2 * block + pos + 1] for block in range(depth)])
    out, _ = made(jnp.asarray(ones[0]).reshape(1, 1, -1), EVALUATION)
    return np.asarray(out, np.float64).reshape(-1), made


def at(variable: Any, block: int) -> np.ndarray:
    return np.asarray(variable[...], np.float64)[block]


def test_mixing_of_hyper_connections():
    row, made = mixing(CATALOGUE["hyper_connections"])
    streams = np.zeros((4, 8))
    streams[:, 0] = 1
    for s in range(6):
        carry = made.runs[0].sites[s % 2].carry
        R, b = at(carry.mix, s // 2), at(carry.spread, s // 2)
        streams = R.T @ streams  # S'_i = sum_j R_ji S_j
        streams[:, s + 1] += b
    np.testing.assert_allclose(row, streams.sum(0), rtol=1e-5, atol=1e-6)


def test_mixing_of_denseformer():
    row, made = mixing(CATALOGUE["denseformer"])
    outputs = [np.eye(8)[0]]
    for block in range(3):
        weights = np.array([1.0]) if block == 0 else at(made.runs[0].outer.row.weights, block)[: block + 1]
        read = weights @ np.stack(outputs)
        outputs.append(read + np.eye(8)[2 * block + 1] + np.eye(8)[2 * block + 2])
    want = np.asarray(made.ends.weights[...], np.float64) @ np.stack(outputs)
    np.testing.assert_allclose(row, want, rtol=1e-5, atol=1e-6)


def test_mixing_of_depth_attention():
    row, made = mixing(CATALOGUE["attnres"])
    scores = np.asarray(made.ends.gain[...] * made.ends.query[...], np.float64)[:7] * sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(row[:7], weights, rtol=1e-4)
    assert row[7] == 0


def test_mixing_of_deep_cross_attention():
    row, made = mixing(CATALOGUE["deep_cross_attention"])
    updates = [np.eye(8)[0]] + [np.eye(8)[2 * b + 1] + np.eye(8)[2 * b + 2] for b in range(3)]
    b, w = (np.asarray(v[...], np.float64)[0] for v in (made.ends.static, made.ends.query))
    want = sum((b[j] + max(w @ v, 0)) * v for j, v in enumerate(updates))
    np.testing.assert_allclose(row, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["pre_ln", "orthogonal_update"])
def test_mixing_of_one_stream_is_all_ones(name):
    """What is added stays, also where only what is orthogonal is added: unit vectors are."""
    row, _ = mixing(ALL[name])
    np.testing.assert_allclose(row[:7], 1, rtol=1e-5)


def test_a_branch_that_takes_one_input_is_no_branch_of_several_views():
    with pytest.raises(ValueError, match="gives the first sub-layer q, k, v apart, and a Plain takes one input"):
        stack("muddformer", lambda kind, key: Plain(), 1, 8)


class Plain(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


# ---- check values


@pytest.mark.parametrize(
    ("rule", "depth", "want"),
    [
        (scaling.admin_omega, 12, 2.6013),
        (scaling.admin_omega, 18, 3.0408),
        (scaling.tfixup_gain, 6, 0.3689),
        (scaling.deepnorm_beta, 12, 0.3195),
        (scaling.deepnorm_beta, 24, 0.2687),
        (scaling.deepnorm_beta, 48, 0.2259),
        (scaling.deepnorm_beta, 100, 0.1880),
        (scaling.fixup_gain, 27, sqrt(2) * 0.1361),  # 54 branches; sqrt(2) is He's, on 1 / sqrt(fan in)
        (families.placement.subln_gain, 12, 1.7827),
        (scaling.one_over_sqrt_sites, 12, 0.004082 / 0.02),
        (scaling.one_over_sqrt_sites, 48, 0.002041 / 0.02),
    ],
)
def test_constants(rule, depth, want):
    assert float(rule(Site("mlp", 1, 2, depth))) == pytest.approx(want, rel=3e-4)


@pytest.mark.parametrize(("branches", "matrices", "want"), [(54, 2, 0.1361), (16, 3, 0.5), (1, 2, 1.0)])
def test_the_factor_of_fixup(branches, matrices, want):
    assert scaling.fixup_factor(branches, matrices) == pytest.approx(want, rel=3e-4)


def test_keel_counts_sites_and_leaves_the_first_block_alone():
    runs = CATALOGUE["keel"].runs(KINDS, 24)
    assert [(run.first, run.length) for run in runs] == [(0, 1), (1, 23)]
    attention, mlp = runs[0].sites
    assert (attention.skip, attention.norm_after, mlp.skip, mlp.norm_after) == (1.0, None, 1.0, "norm")
    assert runs[1].sites[0].skip(Site("attention", 0, 2, 24)) == 48


@pytest.mark.parametrize(("depth", "post"), [(4, 1), (12, 3), (7, 1), (3, 0)])
def test_mix_ln_switches_after_a_quarter(depth, post):
    blocks = [CATALOGUE["mix_ln"].resolve("mlp", block, depth).norm_after for block in range(depth)]
    assert blocks == ["norm"] * post + [None] * (depth - post)


@pytest.mark.parametrize("std", [1.0, 4.0])
def test_sinkhorn_is_doubly_stochastic(std):
    """11.5.8, X44: incoming sums exactly 1, outgoing near; the mean of streams is kept as far as those are."""
    logits = jax.random.normal(jax.random.key(0), (4, 4, 50)) * std
    m = np.asarray(sinkhorn(logits, 20))
    np.testing.assert_allclose(m.sum(1), 1, atol=2e-6)
    assert np.abs(m.sum(0) - 1).max() < (1e-3 if std == 1 else 0.3)
    assert m.min() >= 0
    assert np.linalg.norm(np.moveaxis(m, 2, 0), 2, (1, 2)).max() < (1.001 if std == 1 else 1.2)


def test_mhc_lite_is_exactly_doubly_stochastic():
    assert arrangements(4).shape == (24, 4, 4)
    model = make("mhc_lite", depth=1)
    streams = jax.random.normal(jax.random.key(0), (4, 2, 6, 8))
    _, A, _ = model.stack.block(0).sites[0].carry.weights(streams, Site("attention", 0, 2, 1))
    np.testing.assert_allclose(A.sum(0), 1, atol=1e-6)
    np.testing.assert_allclose(A.sum(1), 1, atol=1e-6)


# ---- the command


def test_the_listing_and_its_forms(capsys):
    assert catalogue.main(["--json", "--filter=attention residuals"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["form"]) for row in rows] == [("attnres", "full"), ("attnres", "block")]
    assert catalogue.main(["--filter=rezero"]) == 0
    assert "H' = H + a F(H)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--filter=nothing like this"], "--filter is 'nothing like this', which is in no scheme"),
        (["--jsn"], "did you mean --json"),
        (["--json", "--markdown"], "exclude each other"),
        (["--check=pre_lm"], "did you mean 'pre_ln'"),
        (["--check=none.py:x"], "does not exist"),
        (["--check=pre_ln", "--json"], "--check stands alone"),
        (["--check="], "residual.name is ''"),
        (["--check=attnres:blok"], "did you mean 'block'"),
    ],
)
def test_bad_input(words, part, capsys):
    assert catalogue.main(words) == 2
    out, err = capsys.readouterr()
    assert part in err and err.count("\n") == 1 and out == ""
