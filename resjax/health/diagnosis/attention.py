"""What does attention say is wrong? Logits beyond what a softmax resolves, and entropies at either end of their range."""

from dataclasses import replace

import numpy as np

from resjax.health.diagnosis.case import Case
from resjax.health.diagnosis.finding import Finding
from resjax.health.findings import section
from resjax.health.reading import since, sites_named

# Mean entropy over its largest, and logits, of attention that hardly looks beyond one key (healthy: 0.63; 20).
ONE_KEY, SATURATED_LOGIT = 0.15, 50.0
# Mean entropy over its largest, over heads and queries: so low a mean leaves one head and query in ten half of its largest, at most.
COLLAPSED_ENTROPY = 0.05
# The same of all sites, in the second half of a run: every key is looked at alike.
UNIFORM_ENTROPY = 0.99
HEALTHY = "healthy runs of the set stay below 20, and above an entropy of 0.63"


def examined(case: Case) -> list[Finding]:
    """All findings of attention."""
    return [*saturated(case), *entropy_collapse(case), *uniform(case)]


def saturated(case: Case) -> list[Finding]:
    """Attention that sees one key only, from logits far beyond what a softmax resolves."""
    entropy, logit = case.end("attention_entropy"), case.end("attention_largest_logit")
    if entropy is None or logit is None:
        return []
    with np.errstate(invalid="ignore"):
        collapsed = (entropy < ONE_KEY) & (logit > SATURATED_LOGIT)
        hit = collapsed | (logit > 10 * SATURATED_LOGIT)
    if not hit.any():
        return []
    worst = np.unravel_index(int(np.where(hit, logit, -np.inf).argmax()), logit.shape)
    found = Finding(
        "saturated attention",
        sites_named(case.record, hit),
        case.last_step,
        f"largest logit {logit[worst]:.3g}, entropy {entropy[worst]:.2g} of its largest",
        "Look at the norms of the query and key matrices; normalise queries and keys (model.qk_norm=True) or lower the rate.",
        "a softmax that sees one key passes no gradient to the others, and logits and entropies like these go with a loss that diverges "
        "(Dehghani et al. 2023, 2302.05442; Zhai et al. 2023, 2303.06296)",
        "attention_largest_logit",
        float(logit[worst]),
        (None, SATURATED_LOGIT if collapsed[worst] else 10 * SATURATED_LOGIT),
        HEALTHY,
        at=hit,
    )
    if not case.has("attention_largest_logit"):
        return [found]
    rows = case.record["attention_largest_logit"][:, worst[0], worst[1]]
    assert found.range is not None
    return [replace(found, since=int(case.record.steps[since(rows > found.range[1])]))]


def entropy_collapse(case: Case) -> list[Finding]:
    """Attention of which (nearly) every head and query sees one key only, whatever its logits."""
    entropy = case.end("attention_entropy")
    if entropy is None:
        return []
    with np.errstate(invalid="ignore"):
        hit = entropy < COLLAPSED_ENTROPY
    if not hit.any():
        return []
    worst = np.unravel_index(int(np.where(hit, entropy, np.inf).argmin()), entropy.shape)
    found = Finding(
        "entropy collapse",
        sites_named(case.record, hit),
        case.last_step,
        f"mean entropy over heads and queries {entropy[worst]:.2g} of its largest ({int(hit.sum())} of "
        f"{int(np.isfinite(entropy).sum())} attentions)",
        "Look first at which key it is: a layer whose heads rest on the first token (an attention sink) reads the same, and trained "
        "language models have such. Else look at the largest logits and the norms of the query and key matrices; normalise queries and "
        "keys (model.qk_norm=True), or lower the rate.",
        "attention to single keys moves in jumps and passes no gradient to the keys that it does not see; entropies this low go with a "
        "loss that oscillates or diverges (Zhai et al. 2023, 2303.06296)",
        "attention_entropy",
        float(entropy[worst]),
        (COLLAPSED_ENTROPY, None),
        "0 is attention to one key; at a mean of 0.05 at most one head and query in ten can have half of its largest; healthy runs of the "
        "set stay above 0.63",
        at=hit,
    )
    if not case.has("attention_entropy"):
        return [found]
    rows = case.record["attention_entropy"][:, worst[0], worst[1]]
    return [replace(found, since=int(case.record.steps[since(rows < COLLAPSED_ENTROPY)]))]


def uniform(case: Case) -> list[Finding]:
    """Every attention of the network looks at all keys alike, and half the run is over: none has learned where to look.

    A single one that does is the habit of healthy runs, and all of them may at the start: neither is told.
    """
    entropy = case.end("attention_entropy")
    steps = section(case.config, "train").get("steps")
    if entropy is None or not isinstance(steps, int) or 2 * case.last_step < steps or not np.isfinite(entropy).any():
        return []
    lowest = float(np.nanmin(entropy))
    if not lowest > UNIFORM_ENTROPY:
        return []
    began = None
    if case.has("attention_entropy"):
        rows = np.where(np.isfinite(case.record["attention_entropy"]), case.record["attention_entropy"], np.inf)
        began = int(case.record.steps[since(rows.reshape(len(rows), -1).min(axis=1) > UNIFORM_ENTROPY)])
    return [
        Finding(
            "uniform attention",
            "all blocks",
            case.last_step,
            f"mean entropy over heads and queries at least {lowest:.4f} of its largest at every depth",
            "Look at the gradients of the query and key matrices, and at the token cosine: of tokens that are all alike no key can be told "
            "from another.",
            "attention that averages all keys alike has learned nothing of them; where it makes tokens alike, the gradients of queries and "
            "keys vanish (Noci et al. 2022, 2206.03126)",
            "attention_entropy",
            lowest,
            (None, UNIFORM_ENTROPY),
            "every healthy run of the set has an attention below 0.97 at its end",
            began,
        )
    ]
