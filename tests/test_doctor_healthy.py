"""Does the doctor find nothing wrong with the runs of the healthy set, looking at all that it looks at in a run of today?"""

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


def test_of_healthy_runs_all_is_looked_at():
    """The start of each, by theory wherever there is one; and of enough of them every study that a finding reads."""
    cases = [case_of(path) for path in KEPT]
    assert all(np.isfinite(case.start["stream_rms"]).all() and "similarity" in case.studies for case in cases)
    assert sum("stream_rms" in case.theory for case in cases) >= 15
    studied = [case for case in cases if set(kept.STUDIED) <= set(case.studies)]
    assert len(studied) >= LEAST and len({case.scheme for case in studied}) >= LEAST - 1
    assert all("effective_rank" in case.record and "token_cosine_centred" in case.record for case in studied)
    assert any(case.dtype == "bfloat16" for case in studied)


LEAST = 6


def test_with_one_thing_changed_a_healthy_run_is_healthy_no_more():
    """So that what the test above does not find could be found."""
    case = case_of(kept.KEPT / "pre_ln_12_bfloat16_stream.json")
    ablation, massive, rounding = (case.studies[name] for name in ("ablation", "massive", "rounding"))
    blocks = len(ablation["blocks"])
    scaled = lambda factor: {name: (factor * values, said) for name, (values, said) in case.theory.items()}  # noqa: E731
    measured = {name: 0.1 * drawn for name, drawn in case.start.items()}
    changes = {
        "large start": (replace(case, theory=scaled(0.1)), replace(case, theory={}, start=measured)),
        "small start": (replace(case, theory=scaled(10)),),
        "idle depth": (studied(case, ablation={**ablation, "dead": [True] * blocks}),),
        "harmful blocks": (studied(case, ablation={**ablation, "delta": [-0.1] * blocks}),),
        "late layers alike": (studied(case, similarity={"late": 1e-3}),),
        "massive activations": (studied(case, massive={**massive, "largest": [1e4] * blocks}),),
        "costly rounding": (studied(case, rounding={**rounding, "formats": {"bfloat16": {"loss": 0.05}}}),),
    }
    for kind, changed in changes.items():
        assert all([one.kind for one in diagnose(one).findings] == [kind] for one in changed), kind


def studied(case: Case, **studies) -> Case:
    return replace(case, studies={**case.studies, **studies})
