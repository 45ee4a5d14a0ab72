"""Does the doctor find what is wrong in constructed runs, say it with its range, and nothing where nothing is?"""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthetic_run
from resjax.config.load import load
from resjax.config.tree import to_dict
from resjax.health.diagnosis import ORDER, REASONS, Case, Finding, diagnose, healthy, starts
from resjax.health.diagnosis.healthy import Healthy, stretched
from resjax.health.diagnosis.page import page
from resjax.health.diagnosis.panels import Line, Panel, Range, drawn, tick_text
from resjax.health.diagnosis.remedies import KINDS, advised
from resjax.health.diagnosis.told import lines
from resjax.health.reading import at_end, at_start, end_named
from resjax.health.record import HealthRecord
from resjax.health.series import spike_steps

ROOT = Path(__file__).parent.parent
DEPTH, ROWS = 12, 31


@pytest.fixture
def arrays():
    return synthetic_run.probe_rows(DEPTH, ROWS)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The healthy set: one run like the synthetic ones."""
    record = synthetic_run.record_of(synthetic_run.probe_rows(DEPTH, ROWS, seed=1))
    profile = {name: at_end(record[name]) for name in record}
    first = {name: at_start(record[name]) for name in record}
    run = Healthy("synthetic", "pre_ln", DEPTH, first, profile, {"late": 0.05}, {})
    monkeypatch.setattr(healthy, "runs", lambda: (run,))


def case(arrays, losses=None, **more):
    rows = [{"step": 10 * i, "loss": float(loss)} for i, loss in enumerate(losses if losses is not None else curve())]
    summary = {"baselines": synthetic_run.BASELINES}
    config = synthetic_run.config_of(DEPTH)
    return Case("synthetic", synthetic_run.record_of(arrays), config, rows, summary, **more)


def curve(count=100):
    noise = np.random.default_rng(0).normal(0, 0.01, count)
    return 2.2 + 3.3 * np.exp(-np.arange(count) / 15) + noise


def kinds(case_):
    return [one.kind for one in diagnose(case_).findings]


def only(case_):
    (found,) = diagnose(case_).findings
    return found


@pytest.mark.parametrize("rows, end", [(1, 0), (2, 1), (3, 1.5), (5, 2.5), (6, 3), (20, 17)])
def test_the_end_is_the_median_of_the_last_rows_without_the_first(rows, end):
    """A value that counts the rows from 0: of a short record the start is no part of the end."""
    steps = np.arange(rows) + 1
    values = np.arange(rows, dtype=np.float32)[:, None, None] * np.ones((3, 2), np.float32)
    assert (at_end(values) == end).all() and (at_start(values) == 0).all()
    first, last = max(1, rows - 5) + 1, rows
    assert end_named(steps) == (f"median of steps {first} to {last}" if last > first else f"step {last}")
    gap = np.concatenate([np.full_like(values, np.nan), values, np.full_like(values, np.nan)])
    assert (at_end(gap) == end).all(), "rows without a value do not count"


def test_nothing_is_found_where_nothing_is_wrong(arrays):
    assert diagnose(case(arrays)).verdict == "healthy"


def test_a_case_without_anything_is_unmeasured():
    empty = Case("nothing", HealthRecord())
    assert diagnose(empty).verdict == "unmeasured" and "nothing to look at" in page(diagnose(empty))


def test_every_kind_has_its_place_its_remedies_and_those_of_examine_their_reason():
    assert set(ORDER) == set(KINDS) and set(REASONS) <= set(ORDER)


# ---- the loss


def test_a_diverging_loss_is_told_with_the_recipe(arrays):
    found = only(case(arrays, np.linspace(3, 5, 100)))
    assert found.kind == "diverging loss" and "rate 0.003" in found.evidence and "warm-up 50" in found.evidence
    assert found.value > found.range[1] == pytest.approx(3.05) and found.since == 30


def test_spikes_are_one_finding_with_their_outcomes(arrays):
    losses = curve(400)
    losses[100:103] += 2
    losses[300:302] += 1
    found = only(case(arrays, losses))
    assert found.kind == "loss spikes" and "2 (2 recovered)" in found.evidence and found.since == 1000
    assert found.where == "steps 1000, 3000" or found.where.startswith("steps 10")


def test_the_score_is_told_and_lengths_are_of_the_run(arrays):
    """M7: 7 deviations from the mean of a tenth of the run; a tenth of it is the time to come back; 10 steps make two spikes one."""
    losses = curve(400)
    losses[200], losses[202] = losses[200] + 3, losses[202] + 3
    found = only(with_steps(case(arrays, losses), 3991))
    share = 100 * len(spike_steps(losses, every=10)) / 400
    assert (
        "2 (2 recovered)" in found.evidence and f"spike score {share:.2g} % of the 400 logged losses" in found.evidence
    )
    assert share == 0.25  # the second is not seen beside the first
    losses[200:] += 3  # does not come back
    assert "1 (1 fatal)" in only_kind(with_steps(case(arrays, losses), 3991), "loss spikes").evidence
    assert "1 (1 not over)" in only_kind(with_steps(case(arrays, losses), 39910), "loss spikes").evidence


def with_steps(case_, steps):
    config = {**case_.config, "train": {**case_.config["train"], "steps": steps}}
    return replace(case_, config=config)


def only_kind(case_, kind):
    (found,) = [one for one in diagnose(case_).findings if one.kind == kind]
    return found


def test_a_nan_loss_is_a_fatal_spike_or_divergence_not_left_out(arrays):
    losses = curve(200)
    losses[150:] = np.nan
    assert "loss spikes" in kinds(case(arrays, losses))


def gone_past(case_, step, **config):
    """The run met something that is not finite, and went on or not."""
    met = {"step": step, "where": "block 3, mlp: NaN", "replay": "python -m resjax.replay RUN", "first": None}
    return replace(case_, nonfinite=[met], config=case_.config | config)


def test_what_comes_after_a_step_that_a_run_went_past_is_no_consequence_of_it(arrays):
    arrays["update_ratio"][:, 5] = 1e-5
    arrays["update_ratio"][:15, 5] = 0.05
    stopped = gone_past(case(arrays), 7)
    assert kinds(stopped) == ["non-finite value"]
    went_on = gone_past(case(arrays), 7, train={"on_nonfinite": "skip", "steps": 300})
    found = diagnose(went_on).findings
    assert [one.kind for one in found] == ["non-finite value", "dead branches"]
    assert "went on without it" in found[0].reason
    two = replace(went_on, nonfinite=[*went_on.nonfinite, went_on.nonfinite[0] | {"step": 90}])
    assert diagnose(two).findings[0].step == 7


def test_of_a_model_that_is_not_ours_nobody_says_that_a_step_was_not_applied(arrays):
    arrays["finite"][20:, 3] = 0
    foreign = replace(case(arrays), config={})
    found = next(one for one in diagnose(foreign).findings if one.kind == "non-finite value")
    assert (
        "does not say" in found.reason
        and "eplay" not in found.advice
        and found.advice.startswith("Look at the largest")
    )


def test_a_loss_on_the_unigram_line_is_told_since_when(arrays):
    floor = synthetic_run.BASELINES["unigram"]
    losses = np.concatenate([np.linspace(5.5, floor, 40), np.full(60, floor + 0.005)])
    found = only(case(arrays, losses))
    assert found.kind == "token frequencies only" and 300 <= found.since <= 400


def test_few_losses_tell_nothing(arrays):
    assert kinds(case(arrays, np.linspace(3, 5, 10))) == []


# ---- profiles


def test_a_site_far_above_its_neighbours_rewrites(arrays):
    arrays["update_ratio"][15:, 6, 1] *= 30
    found = only(case(arrays))
    assert (found.kind, found.where, found.since) == ("rewriting layers", "mlp of block 6", 150)
    assert found.value > found.range[1] and "healthy run of pre_ln" in found.source


def test_a_site_that_the_configuration_makes_loud_rewrites_too(arrays):
    """What is asked for is in the scheme's own start, and is told all the same."""
    arrays["update_ratio"][:, 6, 1] *= 30
    own = start_of(arrays)
    assert [(one.kind, one.where) for one in diagnose(case(arrays, start=own)).findings] == [
        ("rewriting layers", "mlp of block 6")
    ]


def test_the_first_block_of_pre_ln_may_be_large(arrays):
    arrays["update_ratio"][:, 0, 1] = 3 * arrays["update_ratio"][:, 1, 1]
    assert kinds(case(arrays)) == []


def test_a_site_that_shakes_while_the_others_have_settled(arrays):
    arrays["update_ratio"][:, 4, 0] *= np.exp(np.random.default_rng(2).normal(0, 0.6, ROWS))
    found = only(case(arrays))
    assert (found.kind, found.where) == (
        "restless layers",
        "attention of block 4",
    ) and "does not settle" in found.evidence


def test_a_site_that_rises_while_the_others_fall(arrays):
    smooth = synthetic_run.probe_rows(DEPTH, ROWS)
    falling = np.exp(-0.6 * np.linspace(0, 1, ROWS))[:, None, None]
    smooth["update_ratio"] = (smooth["update_ratio"][-1:] * falling).astype(np.float32)
    smooth["update_ratio"][:, 7, 1] /= (falling[:, 0, 0]) ** 2.5
    found = only(case(smooth))
    assert (found.kind, found.where) == ("restless layers", "mlp of block 7") and "rises while" in found.evidence


@pytest.mark.parametrize(
    "rising, falling, found",
    [
        ([(2, 0), (7, 1)], (0, 1), "attention of block 2; mlp of block 7"),
        ([(2, 0)], (0,), "attention of block 2"),
        ([(2, 0)], (1,), ""),  # of its own kind the others are still
        ([(block, 1) for block in range(DEPTH)], (0,), ""),  # and here they rise too
        ([], (0, 1), ""),
    ],
)
def test_what_rises_is_told_by_site_beside_its_own_kind(arrays, rising, falling, found):
    done = np.linspace(0, 1, ROWS)[:, None]
    ratio = np.repeat(arrays["update_ratio"][-1:], ROWS, 0).astype(np.float64)
    for site in falling:
        ratio[..., site] *= np.exp(-0.6 * done)
    for block, site in rising:
        ratio[:, block, site] = ratio[0, block, site] * np.exp(0.9 * done[:, 0])
    arrays["update_ratio"] = ratio.astype(np.float32)
    told = [one for one in diagnose(case(arrays)).findings if one.kind == "restless layers"]
    assert [one.where for one in told] == ([found] if found else [])
    assert all(one.figure == "trend of the update ratio" and one.value > one.range[1] for one in told)


def test_a_stream_that_outgrows_every_healthy_run_is_steps_too_large(arrays):
    arrays["stream_rms"] *= np.exp(5 * np.minimum(1, np.arange(ROWS) / 10))[:, None, None].astype(np.float32)
    found = next(one for one in diagnose(case(arrays)).findings if one.kind == "steps too large")
    assert 20 < found.since < 100 and "rate 0.003" in found.evidence and found.value > found.range[1]


def test_of_a_stream_that_few_updates_make_too_large_these_are_named(arrays):
    grown = np.geomspace(1, 300, ROWS)
    arrays["update_rms"][:, 4, 1] *= grown
    arrays["stream_rms"][:, 4, 1] *= grown
    arrays["stream_rms"][:, 5:] *= grown[:, None, None]
    found = only_kind(case(arrays), "steps too large")
    assert found.where == "mlp of block 4" and "these sites alone" in found.evidence and found.at.sum() == 1
    arrays["update_rms"][:] *= grown[:, None, None]
    assert only_kind(case(arrays), "steps too large").where == "most sites"


def start_of(arrays):
    return {name: np.stack([arrays[name][0], 1.2 * arrays[name][0]]) for name in starts.START_FIGURES}


@pytest.mark.parametrize(
    "probe, factor, kind",
    [("update_rms", 0.05, "small start"), ("update_rms", 20, "large start"), ("stream_rms", 30, "large start")],
)
def test_a_start_that_is_not_the_schemes_own(arrays, probe, factor, kind):
    own = start_of(arrays)
    changed = {**arrays, probe: arrays[probe].copy()}
    changed[probe][0] *= factor
    record = synthetic_run.record_of(changed, every=1)
    found = starts.examined(replace(case(arrays, start=own), record=record))
    assert [one.kind for one in found] == [kind] and found[0].figure == probe
    assert found[0].value < found[0].range[0] if factor < 1 else found[0].value > found[0].range[1]


def test_a_start_without_any_updates_is_told_without_a_factor(arrays):
    own = start_of(arrays)
    silent = {**arrays, "update_rms": np.zeros_like(arrays["update_rms"])}
    (found,) = starts.examined(replace(case(arrays, start=own), record=synthetic_run.record_of(silent, every=1)))
    assert found.kind == "small start" and found.value == 0 and "inf" not in found.evidence
    assert re.search(r" 0 at the start \(median over sites\), 0\.\d+ under the ordinary init", found.evidence)


def test_theory_is_the_range_of_a_start_where_there_is_one(arrays):
    """Else what was measured; and the page says which it was."""
    measured = {name: 100 * drawn for name, drawn in start_of(arrays).items()}  # out of range by itself
    theory = {
        name: (1.4 * arrays[name][0].astype(np.float64), "mean field; Somebody 2020") for name in starts.START_FIGURES
    }
    record = synthetic_run.record_of(arrays, every=1)
    made = replace(case(arrays, start=measured), record=record)
    assert "as measured" in starts.examined(made)[0].source
    assert starts.examined(replace(made, theory=theory)) == []
    part = replace(made, theory={"update_rms": theory["update_rms"]})
    assert [one.figure for one in starts.examined(part)] == ["stream_rms"]
    text = page(diagnose(part))
    assert "start by its closed form, changed" in text and "start as measured, changed" in text
    changed = {**arrays, "update_rms": arrays["update_rms"].copy()}
    changed["update_rms"][0] /= 10
    far = replace(made, record=synthetic_run.record_of(changed, every=1), theory=theory)
    (found,) = starts.examined(far)
    assert found.kind == "small start" and "closed form" in found.source and "Somebody 2020" in found.source


def test_the_schemes_own_start_is_no_finding(arrays):
    assert kinds(case(arrays, start=start_of(arrays))) == []


def grown(arrays, factor, rows=slice(None)):
    """The stream's RMS with a slope over depth: the last site's is ``factor`` times what it was."""
    slope = np.geomspace(1, factor, 2 * DEPTH).reshape(DEPTH, 2)
    arrays["stream_rms"] = arrays["stream_rms"].copy()
    arrays["stream_rms"][rows] *= slope.astype(np.float32)
    return arrays


@pytest.mark.parametrize("factor, kind", [(1e-4, "vanishing stream"), (1e3, "exploding stream")])
def test_a_stream_that_vanishes_or_explodes_over_depth(arrays, factor, kind):
    own = start_of(arrays)
    found = only_kind(case(grown(arrays, factor), start=own), kind)
    assert "mlp of blocks" in found.where and "-11" in found.where and "block 0, attention" in found.evidence
    low, high = found.range
    assert found.value < low if kind == "vanishing stream" else found.value > high
    assert found.at[-1].all() and not found.at[0].any() and "the start" in found.source


def test_a_profile_is_told_since_it_is_out_of_range(arrays):
    own = start_of(arrays)
    found = only_kind(case(grown(arrays, 1e-4, slice(20, None)), start=own), "vanishing stream")
    assert found.since == 200 and "at the end" in found.evidence


def test_a_start_that_explodes_is_told_though_training_mends_it(arrays):
    own = start_of(arrays)
    record = synthetic_run.record_of(grown(arrays, 3e3, slice(0, 1)), every=1)
    found = only_kind(replace(case(arrays, start=own), record=record), "exploding stream")
    assert "at the start" in found.evidence and found.step == found.since == 0


def test_growth_that_is_the_schemes_own_is_none(arrays):
    own = start_of(grown(arrays, 5e-3))
    assert not {"vanishing stream", "exploding stream"} & {*kinds(case(arrays, start=own))}
    assert not {"vanishing stream", "exploding stream"} & {*kinds(case(grown(arrays, 2e5), start=start_of(arrays)))}


def test_skips_that_the_configuration_changes_are_no_guide(arrays):
    """Its own start vanishes alike, and is told all the same; of a model that is not ours the stream may grow by any factor."""
    own = start_of(grown(arrays, 1e-4))
    made = case(arrays, start=own)
    changed = replace(made, config=synthetic_run.config_of(DEPTH, skip=0.5))
    assert only_kind(changed, "vanishing stream").range[0] == 0.01
    theirs = replace(case(grown(arrays, 1e7)), config={}, start={})
    assert "exploding stream" not in kinds(theirs)
    vanished = replace(case(grown(arrays, 1e-12)), config={}, start={})
    assert "vanishing stream" in kinds(vanished)


def test_a_stream_without_a_size_has_no_profile(arrays):
    arrays["stream_rms"][:] = 0
    assert not {"vanishing stream", "exploding stream"} & {*kinds(case(arrays))}
    arrays["stream_rms"][:] = np.nan
    assert not {"vanishing stream", "exploding stream"} & {*kinds(case(arrays))}


def test_adds_that_lose_to_one_side_are_biased(arrays):
    for name, value in (("mean_error", 2e-3), ("signed_error", -1.9e-3)):
        arrays[name] = np.full_like(arrays["update_ratio"], value)
    assert kinds(case(arrays)) == ["biased adds"]
    arrays["signed_error"][:] = 2e-5
    assert kinds(case(arrays)) == []


@pytest.mark.parametrize("way, found", [("truncating", ["biased adds"]), ("nearest", []), ("stochastic", [])])
def test_a_truncating_add_is_told_from_a_rounding_one(way, found):
    """A12: two streams of real adds, one rounded to nearest, one cut off."""
    from resjax.health.metrics import precision_figures, round_to

    record, names = HealthRecord(), ("mean_error", "signed_error")
    for step in (1, 2, 3):
        keys = jax.random.split(jax.random.key(step), 3)
        kept, update = jax.random.normal(keys[0], (4, 64, 32)), 0.3 * jax.random.normal(keys[1], (4, 64, 32))
        kept = round_to(kept, jnp.bfloat16)
        after = round_to(kept + update, jnp.bfloat16, way, keys[2])
        figures = [precision_figures(update[i], kept[i], after[i]) for i in range(4)]
        record.append(step, {name: np.array([[one[name]] for one in figures]) for name in names})
    assert kinds(Case("adds", record, dtype="bfloat16")) == found


def with_attention(arrays, entropy, logit):
    nothing = np.full_like(arrays["update_ratio"], np.nan)
    arrays["attention_entropy"], arrays["attention_largest_logit"] = nothing.copy(), nothing.copy()
    arrays["attention_entropy"][..., 0], arrays["attention_largest_logit"][..., 0] = entropy, logit
    return arrays


def test_attention_that_sees_one_key_is_saturated(arrays):
    with_attention(arrays, 0.4, 12)
    assert kinds(case(arrays)) == []
    arrays["attention_entropy"][20:, 3, 0], arrays["attention_largest_logit"][20:, 3, 0] = 0.1, 300
    found = only(case(arrays))
    assert (found.kind, found.where, found.since) == ("saturated attention", "attention of block 3", 200)


def test_an_entropy_near_0_is_a_collapse_whatever_the_logits(arrays):
    with_attention(arrays, 0.4, 12)
    arrays["attention_entropy"][15:, 3:5, 0] = 0.06
    assert kinds(case(arrays)) == []
    arrays["attention_entropy"][15:, 3:5, 0] = 0.01
    arrays["attention_entropy"][15:, 4, 0] = 0.002
    found = only(case(arrays))
    assert (found.kind, found.where, found.since) == ("entropy collapse", "attention of blocks 3-4", 150)
    assert found.value < 0.0021 < found.range[0] and "2 of 12 attentions" in found.evidence
    arrays["attention_largest_logit"][15:, 3, 0] = 900
    assert kinds(case(arrays)) == ["entropy collapse", "saturated attention"]
    state = {name: arrays[name][-1] for name in ("attention_entropy", "attention_largest_logit")}
    bare = {name: value for name, value in arrays.items() if name not in state}
    assert kinds(case(bare, studies={"probes": state}, state=300)) == ["entropy collapse", "saturated attention"]


def test_uniform_attention_is_a_fault_where_it_is_everywhere_and_stays(arrays):
    made = with_steps(case(with_attention(arrays, 0.999, 0.1)), 300)
    found = only(made)
    assert (found.kind, found.since) == ("uniform attention", 0) and found.value > found.range[1]
    assert kinds(with_steps(made, 1000)) == []  # early in a run attention is as it started
    assert kinds(replace(made, config={})) == []  # nor is it known how far a model that is not ours has come
    arrays["attention_entropy"][:, 7, 0] = 0.9  # one that has learned where to look
    assert kinds(with_steps(case(arrays), 300)) == []


def test_branches_that_never_opened_are_dead_where_the_others_have(arrays):
    ratio = arrays["update_ratio"]
    ratio[0] = 0
    ratio[:, 5, 1] = 0
    made = case(arrays)
    made = replace(made, config=synthetic_run.config_of(DEPTH, "rezero"))
    assert [(one.kind, one.where) for one in diagnose(made).findings] == [("dead branches", "mlp of block 5")]


# ---- studies


def test_idle_depth_harmful_blocks_and_late_layers_alike(arrays):
    delta = np.full(DEPTH, 0.05)
    blocks = np.arange(DEPTH)
    dead = np.zeros(DEPTH, bool)
    ablation = {"delta": delta, "blocks": blocks, "dead": dead, "effective_depth": 12.0}
    similarity = {"late": 0.04, "blocks": np.arange(DEPTH + 1)}
    studies = {"ablation": ablation, "similarity": similarity}
    assert states_found(arrays, studies) == []
    dead[4:10] = True
    assert states_found(arrays, studies) == ["idle depth"]
    dead[:] = False
    delta[3] = -0.1
    assert states_found(arrays, studies) == ["harmful blocks"]
    delta[3] = 0.05
    assert states_found(arrays, studies | {"similarity": {**similarity, "late": 0.002}}) == ["late layers alike"]


def states_found(arrays, studies, **more):
    from resjax.health.diagnosis import states

    return [one.kind for one in states.examined(case(arrays, studies=studies, state=300, **more))]


def test_massive_activations_and_costly_rounding(arrays):
    study = {name: np.ones(DEPTH) for name in ("largest", "median", "feature", "position")}
    assert states_found(arrays, {"massive": study}) == []
    study["largest"][6] = 5000
    assert states_found(arrays, {"massive": study}) == ["massive activations"]
    rounding = {"loss": 2.0, "formats": {"bfloat16": {"loss": 0.05}, "float16": {"loss": 0.0}}}
    assert states_found(arrays, {"rounding": rounding}, dtype="bfloat16") == ["costly rounding"]
    assert states_found(arrays, {"rounding": rounding}, dtype="float16") == []
    assert states_found(arrays, {"rounding": rounding}) == []
    overflow = {"loss": 2.0, "formats": {"float16": {"loss": np.nan}}}
    assert states_found(arrays, {"rounding": overflow}, dtype="float16") == ["costly rounding"]


# ---- the rule of 0.01 to 0.1


def test_the_rule_is_held_against_the_findings_site_by_site(arrays):
    ratio = arrays["update_ratio"]
    ratio[:] = ratio / ratio.mean(axis=0) * 0.05  # all inside
    ratio[:, 2, 0] *= 6  # above, and no finding
    ratio[:, 3, 1] = 5e-4  # below, and dead
    ratio[15:, 6, 1] *= 400  # above, and rewriting
    ratio[:, 8, 0] *= np.exp(np.random.default_rng(2).normal(0, 0.6, ROWS)) * 0.9  # inside, and restless
    diagnosis = diagnose(case(arrays))
    assert {one.kind for one in diagnosis.findings} == {"dead branches", "rewriting layers", "restless layers"}
    found = diagnosis.claimed
    assert (found["below"], found["inside"], found["above"], found["agrees"]) == (1, 21, 2, 22)
    assert found["outside_without_finding"] == "attention of block 2"
    assert found["inside_with_finding"] == "attention of block 8"
    words = "it agrees with the findings at 22 of 24 sites, and does not at those outside without a finding: attention of block 2"
    said = "\n".join(lines(diagnosis))
    assert (
        "1 sites below, 21 inside, 2 above" in said
        and words in said
        and "inside with a finding: attention of block 8" in said
    )
    assert words in page(diagnosis)


def test_where_the_rule_agrees_everywhere_no_site_is_named(arrays):
    arrays["update_ratio"][:] = arrays["update_ratio"] / arrays["update_ratio"].mean(axis=0) * 0.05
    diagnosis = diagnose(case(arrays))
    assert diagnosis.claimed["agrees"] == 24 and "at 24 of 24 sites." in "\n".join(lines(diagnosis))
    arrays["update_ratio"][:] = np.nan
    assert diagnose(case(arrays)).claimed is None


# ---- ranges, remedies, page


def test_the_page_of_the_doctor_tells_of_every_kind():
    """A row each, and none of a kind that does not exist."""
    text = (ROOT / "docs" / "doctor.md").read_text()
    rows = text[text.index("| finding |") :].partition("\n\n")[0].splitlines()[2:]
    told = [name.strip() for row in rows for name in row.split("|")[1].split(",")]
    assert sorted(told) == sorted(ORDER)


def test_profiles_are_stretched_by_share_of_depth():
    profile = np.exp(np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    wide = np.log(stretched(profile, 5, 2))
    assert np.allclose(wide[:, 0], [0, 1, 2, 3, 4]) and np.allclose(wide[:, 1], [1, 2, 3, 4, 5])
    assert np.isnan(stretched(profile, 5, 1)).all()


def test_remedies_keep_what_the_run_has_and_go_on_from_before_the_trouble(arrays):
    made = replace(
        case(arrays, np.linspace(3, 5, 100)), saved=(10, 20, 100), config=synthetic_run.config_of(DEPTH, "post_ln")
    )
    advice = advised(made, diagnose(made).findings)
    commands = {one.what: one.command for one in advice}
    assert "--from=@20" in commands["a third of the learning rate"].replace(f"--from={made.path}", "--from=")
    assert "--config.optimizer.lr=0.001" in commands["a third of the learning rate"]
    assert "--from" not in commands["the norm before the branch"]
    pre_ln = replace(made, config=synthetic_run.config_of(DEPTH, "pre_ln"))
    assert "the norm before the branch" not in {one.what for one in advised(pre_ln, diagnose(pre_ln).findings)}
    assert len({one.what for one in advice}) == len(advice)


def test_every_kind_has_remedies_with_a_source_that_a_configuration_takes(tmp_path):
    spec = tmp_path / "half.py"
    spec.write_text(
        "from resjax.config import default\n\n\n"
        "def get_config():\n    config = default()\n    config.residual.skip = 0.5\n    return config\n"
    )
    config = to_dict(load(str(spec), ()))
    for kind, remedies in KINDS.items():
        changes = {remedy.what: remedy.change(config) for remedy in remedies}
        assert any(changes.values()), kind
        for overrides in changes.values():
            load(str(spec), overrides)
        assert all(re.search(r"\d{4}", remedy.source) for remedy in remedies), kind
    finding = Finding("vanishing stream", "block 3", 20, "it does")
    made = Case("half", HealthRecord(), config, saved=(10, 50), path=str(spec))
    first, *_ = advised(made, [finding, replace(finding, kind="entropy collapse", since=30)])
    assert first.overrides == (("residual.skip", "1"),) and first.command.endswith(
        f"--config={spec} --config.residual.skip=1"
    )
    (slower,) = [
        one for one in advised(made, [replace(finding, kind="entropy collapse", since=30)]) if "rate" in one.what
    ]
    assert f"--from={spec}@10" in slower.command and "--config.optimizer.lr=" in slower.command


def test_no_remedies_without_a_configuration(arrays):
    made = replace(case(arrays, np.linspace(3, 5, 100)), config={})
    assert diagnose(made).findings and not diagnose(made).advice


def test_the_page_escapes_names_and_asks_nothing_of_the_network(arrays):
    arrays["update_ratio"][:, 6, 1] *= 30
    made = replace(case(arrays), name="<script>alert(1)</script>", path="a b/run")
    text = page(diagnose(made))
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "url(" not in text
    assert "--config=&#x27;a b/run&#x27;" not in text or "sandwich" in text


def test_of_two_runs_both_are_told_and_drawn(arrays):
    other = {name: value.copy() for name, value in arrays.items()}
    other["update_ratio"][:, 6, 1] *= 30
    text = page(diagnose(replace(case(arrays), name="left")), diagnose(replace(case(other), name="right")))
    assert "left: no findings" in text and "right: 1 finding" in text and "right, at the end" in text


@pytest.mark.parametrize("depth", [1, 2, 1000])
def test_panels_of_any_depth(depth):
    values = np.linspace(1, 2, depth)
    text = drawn(
        Panel(
            "A & B", "unit", "what", [Line("x", values, "late")], log=True, ranges=[Range(values / 2, values * 2, "so")]
        )
    )
    assert "A &amp; B" in text and "nan" not in text and len(text) < 60_000


def test_panels_of_constant_and_of_broken_values():
    for values in (np.zeros(4), np.full(4, np.nan), np.array([1.0, np.nan, np.inf, 1e30]), np.full(4, -3.0)):
        for log in (False, True):
            assert "nan" not in drawn(Panel("t", "u", "w", [Line("x", values, "late")], log=log))


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.05, "0.05"),
        (-1.5, "\u22121.5"),
        (1e-6, "10\u207b\u2076"),
        (2e7, "2\u00b710\u2077"),
        (12345, "12345"),
    ],
)
def test_ticks(value, text):
    assert tick_text(value) == text
