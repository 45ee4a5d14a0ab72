"""Do layers run after one another in training? How far their mean outputs move, and whether a layer moves against the one before it.

All of it looks at a model in training, on 4,096 tokens of held-out text (J: on its first two batches). h_l is the stream after block
l, o_l what the block puts out: h_l itself where it has no skip, h_l - h_(l-1) where it has. E is the mean over tokens.

    drift (C31)   |E o_l(t) - E o_l(t - 50)| / |E o_l(t - 50)|, median over the blocks
    chase (C30)   mean over l of cos(E[J_(l+1)] d_l, d_(l+1)),   d_l = E o_l(t) - E o_l(t - 10),

J_(l+1) being the Jacobian of what block l + 1 puts out by the stream before it, at step t, all tokens moved alike. Below 0: a block's
output moves against what the move of the block before it would do to it. d_(l+1) contains what J passes on, which is no answer to it;
``own`` is the same cosine with d_(l+1) - E[J_(l+1)] d_l, what block l + 1 changed itself.
"""

from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.studies import STUDIES, Subject
from resjax.residual import Flow

SOON, LATER = 10, 50  # steps between two looks, for chase and drift
STEPS = tuple(
    step
    for last in range(100, 601, 50)
    for step in ((last, last + SOON) if last % 100 == 0 and last < 600 else (last,))
)
SHALLOWEST = 12  # blocks
FEW = 2  # batches of held-out text that a Jacobian is taken over
LATE = 2 / 3  # of the depth: from there on layers are late


def look(subject: Subject, before: Any) -> dict[str, Any]:
    """Of a full Pre-LN network and one without skips what is said above; at the end of any run, how alike its late layers are."""
    found: dict[str, Any] = {}
    if subject.step == subject.config.train.steps and subject.depth > 2:
        found |= alike(subject)
    if (skip := skips(subject.config)) is None or subject.step not in STEPS:
        return found
    means = outputs(subject, skip)
    kept = {} if before is None else before
    if (then := kept.get(str(subject.step - LATER))) is not None:
        found |= {f"drift_{name}": drift(means[name], then[name]) for name in means}
    if (then := kept.get(str(subject.step - SOON))) is not None:
        found |= chase(subject, means["output"] - then["output"], skip)
    recent = {step: one for step, one in kept.items() if int(step) > subject.step - LATER}
    return found | {"_memory": recent | {str(subject.step): means}}


def skips(config: Any) -> bool | None:
    """Whether a Pre-LN network has its skips; None of any other."""
    residual, model = config.residual, config.model
    usual = {residual.attention.skip, residual.mlp.skip, residual.scale} == {None}
    if residual.name != "pre_ln" or model.norm == "none" or model.depth < SHALLOWEST or not usual:
        return None
    return {None: True, 0.0: False}.get(residual.skip)


def outputs(subject: Subject, skip: bool) -> dict[str, np.ndarray]:
    """Means over all tokens: 'output' of every block, 'stream' after it, (depth, width)."""
    rows = list(subject.measured(_means))
    before, after = (np.asarray([row[name] for row in rows], np.float64).mean(axis=0) for name in ("before", "after"))
    return {"output": after[:, -1] - before[:, 0] if skip else after[:, -1], "stream": after[:, -1]}


def _means(flow: Flow) -> dict[str, jax.Array]:
    """Of the stream before and after a site, (width,)."""
    return {"before": _mean(flow.before), "after": _mean(flow.after)}


def drift(now: np.ndarray, then: np.ndarray) -> float:
    """Median over the blocks of how far a mean has moved, by its length; (depth, width) each."""
    return float(np.median(np.linalg.norm(now - then, axis=1) / np.linalg.norm(then, axis=1)))


def chase(subject: Subject, moved: np.ndarray, skip: bool) -> dict[str, float]:
    """Cosines as above, means over neighbours; ``moved`` (depth, width) is by how much each block's mean output has."""
    passed = passed_on(subject, moved[:-1], skip)
    return {
        "chase": float(np.mean(cosines(passed, moved[1:]))),
        "own": float(np.mean(cosines(passed, moved[1:] - passed))),
    }


def passed_on(subject: Subject, moved: np.ndarray, skip: bool) -> np.ndarray:
    """E[J_(l+1)] d_l for l = 1 to depth - 1, (depth - 1, width): how the output of block l + 1 moves if all before it is moved by d_l."""
    walk, total, count = subject.walk, np.zeros_like(moved), 0
    for state, _ in islice(subject.opened(), FEW):
        count += 1
        for place, by in enumerate(moved, 1):
            state = walk.to(state, place)
            tangent = jnp.broadcast_to(jnp.asarray(by, state.stream.dtype), state.stream.shape)
            after = walk.push(state, (tangent, jax.tree.map(jnp.zeros_like, state.side)))[0]
            total[place - 1] += np.asarray(_mean(after), np.float64) - (by if skip else 0)
    return total / count


@jax.jit
def _mean(stream: jax.Array) -> jax.Array:
    """(B, T, D) -> (D,)."""
    return jnp.mean(stream, axis=(0, 1))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of rows with one another; NaN where one of them is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def alike(subject: Subject) -> dict[str, float]:
    """How alike the streams between late blocks are: the median angle (in pi) and CKA of any two in the last third of the depth.

    CKA is NaN where all tokens have become the same, so that there is nothing to compare.
    """
    found = STUDIES["similarity"].run(subject)
    late = [i for i, point in enumerate(found["blocks"]) if point >= LATE * subject.depth]
    pairs = [found["cka"][i, j] for i in late for j in late if i < j]
    return {"late_angle": found["late"], "late_cka": float(np.median(pairs)) if pairs else np.nan}
