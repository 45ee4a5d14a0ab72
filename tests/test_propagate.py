"""Is signal propagation measured as it is, shown as it is, and expected as theory says?"""

import contextlib
import io
import json
import re
import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import runs
from kit import fast
from oracle import FORMS, Options, language_model
from resjax import propagate
from resjax.models.lm import Shape, loss
from resjax.propagation import cases, figure, measured, moments, result, table
from resjax.propagation.branches import NoTheory
from resjax.propagation.closed import closed_forms
from resjax.propagation.meanfield import expected
from resjax.propagation.measured import GEOMETRY, geometry
from resjax.propagation.theory import curves, whole_profiles
from resjax.residual import CATALOGUE, Context, Init, NormDefaults
from resjax.train.writers import from_json, parse
from runs import ROOT, files
from test_metrics import GPT2

pytestmark = pytest.mark.usefixtures("quick")
TINY_DEPTHS = ("--depths=2,3", "--seeds=2")
OWN_SCHEMES = """
from resjax.residual import CATALOGUE, Learned
BURSTS = CATALOGUE["rezero"].but(name="bursts", equation="H' = H + 1e25 F(H)", scale=1e25)
"""


@pytest.fixture(scope="module")
def config(calm):
    return calm


def words(config, *options, **fields):
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]
    return [f"--config={config}", *options, *flags]


def printed(capsys, config, *options, **fields):
    """What --json prints."""
    assert propagate.main(words(config, "--json", *options, **fields)) == 0
    return from_json(parse(capsys.readouterr().out))


def measured_of(config, name, depths=(3,), seeds=2, **fields):
    """Plans, cases and numbers of one scheme, without the command."""
    pairs = [(path.replace("__", "."), str(value)) for path, value in fields.items()]
    made = [plan.case() for plan in cases.build(str(config), pairs, name, depths, seeds)]
    return made, [measured.measured(case) for case in made]


# ------------------------------------------------------------------ the command line

HELP = """
import sys, time
began = time.process_time()
from resjax.propagate import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = [name for name in ("jax", "numpy", "flax", "matplotlib") if name in sys.modules]
print(f"code {code}; {heavy}; {time.process_time() - began}", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("option", "code"), [("--help", 0), ("--depths=0", 2), ("--seeds=some", 2), ("--config.train.steps=3", 2)]
)
def test_help_and_bad_words_are_answered_without_loading_jax(option, code):
    answer = subprocess.run(
        [sys.executable, "-c", HELP, option, "--config=none.py"],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    said, loaded, seconds = answer.stderr.strip().splitlines()[-1].split("; ")
    assert said == f"code {code}" and loaded == "[]"
    assert float(seconds) < 1
    if code == 0:
        assert all(word in answer.stdout for word in ("--schemes", "--depths", "--seeds", "--out", "--json", "130"))


BAD = {
    "no config": (["--depths=2"], ["--config is missing"]),
    "unknown scheme": (["C", "--schemes=pre_ln,post_nl"], ["'post_nl'", "did you mean 'post_ln'"]),
    "unknown form": (["C", "--schemes=admin:profile"], ["'admin:profile'", "admin:profiled"]),
    "no forms": (["C", "--schemes=pre_ln:x"], ["'pre_ln:x'", "one form only"]),
    "nothing between commas": (["C", "--schemes=pre_ln,,post_ln"], ["--schemes", "between two commas"]),
    "no such file": (["C", "--schemes=schems.py:X"], ["schems.py", "does not exist"]),
    "no depth": (["C", "--depths=2,"], ["--depths has ''", "from 1 to"]),
    "half a depth": (["C", "--depths=2.5"], ["--depths has '2.5'", "whole number"]),
    "no block": (["C", "--depths=0"], ["--depths has '0'"]),
    "two depths": (["C", "--depths=2", "--config.model.depth=3"], ["contradict", "--config.model.depth=3"]),
    "two schemes": (["C", "--schemes=pre_ln", "--config.residual.name=post_ln"], ["contradict"]),
    "no seeds": (["C", "--seeds=0"], ["--seeds has '0'"]),
    "training": (["C", "--config.optimizer.lr=1"], ["optimizer.lr", "no effect"]),
    "bad field": (["C", "--config.model.widht=8"], ["'model.widht'", "did you mean"]),
    "bad value": (["C", "--config.residual.scale=x"], ["residual.scale"]),
    "unknown option": (["C", "--scheme=pre_ln"], ["did you mean --schemes=pre_ln"]),
    "a file": (["C", "--out=taken.txt"], ["taken.txt", "which is a file"]),
    "other files": (["C", "--out=other"], ["other", "holds other files"]),
    "a run": (["C", "--out=run"], ["run", "holds other files"]),
    "remote": (["C", "--out=gs://bucket/x"], ["no local folder"]),
    "empty": (["C", "--out="], ["--out is empty"]),
    "no effect": (["C", "--schemes=resi_dual", "--config.residual.skip=0.5"], ["skip"]),
    "too large": (["C", "--depths=1000", "--config.model.width=16384"], ["GiB", "smaller --depths"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "propagate.json").write_text('{"command": "another"}')
    before = files(tmp_path)
    given, said = BAD[case]
    assert propagate.main([f"--config={config}" if word == "C" else word for word in given]) == 2
    out = capsys.readouterr()
    assert out.err.startswith("resjax: ") and len(out.err.strip().splitlines()) == 1
    assert "Traceback" not in out.err and all(word in out.err for word in said), out.err
    assert {path: content for path, (_, content) in files(tmp_path).items()} == {
        path: content for path, (_, content) in before.items()
    }


# ------------------------------------------------------------------ the numbers


def geometry_by_hand(h):
    """M1, M1c, participation ratio and stable rank of (B, T, D), in float64."""

    def cosine(x):
        unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
        grams = np.einsum("btd,bud->btu", unit, unit)
        return np.mean([gram[~np.eye(len(gram), dtype=bool)].mean() for gram in grams])

    centred = h - h.mean(axis=(0, 1))
    values = np.linalg.svd(centred.reshape(-1, h.shape[-1]), compute_uv=False) ** 2
    return {
        "token_cosine": cosine(h),
        "token_cosine_centred": cosine(centred),
        "participation_ratio": values.sum() ** 2 / (values**2).sum(),
        "stable_rank": values.sum() / values.max(),
    }


@pytest.mark.parametrize("shape", [(2, 16, 8), (1, 5, 32), (3, 40, 24)])
def test_the_geometry_is_its_formulas(shape):
    rng = np.random.default_rng(3)
    h = rng.normal(size=shape) @ np.diag(np.linspace(0.1, 2, shape[-1])) + rng.normal(size=shape[-1])
    got = jax.jit(geometry)(jnp.asarray(h, jnp.float32))
    want = geometry_by_hand(h)
    assert set(got) == set(GEOMETRY)
    for name in GEOMETRY:
        tolerance = {"rel": 0.02} if name == "stable_rank" else {"rel": 1e-4, "abs": 1e-5}
        assert float(got[name]) == pytest.approx(want[name], **tolerance), name
    assert float(got["stable_rank"]) >= want["stable_rank"] * (
        1 - 1e-4
    )  # the largest eigenvalue is never overestimated


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_the_geometry_of_extremes(scale):
    of = fast(geometry)
    eye = jnp.eye(8)[None] * scale
    got = of(eye)
    assert float(got["participation_ratio"]) == pytest.approx(7, rel=1e-4)  # one direction is the mean
    assert float(got["stable_rank"]) == pytest.approx(7, rel=1e-3)
    line = jnp.linspace(-1, 1, 6)[None, :, None] * jnp.ones(4) * scale
    got = of(line)
    assert float(got["participation_ratio"]) == pytest.approx(1, rel=1e-4)
    assert float(got["stable_rank"]) == pytest.approx(1, rel=1e-4)
    same = jnp.tile(jnp.asarray([0.3, -0.7, 1.1, 0.2]) * scale, (2, 5, 1))
    one = jnp.ones((1, 1, 4)) * scale
    for collapsed in (same, one, 0 * same):
        got = of(collapsed)
        assert np.isnan(float(got["token_cosine_centred"])), "no direction is left"
        assert float(got["participation_ratio"]) == float(got["stable_rank"]) == 0
    assert all(np.isnan(float(value)) for value in of(same.at[0, 0, 0].set(jnp.nan)).values())
    half = of(jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 4)), jnp.bfloat16))
    assert all(value.dtype == jnp.float32 and np.isfinite(float(value)) for value in half.values())


@pytest.mark.parametrize(
    "name",
    [
        "pre_ln",
        "hyper_connections",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("post_ln", "denseformer", "lns")),
    ],
)
def test_streams_are_those_of_the_equation(name, config):
    """Every site against the scheme's equation in NumPy, with the weights that a run of that seed starts from."""
    (case,), (got,) = measured_of(config, name, seeds=1, seed=3)
    assert case.seeds == (3,)
    batch = next(measured.batches(case))
    _, streams, _ = language_model(merged(case.parts), batch[:, :-1], FORMS[name], Options(eps=1e-6, train=True))
    for i, stream in enumerate(streams[1:]):
        want = geometry_by_hand(stream) | {"stream_rms": np.sqrt(np.mean(stream**2))}
        for probe, value in want.items():
            error = 0.03 if probe == "stable_rank" else 2e-4
            assert got.sites[probe][(0, *divmod(i, 2))] == pytest.approx(value, rel=error, abs=1e-5), (i, probe)
    assert got.ends["embed_rms"][0] == pytest.approx(np.sqrt(np.mean(streams[0] ** 2)), rel=1e-5)
    if name == "pre_ln":
        for i, (before, after) in enumerate(pairwise(streams)):
            update, stream = (np.linalg.norm(x, axis=-1) for x in (after - before, before))
            assert got.sites["update_ratio"][(0, *divmod(i, 2))] == pytest.approx(np.mean(update / stream), rel=1e-4)


def merged(parts, batch=None):
    return nnx.merge(parts.graphdef, parts.initial(lambda _: batch).params)


def test_gradients_are_those_of_the_loss(config):
    """Against zeros added to the stream after each site, blocks called one by one."""
    (case,), (got,) = measured_of(config, "pre_ln", seeds=1)
    model, batch = merged(case.parts), next(measured.batches(case))

    @fast
    def gradient(model, zeros):
        def value(zeros):
            h = model.embedded(batch[:, :-1], Context()) + zeros[0]
            for i, zero in enumerate(zeros[1:]):
                block, pos = divmod(i, 2)
                one = model.stack.block(block)
                h, _ = one.sites[pos](h, one.places(block)[pos], {}, None, Context())
                h = h + zero
            return loss(model.logits(model.final_norm(h)), jnp.asarray(batch[:, 1:]))

        return jax.value_and_grad(value)(zeros)

    zeros = jnp.zeros((7, case.batch, case.length, 8), jnp.float32)
    value, slopes = gradient(model, zeros)
    norms = np.sqrt(np.square(np.asarray(slopes, np.float64)).sum(axis=(1, 2, 3)))
    np.testing.assert_allclose(got.ends["embed_grad"][0], norms[0], rtol=1e-4)
    np.testing.assert_allclose(got.sites["stream_grad"][0].reshape(-1), norms[1:], rtol=1e-4)
    assert got.ends["loss"][0] == pytest.approx(float(value), rel=1e-5)


def test_one_program_a_depth_whatever_the_seeds(config, monkeypatch):
    count = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: count.append(1) or compile_(lowered))
    _, (got,) = measured_of(config, "pre_ln", depths=(2,), seeds=3)
    assert len(count) == 2  # one draws, one measures
    assert got.sites["stream_rms"].shape == (3, 2, 2)
    assert len({float(value) for value in got.sites["stream_rms"][:, -1, -1]}) == 3


def test_a_start_from_data_is_honoured(config):
    """Omega is the root of the sum of the variances so far, which a closed form knows nothing of."""
    (case,), (got,) = measured_of(config, "admin:profiled", seeds=1)
    batch = next(measured.batches(case))
    sites = merged(case.parts, batch).stack.runs[0].sites
    omega = np.stack([np.asarray(one.gains["skip"].gain[...])[:, 0] for one in sites], axis=1)  # (depth, sites)
    squares = got.sites["update_rms"][0].astype(np.float64).reshape(-1) ** 2
    assert omega[0, 0] == 1
    want = np.sqrt(got.ends["embed_rms"][0] ** 2 + np.cumsum(squares))[:-1]
    np.testing.assert_allclose(omega.reshape(-1)[1:], want, rtol=0.02)
    np.testing.assert_allclose(got.sites["stream_rms"], 1, atol=2e-3)


# ------------------------------------------------------------------ theory

WIDE = dict(model__width=128, model__heads=4, data__length=32, data__batch=4)
ERROR = {"stream_rms": 0.05, "update_rms": 0.10, "update_ratio": 0.10, "stream_grad": 0.15}


SLOW = ("post_ln", "plain", "tfixup", "dyt", "derf", "completep", "normformer", "subln", "parallel", "hybrid_norm")
SLOW += ("x0_mixing", "olmo2", "gemma", "keel", "laurel", "gpas", "gpt2_init", "stochastic_depth")


@pytest.mark.parametrize(
    "name",
    [
        *("pre_ln", "deepnorm", "sandwich_branch", "admin:profiled", "hyper_connections"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_mean_field_theory_agrees_with_what_is_measured(name, config):
    """Width 128, 128 tokens, 4 seeds: stream to 5 %, ratio to 10 %, gradient to 15 %, token cosine to 0.06.

    Without skips seeds differ by 30 % in the gradient and 6 % in the stream. Stochastic depth drops a sequence's update as a whole: of
    16 sequences, at a tenth, the mean ratio would be known to 8 % only; it has 16 times as many, of a quarter of the length.
    """
    sizes = WIDE | ({"data__batch": 64, "data__length": 8} if name == "stochastic_depth" else {})
    made, found = measured_of(config, name, depths=(6,), seeds=4, **sizes)
    (depth,) = result.study(made, found).depths
    assert not depth.no_mean_field
    theory = {one.quantity: one.values for one in depth.theory if one.name == "mean field"}
    for probe in ("stream_rms", "update_rms", "update_ratio", "token_cosine", "stream_grad"):
        got, want = depth.profiles[probe].mean, theory[probe]
        if probe == "update_rms" and name == "hyper_connections":  # nor has each of several an update of its own
            assert np.isnan(want).all()
        elif probe == "token_cosine":
            np.testing.assert_allclose(got, want, atol=0.06, err_msg=probe)
        elif not (probe == "stream_grad" and name == "hyper_connections"):  # each of several streams has its own
            error = ERROR[probe] * (2 if name == "plain" else 1)
            np.testing.assert_allclose(got, want, rtol=error, atol=1e-6, err_msg=probe)
    assert np.isnan(theory["update_ratio"]).all() == (name == "plain")


def test_theory_knows_the_gain_of_the_embedding(config):
    by_gain = []
    for gain in (1, 20):
        (plan,) = cases.build(str(config), [("init.embed_gain", str(gain))], "pre_ln", (2,), 1)
        nothing = measured.Measured(
            {name: np.ones((1, 2, 2)) for name in measured.SITE}, {name: np.ones(1) for name in measured.ENDS}, 0.0, 0.0
        )
        (depth,) = result.study([plan.case()], [nothing]).depths
        by_gain.append({one.quantity: one.values for one in depth.theory if one.name == "mean field"})
    small, large = by_gain
    assert (large["stream_rms"][0, 0] / small["stream_rms"][0, 0]) > 15
    np.testing.assert_allclose(
        large["update_rms"][0, 0], small["update_rms"][0, 0], rtol=0.01
    )  # it reads a normalised stream


@pytest.mark.parametrize("name, want", [("pre_ln", 4), ("ngpt", 1), ("attnres", 0), ("plain", 3)])
def test_one_whole_profile_a_quantity(name, want):
    """A value at every site; bounds, and what is told as a proportion, are none; mean field before others."""
    sizes = shape(depth=3)
    found = whole_profiles(curves(CATALOGUE[name], sizes, UNIT, sizes.length)[0])
    assert len(found) == want and all(
        np.isfinite(one.values).all() and one.values.shape == (3, 2) for one in found.values()
    )
    assert name == "ngpt" or all(one.name == "mean field" for one in found.values())


def shape(**fields):
    given = dict(vocab=64, length=16, depth=24, width=64, heads=2, norms=NormDefaults("layernorm"))
    return Shape(**(given | fields))


UNIT = Init("gain", gain=1.0, out_scale=1.0)


def closed(name, sizes, init=UNIT, quantity="stream_rms"):
    found = closed_forms(CATALOGUE[name] if isinstance(name, str) else name, sizes, init, sizes.length)
    return {one.name: one.values for one in found if one.quantity == quantity}


def test_bounds_are_those_of_xiong():
    """X13: (1 + l/2) d to (1 + 3 l/2) d under unit weights, a ReLU and embeddings of variance 1."""
    sizes = shape(mlp="relu", mlp_ratio=1.0, positions="none")
    found = closed("pre_ln", sizes)
    l = np.arange(1, 25)
    v0 = 1 / 64  # the tables' fan is the width
    np.testing.assert_allclose(found["lower bound"][:, 1] ** 2, v0 + l / 2, rtol=1e-5)
    np.testing.assert_allclose(found["upper bound"][:, 1] ** 2, v0 + 3 * l / 2, rtol=1e-3)


def test_growth_to_the_same_size_at_every_depth():
    """X17, X39: with out_scale 1 / sqrt(2 L) the sum over all blocks does not depend on L; ratios fall as one over the stream."""
    ends = [closed("pre_ln", shape(depth=depth), Init())["linear growth"][-1, -1] for depth in (12, 48, 200)]
    np.testing.assert_allclose(ends, ends[0], rtol=1e-6)
    sizes = shape()
    q = closed("pre_ln", sizes)["linear growth"] ** 2
    (ratio,) = closed("pre_ln", sizes, quantity="update_ratio").values()
    before = np.concatenate([q[:1, 0] * np.nan, q[:-1, 1]])
    added = q[:, 0] - before
    np.testing.assert_allclose(ratio[1:, 1], np.sqrt((q[:, 1] - q[:, 0]) / q[:, 0])[1:], rtol=1e-6)
    np.testing.assert_allclose(np.ptp(added[1:]), 0, atol=1e-9)


@pytest.mark.parametrize(("depth", "first", "last"), GPT2)
def test_update_ratios_of_gpt2_by_mean_field(depth, first, last):
    """X39: what propagate draws for GPT-2's start; 10 %."""
    sizes = Shape(1024, 128, depth, 768, 12, norms=NormDefaults("layernorm", 1e-5), tied=True)
    got = expected(CATALOGUE["pre_ln"], sizes, Init("std", std=0.02), 128).update_ratio
    np.testing.assert_allclose([*got[: len(first)], got[-1]], [*first, last], rtol=0.1)


def test_normalised_branches_add_one_each():
    """X33: rms^2 = v_0 + S, whatever the weights."""
    for gain in (0.1, 1.0):
        q = closed("sandwich_branch", shape(norms=NormDefaults(eps=0.0)), Init("gain", gain=gain))[
            "sum of normalised branches"
        ]
        np.testing.assert_allclose(np.diff(q.reshape(-1) ** 2), 1, rtol=1e-6)


def test_harmonic_growth():
    """X34: v_0 + v_b H_l for ReLU; a GELU departs, and the curve says so."""
    q = closed("lns", shape(mlp="relu"))["harmonic growth"][:, 1] ** 2
    np.testing.assert_allclose(np.diff(q), np.diff(q)[0] * 2 / np.arange(2, 25), rtol=1e-5)
    for mlp, departs in (("relu", False), ("gelu", True)):
        found = closed_forms(CATALOGUE["lns"], shape(mlp=mlp), UNIT, 16)
        assert any("does not hold" in one.departs for one in found) == departs


def test_product_of_gains():
    """X16: (1 + s^2)^S without norms; a branch that starts at 0 leaves the stream alone."""
    scheme = CATALOGUE["rezero"].but(scale=0.5)
    q = closed(scheme, shape(mlp="relu"), Init("gain", gain=2**0.25, out_scale=1.0))["product of gains"] ** 2
    np.testing.assert_allclose(q[1:, 1] / q[1:, 0], 1.25, rtol=1e-5)
    still = closed("rezero", shape())["product of gains"]
    assert np.ptp(still) == 0


def test_the_trunk_is_one_after_a_norm():
    """X11, and where there is no norm there is no curve."""
    values = closed("post_ln", shape())["norm on the trunk"]
    assert (values == 1).all()
    mixed = closed("mix_ln", shape())["norm on the trunk"]
    assert (mixed[:6] == 1).all() and np.isnan(mixed[6:]).all()
    assert closed("ngpt", shape())["norm on the trunk"][0, 0] == pytest.approx(1 / 8)
    assert "norm on the trunk" not in closed("pre_ln", shape())


def test_the_identity_path():
    """X31: 2^(-S/2) under Post-LN with branches of the stream's size, while the whole gradient keeps its size."""
    scheme = CATALOGUE["post_ln"].but(norm_out="norm")
    found = expected(scheme, shape(norms=NormDefaults(eps=0.0), depth=12), UNIT, 16)
    steps = np.arange(23, -1, -1)
    np.testing.assert_allclose(found.identity_path.reshape(-1), 2.0 ** (-steps / 2), rtol=1e-6)
    assert found.stream_grad[0, 0] > 0.2
    same = expected(CATALOGUE["pre_ln"], shape(), UNIT, 16)
    np.testing.assert_allclose(same.identity_path, 1)


def test_activations_are_those_of_monte_carlo():
    rng = np.random.default_rng(0)
    for kind, f in moments.FUNCTIONS.items():
        for c in (-0.5, 0.0, 0.7, 1.0):
            a = 0.8 * rng.normal(size=200_000)
            b = c * a + np.sqrt(1 - c**2) * 0.8 * rng.normal(size=200_000)
            got = moments.dual(kind, 0.64)
            assert float(got.of(np.array(c))) == pytest.approx(np.mean(f(a) * f(b)), abs=5e-3), (kind, c)
        assert got.mean == pytest.approx(np.mean(f(a)), abs=5e-3)
        slopes = [(f(z + 1e-4) - f(z - 1e-4)) / 2e-4 for z in (a, b)]
        assert float(got.slope_of(np.array(1.0))) == pytest.approx(np.mean(slopes[0] * slopes[1]), abs=1e-2)
    # X20: a ReLU MLP without skip, from orthogonal tokens
    c, seen = np.array(0.0), []
    for _ in range(10):
        relu = moments.dual("relu", 1.0)
        c = relu.of(c) / relu.of(np.array(1.0))
        seen.append(float(c))
    assert [seen[i] for i in (0, 3, 6, 9)] == pytest.approx([0.318, 0.681, 0.809, 0.872], abs=2e-3)


@pytest.mark.parametrize(
    ("name", "why"), [("resi_dual", "does not start as one"), ("b2t", "entered its block"), ("realformer", "share")]
)
def test_schemes_without_theory_say_why(name, why):
    with pytest.raises(NoTheory, match=why):
        expected(CATALOGUE[name], shape(), UNIT, 16)
    found, said = curves(CATALOGUE[name], shape(), UNIT, 16)
    assert why in said and all(one.name == "norm on the trunk" for one in found)


def test_every_curve_names_source_and_assumption():
    for scheme in CATALOGUE.values():
        found, why = curves(scheme, shape(depth=4), UNIT, 16)
        assert why or any(one.name == "mean field" for one in found)
        for one in found:
            assert one.source and one.holds and one.values.shape in ((4, 2), (4, 1))
            assert one.quantity in measured.SITE and (one.drawn != "line" or one.name in figure.THEORY)


# ------------------------------------------------------------------ what is printed and written


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    """The folder of a study of two schemes, and what was printed."""
    folder = tmp_path_factory.mktemp("study") / "study"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert propagate.main(words(config, *TINY_DEPTHS, "--schemes=pre_ln,post_ln", f"--out={folder}")) == 0
    return folder, out.getvalue()


def test_the_folder_and_the_table(done):
    folder, out = done
    assert sorted(path.name for path in folder.iterdir()) == ["propagate.json", "propagate.svg"]
    rows = [line for line in out.splitlines() if re.match(r"\|\s+[23] \|", line)]
    assert len(rows) == 2 * (2 + 3)  # two schemes, all blocks of so shallow networks
    assert "4 x 16 random tokens of 32 and 2 seeds (from 0)" in out and "+-" in out
    assert "theory, mean field: " in out and "Xiong et al. 2020" in out and "Here: the width is 8" in out
    assert all(ord(letter) < 128 for letter in "".join(rows))


def test_the_json_is_strict_and_complete(done, config):
    folder, _ = done
    found = parse((folder / "propagate.json").read_bytes())
    assert found["command"] == "resjax.propagate" and found["step"] == 0 and found["left_out"] == []
    assert [one["scheme"] for one in found["schemes"]] == ["pre_ln", "post_ln"]
    for one in found["schemes"]:
        assert one["tokens"] == {"batch": 4, "length": 16, "vocab": 32, "drawn": "evenly from the vocabulary"}
        assert one["seeds"] == [0, 1] and one["fields"]["residual"]["name"] == one["scheme"]
        assert [depth["depth"] for depth in one["depths"]] == [2, 3]
        for depth in one["depths"]:
            assert set(depth["profiles"]) == set(measured.SITE) == set(found["quantities"])
            assert set(depth["ends"]) == set(measured.ENDS) and depth["sites"] == ["attention", "mlp"]
            for values in depth["profiles"].values():
                assert {np.shape(values[name]) for name in ("mean", "sd", "low", "high")} == {(depth["depth"], 2)}
            assert all(np.shape(curve["values"]) == (depth["depth"], 2) for curve in depth["theory"])
            assert {"quantity", "name", "source", "holds", "departs"} < set(depth["theory"][0])


def test_mean_and_spread_are_over_seeds(done, config):
    folder, _ = done
    _, (got,) = measured_of(config, "pre_ln", depths=(3,))
    found = from_json(parse((folder / "propagate.json").read_bytes()))["schemes"][0]["depths"][1]["profiles"][
        "stream_rms"
    ]
    want = got.sites["stream_rms"].astype(np.float64)
    for name, value in (
        ("mean", want.mean(0)),
        ("sd", want.std(0, ddof=1)),
        ("low", want.min(0)),
        ("high", want.max(0)),
    ):
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-6)


def test_the_figure_is_one_file_that_asks_for_nothing(done):
    folder, _ = done
    text = (folder / "propagate.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.endswith(("href", "src")):
                assert value.startswith("#"), value
    assert "url(http" not in text and "<image" not in text and "@import" not in text
    said = "".join(root.itertext())
    for word in ("Stream RMS", "Token cosine", "Participation ratio", "Gradient at the stream", "Update/stream, mlp"):
        assert said.count(word) >= 2, word  # once a scheme
    assert "pre_ln" in said and "post_ln" in said and "share of the depth" in said and "3 blocks" in said


def test_again_in_the_same_folder_gives_the_same_bytes(config, tmp_path, capsys):
    folder = tmp_path / "study"
    command = words(config, "--depths=2", "--seeds=1", f"--out={folder}")
    assert propagate.main(command) == 0
    (folder / "notes.txt").write_text("mine")
    (folder / ".propagate.json.7.tmp").write_text("cut off")
    before = {name: (folder / name).read_bytes() for name in ("propagate.json", "propagate.svg")}
    assert propagate.main(command) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert (folder / "notes.txt").read_text() == "mine"
    assert propagate.main([*command, "--config.seed=5"]) == 0
    assert (folder / "propagate.json").read_bytes() != before["propagate.json"]


def test_json_goes_to_stdout_alone(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = printed(capsys, config, "--depths=2", "--seeds=1")
    assert found["schemes"][0]["scheme"] == "pre_ln" and list(tmp_path.iterdir()) == []
    assert propagate.main(words(config, "--depths=2", "--seeds=1")) == 0
    (folder,) = (tmp_path / "propagation").iterdir()
    assert folder.name == "calm,depths=2,seeds=1"
    assert from_json(parse((folder / "propagate.json").read_bytes())) == found or "nan" in json.dumps(found)


def test_names_joins_forms_files_and_fields(config, tmp_path, capsys):
    path = tmp_path / "schemes.py"
    path.write_text(OWN_SCHEMES.replace("1e25", "0.5"))
    schemes = f"post_ln+layerscale,attnres:block,{path}:BURSTS"
    found = printed(capsys, config, "--depths=2", "--seeds=1", f"--schemes={schemes}", seed=7, init__gain=0.8)
    assert [one["scheme"] for one in found["schemes"]] == schemes.split(",")
    assert all(one["seeds"] == [7] and one["fields"]["init"]["gain"] == 0.8 for one in found["schemes"])
    assert found["schemes"][1]["fields"]["residual"]["form"] == "block"
    rms = [one["depths"][0]["profiles"]["stream_rms"]["mean"] for one in found["schemes"]]
    np.testing.assert_allclose(rms[0], 1, atol=1e-2)


def test_what_the_file_says_of_its_scheme_is_not_said_of_others(config, tmp_path, capsys):
    path = tmp_path / "scaled.py"
    path.write_text(config.read_text().replace("    return", "    config.residual.scale = 0.0\n    return"))
    found = printed(capsys, path, "--depths=2", "--seeds=1", "--schemes=pre_ln,gpt2_init")
    still, other = (np.array(one["depths"][0]["profiles"]["update_rms"]["mean"], float) for one in found["schemes"])
    assert np.isnan(still).all() and (other > 0).all()


def test_gains_that_move_are_those_of_step_0(config, capsys):
    found = printed(capsys, config, "--depths=2", "--seeds=1", "--schemes=prores,pre_ln,layer_drop")
    moves, stands, drawn = found["schemes"]
    assert any("scale of this scheme moves with training" in note for note in moves["notes"])
    assert not any("moves" in note or "draw" in note for note in stands["notes"][1:])
    assert any("stochastic depth draw" in note for note in drawn["notes"])
    depth = moves["depths"][0]
    np.testing.assert_allclose(depth["profiles"]["stream_rms"]["mean"], depth["ends"]["embed_rms"]["mean"], rtol=1e-5)


def test_what_is_not_finite_is_named_and_shown(config, tmp_path, capsys):
    path = tmp_path / "schemes.py"
    path.write_text(OWN_SCHEMES)
    command = words(config, "--depths=6", "--seeds=2", f"--schemes={path}:BURSTS", f"--out={tmp_path / 'study'}")
    assert propagate.main(command) == 0
    out = capsys.readouterr().out
    text = (tmp_path / "study" / "propagate.json").read_text()
    found = parse(text)["schemes"][0]["depths"][0]
    ways = {row["direction"]: row for row in found["nonfinite"]}
    assert set(ways) == {"forward", "backward", "loss"}
    rms = np.array(from_json(found["profiles"]["stream_rms"]["mean"])).reshape(-1)
    first = 2 * ways["forward"]["block"] + ["attention", "mlp"].index(ways["forward"]["site"])
    assert not np.isfinite(rms[first:]).any() and first < 12
    assert '"nan"' in text or '"inf"' in text
    assert f"is not finite ({ways['forward']['value']}) first at block {ways['forward']['block']}" in out
    assert "the loss is not finite in 2 of 2 seeds" in out
    assert re.search(r"\|\s+6 \|\s+5! \|\s+(nan|inf)", out)
    figure_text = "".join(ElementTree.parse(tmp_path / "study" / "propagate.svg").getroot().itertext())
    assert f"not finite: block {ways['forward']['block']}" in figure_text


def test_an_interrupt_leaves_what_was_measured(config, tmp_path, monkeypatch):
    original, seen = measured.measured, []

    def second(case):
        seen.append(case.name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return original(case)

    monkeypatch.setattr("resjax.propagation.run.measured", second)
    command = words(config, "--depths=2", "--seeds=1", "--schemes=pre_ln,post_ln", f"--out={tmp_path / 'study'}")
    assert propagate.main(command) == 130
    found = parse((tmp_path / "study" / "propagate.json").read_bytes())
    assert [one["scheme"] for one in found["schemes"]] == ["pre_ln"]


def test_tokens_are_few_where_histories_are_read_and_as_asked_where_asked(config):
    def sizes(name, depth, **fields):
        pairs = [(path.replace("__", "."), str(value)) for path, value in fields.items()]
        config_of = str(ROOT / "configs" / "deep_preln.py")
        (plan,) = cases.build(config_of, pairs, name, (depth,), None)
        return plan.config.data.batch, plan.config.data.length, plan.seeds

    assert sizes("pre_ln", 1000) == (4, 128, 4)
    batch, length, seeds = sizes("attnres", 1000)
    assert batch * length < 512 and seeds == 1
    assert sizes("denseformer", 1000)[2] == sizes("attnres", 12)[2] == 2
    assert sizes("attnres", 12)[:2] == (4, 128)
    assert sizes("attnres", 1000, data__batch=3, data__length=50)[:2] == (3, 50)


def test_quartiles():
    assert table.quartiles(1) == [0] and table.quartiles(3) == [0, 1, 2]
    assert table.quartiles(1000) == [0, 250, 500, 749, 999]


@pytest.mark.slow
def test_every_scheme_of_the_catalogue(config, tmp_path, capsys):
    folder = tmp_path / "study"
    assert propagate.main(words(config, "--depths=2", "--seeds=1", "--schemes=all", f"--out={folder}")) == 0
    found = parse((folder / "propagate.json").read_bytes())
    assert [one["scheme"] for one in found["schemes"]] == list(CATALOGUE) and found["left_out"] == []
    for one in found["schemes"]:
        assert one["depths"][0]["nonfinite"] == [], one["scheme"]
        assert np.isfinite(from_json(one["depths"][0]["profiles"]["stream_grad"]["mean"])).all(), one["scheme"]
    ElementTree.parse(folder / "propagate.svg")


@pytest.mark.slow
def test_every_config_that_is_there(capsys):
    for path in sorted((ROOT / "configs").glob("*.py")):
        found = printed(capsys, path, "--depths=2", "--seeds=1", data__batch=1, data__length=16)
        assert found["schemes"][0]["depths"][0]["nonfinite"] == [], path.name
