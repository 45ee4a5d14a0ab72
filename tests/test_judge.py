"""Do verdicts say what is so, on runs whose truth is known? With five seeds, with seeds that ended NaN, and at the edge of a grid."""

import numpy as np
import pytest
from scipy import stats

from experiments.judge import (
    Effect,
    Interval,
    Judged,
    Predicate,
    Settled,
    best_at_edge,
    difference,
    effect,
    holm,
    p_value,
    rope,
    share,
    together,
    wilson,
)
from resjax.errors import Refused

LOWER = Predicate("loss of the arm less that of the baseline", "below", 0.0)


def judged(values, predicate=LOWER, **more):
    return Judged(predicate, effect(values), **more)


def settled(*found):
    return Settled("C00", "cpu-S", "markov", tuple(found))


# ---- effects


@pytest.mark.parametrize("seeds", [3, 5, 12, 40])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds):
    rng = np.random.default_rng(seeds)
    held = 0
    for _ in range(200):
        low, high = effect(rng.normal(0.3, 1.0, seeds)).interval
        held += low <= 0.3 <= high
    assert held >= 0.9 * 200  # percentiles of 12 and more are a little short of 95 %


def test_with_few_seeds_the_wider_interval_counts():
    values = [0.1, 0.12, 0.09, 0.11, 0.13]
    low, high = effect(values).interval
    want = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (low, high) == pytest.approx(want) and high - low > 0.03


def test_an_effect_is_the_same_each_time_and_shows_every_seed():
    values = [0.3, np.nan, 0.1, np.inf, 0.2]
    found = effect(values)
    assert found == effect(values) or repr(found) == repr(effect(values))
    assert len(found.values) == 5 and found.missing == 2 and found.mean == pytest.approx(0.2)


@pytest.mark.parametrize("values", [[], [0.1], [np.nan, np.nan], [0.1, np.nan]])
def test_without_two_seeds_there_is_no_interval(values):
    assert np.isnan(effect(values).interval).all()


def test_pairs_take_the_seeds_own_noise_out():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, 8)
    apart = difference(2.0 + noise + rng.normal(0, 0.01, 8), 2.1 + noise)
    assert apart.interval.high < -0.08
    with pytest.raises(Refused, match="5 and 4"):
        difference([1.0] * 5, [1.0] * 4)


def test_rope_is_at_least_a_hundredth_and_follows_the_baselines_spread():
    assert rope([2.0, 2.0, 2.0]) == 0.01
    assert rope([2.0, 2.1, 2.2]) == pytest.approx(0.2)
    assert rope([2.0, np.nan]) == 0.01


def test_shares_and_adjusted_p_values():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(5, 5)
    assert low == pytest.approx(0.5655, abs=1e-3) and high == 1.0
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.04, np.nan]) == pytest.approx([0.04, np.nan], nan_ok=True)
    assert p_value(effect([1.0, 1.1, 0.9, 1.05, 0.95])) < 1e-3 and np.isnan(p_value(effect([1.0])))
    assert p_value(effect([0.0, 0.0, 0.0])) == 1.0


# ---- verdicts


def test_a_clear_effect_is_supported_and_its_opposite_refuted():
    assert judged([-0.2, -0.22, -0.19, -0.21, -0.2]).verdict == "supported"
    assert judged([0.2, 0.22, 0.19, 0.21, 0.2]).verdict == "refuted"


def test_too_little_power_is_undecided_and_not_mixed():
    assert judged([-0.2, 0.22, -0.19, 0.21, 0.0]).verdict == "undecided"
    assert judged([-0.2, -0.2, -0.2, -0.2]).verdict == "undecided"  # four seeds
    assert judged([]).verdict == "undecided"


def test_an_interval_that_says_yes_with_seeds_that_do_not_is_mixed():
    values = [-1.0, -1.1, -0.9, -1.0, -1.05, -1.0, 0.01, 0.01, 0.02]  # 6 of 9
    assert effect(values).interval.high < 0 and judged(values).verdict == "mixed"


def test_a_seed_without_a_value_does_not_agree():
    strong = [-0.2, -0.21, -0.2, -0.19]
    assert judged([*strong, np.nan]).verdict == "supported"  # four of five
    assert judged([*strong[:3], np.nan, np.nan]).verdict == "mixed"
    assert "1 of 5 seeds without a value" in judged([*strong, np.nan]).sentence()
    assert judged([np.nan] * 5).verdict == "undecided"


def test_what_occurs_at_all_needs_no_agreement():
    """A claim that something occurs is supported by some of the runs, and refuted where it is in hardly any."""
    occurs = Predicate("share of runs with it", "above", 0.0, other=0.05, agree=0.0)
    assert Judged(occurs, share([1] + [0] * 9)).verdict == "supported"
    assert Judged(occurs, share([0] * 100)).verdict == "refuted"
    assert Judged(occurs, share([0] * 10)).verdict == "undecided"


def test_four_seeds_of_five_are_enough_where_a_share_is_claimed():
    trains = Predicate("share of seeds that train", "above", 0.3, other=0.45)
    verdicts = [Judged(trains, share([1] * n + [0] * (5 - n))).verdict for n in range(6)]
    assert verdicts == ["refuted", "undecided", "undecided", "undecided", "supported", "supported"]


def test_equality_is_an_interval_within_the_rope():
    same = Predicate("difference", "inside", 0.05)
    assert judged([0.01, -0.01, 0.0, 0.005, -0.002], same).verdict == "supported"
    assert judged([0.2, 0.21, 0.19, 0.2, 0.22], same).verdict == "refuted"
    assert judged([-0.2, -0.21, -0.19, -0.2, -0.22], same).verdict == "refuted"
    assert judged([0.04, 0.06, 0.05, 0.055, 0.045], same).verdict == "undecided"


def test_a_gap_between_the_thresholds_is_undecided():
    share = Predicate("rescued", "above", 0.5, other=0.1)
    assert judged([0.3, 0.31, 0.29, 0.3, 0.3], share).verdict == "undecided"
    assert judged([0.05, 0.04, 0.06, 0.05, 0.05], share).verdict == "refuted"


def test_what_was_cut_decides_nothing():
    found = judged([-0.2] * 5, cut=best_at_edge([1e-3, 3e-3, 1e-2], [2.3, 2.2, 2.1]))
    assert found.verdict == "undecided" and "edge of the grid" in found.sentence()


def test_edges_of_a_grid():
    grid = [1e-3, 3e-3, 1e-2]
    assert best_at_edge(grid, [2.2, 2.1, np.nan]) == ""
    assert "0.001" in best_at_edge(grid, [2.0, 2.1, 2.2])
    assert "ended finite" in best_at_edge(grid, [np.nan] * 3)
    assert "edge" in best_at_edge([3e-3], [2.0])


def test_claims_of_several_predicates():
    yes, no, open_ = (
        judged([-0.2, -0.21, -0.2, -0.19, -0.2]),
        judged([0.2] * 4 + [0.21]),
        judged([-0.2, 0.2, -0.1, 0.1, 0.0]),
    )
    assert settled(yes, yes).verdict == "supported"
    assert settled(yes, no).verdict == "refuted" and settled(open_, no).verdict == "refuted"
    assert settled(yes, open_).verdict == "undecided"
    with pytest.raises(Refused, match="C00 has no predicate"):
        _ = settled().verdict


def test_scales_that_disagree_are_mixed():
    assert together(["supported", "supported"]) == "supported"
    assert together(["supported", "refuted"]) == "mixed"
    assert together(["undecided", "refuted"]) == "refuted"
    assert together(["undecided", "undecided"]) == together([]) == "undecided"


def test_synthetic_runs_of_known_truth_are_judged_right():
    """Of many claims whose truth is drawn, hardly one is judged the wrong way round."""
    rng = np.random.default_rng(1)
    wrong = right = 0
    for _ in range(300):
        truth = rng.choice([-0.1, 0.1])
        verdict = judged(truth + rng.normal(0, 0.05, 5)).verdict
        wrong += verdict == ("refuted" if truth < 0 else "supported")
        right += verdict == ("supported" if truth < 0 else "refuted")
    assert wrong <= 1 and right > 0.8 * 300


def test_an_effect_may_be_built_by_hand():
    one = Judged(Predicate("AUC", "above", 0.75, seeds=1), Effect((0.6,), Interval(0.55, 0.65)))
    assert one.verdict == "refuted" and one.sentence() == "AUC > 0.75: 0.6 [0.55, 0.65]"
