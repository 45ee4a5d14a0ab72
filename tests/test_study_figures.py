"""Do the figures of the studies give the known answer where there is one? Probes, gradients, Jacobians, updates, the end of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resjax.health.studies import decoding, gradient, jacobian, steadiness, update

# ------------------------------------------------------------------ decoding (M5)


def text(sequences=60, length=41, vocabulary=16, seed=0):
    return np.random.default_rng(seed).integers(0, vocabulary, (sequences, length))


def test_a_planted_one_hot_code_is_read_and_nothing_else():
    batches = text()
    features = np.eye(16)[batches[:, 1:-1]]
    labels, parts = decoding.labelled(batches), decoding.divided(*batches.shape)
    found, by_chance = decoding.accuracies(features, labels, parts), decoding.chance(labels, parts)
    assert found[0] == 1.0
    tokens = len(parts.test) * labels.shape[-1]
    bound = 4 * np.sqrt(by_chance * (1 - by_chance) / tokens)
    assert (np.abs(found - by_chance)[1:] < bound[1:] + 0.01).all()


def test_every_target_is_read_where_it_is_planted():
    batches = text()
    labels, parts = decoding.labelled(batches), decoding.divided(*batches.shape)
    np.testing.assert_array_equal(labels[0, 3], batches[3, 1:-1])
    np.testing.assert_array_equal(labels[1, 3], batches[3, :-2])
    np.testing.assert_array_equal(labels[2, 3], np.arange(1, 40))
    np.testing.assert_array_equal(labels[3, 3], batches[3, 2:])
    # turned about, offset and scaled: a straight map all the same
    rng = np.random.default_rng(1)
    for i in range(len(decoding.TARGETS)):
        code = np.eye(labels[i].max() + 1)[labels[i]]
        turned = 1e3 * (code @ rng.normal(size=(code.shape[-1], 50))) + 1e4
        assert decoding.accuracies(turned.astype(np.float32), labels, parts)[i] == 1.0


def test_noise_is_at_chance():
    batches = text(vocabulary=4)
    labels, parts = decoding.labelled(batches), decoding.divided(*batches.shape)
    noise = np.random.default_rng(2).normal(size=(*labels.shape[1:], 32))
    found, by_chance = decoding.accuracies(noise, labels, parts), decoding.chance(labels, parts)
    tokens = len(parts.test) * labels.shape[-1]
    assert (np.abs(found - by_chance) < 4 * np.sqrt(by_chance * (1 - by_chance) / tokens) + 0.01).all()


def test_chance_is_what_is_most_frequent_in_training():
    labels = np.zeros((1, 9, 10), int)
    labels[0, 2::3, :4] = 1  # of the test, 40 % is something else
    parts = decoding.divided(9, 12)
    assert decoding.chance(labels, parts) == pytest.approx([0.6])
    # a stream without any variation says what is most frequent
    assert decoding.accuracies(np.full((9, 10, 3), 7.0), labels, parts) == pytest.approx([0.6])


def test_no_sequence_is_in_two_parts_and_tokens_are_bounded():
    parts = decoding.divided(300, 129)
    together = np.concatenate(parts)
    assert len(set(together)) == len(together)
    assert len(parts.test) * 129 <= 4096 and (len(parts.fit) + len(parts.choose)) * 129 <= 8192
    assert len(parts.test) == 31 and len(parts.fit) + len(parts.choose) == 63
    assert decoding.divided(4, 129) is None
    assert all(len(part) for part in decoding.divided(5, 129)) and all(len(p) for p in decoding.divided(5, 10**6))


def test_a_stream_that_is_not_finite_is_not_read():
    batches = text(sequences=9)
    features = np.eye(16)[batches[:, 1:-1]]
    features[4, 0, 0] = np.nan
    assert np.isnan(decoding.accuracies(features, decoding.labelled(batches), decoding.divided(*batches.shape))).all()


# ------------------------------------------------------------------ gradient (M6)


def test_length_and_products_are_over_all_streams_of_a_token():
    rng = np.random.default_rng(0)
    pair = (rng.normal(size=(3, 2, 5, 4)), rng.normal(size=(2, 5, 4)))  # three streams and one
    joined = np.concatenate([np.moveaxis(pair[0], 0, -2).reshape(2, 5, 12), pair[1]], axis=-1)
    np.testing.assert_allclose(gradient.per_token(pair), np.linalg.norm(joined, axis=-1))
    other = tuple(2.0 * part for part in pair)
    assert gradient.share(gradient.products(pair, other)) == pytest.approx(1)
    np.testing.assert_allclose(gradient.products(pair, other)[0], 2 * np.sum(joined**2))


def test_share_slope_and_spread_where_there_is_nothing():
    assert np.isnan(gradient.share(np.zeros(3)))
    assert gradient.share(np.array([-1e-40, 1e-80, 1.0])) == pytest.approx(-1)
    sizes = 0.5 ** np.arange(55.0)  # X41
    assert gradient.slope(sizes) == pytest.approx(np.log(0.5)) and gradient.spread(sizes) == 2.0**54
    assert gradient.slope(np.ones(5)) == 0 and gradient.spread(np.ones(5)) == 1
    for broken in ([1.0, np.nan], [0.0, 0.0]):
        assert np.isnan(gradient.slope(broken)) and np.isnan(gradient.spread(broken))
    assert gradient.spread([1.0, 0.0]) == np.inf and np.isnan(gradient.slope([1.0]))


# ------------------------------------------------------------------ Jacobian


def of(block, stream, place, numbers):
    back = jax.jit(lambda g: jax.vjp(block, stream)[1](g)[0])
    return jacobian.whole(jacobian.through(back, block(stream), place), len(place), numbers, jnp.float32)


def sketch(block, stream, place, numbers):
    back = jax.jit(lambda g: jax.vjp(block, stream)[1](g)[0])
    forth = jax.jit(lambda t: jax.jvp(block, (stream,), (t,))[1])
    pull, push = jacobian.through(back, block(stream), place), jacobian.through(forth, stream, place)
    return jacobian.sketched(pull, push, len(place), numbers, jnp.float32)


def test_of_a_linear_branch_the_known_matrix():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(40, 40)).astype(np.float32)
    stream, place = jnp.asarray(rng.normal(size=(2, 5, 40)), jnp.float32), jnp.array([1, 4])
    block = lambda x: x + x @ matrix + jnp.flip(x, axis=1)  # noqa: E731, of token 2, its own too
    found = of(block, stream, place, 40)
    np.testing.assert_allclose(found[0], np.eye(40) + matrix.T, rtol=1e-6, atol=1e-6)
    values = np.linalg.svd(np.eye(40) + matrix.T, compute_uv=False)
    figures = jacobian.spectrum(found)
    assert figures["largest"] == pytest.approx(values[0], rel=1e-5)
    assert figures["smallest"] == pytest.approx(values[-1], rel=1e-4)
    assert figures["median"] == pytest.approx(np.median(values), rel=1e-5)
    assert figures["mean_square"] == pytest.approx(np.mean(values**2), rel=1e-5)
    np.testing.assert_allclose(figures["singular"], np.quantile(values, np.linspace(0, 1, 11)), rtol=1e-4)
    own = of(block, stream, jnp.array([2, 2]), 40)
    np.testing.assert_allclose(own[1], 2 * np.eye(40) + matrix.T, rtol=1e-6, atol=1e-6)


def test_the_sketch_agrees_with_the_whole():
    rng = np.random.default_rng(3)
    matrix = (rng.normal(size=(30, 30)) / 8).astype(np.float32)
    stream, place = jnp.asarray(rng.normal(size=(2, 3, 30)), jnp.float32), jnp.array([0, 2])
    block = lambda x: x + jnp.tanh(x @ matrix)  # noqa: E731
    exact, about = jacobian.spectrum(of(block, stream, place, 30)), sketch(block, stream, place, 30)
    assert (
        about["largest"] == pytest.approx(exact["largest"], rel=1e-2) and about["largest"] <= 1.0001 * exact["largest"]
    )
    assert about["mean_square"] == pytest.approx(exact["mean_square"], rel=0.05)
    assert np.isnan([about["median"], about["smallest"]]).all() and np.isnan(about["singular"]).all()
    same = sketch(lambda x: x, stream, place, 30)
    assert same["largest"] == pytest.approx(1, abs=1e-6) and same["mean_square"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_of_a_norm_all_alike_but_for_its_invariances(kind):
    """X09: LayerNorm 1/sigma (d - 2 times), 0, 0; RMSNorm 1/rms (d - 1 times), 0."""
    from resjax.residual import NormDefaults
    from resjax.residual.norms import Norm

    norm = Norm(kind, 16, NormDefaults(kind, 0.0, gain=False))
    x = np.random.default_rng(1).normal(size=(1, 2, 16)).astype(np.float32)
    values = np.linalg.svd(of(norm, jnp.asarray(x), jnp.array([1]), 16)[0], compute_uv=False)
    size = x[0, 1].std() if kind == "layernorm" else np.sqrt(np.mean(np.square(x[0, 1])))
    zeros = 2 if kind == "layernorm" else 1
    np.testing.assert_allclose(values[:-zeros], 1 / size, rtol=1e-5)
    np.testing.assert_allclose(values[-zeros:], 0, atol=1e-6)


def test_several_streams_are_one_vector_a_token():
    rng = np.random.default_rng(2)
    mix = rng.normal(size=(3, 3)).astype(np.float32)
    stream = (jnp.asarray(rng.normal(size=(3, 2, 4, 5)), jnp.float32), jnp.ones((2, 4, 5)))
    place = jnp.array([3, 0])
    block = lambda s: (jnp.einsum("ij,jbtd->ibtd", mix, s[0]), -s[1])  # noqa: E731
    found = of(block, stream, place, 20)
    expected = np.zeros((20, 20))
    expected[:15, :15], expected[15:, 15:] = np.kron(mix, np.eye(5)), -np.eye(5)
    np.testing.assert_allclose(found, np.broadcast_to(expected, (2, 20, 20)), atol=1e-6)
    kept = jacobian.put(stream, place, jacobian.own(stream, place))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), kept, stream)))


def test_a_jacobian_that_is_not_finite_has_no_spectrum():
    broken = np.full((1, 3, 3), np.inf)
    assert all(np.isnan(value).all() for value in jacobian.spectrum(broken).values())


# ------------------------------------------------------------------ update (M18)


def test_update_is_the_mean_length_of_the_change():
    before = np.zeros((2, 3, 4))
    before[..., 0] = 2.0
    after = before.copy()
    after[0, 0] += [0, 3.0, 4.0, 0]
    found = update.figures(update.moved(before, after) + update.moved(before, before))
    assert found == {"change": pytest.approx(5 / 12), "relative": pytest.approx(5 / 24), "tokens": 12}
    assert update.figures(update.moved(before, before)) == {"change": 0.0, "relative": 0.0, "tokens": 6}
    assert np.isnan(update.figures(np.zeros(3))["change"])


# ------------------------------------------------------------------ steadiness (M14)


def red(phi, count, seed=0):
    rng, x = np.random.default_rng(seed), np.zeros(count)
    for t in range(1, count):
        x[t] = phi * x[t - 1] + rng.normal()
    return 0.01 * x


def test_batches_alone_swing_as_the_frozen_model_does():
    steps, noise = np.arange(10, 10001, 10), np.random.default_rng(1).normal(size=1000)
    asked = []

    def frozen(picked):
        asked.extend(picked)
        return 2 + 0.1 * noise[(np.array(picked) - 10) // 10]

    found = steadiness.swinging(steps, 2.5 + 0.1 * noise, frozen, surrogates=99)
    assert found["ratio"] == pytest.approx(1, abs=1e-6) and found["chance"] > 0.01 and abs(found["lag1"]) < 0.15
    assert len(asked) == 64 and asked[0] == 6010 and asked[-1] == 10000
    np.testing.assert_array_equal(found["steps"], asked)
    assert found["logged"] == 400 and found["every"] == 10
    # a trend of the run is no swing
    sloped = steadiness.swinging(steps, 2.5 + 0.1 * noise - 1e-4 * steps, frozen, surrogates=9)
    assert sloped["ratio"] == pytest.approx(1, abs=0.02)


def test_a_planted_period_is_found_in_steps():
    steps = np.arange(5, 5001, 5)
    loss = red(0.3, 1000) + 0.05 * np.sin(2 * np.pi * steps / 100)
    found = steadiness.swinging(steps, loss, lambda picked: 0.01 * np.random.default_rng(4).normal(size=len(picked)))
    assert found["period"] == pytest.approx(100) and found["chance"] < 0.01 and found["ratio"] > 2


def test_noise_with_memory_is_no_period_but_has_its_autocorrelation():
    found = steadiness.swinging(range(4000), red(0.8, 4000), None)
    assert found["chance"] > 0.01 and found["lag1"] == pytest.approx(0.8, abs=0.05) and np.isnan(found["ratio"])


def test_an_end_that_is_too_short_or_not_finite():
    called = []

    def frozen(picked):
        called.append(picked)
        return np.zeros(len(picked))

    short = steadiness.swinging(range(15), red(0.1, 15), frozen)
    broken = steadiness.swinging(range(100), np.r_[np.zeros(99), np.inf], frozen)
    empty = steadiness.swinging([], [], frozen)
    for found in (short, broken, empty):
        assert np.isnan([found["ratio"], found["period"], found["chance"], found["lag1"]]).all()
    assert not called, "no batch is run for nothing"


def test_rows_of_training_losses_up_to_the_step():
    rows = [
        {"step": 1, "loss": 3.0},
        {"step": 5, "eval_loss": 1.0},
        {"step": 10, "loss": 2.0},
        {"step": 20, "loss": 1.0},
    ]
    assert steadiness.logged(rows, 10) == ([1, 10], [3.0, 2.0])


def test_open_brackets_are_counted_from_the_sequences_start():
    text = np.array([list(b"a(b[c])d"), list(b")(x)]{y("), list(b"(((((((a")])
    want = [[0, 1, 1, 2, 2, 1, 0, 0], [0, 1, 1, 0, 0, 1, 1, 2], [1, 2, 3, 4, 4, 4, 4, 4]]
    assert decoding.open_brackets(text).tolist() == want
