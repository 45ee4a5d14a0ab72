"""Does one step do what it says: norm and clipping in float32, the rate that it logs, nothing of a non-finite gradient?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resjax.config.tree import assign, default
from resjax.config.validate import resolve
from resjax.train.assemble import assemble
from resjax.train.leaves import tree_hash
from resjax.train.state import LossScale
from resjax.train.step import make_step

TINY = {
    "model.depth": 2,
    "model.width": 8,
    "model.heads": 2,
    "data.length": 8,
    "data.batch": 4,
    "mesh.data": 1,
    "health.groups": (),
}


def parts_of(**fields):
    config = default()
    for path, value in (TINY | {name.replace("__", "."): value for name, value in fields.items()}).items():
        assign(config, path, value)
    return assemble(resolve(config, "cpu"), 32)


def run(parts, state, scale=None):
    """One step on a fixed batch; with ``scale`` as the loss scale."""
    if scale is not None:
        state = dataclasses.replace(state, loss_scale=LossScale(jnp.float32(scale), jnp.int32(0)))
    step = make_step(parts.graphdef, parts.optimizer, parts.schedule, parts.recipe)
    batch = jax.random.randint(jax.random.key(1), (4, 9), 0, 32)
    return jax.jit(step)(state, batch, False)[:2]


@pytest.mark.parametrize("param", ["float16", "bfloat16"])
def test_the_gradient_norm_is_taken_in_float32(param):
    """Of float16 parameters the squares of small gradients are 0 in float16."""
    small = parts_of(precision__param=param, optimizer__clip=0.0)
    state = small.initial()
    wide = parts_of(optimizer__clip=0.0)
    same = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state.params)
    _, expected = run(wide, dataclasses.replace(wide.initial(), params=same))
    _, got = run(small, state)
    np.testing.assert_allclose(got["grad_norm"], expected["grad_norm"], rtol=0.01)
    assert got["grad_norm"].dtype == jnp.float32


def test_the_logged_rate_is_the_one_applied_also_after_a_step_that_was_passed_over():
    parts = parts_of(
        optimizer__name="sgd",
        optimizer__momentum=0.0,
        optimizer__clip=0.0,
        optimizer__warmup=10,
        train__steps=20,
        train__on_nonfinite="skip",
        precision__compute="float16",
        precision__loss_scale=4.0,
    )
    state = parts.initial()
    before = tree_hash(state.params)
    for _ in range(2):  # an infinite loss scale: the gradient is not finite
        state, metrics = run(parts, state, scale=np.inf)
        assert not metrics["finite"]
    assert tree_hash(state.params) == before
    assert int(state.step) == 2
    after, metrics = run(parts, state, scale=4.0)
    assert metrics["finite"]
    np.testing.assert_allclose(metrics["lr"], parts.schedule(2), rtol=1e-6)
    moved = jnp.sqrt(
        sum(
            jnp.sum(jnp.square(new - old))
            for new, old in zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True)
        )
    )
    np.testing.assert_allclose(moved, metrics["lr"] * metrics["grad_norm"], rtol=1e-3)


def test_the_program_lowers_for_accelerators():
    """bfloat16 branches on a float32 stream, for TPU and CUDA, from a machine that has neither."""
    parts = parts_of(precision__compute="bfloat16", health__groups=("forward", "backward"))
    step = make_step(parts.graphdef, parts.optimizer, parts.schedule, parts.recipe)
    shapes = (parts.abstract, jax.ShapeDtypeStruct((4, 9), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool))
    for platform in ("tpu", "cuda"):
        text = jax.jit(step, donate_argnums=0).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        assert "dot_general" in text and "bf16" in text
