"""Who hears the adds of a model? Whoever listens in the surrounding context; outside of one they are plain adds."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from resjax.errors import Refused, not_one_of
from resjax.watch.plan import Plan, Taps
from resjax.watch.tap import watched


class Add(NamedTuple):
    """One call of :func:`add`, :func:`joined` or :func:`change`; arrays (batch, ..., width).

    Attributes:
      block, site: where, as the model says it.
      after: the stream after it, as the model has it.
      update: what joins the stream.
      kept: what it joins; None where only before and after are known.
      beside: what the update is compared with: ``kept``, or the stream before.
      join: what makes the stream of the sum of ``kept`` and ``update``; None where that is not known.
    """

    block: Any
    site: str
    after: jax.Array
    update: jax.Array
    kept: jax.Array | None
    beside: jax.Array
    join: Callable[[jax.Array], jax.Array] | None

    @property
    def parts(self) -> dict[str, jax.Array]:
        """What is measured of it beside ``after``."""
        return {"update": self.update} | ({"beside": self.beside} if self.kept is None else {"kept": self.kept})


def plain(total: jax.Array) -> jax.Array:
    """Of a plain add the stream is the sum."""
    return total


class Hearer:
    """What becomes of the calls in a model. Each returns the stream that the model goes on with: by default its own."""

    def site(self, add: Add) -> jax.Array:
        return add.after

    def block(self, before: jax.Array, after: jax.Array, number: Any) -> jax.Array:
        return after

    def embedded(self, stream: jax.Array) -> jax.Array:
        return stream

    def final(self, stream: jax.Array) -> jax.Array:
        return stream


class Listener:
    """The hearer of one context; deaf once that is left.

    Part of the key of JAX's caches: a function that was traced in one context, and holds its taps, is traced anew in another one
    and outside. The caches keep the listener, so it must not keep the taps.
    """

    hearer: Hearer | None = None


_here: Any = jax.make_user_context(None)


@contextlib.contextmanager
def heard_by(hearer: Hearer) -> Iterator[None]:
    """Inside, every call goes to ``hearer``."""
    listener = Listener()
    listener.hearer = hearer
    try:
        with _here(listener):
            yield
    finally:
        listener.hearer = None


def _hearer() -> Hearer | None:
    return None if _here.value is None else _here.value.hearer


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
    with heard_by(_Reporting(taps)):
        yield


class _Reporting(Hearer):
    """Every place has its tap."""

    def __init__(self, taps: Taps):
        self.taps = taps

    def site(self, add: Add) -> jax.Array:
        plan = self.taps.plan
        number, site = place(plan, add)
        return watched(plan.kind, self.taps.sites[:, site].at[number].get(mode="clip"), add.after, **add.parts)

    def block(self, before: jax.Array, after: jax.Array, number: Any) -> jax.Array:
        tap = self.taps.blocks.at[numbered(self.taps.plan, number)].get(mode="clip")
        return watched("block", tap, after, before=before)

    def embedded(self, stream: jax.Array) -> jax.Array:
        return watched("embedded", self.taps.embedded, stream)

    def final(self, stream: jax.Array) -> jax.Array:
        return watched("final", self.taps.final, stream)


def find(f: Callable[..., Any], *arguments: Any) -> Plan:
    """The plan of a model: ``f(*arguments)`` is traced without computing anything, and its adds are listed.

    Raises:
      Refused: there are none; a block's number is not known before the program runs (in a scan over blocks); or two blocks have their
        adds in contrary orders.
    """
    found: list[tuple[int, str]] = []
    with heard_by(_Listing(found)):
        jax.eval_shape(lambda *inner: (f(*inner), None)[1], *arguments)
    if not found:
        raise Refused("the function has no watch.add in it; call it where an update joins the stream")
    return Plan(max(block for block, _ in found) + 1, _in_order(found))


def _in_order(found: list[tuple[int, str]]) -> tuple[str, ...]:
    """The sites in an order that that of every block agrees with."""
    before: dict[str, set[str]] = {site: set() for _, site in found}
    last: dict[int, str] = {}
    for block, site in found:
        if last.get(block, site) != site:
            before[site].add(last[block])
        last[block] = site
    try:
        return tuple(TopologicalSorter(before).static_order())
    except CycleError as error:
        listed = ", ".join(f"'{site}'" for site in dict.fromkeys(error.args[1]))
        raise Refused(
            f"the adds {listed} stand in contrary orders in two blocks; give those of one of them other names"
        ) from None


class _Listing(Hearer):
    def __init__(self, found: list[tuple[int, str]]):
        self.found = found

    def site(self, add: Add) -> jax.Array:
        self.found.append((known(add.block), add.site))
        return add.after


# ---- the calls in a model


def add(stream: jax.Array, update: jax.Array, *, block: Any, site: str) -> jax.Array:
    """``stream + update``, watched.

    Args:
      stream, update: (batch, ..., width).
      block: number of the block from 0; may be traced, as in a scan over blocks.
      site: which add of the block.

    Raises:
      Refused: inside :func:`into` or a study, a block or site that its plan does not have.
    """
    after, hearer = stream + update, _hearer()
    return after if hearer is None else hearer.site(Add(block, site, after, update, stream, stream, plain))


def joined(
    after: jax.Array | Callable[[jax.Array], jax.Array], *, kept: jax.Array, update: jax.Array, block: Any, site: str
) -> jax.Array:
    """The stream, watched, where it is not the plain sum of ``kept`` and ``update``, such as a norm of it (Post-LN).

    Args:
      after: the stream; or what makes it of the sum, such as the norm itself: only then can a study take the update away.
      kept, update, block, site: as of :func:`add`.
    """
    made, join = (after(kept + update), after) if callable(after) else (after, None)
    hearer = _hearer()
    return made if hearer is None else hearer.site(Add(block, site, made, update, kept, kept, join))


def change(before: jax.Array, after: jax.Array, *, block: Any, site: str) -> jax.Array:
    """``after``, watched, where only the stream before and after is at hand, or nothing is added (gates): the update is the difference.

    What an add would have swallowed cannot be told then, and is NaN.
    """
    if (hearer := _hearer()) is None:
        return after
    update = jax.lax.stop_gradient(after) - jax.lax.stop_gradient(before)
    return hearer.site(Add(block, site, after, update, None, before, None))


def block(before: jax.Array, after: jax.Array, *, block: Any) -> jax.Array:
    """``after``, watched: the stream ``before`` and after a whole block, for update_ratio_block."""
    hearer = _hearer()
    return after if hearer is None else hearer.block(before, after, block)


def embedded(stream: jax.Array) -> jax.Array:
    """``stream``, watched: what enters the first block, for embed_rms and embed_grad."""
    hearer = _hearer()
    return stream if hearer is None else hearer.embedded(stream)


def final(stream: jax.Array) -> jax.Array:
    """``stream``, watched: what the head reads, after the final norm, for final_rms."""
    hearer = _hearer()
    return stream if hearer is None else hearer.final(stream)


# ---- where a call stands in a plan


def place(plan: Plan, add: Add) -> tuple[Any, int]:
    """Block and site of a call; a traced block beyond the last is clipped, and then counted there twice.

    Raises:
      Refused: the plan does not have it.
    """
    if add.site not in plan.sites:
        raise not_one_of("site", add.site, plan.sites)
    return numbered(plan, add.block), plan.sites.index(add.site)


def numbered(plan: Plan, block: Any) -> Any:
    """A block's number, clipped where it is traced."""
    if isinstance(block, jax.core.Tracer):
        return jnp.clip(block, 0, plan.blocks - 1)
    number = known(block)
    if not 0 <= number < plan.blocks:
        raise Refused(f"block is {number}, and the plan has {plan.blocks}: 0 to {plan.blocks - 1}")
    return number


def known(block: Any) -> int:
    """A block's number as an integer."""
    if isinstance(block, jax.core.Tracer):
        raise Refused(
            "the number of a block is traced (a scan over blocks, say), so adds cannot be counted; give watch.Plan(blocks=..., sites=...)"
        )
    try:
        return operator.index(block)
    except TypeError:
        raise Refused(f"block is {block!r}, and has to be a whole number from 0") from None
