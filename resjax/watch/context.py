"""Where does an add report to? To the taps of the surrounding ``into``; outside of one it is a plain add."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax

from resjax.errors import Refused, not_one_of
from resjax.watch.plan import Plan, Taps
from resjax.watch.tap import watched


class Listener:
    """What hears the adds of one context; deaf once the context is left.

    Part of the key of JAX's caches: a function that was traced in one context, and holds its taps, is traced anew in another one
    and outside. The caches keep the listener, so it must not keep the taps.
    """

    taps: Taps | None = None
    found: list[tuple[int, str]] | None = None


_here: Any = jax.make_user_context(None)


@contextlib.contextmanager
def into(taps: Taps) -> Iterator[None]:
    """Inside, every add reports into ``taps``, which is to be an argument that the loss is differentiated by.

    To be entered inside the function that is differentiated, so that the taps are those of its trace. Where nothing is differentiated
    by the taps (an evaluation), adds stay plain.

    Raises:
      Refused: what is given are no taps.
    """
    if not isinstance(taps, Taps):
        raise Refused(
            f"watch.into was given a {type(taps).__name__}, and takes taps: watch.Plan(blocks=..., sites=...).taps()"
        )
    if not isinstance(taps.sites, jax.core.Tracer):
        yield
        return
    listener = Listener()
    listener.taps = taps
    with _heard_by(listener):
        yield


def find(f: Callable[..., Any], *arguments: Any) -> Plan:
    """The plan of a model: ``f(*arguments)`` is traced without computing anything, and its adds are listed.

    Raises:
      Refused: there are none, or a block's number is not known before the program runs (in a scan over blocks).
    """
    listener = Listener()
    listener.found = []
    with _heard_by(listener):
        found = listener.found
        jax.eval_shape(lambda *inner: (f(*inner), None)[1], *arguments)
    if not found:
        raise Refused("the function has no watch.add in it; call it where an update joins the stream")
    return Plan(max(block for block, _ in found) + 1, tuple(dict.fromkeys(site for _, site in found)))


@contextlib.contextmanager
def _heard_by(listener: Listener) -> Iterator[None]:
    try:
        with _here(listener):
            yield
    finally:
        listener.taps = listener.found = None


# ---- the calls in a model


def add(stream: jax.Array, update: jax.Array, *, block: Any, site: str) -> jax.Array:
    """``stream + update``, watched.

    Args:
      stream, update: (batch, ..., width).
      block: number of the block from 0; may be traced, as in a scan over blocks.
      site: which add of the block.

    Raises:
      Refused: inside :func:`into`, a block or site that its plan does not have.
    """
    after = stream + update
    return _at_site(after, block, site, kept=stream, update=update)


def joined(after: jax.Array, *, kept: jax.Array, update: jax.Array, block: Any, site: str) -> jax.Array:
    """``after``, watched: the stream where it is not the plain sum of ``kept`` and ``update``, such as a norm of it (Post-LN)."""
    return _at_site(after, block, site, kept=kept, update=update)


def change(before: jax.Array, after: jax.Array, *, block: Any, site: str) -> jax.Array:
    """``after``, watched, where only the stream before and after is at hand, or nothing is added (gates): the update is the difference.

    What an add would have swallowed cannot be told then, and is NaN.
    """
    if _here.value is None:
        return after
    update = jax.lax.stop_gradient(after) - jax.lax.stop_gradient(before)
    return _at_site(after, block, site, beside=before, update=update)


def block(before: jax.Array, after: jax.Array, *, block: Any) -> jax.Array:
    """``after``, watched: the stream ``before`` and after a whole block, for update_ratio_block."""
    taps = _taps()
    if taps is None:
        return after
    return watched("block", _slot(taps.blocks, block, taps.plan), after, before=before)


def embedded(stream: jax.Array) -> jax.Array:
    """``stream``, watched: what enters the first block, for embed_rms and embed_grad."""
    taps = _taps()
    return stream if taps is None else watched("embedded", taps.embedded, stream)


def final(stream: jax.Array) -> jax.Array:
    """``stream``, watched: what the head reads, after the final norm, for final_rms."""
    taps = _taps()
    return stream if taps is None else watched("final", taps.final, stream)


def _taps() -> Taps | None:
    return None if _here.value is None else _here.value.taps


def _at_site(after: jax.Array, block: Any, site: str, **others: jax.Array) -> jax.Array:
    listener = _here.value
    if listener is None:
        return after
    if listener.found is not None:
        listener.found.append((_known(block), site))
    taps = listener.taps
    if taps is None:
        return after
    plan = taps.plan
    if site not in plan.sites:
        raise not_one_of("site", site, plan.sites)
    return watched(plan.kind, _slot(taps.sites[:, plan.sites.index(site)], block, plan), after, **others)


def _slot(column: jax.Array, block: Any, plan: Plan) -> jax.Array:
    """One block's tap; a traced number beyond the last block is clipped, and then counted there twice."""
    if not isinstance(block, jax.core.Tracer):
        number = _known(block)
        if not 0 <= number < plan.blocks:
            raise Refused(f"block is {number}, and the plan has {plan.blocks}: 0 to {plan.blocks - 1}")
    return column.at[block].get(mode="clip")


def _known(block: Any) -> int:
    if isinstance(block, jax.core.Tracer):
        raise Refused(
            "the number of a block is traced (a scan over blocks, say), so adds cannot be counted; give watch.Plan(blocks=..., sites=...)"
        )
    try:
        return operator.index(block)
    except TypeError:
        raise Refused(f"block is {block!r}, and has to be a whole number from 0") from None
