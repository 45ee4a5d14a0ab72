"""Does every residual scheme compute its equation, in every way of running it? One table, one row a scheme.

An entry that is added to the catalogue is covered by adding its equation to ``oracle.FORMS``; a test fails until it is.
"""

import copy
import dataclasses
import functools
import pickle
from collections import Counter
from collections.abc import Callable
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
    functional,
    largest_difference,
    make,
    perturbed,
    relative,
    stack,
    start,
    variables,
)
from oracle import FORMS, Form, Options, Place, Reader, language_model, run_stack
from resjax.branches import MLP, Attention
from resjax.models.lm import LM, Shape
from resjax.residual import (
    CATALOGUE,
    KERNEL_ROLES,
    ROLES,
    Blocks,
    Context,
    Flow,
    Frozen,
    Init,
    InitRule,
    Knob,
    Learned,
    Linear,
    NormDefaults,
    Portion,
    Scheme,
    Site,
    Where,
    everywhere,
)
from resjax.residual.entries.scaling import deepnorm_alpha, deepnorm_beta
from resjax.stack import Stack
from resjax.train.leaves import named
from resjax.train.optimizer import decay_mask, listing

DEPTH = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A scheme, its equation written out, and the model around it where it matters.

    ``shape`` is over kit.SMALL, ``options`` says the same to the oracle; ``context`` is what a forward pass is told.
    """

    scheme: Scheme
    form: Form
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: Context = EVALUATION

    def model(self, seed: int = 0, **shape: Any) -> LM:
        return make(self.scheme, seed, **({"depth": DEPTH} | self.shape | shape))


def early(site: Site) -> Any:
    """A rule of step and depth, as warm-up of residuals has it."""
    return jnp.minimum(site.step / (10.0 * site.l), 1.0)


def by_root(site: Site) -> Any:
    return 1.0 / jnp.sqrt(site.l)


def entered(s: Place, H: np.ndarray, H0: np.ndarray) -> np.ndarray:
    """Bottom-to-top: the block's input comes back before its last norm."""
    return s.norm("after", H + s.F(H) + (s.gain("entry") * H0 if s.last else 0))


def ruled(s: Place, H: np.ndarray, H0: np.ndarray) -> np.ndarray:
    read = s.norm("in", H, "rmsnorm" if s.l == 1 else "norm")
    return 0.5 * s.l / s.L * H + min(s.options.step / (10 * s.l), 1) * s.F(read)


def ranged(s: Place, H: np.ndarray, H0: np.ndarray) -> np.ndarray:
    update = s.F(s.norm("in", H)) * (0.1 if s.kind == "mlp" and s.l >= 3 else 1.0)
    return update if s.l == 1 else H + update


def partly(s: Place, H: np.ndarray, H0: np.ndarray) -> np.ndarray:
    """No attention at all in block 1; blocks 2 on feed nothing to their MLP."""
    if s.kind == "attention":
        return H if s.l == 1 else H + s.F(s.norm("in", H))
    return H + s.F(0 * s.norm("in", H) if s.l > 1 else s.norm("in", H))


def mine(s: Place, H: np.ndarray, H0: np.ndarray) -> np.ndarray:
    read = s.gain("in_scale") * s.norm("in", H, "rmsnorm")
    update = (s.norm("out", s.F(read), "layernorm") + 0.0) / sqrt(s.l)
    return s.options.knobs["keep"] * H + (s.gain("entry") * H0 if s.last else 0) + update


PRE, POST = CATALOGUE["pre_ln"], CATALOGUE["post_ln"]
MINE = Scheme(
    name="mine",
    equation="H' = k H + e H_block + N_out(F(g N(H))) / sqrt(l)",
    norm_in="rmsnorm",
    norm_out="layernorm",
    in_scale=Learned(0.9, "vector"),
    scale=by_root,
    skip=Knob("keep"),
    entry=Learned(0.1, "scalar"),
    final_norm="rmsnorm",
)
KEEP = {"keep": 0.8}

# The entries that go through every test here; test_catalogue.py has the whole catalogue.
CORE = ("plain", "post_ln", "pre_ln", "scaled", "rezero", "layerscale", "sandwich_branch", "sandwich_trunk", "deepnorm")
ENTRIES = {name: Row(CATALOGUE[name], FORMS[name]) for name in CORE}
VARIANTS = {
    "offset": Row(
        PRE.but(scale=Learned(0.5, "vector", offset=True), skip=Learned(0.9, "scalar")),
        Form(
            lambda s, H, H0: s.gain("skip") * H + s.gain("scale") * s.F(s.norm("in", H)) + s.offset("scale"),
            final="norm",
            norms=1,
            gains=lambda d: 2 * d + 1,
        ),
    ),
    "knobs": Row(
        PRE.but(scale=Knob("c"), skip=Knob("k"), in_scale=2.0),
        Form(lambda s, H, H0: 0.7 * H - 1.3 * s.F(2 * s.norm("in", H)), final="norm", norms=1),
        context=Context(knobs={"c": -1.3, "k": 0.7}),
    ),
    "entry": Row(POST.but(entry=Learned(0.3, "vector")), Form(entered, final=None, norms=1, gains=lambda d: d / 2)),
    "entry_instead": Row(
        POST.but(Where("mlp"), entry=1.0, skip=0.0),
        Form(lambda s, H, H0: s.norm("after", (H0 if s.last else H) + s.F(H)), final=None, norms=1),
    ),
    "three_norms": Row(
        PRE.but(norm_in="rmsnorm", norm_out="layernorm", norm_after="unit", final_norm=None),
        Form(
            lambda s, H, H0: s.norm("after", H + s.norm("out", s.F(s.norm("in", H, "rmsnorm"))), "unit"),
            final=None,
            norms=2,
        ),
    ),
    "rules": Row(
        PRE.but(scale=early, skip=Linear(0.5)).but(Where(None, Blocks(0, 0)), norm_in="rmsnorm"),
        Form(ruled, final="norm", norms=1),
        options={"step": 17.0},
        context=Context(step=17),
    ),
    "scale_eval": Row(
        CATALOGUE["layerscale"].but(scale=10.0, scale_eval=0.5),
        Form(lambda s, H, H0: H + 0.5 * s.F(s.norm("in", H)), final="norm", norms=1),
    ),
    "scale_train": Row(
        CATALOGUE["layerscale"].but(scale=10.0, scale_eval=0.5),
        Form(lambda s, H, H0: H + 10 * s.F(s.norm("in", H)), final="norm", norms=1),
        context=Context(train=True),
    ),
    "ranges": Row(
        PRE.but(Where(None, Blocks(0, 0)), skip=0.0).but(Where("mlp", Blocks(2)), scale=0.1),
        Form(ranged, final="norm", norms=1),
    ),
    "nothing": Row(
        PRE.but(Where("attention", Blocks(0, 0)), scale=0, norm_in=None).but(Where("mlp", Blocks(1)), in_scale=0),
        Form(partly, final="norm", norms=1),
        shape={"bias": True},
    ),
    "drop_evaluated": Row(CATALOGUE["deepnorm"].but(drop=Linear(0.3)), FORMS["deepnorm"]),
    "mine": Row(
        MINE,
        Form(mine, final="rmsnorm", norms=2, gains=lambda d: d + 0.5),
        options={"knobs": KEEP},
        context=Context(knobs=KEEP),
    ),
    "modern": Row(
        PRE,
        FORMS["pre_ln"],
        {"mlp": "swiglu", "norms": NormDefaults("rmsnorm", 1e-3), "positions": "rope", "tied": True, "qk_norm": True},
        {"mlp": "swiglu", "norm": "rmsnorm", "rope": True},
    ),
    "biased": Row(
        CATALOGUE["sandwich_branch"],
        FORMS["sandwich_branch"],
        {"mlp": "relu", "norms": NormDefaults("layernorm", 1e-3, bias=True), "positions": "none", "bias": True},
        {"mlp": "relu"},
    ),
    "biased_gate": Row(
        CATALOGUE["deepnorm"],
        FORMS["deepnorm"],
        {"mlp": "swiglu", "norms": NormDefaults("layernorm", 1e-3, gain=False), "bias": True, "mlp_ratio": 2.5},
        {"mlp": "swiglu"},
    ),
    "no_norm_kind": Row(
        POST, Form(FORMS["post_ln"].step, final=None, norms=0), {"norms": NormDefaults("none")}, {"norm": "none"}
    ),
}
TABLE = ENTRIES | VARIANTS

every_row = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
every_entry = pytest.mark.parametrize("name", CORE)


def after(flow: Any) -> dict[str, jax.Array]:
    return {"after": flow.after}


def both(model: LM, context: Context) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    logits, seen = model(jnp.asarray(TOKENS), dataclasses.replace(context, measure=after))
    return functional(logits), (logits, seen["after"])


def gradient_of(context: Context) -> Callable[[LM], Any]:
    return fast(jax.grad(lambda model: both(model, context), has_aux=True))


@functools.cache
def compiled(name: str) -> Callable[[LM], tuple[LM, tuple[jax.Array, jax.Array]]]:
    """Of a row: gradient, logits and streams as (depth, sites, B, T, D), by scan. Compiled once for all its tests."""
    return gradient_of(TABLE[name].context)


@functools.cache
def scanned(name: str) -> tuple[LM, tuple[jax.Array, jax.Array]]:
    return compiled(name)(TABLE[name].model())


# ---- the equation


@pytest.mark.parametrize("name", TABLE)
def test_the_equation_holds_at_every_site(name):
    row = TABLE[name]
    model = row.model()
    logits, streams, read = language_model(model, TOKENS, row.form, Options(**row.options))
    _, (got, after) = scanned(name)
    assert relative(after, np.stack(streams[1:]).reshape(after.shape)) < 1e-5
    assert relative(got, logits) < 1e-5
    if name != "nothing":  # there, branches whose scale is 0 stand unused
        assert read.seen == {id(v) for v in variables(model)}, "a parameter that the equation does not have"


@pytest.mark.parametrize("name", ["pre_ln", "post_ln", "deepnorm", "three_norms", "modern"])
def test_the_equation_in_float64(name):
    """What float32 cannot tell: an eps or a constant that is off in the eighth digit. Rules are float32 numbers."""
    row = TABLE[name]
    with jax.enable_x64(True):
        model = row.model(stream="float64")
        got = fast(lambda m: m(jnp.asarray(TOKENS), Context(compute=jnp.float64))[0])(model)
    want, _, _ = language_model(model, TOKENS, row.form, Options(**row.options))
    ruled = any(callable(getattr(row.scheme, gain)) for gain in ("scale", "skip"))
    assert relative(got, want) < (1e-6 if ruled else 1e-13)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_attention_fused_and_separate_are_one_function(fused, rope):
    def branch(kind, key):
        options = {"rope": rope, "qk_norm": True, "bias": True, "eps": 1e-3}
        return Attention(12, 3, fused=fused, key=key, **options) if kind == "attention" else MLP(12, 16, key=key)

    model = perturbed(lambda: stack("pre_ln", branch, 2, 12, norms=NormDefaults("layernorm", 1e-3)))
    h = np.random.default_rng(0).normal(size=(2, 5, 12))
    got, _ = fast(lambda m, h: m(h, Context()))(model, jnp.asarray(h, jnp.float32))
    streams = run_stack(model, h, FORMS["pre_ln"].step, Options(heads=3, rope=rope), Reader())
    assert relative(got, streams[-1]) < 1e-5


# ---- ways of running it


@pytest.mark.parametrize("name", [*ENTRIES, "ranges", "mine"])
def test_scanned_and_unrolled_are_the_same(name):
    row = TABLE[name]
    grads, (logits, streams) = scanned(name)
    one, (logits_one, streams_one) = gradient_of(row.context)(row.model(scan=False))
    assert relative(logits_one, logits) < 1e-5
    assert relative(streams_one, streams) < 1e-5
    assert largest_difference(one, grads) < 1e-4
    assert list(by_path(one)) == list(by_path(grads)), "a checkpoint of one fits the other"


@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("name", ["pre_ln", "deepnorm", "ranges"])
def test_rematerialised_gradients_are_the_same(name, remat):
    row = TABLE[name]
    grads, (logits, _) = scanned(name)
    again, (logits_again, _) = gradient_of(row.context)(row.model(remat=remat))
    assert relative(logits_again, logits) < 1e-6
    assert largest_difference(again, grads) < 1e-6


@every_entry
def test_vmap_over_models_is_map(name):
    models = [TABLE[name].model(seed) for seed in (0, 1)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    got = fast(jax.vmap(lambda m: m(jnp.asarray(TOKENS), Context())[0]))(batch)
    want = [compiled(name)(model)[1][0] for model in models]
    assert relative(got, np.stack(want)) < 1e-5
    assert relative(got[0], got[1]) > 0.1, "two models, not one twice"


@pytest.mark.parametrize("name", [*ENTRIES, "mine", "offset"])
def test_an_equal_scheme_is_not_compiled_again(name):
    row = TABLE[name]
    same = rebuilt(row.scheme)
    before = row.model()
    compiled(name)(before)
    count = compiled(name)._cache_size()
    shape = Shape(**(SMALL | {"depth": DEPTH} | row.shape))
    compiled(name)(perturbed(lambda: LM(shape, same, Init(), key=jax.random.key(0)), seed=1))
    assert compiled(name)._cache_size() == count == 1


MIXES = (("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float16", "float16"))


@pytest.mark.parametrize("name", TABLE)
def test_dtypes(name):
    """The stream has its dtype after every site, whatever branches compute in; parameters and logits are float32."""
    row = TABLE[name]
    for compute, stream in MIXES if name in ENTRIES else MIXES[:1]:
        context = dataclasses.replace(row.context, compute=jnp.dtype(compute), measure=flows)
        model = abstract(row.scheme, **({"depth": DEPTH} | row.shape | {"stream": stream}))
        logits, seen = jax.eval_shape(lambda m, context=context: m(jnp.asarray(TOKENS), context), model)
        assert logits.dtype == jnp.float32 and logits.shape == (2, 6, 11)
        assert {seen[name].dtype for name in Flow._fields} == {jnp.dtype(stream)}
        assert {v.dtype for v in variables(model)} == {jnp.dtype("float32")}


def flows(flow: Any) -> dict[str, jax.Array]:
    return {name: flow.after if value is None else value for name, value in flow._asdict().items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, "bfloat16") for n in ENTRIES), *((n, "float16") for n in ("pre_ln", "rezero", "deepnorm"))],
)
def test_low_precision_is_finite_and_near(name, dtype):
    row = TABLE[name]
    logits = fast(lambda m: m(jnp.asarray(TOKENS), Context(compute=jnp.dtype(dtype)))[0])(row.model(stream=dtype))
    assert bool(jnp.all(jnp.isfinite(logits)))
    assert relative(logits, scanned(name)[1][0]) < (0.15 if dtype == "bfloat16" else 0.03)


@every_entry
def test_gradient_at_depth_256_is_finite(name):
    model = TABLE[name].model(depth=256, out_scale=1 / sqrt(512))
    grads, (logits, _) = gradient_of(EVALUATION)(model)
    assert bool(jnp.all(jnp.isfinite(logits)))
    assert [path for path, g in by_path(grads).items() if not bool(jnp.all(jnp.isfinite(g[...])))] == []
    if name != "plain":  # without skips there is next to none left, which is what that entry shows
        assert max(float(jnp.max(jnp.abs(g[...]))) for g in variables(grads)) > 1e-3


@pytest.mark.parametrize("name", [name for name in CORE if FORMS[name].identity])
def test_identity_at_start_where_claimed(name):
    model = start(name, depth=6)
    h = jax.random.normal(jax.random.key(1), (2, 6, 8))
    out, _ = fast(lambda m, h: m.stack(h, Context()))(model, h)
    np.testing.assert_array_equal(out, h)


# ---- parameters: how many, called what, started how


def by_path(tree: Any) -> dict[str, nnx.Variable]:
    """The parameters by the paths that checkpoints use."""
    state = nnx.state(tree)
    return dict(zip(named(state), variables(state), strict=True))


def count_of(model: Any, *roles: str) -> int:
    return sum(v.size for v in variables(model) if set(v.role) & set(roles))


@pytest.mark.parametrize("name", [n for n, row in TABLE.items() if not row.shape and not row.scheme.at])
@pytest.mark.parametrize("depth", [2, 5])
def test_parameters_by_hand(name, depth):
    """Norms at each site and at the end as the definition says, gains as it says, and nothing else (A9, X46)."""
    row, d, h, vocab, length = TABLE[name], 8, 32, 11, 6
    model = abstract(row.scheme, depth=depth)
    norms = 2 * depth * row.form.norms + (row.form.final is not None)
    assert count_of(model, "norm_scale") == norms * d
    assert count_of(model, "gain", "gain_offset") == 2 * depth * row.form.gains(d)
    matrices = depth * (4 * d * d + 2 * d * h)
    ends = vocab * d + length * d + d * vocab
    assert sum(v.size for v in variables(model)) == matrices + ends + norms * d + 2 * depth * row.form.gains(d)


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("pre_ln", 2 * 5 + 1),
        ("post_ln", 2 * 5),
        ("sandwich_branch", 4 * 5 + 1),
        ("sandwich_trunk", 4 * 5),
        ("rezero", 0),
    ],
)
def test_norms_by_the_papers(name, norms):
    model = abstract(CATALOGUE[name], depth=5, norms=NormDefaults("layernorm", bias=True))
    assert count_of(model, "norm_scale") == count_of(model, "norm_bias") == norms * 8
    rms = abstract(CATALOGUE[name], depth=5, norms=NormDefaults("rmsnorm", bias=True))
    assert count_of(rms, "norm_bias") == 0


def test_the_options_of_the_model_by_count():
    base = sum(v.size for v in variables(abstract(PRE, depth=2)))

    def more(**shape):
        return sum(v.size for v in variables(abstract(PRE, depth=2, **shape))) - base

    assert more(tied=True) == -8 * 11
    assert more(positions="none") == more(positions="rope") == -6 * 8
    assert more(mlp="swiglu") == 2 * 8 * 32
    assert more(bias=True) == 2 * (3 * 8 + 8 + 32 + 8)
    assert more(bias=True, mlp="swiglu") == 2 * 8 * 32 + 2 * (3 * 8 + 8 + 2 * 32 + 8)
    assert more(qk_norm=True) == 2 * 2 * 4
    assert more(mlp_ratio=2) == -2 * 2 * 8 * 16


@every_row
def test_every_parameter_has_its_role_and_only_kernels_decay(row):
    params = nnx.state(abstract(row.scheme, **({"depth": DEPTH} | row.shape)))
    mask = jax.tree.leaves(decay_mask(params, row.scheme.optim))
    assert [r for r in listing(params, row.scheme.optim) if r.lr != 1.0] == []
    for (path, variable), decays in zip(by_path(params).items(), mask, strict=True):
        assert set(variable.role) <= set(ROLES), path
        assert decays == (path.endswith("/kernel") or path == "head"), path
        stacked = path.startswith("stack/")
        assert variable.get_metadata().get("stacked", False) == stacked, path
        if hasattr(variable, "fans"):
            fan_in, fan_out = variable.fans
            axes = (fan_in, fan_out) if len(variable.role) == 1 else (fan_in, len(variable.role), fan_out)
            axes = axes[::-1] if variable.role[0] in ("emb", "pos") else axes
            assert variable.shape[1:] == axes if stacked else variable.shape == axes, path
            assert variable.role[0] in (*KERNEL_ROLES, "emb", "pos")


def test_which_matrix_has_which_role():
    roles = {path: v.role for path, v in by_path(abstract(PRE, depth=1, mlp="swiglu", bias=True)).items()}
    branch = "stack/runs/0/sites/{}/branch/{}/{}"
    assert roles["embed"] == ("emb",) and roles["positions"] == ("pos",) and roles["head"] == ("head",)
    assert roles[branch.format(0, "qkv", "kernel")] == ("q", "k", "v")
    assert roles[branch.format(0, "write", "kernel")] == roles[branch.format(1, "write", "kernel")] == ("write",)
    assert roles[branch.format(1, "fc_in", "kernel")] == ("fc_in", "fc_in")
    assert roles[branch.format(1, "fc_in", "bias")] == ("bias",)
    assert Counter(r for role in roles.values() for r in role) == Counter(
        emb=1, pos=1, head=1, q=1, k=1, v=1, write=2, fc_in=2, bias=4, norm_scale=3
    )


def parts_of(tree: Any, lead: int = 1) -> dict[str, list[np.ndarray]]:
    """The drawn weights of a tree by role, each part by itself, as (..., in, out)."""
    found: dict[str, list[np.ndarray]] = {}
    for v in variables(tree):
        if hasattr(v, "fans"):
            value = np.asarray(v[...])
            for i, role in enumerate(v.role):
                found.setdefault(role, []).append(value if len(v.role) == 1 else value[..., i, :])
    return found


def assert_std(values: list[np.ndarray], std: Any, tolerance: float = 0.03) -> None:
    for value in values:
        assert np.std(value) == pytest.approx(std, rel=tolerance)
        assert np.max(np.abs(value)) <= 3.0 / 0.98657724 * std * 1.001, "truncated at three standard deviations"
        assert abs(np.mean(value)) < 4 * std / sqrt(value.size)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_only_what_writes_to_the_stream_is_scaled_by_depth(mlp):
    """A7: at L = 32 and std 0.02 both writing matrices have 0.0025, all others 0.02; a gate's second is no writer."""
    model = start("pre_ln", Init("std", std=0.02), depth=32, width=32, mlp=mlp, vocab=500, length=200)
    parts = parts_of(model)
    assert {role: len(values) for role, values in parts.items()} == {
        "emb": 1, "pos": 1, "head": 1, "q": 1, "k": 1, "v": 1, "write": 2, "fc_in": 2 if mlp == "swiglu" else 1,
    }  # fmt: skip
    drawn = []
    for role, values in parts.items():
        assert_std(values, 0.0025 if role == "write" else 0.02)
        drawn += [value.reshape(-1) / (0.0025 if role == "write" else 0.02) for value in values]
    assert np.std(np.concatenate(drawn)) == pytest.approx(1, rel=0.005), "truncation takes 1.3 %, which is put back"


def test_gain_init_goes_by_the_fan_in_of_the_single_matrix():
    """A16: neither the stack of blocks nor the parts of a fused matrix count as fan-in; a table's fan is its width."""
    model = start("pre_ln", Init("gain", gain=0.7, out_scale=0.5), depth=16, width=32, vocab=500, length=200)
    parts = parts_of(model)
    for role in ("emb", "pos", "head", "q", "k", "v", "fc_in"):
        assert_std(parts[role], 0.7 / sqrt(32))
    attention, mlp = parts["write"]
    assert_std([attention], 0.35 / sqrt(32))
    assert_std([mlp], 0.35 / sqrt(128))


def init_stack(fused: bool, scheme: Scheme | str, scan: bool = True, mlp: str = "gelu", depth: int = 12) -> Stack:
    def branch(kind, key):
        return Attention(32, 4, fused=fused, key=key) if kind == "attention" else MLP(32, 64, mlp, key=key)

    return fast(lambda: stack(scheme, branch, depth, 32, scan=scan))()


@pytest.mark.parametrize(("fused", "mlp"), [(True, "swiglu"), (False, "gelu")])
def test_deepnorm_starts_the_value_and_the_writing_and_inner_matrices_small(fused, mlp):
    """A3: 0.3195 times Xavier at 12 blocks on v, output and all feed-forward matrices; q and k have Xavier itself."""
    assert deepnorm_beta(Site("mlp", 1, 2, 12)) == pytest.approx(0.3195, abs=5e-5)
    assert deepnorm_beta(Site("mlp", 1, 2, 100)) == pytest.approx(0.1880, abs=5e-5)
    parts = parts_of(init_stack(fused, "deepnorm", mlp=mlp))
    square, oblong = sqrt(2 / (32 + 32)), sqrt(2 / (32 + 64))
    assert_std(parts["q"] + parts["k"], square)
    assert_std(parts["v"] + parts["write"][:1], 0.3195 * square)
    assert_std(parts["fc_in"] + parts["write"][1:], 0.3195 * oblong)
    assert len(parts["fc_in"]) == (2 if mlp == "swiglu" else 1)


def test_scanned_and_unrolled_start_alike():
    one, other = init_stack(True, "deepnorm", depth=3), init_stack(True, "deepnorm", scan=False, depth=3)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(one), jax.tree.leaves(other))


def test_how_blocks_are_grouped_does_not_change_their_start():
    one = init_stack(True, "pre_ln", depth=3)
    other = init_stack(True, PRE.but(Where(None, Blocks(1, 1)), scale=0.5), depth=3)
    assert [run.length for run in other.plan] == [1, 1, 1]
    for block in range(3):
        pairs = zip(jax.tree.leaves(one.block(block)), jax.tree.leaves(other.block(block)), strict=True)
        assert largest_difference(*zip(*pairs, strict=True)) < 1e-6


def test_blocks_and_branches_start_differently():
    kernels = list(parts_of(init_stack(True, "pre_ln", depth=3)).values())
    flat = np.concatenate([v.reshape(-1, 32 * 32) for vs in kernels for v in vs if v.shape[1:] == (32, 32)])
    distinct = np.corrcoef(flat)
    assert np.max(np.abs(distinct - np.eye(len(flat)))) < 0.2


def test_init_rules_reach_exactly_their_role_and_may_depend_on_depth():
    ruled = PRE.but(init=Frozen({"k": InitRule(Linear(2.0)), "write": InitRule(0.0)}))
    plain, parts = parts_of(init_stack(True, PRE, depth=4)), parts_of(init_stack(True, ruled, depth=4))
    assert set(parts) == {"q", "k", "v", "write", "fc_in"}
    for role in ("q", "v", "fc_in"):
        assert largest_difference(parts[role], plain[role]) == 0
    assert all(not value.any() for value in parts["write"])
    want = plain["k"][0] * np.array([0.5, 1.0, 1.5, 2.0]).reshape(4, 1, 1)
    assert relative(parts["k"][0], want) < 1e-6


def test_an_init_rule_that_reaches_nothing_is_refused():
    for role in ("writes", "gain"):
        with pytest.raises(ValueError, match=f"init rule for '{role}' starts nothing"):
            init_stack(True, PRE.but(init=Frozen({role: InitRule(2.0)})), depth=1)


@pytest.mark.parametrize("shape", ["scalar", "vector"])
def test_learned_gains_start_where_they_say(shape):
    """Whatever the way of making them, float32, one value a block where the start is a rule (A4)."""
    scheme = PRE.but(scale=Learned(Linear(0.4), shape), skip=Learned(1e-4, shape, offset=True))
    scheme = scheme.but(Where(None, Blocks(3)), in_scale=2.0)

    def build():
        return stack(scheme, lambda kind, key: nothing(), 4, 8)

    for model in (build(), fast(build)()):
        assert [run.length for run in model.plan] == [3, 1]
        for blocks, starts in zip(model.runs, ([0.1, 0.2, 0.3], [0.4]), strict=True):
            for site in blocks.sites:
                scale, skip = site.gains["scale"].gain[...], site.gains["skip"].gain[...]
                assert scale.shape == skip.shape == ((len(starts),) if shape == "scalar" else (len(starts), 8))
                assert scale.dtype == skip.dtype == jnp.float32
                np.testing.assert_allclose(scale.reshape(len(starts), -1)[:, -1], starts, rtol=1e-6)
                np.testing.assert_array_equal(skip, np.full(skip.shape, 1e-4, np.float32))
                assert not site.gains["skip"].offset[...].any() and site.gains["scale"].offset is None


class Nothing(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def nothing() -> Nothing:
    return Nothing()


# ---- schemes as data


def rebuilt(scheme: Scheme) -> Scheme:
    """An equal record that shares no container with the first."""
    fields = {f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme)}
    fields["init"], fields["optim"] = Frozen(dict(fields["init"])), Frozen(dict(fields["optim"]))
    fields["at"] = tuple((dataclasses.replace(where), Frozen(dict(what))) for where, what in fields["at"])
    return Scheme(**fields)


@every_row
def test_schemes_are_values(row):
    scheme = row.scheme
    for same in (rebuilt(scheme), pickle.loads(pickle.dumps(scheme)), copy.deepcopy(scheme), scheme.but()):
        assert same == scheme and hash(same) == hash(scheme)
    assert scheme.but(skip=0.123) != scheme
    assert scheme.name in repr(scheme)
    assert scheme.runs(KINDS, 5) == rebuilt(scheme).runs(KINDS, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.skip = 2.0


def test_one_and_one_point_zero_are_one_record():
    for one in (1, 1.0, np.float32(1), np.int64(1)):
        assert PRE.but(scale=one) == PRE and PRE.but(everywhere, scale=one).runs(KINDS, 3) == PRE.runs(KINDS, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_in": "lnorm"}, "norm_in is 'lnorm'"),
        ({"final_norm": "none"}, "final_norm is 'none'"),
        ({"scale": True}, "scale is True"),
        ({"scale": "0.1"}, "scale is '0.1'"),
        ({"skip": None}, "skip is None"),
        ({"skip": float("nan")}, "skip is nan"),
        ({"entry": float("inf")}, "entry is inf"),
        ({"drop": 1.5}, "drop is 1.5"),
        ({"drop": -0.1}, "drop is -0.1"),
        ({"drop": Learned(0.5)}, "drop cannot be learned"),
        ({"scale_eval": Learned(0.5)}, "scale_eval cannot be learned"),
        ({"at": ((Where("mlp"), Frozen({"final_norm": "norm"})),)}, "'final_norm' cannot be overridden"),
        ({"at": ((Where("mlp"), Frozen({"scael": 1.0})),)}, "'scael' cannot be overridden"),
    ],
)
def test_what_is_no_scheme_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PRE.but(**fields)


def test_what_is_no_gain_or_rule_is_refused():
    with pytest.raises(ValueError, match="none of scalar, vector"):
        Learned(1.0, "matrix")
    with pytest.raises(ValueError, match="none of base"):
        InitRule(1.0, "kaiming")
    with pytest.raises(TypeError):
        PRE.but(scael=1.0)
    with pytest.raises(ValueError, match="norm_out is 'lnorm'"):
        PRE.but(Where("mlp"), norm_out="lnorm").runs(KINDS, 2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"norms": NormDefaults("layer_norm")}, "the norm 'layer_norm' is none of"),
        ({"positions": "rotary"}, "positions are 'rotary'"),
        ({"remat": "ful"}, "remat is 'ful'"),
        ({"mlp": "geglu"}, "mlp kind 'geglu'"),
        ({"heads": 3}, "width 8 is not divisible by heads 3"),
        ({"heads": 8, "positions": "rope"}, "the head size 1 is odd"),
    ],
)
def test_what_is_no_model_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        abstract(PRE, **shape)
    with pytest.raises(ValueError, match="neither gain nor std"):
        Init("xavier")


def test_a_field_means_something_to_the_carry_or_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Other:
        uses = frozenset({"skip"})
        undoable = False

    assert PRE.but(carry=Other(), skip=0.5).skip == 0.5
    with pytest.raises(ValueError, match="norm_after has no meaning for the carry of 'pre_ln'"):
        PRE.but(carry=Other(), norm_after="norm")
    with pytest.raises(ValueError, match="entry has no meaning"):
        PRE.but(carry=Other(), entry=1.0)


def test_overrides_compose():
    """The base, the entry's own exceptions, then the user's; the base changes under exceptions, everywhere wins."""
    special = PRE.but(Where(None, Blocks(0, 0)), skip=0.5)
    assert [special.but(skip=0.7).resolve("mlp", block, 4).skip for block in (0, 1)] == [0.5, 0.7]
    assert [special.but(everywhere, skip=0.7).resolve("mlp", block, 4).skip for block in (0, 1)] == [0.7, 0.7]
    assert [special.but(Where("mlp"), skip=0.7).resolve(kind, 0, 4).skip for kind in KINDS] == [0.5, 0.7]
    assert special.resolve("mlp", 0, 4).at == ()
    assert Blocks(1, 2).span(4) == (1, 3) and Blocks(2).span(4) == (2, 4) and Blocks(9).span(4) == (4, 4)
    assert (
        Portion(0, 0.25).span(4) == (0, 1) and Portion(0, 0.25).span(3) == (0, 0) and Portion(0.5, 1).span(5) == (2, 5)
    )


@pytest.mark.parametrize(
    ("scheme", "runs"),
    [
        (PRE, [(0, 6)]),
        (PRE.but(Where("mlp"), scale=0.1), [(0, 6)]),
        (PRE.but(Where(None, Blocks(0, 1)), skip=0.0), [(0, 2), (2, 4)]),
        (PRE.but(Where("mlp", Blocks(2, 3)), skip=0.0), [(0, 2), (2, 2), (4, 2)]),
        (PRE.but(Where(None, Blocks(0, 1)), skip=1), [(0, 6)]),
        (PRE.but(Where(None, Blocks(9)), skip=0.0), [(0, 6)]),
        (
            PRE.but(Where(None, Blocks(0, 1)), scale=Linear(0.1)).but(Where(None, Blocks(2)), scale=Linear(0.1)),
            [(0, 6)],
        ),
    ],
)
def test_equal_neighbours_are_one_run(scheme, runs):
    assert [(run.first, run.length) for run in scheme.runs(KINDS, 6)] == runs


FORMULAS = {
    "plain": "H' = F(norm(H))",
    "post_ln": "H' = norm(H + F(H))",
    "pre_ln": "H' = H + F(norm(H))",
    "scaled": "H' = H + (one_over_sqrt_sites) F(norm(H))",
    "rezero": "H' = H + (learned scalar from 0) F(H)",
    "layerscale": "H' = H + (learned vector from layerscale_start) F(norm(H))",
    "sandwich_branch": "H' = H + norm(F(norm(H)))",
    "sandwich_trunk": "H' = norm(H + F(norm(H)))",
    "deepnorm": "H' = norm((deepnorm_alpha) H + F(H))",
}


@every_entry
def test_formulas_of_the_catalogue(name):
    scheme = CATALOGUE[name]
    assert scheme.describe(KINDS, 5) == [f"blocks 0-4: {scheme.formula()}"]
    assert scheme.equation and scheme.paper
    if name in FORMULAS:
        assert scheme.formula() == FORMULAS[name]
    others = [CATALOGUE[other] for other in CORE if other != name]
    assert scheme.formula() not in [other.formula() for other in others]


@pytest.mark.parametrize(
    ("scheme", "formula"),
    [
        (PRE.but(scale=0.1), "H' = H + 0.1 F(norm(H))"),
        (PRE.but(skip=0), "H' = F(norm(H))"),
        (PRE.but(scale=0, drop=0.5), "H' = H"),
        (PRE.but(skip=0, scale=0), "H' = 0"),
        (PRE.but(in_scale=0), "H' = H + F(0)"),
        (PRE.but(in_scale=2, norm_in=None), "H' = H + F(2 H)"),
        (PRE.but(drop=Linear(0.2)), "H' = H + drop(F(norm(H)); 0.2 l/L)"),
        (PRE.but(scale=10, scale_eval=0.1), "H' = H + 10 F(norm(H))  [evaluation: scale 0.1]"),
        (PRE.but(scale=Knob("c"), skip=early), "H' = (early) H + (knob c) F(norm(H))"),
        (
            POST.but(entry=0.5, scale=Learned(1, "vector", offset=True)),
            "H' = norm(H + 0.5 H_block + (learned vector from 1 with offset) F(H))",
        ),
    ],
)
def test_formulas_carry_the_numbers(scheme, formula):
    assert scheme.formula() == formula


def test_description_tells_the_runs_apart():
    scheme = POST.but(Where("mlp"), entry=1.0).but(Where(None, Blocks(2)), skip=0.5)
    assert scheme.describe(KINDS, 4) == [
        "blocks 0-1: attention: H' = norm(H + F(H)); mlp: H' = norm(H + H_block + F(H))",
        "blocks 2-3: attention: H' = norm(0.5 H + F(H)); mlp: H' = norm(0.5 H + H_block + F(H))",
    ]


def test_a_knob_that_nobody_turns_is_named():
    model = perturbed(lambda: stack(PRE.but(scale=Knob("c")), lambda kind, key: nothing(), 1, 8))
    with pytest.raises(KeyError, match="knob 'c'"):
        model(jnp.ones((1, 2, 8)), Context(knobs={"d": 1.0}))


@pytest.mark.parametrize(("depth", "alpha"), [(12, 2.2134), (24, 2.6321), (48, 3.1302), (100, 3.7606)])
def test_deepnorm_alpha(depth, alpha):
    assert deepnorm_alpha(Site("mlp", 1, 2, depth)) == pytest.approx(alpha, abs=5e-5)


@pytest.mark.parametrize(
    ("depth", "first"), [(1, 0.1), (12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (36, 1e-6)]
)
def test_layerscale_starts_by_depth(depth, first):
    """A5; an explicit value wins."""
    for scheme, want in ((CATALOGUE["layerscale"], first), (CATALOGUE["layerscale"].but(scale=Learned(1e-4)), 1e-4)):
        model = stack(scheme, lambda kind, key: nothing(), depth, 4)
        for site in model.runs[0].sites:
            np.testing.assert_array_equal(site.gains["scale"].gain[...], np.full((depth, 4), want, np.float32))
