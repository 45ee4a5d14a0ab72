"""Is what is told of a loss curve true? Planted spikes, swings and targets; M7, M8, M14, M19."""

import numpy as np
import pytest

from resjax.errors import Refused
from resjax.health.metrics import (
    Episode,
    learning_rate_sensitivity,
    oscillation,
    spike_episodes,
    spike_score,
    spike_steps,
    steps_to_target,
)
from resjax.health.series import in_whole_run, spacing


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count)


# ---- spikes (M7)


@pytest.mark.parametrize("planted", [0, 1, 7, 18])
def test_spike_score_counts_planted_spikes(planted):
    """X49: 10 SD on white noise, 500 steps apart; a window of 1,000 of 10,000 steps."""
    loss = noise(10_000)
    at = 1000 + 500 * np.arange(planted)
    loss[at] = 10 * (-1) ** np.arange(planted)
    assert spike_steps(loss).tolist() == at.tolist()
    assert spike_score(loss) == pytest.approx(planted / 100)
    assert spike_score(loss * 1e-3 + 4) == pytest.approx(planted / 100), "neither level nor scale counts"


@pytest.mark.parametrize("up", [True, False])
def test_how_near_to_one_another_spikes_are_counted(up):
    """X49: all of them down to a tenth of the window apart. n in a window add 100 n / window to its variance, so that 10 SD are 7 of
    the window's at n = window / 96: nearer to one another (at a hundredth of the window, as the protocol has it) they hide one another.
    """
    for gap, counted in ((101, True), (50, False), (11, False)):
        loss, at = noise(10_000), np.arange(1000, 10_000, gap)
        loss[at] = 10 if up else 10 * (-1) ** np.arange(len(at))
        found = spike_steps(loss).tolist()
        assert (found == at.tolist()) == counted
        assert counted or len(found) < len(at) / 10


def test_spike_steps_are_their_definition():
    """Window by window, on a heavy-tailed series of which some is not finite."""
    loss = np.random.default_rng(0).standard_t(2, size=600)
    loss[[5, 300, 301, 599]] = np.nan, np.inf, np.nan, -np.inf
    want = []
    for i, value in enumerate(loss):
        before = loss[max(0, i - 60) : i]
        before = before[np.isfinite(before)]
        judged = i >= 60 and abs(value - before.mean()) >= 3 * before.std()
        want.append(bool(not np.isfinite(value) or judged))
    assert spike_steps(loss, deviations=3).tolist() == np.flatnonzero(want).tolist()
    assert 8 < sum(want) < 60


def test_a_level_loss_has_no_spikes_and_short_runs_none_to_tell():
    assert len(spike_steps(np.full(500, 2.3))) == 0 == len(spike_episodes(np.full(500, 2.3)))
    assert spike_steps(np.r_[np.full(500, 2.3), 2.4]).tolist() == [500]
    assert len(spike_steps(np.linspace(5, 2, 500))) == 0
    for count in (0, 1, 15):
        assert len(spike_steps(noise(count))) == 0 == len(spike_episodes(noise(count)))
    assert np.isnan(spike_score([])) and spike_score(noise(15)) == 0
    assert len(spike_steps(np.full(300, np.nan))) == 300


def curve(count: int = 400) -> np.ndarray:
    return 3 + 0.02 * noise(count)


def test_episodes_that_recover_that_do_not_and_that_are_open():
    loss = curve()
    loss[100:104] = 4.0, 5.0, 4.5, 3.5
    loss[110] = 3.8  # within 10 steps of it
    loss[200] = np.nan
    loss[300:] += 1.5
    first, second, third = spike_episodes(loss)
    assert (first.first, first.last, first.back, first.outcome) == (100, 110, 111, "recovered")
    assert first.peak == 5 and first.before == pytest.approx(np.median(loss[49:100]))
    assert (second.first, second.last, second.peak, second.outcome) == (200, 200, np.inf, "recovered")
    assert (third.first, third.back, third.outcome) == (300, None, "fatal")
    (late,) = spike_episodes(np.r_[curve(390), np.full(10, 4.0)])
    assert (late.first, late.outcome) == (390, "open")
    (ended,) = spike_episodes(np.r_[curve(390), np.nan])
    assert (ended.first, ended.last, ended.outcome) == (390, 390, "fatal")


def test_episodes_need_height_and_distance():
    """0.1 nat alone is nothing in a noisy run, seven deviations are nothing in a quiet one."""
    quiet, loud = 3 + 1e-3 * noise(300), 3 + 0.1 * noise(300)
    quiet[150], loud[150] = 3.09, 3.3
    assert spike_episodes(quiet) == [] == spike_episodes(loud)
    quiet[150], loud[150] = 3.15, 4.5
    assert [e.first for e in (*spike_episodes(quiet), *spike_episodes(loud))] == [150, 150]
    assert spike_episodes(quiet, height=0.2) == [] and len(spike_episodes(quiet, height=0.05)) == 1


def test_episodes_without_a_history():
    start = curve(100)
    start[0] = np.inf
    assert spike_episodes(start) == [Episode(0, 0, pytest.approx(np.nan, nan_ok=True), np.inf, 0, 1, "recovered")]
    (whole,) = spike_episodes(np.full(100, np.nan))
    assert (whole.first, whole.last, whole.outcome) == (0, 99, "fatal")


def test_lengths_of_spikes_are_in_steps_of_the_run():
    """Logged every k steps the score has 1,000 steps before, and 10 steps join two spikes; a tenth is of the whole run, if it goes on."""
    loss = 3 + 0.01 * noise(20_000)
    loss[np.arange(2000, 20_000, 700)] += 0.075
    for given, window in (
        (dict(), 1000),
        (dict(every=10), 100),
        (dict(every=10, whole=500), 50),
        (dict(whole=5000), 500),
    ):
        assert spike_steps(loss, **given).tolist() == spike_steps(loss, window=window).tolist(), given
        assert spike_score(loss, **given) == spike_score(loss, window=window), given
    assert spike_score(loss, window=1000) != spike_score(loss, window=50)
    loss = curve()
    loss[[100, 101, 106]] += 3
    assert [(one.first, one.last) for one in spike_episodes(loss)] == [(100, 106)]
    assert [(one.first, one.last) for one in spike_episodes(loss, every=10)] == [(100, 101), (106, 106)]
    assert [(one.first, one.last) for one in spike_episodes(loss, every=100)] == [(100, 101), (106, 106)]
    loss[300:] += 1.5
    assert [spike_episodes(loss, whole=whole)[-1].outcome for whole in (None, 700, 800, 4000)] == [
        "fatal",
        "fatal",
        "open",
        "open",
    ]
    assert spacing([1, 11, 21, 41]) == 10 and spacing([7]) == spacing([]) == 1


# ---- grids and targets (M8, M19)


def test_learning_rate_sensitivity():
    """X49: {1, 1, 1, 3} with a start of 2 gives 0.25; a run that ended in NaN counts as the start."""
    assert learning_rate_sensitivity([1, 1, 1, 3], 2) == 0.25
    assert learning_rate_sensitivity([1, 1, 1, np.nan], 2) == 0.25 == learning_rate_sensitivity([1, 1, 1, np.inf], 2)
    assert learning_rate_sensitivity([1.5, 1.5], 2) == 0
    assert np.isnan([learning_rate_sensitivity(l, 2) for l in ([3, np.nan], [2, 2], [])]).all()


def test_steps_to_a_target():
    loss = np.r_[np.full(50, 4.0), np.full(50, 2.0)]
    assert steps_to_target(loss, 2.0) == 69  # the window is 50 to 69
    assert steps_to_target(loss, 3.0) == 59 and steps_to_target(loss, 4.0) == 19
    assert steps_to_target(loss, 1.9) == np.inf == steps_to_target(loss[:19], 9)
    loss[60] = np.nan
    assert steps_to_target(loss, 2.0) == 80
    assert steps_to_target(loss, 2.0, window=1) == 50


# ---- oscillation (M14)


def test_a_swing_is_found_with_its_period():
    """A sine of period 20 in noise, on a slope, in the last 40 % only."""
    loss = 5 - 0.001 * np.arange(1000) + 0.05 * noise(1000)
    calm = oscillation(loss, surrogates=199)
    assert calm.chance > 0.05 and abs(calm.lag1) < 0.1
    loss[600:] += 0.05 * np.sin(2 * np.pi * np.arange(400) / 20)
    swing = oscillation(loss, surrogates=199)
    assert (swing.period, swing.chance) == (20, 1 / 200)
    assert swing.lag1 > 0.1


def test_red_noise_is_no_swing():
    """AR(1) noise peaks at low frequencies by itself: chances are uniform, so few of 40 are below 0.05."""
    chances = []
    for seed in range(40):
        red = noise(500, seed)
        for t in range(1, 500):
            red[t] += 0.9 * red[t - 1]
        chances.append(oscillation(red, surrogates=99, seed=seed).chance)
    assert np.sum(np.array(chances) <= 0.05) <= 6
    assert 0.3 < np.mean(chances) < 0.7


def test_up_and_down_at_every_other_step():
    got = oscillation(3 + 0.1 * (-1) ** np.arange(500) + 0.01 * noise(500), surrogates=19)
    assert got.lag1 < -0.95 and (got.period, got.chance) == (2, 1 / 20)


def test_beside_the_frozen_model():
    """The ratio: 1 where all that moves are the batches; slopes do not count."""
    batches, own = noise(1000), noise(1000, 1)
    frozen = 2 + 0.1 * batches
    trained = frozen + 0.002 * np.arange(1000)[::-1]
    assert oscillation(trained, frozen, surrogates=9).ratio == pytest.approx(1, abs=1e-6)
    assert oscillation(trained, frozen[600:], surrogates=9).ratio == pytest.approx(1, abs=1e-6)
    assert oscillation(trained + 0.1 * own, frozen, surrogates=9).ratio == pytest.approx(np.sqrt(2), rel=0.1)
    assert np.isnan(oscillation(trained, surrogates=9).ratio)
    assert np.isnan(oscillation(trained, np.full(400, 2.0), surrogates=9).ratio)
    with pytest.raises(Refused, match="frozen has 399 losses"):
        oscillation(trained, frozen[:399])


def test_nothing_to_tell_of_an_end_that_is_short_broken_or_straight():
    broken = curve()
    broken[390] = np.inf
    for loss in ([], curve(15), broken, np.full(100, 2.0), np.linspace(3, 2, 100)):
        assert np.isnan(oscillation(loss, loss)).all()
    assert np.isfinite(oscillation(np.r_[np.nan, curve()], surrogates=9)[1:]).all(), "NaN before the share"


def test_series_are_one_number_a_step():
    for of in (spike_steps, spike_episodes, oscillation):
        with pytest.raises(Refused, match=r"shape \(2, 3\)"):
            of(np.ones((2, 3)))


def test_how_many_losses_the_whole_run_will_have():
    assert in_whole_run(200, 10, 10_000) == 1000
    assert in_whole_run(200, 10, 1_000) == 200 and in_whole_run(200, 10, None) == 200
