"""How do probes leave a forward pass that is not ours? As the gradient of an input of zeros, which every transformation carries along.

A tap is the identity on the stream and takes a vector of zeros beside it. Its backward pass gives that vector a "gradient" that has
nothing to do with the loss: the probes measured on the way forward, and the norm of what came back. So the probes go the way that
gradients go, through jit, checkpoint, scan and vmap, and nothing is stored on the side.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from resjax.errors import Refused
from resjax.health.geometry import magnitude
from resjax.health.probes import ATTAINABLE, FORM, MEASURES, measure, measure_block, ranks
from resjax.health.record import FORWARD_PROBES, MORE_PROBES
from resjax.residual import Flow
from resjax.residual.precision import rms

DTYPES = ("float64", "float32", "bfloat16", "float16")  # of the stream, told by number: 1 for the first
# What follows the probes in a tap's vector: the gradient norm; how often the tap was passed; whether it measured; dtype and width.
TAIL = ("gradient", "adds", "on", "dtype", "width")
Parts = dict[str, jax.Array]


def of_site(parts: Parts, groups: tuple[str, ...] = ()) -> dict[str, jax.Array]:
    """The forward probes of one site, as of resjax's own, and those of more groups; NaN for what the parts cannot tell."""
    update, kept, after = parts.get("update"), parts.get("kept"), parts["after"]
    beside = parts.get("beside", kept)
    before = after if beside is None else beside
    flow = Flow(before, after, kept, update, before, beside)
    probes = measure(flow)
    for group in groups:
        probes |= MEASURES[group](flow)
    if "ranks" in groups:
        probes |= ranks(probes[FORM], probes[ATTAINABLE])
    return {name: probes[name] for name in site_probes(groups)}


def held(after: jax.Array, others: Parts) -> Parts:
    """All in the dtype and shape that the sum has, which holds every term exactly."""
    return {name: jnp.broadcast_to(x, after.shape).astype(after.dtype) for name, x in others.items()} | {"after": after}


def site_probes(groups: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the forward probes of a site."""
    return FORWARD_PROBES + tuple(name for group in groups for name in MORE_PROBES[group])


Kind = str | tuple[str, ...]  # one of KINDS; of a site that has more groups of probes ('site', *groups)
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Parts], dict[str, jax.Array]]]] = {
    "site": (FORWARD_PROBES, of_site),
    "block": (("update_ratio_block",), lambda parts: measure_block(parts["before"], parts["after"])),
    "embedded": (("embed_rms",), lambda parts: {"embed_rms": rms(parts["after"])}),
    "final": (("final_rms",), lambda parts: {"final_rms": rms(parts["after"])}),
    "gradient": (
        ("gradient",),
        lambda parts: {"gradient": magnitude(parts["after"])},
    ),  # not of a tap: of what comes back
}


def probes_of(kind: Kind) -> tuple[tuple[str, ...], Callable[[Parts], dict[str, jax.Array]]]:
    """Names of a tap's probes, and what measures them."""
    if isinstance(kind, str):
        return KINDS[kind]
    groups = kind[1:]
    return site_probes(groups), lambda parts: of_site(parts, groups)


def width(kind: Kind) -> int:
    """Length of the vector of a tap."""
    return len(probes_of(kind)[0]) + len(TAIL)


def watched(kind: Kind, number: jax.Array, after: jax.Array, **others: jax.Array | None) -> jax.Array:
    """``after`` as it is, tapped.

    Args:
      kind: see :data:`Kind`.
      number: (width,) zeros; ones where nothing is to be measured.
      after: (batch, ..., width), the stream from here on.
      others: what else the kind measures, of shapes that broadcast to that of ``after``; None = there is no such thing.

    Raises:
      Refused: the stream is no array of floating-point numbers with an axis.
    """
    if not jnp.issubdtype(after.dtype, jnp.floating) or not after.ndim:
        raise Refused(
            f"the stream is {after.dtype}{list(after.shape)}, and has to be floating-point (batch, ..., width)"
        )
    there = {name: x for name, x in others.items() if x is not None}
    return _tap(kind, after, there, number)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(kind: Kind, after: jax.Array, others: Parts, number: jax.Array) -> jax.Array:
    del kind, others, number
    return after


def _forward(kind: Kind, after: jax.Array, others: Parts, number: jax.Array) -> tuple[jax.Array, tuple]:
    on = number[0] == 0
    probes = _pooled(kind)(on, held(after, others))
    name = jnp.dtype(after.dtype).name
    code = DTYPES.index(name) + 1 if name in DTYPES else 0
    return after, (on, probes, code)


def _backward(kind: Kind, kept: tuple, gradient: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    on, probes, code = kept
    size = _pooled("gradient")(on, {"after": gradient})
    seen = on.astype(jnp.float32)
    tail = jnp.stack([jnp.ones_like(seen), seen, code * seen, gradient.shape[-1] * seen])
    return gradient, None, jnp.concatenate([probes, size, tail])


_tap.defvjp(_forward, _backward)


@functools.cache
def _pooled(kind: Kind) -> Callable[[jax.Array, Parts], jax.Array]:
    """The measurement ``(on, parts) -> (probes,)``, zeros where ``on`` is False.

    Under vmap over samples the samples are measured as one batch, with one result; under vmap over blocks (``on`` then comes from the
    tap of each) each has its own.
    """
    names, f = probes_of(kind)

    def measured(parts: Parts) -> jax.Array:
        rows = {name: x[None] if x.ndim == 1 else x for name, x in parts.items()}
        found = f(rows)
        return jnp.stack([jnp.asarray(found[name], jnp.float32) for name in names])

    def one(on: jax.Array, parts: Parts) -> jax.Array:
        return jax.lax.cond(on, measured, lambda _: jnp.zeros(len(names), jnp.float32), parts)

    pooled = jax.custom_batching.custom_vmap(one)

    @pooled.def_vmap
    def _(size: int, batched: Any, on: jax.Array, parts: Parts) -> tuple[jax.Array, bool]:
        on_batched, parts_batched = batched
        if on_batched:
            axes = (0, {name: 0 if there else None for name, there in parts_batched.items()})
            return jax.vmap(one, axes)(on, parts), True
        joined = {}
        for name, x in parts.items():
            x = x if parts_batched[name] else jnp.broadcast_to(x, (size, *x.shape))
            joined[name] = x.reshape(-1, *x.shape[2:]) if x.ndim > 3 else x
        return pooled(on, joined), False

    return pooled
