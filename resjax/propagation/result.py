"""What is the result of a study of propagation? Profiles by depth with their spread over seeds, theory beside them, strict JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from resjax import __version__
from resjax.config.tree import to_dict
from resjax.health.record import site_names
from resjax.models.lm import KINDS
from resjax.propagation.cases import Case
from resjax.propagation.closed import Curve
from resjax.propagation.folder import COMMAND
from resjax.propagation.measured import ENDS, SITE, Measured, moving
from resjax.propagation.theory import curves
from resjax.residual import Init
from resjax.residual.outer import Dropped
from resjax.train.writers import to_json

VERSION = 1
DIGITS = 6  # float32 has no more
WHAT = {
    "stream_rms": "root mean square of the stream after the site",
    "update_rms": "root mean square of the update as added",
    "update_ratio": "token mean of |update| / |what it is added to|",
    "update_cosine": "token mean of the cosine between update and what it is added to",
    "token_cosine": "mean cosine between two tokens of a sequence, of the stream after the site",
    "token_cosine_centred": "the same after the mean over all tokens is taken out",
    "participation_ratio": "(sum lambda)^2 / sum lambda^2 of the tokens' covariance about their mean",
    "stable_rank": "sum lambda / max lambda of the same",
    "finite": "1 if stream and update are finite",
    "stream_grad": "norm of dLoss/d(stream after the site), loss in nats per token",
}


@dataclass(frozen=True, eq=False)
class Profile:
    """One quantity at every site, over seeds: (depth, sites) each.

    Attributes:
      mean, sd: mean and sample standard deviation (0 for one seed); not finite where any seed is not.
      low, high: smallest and largest.
    """

    mean: np.ndarray
    sd: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False)
class Depth:
    """What was found at one depth of a scheme.

    Attributes:
      depth, sites: blocks, and names of a block's sites.
      profiles, ends: by name of ``SITE`` and of ``ENDS`` (of shape () there).
      theory: curves, relative ones brought to the measured last site.
      no_mean_field: why there is none; empty where there is.
      nonfinite: sentences that name the first value that is not finite, forward and backward.
      measured: for the seconds.
    """

    depth: int
    sites: tuple[str, ...]
    profiles: dict[str, Profile]
    ends: dict[str, Profile]
    theory: list[Curve]
    no_mean_field: str
    nonfinite: list[dict[str, Any]]
    measured: Measured


@dataclass(frozen=True, eq=False)
class Study:
    """What was found of one scheme, by depth, and what a reader must know of it."""

    case: Case  # of the last depth
    depths: list[Depth]
    notes: list[str]


def study(cases: Sequence[Case], found: Sequence[Measured]) -> Study:
    depths = [_depth(case, one) for case, one in zip(cases, found, strict=True)]
    return Study(cases[-1], depths, notes(cases[-1]))


def notes(case: Case) -> list[str]:
    """What the numbers are of, a sentence each."""
    said = [
        f"{case.batch} x {case.length} random tokens of {case.parts.vocab} and {len(case.seeds)} seeds "
        f"(from {case.seeds[0]}), the same at every depth; a rank is at most "
        f"{min(case.config.model.width, case.batch * case.length - 1)}"
    ]
    if moved := moving(case):
        said.append(f"{', '.join(moved)} of this scheme moves with training: the values are those of step 0")
    if case.parts.scheme.calibrate:
        said.append("skip gains are set from the batch before it is measured, as before training")
    if case.config.model.dropout or _drops(case):
        said.append("dropout and stochastic depth draw, as in the first step of training")
    return said


def _drops(case: Case) -> bool:
    scheme = case.parts.scheme
    sites = [site for run in scheme.runs(KINDS, case.depth) for site in run.sites]
    return isinstance(scheme.outer, Dropped) or any(site.drop != 0.0 for site in sites)


def profile(values: np.ndarray) -> Profile:
    """(seeds, ...) -> mean, spread and range over seeds."""
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        sd = wide.std(axis=0, ddof=1) if len(wide) > 1 else np.where(np.isfinite(wide[0]), 0.0, np.nan)
        return Profile(wide.mean(axis=0), sd, wide.min(axis=0), wide.max(axis=0))


def _depth(case: Case, found: Measured) -> Depth:
    profiles = {name: profile(found.sites[name]) for name in SITE}
    ends = {name: profile(found.ends[name]) for name in ENDS}
    start = case.config.init
    init = Init(start.kind, start.std, start.gain, start.out_scale, start.embed_gain)
    theory, why = curves(case.parts.scheme, case.parts.shape, init, case.length)
    last = profiles["stream_grad"].mean[-1, -1]
    theory = [replace(curve, values=curve.values * last) if curve.relative else curve for curve in theory]
    names = site_names(profiles["stream_rms"].mean.shape[1])
    return Depth(case.depth, names, profiles, ends, theory, why, nonfinite(found, names), found)


def nonfinite(found: Measured, names: Sequence[str]) -> list[dict[str, Any]]:
    """The first value that is not finite on the way up, and the first on the way down: block, site, what, in how many seeds."""
    rows = []
    forward, backward = found.sites["finite"] != 1, ~np.isfinite(found.sites["stream_grad"])
    for direction, bad in (("forward", forward), ("backward", backward)):
        flat = bad.reshape(len(bad), -1)
        where = np.flatnonzero(flat.any(axis=0))
        if not len(where):
            continue
        first = int(where[0] if direction == "forward" else where[-1])
        block, pos = divmod(first, len(names))
        values = found.sites["stream_rms" if direction == "forward" else "stream_grad"][:, block, pos]
        bad_values = values[~np.isfinite(values)]
        kind = "inf" if np.isinf(bad_values).any() or not len(bad_values) else "nan"
        rows.append(
            {
                "direction": direction,
                "block": block,
                "site": names[pos],
                "value": kind,
                "seeds": int(flat[:, first].sum()),
            }
        )
    if not np.isfinite(found.ends["loss"]).all():
        bad_seeds = int((~np.isfinite(found.ends["loss"])).sum())
        rows.append({"direction": "loss", "block": None, "site": None, "value": "nan", "seeds": bad_seeds})
    return rows


def told(row: dict[str, Any], seeds: int) -> str:
    """One of :func:`nonfinite` as a sentence."""
    among = f"in {row['seeds']} of {seeds} seeds"
    if row["direction"] == "loss":
        return f"the loss is not finite {among}"
    what = "stream or update" if row["direction"] == "forward" else "gradient at the stream"
    way = "first" if row["direction"] == "forward" else "first on the way down"
    return f"{what} is not finite ({row['value']}) {way} at block {row['block']}, {row['site']}, {among}"


def as_json(studies: Iterable[Study], left_out: Sequence[tuple[str, str]], config: str) -> dict[str, Any]:
    """Everything, as strict JSON can hold it."""
    return {
        "command": COMMAND,
        "version": VERSION,
        "resjax": __version__,
        "config": config,
        "step": 0,
        "quantities": WHAT,
        "schemes": [_study(one) for one in studies],
        "left_out": [{"scheme": name, "why": why} for name, why in left_out],
    }


def text_of(found: dict[str, Any]) -> str:
    return json.dumps(to_json(found), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _study(found: Study) -> dict[str, Any]:
    case, fields = found.case, to_dict(found.case.config)
    del fields["model"]["depth"]  # of which there are several
    return {
        "scheme": case.name,
        "equation": case.parts.scheme.equation,
        "paper": case.parts.scheme.paper,
        "tokens": {
            "batch": case.batch,
            "length": case.length,
            "vocab": case.parts.vocab,
            "drawn": "evenly from the vocabulary",
        },
        "seeds": list(case.seeds),
        "notes": found.notes,
        "fields": fields,
        "depths": [
            {
                "depth": one.depth,
                "sites": list(one.sites),
                "profiles": {name: _profile(value) for name, value in one.profiles.items()},
                "ends": {name: _profile(value) for name, value in one.ends.items()},
                "theory": [_curve(curve) for curve in one.theory],
                "no_mean_field": one.no_mean_field or None,
                "nonfinite": one.nonfinite,
            }
            for one in found.depths
        ],
    }


def _profile(found: Profile) -> dict[str, Any]:
    return {name: rounded(getattr(found, name)) for name in ("mean", "sd", "low", "high")}


def _curve(curve: Curve) -> dict[str, Any]:
    names = ("quantity", "name", "source", "holds", "departs", "relative")
    return {name: getattr(curve, name) for name in names} | {"values": rounded(curve.values)}


def rounded(values: np.ndarray) -> Any:
    """Nested lists of numbers of ``DIGITS`` digits."""
    if np.ndim(values) == 0:
        return float(f"{float(values):.{DIGITS}g}")
    return [rounded(value) for value in values]
