"""How does the learning rate move over the steps? By name, all with a linear warm-up from 0.

Step t counts from 0 and is the number of optimizer steps already done. During a warm-up of w steps the rate is
lr (t + 1) / w: step 0 has lr / w, not 0 (an update of size 0 would waste the step), step w - 1 has lr. After it, with
p = (t - w) / (steps - w):

    cosine        lr (0.1 + 0.9 (1 + cos(pi p)) / 2): to 10 % at t = steps
    constant      lr
    linear        lr (1 - p): to 0 at t = steps, so that the last step (t = steps - 1) still moves
    inverse_sqrt  lr sqrt(max(w, 1) / (t + 1)): meets the warm-up without a jump, and knows no end
    steps         lr, lr / 10 from 60 % and lr / 100 from 85 % of the steps
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from resjax.errors import Refused, not_one_of

FINAL_SHARE = 0.1  # of lr, where cosine ends
# Between the drops of He et al. 2016 for ResNets (50 and 75 %) and the 80 % of later practice; the last tenth of the
# rate still gets 15 % of the steps.
DROPS = (0.60, 0.85)
DROP_FACTOR = 0.1


Warmup = int | jax.Array


def _at_least_1(count: Warmup) -> Warmup:
    return jnp.maximum(count, 1) if isinstance(count, jax.Array) else max(count, 1)


def _progress(t: jax.Array, warmup: Warmup, steps: int) -> jax.Array:
    return jnp.clip((t - warmup) / _at_least_1(steps - warmup), 0.0, 1.0)


def _cosine(t: jax.Array, warmup: Warmup, steps: int) -> jax.Array:
    return FINAL_SHARE + (1.0 - FINAL_SHARE) * 0.5 * (1.0 + jnp.cos(math.pi * _progress(t, warmup, steps)))


def _constant(t: jax.Array, warmup: Warmup, steps: int) -> jax.Array:
    return jnp.ones_like(t)


def _linear(t: jax.Array, warmup: Warmup, steps: int) -> jax.Array:
    return 1.0 - _progress(t, warmup, steps)


def _inverse_sqrt(t: jax.Array, warmup: Warmup, steps: int) -> jax.Array:
    return jnp.sqrt(_at_least_1(warmup) / (t + 1.0))


def _steps(t: jax.Array, warmup: Warmup, steps: int) -> jax.Array:
    factor = jnp.ones_like(t)
    for share in DROPS:
        factor = factor * jnp.where(t >= round(share * steps), DROP_FACTOR, 1.0)
    return factor


_SHAPES: dict[str, Callable[[jax.Array, Warmup, int], jax.Array]] = {
    "cosine": _cosine,
    "constant": _constant,
    "linear": _linear,
    "inverse_sqrt": _inverse_sqrt,
    "steps": _steps,
}
NAMES = tuple(_SHAPES)
_ENDLESS = ("constant", "inverse_sqrt")


def warmup_steps(warmup: int | float | None, steps: int) -> int:
    """Warm-up in steps, from steps, a share of all steps, or None (10 %).

    Raises:
      Refused: negative, above ``steps``, or a float that is not a share below 1.
    """
    if warmup is None:
        warmup = 0.1
    if isinstance(warmup, float) and 0.0 <= warmup < 1.0:
        return round(warmup * steps)
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise Refused(f"optimizer.warmup is {warmup}; give a whole number of steps, or a share of the steps below 1")
    if warmup > steps:
        raise Refused(f"optimizer.warmup is {warmup} steps, more than train.steps, which is {steps}")
    return warmup


def schedule(name: str, lr: float | jax.Array, warmup: int | float | jax.Array | None, steps: int) -> optax.Schedule:
    """The learning rate as a function of the step.

    Args:
      name: one of ``NAMES``.
      lr: the highest rate; 0 freezes the model. A JAX scalar, traced or not, is taken as it is.
      warmup: whole steps, or a share of ``steps`` below 1; None = 10 % of ``steps``; 0 = none. A JAX scalar, traced or not, is a number
        of steps and taken as it is.
      steps: optimizer steps of the whole run.

    Returns:
      t (an int or an int32 scalar, traced or not) -> rate, a float32 scalar.

    Raises:
      Refused: unknown name; a rate that is negative or not finite; a bad warm-up; no steps.
    """
    if name not in _SHAPES:
        raise not_one_of("optimizer.schedule", name, NAMES)
    if not isinstance(lr, jax.Array) and not (math.isfinite(lr) and lr >= 0):
        raise Refused(f"optimizer.lr is {lr}; it must be a finite number, 0 or above")
    if steps < 1:
        raise Refused(f"train.steps is {steps}; it must be 1 or above")
    after, ramp = _SHAPES[name], warmup if isinstance(warmup, jax.Array) else warmup_steps(warmup, steps)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        return lr * jnp.where(t < ramp, (t + 1.0) / _at_least_1(ramp), after(t, ramp, steps))

    return rate


def depends_on_steps(name: str, warmup: int | float | None = 0) -> bool:
    """Would another number of steps change the rate of steps already done?

    True for the schedules that aim at an end; constant and inverse_sqrt depend on it only through a warm-up that is a
    share of the steps (a float, or None), so hand in ``warmup`` where that matters.
    """
    if name not in _SHAPES:
        raise not_one_of("optimizer.schedule", name, NAMES)
    return name not in _ENDLESS or warmup is None or isinstance(warmup, float)
