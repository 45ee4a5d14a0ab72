"""What would a narrower residual stream lose? The model again in float32, but for its residual adds, each of them rounded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax.health.arithmetic import added, round_to, signed_error, swallowed, update_error
from resjax.health.geometry import magnitude
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject
from resjax.health.studies.told import Told
from resjax.models.lm import LM, loss
from resjax.residual import Flow

FORMATS: dict[str, tuple[str, str]] = {  # dtype, rounding
    "float32": ("float32", "nearest"),
    "bfloat16": ("bfloat16", "nearest"),
    "float16": ("float16", "nearest"),
    "bfloat16 truncating": ("bfloat16", "truncating"),
    "bfloat16 stochastic": ("bfloat16", "stochastic"),
}
FIGURES = ("swallowed", "update_error", "signed_error")


def rounding(subject: Subject, names: Sequence[str] = tuple(FORMATS)) -> dict[str, Any]:
    """Precision replay: the embedding, and what every site stores, rounded; all else in float32 (M12).

    One rounding a site: the sum is taken in float32. A norm after the add reads the rounded sum, and what it gives is rounded.
    ``names`` are those of the formats that are asked for.

    Returns:
      loss: nats per token in float32.
      formats: by name (float32, always among them, is the model itself, and rounds nothing):
        loss: rise of the loss.
        stream_error: |stream - that of float32| / |that of float32|, of the stream after the last block, over all its elements.
        swallowed: (depth, sites) share of non-zero update elements that leave no trace.
        effective_bits: (depth, sites) bits of the update that arrive.
        signed_error: (depth, sites) mean of (rounded - exact) / exact: it tells bias from noise.
        The figures by site are NaN where nothing is added (gates, buffers of outputs).
    """
    model = in_float32(subject.model)
    context = replace(subject.context, compute=jnp.dtype("float32"))
    told = {name: Told.of(replace(context, **_choices(*FORMATS[name]))) for name in FORMATS}

    def run(name: str, number: int) -> Run:
        return _run(told[name], model, jnp.asarray(subject.batches[number]))

    return replayed(run, names, len(subject.batches))


# of one batch: its loss, the stream after the last block, and the figures of each site by name
Run = tuple[jax.Array, jax.Array, Mapping[str, Any]]


def replayed(run: Callable[[str, int], Run], names: Sequence[str], batches: int) -> dict[str, Any]:
    """The results of :func:`rounding`, ``run`` being the model in a format on the batch of a number."""
    formats = tuple(dict.fromkeys(("float32", *names)))
    sums: dict[str, list[dict[str, Any]]] = {name: [] for name in formats}
    for number in range(batches):
        exact = None
        for name in formats:
            nats, last, probes = run(name, number)
            exact = last if exact is None else exact
            error, size = float(magnitude(last - exact)), float(magnitude(exact))
            sums[name].append({"loss": float(nats), "error": error**2, "size": size**2, **jax.device_get(probes)})
    means = {
        name: {key: over_batches(key, [one[key] for one in found]) for key in found[0]} for name, found in sums.items()
    }
    whole = float(means["float32"]["loss"])
    return {"loss": whole, "formats": {name: _figures(mean, whole) for name, mean in means.items()}}


def _figures(mean: dict[str, Any], whole: float) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        return {
            "loss": float(mean["loss"]) - whole,
            "stream_error": float(np.sqrt(np.float64(mean["error"]) / np.float64(mean["size"]))),
            "swallowed": mean["swallowed"],
            "effective_bits": -np.log2(mean["update_error"]),
            "signed_error": mean["signed_error"],
        }


def over_batches(name: str, values: Sequence[Any]) -> Any:
    """A figure of all batches from those of each: errors by their root mean square, others by their mean."""
    with np.errstate(all="ignore"):
        return np.sqrt(np.mean(np.square(values), axis=0)) if name == "update_error" else np.mean(values, axis=0)


def in_float32(model: LM) -> LM:
    """The model with a stream in float32."""
    copy = nnx.merge(*nnx.split(model))
    copy.shape = replace(model.shape, stream="float32")
    return copy


@cache
def _choices(dtype: str, rounding: str) -> dict[str, Any]:
    """What the context is told: how to store, and what to measure of each add."""

    def store(x: jax.Array, number: Any) -> jax.Array:
        return round_to(x, dtype, rounding, key_of(number))

    def measure(flow: Flow) -> dict[str, jax.Array]:
        if flow.kept is None or flow.update is None:
            return dict.fromkeys(FIGURES, jnp.float32(jnp.nan))
        # a gain on the stream leaves what the format does not hold, and would be rounded before the add
        kept = round_to(flow.kept, dtype)
        return lost(flow.update, kept, added(flow.update, kept, dtype, rounding, jax.random.key(0)))

    return {"store": store, "measure": measure}


def key_of(number: Any) -> jax.Array:
    """What the rounding at random of site ``number`` draws from; -1 is the embedding."""
    return jax.random.fold_in(jax.random.key(0), number + 1)


def lost(update: jax.Array, kept: jax.Array, after: jax.Array) -> dict[str, jax.Array]:
    """The ``FIGURES`` of one add."""
    found = swallowed(update, kept, after), update_error(update, kept, after), signed_error(update, kept, after)
    return dict(zip(FIGURES, found, strict=True))


@jax.jit
def _run(told: Told, model: LM, batch: jax.Array) -> Run:
    context = told.context
    last, probes = model.stack(model.embedded(batch[:, :-1], context), context)
    return loss(model.logits(model.final(last, context)), batch[:, 1:]), last, probes


STUDY = Study(
    "rounding",
    rounding,
    "what a narrower stream would lose",
    "The residual adds alone rounded to bfloat16 (to nearest, truncating, at random) and float16, all else in float32: loss, final "
    "stream, and bits of each update that arrive.",
    "quick",
)
