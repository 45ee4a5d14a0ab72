"""Do subjects of one form share the programs of all studies, and do programs keep no model?"""

import contextlib
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.monitoring
import numpy as np
import pytest

from kit import make, variables
from resjax.health.studies import STUDIES, Subject
from resjax.health.studies.ablation import ablation
from resjax.residual import CATALOGUE, Knob
from resjax.residual.parameters import is_variable
from resjax.residual.precision import ROUNDING
from test_catalogue import ALL

pytestmark = pytest.mark.usefixtures("quickly")
LONG = ("probes", "similarity", "rounding")  # to compile
COMPILED = "/jax/core/compile/backend_compile_duration"
CARRIES = ("hyper_connections:dynamic", "attnres", "denseformer", "value_residual", "reversible")


@contextlib.contextmanager
def compilations():
    """A list that grows by one with each compilation in the block."""
    seen = []

    def heard(name, seconds, **_):
        if name == COMPILED:
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def subject(scheme, seed, step, **fields):
    """A model of its own, with the run that studies ask for."""
    draw = np.random.default_rng(seed)
    model = make(scheme, seed=seed, depth=3, width=12, length=8)
    model = jax.tree.map(lambda variable: variable.copy(), model, is_leaf=is_variable)
    origin = SimpleNamespace(
        training_batch=lambda number: draw.integers(0, 11, (2, 9)).astype(np.int32),
        next_model=lambda: jax.tree.map(lambda x: 0.99 * x, model),
        next_rate=0.1,
    )
    rows = [{"step": i, "loss": float(draw.normal())} for i in range(1, 31)]
    text = draw.integers(0, 11, (2, 3, 9)).astype(np.int32)
    return Subject(model, text, step=step, rows=rows, origin=origin, **fields)


@pytest.mark.parametrize(
    "name, studies",
    [
        ("pre_ln", tuple(study for study in STUDIES if study not in LONG)),
        *(pytest.param(name, tuple(STUDIES), marks=pytest.mark.slow) for name in ("pre_ln", *CARRIES)),
    ],
    ids=lambda value: value if isinstance(value, str) else "all" if set(value) & set(LONG) else "most",
)
def test_the_second_subject_of_a_form_compiles_nothing(name, studies):
    first, second = (subject(ALL[name], seed, step) for seed, step in ((0, 30), (1, 40)))
    with compilations() as before:
        one = {study: STUDIES[study].run(first) for study in studies}
    with compilations() as after:
        other = {study: STUDIES[study].run(second) for study in studies}
    assert len(before) > 20 and len(after) == 0
    for study, found in one.items():
        told = [value for value in found if isinstance(found[value], np.ndarray) and found[value].dtype.kind == "f"]
        if told and not (study == "jacobian" and name == "attnres"):  # there nothing is a stream
            assert any(not np.array_equal(found[value], other[study][value], equal_nan=True) for value in told), study


def test_the_step_and_the_knobs_are_values():
    """A scheme with a gain that moves with the step and one that is handed in: one program, other numbers."""
    scheme = CATALOGUE["pre_ln"].but(name="moved", scale=Knob("s"), skip=lambda site: 1.0 / (1.0 + site.step))
    losses = []
    with compilations() as seen:
        for step, knob in ((0, 1.0), (1, 1.0), (1, 0.5)):
            count = len(seen)
            losses.append(ablation(subject(scheme, 0, step, knobs={"s": np.float32(knob)}))["loss"])
        assert count == len(seen)
    assert len(set(losses)) == 3


def test_how_a_stream_is_rounded_is_a_value_too():
    losses = []
    for code in (0, 1):
        with compilations() as seen:
            looked = subject(CATALOGUE["pre_ln"], 0, 1, knobs={ROUNDING: np.int32(code)})
            losses.append(looked.loss)
    assert len(seen) == 0 and losses[0] != losses[1]
    assert losses[1] == pytest.approx(replace(looked, model=rounded(looked.model), knobs={}).loss, rel=1e-6)


def rounded(model):
    model.shape = replace(model.shape, rounding="bfloat16")
    return model


def test_programs_keep_no_model():
    looked = subject(CATALOGUE["pre_ln"], 2, 30)
    for name in ("ablation", "steadiness", "gradient", "jacobian"):
        STUDIES[name].run(looked)
    held = [weakref.ref(variable[...]) for variable in variables(looked.model)]
    del looked
    gc.collect()
    assert held and not any(ref() is not None for ref in held)
