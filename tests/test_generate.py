"""Does a language model write what its logits say? Greedy, drawn, longer than its window, or not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit import SMALL, fast, make
from resjax.models import generate as module
from resjax.models.generate import NOT_FINITE, generate
from resjax.residual import Context

LENGTH, VOCAB = SMALL["length"], SMALL["vocab"]


@pytest.fixture(scope="module")
def model():
    return make("pre_ln")


@pytest.fixture(scope="module")
def logits(model):
    """Logits (T, V) of a text that fits the window, by the plain forward pass."""
    forward = fast(lambda tokens: model(tokens[None], Context())[0][0])
    return lambda tokens: np.asarray(forward(jnp.asarray(tokens, jnp.int32)))


def written(model, prompt, count, seed=0, **options):
    return list(generate(model, prompt, count, key=jax.random.key(seed), **options))


def test_greedy_is_the_argmax_of_the_full_forward_pass_at_each_position(model, logits):
    prompt = [3, 7]
    text = prompt + written(model, prompt, LENGTH - 2, temperature=0)
    assert len(text) == LENGTH
    want = logits(text).argmax(axis=-1)
    assert text[2:] == want[1:-1].tolist()
    assert len(set(text[2:])) > 1, "the model always says the same: this would show nothing"


@pytest.mark.parametrize("prompt_length", [1, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH])
def test_a_text_longer_than_the_window_goes_on_from_its_end(model, logits, prompt_length):
    prompt = np.random.default_rng(1).integers(0, VOCAB, prompt_length).tolist()
    text = prompt + written(model, prompt, 2 * LENGTH, temperature=0)
    for end in range(prompt_length, len(text)):
        seen = text[max(0, end - LENGTH) : end]
        padded = seen + [0] * (LENGTH - len(seen))  # one shape, one compilation; what comes later does not matter
        assert text[end] == logits(padded)[len(seen) - 1].argmax()


def test_what_lies_behind_the_text_in_the_window_does_not_matter(logits):
    one, other = logits([1, 2, 3, 0, 0, 0]), logits([1, 2, 3, 9, 8, 7])
    np.testing.assert_array_equal(one[:3], other[:3])
    assert (one[3:] != other[3:]).any()


def test_the_same_seed_gives_the_same_text(model):
    first, again, other = (written(model, [1, 2], 30, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    longer = written(model, [1, 2], 40, 0)
    assert longer[:30] == first, "the text may not depend on how much of it is asked for"


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(model, logits, temperature):
    draws = 20_000
    window = jnp.asarray([4, 5, 0, 0, 0, 0], jnp.int32)
    heat, options = jnp.float32(temperature), dict(top_k=None, vocab=VOCAB, compute="float32")
    draw = jax.vmap(lambda key: module._next(model, window, jnp.int32(1), key, heat, jnp.int32(0), **options)[2])
    tokens = np.asarray(fast(draw)(jax.random.split(jax.random.key(0), draws)))
    row = logits([4, 5, 0, 0, 0, 0])[1].astype(np.float64) / temperature
    want = np.exp(row - row.max())
    want /= want.sum()
    got = np.bincount(tokens, minlength=VOCAB) / draws
    assert np.all(np.abs(got - want) < 5 * np.sqrt(want / draws) + 1e-4)


def test_top_k_draws_among_the_k_likeliest(model, logits):
    prompt, k = [1, 2, 3, 4, 5, 6], 3
    firsts = {written(model, prompt, 1, seed, temperature=5.0, top_k=k)[0] for seed in range(60)}
    assert firsts == set(np.argsort(logits(prompt)[-1])[-k:].tolist())
    assert written(model, prompt, 8, temperature=5.0, top_k=1) == written(model, prompt, 8, temperature=0)


def test_tokens_beyond_the_data_are_never_drawn(model):
    assert max(written(model, [1], 60, temperature=50.0)) > 4
    assert max(written(model, [1], 60, temperature=50.0, vocab=5)) <= 4


@pytest.mark.parametrize("temperature", [1e-45, 1e-30])
def test_a_tiny_temperature_is_greedy_and_not_a_nan(model, temperature):
    assert written(model, [1, 2], 8, temperature=temperature) == written(model, [1, 2], 8, temperature=0)


def test_logits_that_are_not_finite_end_the_text(model):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, model)
    assert written(broken, [1, 2], 8) == [NOT_FINITE]


def test_one_program_serves_all_lengths(model):
    module._next.clear_cache()
    for prompt, count in (([1], 3), ([1, 2, 3], 9), (list(range(10)), 2)):
        written(model, prompt, count, temperature=0.5)
    assert module._next._cache_size() == 1


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([3], {"vocab": 3}, "prompt"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_k": 0}, "top_k"),
        ([1], {"top_k": VOCAB + 1}, "top_k"),
    ],
)
def test_what_makes_no_sense_is_an_error(model, prompt, options, named):
    with pytest.raises(ValueError, match=named):
        written(model, prompt, 1, **options)
