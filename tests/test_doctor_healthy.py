"""Does the doctor find nothing wrong with the runs of the healthy set, looking at all that is kept of them?

That is their probes, ranks and attention among them, their starts, and of the studies on their last states all that findings read.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import runs
from benchmarks import healthy as kept
from resjax.health.diagnosis import Case, diagnose
from resjax.health.diagnosis import healthy as known

KEPT = sorted(kept.KEPT.glob("*.json"))


@cache
def case_of(path: Path) -> Case:
    return kept.case_of_kept(json.loads(path.read_text(), parse_constant=float))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_no_false_alarm_on_a_healthy_run(path, monkeypatch):
    """Each is compared with the others: its own place in the set is left out. With its start by theory, and as measured."""
    others = tuple(run for run in known.runs() if run.label != path.stem)
    monkeypatch.setattr(known, "runs", lambda: others)
    case = case_of(path)
    for one in (case, replace(case, theory={})):
        found = diagnose(one).findings
        assert not found, [(one.kind, one.where, one.evidence) for one in found]


def test_the_healthy_set_is_large_and_various_and_is_what_is_kept():
    assert len(KEPT) >= 10 and len({run.scheme for run in known.runs()}) >= 6
    schemes = {run.scheme for run in known.runs()}
    page = (runs.ROOT / "docs" / "doctor.md").read_text()
    assert f"{len(known.runs())} committed runs of {len(schemes)} schemes" in page
    assert known.PATH.read_text() == kept.text_of(kept.the_set())
    for run in known.runs():
        assert run.facts["eval_loss"] < run.facts["bigram"] and np.isfinite(run.end["stream_rms"]).all()


def test_what_findings_say_of_healthy_attention_is_so():
    ends = [run.end["attention_entropy"] for run in known.runs()]
    assert min(np.nanmin(end) for end in ends) > 0.62 and max(np.nanmin(end) for end in ends) < 0.97
    assert max(np.nanmax(run.end["attention_largest_logit"]) for run in known.runs()) < 20


def test_what_the_page_says_of_healthy_states_is_so():
    cases = [case_of(path) for path in KEPT]
    of = lambda study, figure: [np.array(case.studies[study][figure], float) for case in cases]  # noqa: E731
    largest = max(np.nanmax(a / b) for a, b in zip(of("massive", "largest"), of("massive", "median"), strict=True))
    assert 15 < largest < 16
    assert max(abs(case.studies["rounding"]["formats"]["bfloat16"]["loss"]) for case in cases) < 2e-4
    assert not np.any(np.concatenate(of("ablation", "dead"))) and 0 < min(map(np.min, of("ablation", "delta"))) < 6e-4
    ranks = [case.record["effective_rank"][-1] for case in cases]
    assert 12 < min(map(np.min, ranks)) < 13


def test_what_findings_say_of_healthy_gradients_is_so():
    ends = [run.end["stream_grad"] for run in known.runs()]
    assert 20 < max(np.nanmax(end) / np.nanmin(end) for end in ends) < 25


def test_all_that_findings_read_is_kept_of_healthy_runs():
    for case in map(case_of, KEPT):
        assert set(case.studies) == set(kept.STUDIED), case.name
        # of a history, and of several streams, there is no one stream that a block changes
        assert set(kept.READ) - set(case.record) <= {"update_ratio_block"}, case.name
        for name in ("effective_rank", "rank_collapse", "token_cosine_centred", "residual_frobenius"):
            assert np.isfinite(case.record[name][-1]).all(), (case.name, name)


def test_of_healthy_runs_the_starts_are_looked_at():
    """By theory wherever there is one, and as measured."""
    cases = [case_of(path) for path in KEPT]
    assert all("similarity" in case.studies and (case.start or case.theory) for case in cases)
    assert sum("update_rms" in case.theory for case in cases) >= 15


def test_draws_and_theory_of_a_start_lie_as_close_as_the_margin_around_it_says():
    compared = 0
    for case in map(case_of, KEPT):
        for name, drawn in case.start.items():
            there = np.isfinite(drawn).all(axis=0)
            low, high = drawn.min(axis=0), drawn.max(axis=0)
            assert (high[there] <= 1.6 * low[there]).all(), f"{case.name}, {name}"
            if name in case.theory:
                measured, (curve, _) = drawn.mean(axis=0), case.theory[name]
                np.testing.assert_array_less(measured, 1.5 * curve + 1e-12, f"{case.name}, {name}")
                np.testing.assert_array_less(curve, 1.5 * measured + 1e-12, f"{case.name}, {name}")
                compared += 1
    assert compared >= 45


def test_with_one_thing_changed_a_healthy_run_is_healthy_no_more():
    """So that what is not found above could be found."""
    case = case_of(kept.KEPT / "pre_ln_12_bfloat16_stream.json")
    ones = np.ones(12)
    ablation, massive = case.studies["ablation"], case.studies["massive"]
    assert diagnose(case).findings == []
    scaled = lambda factor: {name: (factor * values, said) for name, (values, said) in case.theory.items()}  # noqa: E731
    changes = {
        "large start": replace(case, theory=scaled(0.1)),
        "small start": replace(case, theory=scaled(10)),
        "idle depth": studied(case, ablation={**ablation, "dead": ones}),
        "harmful blocks": studied(case, ablation={**ablation, "delta": -0.1 * ones}),
        "late layers alike": studied(case, similarity={"late": 1e-3}),
        "massive activations": studied(case, massive={**massive, "largest": 1e4 * ones}),
        "costly rounding": studied(case, rounding={"formats": {"bfloat16": {"loss": 0.05}}}),
    }
    for kind, changed in changes.items():
        assert [one.kind for one in diagnose(changed).findings] == [kind], kind


def studied(case: Case, **studies) -> Case:
    return replace(case, studies={**case.studies, **studies})
