"""What do networks of the protocol do before their first step? Measured over seeds, as flat rows for an experiment's MEASURES.

A row holds the fields of its setting, its seed, and values: numbers, or lists of one number a site in the order of the sites.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.experiment import Rows
from experiments.judge import Numbers
from experiments.runs import number
from resjax.config.scheme import scheme as scheme_of
from resjax.config.validate import resolve, validate
from resjax.health.studies import Subject
from resjax.propagation.cases import Case, Plan
from resjax.propagation.closed import Curve
from resjax.propagation.measured import batches
from resjax.propagation.theory import curves
from resjax.residual import Init, Scheme
from resjax.train.numbers import with_numbers

SEEDS, SMOKE_SEEDS = tuple(range(16)), (0, 1)
SEQUENCES = 8  # of random tokens


def seeds(scale: str) -> tuple[int, ...]:
    """Enough for means of starts, which cost little; a few at scale smoke."""
    return SMOKE_SEEDS if scale == "smoke" else SEEDS


def case(config: Any, seeds: Sequence[int], scheme: Scheme | None = None) -> Case:
    """The network of a configuration, on 8 sequences of random tokens; ``scheme`` stands in the place of the configuration's own.

    Raises:
      Refused: the configuration contradicts itself.
    """
    config.data.batch = SEQUENCES
    validate(config)
    resolved = resolve(config, jax.default_backend())
    plan = Plan(resolved.residual.name, resolved, scheme or scheme_of(resolved), len(seeds))
    made = plan.case()
    return Case(made.name, made.config, made.scheme, made.parts, made.batch, made.length, tuple(seeds))


def subjects(case: Case) -> Iterator[tuple[int, Subject]]:
    """Of every seed the network as it starts, to be studied on the tokens that it is measured on."""
    parts = case.parts
    draw = jax.jit(lambda seed: with_numbers(parts, {"seed": seed}).start().params)
    for seed, batch in zip(case.seeds, batches(case), strict=True):
        model = nnx.merge(parts.graphdef, draw(np.uint32(seed)))
        yield seed, Subject(model, batch[None], compute=parts.compute)


def theory(case: Case, quantity: str) -> list[Curve]:
    """What is expected of a probe by site; none where there is no theory."""
    start = case.config.init
    init = Init(start.kind, start.std, start.gain, start.out_scale, start.embed_gain)
    found, _ = curves(case.scheme, case.parts.shape, init, case.length)
    return [curve for curve in found if curve.quantity == quantity]


def sites(values: Any) -> list[float]:
    """A profile (depth, sites) as a list, site after site."""
    return [float(value) for value in np.asarray(values, np.float64).reshape(-1)]


# ---- rows, when read again


def of(rows: Iterable[Mapping[str, Any]], **fields: Any) -> Rows:
    """Those whose fields have these values, by seed in ascending order."""
    chosen = [dict(row) for row in rows if all(row.get(name) == value for name, value in fields.items())]
    return sorted(chosen, key=lambda row: row.get("seed", 0))


def values(rows: Iterable[Mapping[str, Any]], name: str, **fields: Any) -> np.ndarray:
    """A value of each row of a setting, by seed; NaN where it is not known."""
    return np.array([number(row, name) for row in of(rows, **fields)], np.float64)


def table(rows: Iterable[Mapping[str, Any]], name: str, along: str, at: Sequence[Any], **fields: Any) -> np.ndarray:
    """(seeds, len(at)): a value at several settings of the field ``along``, of the same seeds; NaN where there is none."""
    found = {(row["seed"], row[along]): number(row, name) for row in of(rows, **fields)}
    seeds = sorted({seed for seed, _ in found})
    return np.array([[found.get((seed, one), np.nan) for one in at] for seed in seeds]).reshape(len(seeds), len(at))


def profiles(rows: Iterable[Mapping[str, Any]], name: str, **fields: Any) -> np.ndarray:
    """(seeds, sites): a list of each row of a setting; NaN for what is not a number."""
    lists = [row[name] for row in of(rows, **fields)]
    return np.array([[one if isinstance(one, int | float) else np.nan for one in row] for row in lists], np.float64)


def slopes(x: Numbers, y: np.ndarray) -> list[float]:
    """Of each row of y (seeds, len(x)) the slope of a straight line; NaN where a value is not finite."""
    return [float(np.polyfit(x, row, 1)[0]) if np.isfinite(row).all() else np.nan for row in y]


def straightness(x: Numbers, y: np.ndarray) -> list[float]:
    """Of each row of y the share of its variance that a straight line explains, R^2; NaN where a value is not finite."""
    found = []
    for row in y:
        if not np.isfinite(row).all():
            found.append(np.nan)
            continue
        left = row - np.polyval(np.polyfit(x, row, 1), x)
        found.append(float(1 - np.sum(left**2) / np.sum((row - row.mean()) ** 2)))
    return found
