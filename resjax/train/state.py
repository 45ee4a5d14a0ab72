"""What is the state of a training run, and in which precision is it kept?"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from resjax.residual.parameters import is_variable

# What stays float32: 1 + 1e-3 is 1 in bfloat16, and numbers that mix streams or depths are few.
GAIN_ROLES = ("gain", "gain_offset", "mixer_static", "mixer_query", "gate_bias")


class LossScale(NamedTuple):
    """The factor on the loss of float16 runs, and the finite steps since it last changed."""

    scale: jax.Array
    good: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that the next step depends on; a pytree.

    Attributes:
      params: the model's parameters with their roles.
      opt_state: the optimizer's moments.
      step: optimizer steps done (int32). A step whose update was not applied under the policy 'skip' counts too.
      cursor: index of the next batch (int32); equals ``step`` but after a rollback and in forks with other data.
      key: PRNG key of the run; a step folds in ``step``.
      loss_scale: see :class:`LossScale`.
      halted: a non-finite value was met under the policy 'stop' or 'rollback': no step is applied any more.
      skipped: non-finite steps in a row.
    """

    params: nnx.State
    opt_state: Any
    step: jax.Array
    cursor: jax.Array
    key: jax.Array
    loss_scale: LossScale
    halted: jax.Array
    skipped: jax.Array


def first_loss_scale(scale: float) -> LossScale:
    """The loss scale of a run's first step."""
    return LossScale(jnp.float32(scale), jnp.int32(0))


def create(params: nnx.State, optimizer: optax.GradientTransformation, key: jax.Array, loss_scale: float) -> TrainState:
    """The state before the first step."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        key=key,
        loss_scale=first_loss_scale(loss_scale),
        halted=jnp.asarray(False),
        skipped=jnp.int32(0),
    )


def cast(params: Any, dtype: str) -> Any:
    """Parameters (a state or a module) in ``dtype``; residual gains and numbers that mix streams stay in float32."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        kept = any(role in GAIN_ROLES for role in variable.role)
        return variable if kept else variable.replace(variable[...].astype(dtype))

    return jax.tree.map(one, params, is_leaf=is_variable)
