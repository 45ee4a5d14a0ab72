"""Does the doctor's page of two runs show all that both have on the same axes, and say what only one of them has?"""

import re
from dataclasses import replace

import numpy as np
import pytest

import synthetic_run
from resjax.health import figures
from resjax.health.diagnosis import curves, diagnose, shown
from resjax.health.diagnosis.page import page
from resjax.health.diagnosis.panels import SHARE, frame_of, told
from synthetic_run import case_of

DEPTH = 6


@pytest.fixture(scope="module")
def cases():
    return case_of(DEPTH, "left"), case_of(DEPTH, "right", seed=1)


@pytest.fixture(scope="module")
def text(cases):
    return page(*map(diagnose, cases))


def figures_of(text):
    """Title -> the figure's HTML."""
    found = re.findall(r'<figure class="profile"><h3>(.*?) <span.*?</figure>', text, re.DOTALL)
    whole = re.findall(r'<figure class="profile">.*?</figure>', text, re.DOTALL)
    assert len(found) == len(set(found)) == len(whole), "two figures of one title"
    return dict(zip(found, whole, strict=True))


def scale(figure):
    """Where the ticks stand and what they say, of both axes."""
    return re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="\w+">([^<]*)</text>', figure)


def test_every_study_is_shown_of_both(text, cases):
    found = figures_of(text)
    for drawing in shown.DRAWINGS:
        lines = len(shown.panel_of(drawing, cases[0]).lines)
        if lines == 1:
            assert found[drawing.title].count('class="curve') == 2
            assert all(f"{name}: " in found[drawing.title] for name in ("left", "right"))
        else:
            pair = [found[f"{drawing.title}, {name}"] for name in ("left", "right")]
            assert [one.count('class="curve') for one in pair] == [lines, lines] and scale(pair[0]) == scale(pair[1])
    for title in ("Angular distance", "Linear CKA"):
        assert all("<image" in found[f"{title}, {name}"] for name in ("left", "right"))
    numbers = re.findall(r"<tr><th>([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>", text)
    assert len(numbers) == len(shown.NUMBERS) + 3 and all("–" not in pair for pair in numbers)


def test_every_probe_is_shown_of_both(text):
    found = figures_of(text)
    every = [one for *_, members in figures.GROUPS for one in members if one.probe != "finite"]
    for one in every:
        mine = [found[title] for title in found if re.fullmatch(re.escape(one.title) + "(, .*)?", title)]
        assert mine, one.title
        for figure in mine:
            assert [name in figure for name in ("left, at the end", "right, at the end")] == [True, True]
    assert all(f"{name}: this scheme&#x27;s start" in found["Stream RMS"] for name in ("left", "right"))


def test_pairs_are_on_one_scale_also_where_one_is_far_larger(cases):
    left, right = cases
    larger = {name: 1e4 * np.asarray(right.studies["massive"][name]) for name in ("largest", "median")}
    right = replace(right, studies=right.studies | {"massive": larger})
    found = figures_of(shown.studies_shown([left, right], ["left", "right"]))
    pair = [found[f"Massive activations, {name}"] for name in ("left", "right")]
    assert scale(pair[0]) == scale(pair[1]) and "10⁶" in pair[0]
    alone = figures_of(shown.studies_shown([left], ["left"]))["Massive activations"]
    assert "10⁶" not in alone


@pytest.mark.parametrize("side", [0, 1])
def test_what_only_one_has_says_so(cases, side):
    names, whole = ["left", "right"], list(cases)
    whole[side] = replace(cases[side], studies={}, state=None)
    found = figures_of(shown.studies_shown(whole, names))
    assert f"{names[side]}: no state was studied." in found["Logit lens"]
    assert found["Logit lens"].count('class="curve') == 1
    for title in ("Block Jacobian", "Linear CKA"):
        missing, there = found[f"{title}, {names[side]}"], found[f"{title}, {names[1 - side]}"]
        assert "No state was studied." in missing and "<svg" not in missing and "<svg" in there
    assert f"of {names[side]} no state was studied" in shown.about(whole, names)

    whole[side] = replace(
        cases[side],
        studies={name: found for name, found in cases[side].studies.items() if name not in ("lens", "jacobian")},
        notes=["study 'jacobian' left out: its blocks are too large"],
    )
    found = figures_of(shown.studies_shown(whole, names))
    assert f"{names[side]}: this study was not made." in found["Logit lens"]
    assert "Study &#x27;jacobian&#x27; left out: its blocks are too large" in found[f"Block Jacobian, {names[side]}"]


def test_a_probe_that_one_run_lacks_is_told(cases):
    few = synthetic_run.record_of(synthetic_run.probe_rows(DEPTH, 4))
    found = figures_of(page(diagnose(replace(cases[0], record=few, studies={}, state=None)), diagnose(cases[1])))
    assert "left: not recorded" in found["Stable rank"] and "right, at the end" in found["Stable rank"]
    assert "left, at the end" in found["Stream RMS"]


def test_what_was_studied_stands_in_for_what_was_not_recorded(cases):
    few = synthetic_run.record_of(synthetic_run.probe_rows(DEPTH, 4))
    studied = {"probes": {"stable_rank": np.full((DEPTH, 2), 7.0), "embed_rms": 1.0}}
    found = figures_of(page(diagnose(replace(cases[0], record=few, studies=studied))))
    assert "at step 300" in found["Stable rank"]


def test_sites_are_matched_by_name(cases):
    """A block of one site beside one of two: none is taken for another."""
    arrays = {
        name: value[..., :1] if value.ndim == 3 else value for name, value in synthetic_run.probe_rows(DEPTH, 4).items()
    }
    other = replace(cases[1], record=synthetic_run.record_of(arrays), studies={}, start={})
    found = figures_of(page(diagnose(cases[0]), diagnose(other)))
    assert "right: has no such site or role" in found["Update cosine, mlp"]
    assert "left: has no such site or role" in found["Update cosine, block"]
    assert "left, at the end" in found["Stream RMS"] and "right, at the end" in found["Stream RMS"]


def test_runs_of_unlike_depth_share_the_axis(cases):
    deep = case_of(3 * DEPTH, "deep")
    names, runs = ["left", "deep"], [diagnose(cases[0]), diagnose(deep)]
    every = {one.probe: one for *_, members in figures.GROUPS for one in members}
    (rms,) = curves.panels(every["stream_rms"], runs, names)
    assert rms.axis == SHARE and frame_of([rms]).last == 1
    assert [line.places()[[0, -1]].tolist() for line in rms.lines] == [
        pytest.approx([half, 1 - half]) for half in (0.25 / DEPTH, 0.25 / (3 * DEPTH))
    ]
    text = page(*runs)
    pair = [figures_of(text)[f"Block Jacobian, {name}"] for name in names]
    across = [[text for *_, text in scale(one) if text.isdigit() and int(text) > 2] for one in pair]
    assert across == [["3", "4", "5"], ["5", "10", "15"]], "each has its own blocks"
    assert figures_of(text)["Logit lens"].count(SHARE) == 1 and "nan" not in text


@pytest.mark.parametrize("ours", [True, False])
def test_studies_of_unlike_depth_stand_where_probes_stand(cases, ours):
    """Over the share of the depth a block is at its middle, whatever is drawn of it, and the stream between two at their border."""
    runs = [cases[0], case_of(3 * DEPTH, "deep")]
    if not ours:
        runs = [replace(one, config={}, start={}, theory={}) for one in runs]
    depths = (DEPTH, 3 * DEPTH)
    assert [one.depth for one in runs] == list(depths)
    panels = {
        one.title: shown.overlaid([shown.panel_of(one, case) for case in runs], runs, "ab") for one in shown.DRAWINGS
    }
    probes = {one.probe: one for *_, members in figures.GROUPS for one in members}
    (ratio,) = curves.panels(probes["update_ratio_block"], [diagnose(one) for one in runs], "ab")
    for line, middles in zip(ratio.lines, [(np.arange(depth) + 0.5) / depth for depth in depths], strict=True):
        np.testing.assert_allclose(line.places(), middles)
    for title in ("Block influence", "Loss without a block"):
        assert panels[title].axis == SHARE
        for line, of, case in zip(panels[title].lines, ratio.lines, runs, strict=True):
            listed = case.studies["ablation"]["blocks"] if "without" in title else range(case.depth)
            np.testing.assert_allclose(line.places(), of.places()[list(listed)])
    for line, case in zip(panels["Logit lens"].lines, runs, strict=True):
        np.testing.assert_allclose(line.places(), np.asarray(case.studies["lens"]["blocks"]) / case.depth)
    sites = [line for line in panels["Precision replay"].lines if "bfloat16" in line.name]
    for line, depth in zip(sites, depths, strict=True):
        np.testing.assert_allclose(line.places(), (np.arange(2 * depth) + 0.5) / (2 * depth))


def test_of_one_run_nothing_is_said_of_another(cases):
    text = page(diagnose(replace(cases[0], name="zebra")))
    assert not any("zebra" in figure for figure in figures_of(text).values())
    for drawing in shown.DRAWINGS:
        assert told(shown.panel_of(drawing, cases[0])) and drawing.title in figures_of(text)
    assert "bracket depth (chance 0.4)" in text
