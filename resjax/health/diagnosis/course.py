"""What does the course of the loss say is wrong? Divergence, spikes, a loss that learned frequencies only."""

import numpy as np

from resjax.health.collapse import below_bigram
from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.findings import section
from resjax.health.reading import since
from resjax.health.series import ENOUGH, TAIL, in_whole_run, last_loss, spacing, spike_episodes, spike_score

DIVERGED = 0.05  # nats above the first loss, from which a run has diverged
NEAR_FLOOR = 0.03  # nats from a baseline, within which a loss rests on it
CLIPPED = 0.9  # share of the steps of a clipped gradient, from which the clipping sets the size of every step


def examined(case: Case) -> list[Finding]:
    """All findings of the loss curve."""
    steps, loss = case.series("loss")
    if len(loss) < ENOUGH:
        return []
    return [*diverged(case, steps, loss), *spikes(case, steps, loss), *frequencies(case, steps, loss)]


def diverged(case: Case, steps: np.ndarray, loss: np.ndarray) -> list[Finding]:
    """The loss ends above its start."""
    fresh = steps[0] <= 1
    first = loss[0] if fresh else float(np.median(loss[: max(3, round(TAIL * len(loss)))]))
    last = last_loss(loss)
    if not last > first + DIVERGED:
        return []
    when = int(steps[since(loss > first + DIVERGED)])
    began = (
        "a loss above that of random weights"
        if fresh
        else f"a loss above that which the run went on from at step {steps[0]}"
    )
    return [
        Finding(
            "diverging loss",
            "the whole run",
            when,
            f"the loss ends at {last:.3f} nats and began at {first:.3f}; {recipe(case)}",
            "Look at which block's figures moved first, in the profiles by step of report.html.",
            f"{began} means that steps were larger than the network could follow",
            "loss",
            last,
            (None, float(first + DIVERGED)),
            "0.05 nats above the run's own first loss",
            when,
        )
    ]


def spikes(case: Case, steps: np.ndarray, loss: np.ndarray) -> list[Finding]:
    """Episodes of a loss far above its recent median; one finding for all, with the share of spikes in all steps (M7)."""
    every = spacing(steps)
    whole = in_whole_run(len(loss), every, section(case.config, "train").get("steps"))
    found = spike_episodes(loss, every=every, whole=whole)
    if not found:
        return []
    score = spike_score(loss, every=every, whole=whole)
    worst = max(found, key=lambda one: one.peak - one.before if np.isfinite(one.before) else np.inf)
    ends = [sum(one.outcome == name for one in found) for name in ("recovered", "fatal", "open")]
    told = ", ".join(f"{n} {name}" for n, name in zip(ends, ("recovered", "fatal", "not over"), strict=True) if n)
    listed = ", ".join(str(steps[one.top]) for one in found[:6]) + (" and more" if len(found) > 6 else "")
    return [
        Finding(
            "loss spikes",
            f"step{'s' * (len(found) > 1)} {listed}",
            int(steps[worst.top]),
            f"{len(found)} ({told}); the highest reaches {worst.peak:.3f} nats from {worst.before:.3f}; spike score {score:.2g} % of the "
            f"{len(loss)} logged losses; {recipe(case)}",
            f"python -m resjax.replay {case.path} --spike=1 rebuilds the states around the first, with the change by block."
            if case.config
            else "Look at which block's figures moved first, in the profiles by step of report.html.",
            "a loss that leaves its recent median by more than 0.1 nats and 7 robust deviations is no noise of the batches",
            "spike height",
            float(worst.peak - worst.before),
            (None, 0.1),
            "0.1 nats and 7 robust deviations above the median of the 51 logged losses before; fatal: not back within a tenth of the run",
            int(steps[found[0].first]),
        )
    ]


def learned(case: Case) -> str:
    """That the loss shows tokens to reach the head apart, in words; see :func:`below_bigram`."""
    return below_bigram(case.series("loss")[1], case.baseline("bigram"))


def frequencies(case: Case, steps: np.ndarray, loss: np.ndarray) -> list[Finding]:
    """The loss rests on the unigram baseline."""
    floor, last = case.baseline("unigram"), last_loss(loss)
    if floor is None or not abs(last - floor) < NEAR_FLOOR or not last < loss[0]:
        return []
    if loss[0] - last < 2 * NEAR_FLOOR:  # it began there
        return []
    return [
        Finding(
            "token frequencies only",
            "the head",
            int(steps[-1]),
            f"the loss ends at {last:.3f} nats, {abs(last - floor):.3f} from the unigram baseline of {floor:.3f}",
            "Look at the token cosine of the last blocks and at the gradients below them: no token reaches the head.",
            "a model that sees no context can reach this loss, and no lower one",
            "loss",
            last,
            (None, float(floor - NEAR_FLOOR)),
            "the unigram baseline of the data",
            int(steps[since(np.abs(loss - floor) < 2 * NEAR_FLOOR)]),
        )
    ]


def recipe(case: Case) -> str:
    """Rate, warm-up and clipping, and how often it cut, in words."""
    optimizer = section(case.config, "optimizer")
    if not optimizer:
        return "of the recipe nothing is known"
    warmup, clip = optimizer.get("warmup"), optimizer.get("clip") or 0.0
    words = [f"rate {optimizer.get('lr'):g}"]
    words.append(f"warm-up {'10 %' if warmup is None else f'{warmup:g}'}")
    words.append(f"clipping at {clip:g}" if clip else "no clipping")
    _, norms = case.series("grad_norm")
    if clip and len(norms) and (share := float(np.mean(norms > clip))) >= CLIPPED:
        words.append(f"which cut {share:.0%} of the logged steps")
    return ", ".join(words)
