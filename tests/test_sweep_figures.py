"""Do the figures of a sweep show every run where its numbers are, the same each time, and say where a best value is at an edge?"""

import math
import re

import numpy as np
import pytest
from matplotlib.colors import to_hex

import runs
from resjax import drawing, sweep
from resjax.errors import Refused
from resjax.sweeps.figures import (
    Difference,
    at_first_step,
    automatic,
    best_rate,
    look,
    losses,
    paired,
    phase,
    profiles,
    sensitivity,
)
from resjax.sweeps.figures.curves import smoothed
from resjax.sweeps.figures.rows import best, grouped, label, varying
from resjax.sweeps.lines import ending, number, value
from resjax.train.writers import parse

RATES = (1e-3, 1e-2, 1e-1)
FLOORS = {"unigram": 2.8, "bigram": 2.3, "trigram": 1.8}
BASELINES = {"uniform": 3.466, "unigram": 2.81, "bigram": 2.34, "trigram": 1.9}
SCHEMES = (
    *("pre_ln", "post_ln", "rezero", "sandwich_ln", "deepnorm", "layerscale"),
    *("admin", "lns", "mhc", "prores", "highway", "dense"),
)


def row(scheme="pre_ln", rate=1e-2, seed=0, depth=12, loss=2.0, steps=8, **more):
    """A line of results; a loss of NaN is a run that left the numbers half-way, None one that failed."""
    fields = {"residual.name": scheme, "model.depth": depth, "optimizer.lr": rate, "seed": seed}
    made = {"cell": str(fields), "fields": fields, "scale": None, "status": "done", "error": None}
    if loss is None:
        return made | {"status": "failed", "error": "MemoryError: too large"} | more
    lost = math.isnan(loss)
    points = [{"step": i + 1, "loss": 3.5 + (2.0 if lost else loss - 3.5) * i / (steps - 1)} for i in range(steps)]
    if lost:
        points = [*points[: steps // 2], {"step": steps // 2 + 1, "loss": "nan"}]
    made |= {
        "config": {**fields, "train.steps": steps},
        "status": "diverged" if lost else "done",
        "outcome": "nonfinite" if lost else "diverged" if loss > 3.55 else "trained" if loss < 2.27 else "partial",
        "eval_loss": None if lost else loss,
        "first_loss": 3.5,
        "steps": len(points),
        "floors": FLOORS,
        "baselines": BASELINES,
        "curve": points if lost else [*points, {"step": steps, "eval_loss": loss}],
        "profiles": {
            str(step): {
                "update_ratio": [[step / 10, 0.2]] * depth,
                "token_cosine": [[0.1, 0.2 + seed / 10 + depth / 100]] * depth,
                "update_ratio_block": [0.3] * depth,
            }
            for step in ([1] if lost else [1, steps])
        },
    }
    return made | more


def grid(schemes=2, seeds=2, depths=(12,), rates=RATES, loss=lambda scheme, rate, seed, depth: 2.0 + 0.01 * seed):
    return [
        row(scheme, rate, seed, depth, loss(scheme, rate, seed, depth))
        for scheme in SCHEMES[:schemes]
        for depth in depths
        for rate in rates
        for seed in range(seeds)
    ]


def hard(scheme, rate, seed, depth):
    """Of the highest rate a seed is lost and a seed fails; deeper is worse."""
    if rate == RATES[-1]:
        return (math.nan, None, 9.0)[seed % 3]
    return 2.0 + 0.01 * seed + abs(math.log10(rate) + 2) + 0.001 * depth


def lines(figure, name):
    """Those whose label matches, of all panels."""
    return [line for axis in figure.axes for line in axis.lines if re.fullmatch(name, line.get_label())]


def points(figure, name):
    return sum(len(np.ravel(line.get_xdata())) for line in lines(figure, name))


def words(figure):
    """All that is written in it."""
    legend = [text.get_text() for one in figure.legends for text in one.get_texts()]
    inside = [text.get_text() for axis in figure.axes for text in (*axis.texts, axis.title, axis._left_title)]
    labels = [text for axis in figure.axes for text in (axis.get_xlabel(), axis.get_ylabel())]
    return " ".join(" ".join([*legend, *inside, *labels, *(text.get_text() for text in figure.texts)]).split())


# ------------------------------------------------------------------ lines


def test_a_field_is_what_the_line_says_or_its_default():
    given = row(depth=6)
    assert value(given, "model.depth") == 6 and value({"fields": {}, "config": {"model.depth": 3}}, "model.depth") == 3
    assert value({"fields": {}}, "seed") == 0
    with pytest.raises(Refused, match=r"model\.depht.*did you mean"):
        value(given, "model.depht")


@pytest.mark.parametrize("given", [None, "nan", True, "much", {}, "inf"])
def test_what_is_no_finite_number_is_none(given):
    assert not np.isfinite(number(given))


def test_arms_are_what_varies_and_named_by_it():
    rows = grid(depths=(6, 12))
    assert varying(rows) == ["residual.name", "model.depth", "optimizer.lr"]
    assert label(rows[0], ["residual.name", "model.depth"]) == "pre_ln, depth 6"
    assert {name: len(part) for name, part in grouped(rows, ["model.depth"]).items()} == {"depth 6": 12, "depth 12": 12}
    assert list(grouped(rows, lambda one: f"<{value(one, 'seed')}>")) == ["<0>", "<1>"]


@pytest.mark.parametrize(
    "found, expected",
    [
        ([[2.0], [1.9], [2.1]], (1e-2, "")),
        ([[1.8], [1.9], [2.1]], (1e-3, "smallest")),
        ([[2.0], [1.9], [1.7]], (1e-1, "largest")),
        ([[2.0, 2.0], [1.0, math.nan], [2.1, 2.1]], (1e-3, "smallest")),
        ([[2.0, 2.0], [1.0, None], [1.9, 1.9]], (1e-1, "largest")),
        ([[math.nan], [None], [math.nan]], (None, "")),
        ([[2.0]], (1e-3, "only")),
    ],
)
def test_the_best_rate_lost_no_seed(found, expected):
    rows = [
        row(rate=rate, seed=i, loss=one) for rate, some in zip(RATES, found, strict=False) for i, one in enumerate(some)
    ]
    at = best(rows)
    assert (at.value, at.edge) == expected


def test_how_a_run_ended_has_a_class_and_every_class_a_look():
    ends = [ending(row(loss=loss)) for loss in (2.0, 2.5, 4.0, math.nan, None)]
    assert ends == ["trained", "partial", "diverged", "nonfinite", "failed"]
    assert ending(row(outcome=None)) == "no class" and ending(row(status="killed", outcome=None)) == "killed"
    letters = [letter for letter, _, _ in look.CLASS_LOOK.values()]
    assert len(set(letters)) == len(letters)


def test_arms_differ_in_colour_or_dash_and_in_grey():
    arms = list(look.arms(SCHEMES).values())
    assert len(set(look.HUES)) == 8
    assert len({(arm.colour, str(arm.dash)) for arm in arms}) == 12 == len({arm.marker for arm in arms})
    assert not {arm.marker for arm in arms} & set(look.ENDS.values())
    many = look.arms(map(str, range(look.MOST_ARMS))).values()
    assert len({(arm.colour, str(arm.dash)) for arm in many}) == look.MOST_ARMS
    with pytest.raises(Refused, match="33 arms are too many"):
        look.arms(map(str, range(33)))


# ------------------------------------------------------------------ every run is there


def test_losses_are_drawn_to_where_each_run_ends():
    rows = [row(seed=0, loss=2.0), row(seed=1, loss=math.nan), row(seed=2, loss=5.0), row("post_ln", loss=None)]
    figure = losses(rows)
    drawn = lines(figure, "pre_ln")
    assert [line.get_xdata()[-1] for line in drawn] == [8, 5, 8]
    np.testing.assert_allclose(drawn[0].get_ydata(), [point["loss"] for point in rows[0]["curve"][:-1]])
    (lost,) = lines(figure, "_nonfinite")
    assert lost.get_marker() == "x" and lost.get_xdata() == [4]
    (risen,) = lines(figure, "_diverged")
    assert risen.get_xdata() == [8] and len(lines(figure, "_above")) == 2
    assert "Runs without a line: post_ln: 1 failed (MemoryError: too large)" in words(figure)
    assert "not finite" in words(figure) and "nats per token" in words(figure)


def test_floors_stand_at_their_level_and_are_named():
    figure = losses([row(), row("post_ln")])
    levels = {name: lines(figure, f"_{name}")[0].get_ydata()[0] for name in (*FLOORS, "ln V")}
    assert levels == FLOORS | {"ln V": 3.466}
    counted = losses([row(floors=None)])
    assert lines(counted, "_bigram")[0].get_ydata()[0] == 2.34 and "counted on its training text" in words(counted)
    assert not lines(losses([row(floors=None, baselines=None)]), "_bigram")


def test_losses_of_many_steps_are_running_means_and_lose_no_extreme():
    values = np.array([4.0, 2.0, np.nan, 3.0, 5.0])
    np.testing.assert_allclose(smoothed(values, 2), [4, 3, np.nan, 3, 4])
    points_ = [{"step": i + 1, "loss": 9.0 if i == 777 else 3.0} for i in range(2000)]
    figure = losses([row(curve=points_), row(seed=1, curve=[{"step": 1, "loss": 9.5}])])
    assert "mean of 40 logged steps" in words(figure)
    (single, _) = lines(figure, "_single steps")
    assert max(single.get_ydata()) == 9.0 and len(single.get_xdata()) < 300


def test_held_out_losses_over_the_steps():
    figure = losses([row()], kind="eval_loss")
    (line,) = lines(figure, "all runs")
    assert list(line.get_xdata()) == [8] and list(line.get_ydata()) == [2.0]
    with pytest.raises(Refused, match="the kind of loss is 'train'"):
        losses([row()], kind="train")


@pytest.mark.parametrize("schemes, seeds", [(1, 1), (2, 5), (6, 3), (12, 5)])
def test_sensitivity_has_a_mark_for_every_run(schemes, seeds):
    rows = grid(schemes, seeds, loss=hard)
    figure = sensitivity(rows)
    lost = {kind: points(figure, f"_.*: {kind}") for kind in ("nonfinite", "failed", "above")}
    assert points(figure, "_.*: seeds") + sum(lost.values()) == len(rows)
    ends = [ending(one) for one in rows]
    assert (lost["nonfinite"], lost["failed"]) == (ends.count("nonfinite"), ends.count("failed"))
    assert lost["above"] == sum(number(one.get("eval_loss")) > 8 for one in rows)
    assert points(figure, "_.*: best") == schemes
    for axis in figure.axes:
        assert axis.get_ylim()[1] < 5, "what is far above does not flatten the rest"
        marks = [
            y
            for line in axis.lines
            if re.fullmatch("_.*: (nonfinite|failed|above)", line.get_label())
            for y in line.get_ydata()
        ]
        assert all(0 < y < 1 for y in marks), "inside the panel"


def test_sensitivity_goes_through_the_medians_and_rings_the_best():
    found = {1e-3: (2.5, 2.6, 2.9), 1e-2: (2.0, 2.1, 2.2), 1e-1: (2.4, 2.3, math.nan)}
    figure = sensitivity(
        [row(rate=rate, seed=i, loss=one) for rate, some in found.items() for i, one in enumerate(some)]
    )
    (line,) = lines(figure, "all runs")
    assert list(line.get_xdata()) == list(RATES) and list(line.get_ydata()) == [2.6, 2.1, 2.4]
    (ring,) = lines(figure, "_: best")
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (1e-2, 2.1)
    assert not lines(figure, "_: edge") and "Warning" not in words(figure)


def test_a_best_value_at_the_edge_is_marked_and_told():
    down = grid(
        loss=lambda scheme, rate, seed, depth: 2.5 - rate if scheme == "pre_ln" else 2.0 + abs(math.log10(rate) + 2)
    )
    figure = sensitivity(down)
    assert len(lines(figure, "_pre_ln: edge")) == 1 and not lines(figure, "_post_ln: edge")
    assert "Warning: the best rate is at the edge of the grid for pre_ln (0.1, the largest)." in words(figure)
    by_depth = best_rate(down)
    assert len(lines(by_depth, "_pre_ln: edge")) == 1 and "pre_ln, depth 12 (0.1, the largest)" in words(by_depth)


def test_the_best_rate_by_depth_shows_each_seed_and_arms_without_one():
    rows = grid(
        1,
        3,
        depths=(6, 12),
        loss=lambda scheme, rate, seed, depth: math.nan if depth == 12 and seed == 1 else 2 + rate * seed,
    )
    figure = best_rate(rows)
    (line,) = lines(figure, "all runs")
    assert list(line.get_xdata()) == [6, 12] and line.get_ydata()[0] == 1e-3 and np.isnan(line.get_ydata()[1])
    assert points(figure, "_: none") == 1 and points(figure, "_: seed") == 5
    assert "at every rate a run has no finite loss" in words(figure)


@pytest.mark.parametrize("seeds", [1, 2, 5, 7])
def test_a_phase_diagram_has_a_part_for_every_run(seeds):
    rows = grid(2, seeds, depths=(6, 12), loss=hard)
    figure = phase(rows)
    parts = [patch for axis in figure.axes for patch in axis.patches]
    letters = [text.get_text() for axis in figure.axes for text in axis.texts]
    ends = [ending(one) for one in rows]
    assert len(parts) == len(letters) == len(rows)
    for end in set(ends):
        letter, colour, _ = look.CLASS_LOOK[end]
        assert letters.count(letter) == ends.count(end)
        assert [to_hex(part.get_facecolor()) for part in parts].count(colour) == ends.count(end)
    for column in range(3):
        for line in range(2):
            inside = [
                patch
                for patch in figure.axes[0].patches
                if abs(patch.get_x() + patch.get_width() / 2 - column) < 0.5
                and abs(patch.get_y() + patch.get_height() / 2 - line) < 0.5
            ]
            assert len(inside) == seeds
            assert sum(p.get_width() * p.get_height() for p in inside) == pytest.approx(0.92**2), (
                "the parts fill the field"
            )


def test_a_field_that_was_not_run_is_white_and_an_unknown_class_has_its_word():
    rows = [
        one for one in grid(1, 1, depths=(6, 12)) if value(one, "model.depth") == 6 or value(one, "optimizer.lr") < 0.1
    ]
    assert len(phase(rows).axes[0].patches) == 5
    assert "? resting" in words(phase([row(outcome="resting")]))


def test_contours_are_of_the_mean_over_the_seeds():
    rows = grid(1, 2, depths=(6, 12, 24))
    start = at_first_step("token_cosine")
    assert start(rows[1]) == pytest.approx(0.36)
    assert np.isnan(start(row(loss=None))) and np.isnan(at_first_step("nothing")(rows[0]))

    def tilted(one):
        return start(one) + np.log(value(one, "optimizer.lr"))

    figure = phase(rows, contour=tilted, levels=[-4.0], contoured="token cosine")
    (drawn,) = [one for one in figure.axes[0].collections if hasattr(one, "levels")]
    rates = np.log(sorted({value(one, "optimizer.lr") for one in rows}))
    for at, height in np.concatenate([path.vertices for path in drawn.get_paths()]):
        cosine = np.interp(height, range(3), [0.31, 0.37, 0.49])  # means of lines 0, 1, 2
        assert np.interp(at, range(len(rates)), rates) + cosine == pytest.approx(-4.0, abs=1e-6)
    assert "need two values" in words(phase(grid(1, 2, depths=(6,)), contour=tilted, contoured="one"))


def test_a_number_that_is_the_same_along_a_line_is_written_beside_it():
    rows = grid(1, 2, depths=(6, 12, 24))
    figure = phase(rows, contour=at_first_step("token_cosine"), contoured="token cosine")
    assert not [one for one in figure.axes[0].collections if hasattr(one, "levels")]
    beside = {one.get_text(): one.get_position() for one in figure.axes[0].texts if one.get_position()[0] == 1.02}
    assert beside == {"0.31": (1.02, 0), "0.37": (1.02, 1), "0.49": (1.02, 2)}
    assert "Beside each line: token cosine" in words(figure)


def test_profiles_are_lines_by_depth_a_colour_a_step():
    rows = [row(seed=0), row(seed=1, loss=math.nan), row("post_ln", loss=None)]
    figure = profiles(rows, "update_ratio")
    assert len(figure.axes) == 2 and "no profiles" in words(figure)
    assert len(lines(figure, "step 1")) == 4 and len(lines(figure, "step 8")) == 2  # two kinds of sites
    first = lines(figure, "step 8")[0]
    assert list(first.get_xdata()) == list(range(12)) and set(first.get_ydata()) == {0.8}
    assert len({line.get_color() for line in figure.axes[0].lines}) == 2
    assert "1 of 3 runs have none of these steps (failed)" in words(figure)
    assert len(lines(profiles(rows, "update_ratio", [8]), "step .*")) == 2
    assert figure.axes[0].get_yscale() == "log" and profiles(rows, "token_cosine").axes[0].get_yscale() == "linear"
    (stream,) = lines(profiles(rows[:1], "token_cosine", [1]), "step 1")
    assert list(stream.get_xdata()[:4]) == [0, 0.5, 1, 1.5] and list(stream.get_ydata()[:2]) == [
        0.1,
        pytest.approx(0.32),
    ]


def test_values_without_a_place_are_marked_in_a_profile():
    broken = row(profiles={"1": {"update_ratio": [[0.1, 0.0], [None, "inf"], [0.3, 0.2]]}})
    figure = profiles([broken], "update_ratio")
    assert points(figure, "_nonfinite") == 1 and points(figure, "_without") == 1


def test_profiles_that_are_not_there_are_refused():
    with pytest.raises(Refused, match=r"the probe is 'update_ration'.*did you mean 'update_ratio'"):
        profiles([row()], "update_ration")
    with pytest.raises(Refused, match="no run has kept update_ratio at step 5; there are 1, 8"):
        profiles([row()], "update_ratio", [5])
    with pytest.raises(Refused, match="sweep with --profiles"):
        profiles([row(profiles=None)], "update_ratio")


def test_paired_differences_show_every_seed_the_mean_and_what_counts_as_none():
    nan = math.nan
    found = [
        Difference("post_ln", (0.1, 0.2, nan), (0.05, 0.25), 0.02),
        Difference("rezero", (nan, nan), (nan, nan), 0.02),
        Difference("lone", (0.01,), (nan, nan)),
    ]
    figure = paired(found)
    assert points(figure, "_.*: seeds") == 3 and points(figure, "_.*: lost") == 3
    (mean,) = lines(figure, "_post_ln: mean")
    (interval,) = lines(figure, "_post_ln: interval")
    assert mean.get_xdata()[0] == pytest.approx(0.15) and tuple(interval.get_xdata()) == (0.05, 0.25)
    bands = [one.get_paths()[0].get_extents() for one in figure.axes[0].collections]
    assert [(band.x0, band.x1) for band in bands] == [(-0.02, 0.02)] * 2
    assert "+0.15 [+0.05, +0.25] 2 of 3 seeds" in words(figure) and "no value 0 of 2 seeds" in words(figure)
    assert not lines(figure, "_lone: interval") and "logarithmic" not in words(figure)


def test_one_lost_seed_does_not_hide_the_other_differences():
    figure = paired([Difference("post_ln", (0.01, 0.02, 5.0), (-3.0, 6.0), 0.01)])
    assert figure.axes[0].get_xscale() == "symlog" and "logarithmic beyond ±0.02" in words(figure)


# ------------------------------------------------------------------ refusals, bytes, places


@pytest.mark.parametrize("draw", [losses, sensitivity, phase, best_rate, lambda rows: profiles(rows, "update_ratio")])
def test_without_runs_there_is_a_sentence(draw):
    with pytest.raises(Refused, match="there are no runs to draw"):
        draw([])


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(Refused, match="no run has kept its training loss over the steps; sweep with --curves"):
        losses([row(curve=None)])
    with pytest.raises(Refused, match=r"optimizer\.lr is 0\.0; a logarithmic axis needs numbers above 0"):
        sensitivity([row(rate=0.0)])
    with pytest.raises(Refused, match="25 panels are too many"):
        losses([row(seed=i) for i in range(25)], panels=lambda one: str(value(one, "seed")))
    with pytest.raises(Refused, match="there are no differences"):
        paired([])
    with pytest.raises(Refused, match="two differences 'a'"):
        paired([Difference("a", (1.0,), (0, 2))] * 2)
    with pytest.raises(Refused, match="'a' has no seeds"):
        paired([Difference("a", (), (0, 2))])


def test_the_same_runs_give_the_same_bytes_with_text_as_text():
    rows, again = (grid(2, 1, depths=(2, 3), rates=RATES[1:], loss=hard) for _ in range(2))
    for name, draw in automatic.sensible(rows).items():
        drawn = drawing.svg(draw(), name, "stamp 1")
        assert drawn == drawing.svg(automatic.sensible(again)[name](), name, "stamp 1"), name
        assert b"pre_ln" in drawn and b"<dc:date>" not in drawn and b"stamp 1" in drawn[:4096], name


@pytest.mark.parametrize(
    "schemes, depths", [(2, (2, 3)), pytest.param(12, (2, 3), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_panels_legend_and_notes_lie_apart(schemes, depths):
    """In the size that a renderer gives them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for draw in automatic.sensible(grid(schemes, 1, depths, RATES[1:], hard)).values():
        figure = draw()
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        panels = [axis.get_tightbbox(renderer) for axis in figure.axes]
        others = [one.get_window_extent(renderer) for one in (*figure.legends, *figure.texts)]
        whole = figure.bbox
        for i, box in enumerate(boxes := [*panels, *others]):
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1
            for other in boxes[i + 1 :]:
                wide = min(box.x1, other.x1) - max(box.x0, other.x0)
                high = min(box.y1, other.y1) - max(box.y0, other.y0)
                assert wide <= 1 or high <= 1


# ------------------------------------------------------------------ at the end of a sweep


def names(rows):
    return list(automatic.sensible(rows))


def bare(rows):
    return [{name: part for name, part in one.items() if name not in ("curve", "profiles")} for one in rows]


def test_the_figures_are_those_that_the_axes_make_sense_of():
    assert names(bare(grid())) == ["sensitivity"]
    assert names(bare(grid(depths=(6, 12)))) == ["sensitivity", "phase", "best_rate"]
    assert names(bare(grid(rates=(1e-2,)))) == []
    assert names(grid(rates=(1e-2,))) == ["losses", "profiles_update_ratio", "profiles_token_cosine"]


def test_many_arms_are_shared_out_to_panels():
    rows = grid(7, 1, depths=(6, 12))
    assert automatic.shared_out(rows, ["model.depth", "residual.name"]) == (["residual.name"], ["model.depth"])
    assert automatic.shared_out(rows, ["model.depth"]) == (["model.depth"], []) and automatic.shared_out(rows, []) == (
        [],
        [],
    )


def test_profiles_are_of_each_arm_at_its_best_rate():
    rows = grid(2, 1, loss=lambda scheme, rate, *_: math.nan if scheme == "post_ln" else 2 + abs(math.log10(rate) + 2))
    shown, said = automatic.at_best_rate(rows, ["residual.name"])
    assert [(value(one, "residual.name"), value(one, "optimizer.lr")) for one in shown] == [
        ("pre_ln", 1e-2),
        ("post_ln", 1e-3),
    ]
    assert said in words(automatic.sensible(rows)["profiles_update_ratio"]())


def test_figures_are_written_once_and_again_when_the_lines_are_others(tmp_path):
    told = []
    automatic.write(tmp_path, bare(grid(depths=(6, 12))), told.append)
    assert [line.rpartition("/")[2] for line in told] == ["sensitivity.svg", "phase.svg", "best_rate.svg"]
    before = runs.files(tmp_path)
    (tmp_path / "figures" / "mine.svg").write_text("<svg/>")
    automatic.write(tmp_path, bare(grid(depths=(6, 12))), told.append)
    assert {name: at for name, at in runs.files(tmp_path).items() if name.endswith("e.svg") and "mine" not in name} == {
        name: at for name, at in before.items() if name.endswith("e.svg")
    } and told[3:] == told[:3]
    automatic.write(tmp_path, bare(grid(depths=(6,))), told.append)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["mine.svg", "sensitivity.svg"]
    assert runs.files(tmp_path)["figures/sensitivity.svg"] != before["figures/sensitivity.svg"]


def test_a_figure_that_cannot_be_drawn_or_written_is_told(tmp_path, monkeypatch):
    told = []
    automatic.write(tmp_path, bare([*grid(), row(rate=0.0)]), told.append)
    assert told == [
        "note: sensitivity.svg was not drawn: optimizer.lr is 0.0, 0.001, 0.01, 0.1; a logarithmic axis needs numbers above 0"
    ]
    (tmp_path / "figures").rmdir() if (tmp_path / "figures").exists() else None
    (tmp_path / "figures").write_text("a file")
    automatic.write(tmp_path, bare(grid()), told.append)
    assert told[1].startswith("note: ") and "Error" in told[1]


@pytest.mark.usefixtures("quick")
def test_a_sweep_draws_at_its_end_and_only_once(calm, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "sweep"
    command = runs.words(calm, folder, "--grid", "optimizer.lr=1e-3,1e-2", "--curves", "--profiles=1", train__steps=4)
    assert sweep.main([*command, "--no-figures"]) == 0
    assert "figure" not in capsys.readouterr().out and not (folder / "figures").exists()
    assert sweep.main(command) == 0
    told = capsys.readouterr().out.splitlines()
    drawn = sorted(path.name for path in (folder / "figures").iterdir())
    assert {"losses.svg", "sensitivity.svg", "profiles_update_ratio.svg"} <= set(drawn)
    assert sorted(line.rpartition("/")[2] for line in told[-len(drawn) :]) == drawn
    before = runs.files(folder)
    assert sweep.main(command) == 0
    assert runs.files(folder) == before and capsys.readouterr().out.splitlines()[-len(drawn) :] == told[-len(drawn) :]
    (folder / "figures" / "losses.svg").write_text("")
    monkeypatch.setattr(automatic, "losses", lambda *_: 1 / 0)
    assert sweep.main(command) == 0
    assert "note: losses.svg was not drawn: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_grid_of_depth_and_rate_says_how_each_cell_ended_and_where_its_best_rate_lies(calm, tmp_path):
    """A32: what has to move with depth? Every cell of a seed sees one text, has an end, and stops no other; the edge is told."""
    folder = tmp_path / "sweep"
    grids = ("--grid", "model.depth=2,8", "--grid", "optimizer.lr=1e-4,1e-3,1e30")
    assert sweep.main(runs.words(calm, folder, *grids, train__steps=6)) == 1
    rows = [parse(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["done", "done", "diverged"] * 2
    assert all(row["outcome"] == "nonfinite" for row in rows if row["status"] == "diverged")
    assert len({str(row["baselines"]) for row in rows}) == 1
    assert "Warning" not in words(best_rate(rows)), "a rate beyond the best was tried, and diverged"
    tried = [row for row in rows if row["fields"]["optimizer.lr"] < 1]
    assert "8 (1e-3, the largest)" in words(best_rate(tried))
