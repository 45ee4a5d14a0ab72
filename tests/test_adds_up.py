"""Do the recorded parts add up: embedding and updates to the final stream, and that to the logits? In every family of schemes, by what
it adds to what (contract of the core, section 6); and the exact ratios of updates that add up.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kit import KINDS, TOKENS, fast, make, stack
from resjax.health import probes
from resjax.models.lm import LM, Shape
from resjax.residual import CATALOGUE, Context, Init, NormDefaults, OneStream, constant
from test_metrics import GPT2
from test_properties import Matrix

DEPTH = 3
PARTS = ("before", "kept", "update", "after")


def plain(site):
    """Whether a site stores the stream plus its update: whole, not normed after, from the stream alone."""
    return (site.skip, site.entry, site.norm_after, site.keep_normed) == (1.0, 0.0, None, False)


def one_stream(scheme):
    return type(scheme.carry) is OneStream and scheme.outer is None


SINGLE = [name for name, scheme in CATALOGUE.items() if one_stream(scheme)]
ADDITIVE = [
    name for name in SINGLE if all(plain(site) for run in CATALOGUE[name].runs(KINDS, DEPTH) for site in run.sites)
]
OTHER = [name for name in SINGLE if name not in ADDITIVE]


def flowed(name):
    """A model away from its start, its logits, and what flowed at each site: (depth, sites, batch, ..., width), NaN where nothing."""
    model = make(name, depth=DEPTH, scan=False)

    def measure(flow):
        found = {part: getattr(flow, part) for part in PARTS}
        return {part: jnp.full_like(flow.after, jnp.nan) if x is None else x for part, x in found.items()}

    with jax.disable_jit():  # nothing is compiled for one use
        logits, seen = model(jnp.asarray(TOKENS), Context(measure=measure))
    return model, logits, {part: np.asarray(seen[part], np.float64) for part in PARTS}


def embedded(model):
    return np.asarray(model.embedded(jnp.asarray(TOKENS), Context()), np.float64)


def same(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def gives(model, last, logits):
    """The logits follow from the final stream."""
    same(model.logits(model.final(jnp.asarray(last, jnp.float32), Context())), logits, 1e-4)


def test_which_schemes_are_plain_sums():
    assert len(ADDITIVE) >= 20 and {"pre_ln", "layerscale", "sandwich_branch", "parallel", "value_residual"} <= {
        *ADDITIVE
    }
    assert {"post_ln", "deepnorm", "b2t", "span_norm", "plain"} <= {*OTHER}


@pytest.mark.parametrize("name", ADDITIVE)
def test_embedding_and_updates_are_the_final_stream(name):
    model, logits, flow = flowed(name)
    last = embedded(model) + flow["update"].sum(axis=(0, 1))
    same(flow["after"][-1, -1], last)
    gives(model, last, logits)


@pytest.mark.parametrize("name", OTHER)
def test_kept_and_update_are_what_is_normed_after_the_add(name):
    """Of the other schemes of one stream: site by site, and from each to the next."""
    model, logits, flow = flowed(name)
    chain = flow["after"].reshape(-1, *flow["after"].shape[2:])
    same(flow["before"].reshape(chain.shape), np.concatenate([embedded(model)[None], chain[:-1]]))
    for block in range(DEPTH):
        for pos, site in enumerate(model.stack.block(block).sites):
            total = np.nan_to_num(flow["kept"][block, pos]) + np.nan_to_num(flow["update"][block, pos])
            want = total if site.norm_after is None else site.norm_after(jnp.asarray(total, jnp.float32))
            same(flow["after"][block, pos], np.asarray(want, np.float64), 1e-4)
    gives(model, chain[-1], logits)


@pytest.mark.parametrize("name", ["hyper_connections", "mhc", "mhc_lite"])
def test_of_several_streams_each_is_what_was_kept_of_it_and_its_share(name):
    """All of them together are the one array that the probes see; the last is what the head reads."""
    model, logits, flow = flowed(name)
    assert flow["kept"].shape[2] > 1
    same(flow["after"], (flow["kept"] + flow["update"]).sum(axis=2))
    chain = flow["after"].reshape(-1, *flow["after"].shape[2:])
    same(flow["before"].reshape(chain.shape)[1:], chain[:-1])
    gives(model, chain[-1], logits)


def test_of_parts_of_one_stream_all_are_kept_and_added_at_once():
    """Frac-Connections mix parts of the width."""
    model, logits, flow = flowed("frac_connections")
    same(flow["after"], flow["kept"] + flow["update"])
    gives(model, flow["after"][-1, -1], logits)


def test_the_halves_of_a_reversible_network():
    """Each is the embedding and its own updates; their mean is what the head reads."""
    model, logits, flow = flowed("reversible")
    halves = embedded(model) + flow["update"].sum(axis=0)
    same(flow["after"][-1], halves)
    gives(model, halves.mean(axis=0), logits)


def test_a_history_of_outputs_is_embedding_and_updates():
    """Attention over depth adds nothing to a stream: its sources are the embedding and the updates, and close reads them once more."""
    model, logits, flow = flowed("attnres")
    assert np.isnan(flow["kept"]).all()
    updates = flow["update"].reshape(-1, *flow["update"].shape[2:])
    rows = jnp.asarray(np.concatenate([embedded(model)[None], updates]), jnp.float32)
    gives(model, model.stack.carry.close(model.stack.ends, rows), logits)


def test_a_history_of_blocks_is_what_they_read_and_their_updates():
    """DenseFormer: inside a block updates add up to its output; the head reads a weighted sum of all outputs."""
    model, logits, flow = flowed("denseformer")
    outputs = flow["before"][:, 0] + flow["update"].sum(axis=1)
    same(flow["after"][:, -1], outputs)
    rows = jnp.asarray(np.concatenate([embedded(model)[None], outputs]), jnp.float32)
    gives(model, model.stack.carry.close(model.stack.ends, rows), logits)


# ---- ratios of updates that add up (X39)


class Constant(nnx.Module):
    """A branch that adds the same vector to every token."""

    def __init__(self, width):
        self.b = constant(0.0, (width,), "bias")

    def __call__(self, x):
        return jnp.broadcast_to(self.b[...].astype(x.dtype), x.shape)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_updates_at_right_angles_dilute_as_the_root_of_the_depth(share):
    """X39, exactly: r_l = sqrt(v_b / (v_0 + l v_b)); of equal variances 1 / sqrt(l + 1), below 0.1 only from l = 100."""
    depth, width = 55, 111
    model = stack("pre_ln", lambda kind, key: Constant(width), depth, width)
    updates = np.sqrt(share) * np.eye(width, dtype=np.float32)[1:].reshape(depth, 2, width)
    for pos, site in enumerate(model.runs[0].sites):
        site.branch.b[...] = jnp.asarray(updates[:, pos])
    first = jnp.zeros((2, 3, width)).at[..., 0].set(1.0)
    _, found = fast(lambda: model(first, Context(measure=probes.measure)))()
    l = np.arange(2 * depth)
    ratios = np.asarray(found["update_ratio"]).reshape(-1)
    np.testing.assert_allclose(ratios, np.sqrt(share / (1 + l * share)), rtol=1e-5)
    if share == 1.0:
        assert np.flatnonzero(ratios < 0.1)[0] == 100
    np.testing.assert_allclose(found["update_cosine"], 0, atol=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_updates_of_random_branches_dilute_as_the_root_of_the_depth(share):
    """X39, of 55 scanned Pre-LN blocks as they start, whose branches are random matrices of gain 1: v_b = 1, v_0 = 1 / share. Mean of 4
    draws, 3 %: at width 256 a random update is not quite at right angles to the stream, so that single draws are off by up to 3.2 %.
    """
    depth, width = 55, 256
    init = Init("gain", gain=1.0, out_scale=1.0)

    def ratios(key):
        made = stack("pre_ln", lambda kind, key: Matrix(width, key), depth, width, init=init, key=key)
        first = jax.random.normal(jax.random.fold_in(key, 1), (1, 64, width)) / np.float32(np.sqrt(share))
        return made(first, Context(measure=probes.measure))[1]["update_ratio"]

    draws = fast(lambda keys: jax.lax.map(ratios, keys))(jax.random.split(jax.random.key(0), 4))
    found = np.mean(draws, axis=0).reshape(-1)
    np.testing.assert_allclose(found, np.sqrt(share / (1 + share * np.arange(2 * depth))), rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "first", "last"), GPT2)
def test_update_ratios_of_a_whole_gpt2_at_its_start(depth, first, last):
    """X39, by the probes of our own language model: width 768, 12 heads, 128 tokens, std 0.02, embeddings and positions 0.02, what writes
    divided by sqrt(2 L), GPT-2's epsilon; built and run in one compiled program, scanned. Mean of 2 draws, 10 %.
    """
    shape = Shape(1024, 128, depth, 768, 12, norms=NormDefaults("layernorm", 1e-5), tied=True)
    tokens = jnp.asarray(np.random.default_rng(0).permutation(1024)[None, :128], jnp.int32)

    @jax.jit
    def ratios(key):
        model = LM(shape, CATALOGUE["pre_ln"], Init("std", std=0.02), key=key)
        return model(tokens, Context(measure=probes.measure))[1]["update_ratio"]

    got = np.mean([ratios(jax.random.key(draw)) for draw in range(2)], axis=0)
    np.testing.assert_allclose([*got[: len(first)], got[-1]], [*first, last], rtol=0.1)
