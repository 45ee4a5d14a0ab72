"""Does E02 judge the place of norms rightly? Runs of known truth on its own grid."""

import numpy as np
import pytest

from experiments import rehearsal
from experiments.e02_norm_placement import MIDDLE
from experiments.experiment import named

E02 = named("E02")
CELLS = E02.cells("cpu")
TOP = {6: 3e-2, 12: 1e-2, 24: 3e-3}  # Post-LN trains up to these rates
H1 = 2.845


def losses(fields):
    """Both best at 1e-2, Pre-LN trained everywhere; Post-LN better by 0.02 where it is, and silently lost above; gain 1 all lost."""
    rate, depth, post = fields["optimizer.lr"], fields["model.depth"], fields["residual.name"] == "post_ln"
    cold = fields.get("optimizer.warmup") == 0
    if post and (rate > TOP[depth] or fields["init.gain"] == 1.0 or cold):
        return H1
    return 2.0 + 0.05 * abs(np.log(rate / 1e-2)) + 0.001 * fields["seed"] - 0.02 * post


def usual(fields):
    loss = losses(fields)
    away = (0.3 if fields["residual.name"] == "post_ln" else 0.0) + 0.001 * fields["seed"]
    curve = [
        {"step": step, "loss": loss + (1.5 + away) * float(np.exp(-step / 60)) - away * (step > 300)}
        for step in range(10, 601, 10)
    ]
    lost = loss == H1
    return {
        "eval_loss": loss, "outcome": "collapsed" if lost else "trained", "curve": curve,
        "looks": {"600": {"ratio": 1.02 + 0.01 * fields["seed"]} if fields["model.depth"] == MIDDLE else {}},
        "profiles": {"1": {"token_cosine": np.full((2, 2), fields["model.depth"] / 30).tolist()}},
    }  # fmt: skip


def settled(told=usual):
    return E02.settle(rehearsal.cells(E02, told), {}, "cpu")


def verdicts(found):
    names: dict[str, dict[str, str]] = {}
    for one in found:
        names.setdefault(f"{one.claim}/{one.reading}".rstrip("/"), {})[one.settings.removeprefix("cpu-S, markov, ")] = (
            one.verdict
        )
    return names


@pytest.fixture(scope="module")
def found():
    return settled()


def test_every_arm_has_five_seeds():
    groups: dict[str, list] = {}
    for cell in CELLS:
        groups.setdefault(str({path: one for path, one in cell.items() if path != "seed"}), []).append(cell["seed"])
    assert all(seeds == [0, 1, 2, 3, 4] for seeds in groups.values())
    assert len(CELLS) == 185 and len(E02.cut) >= 4 and len(E02.cells("accelerator")) > 1000


def test_known_truth_is_found(found):
    told = verdicts(found)
    gain = "gain 0.55"
    assert told["C37"] == {gain: "supported"} and told["C41/threshold"] == {f"{gain}, 12 blocks": "supported"}
    assert told["C09"] == {
        f"{gain}, {depth} blocks": "supported" if depth == 24 else "refuted" for depth in (6, 12, 24)
    }
    assert told["C42"] == {f"{gain}, 12 blocks": "refuted"}  # Post-LN is better where it trains
    assert told["C41/spikes"] == {f"{gain}, 12 blocks": "refuted"} and told["C41/Pre-LN smooth"] == {
        f"{gain}, 12 blocks": "supported"
    }
    assert told["C40"] == {f"{gain}, 12 blocks": "refuted"}  # it is behind early on
    assert told["C43/at usual rates"] == {f"{gain}, 24 blocks": "refuted", "gain 1, 24 blocks": "supported"}
    assert told["C43/growing gap"] == {gain: "supported"}
    assert told["C47"] == {f"{gain}, 12 blocks, rate 0.003": "supported"}
    assert told["C32/Pre-LN"] == told["C32/Post-LN"] == {f"{gain}, 12 blocks": "supported"}
    assert "undecided" in told["C13/loss spikes"].values() and set(told["C12/branch scale"].values()) == {"undecided"}
    assert set(told["C12/warm-up"].values()) == {"refuted"}  # it changes nothing here


def test_where_curves_cross_is_told(found):
    (early,) = [one for one in found if one.claim == "C40"]
    assert "Pre-LN is ahead at first" in early.told() and "Post-LN from step" in early.told()


def test_loud_failures_and_a_needed_remedy_are_found():
    def loud(fields):
        row = usual(fields)
        if fields.get("model.norm") == "none":
            row |= {"eval_loss": H1, "outcome": "diverged"}
        if row["outcome"] != "trained":
            row["spikes"] = {"score": 1.0, "episodes": 2, "fatal": 1, "max_loss": 4.0}
        return row

    told = verdicts(settled(loud))
    assert (
        set(told["C41/spikes"].values())
        == set(told["C13/loss spikes"].values())
        == set(told["C12/norm"].values())
        == {"supported"}
    )


def test_lost_seeds_are_told_and_never_make_an_arm_best():
    def gone(fields):
        lost = fields["seed"] == 1 and fields["residual.name"] == "pre_ln" and fields["optimizer.lr"] == 1e-2
        return usual(fields) | (rehearsal.lost(fields) if lost else {})

    found = settled(gone)
    (final,) = [one for one in found if one.claim == "C42"]
    assert "best rates 0.01" not in final.told()
    (brittle,) = [one for one in found if one.claim == "C37"]
    assert "nonfinite" in brittle.told()


def test_the_panel_has_a_field_for_every_run_and_the_token_cosine_beside_each_line():
    drawn = E02.drawing(rehearsal.cells(E02, usual), {})
    titles = [axis.get_title(loc="left") for axis in drawn.axes]
    assert titles == ["Post-LN, gain 0.55", "Pre-LN, gain 0.55", "Post-LN, gain 1", "Pre-LN, gain 1"]
    fields = sum(len(axis.patches) for axis in drawn.axes)
    assert fields == len(
        [
            cell
            for cell in CELLS
            if not {"model.norm", "init.out_scale", "optimizer.clip", "optimizer.warmup"} & set(cell)
        ]
    )
    beside = [[text for text in axis.texts if text.get_position()[0] == 1.02] for axis in drawn.axes]
    assert [len(texts) for texts in beside] == [3, 3, 1, 1]  # depths that were run there
