"""How is the forward pass of a model that is not ours run again, watched or altered? One program a question, whatever the block."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from resjax.errors import Refused
from resjax.health.probes import ranks
from resjax.health.studies.rounding import FIGURES, FORMATS
from resjax.health.studies.subject import MOST, Spread
from resjax.watch.context import Hearer, find, heard_by
from resjax.watch.hearers import (
    PULLED,
    Capturing,
    Keeping,
    Measuring,
    Pulling,
    Rounding,
    Surveyed,
    Surveying,
)
from resjax.watch.plan import GROUPS, Plan, refuse_counts
from resjax.watch.tap import site_probes

LINEN_SCAN = "data dependency on the scan body"  # what Flax from 0.12.12 on says of references that are written there
MEMORY = 2**30  # bytes of streams that one pass keeps
NNX_JITTED = type(nnx.jit(lambda: None))


class Answer(NamedTuple):
    """What the function of a user returns: its loss (float32), and the logits or None."""

    loss: jax.Array
    logits: jax.Array | None


class Pulled(NamedTuple):
    """Of one batch, all of the loss summed over tokens: the gradient's numbers (see ``PULLED``), and itself after the last add.

    Attributes:
      sites: (block, site, 5) float64; entry: (5,), of the embedding; last: (batch, ..., width).
    """

    sites: np.ndarray
    entry: np.ndarray
    last: np.ndarray


class Passes(Spread):
    """A model that is not ours, with its batches, as the studies look at it.

    Args:
      f: ``f(model, batch)`` -> the loss, one number, or (the loss, logits (batch, ..., vocabulary)); with the calls of
        :mod:`resjax.watch` in it.
      model: Flax NNX modules, or any pytree of arrays such as Linen's variables.
      batches: pytrees of one form each.
      plan: its adds; None = they are looked for.
      tokens: batch -> integers (batch, time + 1), the last of a row only a target; None where there are none.
      partial: allow for adds of the plan that the model does not pass.
      most: blocks that are looked at where each costs a pass.
      memory: bytes of streams that one pass keeps, but never less than one block's.

    Raises:
      Refused: an add that the plan does not have, that was passed twice or not at all; a loss that is no number; batches of several forms;
        adds inside ``jax.vmap``.
    """

    of_bytes = False

    def __init__(
        self,
        f: Callable[[Any, Any], Any],
        model: Any,
        batches: Sequence[Any],
        plan: Plan | None = None,
        tokens: Callable[[Any], Any] | None = None,
        partial: bool = False,
        most: int = MOST,
        memory: int = MEMORY,
    ):
        # NNX modules do not pass from jax.grad into nnx.jit
        self.f = f.__wrapped__ if isinstance(f, NNX_JITTED) else f
        self.batches, self.most, self.memory = list(batches), most, memory
        if not self.batches:
            raise Refused("batches is empty, and a study wants one or more")
        if most < 2:
            raise Refused(
                f"most is {most}, and has to be 2 or more: the first and the last block are always among them"
            )
        forms = [_form(batch) for batch in self.batches]
        if odd := next((i for i, form in enumerate(forms) if form != forms[0]), 0):
            raise Refused(
                f"batch {odd} has the form {forms[odd][1]}, and batch 0 has {forms[0][1]}: all have to be alike"
            )
        parts = jax.tree.leaves(model, is_leaf=_is_nnx)
        self.graph: Any = None  # of NNX modules
        self.state: Any = model
        if any(map(_is_nnx, parts)):
            self.graph, self.state = nnx.split(model)
        self.plan = plan or find(self._outcome, self.state, self.batches[0])
        self._survey()
        self._tokens = tokens
        counts = self._answers(self.state, self.batches[0], self.whole)[2]
        refuse_counts(self.plan, np.asarray(counts), partial)
        self.passed = np.asarray(counts) > 0

    # ------------------------------------------------------------------ the model

    def _outcome(self, state: Any, batch: Any) -> Answer:
        out = self.f(state if self.graph is None else nnx.merge(self.graph, state, copy=True), batch)
        pair = out if isinstance(out, tuple) else (out, None)
        loss = pair[0]
        if len(pair) != 2 or jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            raise Refused(
                f"the function returns {_told(out)}, and has to return the loss, one number, or the pair of it and the logits"
            )
        return Answer(jnp.asarray(loss).astype(jnp.float32), pair[1])

    def _heard(self, hearer: Hearer, state: Any, batch: Any) -> Answer:
        try:
            with heard_by(hearer):
                return self._outcome(state, batch)
        except ValueError as error:
            if LINEN_SCAN not in str(error):
                raise
            raise Refused(
                "this version of Linen's nn.scan does not let a study look into its body; give a function whose blocks are unrolled or in "
                "jax.lax.scan, or the streams to watch.study_streams"
            ) from error

    def _survey(self) -> None:
        """What the adds are, without computing anything."""
        survey = Surveying(self.plan)
        out = jax.eval_shape(lambda state, batch: self._heard(survey, state, batch), self.state, self.batches[0])
        if not survey.adds:
            raise Refused("the function has no watch.add in it; call it where an update joins the stream")
        if survey.contrary:
            first, then = survey.contrary
            raise Refused(
                f"'{first}' is passed before '{then}' in a block, and the plan has them the other way round; a study wants "
                "Plan(sites=...) in the order of the adds"
            )
        if survey.mapped:
            raise Refused(
                "the adds stand inside jax.vmap, and a study keeps the stream of a whole batch; let the model take the batch as it is"
            )
        self.adds: list[Surveyed] = list(dict.fromkeys(survey.adds))
        self.has_logits = out.logits is not None

    # ------------------------------------------------------------------ as studies ask

    @property
    def depth(self) -> int:
        return self.plan.blocks

    @property
    def whole(self) -> np.ndarray:
        """Factors (block, site) that take nothing away."""
        return np.ones((self.plan.blocks, len(self.plan.sites)), np.float32)

    @cached_property
    def sequences(self) -> np.ndarray | None:
        """(rows, time + 1) tokens of all batches; None where none are given.

        Raises:
          Refused: they are not integers of the stream's rows and positions.
        """
        if self._tokens is None:
            return None
        rows = [np.asarray(self._tokens(batch)) for batch in self.batches]
        batch, *places = self.stream.shape[:-1]
        want = (batch, prod(places) + 1)
        for row in rows:
            refuse_tokens(row, want)
        return np.concatenate(rows)

    @property
    def stream(self) -> Surveyed:
        """What all adds have in common.

        Raises:
          Refused: streams of several shapes, or without an axis for the width.
        """
        one, *others = self.adds
        if other := next((add for add in others if add.shape != one.shape), None):
            raise Refused(
                f"the stream is {list(one.shape)} at '{one.site}' and {list(other.shape)} at '{other.site}', and only streams of one "
                "shape are compared"
            )
        if len(one.shape) < 2:
            raise Refused(f"the stream is {list(one.shape)}, and has to be (batch, ..., width)")
        return one._replace(dtype=jnp.result_type(*(add.dtype for add in self.adds)))

    def need(self, what: str, of: str) -> None:
        """Refuse unless every add has the property ``of`` of :class:`~resjax.watch.hearers.Surveyed`."""
        if odd := next((add for add in self.adds if not getattr(add, of)), None):
            raise Refused(f"'{odd.site}' {what}")

    # ------------------------------------------------------------------ what is answered

    def losses(self, keep: np.ndarray | None = None) -> np.ndarray:
        """The loss of every batch, float64, with factors (block, site) on what each add adds."""
        return self.answers(keep)[0]

    def answers(self, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """The loss of every batch, and the likeliest class at every place (batches, ...); None without logits."""
        keep = self.whole if keep is None else np.asarray(keep, np.float32)
        found = [self._answers(self.state, batch, keep)[:2] for batch in self.batches]
        tops = np.stack([np.asarray(top) for _, top in found]) if self.has_logits else None
        return np.array([loss for loss, _ in found], np.float64), tops

    @cached_property
    def _answers(self) -> Callable[..., Any]:
        def program(state: Any, batch: Any, keep: jax.Array) -> tuple:
            passed = jax.new_ref(jnp.zeros(keep.shape, jnp.int32))
            loss, logits = self._heard(Keeping(self.plan, keep, passed), state, batch)
            return loss, None if logits is None else jnp.argmax(logits, axis=-1), passed[...]

        return jax.jit(program)

    def loss_of(self, batch: Any) -> float:
        """The loss of a batch that is none of these."""
        return float(self._answers(self.state, batch, self.whole)[0])

    def logits(self, model: Any = None) -> Iterator[np.ndarray]:
        """The logits of every batch, of this model or of one of the same form.

        Raises:
          Refused: the function returns none, or the model has another form.
        """
        if not self.has_logits:
            raise Refused("the function returns no logits: let it return (loss, logits)")
        state = self.state
        if model is not None:
            state = model if self.graph is None else nnx.split(model)[1]
            if _form(state) != _form(self.state):
                raise Refused("next_model has another form than the model: other parameters, shapes or dtypes")
        for batch in self.batches:
            yield np.asarray(self._logits(state, batch), np.float32)

    @cached_property
    def _logits(self) -> Callable[..., Any]:
        return jax.jit(lambda state, batch: self._outcome(state, batch).logits)

    # ------------------------------------------------------------------ what flows

    def layers(self, points: Sequence[int] | None = None, rows: int | None = None) -> Iterator[jax.Array]:
        """Before each of the ``points``, ascending, the stream of all tokens, (rows, tokens, width) in its own dtype.

        As many blocks are kept at once as ``memory`` holds: a pass over all batches for each lot. ``rows``: of so many rows at least.
        """
        stream = self.stream
        batches = self.batches[: None if rows is None else -(-rows // stream.shape[0])]
        one = len(batches) * prod(stream.shape) * jnp.dtype(stream.dtype).itemsize
        count = max(1, min(self.depth, self.memory // one))
        shape = stream.shape[0], prod(stream.shape[1:-1]), stream.shape[-1]
        held = range(0)
        windows: list[jax.Array] = []
        lasts: list[jax.Array] = []
        for point in self.points if points is None else points:
            if point not in held and (point < self.depth or not lasts):
                held = range(point, point + count)
                found = [self._captured(self.state, batch, np.int32(point), count) for batch in batches]
                windows, lasts = ([pair[i] for pair in found] for i in (0, 1))
            parts = [window[point - held.start] for window in windows] if point < self.depth else lasts
            yield jnp.concatenate([part.reshape(shape) for part in parts])

    @cached_property
    def _captured(self) -> Callable[..., Any]:
        shape, dtype = self.stream.shape, self.stream.dtype

        def program(state: Any, batch: Any, first: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
            window, last = jax.new_ref(jnp.zeros((count, *shape), dtype)), jax.new_ref(jnp.zeros(shape, dtype))
            begun = jax.new_ref(jnp.zeros(self.depth, bool))
            self._heard(Capturing(self.plan, first, window, last, begun), state, batch)
            return window[...], last[...]

        return jax.jit(program, static_argnums=3)

    @cached_property
    def probes(self) -> list[dict[str, np.ndarray]]:
        """Of every batch all forward probes: (block, site), (block,) and numbers; NaN where nothing is watched."""
        return self._measured(GROUPS)

    @cached_property
    def ratios(self) -> np.ndarray:
        """Token mean of |update| / |what it is added to|, (block, site), over all batches."""
        rows = self.probes if "probes" in vars(self) else self._measured(())
        return np.mean([row["update_ratio"] for row in rows], axis=0)

    def _measured(self, groups: tuple[str, ...]) -> list[dict[str, np.ndarray]]:
        others = tuple(group for group in groups if group != "ranks")
        names, shape = site_probes(others), (self.plan.blocks, len(self.plan.sites))
        most = max(min(prod(add.shape[:-1]), add.shape[-1]) for add in self.adds)

        def program(state: Any, batch: Any) -> dict[str, jax.Array]:
            sites, blocks, ends, attainable = (
                jax.new_ref(jnp.full(size, jnp.nan, jnp.float32))
                for size in ((*shape, len(names)), shape[:1], (2,), shape)
            )
            forms = jax.new_ref(jnp.zeros((*shape, 2, most), jnp.float32)) if others != groups else None
            self._heard(Measuring(self.plan, others, sites, blocks, ends, forms, attainable), state, batch)
            found = dict(zip(names, jnp.moveaxis(sites[...], -1, 0), strict=True))
            found |= {"update_ratio_block": blocks[...], "embed_rms": ends[0], "final_rms": ends[1]}
            if forms is None:
                return found
            there = ~jnp.isnan(attainable[...])
            of_all = ranks(forms[...], attainable[...])
            return found | {name: jnp.where(there, value, jnp.nan) for name, value in of_all.items()}

        run = jax.jit(program)
        return [jax.tree.map(np.asarray, run(self.state, batch)) for batch in self.batches]

    def rounded(self, name: str, number: int) -> tuple[jax.Array, jax.Array, dict[str, np.ndarray]]:
        """Of batch ``number``, with all adds rounded to one of ``FORMATS``: the loss, the last stream, the ``FIGURES`` (block, site)."""
        code = np.int32(list(FORMATS).index(name))
        loss, last, figures = self._rounded(self.state, self.batches[number], code)
        return loss, last, dict(zip(FIGURES, np.moveaxis(np.asarray(figures), -1, 0), strict=True))

    @cached_property
    def _rounded(self) -> Callable[..., Any]:
        shape = self.stream.shape

        def program(state: Any, batch: Any, code: jax.Array) -> tuple[jax.Array, ...]:
            figures = jax.new_ref(jnp.full((self.depth, len(self.plan.sites), len(FIGURES)), jnp.nan, jnp.float32))
            last = jax.new_ref(jnp.zeros(shape, jnp.float32))
            answer = self._heard(Rounding(self.plan, code, figures, last), state, batch)
            return answer.loss, last[...], figures[...]

        return jax.jit(program)

    # ------------------------------------------------------------------ what comes back

    def pulled(self) -> Iterator[Pulled]:
        """The gradient of every batch, in two passes: the second takes its product with what the first has after the last add.

        Raises:
          Refused: the function changes its modules where a gradient does not let it, as ``nnx.jit`` inside does.
        """
        shape = self.stream.shape
        site = int(np.flatnonzero(self.passed[-1])[-1]) if self.passed[-1].any() else len(self.plan.sites) - 1
        for batch in self.batches:
            end = np.array([self.depth - 1, site], np.int32)
            try:
                *_, last = self._pulled(self.state, batch, np.zeros(shape, np.float32), end)
            except TraceContextError as error:
                raise Refused(
                    "the function changes its modules, as nnx.jit inside and dropout do, and no gradient from outside lets it; take "
                    "nnx.jit off inside, and put the model in evaluation"
                ) from error
            largest = float(jnp.max(jnp.abs(last))) or 1.0
            sites, entry, _ = self._pulled(self.state, batch, last / largest, end)
            of_sites, of_entry = (np.asarray(one, np.float64) for one in (sites, entry))
            for one in (of_sites, of_entry):  # the product was with the unit of the last
                one[..., PULLED.index("along")] *= largest
            yield Pulled(of_sites, of_entry, np.asarray(last))

    @cached_property
    def _pulled(self) -> Callable[..., Any]:
        shape, tokens = self.stream.shape, prod(self.stream.shape[:-1])

        def program(state: Any, batch: Any, along: jax.Array, end: jax.Array) -> tuple[jax.Array, ...]:
            def summed(sites: jax.Array, entry: jax.Array, slot: jax.Array) -> jax.Array:
                # summed, not mean: a token's share of a mean over thousands is below what float16 holds
                return self._heard(Pulling(self.plan, sites, entry, along, slot, end), state, batch).loss * tokens

            zeros = jnp.zeros((self.depth, len(self.plan.sites), len(PULLED))), jnp.zeros(len(PULLED))
            return jax.grad(summed, argnums=(0, 1, 2))(*zeros, jnp.zeros(shape, jnp.float32))

        return jax.jit(program)


def refuse_tokens(tokens: np.ndarray, want: tuple[int, int]) -> None:
    """Refuse what are not integers of this shape."""
    if tokens.shape != want or tokens.dtype.kind not in "iu":
        raise Refused(
            f"tokens are {tokens.dtype}{list(tokens.shape)}, and have to be integers {list(want)}: one more than the stream has positions"
        )


def _is_nnx(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)


def _form(tree: Any) -> tuple[Any, list[str]]:
    """Structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}" for leaf in leaves]


def _told(out: Any) -> str:
    if isinstance(out, tuple):
        return f"({', '.join(map(_told, out))})"
    return f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else f"a {type(out).__name__}"
