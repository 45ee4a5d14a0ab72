"""What does a study's program take as a value, and what is part of it? So that subjects of one form share their programs.

A program is a function of its module (``jax.jit`` keeps it), and all that it works with are arguments: the model, and a
:class:`Told`. Two models of one form are then one program, whatever their weights, steps and gains, and no model is kept by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from resjax.models import lm
from resjax.residual import Context, Observer
from resjax.residual.connection import Measure, MeasureBlock


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Told:
    """A context of a forward pass that measures, as an argument of a program; see :class:`resjax.residual.Context`.

    Attributes:
      step, key, knobs: values.
      train, compute, measure, measure_block, observers, store: parts of the program. Functions have to be the same object each time.
      rounding: of the model's shape, for programs that do not get the model: how it rounds what its sites store, if ``store`` is None.
    """

    step: Any
    key: jax.Array | None
    knobs: Mapping[str, Any]
    train: bool = field(metadata={"static": True})
    compute: Any = field(metadata={"static": True})
    measure: Measure | None = field(metadata={"static": True})
    measure_block: MeasureBlock | None = field(metadata={"static": True})
    observers: tuple[Observer, ...] = field(metadata={"static": True})
    store: Callable[[jax.Array, Any], jax.Array] | None = field(metadata={"static": True})
    rounding: str = field(default="none", metadata={"static": True})

    @classmethod
    def of(cls, context: Context, rounding: str = "none") -> "Told":
        """What a context says; its taps, side channels and ``keep`` are left out."""
        return cls(
            context.step,
            context.key,
            dict(context.knobs),
            context.train,
            context.compute,
            context.measure,
            context.measure_block,
            context.observers,
            context.store,
            rounding,
        )

    @property
    def context(self) -> Context:
        context = Context(
            train=self.train,
            key=self.key,
            step=self.step,
            knobs=self.knobs,
            measure=self.measure,
            measure_block=self.measure_block,
            observers=self.observers,
            compute=self.compute,
            store=self.store,
        )
        return lm.rounding(context, self.rounding)
