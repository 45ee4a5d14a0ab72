"""Every kind of finding, triggered and not triggered; a healthy run whose ratios leave 0.01-0.1 has none."""

import numpy as np
import pytest

from resjax.health.findings import examine, starts_shut
from resjax.health.record import HealthRecord
from synthetic_run import config_of, probe_rows, record_of


def verdict(arrays, scheme="pre_ln", dtype=None, **residual):
    depth = arrays["finite"].shape[1]
    return examine(record_of(arrays), config_of(depth, scheme, **residual), dtype)


def kinds(result):
    return [finding["kind"] for finding in result["findings"]]


@pytest.fixture
def arrays():
    return probe_rows(depth=8, rows=12)


@pytest.mark.parametrize(
    "scheme",
    ["plain", "post_ln", "pre_ln", "scaled", "rezero", "layerscale", "sandwich_branch", "sandwich_trunk", "deepnorm"],
)
def test_healthy_runs_have_no_findings(scheme):
    assert verdict(probe_rows(8, 12, scheme), scheme) == {"verdict": "healthy", "findings": []}


def test_ratios_outside_the_claimed_band_are_no_finding(arrays):
    arrays["update_ratio"][:, 0] = 24.7
    arrays["update_ratio"][:, 1:] = 0.004
    assert verdict(arrays)["verdict"] == "healthy"


def test_nothing_recorded_is_not_healthy():
    assert examine(HealthRecord()) == {"verdict": "unmeasured", "findings": []}


def test_a_record_without_some_probes_is_examined_for_the_others():
    record = HealthRecord()
    record.append(0, {"token_cosine": np.full((4, 2), 0.99)})
    assert kinds(examine(record)) == ["token collapse"]


def test_findings_are_complete(arrays):
    arrays["stream_max"][3] = 2e4
    (finding,) = verdict(arrays)["findings"]
    said, number = {"kind", "where", "step", "evidence", "advice"}, {"figure", "value", "range", "since"}
    assert set(finding) in (said, said | number) and type(finding["step"]) is int


def test_forward_non_finite_names_the_first_place_in_depth(arrays):
    arrays["finite"][5:, 3:, :] = 0
    arrays["finite"][5, 3, 0] = 1
    arrays["stream_grad"][5:] = np.nan
    (finding,) = verdict(arrays)["findings"]
    assert (
        finding["kind"] == "non-finite value" and finding["where"] == "block 3, mlp, forward" and finding["step"] == 50
    )


def test_backward_non_finite_names_the_last_place_in_depth(arrays):
    arrays["stream_grad"][4, :6] = np.inf
    (finding,) = verdict(arrays)["findings"]
    assert finding["where"] == "block 5, mlp, backward" and finding["step"] == 40


def test_backward_before_forward_gives_both(arrays):
    arrays["stream_grad"][4, 2, 1] = np.nan
    arrays["finite"][6, 7] = 0
    assert [f["where"].rsplit(", ")[-1] for f in verdict(arrays)["findings"]] == ["backward", "forward"]


def test_gradients_that_are_nan_from_the_first_row_are_found(arrays):
    arrays["stream_grad"][:] = np.nan
    assert kinds(verdict(arrays)) == ["non-finite value"]


def test_a_probe_without_value_is_no_accident(arrays):
    arrays["update_cosine"][0] = np.nan  # a zero update has no direction
    arrays["update_ratio"][:, :, 0] = np.nan  # attention without skip
    assert verdict(arrays)["verdict"] == "healthy"


def test_dead_branches_are_named_by_ranges(arrays):
    arrays["update_ratio"][-5:, 4:7, 1] = 5e-4
    arrays["update_ratio"][-5:, 1, 1] = 1e-5
    (finding,) = verdict(arrays)["findings"]
    assert finding["kind"] == "dead branches" and finding["where"] == "mlp of blocks 1, 4-6"
    assert "1e-05 to 0.0005" in finding["evidence"] and "4 of 16 sites" in finding["evidence"]


def test_a_small_ratio_that_recovers_is_not_dead(arrays):
    arrays["update_ratio"][:-5] = 1e-4
    assert verdict(arrays)["verdict"] == "healthy"


@pytest.mark.parametrize(
    ("scheme", "residual"),
    [
        ("rezero", {}),
        ("layerscale", {}),
        ("pre_ln", {"scale": 1e-4}),
        ("pre_ln", {"at": "0-7:scale=0.0001"}),
        ("pre_ln", {"mlp": {"scale": 0.0}}),
    ],
)
def test_branches_that_start_shut_by_design_are_not_dead(arrays, scheme, residual):
    arrays["update_ratio"][:] = 1e-5
    assert kinds(verdict(arrays)) == ["dead branches"]
    assert verdict(arrays, scheme, **residual)["verdict"] == "healthy"


def test_a_branch_that_was_open_and_died_is_dead_in_any_scheme(arrays):
    arrays["update_ratio"][-5:, 2] = 1e-5
    assert kinds(verdict(arrays, "layerscale")) == ["dead branches"]


def test_starting_shut_is_read_from_the_config():
    assert (
        starts_shut({"residual": {"name": "rezero+prores"}})
        and not starts_shut({"residual": {"name": "pre_ln", "scale": 1.0}})
        and not starts_shut({})
    )


@pytest.mark.parametrize(("share", "found"), [(0.2, ["swallowed updates"]), (0.05, [])])
def test_swallowed_updates(arrays, share, found):
    arrays["swallowed"][:, 6:, 0] = share
    result = verdict(arrays, dtype="bfloat16")
    assert kinds(result) == found
    if found:
        assert (
            "bfloat16" in result["findings"][0]["evidence"]
            and result["findings"][0]["where"] == "attention of blocks 6-7"
        )


def test_fields_are_named_to_those_who_have_them(arrays):
    arrays["swallowed"][:, 6:, 0], arrays["stream_max"][-1, 2] = 0.2, 1e5
    arrays["update_ratio"][:, 3, 1] = 1e-5
    fields = ("precision.stream=float32", "init.out_scale", "residual.at")
    ours = str(verdict(arrays, dtype="bfloat16"))
    theirs = str(examine(record_of(arrays), {"model": {"depth": 8}}, "bfloat16"))
    assert all(field in ours for field in fields) and not any(field in theirs for field in fields)
    assert "in float32; scaling" in theirs and "output init, a branch" in theirs


@pytest.mark.parametrize(
    ("last", "before", "found"), [(0.99, 0.1, ["token collapse"]), (0.97, 0.97, []), (0.1, 0.995, [])]
)
def test_token_collapse_is_read_in_the_last_blocks(arrays, last, before, found):
    arrays["token_cosine"][:, :-1] = before
    arrays["token_cosine"][:, -1] = last
    assert kinds(verdict(arrays)) == found


def test_token_collapse_says_since_when_and_forgives_a_start(arrays):
    arrays["token_cosine"][:4] = 0.99
    assert verdict(arrays)["verdict"] == "healthy"
    arrays["token_cosine"][6:] = 0.99
    assert [f["step"] for f in verdict(arrays)["findings"]] == [60]


@pytest.mark.parametrize(
    ("size", "dtype", "found", "words"),
    [(1.2e4, "float32", 1, "1.2e+04"), (4e4, "float16", 1, "65504"), (9e3, "float16", 0, "")],
)
def test_stream_blow_up(arrays, size, dtype, found, words):
    arrays["stream_max"][7, 2, 1] = size
    findings = verdict(arrays, dtype=dtype)["findings"]
    assert len(findings) == found
    if found:
        assert (
            findings[0]["kind"] == "stream blow-up"
            and findings[0]["where"] == "block 2, mlp"
            and words in findings[0]["evidence"]
        )
        assert findings[0]["step"] == 70


@pytest.mark.parametrize(("low", "found"), [(1e-6, ["gradient spread"]), (0.0, ["gradient spread"]), (1e-3, [])])
def test_gradient_spread(arrays, low, found):
    arrays["stream_grad"][:, 0, 0] = low
    result = verdict(arrays)
    assert kinds(result) == found
    if found:
        assert result["findings"][0]["where"].startswith("block 0, attention (smallest)")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_record_of_one_block_and_few_rows(rows):
    assert verdict(probe_rows(1, rows))["verdict"] == "healthy"
