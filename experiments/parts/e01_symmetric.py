"""How well can a table of scores predict that has to be symmetric? What tied embeddings leave of a network without branches.

Without branches a model scores the next symbol x after b by its embeddings alone: with a head of its own any table S[b, x] of rank
up to the width, so that it reaches the entropy H2 of a symbol given the one before; with the embedding's table as the head, and
nothing else between them, S[b, x] = e_b . e_x, which is symmetric (and has no negative eigenvalue, so that the least loss here is a
bound that it need not reach). The least cross-entropy of symmetric tables is H2 only where the chain is the same backwards. A final norm
and positions add row factors and column terms, so that a model that has them can pass it.
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax


def least_loss(pair: np.ndarray) -> float:
    """The least cross-entropy over symmetric tables of scores, nats: a convex problem, solved to 1e-7 or so.

    Args:
      pair: (V, V) the law of a symbol and the next one; entries are 0 or more and sum to 1.
    """
    V = len(pair)
    upper = np.triu_indices(V)

    def table(free: np.ndarray) -> np.ndarray:
        scores = np.zeros((V, V))
        scores[upper] = free
        return scores + np.triu(scores, 1).T

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        logs = log_softmax(table(free), axis=1)
        slope = pair.sum(axis=1, keepdims=True) * np.exp(logs) - pair
        both = slope + slope.T - np.diag(np.diag(slope))
        return float(-np.sum(pair * logs)), both[upper]

    start = np.zeros(len(upper[0]))
    return float(
        minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-14, "gtol": 1e-9}).fun
    )
