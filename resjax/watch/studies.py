"""What do studies of a state say of a model that is not ours? Those of resjax that need no more than its adds, from its own function."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.errors import Refused, not_one_of
from resjax.health.probes import merged
from resjax.health.studies.ablation import worth
from resjax.health.studies.decoding import decoding
from resjax.health.studies.gradient import by_depth
from resjax.health.studies.lens import read_out
from resjax.health.studies.massive import massive
from resjax.health.studies.rounding import FORMATS, replayed
from resjax.health.studies.similarity import similarity
from resjax.health.studies.steadiness import logged, swinging
from resjax.health.studies.subject import MOST, Spread
from resjax.health.studies.update import figures, moved
from resjax.watch.hearers import PULLED
from resjax.watch.passes import MEMORY, Passes, Pulled, refuse_tokens
from resjax.watch.plan import Plan

# What a function of somebody else's may not let be done to it, and what a device may not hold: one study less, the others stay.
LEFT_OUT = Refused, NotImplementedError, TypeError, ValueError, jax.errors.JaxRuntimeError
OWN_ONLY = {  # of resjax's studies, and why not
    "order": "whose blocks change places",
    "jacobian": "whose blocks are differentiated one by one",
}


class Studies(dict[str, dict[str, Any]]):
    """What each study found, by name; see docs/doctor.md for what they are.

    Attributes:
      notes: a line for each that was left out, and why.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


def study(
    f: Callable[[Any, Any], Any],
    model: Any,
    batches: Sequence[Any],
    *,
    names: str | Sequence[str] | None = None,
    plan: Plan | None = None,
    tokens: Callable[[Any], Any] | None = None,
    next_model: Any = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    batch_of: Callable[[int], Any] | None = None,
    partial: bool = False,
    most: int = MOST,
    memory: int = MEMORY,
) -> Studies:
    """Studies of a state of a model that has the calls of :mod:`resjax.watch` in it.

    The model is run with its updates altered (left out, rounded), its streams kept, its gradients measured; which block is data, so that
    one program serves all. ``jax.jit``, ``lax.scan`` over blocks and ``jax.checkpoint`` may be inside, ``jax.vmap`` around an add may not.

    Args:
      f: ``f(model, batch)`` -> the loss, a mean over places and one number, or the pair of it and the logits (..., classes). As in
        evaluation: what is drawn at random in it makes noise of every difference.
      model: Flax NNX modules, or any pytree of arrays such as Linen's variables; left as it is.
      batches: held-out ones, pytrees of one form; 4,096 tokens in all are what the doctor takes.
      names: of the studies; None = all that can be made of what is given.
      plan: the adds; None = found in ``f``, if blocks are numbered by plain integers.
      tokens: batch -> integers (batch, time + 1), the last of a row only a target; for ``decoding``, and ``massive`` tells which they are.
      next_model: the model after one more step of training, for ``update``.
      rows: rows of metrics.jsonl with ``step`` and ``loss``, such as ``Log.rows``, for ``steadiness``; with
        batch_of: step -> its batch, on which the model is run as it is now.
      partial: allow for adds of the plan that are not passed.
      most: blocks that are looked at where each costs a pass over all batches.
      memory: bytes of streams that one pass keeps, never less than those of one block; ``similarity`` itself holds up to ``most`` + 1
        streams.

    Returns:
      By name what the study of that name in :data:`resjax.health.studies.STUDIES` says it returns, NaN where the model does not tell.
      ``lens`` reads the stream out by leaving out all later updates; without logits its ``settled`` is NaN.

    Raises:
      Refused: no such study, or one that ``names`` asks for cannot be made; see also :class:`~resjax.watch.passes.Passes`.
    """
    names = (names,) if isinstance(names, str) else names
    for name in names or ():
        if name in OWN_ONLY:
            raise Refused(
                f"study '{name}' is of resjax's own models only, {OWN_ONLY[name]}; there are {', '.join(NAMES)}"
            )
        if name not in NAMES:
            raise not_one_of("names", name, NAMES)
    passes = Passes(f, model, batches, plan, tokens, partial, most, memory)
    made = MADE | {
        "update": functools.partial(_update, next_model=next_model),
        "steadiness": functools.partial(_steadiness, rows=rows, batch_of=batch_of),
    }
    found = Studies()
    for name in NAMES if names is None else dict.fromkeys(names):
        try:
            found[name] = made[name](passes)
        except LEFT_OUT as error:
            if names is not None:
                raise
            found.notes.append(f"study '{name}' left out: {str(error).partition(chr(10))[0]}")
    return found


def study_streams(streams: Any, tokens: Any = None) -> Studies:
    """Studies of streams alone, from arrays that were kept, of any framework: ``similarity``, ``massive``, with tokens ``decoding``.

    Args:
      streams: (depth + 1, batch, ..., width), the stream before every block and after the last.
      tokens: integers (batch, time + 1), the last of a row only a target.

    Raises:
      Refused: shapes do not fit.
    """
    kept = Kept(streams, tokens)
    found = Studies()
    found |= {"similarity": similarity(kept), "massive": massive(kept)}
    if tokens is not None:
        found["decoding"] = decoding(kept)
    return found


class Kept(Spread):
    """Streams that are there already; see :class:`resjax.health.studies.subject.Layered`."""

    of_bytes, most = False, MOST

    def __init__(self, streams: Any, tokens: Any):
        self.streams = np.asarray(streams)
        if self.streams.ndim < 3 or len(self.streams) < 2:
            raise Refused(f"streams are {list(self.streams.shape)}, and have to be (depth + 1, batch, ..., width)")
        self.streams = self.streams.reshape(*self.streams.shape[:2], -1, self.streams.shape[-1])
        self.sequences = None if tokens is None else np.asarray(tokens)
        if self.sequences is not None:
            refuse_tokens(self.sequences, (self.streams.shape[1], self.streams.shape[2] + 1))

    @property
    def depth(self) -> int:
        return len(self.streams) - 1

    def layers(self, points: Sequence[int] | None = None, rows: int | None = None) -> Iterator[jax.Array]:
        for point in self.points if points is None else points:
            yield jnp.asarray(self.streams[point])


# ---- one function a study


def _probes(passes: Passes) -> dict[str, Any]:
    rows = passes.probes
    return {name: np.asarray(merged(name, jnp.stack([row[name] for row in rows]))) for name in rows[0]}


def _gradient(passes: Passes) -> dict[str, Any]:
    size, sums, tokens = np.zeros(passes.depth + 1), np.zeros((passes.depth, 3)), 0
    for pulled in passes.pulled():
        with np.errstate(all="ignore"):
            unit, lengths, along, squares, passed = np.moveaxis(by_place(pulled), -1, 0)
            known = np.where(passed > 0, 1, np.nan)
            size += known * unit * lengths
            last = np.sum(np.square(np.asarray(pulled.last, np.float64)))
            rows = known * unit * along, known * unit**2 * squares, np.full(len(unit), last)
            sums += np.stack(rows, axis=1)[:-1]
        tokens += pulled.last[..., 0].size
    return by_depth(size / tokens, sums)


def by_place(pulled: Pulled) -> np.ndarray:
    """The numbers of the gradient before every block and after the last, (depth + 1, 5): that after the last add that was passed before."""
    ends = [row[np.flatnonzero(row[:, PULLED.index("passed")])[-1:]].sum(axis=0) for row in pulled.sites]
    return np.stack([pulled.entry, *ends])


def _rounding(passes: Passes) -> dict[str, Any]:
    if passes.stream.dtype != jnp.float32:
        raise Refused(
            f"the stream is {passes.stream.dtype}, and adds are rounded from float32; give a function whose stream is float32"
        )
    passes.need(
        "is watched by the stream it makes, which cannot be rounded inside; give watch.joined the norm itself",
        "alterable",
    )
    return replayed(passes.rounded, tuple(FORMATS), len(passes.batches))


def _ablation(passes: Passes) -> dict[str, Any]:
    passes.need(
        "cannot be left out: watch.joined was given the stream; give it what makes it of the sum, such as the norm",
        "alterable",
    )
    blocks, sites = passes.blocks, len(passes.plan.sites)
    columns = [slice(None), *range(sites)] if sites > 1 else [slice(None)]
    whole = passes.losses()
    table = np.zeros((len(whole), len(blocks), len(columns)))
    for i, block in enumerate(blocks):
        for j, column in enumerate(columns):
            keep = passes.whole
            keep[block, column] = 0
            table[:, i, j] = passes.losses(keep) - whole
    return worth(blocks, whole.tolist(), table, passes.ratios[blocks])


def _lens(passes: Passes) -> dict[str, Any]:
    passes.need("makes something else of its sum, so that the stream does not reach the end as it is", "is_sum")
    points, losses, tops = passes.points, [], []
    for point in points:
        keep = passes.whole
        keep[point:] = 0
        loss, top = passes.answers(keep)
        losses.append(loss)
        tops.append(np.full_like(loss, np.nan)[:, None] if top is None else top)
    found = read_out(points, np.stack(losses, axis=1), np.stack(tops))
    return found if passes.has_logits else found | {"settled": np.full(len(points), np.nan)}


def _update(passes: Passes, next_model: Any) -> dict[str, Any]:
    if next_model is None:
        raise Refused("there is no next_model, the model after one more step")
    sums = np.zeros(3)
    for before, after in zip(passes.logits(), passes.logits(next_model), strict=True):
        sums += moved(before, after)
    return figures(sums) | {"lr": np.nan}


def _steadiness(
    passes: Passes, rows: Sequence[Mapping[str, Any]] | None, batch_of: Callable[[int], Any] | None
) -> dict[str, Any]:
    if rows is None:
        raise Refused("there are no rows with the training loss, such as Log.rows")
    steps, loss = logged(rows, max((int(row["step"]) for row in rows), default=0))
    return swinging(steps, loss, None if batch_of is None else functools.partial(_frozen, passes, batch_of))


def _frozen(passes: Passes, batch_of: Callable[[int], Any], steps: Sequence[int]) -> np.ndarray:
    """The loss of the model as it is on the batches of these steps."""
    return np.array([passes.loss_of(batch_of(step)) for step in steps])


MADE: dict[str, Callable[[Passes], dict[str, Any]]] = {
    "probes": _probes,
    "similarity": similarity,
    "lens": _lens,
    "massive": massive,
    "gradient": _gradient,
    "rounding": _rounding,
    "ablation": _ablation,
    "decoding": decoding,
}
NAMES = (*MADE, "update", "steadiness")
