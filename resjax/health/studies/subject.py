"""What do studies look at? A model at a state, with held-out tokens, gone through as it is or altered."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.studies.told import Told
from resjax.health.studies.walk import State, Walk
from resjax.models.lm import LM
from resjax.residual import Context, Flow
from resjax.residual.connection import Measure

MOST = 64  # blocks that a study looks at where each costs a forward pass
FLOWS = tuple(name for name in Flow._fields if name != "stored")  # what there is without a way to store
ENDS = ("embed_rms", "final_rms")  # probes of the model that are not of its sites


BYTES = 256  # tokens of a model that reads texts as bytes


class Spread(ABC):
    """Which blocks of a deep network are looked at: at most ``most`` of its ``depth``, evenly spread, the first and the last among them."""

    most: int

    @property
    @abstractmethod
    def depth(self) -> int: ...

    @property
    def blocks(self) -> list[int]:
        """Where each costs a forward pass."""
        return spread(self.depth, self.most)

    @property
    def points(self) -> list[int]:
        """Before which blocks the stream is looked at, depth being after the last: at most ``most`` + 1."""
        return spread(self.depth + 1, self.most + 1)


class Layered(Protocol):
    """What studies of streams ask of a model, resjax's own or not."""

    @property
    def depth(self) -> int: ...

    @property
    def points(self) -> list[int]:
        """Before which blocks the stream is looked at, the depth being after the last."""
        ...

    @property
    def sequences(self) -> np.ndarray | None:
        """Tokens (rows, T + 1), the last of each row only a target; None where there are none."""
        ...

    @property
    def of_bytes(self) -> bool:
        """Whether tokens are bytes of a text."""
        ...

    def layers(self, points: Sequence[int] | None = None, rows: int | None = None) -> Iterator[jax.Array]:
        """Before each of the ``points``, ascending, the stream (rows, T, D); of the first ``rows`` rows at least, or of all."""
        ...


class Origin(Protocol):
    """The run that a subject comes from, for studies that want more of it than its model."""

    def training_batch(self, step: int) -> np.ndarray:
        """The batch (B, T + 1) of step ``step``, from 1."""
        ...

    def next_model(self) -> LM | None:
        """The model after one more step of the run: its own batch, optimizer and learning rate; None where it is not finite."""
        ...

    @property
    def next_rate(self) -> float:
        """The learning rate of that step."""
        ...


@dataclass(frozen=True)
class Subject(Spread):
    """A language model at a state, and text to look at it by.

    Attributes:
      model: the model.
      batches: held-out tokens (n, B, T + 1), the last of each row only a target.
      step: optimizer steps that the model has done, for rules that move with training.
      compute: dtype of the branches.
      knobs: values of the scheme's knobs by name; a scheme has some only where a sweep varies its gains.
      config: resolved fields of its run, or None.
      rows: the run's rows of metrics.jsonl up to ``step``, or none.
      origin: the run, or None.
      notes: what a reader should know, one line each.
      most: blocks that a study looks at where each costs a forward pass; the first and the last are always among them.
    """

    model: LM
    batches: np.ndarray
    step: int = 0
    compute: str = "float32"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    origin: Origin | None = None
    notes: list[str] = field(default_factory=list)
    most: int = MOST

    def __post_init__(self) -> None:
        if self.batches.ndim != 3 or not self.batches.size or self.batches.shape[2] < 2:
            raise ValueError(f"batches are (n, B, T + 1) with T of 1 or more, and these are {self.batches.shape}")
        if self.most < 2:
            raise ValueError(f"most is {self.most}; the first and the last block make it 2 or more")

    @property
    def depth(self) -> int:
        return self.model.stack.depth

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the sites of a block are called."""
        return self.model.stack.kinds

    @property
    def tokens(self) -> int:
        """How many tokens the figures are over."""
        n, B, T = self.batches.shape
        return n * B * (T - 1)

    @property
    def sequences(self) -> np.ndarray:
        """Tokens (n * B, T + 1)."""
        return self.batches.reshape(-1, self.batches.shape[-1])

    @property
    def of_bytes(self) -> bool:
        return self.model.shape.vocab == BYTES

    @property
    def context(self) -> Context:
        """Of a forward pass: evaluation."""
        return Context(step=jnp.int32(self.step), knobs=self.knobs, compute=jnp.dtype(self.compute))

    @cached_property
    def walk(self) -> Walk:
        return Walk(self.model, self.context)

    def opened(self) -> Iterator[tuple[State, np.ndarray]]:
        """For every batch, the state before the first block and the targets (B, T)."""
        for batch in self.batches:
            yield self.walk.open(batch[:, :-1]), batch[:, 1:]

    @cached_property
    def loss(self) -> float:
        """Mean nats per token."""
        return float(np.mean([self.loss_of(state, targets) for state, targets in self.opened()]))

    def loss_of(self, state: State, targets: np.ndarray, keep: np.ndarray | None = None) -> float:
        """Mean nats per token of one batch when the network goes on from ``state``; ``keep`` as for :meth:`Walk.to`."""
        return self.walk.loss(self.walk.seen(self.walk.to_end(state, keep)), targets)

    def streams(self, points: list[int] | None = None) -> Iterator[jax.Array]:
        """For every batch, the stream before each of the ``points``, (points, B, T, D); see :meth:`Walk.seen`."""
        for state, _ in self.opened():
            seen = []
            for point in self.points if points is None else points:
                state = self.walk.to(state, point)
                seen.append(self.walk.seen(state))
            yield jnp.stack(seen)

    def layers(self, points: Sequence[int] | None = None, rows: int | None = None) -> Iterator[jax.Array]:
        """Before each of the ``points``, the stream of all tokens (n * B, T, D), or of the batches with the first ``rows`` rows; see
        :meth:`Walk.seen`.
        """
        batches = self.batches[: None if rows is None else -(-rows // self.batches.shape[1])]
        states = [self.walk.open(batch[:, :-1]) for batch in batches]
        for point in self.points if points is None else points:
            states = [self.walk.to(state, point) for state in states]
            yield jnp.concatenate([self.walk.seen(state) for state in states])

    def captured(self, *names: str) -> Iterator[dict[str, np.ndarray]]:
        """For every batch, arrays of each site's :class:`Flow` by name, (depth, sites, B, T, D); NaN where a scheme has none.

        Of several streams, what is kept and added is (depth, sites, n, B, T, D).

        Raises:
          ValueError: no such name.
        """
        if wrong := set(names) - set(FLOWS):
            raise ValueError(f"'{sorted(wrong)[0]}' is none of {', '.join(FLOWS)}")

        return self.measured(capturing(names))

    def measured(self, measure: Measure) -> Iterator[dict[str, np.ndarray]]:
        """For every batch, what ``measure`` gives of each site's :class:`Flow`, (depth, sites, ...).

        ``measure`` has to be the same object each time, so that it is compiled once.
        """
        told = Told.of(replace(self.context, measure=measure))
        for batch in self.batches:
            yield jax.device_get(_probed(told, self.model, jnp.asarray(batch[:, :-1])))


@jax.jit
def _probed(told: Told, model: LM, tokens: jax.Array) -> dict[str, jax.Array]:
    found = model(tokens, told.context)[1]
    return {name: value for name, value in found.items() if name not in ENDS}


@cache
def capturing(names: tuple[str, ...]) -> Measure:
    """A measure that keeps these arrays of a :class:`Flow` as they are; NaN for one that is not there."""

    def measure(flow: Flow) -> dict[str, jax.Array]:
        like = flow.before if flow.kept is None else flow.kept
        return {
            name: value if (value := getattr(flow, name)) is not None else jnp.full_like(like, jnp.nan)
            for name in names
        }

    return measure


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``count``, evenly spread, first and last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
