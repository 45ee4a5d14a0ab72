"""Do the fields that isolate precision and scale of the stream do what they say? precision.rounding and init.embed_gain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit import TOKENS, fast, make, start
from resjax.config import schema
from resjax.health import probes
from resjax.health.studies import STUDIES, Subject
from resjax.residual import CATALOGUE, Context, Init, Where
from resjax.residual.precision import ROUNDING, ROUNDINGS, as_stored, rounded

pytestmark = pytest.mark.usefixtures("quickly")
SOME = ("pre_ln", "post_ln", "hyper_connections", "denseformer", "reversible")


def read_out(model):
    """Its logits."""
    return fast(lambda: model(TOKENS, Context())[0])()


def test_the_field_has_the_roundings_of_the_core():
    assert schema.ROUNDINGS == ROUNDINGS == schema.FIELDS[ROUNDING].choices


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("form", [int, jnp.int32, jnp.float32], ids=["constant", "integer", "float"])
def test_what_is_stored_is_rounded_and_gradients_pass(name, form):
    x = jnp.asarray([1.0, 1.0 + 2.0**-9, 1e-9, 7e4, -3.14159], jnp.float32)
    code = form(ROUNDINGS.index(name))
    want = x if name == "none" else rounded(x, jnp.dtype(name))
    np.testing.assert_array_equal(as_stored(x, code), want)
    np.testing.assert_array_equal(jax.jit(as_stored, static_argnums=1 if form is int else ())(x, code), want)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(2 * as_stored(x, code)))(x), np.full(5, 2.0))


@pytest.mark.parametrize("name", [SOME[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SOME[1:])])
def test_a_model_that_rounds_is_the_one_that_the_rounding_study_replays(name):
    """The study's rise of the loss, by a rule of its own for what is rounded, is that between the two models."""
    batches = np.asarray(TOKENS)[None]
    exact = make(name)
    found = STUDIES["rounding"].run(Subject(exact, batches))["formats"]
    for kind in ROUNDINGS[1:]:
        model = make(name, rounding=kind)
        rise = Subject(model, batches).loss - Subject(exact, batches).loss
        np.testing.assert_allclose(rise, found[kind]["loss"], rtol=1e-3, atol=2e-7)
        assert rise != 0


def test_a_knob_says_the_rounding_in_place_of_the_model():
    model = make("pre_ln")
    logits = fast(lambda code: model(TOKENS, Context(knobs={ROUNDING: code}))[0])
    for code, kind in enumerate(ROUNDINGS):
        np.testing.assert_array_equal(logits(jnp.float32(code)), read_out(make("pre_ln", rounding=kind)))


def test_a_rounded_stream_holds_what_the_format_holds():
    """Block by block, and in the walk of the studies too."""
    walk = Subject(make("pre_ln", rounding="bfloat16"), np.asarray(TOKENS)[None]).walk
    state = walk.open(TOKENS[:, :-1])
    for place in range(3):
        state = walk.to(state, place)
        seen = np.asarray(walk.seen(state))
        np.testing.assert_array_equal(seen, seen.astype(jnp.bfloat16).astype(np.float32))


def test_float16_overflows_where_float16_does():
    model = start("pre_ln", init=Init(embed_gain=1e6), rounding="float16")
    assert not np.isfinite(read_out(model)).all()


def seen(model):
    """The probes of its adds, and what flowed there."""
    arrays = ("kept", "update", "after")

    def measure(flow):
        return probes.measure(flow) | probes.measure_precision(flow) | {name: getattr(flow, name) for name in arrays}

    return jax.device_get(fast(lambda: model(TOKENS, Context(measure=measure))[1])())


@pytest.mark.parametrize("kind", ROUNDINGS[1:])
def test_probes_see_what_is_stored(kind):
    """Against NumPy's own casts; the stream itself is float32, in which nothing of this is lost."""
    found = seen(start("pre_ln", init=Init(embed_gain=100.0), rounding=kind))
    kept, update, after = (found[name].astype(np.float64) for name in ("kept", "update", "after"))
    with np.errstate(over="ignore"):
        stored = (kept + update).astype(jnp.dtype(kind)).astype(np.float64)
    np.testing.assert_array_equal(after, stored)
    axes = tuple(range(2, after.ndim))
    moved = update != 0
    swallowed = np.sum((stored == kept) & moved, axis=axes) / np.sum(moved, axis=axes)
    np.testing.assert_allclose(found["swallowed"], swallowed, rtol=1e-6)
    assert swallowed.min() > 0.02
    error = np.sqrt(np.sum((stored - kept - update) ** 2, axis=axes) / np.sum(update**2, axis=axes))
    np.testing.assert_allclose(found["update_error"], error, rtol=1e-3)


def test_a_site_whose_add_overflows_is_the_first_that_is_not_finite():
    """In the format that is stored, though float32 would hold it."""
    scheme = CATALOGUE["pre_ln"].but(Where("mlp"), scale=1e6)
    finite, plain = (seen(start(scheme, rounding=kind))["finite"] for kind in ("float16", "none"))
    assert finite[0, 0] == 1 and finite[0, 1] == 0 and plain.all()


@pytest.mark.parametrize("name", ["pre_ln", "fixup", "ngpt", "hyper_connections"])
def test_the_gain_of_the_embedding_is_that_and_nothing_else(name):
    plain, large = start(name), start(name, init=Init(embed_gain=8.0))
    for part in ("embed", "positions"):
        np.testing.assert_allclose(getattr(large, part)[...], 8 * np.asarray(getattr(plain, part)[...]), rtol=1e-6)
    rest = [jax.tree.leaves((model.stack, model.head)) for model in (plain, large)]
    for one, other in zip(*rest, strict=True):
        np.testing.assert_array_equal(one, other)
