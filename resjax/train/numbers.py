"""Which numbers of a config can be values that a compiled program takes, so that one program serves many runs?

The program computes with them in float32. On a CPU it gives the bits of the program that has them as constants, but for
three roundings: ``init.*`` (a standard deviation is a quotient, which Python takes in double precision), and ``b1``,
``b2`` and Muon's momentum (so is 1 - b).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from resjax.config.overrides import OPEN
from resjax.config.schema import KINDS
from resjax.residual.precision import ROUNDING
from resjax.train.assemble import Parts, update_rule

# Gains of the residual scheme, where they are constants: see resjax.config.scheme.opened.
GAINS = tuple(
    f"residual.{site}{name}"
    for site in ("", *(f"{kind}." for kinds in KINDS.values() for kind in kinds))
    for name in OPEN
)
# Where 0 (for momentum and clip: no such thing; for gains: no such branch) makes another program.
SWITCHED = ("optimizer.weight_decay", "optimizer.clip", "optimizer.momentum", *GAINS)
TRACEABLE = (
    "seed",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.clip",
    "optimizer.b1",
    "optimizer.b2",
    "optimizer.eps",
    "optimizer.momentum",
    "init.std",
    "init.gain",
    "init.out_scale",
    "init.embed_gain",
    "optimizer.warmup",
    ROUNDING,
    *GAINS,
)


def with_numbers(parts: Parts, numbers: Mapping[str, Any]) -> Parts:
    """``parts`` with numbers of its config, by path, replaced by values that may be traced.

    To be called while the program that takes the numbers is traced: the optimizer, its schedule and the start are made
    of them. What is not replaced stays a constant, with which the program is the one of an ordinary run.

    Args:
      parts: assembled under a scheme whose gains in ``numbers`` are knobs.
      numbers: some of ``TRACEABLE``.
    """
    config = view(parts.config, numbers)
    optimizer, schedule = update_rule(config, parts.scheme, parts.abstract.params)
    return replace(
        parts,
        config=config,
        optimizer=optimizer,
        schedule=schedule,
        recipe=replace(parts.recipe, clip=numbers.get("optimizer.clip", parts.recipe.clip)),
        knobs=knobs(numbers),
    )


def knobs(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``numbers`` that the model reads, by the name of their knob."""
    return {path: numbers[path] for path in (*GAINS, ROUNDING) if path in numbers}


def view(config: Any, numbers: Mapping[str, Any]) -> SimpleNamespace:
    """The fields of ``config``, some of them replaced; plain, since a configuration checks what is assigned."""

    def section(values: Mapping[str, Any], prefix: str) -> SimpleNamespace:
        return SimpleNamespace(
            **{
                name: section(value, f"{prefix}{name}.")
                if isinstance(value, Mapping)
                else numbers.get(f"{prefix}{name}", value)
                for name, value in values.items()
            }
        )

    return section(config.to_dict(), "")
