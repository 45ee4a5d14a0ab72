"""Where does the first non-finite value of a computation arise? A program, done operation by operation, every result looked at.

JAX's own search (``jax_debug_nans``) looks at the results of whole compiled programs, and inside a scan it says "while". Here the
program is a jaxpr, and its inner programs (calls, checkpoints, the scan over blocks) are opened. A value that is not finite is traced to
the operation that it comes from, and only origins that reach the loss or the gradient count: a mask of -inf, which a softmax takes back
to 0, is none.

What compiled code fuses is rounded once here and there; done by itself, each operation is rounded as the program says.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.places import first_of_run, in_backward_pass, place, scopes

CALLS = frozenset(
    ("jit", "pjit", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "closed_call", "core_call")
)
SLICES = "slices"  # scope of the scan over the slices of an accumulated batch
QUICK = {"xla_backend_optimization_level": 0}
HALF = (jnp.float16, jnp.bfloat16)
NOTHING: frozenset[int] = frozenset()


class Tracked(NamedTuple):
    """A value, the origins (by number) of what is not finite in it (empty where all is), and the name stack of what made it."""

    value: Any
    origins: frozenset[int]
    stack: str = ""


@dataclass
class Origin:
    """Where values that are not finite come from: an operation, an input of the program, or a constant in it.

    Attributes:
      stack: name stack of the operation.
      operation: the primitive's name; '' for inputs and constants.
      operands: name stacks of the operations that made its operands; '' for those of none.
      dtype, size: of its result: elements in all.
      nan, plus, minus: how many of them are NaN, +Inf, -Inf.
      before: largest finite magnitude among the operands; None without any.
      beside: largest finite magnitude in the result itself.
      unrounded: for an overflow of a half-precision type, the largest magnitude of the same operation in float32.
      input: name of the input; '' for others.
      constant: it is a constant of the program.
      at: number of the operation, in the order in which they are done; of inputs and constants, that of the first operation
        with a place in the network that they spoil.
      entered: name stack of that operation.
      backward: number and name stack of the first operation of the backward pass that it spoils.
    """

    stack: str = ""
    operation: str = ""
    operands: tuple[str, ...] = ()
    dtype: str = ""
    size: int = 0
    nan: int = 0
    plus: int = 0
    minus: int = 0
    before: float | None = None
    beside: float | None = None
    unrounded: float | None = None
    input: str = ""
    constant: bool = False
    at: int | None = None
    entered: str = ""
    backward: tuple[int, str] | None = None


@dataclass(frozen=True)
class Search:
    """What a walk found.

    Attributes:
      origin: the first origin of what is not finite in the targets; None: they are finite.
      target: number of the first target that is not finite.
      operations: that were done.
    """

    origin: Origin | None
    target: int | None
    operations: int


def search(program: Any, arguments: Sequence[Any], names: Sequence[str]) -> Search:
    """The origin of what is not finite in the outputs of a program.

    Args:
      program: a closed jaxpr (``jax.make_jaxpr``); its outputs in the order in which they count: the loss, then the gradient.
      arguments: its inputs, flat.
      names: one an input, as it is to be called.

    Returns:
      The first origin going forward if the first output is not finite (the walk ends there); else the first one in the
      order in which the backward pass meets them.
    """
    walk = Walk()
    inputs = [walk.input(value, name) for value, name in zip(arguments, names, strict=True)]
    outputs = walk.run(program.jaxpr, [walk.constant(c) for c in program.consts], inputs, "", program.jaxpr.outvars[0])
    for number, output in enumerate(outputs):
        if output.origins:
            found = [walk.origins[i] for i in output.origins]
            return Search(min(found, key=_backward if number else _forward), number, walk.done)
    return Search(None, None, walk.done)


def _forward(origin: Origin) -> float:
    return float("inf") if origin.at is None else origin.at


def _backward(origin: Origin) -> float:
    return _forward(origin) if origin.backward is None else origin.backward[0]


class Walk:
    """One walk through a program; ``origins`` are all that were met, those without effect included."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self.done = 0

    def input(self, value: Any, name: str) -> Tracked:
        return self._given(value if isinstance(value, jax.Array) else jnp.asarray(value), Origin(input=name))

    def constant(self, value: Any) -> Tracked:
        return self._given(value, Origin(constant=True))

    def _given(self, value: Any, origin: Origin) -> Tracked:
        return Tracked(value, NOTHING if all_finite(value) else self._new(origin, value))

    def run(
        self, jaxpr: Any, consts: list[Tracked], arguments: list[Tracked], scope: str, until: Any = None
    ) -> list[Tracked]:
        """The outputs of a jaxpr; when ``until`` is there and not finite, what there is of them."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
        last = last_uses(jaxpr)
        for number, equation in enumerate(jaxpr.eqns):
            operands = [self._read(values, atom) for atom in equation.invars]
            results = self.equation(equation, operands, joined(scope, str(equation.source_info.name_stack)))
            values.update(zip(equation.outvars, results, strict=True))
            if until in equation.outvars and values[until].origins:
                return [values.get(atom, Tracked(None, NOTHING)) for atom in jaxpr.outvars if is_variable(atom)]
            for variable in last.get(number, ()):  # what a deep network needs no more is not kept
                del values[variable]
        return [self._read(values, atom) for atom in jaxpr.outvars]

    def _read(self, values: dict[Any, Tracked], atom: Any) -> Tracked:
        return values[atom] if is_variable(atom) else self.constant(atom.val)

    def equation(self, equation: Any, operands: list[Tracked], stack: str) -> list[Tracked]:
        """The results of one operation, or of the program that it calls."""
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            consts = [self.constant(c) for c in getattr(inner, "consts", ())]
            return self.run(getattr(inner, "jaxpr", inner), consts, operands, stack)
        if name == "scan" and (first_of_run(stack) is not None or scopes(stack)[-1:] == [SLICES]):
            return self.scan(params, operands, stack)
        self.done += 1
        with equation.ctx.manager:
            results = bound(equation, [operand.value for operand in operands])
        return [self._look(equation, operands, result, i, stack) for i, result in enumerate(results)]

    def scan(self, params: Any, operands: list[Tracked], stack: str) -> list[Tracked]:
        """A scan, one turn after the other; a turn of a run of blocks gets the scope of its block."""
        body, length = params["jaxpr"], params["length"]
        fixed, carried = scan_arity(params, len(operands))
        consts, carry, columns = operands[:fixed], operands[fixed : fixed + carried], operands[fixed + carried :]
        of_body = [self.constant(c) for c in getattr(body, "consts", ())]
        first = first_of_run(stack)
        rows: list[list[Tracked]] = [[] for _ in range(length)]
        for i in reversed(range(length)) if params["reverse"] else range(length):
            inside = stack if first is None else f"{stack}/block_{first + i}"
            out = self.run(
                getattr(body, "jaxpr", body), of_body, [*consts, *carry, *(row(c, i) for c in columns)], inside
            )
            carry, rows[i] = out[: len(carry)], out[len(carry) :]
        return [*carry, *(stacked(column) for column in zip(*rows, strict=True))]

    def _look(self, equation: Any, operands: list[Tracked], result: Any, number: int, stack: str) -> Tracked:
        if all_finite(result):
            return Tracked(result, NOTHING, stack)
        inherited = self._inherited(result, [operand for operand in operands if operand.origins])
        only_constants = all(self.origins[i].constant for i in inherited)
        if inherited and not (only_constants and is_new(result, operands)):
            self._spoil(inherited, operands, stack)
            return Tracked(result, inherited, stack)
        made_by = tuple(operand.stack for operand in operands)
        origin = Origin(stack, equation.primitive.name, made_by, before=largest(operands))
        infinite_half = result.dtype in HALF and bool(jnp.isinf(result).any())
        origin.unrounded = unrounded(equation, operands, result.dtype, number) if infinite_half else None
        new = self._new(origin, result)
        if inherited and origin.nan:  # out of the infinities of a constant, which are none of its own
            origin.plus = origin.minus = 0
        origin.at = self.done
        self._spoil(new, operands, stack)
        return Tracked(result, new, stack)

    def _inherited(self, result: Any, spoilt: list[Tracked]) -> frozenset[int]:
        """The origins that a result has from its operands. What is no constant counts before constants; of constants, where a
        NaN meets a mask of -inf, the NaN."""
        every = NOTHING.union(*(operand.origins for operand in spoilt))
        if real := frozenset(i for i in every if not self.origins[i].constant):
            return real
        if len(every) > 1 and counted(result)[0]:
            return NOTHING.union(*(o.origins for o in spoilt if counted(o.value)[0])) or every
        return every

    def _new(self, origin: Origin, value: Any) -> frozenset[int]:
        origin.nan, origin.plus, origin.minus = counted(value)
        origin.dtype, origin.size = str(jnp.asarray(value).dtype), int(np.size(value))
        origin.beside = largest_finite(value)
        self.origins.append(origin)
        return frozenset((len(self.origins) - 1,))

    def _spoil(self, origins: frozenset[int], operands: list[Tracked], stack: str) -> None:
        """Note where origins show first: inputs and constants in the network, all of them in the backward pass."""
        for origin in (self.origins[i] for i in origins):
            if origin.at is None and place(stack):
                origin.at, origin.entered = self.done, stack
                origin.before = largest([operand for operand in operands if not operand.origins])
            if origin.backward is None and in_backward_pass(stack):
                origin.backward = self.done, stack


def scan_arity(params: Any, operands: int) -> tuple[int, int]:
    """How many operands of a scan are the same in each turn, and how many are carried; JAX 0.12 says it by trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (list(part) for part in params["ft_in"].update(list(range(operands))).unpack())
    return len(consts), len(carry)


def is_variable(atom: Any) -> bool:
    """A variable of a jaxpr, and no literal."""
    return not hasattr(atom, "val")


def joined(scope: str, inner: str) -> str:
    """The name stack of an equation: its own is relative to the program that it is in."""
    return f"{scope}/{inner}" if scope and inner else scope or inner


def last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """For each equation, by number, the variables that are read there for the last time (or never after they are made)."""
    kept = {atom for atom in jaxpr.outvars if is_variable(atom)}
    uses: dict[int, list[Any]] = {}
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        for atom in (*equation.invars, *equation.outvars):
            if is_variable(atom) and atom not in kept:
                kept.add(atom)
                uses.setdefault(number, []).append(atom)
    return uses


def bound(equation: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """One primitive, done by itself."""
    params = {**equation.params, **changed}
    try:
        results = _program(equation.primitive, tuple(sorted(params.items())))(*values)
    except TypeError:  # parameters that cannot be told apart by hash
        results = equation.primitive.bind(*values, **equation.primitive.get_bind_params(params))
    return list(results) if equation.primitive.multiple_results else [results]


@functools.cache
def _program(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    """A primitive with its parameters, to be compiled for every form of its operands once, and quickly."""
    return quick_jit(lambda *values: primitive.bind(*values, **primitive.get_bind_params(dict(params))))


def quick_jit(f: Any) -> Any:
    """jax.jit for what is done once or twice: on a CPU most of the time of such a program goes into optimizing it."""
    return jax.jit(f, compiler_options=QUICK if jax.default_backend() == "cpu" else None)


@functools.cache
def measuring(measure: str) -> Any:
    """:func:`counted` and :func:`largest_finite` as programs, made when they are first wanted: they ask for the backend."""
    return quick_jit({"counts": _counts, "largest": _largest}[measure])


def _counts(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sum(jnp.isnan(x)), jnp.sum(jnp.isposinf(x)), jnp.sum(jnp.isneginf(x))])


def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    there = jnp.isfinite(x)
    return jnp.any(there), jnp.max(jnp.where(there, jnp.abs(x), jnp.zeros((), x.dtype)))


def counted(x: Any) -> tuple[int, int, int]:
    """How many elements are NaN, +Inf, -Inf."""
    nan, plus, minus = (int(count) for count in measuring("counts")(x))
    return nan, plus, minus


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.floating)


def all_finite(x: Any) -> bool:
    """True also for what is no floating-point array: integers, random keys."""
    if not is_floating(x) or np.size(x) == 0:
        return True
    if not isinstance(x, jax.Array) or jax.default_backend() == "cpu":  # a literal, or memory that NumPy sees
        return bool(np.isfinite(np.asarray(x)).all())
    return not any(counted(x))


def largest_finite(x: Any) -> float | None:
    """Largest magnitude of the elements that are finite; None if none is."""
    if not is_floating(x) or np.size(x) == 0:
        return None
    there, value = measuring("largest")(x)
    return float(value) if there else None


def largest(operands: Sequence[Tracked]) -> float | None:
    """Largest finite magnitude over several values."""
    return max((m for operand in operands if (m := largest_finite(operand.value)) is not None), default=None)


def is_new(result: Any, operands: Sequence[Tracked]) -> bool:
    """Whether a result is not finite where constants of its operands do not explain it: a NaN out of infinities, or a value
    at a place where all operands are finite."""
    spoilt = [jnp.asarray(operand.value) for operand in operands if operand.origins]
    if counted(result)[0] and not any(counted(value)[0] for value in spoilt):
        return True
    if any(value.shape not in ((), result.shape) for value in spoilt):
        return False
    explained = jnp.zeros(result.shape, bool)
    for value in spoilt:
        explained |= ~jnp.isfinite(value)
    return bool(jnp.any(~jnp.isfinite(result) & ~explained))


def unrounded(equation: Any, operands: Sequence[Tracked], dtype: Any, number: int) -> float | None:
    """Largest magnitude of the operation's result in float32; None where the primitive cannot be had in it."""
    wide = [
        operand.value.astype(jnp.float32)
        if is_floating(operand.value) and operand.value.dtype in HALF
        else operand.value
        for operand in operands
    ]
    changed = {name: jnp.dtype(jnp.float32) for name, value in equation.params.items() if same_dtype(value, dtype)}
    try:
        result = bound(equation, wide, **changed)[number]
    except (TypeError, ValueError, NotImplementedError):
        return None
    return largest_finite(result)


def same_dtype(value: Any, dtype: Any) -> bool:
    return isinstance(value, np.dtype) and value == dtype


@functools.cache
def _row() -> Any:
    return quick_jit(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False))


def row(column: Tracked, i: int) -> Tracked:
    """One row of a stacked value."""
    value = _row()(column.value, i)
    return Tracked(value, NOTHING if not column.origins or all_finite(value) else column.origins)


def stacked(rows: Sequence[Tracked]) -> Tracked:
    """Rows as one value."""
    values = [row.value for row in rows]
    if jax.dtypes.issubdtype(values[0].dtype, jax.dtypes.prng_key):
        whole = jnp.stack(values)
    else:  # on the host: a program that stacks a thousand arrays takes long to compile
        whole = jnp.asarray(np.stack([np.asarray(value) for value in values]))
    return Tracked(whole, NOTHING.union(*(row.origins for row in rows)))
