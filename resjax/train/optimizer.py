"""How does one step change each weight? Optimizers by name from optax, with decay, rates and orthogonalisation by role.

Order of one update; the training step does 1 and 2, ``build`` the rest:

    1. g = mean gradient over the accumulated micro-batches, with the loss scale divided out, in float32
    2. g = g * clip_scale(global norm of g, clip)      the norm is wanted for the metrics anyway, so it is computed once
    3. u = direction(g)                                Adam, momentum, Lion, or Muon on the matrices of blocks; before it, a role's
                                                       gradient is clipped by itself where a scheme asks for that
    4. u = u + weight_decay * w                        where the role says so; never coupled into the moments
    5. w = w - lr(t) * multiplier(role) * u            the decay scales with the step, as with a rate of its own

Everything is by role, never by rank: a stack of gains has two axes and is still not decayed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from resjax.errors import Refused, nearest, not_one_of
from resjax.residual import KERNEL_ROLES, ROLES, OptRule, Site
from resjax.residual.parameters import is_variable
from resjax.train.leaves import named
from resjax.train.schedule import schedule

DECAYED = frozenset(KERNEL_ROLES)
ORTHOGONALISED = frozenset({"q", "k", "v", "write", "fc_in"})  # by Muon: the matrices of blocks

# What each optimizer reads of the config, with its value where the config leaves the field unset. Any other field is
# refused when set.
FIELDS: dict[str, dict[str, float]] = {
    "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
    "sgd": {"momentum": 0.9},
    "lion": {"b1": 0.9, "b2": 0.99},
    # b1, b2: of Adam, for the weights that are not matrices of blocks
    "muon": {"momentum": 0.95, "b1": 0.9, "b2": 0.95, "eps": 1e-8},
}
NAMES = tuple(FIELDS)
_RANGES = {"b1": (0.0, 1.0), "b2": (0.0, 1.0), "momentum": (0.0, 1.0), "eps": (0.0, math.inf)}
# Muon's step has this RMS whatever the matrix's shape (Liu et al. 2025, arXiv 2502.16982): about that of AdamW, so
# that one learning rate serves the matrices and the rest.
MUON_RMS = 0.2


class Row(NamedTuple):
    """What the optimizer does with one leaf, or with one part of a fused leaf whose parts are treated differently."""

    path: str
    role: str
    shape: tuple[int, ...]
    decayed: bool
    lr: float
    eps: float
    clip: float | None


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One parameter leaf with its treatment, one entry a part."""

    path: str
    roles: tuple[str, ...]
    shape: tuple[int, ...]
    decay: tuple[bool, ...]
    lr: tuple[float, ...]
    eps: tuple[float, ...]
    clip: float | None


def _leaves(params: Any, rules: Mapping[str, OptRule] | None, depth: int = 1) -> list[_Leaf]:
    rules = rules or {}
    anywhere = Site("any", 0, 1, depth)
    nodes = jax.tree.leaves(params, is_leaf=is_variable)
    out = []
    for path, node in zip(named(params), nodes, strict=True):
        roles = getattr(node, "role", None)
        if not roles:
            raise Refused(f"parameter '{path}' has no role for the optimizer to go by; roles are {', '.join(ROLES)}")
        asked = [(role, rules.get(role, OptRule())) for role in roles]
        decay = tuple(role in DECAYED if rule.decay is None else rule.decay for role, rule in asked)
        lr, eps = (
            tuple(float(factor(anywhere) if callable(factor) else factor) for factor in factors)
            for factors in ([rule.lr for _, rule in asked], [rule.eps for _, rule in asked])
        )
        clips = {rule.clip for _, rule in asked}
        if len(clips) > 1:
            raise Refused(
                f"the optimizer rules of {', '.join(roles)} differ in clip, but they are stored as one: give all the same"
            )
        out.append(_Leaf(path, tuple(roles), tuple(node.shape), decay, lr, eps, clips.pop()))
    present = {role for leaf in out for role in leaf.roles}
    for role, rule in rules.items():
        known = sorted(present.union(ROLES))
        if role not in known:
            roles = ", ".join(known)
            raise Refused(f"the optimizer rule for '{role}' names no role; roles are {roles}{nearest(role, known)}")
        for name in ("lr", "eps"):
            factor = getattr(rule, name)
            factor = factor(anywhere) if callable(factor) else factor
            if not (math.isfinite(factor) and factor >= 0):
                raise Refused(
                    f"the optimizer rule for '{role}' has {name} {factor}; it must be a finite factor, 0 or above"
                )
    return out


def _by_part(values: tuple[Any, ...]) -> Any:
    """One value for the whole leaf where the parts agree, else an array to multiply a kernel (..., in, parts, out)."""
    return values[0] if len(set(values)) == 1 else np.asarray(values, np.float32)[:, None]


def decay_mask(params: Any, rules: Mapping[str, OptRule] | None = None) -> Any:
    """Which weights decay, in the tree of ``params``: True or False, or (parts, 1) of 0 and 1 where parts differ."""
    mask = [_by_part(leaf.decay) for leaf in _leaves(params, rules)]
    return jax.tree.unflatten(jax.tree.structure(params), mask)


def listing(params: Any, rules: Mapping[str, OptRule] | None = None, depth: int = 1) -> list[Row]:
    """One row a leaf: path, role, shape, decayed, factors on rate and eps, clip of its own.

    Parts of a fused leaf get rows of their own where they differ. ``depth`` is the number of blocks, for rules that depend on it.
    """
    rows = []
    for leaf in _leaves(params, rules, depth):
        if len(set(zip(leaf.decay, leaf.lr, leaf.eps, strict=True))) == 1:
            role = ",".join(dict.fromkeys(leaf.roles))
            rows.append(Row(leaf.path, role, leaf.shape, leaf.decay[0], leaf.lr[0], leaf.eps[0], leaf.clip))
            continue
        shape = leaf.shape[:-2] + leaf.shape[-1:]
        for part, (role, decay, lr, eps) in enumerate(zip(leaf.roles, leaf.decay, leaf.lr, leaf.eps, strict=True)):
            rows.append(Row(f"{leaf.path}[{part}]", role, shape, decay, lr, eps, leaf.clip))
    return rows


def is_on(number: Any) -> bool:
    """Is a number in use that 0 (or None) switches off? One that is traced always is: its program was made for that."""
    return isinstance(number, jax.Array) or bool(number)


def clip_scale(norm: jax.Array, clip: float | jax.Array | None) -> jax.Array | float:
    """Factor on the gradient that brings its global norm to at most ``clip``; 1 where clipping is off (None or 0).

    A norm that is not finite gives 1 or 0 times a gradient that is not finite: still not finite, for the step to
    reject.
    """
    if clip is None or not is_on(clip):
        return 1.0
    return jnp.where(norm > clip, clip / norm, jnp.ones_like(norm))


def at_step(state: Any, step: jax.Array) -> Any:
    """The optimizer's state with the learning rate of ``step``: steps whose update was passed over count in the schedule too."""
    return {**state, "rate": state["rate"]._replace(count=step)}


def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates, added in float32 and rounded once to each parameter's dtype."""
    return jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype), params, updates)


def _per_leaf(fn: Callable[[Any, Any, Any], Any], numbers: list[Any]) -> optax.GradientTransformation:
    """The stateless transformation u -> fn(u, w, number), one number a leaf in the order of ``jax.tree.leaves``."""

    def update(updates: Any, params: Any) -> Any:
        leaves, tree = jax.tree.flatten(updates)
        weights = jax.tree.leaves(params)
        return jax.tree.unflatten(tree, [fn(u, w, n) for u, w, n in zip(leaves, weights, numbers, strict=True)])

    return optax.stateless(update)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` on float32 copies: moments and updates are float32 whatever the dtype of parameters and gradients."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # optax raises Python floats to its int32 count, which strict promotion forbids
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: inner.init(cast(params)), update)


def _muon(numbers: Mapping[str, float], leaves: list[_Leaf], params: Any) -> optax.GradientTransformation:
    """Muon on every matrix of the blocks, Adam on the rest.

    ``optax.contrib.muon`` left to itself runs Adam on whatever has not exactly two axes, so on every stacked kernel,
    and orthogonalises a stack of gains, which has two. Here the axes of the matrix are named by role; all other axes
    (the stack of blocks, the parts) count separate matrices.
    """
    tree = jax.tree.structure(params)
    is_matrix = [ORTHOGONALISED.issuperset(leaf.roles) for leaf in leaves]
    axes: list[Any] = [optax.MaskedNode()] * len(leaves)  # what optax.partition puts in the place of the others' leaves
    rms = []
    for i, leaf in enumerate(leaves):
        if is_matrix[i]:
            row = -2 if len(leaf.roles) == 1 else -3  # (..., in, out) or (..., in, parts, out)
            axes[i] = optax.contrib.MuonDimensionNumbers(reduction_axis=row, output_axis=-1)
            rms.append(MUON_RMS * math.sqrt(max(leaf.shape[row], leaf.shape[-1])))
    orthogonal = optax.contrib.scale_by_muon(
        beta=numbers["momentum"], eps=numbers["eps"], weight_dimension_numbers=jax.tree.unflatten(tree, axes)
    )
    transforms = {
        "muon": optax.chain(orthogonal, _per_leaf(lambda u, _, n: u * n, rms)),
        "adam": _adam(numbers, leaves),
    }
    return optax.partition(transforms, jax.tree.unflatten(tree, ["muon" if matrix else "adam" for matrix in is_matrix]))


def _adam(numbers: Mapping[str, float], leaves: list[_Leaf]) -> optax.GradientTransformation:
    """Adam's direction (Kingma and Ba 2015, 1412.6980), with eps times a factor of the role.

    The state is that of ``optax.scale_by_adam``, which it is where all factors are 1.
    """
    b1, b2, eps = numbers["b1"], numbers["b2"], numbers["eps"]
    plain = optax.scale_by_adam(b1, b2, eps)
    if {factor for leaf in leaves for factor in leaf.eps} == {1.0}:
        return plain
    factors = {leaf.path: _by_part(leaf.eps) for leaf in leaves}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = plain.update(updates, state, params)
        m = optax.tree.bias_correction(state.mu, b1, state.count)
        v = optax.tree.bias_correction(state.nu, b2, state.count)
        rows = zip(named(m), jax.tree.leaves(m), jax.tree.leaves(v), strict=True)
        steps = [m / (jnp.sqrt(v) + eps * factors[path]) for path, m, v in rows]
        return jax.tree.unflatten(jax.tree.structure(m), steps), state

    return optax.GradientTransformation(plain.init, update)


def _clipped(norm: float | None) -> Callable[[Any, Any], Any]:
    """A role's gradient, brought to at most ``norm`` by itself (of a stack, each block's by itself)."""
    return lambda u, stacked: u if norm is None else u * clip_scale(_own_norm(u, stacked), norm)


def _own_norm(u: jax.Array, stacked: bool) -> jax.Array:
    axes = tuple(range(1 if stacked else 0, u.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(u), axis=axes, keepdims=True))


def _direction(
    name: str, numbers: Mapping[str, float], leaves: list[_Leaf], params: Any
) -> optax.GradientTransformation:
    """Step 3: the direction in which the weight goes down, before decay and rate."""
    if name == "adamw":
        return _adam(numbers, leaves)
    if name == "sgd":
        return optax.trace(numbers["momentum"]) if is_on(numbers["momentum"]) else optax.identity()
    if name == "lion":
        return optax.scale_by_lion(numbers["b1"], numbers["b2"])
    return _muon(numbers, leaves, params)


def _numbers(config: Any) -> dict[str, Any]:
    """The optimizer's own numbers from the config, with defaults; refuses a field that this optimizer does not read."""
    fields = FIELDS[config.name]
    numbers: dict[str, Any] = {}
    for field, (low, high) in _RANGES.items():
        value = getattr(config, field, None)
        if field not in fields:
            if value is not None:
                reads = f"optimizer.name '{config.name}' reads only {', '.join(fields)}"
                raise Refused(f"optimizer.{field} is {value}, but {reads}; leave it unset")
            continue
        value = fields[field] if value is None else value
        if isinstance(value, jax.Array):
            numbers[field] = value
            continue
        if not low <= value < high:
            raise Refused(f"optimizer.{field} is {value}; it must be at least {low} and below {high}")
        numbers[field] = float(value)
    return numbers


def build(
    config: Any, steps: int, params: Any, rules: Mapping[str, OptRule] | None = None, depth: int = 1
) -> optax.GradientTransformation:
    """Steps 3 to 5 above as one optax transformation; its updates are added by :func:`apply_updates`.

    Args:
      config: the section ``optimizer``: name, lr, schedule, warmup, weight_decay, clip, b1, b2, eps, momentum; None is
        unset, see ``FIELDS``. ``clip`` is only checked here, the step applies it. Numbers may be JAX scalars, traced or
        not, so that one program serves many values: these are taken as they are, and are in use even where they are 0.
      steps: optimizer steps of the whole run, for the schedule.
      params: the parameters, arrays or abstract, as an ``nnx.State`` whose variables have a ``role``.
      rules: by role, what a scheme asks of the optimizer.
      depth: number of blocks, for rules that depend on it.

    Returns:
      init(params) -> state and update(gradients, state, params) -> (updates, state), for jit and ``jax.eval_shape``.
      Moments and updates are float32 whatever the dtype of parameters and gradients.

    Raises:
      Refused: unknown name or schedule, a number out of range, a field that this optimizer does not read, a parameter
        without a role, a rule for a role that does not exist.
    """
    if config.name not in FIELDS:
        raise not_one_of("optimizer.name", config.name, NAMES)
    numbers = _numbers(config)
    weight_decay, clip = (0.0 if value is None else value for value in (config.weight_decay, config.clip))
    for field, value in (("weight_decay", weight_decay), ("clip", clip)):
        if not isinstance(value, jax.Array) and not (math.isfinite(value) and value >= 0):
            raise Refused(f"optimizer.{field} is {value}; it must be a finite number, 0 or above")
    rate = schedule(config.schedule, config.lr, config.warmup, steps)
    leaves = _leaves(params, rules, depth)
    for leaf in leaves:
        reads = config.name == "adamw" or (config.name == "muon" and not ORTHOGONALISED.issuperset(leaf.roles))
        if not reads and set(leaf.eps) != {1.0}:
            raise Refused(
                f"optimizer.name is '{config.name}', but the residual scheme scales Adam's eps of '{leaf.roles[0]}', which only "
                "adamw reads for that role"
            )
    stacked = [bool(node.get_metadata().get("stacked")) for node in jax.tree.leaves(params, is_leaf=is_variable)]
    clips = [(_clipped(leaf.clip), here) for leaf, here in zip(leaves, stacked, strict=True)]
    decay = [_by_part(leaf.decay) if is_on(weight_decay) else False for leaf in leaves]
    multipliers = [_by_part(leaf.lr) for leaf in leaves]
    # All stages always stand, so that a fork with another decay or multiplier finds the same tree of state. What does
    # not decay is not even added to, so that its bits stay.
    return _in_float32(
        optax.named_chain(
            ("clip", _per_leaf(lambda u, _, n: n[0](u, n[1]), clips)),
            ("direction", _direction(config.name, numbers, leaves, params)),
            ("decay", _per_leaf(lambda u, w, n: u if n is False else u + weight_decay * n * w, decay)),
            ("multiplier", _per_leaf(lambda u, _, n: u * n, multipliers)),
            ("rate", optax.scale_by_learning_rate(rate)),
        )
    )
