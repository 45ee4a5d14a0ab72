"""Does E03 judge the scale of branches rightly? Synthetic runs of known truth on its own grid; the exact null on a tiny network."""

import numpy as np
import pytest

from experiments.experiment import named
from experiments.judge import effect
from experiments.parts import e03_exact_null as exact_null
from experiments.runs import Runs
from experiments.shared.rates import highest, lost, reached, steps_above, unsigned

E03 = named("E03")
MEASURED = {
    "exact null": [
        {"arm": arm, "scale": scale, "seed": seed, "largest": value}
        for arm, scale, value in (
            ("matched", 0.5, 0.0), ("matched", 0.25, 0.0), ("matched", 0.125, 0.0), ("matched", 0.3, 2e-6),
            ("matched", 0.1, 3e-6), ("shared rate", 0.3, 0.2), ("one rounding", 1.0, 2e-6),
        )
        for seed in range(5)
    ]
}  # fmt: skip


def run(fields, loss, outcome="trained", speed=1.0, depth_used=8.0, spikes=0.0):
    """A line as a sweep writes it: the loss falls from 3.5 to ``loss``, ``speed`` times as fast as usual."""
    loss = loss + 0.001 * fields["seed"]
    shares = np.minimum(np.arange(10, 601, 10) / 600 * speed, 1)
    curve = [{"step": 1, "loss": 3.5}] + [
        {"step": 10 * (i + 1), "loss": float(3.5 + (loss - 3.5) * share**0.5)} for i, share in enumerate(shares)
    ]
    return {
        "cell": str(fields), "fields": fields, "config": {"train.steps": 600}, "status": "done", "outcome": outcome,
        "eval_loss": loss, "first_loss": 3.5, "steps": 600, "curve": curve, "spikes": {"score": spikes},
        "looks": {"600": {"effective_depth": depth_used + 0.1 * fields["seed"]}},
    }  # fmt: skip


def usual(fields):
    """Scale 1 and 0.3 end alike, 0.03 too high and shallow; Post-LN at 1e-2 is lost at scale 1 only; all between is near on."""
    scale, rate, name = fields.get("residual.scale"), fields["optimizer.lr"], fields["residual.name"]
    share = {"MOVED_25": 0.25, "MOVED_50": 0.5, "MOVED_75": 0.75}.get(name.partition(":")[2])
    if share is not None:
        return run(fields, 2.0 + 0.4 * share * (1 - share))  # both ends are better
    off = 0.02 * abs(np.log10(rate / 1e-2))
    if scale == 0.0 and "residual.scale_kind" not in fields:
        return run(fields, 2.33, "bigram")
    if name == "post_ln" and rate >= 3e-2 and scale == 1.0:
        return run(fields, 2.845, "collapsed", spikes=0.5)
    if scale == 0.03:
        return run(fields, 2.2, depth_used=3.0)
    if scale == 0.3 and name == "pre_ln":
        return run(fields, 2.0 + 3 * off, speed=1.6)
    return run(fields, 2.0 + off)


def settled(made=usual, change=lambda row: row):
    found = E03.settle(Runs(change(made(fields)) for fields in E03.cells("cpu")), MEASURED, "cpu")
    return {(one.claim, one.reading, one.settings): one for one in found}


def verdicts(found):
    names: dict[str, set] = {}
    for (claim, reading, _), one in found.items():
        names.setdefault(f"{claim}/{reading}".rstrip("/"), set()).add(one.verdict)
    return names


def test_the_grid_has_five_seeds_everywhere_and_the_words_of_what_was_cut():
    cells = E03.cells("cpu")
    groups: dict[str, list] = {}
    for cell in cells:
        groups.setdefault(str({k: v for k, v in cell.items() if k != "seed"}), []).append(cell["seed"])
    assert all(seeds == [0, 1, 2, 3, 4] for seeds in groups.values())
    assert len(cells) == 195 and len(E03.cut) >= 4
    assert len(E03.cells("accelerator")) > 1000


def test_known_truth_is_found():
    found = verdicts(settled())
    assert found["C49"] == {"undecided"}  # 48 blocks are not in the grid
    assert found["C50"] == {"supported"}
    assert found["C51"] == {"supported"}
    assert found["C82"] == {"supported"} and found["C82/exact null"] == {"supported"}
    assert found["C82/rate matched"] == {"supported"}
    assert found["C81/scale"] == {"supported"}  # all that lies between is as good as on
    assert found["C81/learnable gate"] == {"supported"}


def test_the_opposite_is_refuted():
    def other(fields):
        scale, rate = fields.get("residual.scale"), fields["optimizer.lr"]
        if fields["residual.name"].startswith("experiments"):
            share = {"MOVED_25": 0.25, "MOVED_50": 0.5, "MOVED_75": 0.75}.get(fields["residual.name"].partition(":")[2])
            return run(fields, 2.0 + 0.3 * share if share else 2.5)
        if fields["residual.name"] == "post_ln":
            return run(fields, 2.3, "collapsed" if rate >= 3e-2 else "trained")
        return run(fields, 2.0 if scale is None else 2.5 - 0.5 * scale)  # a straight line; speed is the same

    found = verdicts(settled(other))
    assert found["C51"] == {"refuted"}  # no scale rescues
    assert found["C82"] == {"refuted"} and found["C82/rate matched"] == {"refuted"}
    assert found["C81/scale"] == found["C81/moved norm"] == found["C81/learnable gate"] == {"refuted"}


def test_lost_seeds_are_counted_and_told():
    def gone(row):
        if row["fields"].get("residual.scale") == 0.3 and row["fields"]["seed"] == 2:
            kept = {name: row[name] for name in ("cell", "fields", "config")}
            return kept | {"status": "failed"}
        return row

    found = settled(change=gone)
    (third,) = [one for (claim, reading, _), one in found.items() if (claim, reading) == ("C82", "")]
    assert "3 failed" in " ".join(third.notes) and third.verdict in ("refuted", "undecided", "mixed")
    E03.drawing(Runs(gone(usual(fields)) for fields in E03.cells("cpu")), MEASURED)


def test_no_untrained_run_leaves_the_rescue_undecided():
    (found,) = [one for (claim, _, _), one in settled(lambda fields: run(fields, 2.0)).items() if claim == "C51"]
    assert found.verdict == "undecided" and "no run at scale 1 was untrained" in found.told()


def test_the_rescue_is_compared_with_a_cut_of_the_rate():
    (found,) = [one for (claim, _, _), one in settled().items() if claim == "C51"]
    assert "rescues 1.00 and the rate divided alike 0.75: no equivalent" in found.told()
    assert found.judged[0].effect.mean == 1.0


def test_a_best_rate_at_the_edge_leaves_a_small_scale_undecided():
    def rising(fields):
        return run(fields, 2.5 if fields.get("residual.scale") == 0.03 and fields["optimizer.lr"] < 0.1 else 2.1)

    (found,) = [one for (claim, _, _), one in settled(rising).items() if claim == "C50"]
    assert found.verdict == "undecided" and "edge of the grid" in found.told()


def test_the_panel_shows_every_seed():
    drawn = E03.drawing(Runs(map(usual, E03.cells("cpu"))), MEASURED)
    assert [axis.get_title() for axis in drawn.axes] == [
        "Pre-LN, 12 blocks, rate 0.003",
        "Post-LN, 12 blocks, rate 0.03",
        "no norm, 12 blocks, rate 0.03",
    ]
    dots = [line for line in drawn.axes[0].lines if line.get_linestyle() == "None"]
    assert len(dots) == 5 + 5 + 2 and all(len(line.get_xdata()) == 5 for line in dots)


def test_what_is_above_the_start_is_counted_and_does_not_squeeze_the_panel():
    def exploded(fields):
        gone = fields.get("model.norm") == "none" and fields["optimizer.lr"] == 1e-1
        return usual(fields) | ({"eval_loss": 400.0, "outcome": "diverged"} if gone else {})

    drawn = E03.drawing(Runs(map(exploded, E03.cells("cpu"))), MEASURED)
    assert drawn.axes[2].get_ylim()[1] < 4
    drawn = E03.drawing(Runs({**usual(row), "eval_loss": None} for row in E03.cells("cpu")), MEASURED)
    assert "5×" in [text.get_text() for text in drawn.axes[2].texts]


# ------------------------------------------------------------------ numbers by seed


def test_highest_rates_by_seed():
    rows = [
        {"fields": {"optimizer.lr": rate, "seed": seed}, "status": "done", "outcome": outcome}
        for seed, ends in enumerate((("trained", "trained"), ("trained", "diverged"), ("partial", "partial")))
        for rate, outcome in zip((1e-3, 1e-2), ends, strict=True)
    ]
    runs = Runs(rows)
    np.testing.assert_allclose(highest(runs, [0, 1, 2, 3]), [1e-2, 1e-3, 1e-3 / 10**0.5, np.nan])
    np.testing.assert_equal(steps_above(runs, runs, [0, 1, 2]), [0, 0, 0])
    worse = Runs(row | {"outcome": "partial"} for row in rows)
    np.testing.assert_equal(steps_above(runs, worse, [0, 1, 2]), [2, 1, 0])
    assert lost(runs) == () and "1 failed" in lost(Runs([rows[0] | {"status": "failed", "outcome": None}]))[0]


def test_steps_to_a_target_are_those_of_the_log():
    row = run({"seed": 0, "optimizer.lr": 1e-3}, 2.5)
    step = reached(row, 3.0)
    curve = {point["step"]: point["loss"] for point in row["curve"]}
    assert (curve[step] + curve[step - 10]) / 2 <= 3.0 < (curve[step - 10] + curve[step - 20]) / 2
    assert reached(row, 1.0) == np.inf and np.isnan(reached({}, 1.0))


def test_an_effect_may_lie_either_way():
    found = unsigned(effect([-1.0, -2.0]))
    assert found.values == (1.0, 2.0) and found.interval.low < 1.5 < found.interval.high


# ------------------------------------------------------------------ the exact null


@pytest.mark.slow
def test_matched_runs_are_plain_pre_ln_bit_for_bit_and_round_as_little_as_one_rounding():
    rows = list(exact_null.compared(seeds=(0, 1), steps=20, exact=(0.25,)))
    found = {(row["arm"], row["scale"], row["seed"]): row["largest"] for row in rows}
    for seed in (0, 1):
        assert found["matched", 0.25, seed] == 0
        assert 0 < found["matched", 0.3, seed] < 20 * found["one rounding", 1.0, seed] < found["shared rate", 0.3, seed]
