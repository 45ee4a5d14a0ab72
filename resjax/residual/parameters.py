"""How are weights named by role, and how do they start? Rules go by role and by single matrix, never by rank or name.

A kernel is stored as (in, out), or several fused as (in, parts, out) with one role a part: fused QKV is (d, 3, d) with the roles
q, k, v. Fans are those of the single matrix; a rule may treat the parts differently; an optimizer sees matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.residual.rules import InitRule
from resjax.residual.site import Site

ROLES = (
    "emb",
    "pos",
    "head",
    "q",
    "k",
    "v",
    "write",
    "fc_in",
    "bias",
    "norm_scale",
    "norm_bias",
    "gain",
    "gain_offset",
    "mixer_static",
    "mixer_dynamic",
    "mixer_query",
    "gate",
    "gate_bias",
)
KERNEL_ROLES = ("head", "q", "k", "v", "write", "fc_in")  # the matrices of the model: these decay
EMBEDDINGS = ("emb", "pos")
MIXER_KERNELS = ("mixer_dynamic", "gate")  # drawn matrices that belong to a scheme
TRUNCATION = 3.0  # weights are drawn within 3 standard deviations
_TRUNCATED_STD = 0.98657724  # of a standard normal truncated at 3; divided out, so that std is what it says


def kernel(key: jax.Array, fan_in: int, fan_out: int, *roles: str) -> nnx.Param:
    """A kernel (fan_in, fan_out), or (fan_in, parts, fan_out) for several roles; unit variance until :func:`start` scales it."""
    shape = (fan_in, fan_out) if len(roles) == 1 else (fan_in, len(roles), fan_out)
    draw = jax.random.truncated_normal(key, -TRUNCATION, TRUNCATION, shape, jnp.float32) / _TRUNCATED_STD
    return nnx.Param(draw, role=roles, fans=(fan_in, fan_out))


def table(key: jax.Array, rows: int, width: int, role: str) -> nnx.Param:
    """A look-up table (rows, width). Its fan is the width, so that std 0.02 at width 768 is gain 0.55 here as in a kernel."""
    draw = jax.random.truncated_normal(key, -TRUNCATION, TRUNCATION, (rows, width), jnp.float32) / _TRUNCATED_STD
    return nnx.Param(draw, role=(role,), fans=(width, rows))


def drawn(key: jax.Array, std: float, shape: tuple[int, ...], role: str) -> nnx.Param:
    """A parameter from a normal with its own standard deviation, which no rule rescales."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32), role=(role,))


def orthonormal(key: jax.Array, fan_in: int, fan_out: int, role: str) -> nnx.Param:
    """A kernel (fan_in, fan_out) with orthonormal columns, fan_out <= fan_in, uniform over all such; no rule rescales it.

    By Gram-Schmidt, each column cleared twice of those before it. Not by QR: where more of them are in flight than the CPU has cores,
    as when blocks are built by vmap, jaxlib's QR (0.10.2 at least) waits for ever on its own thread pool.
    """
    drawn = jax.random.normal(key, (fan_in, fan_out))

    def column(i: jax.Array, done: jax.Array) -> jax.Array:
        v = drawn[:, i]
        for _ in range(2):
            v = v - done @ (done.T @ v)
        return done.at[:, i].set(v / jnp.linalg.norm(v))

    return nnx.Param(jax.lax.fori_loop(0, fan_out, column, jnp.zeros_like(drawn)), role=(role,))


def constant(value: jax.typing.ArrayLike, shape: tuple[int, ...], role: str) -> nnx.Param:
    """A parameter that starts at one value and is not drawn: gains and biases."""
    return nnx.Param(jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape), role=(role,))


@dataclass(frozen=True)
class Init:
    """The run's own initialisation, before a scheme's rules.

    Attributes:
      kind: 'gain': std = gain / sqrt(fan_in); 'std': std as given.
      std, gain: the number for either kind; floats or traced values (so that a sweep need not recompile).
      out_scale: factor on matrices that write to the stream; None = 1 / sqrt(2 depth) (GPT-2).
      embed_gain: factor on the embedding and on learned positions, so that the stream starts larger against its updates.
    """

    kind: Literal["gain", "std"] = "gain"
    std: Any = 0.02
    gain: Any = 0.55
    out_scale: Any = None
    embed_gain: Any = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("gain", "std"):
            raise ValueError(f"the kind of the initialisation is '{self.kind}', which is neither gain nor std")

    def of(self, role: str, fans: tuple[int, int], site: Site, rule: InitRule | None) -> Any:
        """Standard deviation of one matrix of ``role`` at ``site``; ``rule`` is what the scheme says of that role, if anything."""
        rule = rule or InitRule()
        gain = rule.gain(site) if callable(rule.gain) else rule.gain
        if role in EMBEDDINGS:
            gain = gain * self.embed_gain
        if role in MIXER_KERNELS or rule.family == "fan_in":
            return gain / sqrt(fans[0])
        if rule.family == "xavier":
            return gain * sqrt(2.0 / sum(fans))
        base = self.std if self.kind == "std" else self.gain / sqrt(fans[0])
        if role == "write" and rule.family == "base":
            base = base * (1.0 / sqrt(2.0 * site.depth) if self.out_scale is None else self.out_scale)
        return gain * base


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def start(module: Any, init: Init, site: Site, rules: Mapping[str, InitRule]) -> None:
    """Scale every drawn weight in ``module`` (in place) to its standard deviation at ``site``, part by part."""
    for variable in jax.tree.leaves(module, is_leaf=is_variable):
        if not hasattr(variable, "fans"):
            continue
        stds = [init.of(role, variable.fans, site, rules.get(role)) for role in variable.role]
        value = variable[...] * by_part(stds, variable.role)
        for part, role in enumerate(variable.role):
            if (rule := rules.get(role)) and rule.family == "identity":
                here = jnp.eye(*variable.fans) * (rule.gain(site) if callable(rule.gain) else rule.gain)
                value = here if len(variable.role) == 1 else value.at[:, part].set(here)
        variable[...] = value


def by_part(values: list[Any], roles: tuple[str, ...]) -> jax.Array:
    """One number a part, shaped to multiply a kernel (..., in, out) or (..., in, parts, out)."""
    numbers = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
    return numbers[0] if len(roles) == 1 else numbers[:, None]
