"""Does the doctor find and name faults that are planted in real runs?"""

import numpy as np
import pytest

import planted
import runs
from planted import at_block, everywhere
from resjax.checkup import case_of
from resjax.health.diagnosis import diagnose

SLOW = pytest.mark.slow
# what is planted, and the kinds, each with this in its place, that have to be among the findings
FAULTS = {
    "dead block": (dict(change=at_block(5, 0.0, "branch")), "dead branches", "attention of block 5; mlp of block 5"),
    "output x30": (dict(change=at_block(6, 30.0, "sites/1/branch/write")), "rewriting layers", "mlp of block 6"),
    "skips off": (dict(residual__name="plain"), ("token collapse", "rank collapse"), "11"),
    "skips of a half, branches shut": (
        dict(residual__name="rezero", residual__skip=0.5),
        ("vanishing stream", "gradient spread"),
        "block",
    ),
    "large embedding, bfloat16 stream": (
        dict(change=everywhere(100.0, "embed"), precision__stream="bfloat16"),
        "swallowed updates",
        "attention of blocks 0",
    ),
    "attention logits x100": (dict(change=everywhere(10.0, "qkv")), "saturated attention", "attention of block"),
    "rate too high without warm-up": (
        dict(optimizer__lr=0.3, optimizer__warmup=0, optimizer__clip=0),
        "steps too large",
        "most sites",
    ),
    "init ten times too small": (dict(init__gain=0.055), "small start", "most sites"),
    "embedding a hundred times too large": (dict(init__embed_gain=100.0), "large start", "most sites"),
    "one branch 30 times as fast": (
        dict(faster=("sites/1/branch", 4, 30.0), health__groups="all"),
        "uneven steps",
        "block 4",
    ),
    "the same, by the default groups": (dict(faster=("sites/1/branch", 4, 30.0)), "rewriting layers", "mlp of block 4"),
}
QUICK = ("output x30", "skips off")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in FAULTS])
def test_a_planted_fault_is_found_and_named(name, tmp_path):
    plant, kinds, where = FAULTS[name]
    with runs.quick():
        folder = planted.trained(tmp_path, **plant)
        found = diagnose(case_of(str(folder), studies=("probes",))).findings
    told = [(one.kind, one.where) for one in found]
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        assert any(one.kind == kind and where in one.where for one in found), told


CUT = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from resjax.health.arithmetic import round_to
from resjax.residual import CATALOGUE, OneStream
from resjax.residual.precision import exact
from resjax.residual.streams import One


@dataclass(frozen=True)
class Cutting(OneStream):
    def build(self, width, site, norms, key):
        return CuttingSite()


class CuttingSite(One):
    def write(self, stream, memo, update, around):
        after, flow = super().write(stream, memo, update, around)
        cut = round_to(exact(flow.kept) + exact(flow.update), after.dtype, "truncating").astype(after.dtype)
        after = after - jax.lax.stop_gradient(after) + jax.lax.stop_gradient(cut)  # the gradient of the sum
        return after, flow._replace(after=after)


CUT = CATALOGUE["pre_ln"].but(name="cut", carry=Cutting())
"""


@pytest.mark.parametrize(("add", "found"), [("truncating", ["biased adds"]), ("rounding", [])])
def test_a_run_whose_adds_truncate_is_told_from_one_whose_adds_round(add, found, tmp_path):
    """A10, in bfloat16 streams, by what the run recorded and by what a study of its last state sees."""
    (tmp_path / "own.py").write_text(CUT)
    name = f"{tmp_path / 'own.py'}:CUT" if add == "truncating" else "pre_ln"
    with runs.quick():
        fields = {"precision__stream": "bfloat16", "health__groups": "forward,precision", "train__eval_every": 0}
        assert runs.run(runs.calm(tmp_path), tmp_path / "run", residual__name=name, **fields) == 0
        case = case_of(str(tmp_path / "run"), studies=("probes",), start=False)
    biased = [one for one in diagnose(case).findings if one.kind == "biased adds"]
    assert [one.kind for one in biased] == found
    studied = {key: np.asarray(case.studies["probes"][key]) for key in ("signed_error", "mean_error")}
    recorded = {key: case.end(key) for key in studied}
    for figures in (studied, recorded):
        share = figures["signed_error"] / figures["mean_error"]
        assert (share < -0.95).all() if found else (abs(share) < 0.3).all()
    for one in biased:
        assert one.where == "attention of blocks 0-1; mlp of blocks 0-1" and one.figure == "signed_error"
        assert -0.004 < one.value < -0.002 and "truncating" in one.advice


@SLOW
def test_an_unplanted_run_of_the_same_kind_has_no_findings(tmp_path):
    with runs.quick():
        folder = planted.trained(tmp_path)
        assert diagnose(case_of(str(folder), studies=("probes", "similarity", "massive"))).findings == []
