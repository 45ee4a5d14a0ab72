"""What is wrong with the residual stream of a run? Pure functions from the recorded probes to a verdict.

The ratio band 0.01 to 0.1 that is often called healthy is not a criterion: well trained models leave it at both ends.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from resjax.health.collapse import below_bigram, rank_collapse, token_collapse
from resjax.health.reading import Finding, at_end, at_sites, at_start, first_row, measured, said, since, span
from resjax.health.record import HealthRecord

# An update a thousand times smaller than the stream turns it by 0.06 degrees: without it next to nothing changes.
DEAD_RATIO = 1e-3
# A bfloat16 add loses 2 % of the elements at a ratio of 0.1 and 17 % at 0.01; what it stores is off by as much.
SWALLOWED_SHARE = 0.1
# Trained streams hold a few large elements (thousands); beyond this half precision nears its end.
LARGEST = 1e4
# One more doubling and the stream overflows.
NEAR_LIMIT = 0.5
# One learning rate cannot serve gradients a thousandfold apart; healthy runs of the doctor's set stay within a factor of 25.
GRADIENT_SPREAD = 1e3
# Schemes whose branches start (nearly) shut on purpose.
STARTS_SHUT = frozenset({"rezero", "layerscale", "skipinit", "zero_init", "fixup", "prores", "branchnorm"})
# How far above a dead branch most of them have to be, before those still shut are said to be dead.
OPENED = 10.0
SCALE_FIELDS = ("scale", "at")

NON_FINITE = "non-finite value"
REPLAY, REPLAY_TOO = "Replay this step with everything on;", "; replay this step."
_NAMED_FIELDS = re.compile(r" \((?:residual\.at|(?:init|model|precision|health)\.\w+(?:=\w+)?(?:, )?)+\)")
BACKWARD = ("stream_grad", "param_grad_block", "embed_grad")


def examine(
    record: HealthRecord,
    config: Mapping[str, Any] | None = None,
    stream_dtype: str | None = None,
    losses: Sequence[float] = (),
    bigram: float | None = None,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """The verdict on a run, as ``summary.json`` holds it.

    Args:
      record: the probes; kinds of finding whose probe is absent are not looked for.
      config: the run's resolved fields (nested, as in ``config.json``); tells which branches start shut by design. Empty for a model
        that is not resjax's own, whatever its folder says of it.
      stream_dtype: dtype of the stream in the running program; by default as recorded, as configured, or float32.
      losses: of training, as logged.
      bigram: baseline of the run's data, in nats per token.
      state, step: as for :func:`looked_for`.

    Returns:
      ``{"verdict": "healthy" | "findings" | "unmeasured", "findings": [...]}``. A finding is ``{"kind", "where",
      "step", "evidence", "advice"}``, all strings but ``step``: the recorded step it speaks of; and, where one number says
      it, ``{"figure", "value", "range", "since"}``: name and worst value of what was measured, the pair of bounds that it
      should keep (None = open), and the step since which it does not. "unmeasured" means that not one step was recorded.
    """
    if not len(record):
        return {"verdict": "unmeasured", "findings": []}
    found = looked_for(record, config or {}, stream_dtype, state, step, below_bigram(losses, bigram))
    findings = [{k: v for k, v in one.items() if k != "at"} for one in found]
    return {"verdict": "findings" if findings else "healthy", "findings": findings}


def looked_for(
    record: HealthRecord,
    config: Mapping[str, Any],
    stream_dtype: str | None = None,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    apart: str = "",
) -> list[Finding]:
    """The findings of :func:`examine`, each with ``at``, the sites (block, site) that it speaks of, where it names some.

    Args:
      state: probes of a state that was studied, which say of tokens what the record does not.
      step: of that state; by default the last recorded one.
      apart: what shows besides that tokens reach the head apart, in words.
    """
    dtype = dtype_of(record, config, stream_dtype)
    width = record.stream.width or section(config, "model").get("width")
    state = state or {}
    step = step if step is not None else int(record.steps[-1]) if len(record) else 0
    found = [
        non_finite(record),
        stream_blow_up(record, dtype),
        token_collapse(record, state, step, apart),
        rank_collapse(record, state, step, width),
        gradient_spread(record),
        dead_branches(record, config),
        swallowed_updates(record, dtype),
    ]
    findings = [finding for group in found for finding in group]
    if not section(config, "residual").get("name"):
        findings = [finding | {"advice": for_any_model(finding["advice"])} for finding in findings]
    return findings


def dtype_of(record: HealthRecord, config: Mapping[str, Any], known: str | None = None) -> str:
    """The stream's dtype: as known of the running program, else as recorded, as configured, or float32."""
    return str(known or record.stream.dtype or section(config, "precision").get("stream") or "float32")


def for_any_model(advice: str) -> str:
    """Without the fields of a resjax configuration that stand in brackets, and without replay: a model that is not ours has neither."""
    for replay, instead in ((f"{REPLAY} l", "L"), (REPLAY_TOO, ".")):
        advice = advice.replace(replay, instead)
    return _NAMED_FIELDS.sub("", advice)


def bad_cells(record: HealthRecord, name: str) -> np.ndarray:
    """Where ``name`` is non-finite through the run, not because the scheme has no such thing: bool, the array's shape.

    NaN of a forward probe counts where stream or update were not finite (``finite`` is 0): a cosine with a zero update
    has no value and is no accident. NaN of a gradient always counts, except at places that never have one.
    """
    values = record[name]
    never = np.isnan(values).all(axis=0, keepdims=True)
    accident = np.zeros(values.shape, bool)
    if name in BACKWARD:
        accident = np.isnan(values) & ~(never & np.isfinite(values).any())
        accident &= record.recorded(name).reshape(-1, *[1] * (values.ndim - 1))
    elif "finite" in record and values.ndim > 1:
        broken = np.asarray(record["finite"] < 1)
        if broken.shape != values.shape:  # one value a block, or one a block and role
            broken = np.any(broken, axis=2, keepdims=values.ndim == 3)
        accident = np.isnan(values) & ~never & broken
    return np.isinf(values) | accident


def non_finite(record: HealthRecord) -> list[Finding]:
    """The first step with a NaN or an infinity and where it arose: first in depth going forward; and, if an earlier
    step had a finite forward pass but not a finite gradient, last in depth going backward.
    """
    forward = record["finite"] < 1 if "finite" in record else None
    backward = next((bad_cells(record, name) for name in BACKWARD[:2] if name in record), None)
    first_forward, first_backward = first_row(forward), first_row(backward)
    findings = []
    if (
        backward is not None
        and first_backward is not None
        and (first_forward is None or first_backward < first_forward)
    ):
        advice = (
            "The forward pass was finite, so the gradient itself overflowed or divided by zero: lower the loss scale "
            "(float16), clip, and look for norms of all-zero tokens or saturated softmaxes at this place"
            f"{REPLAY_TOO}"
        )
        findings.append(
            _non_finite_at(record, backward[first_backward], -1, "backward", record.steps[first_backward], advice)
        )
    if forward is not None and first_forward is not None:
        advice = (
            f"{REPLAY} look at the largest magnitudes of the rows before it. Usual "
            "causes: a learning rate too high, a float16 stream or branch (limit 65,504), a missing norm; try "
            "bfloat16 or a float32 stream, clipping, a longer warm-up."
        )
        findings.append(
            _non_finite_at(record, forward[first_forward], 0, "forward", record.steps[first_forward], advice)
        )
    return findings


def located(health: Mapping[str, Any], nonfinite: Mapping[str, Any] | None) -> dict[str, Any]:
    """The verdict with the first non-finite value, as it was found operation by operation, in the finding of that step.

    Args:
      nonfinite: ``{"step", "where", "replay"}`` in words, and ``first``, what was found, or None.
    """
    if not nonfinite or not nonfinite["where"]:
        return dict(health)
    step, first = nonfinite["step"], nonfinite.get("first")
    findings = [dict(finding) for finding in health["findings"]]
    mine = [finding for finding in findings if (finding["kind"], finding["step"]) == (NON_FINITE, step)]
    if not mine:
        mine = [said(NON_FINITE, "", step, "", "")]
        findings = mine + findings
    mine[0]["where"] = first["where"] if first else mine[0]["where"] or "not located"
    mine[0]["evidence"] = "; ".join(filter(None, (nonfinite["where"], mine[0]["evidence"])))
    mine[0]["advice"] = f"{nonfinite['replay']} runs this step again. {mine[0]['advice']}".strip()
    return {**health, "verdict": "findings", "findings": findings}


def _non_finite_at(
    record: HealthRecord, cells: np.ndarray, which: int, direction: str, step: Any, advice: str
) -> Finding:
    place = np.argwhere(cells)[which]
    site = f", {record.site_names(cells.shape[1])[place[1]]}" if cells.ndim == 2 else ""
    evidence = (
        f"the first place to go wrong; non-finite in this step: {int(cells.sum())} of {cells.size} places measured "
        f"{direction}"
    )
    return said(NON_FINITE, f"block {place[0]}{site}, {direction}", step, evidence, advice)


def dead_branches(record: HealthRecord, config: Mapping[str, Any]) -> list[Finding]:
    """Branches whose update is below ``DEAD_RATIO`` of the stream at the end, unless they started there by design."""
    if "update_ratio" not in record:
        return []
    ratio = record["update_ratio"]
    end = at_end(ratio)
    dead = end < DEAD_RATIO
    if starts_shut(config):  # a branch that is still shut is dead where most of its kind have opened
        opened = np.nanmedian(np.where(np.isfinite(end), end, 0.0), axis=0) >= OPENED * DEAD_RATIO
        dead &= ~(at_start(ratio) < DEAD_RATIO) | opened
    if not dead.any():
        return []
    below = ratio < DEAD_RATIO
    steps = np.array([record.steps[since(below[:, block, site])] for block, site in np.argwhere(dead)])
    when = f"since step {steps.min()}" + (f", all since step {steps.max()}" if steps.max() > steps.min() else "")
    evidence = f"update/stream ratio {span(end[dead])} at the end, below {DEAD_RATIO:g} {when}"
    advice = (
        "Test whether they matter: fork the run with their scale at 0 (residual.at) and compare the held-out loss. "
        "If they do not, the depth is wasted: a smaller stream (embedding, norm gain), a larger branch scale or "
        "output init, layer-norm scaling, or fewer blocks."
    )
    found = measured("update_ratio", end[dead].min(), (DEAD_RATIO, None), steps.min())
    return at_sites("dead branches", dead, record, evidence, advice, found)


def swallowed_updates(record: HealthRecord, dtype: str) -> list[Finding]:
    """Sites where the stream's precision loses more than ``SWALLOWED_SHARE`` of the update's elements at the end."""
    if "swallowed" not in record:
        return []
    end = at_end(record["swallowed"])
    lost = end > SWALLOWED_SHARE
    evidence = f"{span(100 * end[lost])} % of the update's elements leave no trace in the {dtype} stream"
    advice = (
        "Keep the stream in float32 (precision.stream=float32); scaling stream and updates together by a power of "
        "two cannot help."
        if dtype != "float32"
        else "Even float32 loses these updates: the stream is far too large against them; look at the embedding's "
        "size, the branch scale and the norms."
    )
    if not lost.any():
        return []
    rows = record["swallowed"][:, lost] > SWALLOWED_SHARE
    found = measured("swallowed", end[lost].max(), (0.0, SWALLOWED_SHARE), record.steps[since(rows.all(axis=1))])
    return at_sites("swallowed updates", lost, record, evidence, advice, found)


def stream_blow_up(record: HealthRecord, dtype: str) -> list[Finding]:
    """An element of the stream beyond ``LARGEST``, or near the end of the stream's dtype, at any recorded step."""
    if "stream_max" not in record:
        return []
    largest = np.where(np.isfinite(record["stream_max"]), record["stream_max"], 0.0)
    limit = _largest_number(dtype)
    bound = min(LARGEST, NEAR_LIMIT * limit)
    row = first_row(largest > bound)
    if row is None:
        return []
    peak = np.unravel_index(int(largest.argmax()), largest.shape)
    names = record.site_names(largest.shape[2])
    value = float(largest[peak])
    where = f"block {peak[1]}, {names[peak[2]]}"
    evidence = (
        f"largest magnitude {value:.3g} at step {record.steps[peak[0]]}; beyond {bound:g} since step "
        f"{record.steps[row]}"
    )
    if value > NEAR_LIMIT * limit:
        evidence += f"; {dtype} ends at {limit:.5g}"
    advice = (
        "Give the stream float32 or bfloat16 range; bound its growth: smaller output init (init.out_scale), a branch "
        "scale below 1, a norm on the branch's output (sandwich_branch) or on the trunk, weight decay; look whether "
        "a few features carry it (massive activations)."
    )
    found = measured("stream_max", value, (None, bound), record.steps[row])
    return [said("stream blow-up", where, record.steps[row], evidence, advice) | found]


def gradient_spread(record: HealthRecord) -> list[Finding]:
    """The gradient at the stream differs over depth by more than ``GRADIENT_SPREAD`` at the end."""
    if "stream_grad" not in record:
        return []
    end = at_end(record["stream_grad"])
    known = np.isfinite(end)
    if not known.any() or not end[known].max() > GRADIENT_SPREAD * end[known].min():
        return []
    names = record.site_names(end.shape[1])
    low = np.unravel_index(int(np.where(known, end, np.inf).argmin()), end.shape)
    high = np.unravel_index(int(np.where(known, end, -np.inf).argmax()), end.shape)
    where = f"block {low[0]}, {names[low[1]]} (smallest) to block {high[0]}, {names[high[1]]} (largest)"
    spread, factor = "down to exactly 0", np.inf
    if end[low] > 0:
        factor = end[high] / end[low]
        spread = f"{factor:.2g}-fold" if factor < 100 else f"{factor:,.0f}-fold"
    evidence = f"gradient at the stream {end[low]:.2g} to {end[high]:.2g}, {spread}, above {GRADIENT_SPREAD:g}"
    advice = (
        "Small at the input: gradients vanish on the way down (no skip, a skip below 1, a norm on the trunk of a "
        "deep stack): keep the skip at 1, use pre_ln or deepnorm. Large at the input: branches without norm or with "
        "large output init: scale them by 1/sqrt(2 depth)."
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        flat = record["stream_grad"].reshape(len(record), -1)
        spreads = np.where(np.isfinite(flat), flat, -np.inf).max(axis=1) / np.where(
            np.isfinite(flat), flat, np.inf
        ).min(axis=1)
    found = measured("stream_grad", factor, (None, GRADIENT_SPREAD), record.steps[since(spreads > GRADIENT_SPREAD)])
    return [said("gradient spread", where, record.steps[-1], evidence, advice) | found]


def starts_shut(config: Mapping[str, Any]) -> bool:
    """Whether the config says that branches start (nearly) shut: by its scheme, or by an override of their scale."""
    residual = section(config, "residual")
    if STARTS_SHUT & set(str(residual.get("name", "")).split("+")):
        return True
    parts = [residual, *(section(residual, kind) for kind in ("attention", "mlp"))]
    return any(
        part.get(field) not in (None, "", 1.0) and "scale" in f"{field} {part.get(field)}"
        for part in parts
        for field in SCALE_FIELDS
    )


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping called ``name`` in a mapping; empty where there is none."""
    value: Any = config.get(name)
    return value if hasattr(value, "items") else {}


def _largest_number(dtype: str) -> float:
    """The largest finite number of a float dtype called ``dtype``."""
    return float(ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype, dtype))).max)
