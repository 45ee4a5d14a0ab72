"""Which runs does a claim speak of? The lines of a sweep as a table: chosen by fields, lined up by seed, the best rate found."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.judge import AGREEING, best_at_edge
from resjax.config.schema import FIELDS, find
from resjax.errors import Refused
from resjax.health.series import learning_rate_sensitivity
from resjax.sweeps import lines
from resjax.sweeps.lines import ENDED, LOSS, RATE, SEED, Row, ending
from resjax.sweeps.lines import value as value_of


class Runs(Sequence[Row]):
    """Runs of one experiment, each a line as ``python -m resjax.sweep`` writes it.

    None is ever left out because of how it ended: where a number of a run is not known it is NaN.
    """

    def __init__(self, rows: Iterable[Row]):
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    # ------------------------------------------------------------------ which

    def where(self, fields: Mapping[str, Any]) -> "Runs":
        """Those whose fields have these values; of a tuple, list or set one of the values.

        Raises:
          Refused: no such field.
        """
        wanted = {find(path).path: value for path, value in fields.items()}
        return Runs(row for row in self if all(_is(value_of(row, path), value) for path, value in wanted.items()))

    def split(self, path: str) -> dict[Any, "Runs"]:
        """By the values of a field: numbers ascending, the rest in the order in which they come."""
        path = find(path).path
        values = list(dict.fromkeys(value_of(row, path) for row in self))
        if all(isinstance(value, int | float) for value in values):
            values.sort()
        return {value: Runs(row for row in self if value_of(row, path) == value) for value in values}

    @property
    def seeds(self) -> list[int]:
        return list(self.split(SEED))

    def by_seed(self, seeds: Sequence[int] | None = None) -> Iterator[Row | None]:
        """The run of each seed; None where there is none.

        Raises:
          Refused: two runs have one seed, so that they differ in something else.
        """
        twice = [seed for seed, count in Counter(value_of(row, SEED) for row in self).items() if count > 1]
        if twice:
            differing = [
                path for path in FIELDS if path != SEED and len({str(value_of(row, path)) for row in self}) > 1
            ]
            raise Refused(
                f"seed {twice[0]} has several of these runs, which differ in {', '.join(differing) or 'nothing'}"
            )
        found = {value_of(row, SEED): row for row in self}
        return iter([found.get(seed) for seed in (self.seeds if seeds is None else seeds)])

    # ------------------------------------------------------------------ numbers

    def values(self, name: str, seeds: Sequence[int] | None = None) -> list[float]:
        """A number of each seed's run; NaN where it has none. ``name`` may lead inside, as 'spikes.max_loss'."""
        return [number(row, name) if row is not None else np.nan for row in self.by_seed(seeds)]

    def losses(self, seeds: Sequence[int] | None = None) -> list[float]:
        """The held-out loss of each seed's run at its end, nats per token."""
        return self.values(LOSS, seeds)

    def best(self, path: str = RATE) -> "Best":
        """The value of a field, by default the rate, at which the mean held-out loss over the seeds is the lowest.

        A run without a finite loss makes its value the worst: an arm is not better for having lost seeds.
        """
        parts = self.split(path)
        if not parts:
            raise Refused(f"there are no runs to find the best {path} of")
        means = [float(np.mean([number(row, LOSS) for row in part])) for part in parts.values()]
        losses = [mean if np.isfinite(mean) else np.inf for mean in means]
        value = list(parts)[int(np.argmin(losses))]
        return Best(value, parts[value], best_at_edge(list(parts), losses))

    def outcomes(self) -> Counter:
        """How many ended how; a cell that failed to run is 'failed'."""
        return Counter(ending(row) for row in self)

    def trained(self) -> float:
        """The share that ended as 'trained'; NaN of none."""
        return self.outcomes()["trained"] / len(self) if len(self) else np.nan

    def highest_rate(self, share: float = AGREEING) -> float:
        """The largest rate of the grid at which at least ``share`` of the seeds are trained (M9); 0 where none is."""
        return max((rate for rate, part in self.split(RATE).items() if part.trained() >= share), default=0.0)

    def sensitivity(self, seeds: Sequence[int] | None = None) -> list[float]:
        """Of each seed how much its loss depends on the rate (M8, Wortsman et al. 2023), nats."""
        found = []
        for seed in self.seeds if seeds is None else seeds:
            mine = self.where({SEED: seed})
            starts = [number(row, "first_loss") for row in mine]
            losses = [number(row, LOSS) for row in mine]
            known = [start for start in starts if np.isfinite(start)]
            found.append(learning_rate_sensitivity(losses, float(np.mean(known))) if known else np.nan)
        return found


@dataclass(frozen=True)
class Best:
    """Where an arm is at its best.

    Attributes:
      value: of the field.
      runs: there.
      edge: a sentence where the value is the first or last of the grid; empty otherwise.
    """

    value: Any
    runs: Runs
    edge: str


def number(row: Row, name: str) -> float:
    """A number of a line, ``name`` leading inside, as 'spikes.max_loss'; NaN where it is None, text such as "nan", or not there."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return lines.number(value)


def ended(row: Row | None, *names: str) -> float:
    """1 if a run ended as one of these outcomes, 0 if otherwise; NaN of one that did not run, which tells nothing."""
    if row is None or row["status"] not in ENDED:
        return np.nan
    return float(ending(row) in names)


def losses_of(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """The logged steps of a run and their training losses, as far as it came."""
    found = [(point["step"], number(point, "loss")) for point in row.get("curve", ()) if "loss" in point]
    return np.array([step for step, _ in found], int), np.array([loss for _, loss in found])


def mean_between(row: Row, first: float, last: float) -> float:
    """The mean training loss of the logged steps from share ``first`` to share ``last`` of a run; NaN if it did not come so far."""
    steps, losses = losses_of(row)
    total = row.get("config", {}).get("train.steps", FIELDS["train.steps"].default)
    inside = (steps > first * total) & (steps <= last * total)
    return float(losses[inside].mean()) if inside.any() and steps.max() >= last * total else np.nan


def profile(row: Row, step: int | str, probe: str) -> np.ndarray:
    """A probe by block and site at a kept step, or at the last one ('end'); an empty array where the line has none."""
    kept = row.get("profiles") or {}
    if step == "end":
        step = max(map(int, kept), default=0)
    value = kept.get(str(step), {}).get(probe)
    return np.asarray([] if value is None else value, np.float64)


def _is(value: Any, wanted: Any) -> bool:
    return (
        value in wanted
        if isinstance(wanted, tuple | list | set | range) and not isinstance(value, tuple)
        else value == wanted
    )
