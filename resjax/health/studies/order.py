"""Does the order of blocks matter? The rise of the loss when two neighbours change places."""

from typing import Any

import numpy as np

from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject, spread


def order(subject: Subject) -> dict[str, Any]:
    """The loss with two neighbouring blocks swapped (M17).

    A block goes with its branches, norms, gains (also those that are rules of its number) and its part of the carry; weights of
    earlier outputs stay where they are.

    Returns:
      blocks: the first of each pair.
      swap: (pairs,) rise of the loss; NaN where the second block wants what the first hands on.
    """
    first = spread(subject.depth - 1, subject.most)
    rows = []
    for state, targets in subject.opened():
        whole, row = subject.loss_of(state, targets), []
        for block in first:
            state = subject.walk.to(state, block)
            ahead = subject.walk.other(state, block + 1)
            swapped = None if ahead is None else subject.walk.other(ahead, block)
            row.append(np.nan if swapped is None else subject.loss_of(swapped, targets) - whole)
        rows.append(row)
    return {"blocks": first, "swap": np.mean(rows, axis=0)}


STUDY = Study(
    "order",
    order,
    "what the order of blocks is worth",
    "Rise of the loss when two neighbouring blocks change places (Veit et al. 2016, 1605.06431).",
    "slow",
)
