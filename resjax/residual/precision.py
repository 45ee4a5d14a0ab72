"""How is a sum rounded to the stream's precision, on purpose and visibly to the compiler?"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

HALF = (jnp.bfloat16, jnp.float16)
ROUNDINGS = ("none", "bfloat16", "float16")  # that a stream of a wider dtype can be given
ROUNDING = "precision.rounding"  # the knob that says which


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` rounded (nearest even) to the precision and range of ``dtype``, dtype unchanged.

    Under jit XLA removes a pair of casts and keeps the excess precision; ``lax.reduce_precision`` it keeps.
    """
    info = jnp.finfo(dtype)
    if info.bits >= jnp.finfo(x.dtype).bits and dtype not in HALF:
        return x
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def as_stored(x: jax.Array, code: int | jax.Array) -> jax.Array:
    """``x`` rounded as number ``code`` of ``ROUNDINGS`` has it, dtype unchanged; its gradient is that of ``x``.

    ``code`` may be a JAX scalar, traced or not: then one program serves them all.
    """
    return _named(x, ROUNDINGS[code]) if isinstance(code, int) else _coded(x, code)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _named(x: jax.Array, name: str) -> jax.Array:
    return x if name == "none" else rounded(x, jnp.dtype(name))


@_named.defjvp
def _named_jvp(name: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _named(*primals, name), tangents[0]


@jax.custom_jvp
def _coded(x: jax.Array, code: jax.Array) -> jax.Array:
    which = jnp.broadcast_to(jnp.asarray(code, jnp.int32), x.shape)
    return lax.select_n(which, *(_named(x, name) for name in ROUNDINGS))


@_coded.defjvp
def _coded_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _coded(*primals), tangents[0]


def total(*terms: jax.Array | None) -> jax.Array | None:
    """The sum of the terms that are there (all of one dtype), rounded once per add to that dtype."""
    present = [term for term in terms if term is not None]
    if not present:
        return None
    result = present[0]
    for term in present[1:]:
        result = rounded(result + term, result.dtype)
    return result


def plus(first: jax.Array, *more: jax.Array | None) -> jax.Array:
    """:func:`total` where at least the first term is there."""
    result = total(first, *more)
    assert result is not None
    return result


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """``dtype``, but at least float32: for sums over many terms, those of a gradient included."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def exact(x: jax.Array) -> jax.Array:
    """At least float32, for statistics and norms."""
    return x.astype(wide(x.dtype))


def rms(x: jax.Array) -> jax.Array:
    """Root mean square over everything, float32 (or better)."""
    return jnp.sqrt(jnp.mean(jnp.square(exact(x))))
