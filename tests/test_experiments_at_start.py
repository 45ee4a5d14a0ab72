"""Do E00, E08, E13 and E19 judge rightly, and measure what they say? On synthetic rows whose truth is known, and exact values."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import e00_by_construction as e00
from experiments import e08_init_std as e08
from experiments import e13_gradient_path as e13
from experiments import e19_compression as e19
from experiments.experiment import named
from experiments.runs import Runs
from experiments.shared import starts
from resjax.propagation.measured import measured, measured_at

SEEDS = range(6)
RNG = np.random.default_rng(0)


def noisy(value):
    return float(value + 1e-3 * RNG.normal())


def told(name, measured, runs=()):
    """Verdicts by claim with reading and setting."""
    found = {}
    for one in named(name).settle(Runs(runs), measured, "cpu"):
        found.setdefault("/".join(filter(None, (one.claim, one.reading))), []).append(one)
    return found


def drawn(name, measured, runs=()):
    """The number of axes of the figure, drawn to the end."""
    figure = named(name).drawing(Runs(runs), measured)
    figure.canvas.draw()
    return len(figure.axes)


# ------------------------------------------------------------------ rows of starts


def test_rows_line_up_by_seed_and_missing_ones_are_nan():
    rows = [{"arm": "a", "depth": d, "seed": s, "loss": d + s} for d in (4, 8) for s in (1, 0) if (d, s) != (8, 1)]
    np.testing.assert_equal(starts.values(rows, "loss", arm="a", depth=4), [4, 5])
    np.testing.assert_equal(starts.table(rows, "loss", "depth", (4, 8), arm="a"), [[4, 8], [5, np.nan]])
    assert starts.table(rows, "loss", "depth", (4, 8), arm="b").shape == (0, 2)
    np.testing.assert_equal(starts.profiles([{"seed": 0, "x": [1, "nan"]}], "x"), [[1, np.nan]])


def test_straight_lines():
    y = np.array([[1.0, 3.0, 5.0], [1.0, np.nan, 5.0], [0.0, 1.0, 0.0]])
    np.testing.assert_allclose(starts.slopes((0, 1, 2), y), [2, np.nan, 0], atol=1e-12)
    np.testing.assert_allclose(starts.straightness((0, 1, 2), y), [1, np.nan, 0], atol=1e-12)


@pytest.fixture
def tiny():
    return e13.built("Pre-LN", e13.HALF, 2, **{"model.width": 8, "model.heads": 2, "data.length": 4})


def test_one_program_measures_several_sizes_of_the_start(tiny):
    case = starts.case(tiny, (0, 3))
    half, double = measured_at(case, [{"init.gain": 0.55}, {"init.gain": 1.1}])
    plain = measured(case)
    np.testing.assert_allclose(half.sites["stream_rms"], plain.sites["stream_rms"], rtol=1e-5)
    np.testing.assert_allclose(double.ends["embed_rms"], 2 * half.ends["embed_rms"], rtol=1e-5)
    assert plain.ends["loss"].shape == (2,) and plain.ends["loss"][0] != plain.ends["loss"][1]


def test_subjects_are_the_networks_that_are_measured(tiny):
    case = starts.case(tiny, (3,))
    ((seed, subject),) = starts.subjects(case)
    want = measured(case).ends["loss"][0]
    assert seed == 3 and subject.loss == pytest.approx(float(want), rel=1e-5)


# ------------------------------------------------------------------ E00


def exact(post=1.0, pre=50.0, change=0.0, more=12.0, half=1.25, brain=0.0, moved=0.4):
    sizes = [
        {"scheme": name, "gain": 1.0, "seed": s, "largest": post, "growth": pre, "doublings": float(np.log2(pre))}
        for name in ("post_ln", "pre_ln")
        for s in SEEDS
    ]
    rezero = {"change": change, "branch_gradient": 0.0, "gradient_change": 0.0, "gain_gradient": 1.0}
    return {
        "streams": sizes,
        "rezero": [rezero | {"seed": s, "gain": 1.0} for s in SEEDS],
        "operations": [{"seed": s, "width": s, "share": 0.01, "a_number": more} for s in SEEDS],
        "adds": [
            {"format": name, "seed": s, "literal": 100.0, "share": value, "numpy_agrees": True}
            for name, value in (("float16", half), ("bfloat16", brain))
            for s in SEEDS
        ],
        "scaled": [{"seed": s, "gain": 1.0, "evaluated_at_1": moved, "embedding_too": 1e-8} for s in SEEDS],
    }


def test_what_follows_by_construction_is_labelled_so():
    found = told("E00", exact())
    assert {key: one[0].verdict for key, one in found.items()} == {
        "C38": "refuted", "C39": "refuted", "C53/at step 0": "supported", "C58/operations": "supported",
        "C70/float16": "refuted", "C70/bfloat16": "supported", "C73/divided by ten at inference": "refuted",
    }  # fmt: skip
    assert all(one.construction for several in found.values() for one in several)
    other = told("E00", exact(post=3.0, pre=1.0, change=0.1, more=-1.0, half=0.0, brain=1.0, moved=0.01))
    assert {key: one[0].verdict for key, one in other.items()} == {
        "C38": "supported", "C39": "supported", "C53/at step 0": "refuted", "C58/operations": "refuted",
        "C70/float16": "supported", "C70/bfloat16": "refuted", "C73/divided by ten at inference": "supported",
    }  # fmt: skip
    assert drawn("E00", exact()) == 2


def test_adds_are_those_of_the_formats():
    rows = list(e00.adds("cpu"))
    assert {row["literal"] for row in rows if row["format"] == "float16"} == {100.125}
    assert {row["literal"] for row in rows if row["format"] == "bfloat16"} == {100.0}
    assert all(row["numpy_agrees"] for row in rows)
    np.testing.assert_equal(starts.values(rows, "share", format="bfloat16"), np.zeros(5))
    np.testing.assert_allclose(starts.values(rows, "share", format="float16"), 0.125 / float(np.float16(0.1)))


def test_norms_on_branches_add_operations_by_the_number(monkeypatch):
    """X46: a norm costs some operations a number of the stream, whatever the width."""
    monkeypatch.setattr(e00, "WIDTHS", (16, 64))
    narrow, wide = e00.operations("cpu")
    assert narrow["a_number"] == pytest.approx(wide["a_number"], rel=0.05) and wide["share"] < narrow["share"] / 3


# ------------------------------------------------------------------ E13


@pytest.mark.parametrize(("arm", "gain"), e13.NETWORKS)
def test_each_network_of_the_gradients_path_can_be_built(arm, gain):
    """What a configuration refuses is found here and not minutes into the measurement."""
    assert starts.case(e13.built(arm, gain, e13.DEEP), (0,)).parts.shape.depth == e13.DEEP


def gradient_rows(pre=0.9, post=0.4, plain=0.01, with_skips=0.2, per_block=0.2, lost=False):
    """Identity share and orders of magnitude by network; Post-LN's share halves each time the depth doubles."""
    rows = []
    for arm, gain in e13.NETWORKS:
        for depth in e13.DEPTHS:
            for seed in SEEDS:
                skips = "no skips" not in arm
                share = pre if arm == "Pre-LN" else post * 4 / depth if arm == "Post-LN" else plain
                gained = with_skips if skips else per_block * depth
                bad = lost and not skips and depth == 64
                rows.append(
                    {"arm": arm, "gain": gain, "depth": depth, "seed": seed, "share": noisy(share)}
                    | {"gained": "-inf" if bad else noisy(gained), "span": "nan" if bad else noisy(abs(gained))}
                )
    rms = [
        {"arm": arm, "depth": 2, "curve": curve, "seed": 0, "rms": [1.0, 1.1, 1.2, 1.3]}
        for arm in ("Pre-LN", "Post-LN")
        for curve in ("measured", "lower bound", "upper bound")
    ]
    lengths = [
        {"arm": arm, "depth": depth, "seed": seed, "length": depth**power}
        for arm, power in (("Pre-LN", -0.5), ("Post-LN", 0.0))
        for depth in e13.DEPTHS
        for seed in SEEDS
    ]
    return {"gradients": rows, "streams": rms, "last_matrix": lengths}


def test_the_path_of_the_gradient_is_judged():
    found = told("E13", gradient_rows())
    # Post-LN's share at 32 blocks is 0.05
    assert {("Post-LN" in one.settings, one.verdict) for one in found["C02"]} == {
        (False, "supported"),
        (True, "refuted"),
    }
    for claim in ("C08", "C19", "C13/explosion or vanishing"):
        assert {one.verdict for one in found[claim]} == {"supported"}, claim
    assert "L^-0.50" in found["C08"][0].notes[1]
    other = told("E13", gradient_rows(pre=0.1, post=4.0, plain=0.5, per_block=0.001))
    assert {one.verdict for claim in ("C02", "C08", "C19") for one in other[claim]} == {"refuted"}
    assert drawn("E13", gradient_rows()) == 3


def test_gradients_that_vanish_altogether_are_told_and_their_depth_is_left_out():
    found = told("E13", gradient_rows(lost=True))
    assert {one.verdict for one in found["C19"]} == {"supported"}
    assert "depths 4, 8, 16, 32" in found["C19"][0].notes[0] and "at depths 64" in found["C19"][0].notes[1]
    assert drawn("E13", gradient_rows(lost=True)) == 3
    few = gradient_rows(lost=True)
    few["gradients"] = [row for row in few["gradients"] if row["depth"] not in (8, 16)]
    assert {one.verdict for one in told("E13", few)["C19"]} == {"undecided"}


# ------------------------------------------------------------------ E19


def compression_rows(rank=0.5, softmax=0.99, rotation=0.2, inputs=0.9):
    rows = [
        {
            "logits": s,
            "seed": seed,
            "rank_ratio": noisy(rank),
            "over_bound": 0.9,
            "from_inputs": inputs,
            "from_values": 0.0,
        }
        for s in e19.LOGITS
        for seed in SEEDS
    ]
    mixers = [
        {"mixer": m, "feed_forward": f, "seed": seed, "cosine": noisy(c), "cosines": [c / 2, c]}
        for m, c in (("softmax", softmax), ("rotation", rotation))
        for f in (True, False)
        for seed in SEEDS
    ]
    curves = [
        {key: name, "curve": curve, "seed": 0, "cosines": [0.1, 0.2]}
        for key, names in (("scheme", ("pre_ln", "plain")), ("net", e19.NETS))
        for name in names
        for curve in ("measured", "mean field", "theory")
    ]
    left = [{"seed": seed, "left": [0.1, 1e-3]} for seed in SEEDS]
    return {"attentions": rows, "mixers": mixers, "profiles": curves[:6], "simple": curves[6:], "cubes": left}


def test_compression_is_judged():
    run = {"fields": {"seed": 0, "data.source": "markov"}, "status": "done", "outcome": "trained"}
    runs = [run | {"looks": {"600": {"rank_ratio": 0.7}}}, run | {"fields": {"seed": 1, "data.source": "markov"}}]
    found = told("E19", compression_rows(), runs)
    verdicts = {key: {one.verdict for one in several} for key, several in found.items()}
    assert verdicts == {
        "C23": {"supported"}, "C28/averages contract": {"supported"},
        "C28/stays in the hull of its inputs": {"refuted"}, "C28/averaging is the essence": {"supported"},
    }  # fmt: skip
    notes = [note for one in found["C23"] for note in one.notes]
    assert notes == ["after training on markov it is 0.7 (from 0.7 to 0.7), 1 of 2 runs without it; runs: 2 trained"]
    other = told("E19", compression_rows(rank=0.9, rotation=0.97, inputs=0.0))
    assert (
        {one.verdict for one in other["C23"]}
        == {"refuted"}
        == {one.verdict for one in other["C28/averaging is the essence"]}
    )
    assert {one.verdict for one in told("E19", compression_rows(rotation=0.7))["C28/averaging is the essence"]} == {
        "undecided"
    }
    assert drawn("E19", compression_rows(), runs) == 3


def test_a_point_is_in_its_hull_or_so_far_from_it():
    corners = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert e19.from_hull(np.array([0.6, 0.7]), corners) < 1e-6
    assert e19.from_hull(np.array([0.0, 2.0]), corners) == pytest.approx(1 / 2, rel=1e-4)


def test_means_are_bounded_by_dobrushin_and_uniform_ones_meet_nothing():
    rng = np.random.default_rng(0)
    values, logits = rng.normal(size=(1, 2, 6, 3)), rng.normal(size=(1, 2, 6, 6))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    seen = {"values": values, "weights": weights, "means": weights @ values}
    assert 0 < e19.over_dobrushin(seen) <= 1
    assert e19.over_dobrushin(seen | {"weights": np.eye(6)[None, None], "means": values}) == 1


def test_what_is_seen_of_an_attention_is_its_own(tiny):
    ((_, subject),) = starts.subjects(starts.case(tiny, (0,)))
    (stream,) = next(subject.streams([0]))
    seen = e19.attention(e19.site_of(subject, 0), stream)
    np.testing.assert_allclose(seen["means"], seen["weights"] @ seen["values"], atol=1e-5)
    np.testing.assert_allclose(seen["read"].std(-1), 1, atol=0.05)
    got = e19.rank_ratio(subject, None)
    assert 0 < got["rank_ratio"] < 1


def test_a_rotation_keeps_lengths_and_stands_in_for_the_means():
    turn = e19.rotation(jax.random.key(0), 64)
    np.testing.assert_allclose(turn @ turn.T, np.eye(64), atol=1e-3)
    at = e19.turned(turn)
    values, means = jnp.ones((1, 64, 2, 3)), jnp.full((1, 64, 2, 3), 0.5)
    at("v", values)
    instead = at("heads", means)
    assert float(jnp.linalg.norm(instead)) == pytest.approx(float(jnp.linalg.norm(means)), rel=1e-5)


def test_closed_forms():
    """X18 to X20, 12 layers of 32 tokens."""
    ends = [e19.closed(name)[-1] for name in e19.NETS]
    assert ends[:2] == pytest.approx([0.992, 0.844], abs=1e-3)
    assert e19.closed("ReLU feed-forward, no skip")[3] == pytest.approx(0.681, abs=1e-3)


# ------------------------------------------------------------------ E08


def start_rows(excess=lambda depth: 0.0, line=0.99, growth=1.0, lost=()):
    """Initial losses whose excess from the large start is a function of the depth."""
    rows = []
    for norms in e08.NORMS:
        for kind in e08.SMALL:
            for size in sorted({e08.SMALL[kind], e08.MIDDLE[kind], e08.LARGE[kind]}):
                for out in (e08.ONE, e08.SCALED):
                    for depth in e08.DEPTHS:
                        for seed in SEEDS:
                            large = size == e08.LARGE[kind]
                            loss = 3.5 + (excess(depth) if large else 0) + 1e-3 * seed
                            rows.append({
                                "norms": norms, "kind": kind, "size": size, "out": out, "depth": depth, "seed": seed,
                                "loss": "inf" if large and seed in lost else loss,
                                "last": noisy(1.0 if out == e08.SCALED else growth * depth),
                                "doublings": noisy(3.0), "ratio": 30.0 if large else 1.0, "line": line, "exponential": line,
                            })  # fmt: skip
    return {"starts": rows}


def run(seed, loss, outcome="trained", moved=0.1, **fields):
    config = {"residual.name": "pre_ln", "optimizer.name": "adamw", "model.depth": e08.MANY}
    return {
        "fields": {"seed": seed} | config | fields, "config": {"train.steps": 300}, "status": "done", "outcome": outcome,
        "eval_loss": loss, "first_loss": 3.5, "steps": 300, "error": None,
        "looks": {"1": {"change": moved}, "10": {"moved": moved, "change": moved}},
        "profiles": {"300": {"stream_rms": [[1.0, 1.0], [2.0, 4.0 if fields.get("model.norm") == "none" else 1.0]]}},
    }  # fmt: skip


def trained(large_moves=0.1, large_ends="trained", benefit=0.5, best=(0.1, 0.02), none_ends="diverged"):
    """All cells of the grid, by their fields."""
    made = []
    for cell in e08.sweep():
        seed, depth, kind = cell["seed"], cell["model.depth"], cell["init.kind"]
        size = cell[f"init.{kind}"]
        large = size == e08.LARGE[kind]
        loss = 2.0 + 0.01 * seed
        if kind == "std":
            loss += abs(np.log(size / best[0 if depth == e08.FEW else 1]))
        if kind == "gain" and cell["init.out_scale"] is None:
            loss -= benefit
        if cell["optimizer.lr"] not in (3e-3, e08.SGD_RATE):
            loss += 0.3
        ends = none_ends if cell.get("model.norm") == "none" else large_ends if large else "trained"
        made.append(run(**{"seed": seed, "loss": loss, "outcome": ends, "moved": large_moves if large else 0.1} | cell))
    return made


def test_the_start_is_judged_when_the_claims_are_true():
    runs = trained(large_moves=1.0, large_ends="collapsed")
    found = told("E08", start_rows(lambda depth: 0.0 if depth <= 8 else 1.0, growth=1.0), runs)
    verdicts = {key: {one.verdict for one in several} for key, several in found.items()}
    assert verdicts == {key: {"supported"} for key in e08.PREDICATES}
    assert drawn("E08", start_rows(), runs) == 2


def test_the_start_is_judged_when_they_are_false():
    runs = trained(large_moves=0.01, benefit=-0.5, best=(0.05, 0.05), none_ends="trained")
    found = told("E08", start_rows(lambda depth: 1.28, line=0.5), runs)
    verdicts = {key: {one.verdict for one in several} for key, several in found.items()}
    true = {"C66/variance", "C11", "C13/odd branch scales"}
    assert {key for key, one in verdicts.items() if one == {"refuted"}} == set(e08.PREDICATES) - true
    assert all(verdicts[key] == {"supported"} for key in true)


def test_the_best_std_at_the_edge_of_the_grid_at_both_depths_tells_nothing():
    found = told("E08", start_rows(), trained(best=(0.001, 0.001)))["C69"][0]
    assert found.verdict == "undecided" and "edge of the grid" in found.judged[0].cut


def test_a_dead_zone_of_both_starts_tells_nothing():
    runs = [one | {"outcome": "partial"} for one in trained()]
    found = told("E08", start_rows(), runs)
    assert {one.verdict for one in found["C68/dead zone, SGD"]} == {"undecided"}
    assert {one.verdict for one in found["C68/first updates, SGD"]} == {"refuted"}


def test_a_dead_zone_is_judged_at_the_rates_that_both_starts_have():
    """High rates that only the small start was tried at say nothing of either."""
    runs = [
        one | ({"outcome": "diverged"} if one["fields"]["optimizer.lr"] in (1e-2, 3e-2) else {})
        for one in trained(large_ends="collapsed")
    ]
    assert {one.verdict for one in told("E08", start_rows(), runs)["C68/dead zone, Adam"]} == {"supported"}


@pytest.mark.parametrize(
    ("best", "verdict"), [((0.1, 0.02), "supported"), ((0.05, 0.02), "undecided"), ((0.1, 0.05), "refuted")]
)
def test_a_ratio_of_stds_that_the_grid_cuts_off_refutes_nothing(best, verdict):
    """2.5 times, with the smaller one at the end of the grid, may be 5 beyond it; twice within the grid is twice."""
    assert told("E08", start_rows(), trained(best=best))["C69"][0].verdict == verdict


def test_a_best_rate_at_the_edge_leaves_the_best_std_open():
    runs = trained(best=(0.1, 0.05))
    for one in runs:
        if one["fields"]["init.kind"] == "std" and one["fields"]["optimizer.lr"] == 3e-2:
            one["eval_loss"] -= 0.6
    found = told("E08", start_rows(), runs)["C69"][0]
    assert found.verdict == "undecided" and "the best value, 0.03" in found.judged[0].cut


def test_scaled_outputs_that_let_a_higher_rate_train_are_of_use():
    runs = trained(benefit=0.0)
    for one in runs:
        fields = one["fields"]
        if fields.get("init.out_scale") == 1.0 and fields["optimizer.lr"] == 3e-2:
            one["outcome"] = "diverged"
    assert told("E08", start_rows(), runs)["C66/benefit"][0].verdict == "supported"


def test_losses_that_are_not_finite_are_told_and_drawn():
    rows = start_rows(lambda depth: 0.0 if depth <= 8 else 1.0, lost=(0, 1))
    found = told("E08", rows, trained())["C67"]
    assert all("2 of 6 seeds" in one.notes[-1] for one in found)
    assert {one.verdict for one in found} == {"mixed"}  # two seeds of six do not agree
    figure = named("E08").drawing(Runs([]), rows)
    labels = [text.get_text() for axis in figure.axes for text in axis.get_legend().get_texts()]
    assert "Pre-LN, std 0.2 (10 not finite)" in labels


def test_runs_that_failed_are_counted():
    runs = [
        one | {"status": "failed", "outcome": None, "eval_loss": None, "looks": {}, "profiles": {}} for one in trained()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = told("E08", start_rows(), runs)
    assert found["C68/first updates, Adam"][0].verdict == "undecided"
    for claim in ("C68/dead zone, Adam", "C65/runs away"):
        assert found[claim][0].verdict == "undecided" and "cells failed" in found[claim][0].judged[0].cut
    assert found["C66/benefit"][0].verdict == "undecided"


def test_the_expected_first_loss():
    """X15: ln V + g^2 / 2 for a small g."""
    assert e08.first_loss("gain", 0.554) == pytest.approx(np.log(32) + 0.554**2 / 2, abs=0.01)
    assert e08.first_loss("std", 0.2) == pytest.approx(np.log(32) + 1.28, rel=0.05)
    assert e08.first_loss("gain", 5.54) < np.log(32) + 5.54**2 / 2


def test_the_first_steps_are_looked_at(tiny):
    ((_, subject),) = starts.subjects(starts.case(tiny, (0,)))
    first = e08.first_steps(subject, None)
    assert first["moved"] is None and np.isnan(first["change"])  # no run, so no next step
    assert e08.first_steps(subject, first["_memory"] / 2)["moved"] == pytest.approx(1.0)
