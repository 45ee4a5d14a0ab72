"""Does the learning rate do what the schedule's name and docstring say, step by step?"""

import math

import jax
import jax.numpy as jnp
import pytest

from resjax.errors import Refused
from resjax.train.schedule import NAMES, depends_on_steps, schedule, warmup_steps

LR, WARMUP, STEPS = 0.3, 10, 100


@pytest.mark.parametrize("name", NAMES)
def test_warmup_starts_at_one_part_and_reaches_the_rate(name):
    rate = schedule(name, LR, WARMUP, STEPS)
    for t in range(WARMUP):
        assert float(rate(t)) == pytest.approx(LR * (t + 1) / WARMUP, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_warmup_starts_at_the_full_rate(name):
    assert float(schedule(name, LR, 0, STEPS)(0)) == pytest.approx(LR, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "t", "factor"),
    [
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.55),
        ("cosine", 100, 0.1),
        ("cosine", 1000, 0.1),
        ("constant", 99, 1.0),
        ("linear", 55, 0.5),
        ("linear", 99, 1 / 90),
        ("linear", 100, 0.0),
        ("linear", 150, 0.0),
        ("inverse_sqrt", 10, math.sqrt(10 / 11)),
        ("inverse_sqrt", 39, 0.5),
        ("inverse_sqrt", 3999, 0.05),
        ("steps", 59, 1.0),
        ("steps", 60, 0.1),
        ("steps", 84, 0.1),
        ("steps", 85, 0.01),
        ("steps", 99, 0.01),
    ],
)
def test_after_the_warmup(name, t, factor):
    assert float(schedule(name, LR, WARMUP, STEPS)(t)) == pytest.approx(LR * factor, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_traced_and_eager_agree(name):
    rate = schedule(name, LR, WARMUP, STEPS)
    with jax.numpy_dtype_promotion("strict"):
        traced = jax.vmap(rate)(jnp.arange(120, dtype=jnp.int32))
    assert traced.dtype == jnp.float32
    for t in (0, 9, 10, 60, 97, 119):
        assert float(traced[t]) == pytest.approx(float(rate(t)), rel=1e-6, abs=1e-7)


def test_warmup_as_steps_share_and_default():
    assert warmup_steps(7, 50) == 7
    assert warmup_steps(0.2, 50) == 10
    assert warmup_steps(None, 50) == 5
    assert warmup_steps(None, 3) == 0
    assert warmup_steps(50, 50) == 50


@pytest.mark.parametrize("name", NAMES)
def test_depends_on_steps_is_what_the_numbers_say(name):
    for warmup in (5, 0.1, None):
        short, long = (jax.vmap(schedule(name, LR, warmup, steps))(jnp.arange(50)) for steps in (50, 500))
        assert depends_on_steps(name, warmup) == bool((short != long).any())
    assert depends_on_steps(name) == (name not in ("constant", "inverse_sqrt"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("cosin", LR, 0, 10), ["optimizer.schedule", "'cosin'", "did you mean 'cosine'"]),
        (("cosine", -1.0, 0, 10), ["optimizer.lr", "-1.0"]),
        (("cosine", float("nan"), 0, 10), ["optimizer.lr", "nan"]),
        (("cosine", LR, 11, 10), ["optimizer.warmup", "11", "train.steps", "10"]),
        (("cosine", LR, -1, 10), ["optimizer.warmup", "-1"]),
        (("cosine", LR, 1.5, 10), ["optimizer.warmup", "1.5"]),
        (("cosine", LR, 0, 0), ["train.steps", "0"]),
    ],
)
def test_bad_input_is_refused_in_one_sentence(args, words):
    with pytest.raises(Refused) as refusal:
        schedule(*args)
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)
