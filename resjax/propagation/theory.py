"""Which curves does theory draw for this network, and what does each assume? All of them, in the order of a legend."""

from collections.abc import Iterable

import numpy as np

from resjax.models.lm import Shape
from resjax.propagation.branches import NoTheory
from resjax.propagation.closed import Curve, closed_forms
from resjax.propagation.meanfield import Expected, expected
from resjax.residual import Init, Scheme

MEAN_FIELD = "mean field"
FORWARD = "Poole et al. 2016 (1606.05340); Yang and Schoenholz 2017 (1712.08969); attention as in Noci et al. 2022 (2206.03126)"
QUANTITIES = ("stream_rms", "update_rms", "update_ratio", "token_cosine")


def curves(scheme: Scheme, shape: Shape, init: Init, length: int) -> tuple[list[Curve], str]:
    """The curves, and why mean-field theory has none (empty where it has)."""
    try:
        found = expected(scheme, shape, init, length)
    except NoTheory as reason:
        return closed_forms(scheme, shape, init, length), str(reason)
    return [*mean_field(found, shape), *closed_forms(scheme, shape, init, length)], ""


def whole_profiles(curves: Iterable[Curve]) -> dict[str, Curve]:
    """By quantity the first curve, in the order of :func:`curves`, that has a value at every site and is no bound and no proportion."""
    found: dict[str, Curve] = {}
    for curve in curves:
        if curve.drawn != "band" and not curve.relative and np.isfinite(curve.values).all():
            found.setdefault(curve.quantity, curve)
    return found


def mean_field(found: Expected, shape: Shape) -> list[Curve]:
    """The profiles of :mod:`resjax.propagation.meanfield` as curves."""
    holds = (
        "wide layers of independent Gaussian weights, attention scores independent Gaussians, random tokens; at step 0"
    )
    departs = f"the width is {shape.width}; the more alike tokens are, the more alike are their scores"
    made = [Curve(name, MEAN_FIELD, FORWARD, holds, departs, getattr(found, name)) for name in QUANTITIES]
    made.append(
        Curve(
            "stream_grad",
            MEAN_FIELD,
            "Yang and Schoenholz 2017 (1712.08969); Xiong et al. 2020 (2002.04745)",
            f"{holds}; no gradient through the scores, independent ones at the top; from the measured last site down",
            departs,
            found.stream_grad,
            relative=True,
        )
    )
    made.append(
        Curve(
            "stream_grad",
            "identity path alone",
            "Liu et al. 2020 (2004.08249); Keel 2026 (2601.19895)",
            "the part of the gradient that takes the skips only, 2^(-S/2) after S sites of Post-LN with branches of the "
            "stream's size; the whole gradient need not be so small",
            "",
            found.identity_path,
            relative=True,
        )
    )
    return made
