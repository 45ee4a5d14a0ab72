"""What do the lines of an arm say of its tokens, its layers and its swings? One number a seed, NaN where a line says nothing."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.stats import rankdata

from experiments.judge import Effect, share
from experiments.runs import Row, Runs, ending, number, profile
from experiments.shared.rates import seen_at_end
from experiments.shared.sizes import SEEDS
from resjax.sweeps.outcome import NEAR, SAME_TOKENS

LEAST = float(np.finfo(np.float32).eps)  # what is left of tokens that are the same, relative
NOTHING: Row = {}


def by_seed(runs: Runs, of: Callable[[Row], float]) -> list[float]:
    """A number of each seed's run."""
    return [of(NOTHING if row is None else row) for row in runs.by_seed(SEEDS)]


def last(runs: Runs, step: int | str, probe: str) -> list[float]:
    """A probe after the last sub-layer."""
    return by_seed(runs, lambda row: float(found[-1, -1]) if (found := profile(row, step, probe)).size else np.nan)


def slopes(runs: Runs, step: int | str) -> list[float]:
    """Of log |res X| / |X| by sub-layer, in the Frobenius norm."""
    return by_seed(runs, lambda row: _fitted(profile(row, step, "residual_frobenius"), 1))


def bends(runs: Runs, step: int | str) -> list[float]:
    """Second difference of the same in the composite norm, by a parabola: below 0 it falls faster than geometrically."""
    return by_seed(runs, lambda row: 2 * _fitted(profile(row, step, "residual_composite"), 2))


def _fitted(values: np.ndarray, degree: int) -> float:
    """The leading coefficient of a polynomial through the logs before the first that is but rounding; NaN where all are."""
    logs = np.log(np.maximum(values.ravel(), LEAST)) if values.size else np.array([])
    gone = np.flatnonzero(logs <= np.log(2 * LEAST))
    logs = logs[: max(gone[0], degree + 1)] if len(gone) and gone[0] else logs[: 0 if len(gone) else None]
    known = len(logs) > degree and np.isfinite(logs).all()
    return float(np.polyfit(np.arange(len(logs)), logs, degree)[0]) if known else np.nan


def at_end(runs: Runs, name: str) -> list[float]:
    """A number of the look after the last step."""
    return by_seed(runs, lambda row: seen_at_end(row, name))


def looked(runs: Runs, name: str) -> list[float]:
    """The mean of a number over the looks that have it."""

    def of(row: Row) -> float:
        values = [number(one, name) for one in (row.get("looks") or {}).values() if name in one]
        return float(np.mean(values)) if values else np.nan

    return by_seed(runs, of)


def swing(runs: Runs, name: str) -> list[float]:
    """A number of the study of steadiness (M14)."""
    return by_seed(runs, lambda row: number(row, f"studies.steadiness.{name}"))


def trains(runs: Runs) -> list[float]:
    """1 where a seed trains in some run, 0 where in none; NaN where none ran."""
    found = []
    for seed in SEEDS:
        ends = {ending(row) for row in runs.where({"seed": seed})} - {"failed", "killed"}
        found.append(float("trained" in ends) if ends else np.nan)
    return found


def at_frequencies(runs: Runs, unigram: float) -> list[float]:
    """1 in the class 'collapsed', also on a text without a law, by its counted frequencies; NaN where a run has no end."""

    def of(row: Row) -> float:
        loss, cosine = number(row, "last_loss"), number(row, "token_cosine")
        return (
            float(abs(loss - unigram) < NEAR and cosine > SAME_TOKENS) if np.isfinite([loss, cosine]).all() else np.nan
        )

    return by_seed(runs, of)


def way(losses: Sequence[float], levels: Mapping[str, float]) -> np.ndarray:
    """From ln V to the entropy of single symbols: 0 is guessing, 1 the frequencies."""
    return (levels["uniform"] - np.asarray(losses)) / (levels["uniform"] - levels["unigram"])


def post_ln_gain(runs: Runs) -> list[float]:
    """Product of the identity's coefficients over Post-LN's sub-layers at the start: 1 / |x + u| each, x being of unit size."""

    def of(row: Row) -> float:
        ratio, cosine = (profile(row, 1, probe).ravel() for probe in ("update_ratio", "update_cosine"))
        return float(np.prod(1 / np.sqrt(1 + ratio**2 + 2 * ratio * cosine))) if ratio.size else np.nan

    return by_seed(runs, of)


def ranked(gains: np.ndarray, losses: np.ndarray) -> float:
    """Spearman's correlation of gains and falling losses, ties sharing their rank; a loss that is not finite is the worst."""
    losses = np.where(np.isfinite(losses), losses, np.inf)
    if not np.isfinite(gains).all() or np.ptp(gains) == 0 or np.isinf(losses).all():
        return np.nan
    order = rankdata(-losses)
    return float(np.corrcoef(rankdata(gains), order)[0, 1]) if np.ptp(order) else 0.0


def counted(hits: Sequence[float]) -> tuple[Effect, str]:
    """The share of seeds that hit (1), and why it cannot be told: more than one seed is not known (NaN), and would count as none."""
    unknown = int(np.sum(~np.isfinite(np.asarray(hits, float))))
    return share(hits), f"{unknown} of {len(hits)} seeds have nothing to be told by" if unknown > 1 else ""


def told(effect: Effect, unit: str = "") -> str:
    """A number with its interval, for a note."""
    low, high = effect.interval
    lost = f", {effect.missing} of {len(effect.values)} seeds without a value" if effect.missing else ""
    return f"{effect.mean:.3g} [{low:.3g}, {high:.3g}]{' ' if unit else ''}{unit}{lost}"
