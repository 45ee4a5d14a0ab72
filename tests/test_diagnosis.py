"""Does the doctor find what is wrong in constructed runs, say it with its range, and nothing where nothing is?"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthetic_run
from resjax.health.diagnosis import ORDER, REASONS, Case, diagnose, healthy, profiles
from resjax.health.diagnosis.healthy import Healthy, stretched
from resjax.health.diagnosis.page import page
from resjax.health.diagnosis.panels import Line, Panel, Range, drawn, number
from resjax.health.diagnosis.remedies import KINDS, advised
from resjax.health.findings import at_end, at_start

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


def test_nothing_is_found_where_nothing_is_wrong(arrays):
    assert diagnose(case(arrays)).verdict == "healthy"


def test_a_case_without_anything_is_unmeasured():
    from resjax.health.record import HealthRecord

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


def test_a_nan_loss_is_a_fatal_spike_or_divergence_not_left_out(arrays):
    losses = curve(200)
    losses[150:] = np.nan
    assert "loss spikes" in kinds(case(arrays, losses))


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


def test_a_stream_that_outgrows_every_healthy_run_is_steps_too_large(arrays):
    arrays["stream_rms"] *= np.exp(5 * np.minimum(1, np.arange(ROWS) / 10))[:, None, None].astype(np.float32)
    found = next(one for one in diagnose(case(arrays)).findings if one.kind == "steps too large")
    assert 20 < found.since < 100 and "rate 0.003" in found.evidence and found.value > found.range[1]


def start_of(arrays):
    return {name: np.stack([arrays[name][0], 1.2 * arrays[name][0]]) for name in profiles.START_FIGURES}


@pytest.mark.parametrize(
    "probe, factor, kind",
    [("update_rms", 0.05, "small start"), ("update_rms", 20, "large start"), ("stream_rms", 30, "large start")],
)
def test_a_start_that_is_not_the_schemes_own(arrays, probe, factor, kind):
    own = start_of(arrays)
    changed = {**arrays, probe: arrays[probe].copy()}
    changed[probe][0] *= factor
    record = synthetic_run.record_of(changed, every=1)
    found = [one for one in profiles.examined(replace(case(arrays, start=own), record=record)) if "start" in one.kind]
    assert [one.kind for one in found] == [kind] and found[0].figure == probe
    assert found[0].value < found[0].range[0] if factor < 1 else found[0].value > found[0].range[1]


def test_the_schemes_own_start_is_no_finding(arrays):
    assert kinds(case(arrays, start=start_of(arrays))) == []


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
    from resjax.health.record import HealthRecord

    record, names = HealthRecord(), ("mean_error", "signed_error")
    for step in (1, 2, 3):
        keys = jax.random.split(jax.random.key(step), 3)
        kept, update = jax.random.normal(keys[0], (4, 64, 32)), 0.3 * jax.random.normal(keys[1], (4, 64, 32))
        kept = round_to(kept, jnp.bfloat16)
        after = round_to(kept + update, jnp.bfloat16, way, keys[2])
        figures = [precision_figures(update[i], kept[i], after[i]) for i in range(4)]
        record.append(step, {name: np.array([[one[name]] for one in figures]) for name in names})
    assert kinds(Case("adds", record, dtype="bfloat16")) == found


def test_attention_that_sees_one_key_is_saturated(arrays):
    nothing = np.full_like(arrays["update_ratio"], np.nan)
    arrays["attention_entropy"], arrays["attention_largest_logit"] = nothing.copy(), nothing.copy()
    arrays["attention_entropy"][..., 0], arrays["attention_largest_logit"][..., 0] = 0.4, 12
    assert kinds(case(arrays)) == []
    arrays["attention_entropy"][20:, 3, 0], arrays["attention_largest_logit"][20:, 3, 0] = 0.003, 300
    found = only(case(arrays))
    assert (found.kind, found.where, found.since) == ("saturated attention", "attention of block 3", 200)


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


# ---- ranges, remedies, page


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
    assert number(value) == text
