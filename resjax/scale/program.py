"""What does a program say of itself? Facts read from the traced or compiled step, not from the config."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of inner programs (scan, cond, checkpoint, custom derivatives) included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def stream_dtype(traced: Any, name: str) -> str:
    """The dtype of the values that bear ``name`` in a traced program (``jax.jit(f).trace(...)``), such as 'float32'.

    Several dtypes are joined by '+': a stream that changes its precision on the way is a fault to be seen.
    """
    found = {
        str(equation.outvars[0].aval.dtype)
        for equation in equations(traced.jaxpr.jaxpr)
        if equation.primitive.name == "name" and equation.params["name"] == name
    }
    return "+".join(sorted(found))
