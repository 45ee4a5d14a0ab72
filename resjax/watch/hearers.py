"""What may be done at an add that is not ours? Keep the stream, take the update away, round what is stored, measure, pull a gradient back.

Each is a :class:`~resjax.watch.context.Hearer` for one trace of a forward pass. Which block it is about is data, so that one program
serves all blocks; what it finds it writes into references (``jax.new_ref``), which go through ``jax.jit``, ``lax.scan``,
``jax.checkpoint`` and ``lax.cond``, or, of a backward pass, returns as the gradient of zeros.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from resjax.health.arithmetic import round_to
from resjax.health.probes import measure_block
from resjax.health.spectra import residual_form
from resjax.health.studies.rounding import FIGURES, FORMATS, key_of, lost
from resjax.residual.connection import faded
from resjax.residual.precision import exact, rms
from resjax.watch.context import Add, Hearer, numbered, place, plain
from resjax.watch.plan import Plan
from resjax.watch.tap import held, of_site

PULLED = ("unit", "lengths", "along", "squares", "passed")  # what a gradient leaves at an add; see Pulling


class Surveyed(NamedTuple):
    """One add of a trace: shapes and dtypes only.

    Attributes:
      site: which add of its block.
      shape, dtype: of the stream after it; the dtype holds what it is added to as well.
      is_sum: nothing is done with the sum, or it is a change: without its update the stream is what it was.
      alterable: the stream can be made again from another sum.
    """

    site: str
    shape: tuple[int, ...]
    dtype: Any
    is_sum: bool
    alterable: bool


class Surveying(Hearer):
    """Lists the adds of a trace.

    Attributes:
      adds: that were passed in the trace; those in the body of a scan once.
      mapped: whether one stands inside ``jax.vmap``.
      contrary: two sites of a block, in the order in which they are passed, if that is not the plan's.
    """

    def __init__(self, plan: Plan):
        self.plan, self.adds, self.mapped = plan, list[Surveyed](), False
        self.contrary: tuple[str, str] | None = None
        self._last: tuple[Any, int] = (None, -1)  # block and site of the add before

    def site(self, add: Add) -> jax.Array:
        site = place(self.plan, add)[1]
        block, before = self._last
        same = block is add.block or (isinstance(block, int) and block == add.block)
        if same and site < before:
            self.contrary = self.plan.sites[before], add.site
        self._last = add.block, site
        change = add.kept is None
        dtype = jnp.promote_types(add.after.dtype, add.beside.dtype)
        self.adds.append(
            Surveyed(add.site, add.after.shape, dtype, change or add.join is plain, change or add.join is not None)
        )
        mark = jax.custom_batching.custom_vmap(lambda x: x)

        @mark.def_vmap
        def _(size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            self.mapped = True
            return x, batched[0]

        return mark(add.after)


def noted(number: Any, write: Callable[[], None]) -> None:
    """Does what ``write`` does to references, in block ``number``.

    Where that is traced, on a condition that always holds and depends on it: Linen's ``nn.scan`` first traces a block for what does not
    depend on its inputs, and can take references only where they are part of what does.
    """
    if isinstance(number, jax.core.Tracer):
        jax.lax.cond(number >= 0, write, lambda: None)
    else:
        write()


class Keeping(Hearer):
    """Factors on what each add adds: 0 takes its update away, 1 changes nothing.

    Args:
      keep: (block, site) float32.
      passed: reference (block, site) int32, in which passes are counted.
    """

    def __init__(self, plan: Plan, keep: jax.Array, passed: Any):
        self.plan, self.keep, self.passed = plan, keep, passed

    def site(self, add: Add) -> jax.Array:
        here = place(self.plan, add)
        noted(here[0], lambda: self.passed.__setitem__(here, self.passed[here] + 1))
        keep = self.keep[here]
        if add.kept is None:
            return jnp.where(keep == 1, add.after, add.beside + faded(keep, add.after - add.beside))
        if add.join is None:
            return add.after
        return add.join(add.kept + faded(keep, add.update)).astype(add.after.dtype)


class Capturing(Hearer):
    """The stream before some blocks in a row, and after the last add that was passed.

    Args:
      first: number of the first of these blocks.
      window: reference (blocks in a row, batch, ..., width), zeros.
      last: reference (batch, ..., width).
      begun: reference (block,) bool, False: whether a block was entered.
    """

    def __init__(self, plan: Plan, first: jax.Array, window: Any, last: Any, begun: Any):
        self.plan, self.first, self.window, self.last, self.begun = plan, first, window, last, begun

    def site(self, add: Add) -> jax.Array:
        number, _ = place(self.plan, add)
        row, rows = number - self.first, self.window.shape[0]
        stream = jnp.broadcast_to(add.beside, add.after.shape).astype(self.window.dtype)

        def keep() -> None:
            self.window[jnp.clip(row, 0, rows - 1)] = stream

        def write() -> None:
            jax.lax.cond((row >= 0) & (row < rows) & ~self.begun[number], keep, lambda: None)
            self.begun[number] = jnp.asarray(True)
            self.last[...] = add.after.astype(self.last.dtype)

        noted(number, write)
        return add.after


class Measuring(Hearer):
    """All forward probes of these groups; of the ranks what they are worked out from, which is dearer than all else, at the end at once.

    Args:
      groups: without ranks.
      sites: reference (block, site, probe) float32; blocks: reference (block,); ends: reference (2,), of embed_rms and final_rms.
      forms: reference (block, site, 2, n) float32, zeros, the forms of the ranks, n the largest there is; attainable: reference
        (block, site). None where no ranks are asked for.
    """

    def __init__(
        self, plan: Plan, groups: tuple[str, ...], sites: Any, blocks: Any, ends: Any, forms: Any, attainable: Any
    ):
        self.plan, self.groups, self.sites, self.blocks, self.ends = plan, groups, sites, blocks, ends
        self.forms, self.attainable = forms, attainable

    def site(self, add: Add) -> jax.Array:
        here = place(self.plan, add)

        def write() -> None:
            found = of_site(held(add.after, add.parts), self.groups)
            self.sites[here] = jnp.stack([jnp.asarray(one, jnp.float32) for one in found.values()])
            if self.forms is not None:
                form, attainable = residual_form(add.after)
                more = self.forms.shape[-1] - form.shape[-1]
                self.forms[here] = jnp.pad(form.astype(jnp.float32), ((0, 0), (0, more)))
                self.attainable[here] = jnp.float32(attainable)

        noted(here[0], write)
        return add.after

    def block(self, before: jax.Array, after: jax.Array, number: Any) -> jax.Array:
        here = numbered(self.plan, number)
        noted(here, lambda: self.blocks.__setitem__(here, measure_block(before, after)["update_ratio_block"]))
        return after

    def embedded(self, stream: jax.Array) -> jax.Array:
        self.ends[0] = rms(stream).astype(jnp.float32)
        return stream

    def final(self, stream: jax.Array) -> jax.Array:
        self.ends[1] = rms(stream).astype(jnp.float32)
        return stream


class Rounding(Hearer):
    """What every add stores, and the embedding, rounded to one of ``FORMATS``; as resjax's own sites do it.

    Args:
      code: number of the format.
      figures: reference (block, site, figure) float32, the figures being ``FIGURES``.
      last: reference (batch, ..., width) float32, of the stream after the last add that was passed.
    """

    def __init__(self, plan: Plan, code: jax.Array, figures: Any, last: Any):
        self.plan, self.code, self.figures, self.last = plan, code, figures, last

    def site(self, add: Add) -> jax.Array:
        here = place(self.plan, add)
        key = key_of(jnp.asarray(here[0] * len(self.plan.sites) + here[1], jnp.int32))
        if add.kept is None or add.join is None:
            after = self._rounded(add.after, key)
        else:
            after = self._rounded(add.kept + add.update, key)
            if add.join is not plain:
                after = self._rounded(add.join(after.astype(add.kept.dtype)), key)

        def write() -> None:
            if add.kept is not None:
                self.figures[here] = self._lost(*(exact(x) for x in jnp.broadcast_arrays(add.update, add.kept)))
            self.last[...] = after.astype(self.last.dtype)

        noted(here[0], write)
        return after.astype(add.after.dtype)

    def embedded(self, stream: jax.Array) -> jax.Array:
        return self._rounded(stream, key_of(-1)).astype(stream.dtype)

    def _lost(self, update: jax.Array, kept: jax.Array) -> jax.Array:
        """The figures of an add in the format."""
        nearest = [partial(round_to, dtype=dtype) for dtype, _ in FORMATS.values()]
        kept = jax.lax.switch(self.code, nearest, kept)
        found = lost(update, kept, self._rounded(kept + update, jax.random.key(0)))
        return jnp.stack([jnp.asarray(found[name], jnp.float32) for name in FIGURES])

    def _rounded(self, x: jax.Array, key: jax.Array) -> jax.Array:
        ways = [
            lambda x, key, dtype=dtype, rounding=rounding: round_to(x, dtype, rounding, key)
            for dtype, rounding in FORMATS.values()
        ]
        return jax.lax.switch(self.code, ways, x, key)


class Pulling(Hearer):
    """What the gradient of the loss is at the stream after each add, and at the embedding.

    Its size may be beyond what a square holds, so all is told in units of its largest element. Of zeros (see ``PULLED``) the gradient
    is: that largest element; the sum over tokens of the length; the product with ``along``; the sum of squares; and 1.

    Args:
      zeros: (block, site, 5); entry: (5,), of the embedding.
      along: (batch, ..., width) float32, to take the product with.
      slot: (batch, ..., width) float32 zeros, whose gradient is that after the add ``last``.
      last: (2,) block and site of that add.
    """

    def __init__(
        self, plan: Plan, zeros: jax.Array, entry: jax.Array, along: jax.Array, slot: jax.Array, last: jax.Array
    ):
        self.plan, self.zeros, self.entry, self.along, self.slot, self.last = plan, zeros, entry, along, slot, last

    def site(self, add: Add) -> jax.Array:
        number, site = place(self.plan, add)
        here = (self.last[0] == number) & (self.last[1] == site)
        return _pulled(add.after, self.zeros[number, site], self.slot, self.along, here)

    def embedded(self, stream: jax.Array) -> jax.Array:
        if stream.shape != self.along.shape:
            return stream
        return _pulled(stream, self.entry, self.slot, self.along, jnp.asarray(False))


@jax.custom_vjp
def _pulled(x: jax.Array, number: jax.Array, slot: jax.Array, along: jax.Array, here: jax.Array) -> jax.Array:
    del number, slot, along, here
    return x


def _pulled_forward(x: jax.Array, number: jax.Array, slot: jax.Array, along: jax.Array, here: jax.Array) -> tuple:
    del number, slot
    return x, (along, here)


def _pulled_backward(kept: tuple, gradient: jax.Array) -> tuple:
    along, here = kept
    size = exact(gradient)
    largest = jnp.max(jnp.abs(size))
    size = size / jnp.where(largest > 0, largest, 1)
    squares = jnp.sum(jnp.square(size), axis=-1)
    told = largest, jnp.sum(jnp.sqrt(squares)), jnp.sum(size * along), jnp.sum(squares), jnp.ones(())
    row = jnp.stack([jnp.asarray(one, jnp.float32) for one in told])
    return gradient, row, jnp.where(here, exact(gradient), 0).astype(along.dtype), None, None


_pulled.defvjp(_pulled_forward, _pulled_backward)
