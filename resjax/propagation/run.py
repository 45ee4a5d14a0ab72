"""What happens from a checked command line to an exit code? Scheme by scheme: measure, save, show."""

import sys
from collections.abc import Sequence
from typing import Any

from resjax.errors import Refused
from resjax.propagation import cases, figure, result
from resjax.propagation.folder import FIGURE, NUMBERS, Folder
from resjax.propagation.measured import measured
from resjax.propagation.table import console, print_study


def run(
    spec: str,
    overrides: Sequence[tuple[str, str]],
    schemes: str | None,
    depths: Sequence[int],
    seeds: int | None,
    out: Folder | None,
    as_json: bool,
) -> int:
    """Measure and show; what was measured before an interrupt is written all the same.

    Raises:
      Refused: bad input; of ``all``, a scheme that this configuration cannot have is left out and named instead.
      OSError: the disk is full; the files before are whole.
    """
    every = schemes == cases.ALL
    plans: list[list[cases.Plan]] = []
    left_out: list[tuple[str, str]] = []
    names: Sequence[str | None] = cases.names(schemes) or (None,)
    for name in names:
        try:
            plans.append(cases.build(spec, overrides, name, depths, seeds))
        except Refused as refused:
            if not every:
                raise
            left_out.append((str(name), str(refused)))
    to = console(sys.stderr if as_json else sys.stdout)
    found: list[result.Study] = []
    try:
        for plan in plans:
            try:
                found.append(_study(plan, to))
            except Refused as refused:  # what only the assembled network tells, such as its size
                if not every:
                    raise
                left_out.append((plan[0].name, str(refused)))
                continue
            if not as_json:
                print_study(found[-1], to)
    finally:
        if found and out is not None:
            out.write(NUMBERS, result.text_of(result.as_json(found, left_out, spec)).encode())
            out.write(FIGURE, figure.svg(found, f"Signal propagation at the start of {spec}"))
            to.print(f"{out.path / NUMBERS} and {FIGURE}", soft_wrap=True)
    if not found:
        raise Refused(left_out[0][1])
    for scheme, why in left_out:
        to.print(f"left out: {scheme}: {why}", soft_wrap=True)
    if as_json:
        sys.stdout.write(result.text_of(result.as_json(found, left_out, spec)))
    return 0


def _study(plans: Sequence[cases.Plan], to: Any) -> result.Study:
    made, numbers = [], []
    for plan in plans:
        case = plan.case()
        one = measured(case)
        to.print(
            f"{case.name}, {case.depth} blocks: compiled in {one.compile_seconds:.1f} s, {len(case.seeds)} "
            f"{'seeds' if len(case.seeds) > 1 else 'seed'} in {one.seconds:.1f} s",
            soft_wrap=True,
        )
        made.append(case)
        numbers.append(one)
    return result.study(made, numbers)
