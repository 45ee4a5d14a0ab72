"""Does a residual scheme keep the contract? What can be asked of any scheme without knowing its equation, each answer in words.

Used by ``python -m resjax.catalogue --check`` on a user's own scheme, and by the table test on every entry.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from math import isnan, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax.block import Layer
from resjax.models.lm import LM, Shape
from resjax.residual import Context, Init, NormDefaults, Scheme
from resjax.residual.parameters import is_variable
from resjax.stack import Stack
from resjax.train.state import cast

SIZES: dict[str, Any] = dict(vocab=11, length=6, width=8, heads=2, norms=NormDefaults("layernorm", 1e-3))
KINDS = ("attention", "mlp")
TOKENS = np.random.default_rng(5).integers(0, 11, (2, 6)).astype(np.int32)
DTYPES = (  # of branches, stream, parameters
    ("float32", "float32", "float32"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float32"),
)
DEEP, NEAR = 256, 0.05


class Outcome(NamedTuple):
    """One check: what was asked, and what fails, in a sentence; empty = it holds."""

    asked: str
    fails: str = ""


def value(path: str, variable: nnx.Variable, seed: int = 0, out_scale: float = 1.0) -> np.ndarray:
    """A seeded value away from the start of every role: gains are neither 1 nor 0, mixing matrices not symmetric."""
    noise = np.random.default_rng([seed, zlib.crc32(path.encode())]).normal(size=variable.shape)
    match variable.role[0]:
        case "emb" | "pos":
            return noise
        case "norm_scale":
            return 1 + 0.3 * noise
        case "gain":
            return 0.7 + 0.3 * noise
        case "mixer_static" | "mixer_query":
            return 0.4 + 0.3 * noise
        case "norm_bias" | "bias" | "gain_offset" | "gate_bias":
            return 0.3 * noise
    fan_in = variable.fans[0] if hasattr(variable, "fans") else variable.shape[-2] if variable.ndim > 1 else 1
    return noise / sqrt(fan_in) * (out_scale if variable.role == ("write",) else 1.0)


def perturbed(abstract: Any, seed: int = 0, out_scale: float = 1.0) -> Any:
    """A module of abstract values with seeded ones in their place (see :func:`value`); nothing is compiled.

    Two modules have the same values where they have the same parameters, whatever else they have.
    """

    def one(path: Any, variable: nnx.Variable) -> nnx.Variable:
        drawn = value(jax.tree_util.keystr(path), variable, seed, out_scale)
        return variable.replace(jnp.asarray(drawn, variable.dtype))

    return jax.tree_util.tree_map_with_path(one, abstract, is_leaf=is_variable)


@functools.cache
def abstract(scheme: Scheme, shape: Shape) -> LM:
    """A language model without values, the same object each time, so not to be changed."""
    return jax.eval_shape(lambda: LM(shape, scheme, Init(), key=jax.random.key(0)))


@functools.cache
def whole(scheme: Scheme, least: int = 1) -> int:
    """The smallest depth, from ``least`` blocks, at which a scheme has all its parts.

    Parts are the forms that its blocks have at a great depth (Mix-LN has Post-LN blocks from 4 blocks on), and what its carry says.
    """

    def forms(depth: int) -> set[tuple[Scheme, ...]]:
        return {run.sites for run in scheme.runs(KINDS, depth)}

    units = len(scheme.sites(KINDS)) if scheme.outer is None else 1
    least = max(least, -(-scheme.written.whole_from // units))
    if not scheme.at and not scheme.share:  # nothing else makes blocks differ
        return least
    every = forms(DEEP)
    return next((depth for depth in range(least, DEEP) if forms(depth) >= every), max(least, DEEP))


def enough(scheme: Scheme) -> int:
    """The depth of most checks: 2 blocks; where blocks differ, all forms of them, and one more than there are of a special first one."""
    return 2 if whole(scheme) == 1 else whole(scheme, 3)


def model(scheme: Scheme, seed: int = 0, out_scale: float = 1.0, **shape: Any) -> LM:
    """A small language model under ``scheme`` with all its parts (see :func:`enough`), its parameters away from their start."""
    sizes = Shape(**(SIZES | {"depth": shape.get("depth") or enough(scheme)} | shape))
    return perturbed(abstract(scheme, sizes), seed, out_scale)


@functools.cache
def quick_options() -> dict[str, Any]:
    """Compiler options that make compiling a small model about 5 times faster; those of them that this JAX knows."""
    options: dict[str, Any] = {}
    for name, value in (("xla_backend_optimization_level", 0), ("xla_cpu_use_fusion_emitters", False)):
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value})(1.0)
        except jax.errors.JaxRuntimeError:
            continue
        options[name] = value
    return options


def fast(f: Any, **options: Any) -> Any:
    """jax.jit for functions that are compiled once and run on little data. Not for tests of rounding."""
    return jax.jit(f, compiler_options=quick_options(), **options)


def functional(logits: jax.Array) -> jax.Array:
    """A random linear functional as a loss: a mean square after a norm would have no gradient."""
    weights = np.random.default_rng(9).normal(size=logits.shape)
    return jnp.sum(logits * jnp.asarray(weights, logits.dtype))


def relative(got: Any, want: Any) -> float:
    """Largest difference over the largest magnitude; infinite where a number is none, as NaN is not above any limit."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    off = float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-300))
    return float("inf") if isnan(off) else off


def apart(got: Any, want: Any) -> float:
    """Over two trees, the largest difference of their leaves."""
    return max(relative(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def checks(scheme: Scheme) -> Iterator[Outcome]:
    """All checks of one scheme, one after the other."""
    for asked, check in CHECKS.items():
        try:
            yield Outcome(asked, check(scheme))
        except Exception as error:
            yield Outcome(asked, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


EVALUATION = Context(step=7)


def _gradient(context: Context) -> Callable[[LM], Any]:
    def loss(model: LM) -> tuple[jax.Array, jax.Array]:
        logits, _ = model(jnp.asarray(TOKENS), context)
        return functional(logits), logits

    return fast(jax.grad(loss, has_aux=True))


# One function for all checks: what one has compiled the next one finds.
@functools.cache
def _evaluated() -> Callable[[LM, jax.Array], jax.Array]:
    return fast(lambda model, tokens: model(tokens, EVALUATION)[0])


@functools.cache
def _differentiated() -> Callable[[LM], Any]:
    return _gradient(EVALUATION)


def _documented(scheme: Scheme) -> str:
    missing = [name for name in ("name", "equation", "paper") if not getattr(scheme, name)]
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} empty" if missing else ""


def _is_a_value(scheme: Scheme) -> str:
    hash(scheme)
    return "" if dataclasses.replace(scheme) == scheme else "a copy is not equal to it, so it would be compiled again"


def _unrolled(scheme: Scheme) -> str:
    one, other = (_evaluated()(model(scheme, scan=scan), jnp.asarray(TOKENS)) for scan in (True, False))
    return f"scanned and unrolled outputs differ by {off:.1e}" if (off := relative(other, one)) > 1e-5 else ""


def _unrolled_gradient(scheme: Scheme) -> str:
    (one, _), (other, _) = (_differentiated()(model(scheme, scan=scan)) for scan in (True, False))
    return f"scanned and unrolled gradients differ by {off:.1e}" if (off := apart(other, one)) > 1e-4 else ""


def _rematerialised(scheme: Scheme) -> str:
    (one, _), (other, _) = (_differentiated()(model(scheme, remat=remat)) for remat in ("none", "full"))
    return f"gradients change by {off:.1e} with remat" if (off := apart(other, one)) > 1e-4 else ""


def _mapped(scheme: Scheme) -> str:
    models = [model(scheme, seed) for seed in (0, 1)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    want = np.stack([_evaluated()(one, jnp.asarray(TOKENS)) for one in models])
    got = fast(jax.vmap(lambda model: model(jnp.asarray(TOKENS), EVALUATION)[0]))(batch)
    return (
        f"two models by vmap differ from one after the other by {off:.1e}"
        if (off := relative(got, want)) > 1e-5
        else ""
    )


def _strict(scheme: Scheme) -> str:
    for compute, stream, param in DTYPES:
        context = dataclasses.replace(
            EVALUATION, compute=jnp.dtype(compute), measure=lambda flow: {"after": flow.after}
        )
        with jax.numpy_dtype_promotion("strict"):
            made = cast(model(scheme, stream=stream), param)
            logits, seen = jax.eval_shape(lambda m, c=context: m(jnp.asarray(TOKENS), c), made)
        if seen["after"].dtype != jnp.dtype(stream):
            return f"with a {stream} stream and {compute} branches the stream is {seen['after'].dtype} after a site"
        if logits.dtype != jnp.float32:
            return f"with a {stream} stream and {param} parameters the logits are {logits.dtype}"
    return ""


def _finite_in_half(scheme: Scheme) -> str:
    for dtype in ("bfloat16", "float16"):
        context = dataclasses.replace(EVALUATION, compute=jnp.dtype(dtype))
        logits = fast(lambda m, c=context: m(jnp.asarray(TOKENS), c)[0])(model(scheme, stream=dtype))
        if not bool(jnp.all(jnp.isfinite(logits))):
            return f"outputs are not finite in {dtype}"
    return ""


def _deep(scheme: Scheme) -> str:
    """A little way from the start: mixing matrices that no norm bounds overflow over 512 sites when they are drawn freely."""
    sizes = Shape(**(SIZES | {"depth": DEEP}))
    first = fast(lambda: LM(sizes, scheme, Init(), key=jax.random.key(0)))()
    away = model(scheme, depth=DEEP, out_scale=1 / sqrt(2 * DEEP))
    near = jax.tree.map(lambda a, b: (1 - NEAR) * a + NEAR * b, first, away)
    grads, logits = _differentiated()(near)
    if not bool(jnp.all(jnp.isfinite(logits))):
        return f"outputs are not finite at {DEEP} blocks"
    bad = sum(not bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))
    return f"the gradients of {bad} parameters are not finite at {DEEP} blocks" if bad else ""


def _all_used(scheme: Scheme) -> str:
    grads, _ = _gradient(dataclasses.replace(EVALUATION, train=True, key=jax.random.key(3)))(model(scheme))
    rows = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_variable)[0]
    dead = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, g in rows if not bool(jnp.any(g[...] != 0))
    ]
    return f"parameters that no output depends on: {', '.join(dead)}" if dead else ""


def _causal(scheme: Scheme) -> str:
    made = model(scheme)
    changed = TOKENS.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    changed[1] = (changed[1] + 1) % 11
    one, other = (_evaluated()(made, jnp.asarray(tokens)) for tokens in (TOKENS, changed))
    off = relative(other[0, :-1], one[0, :-1])
    return f"an earlier position, or another sample, sees a later token (by {off:.1e})" if off > 1e-5 else ""


def _undone(scheme: Scheme) -> str:
    """read(S') == read(S) at every site; and from the last stream down, as the backward pass goes, undo gives every S back.

    Of a buffer of outputs, S is what stands in it by then: rows that are not written yet may hold anything.
    """
    if not scheme.written.undoable:
        return ""
    stack = model(scheme).stack
    embedded = jnp.asarray(np.random.default_rng(2).normal(size=(2, SIZES["length"], SIZES["width"])), jnp.float32)

    @fast
    def up_and_down(stack: Stack, embedded: jax.Array) -> list[tuple[Any, ...]]:
        places = []
        for index in range(stack.depth):
            run = next(run for run in stack.plan if run.first <= index < run.first + run.length)
            numbers = jax.tree.map(lambda x, i=index - run.first: x[i], stack.numbers(run, EVALUATION))
            block = stack.block(index)
            places += [(block, unit, Layer(index, numbers, None)) for unit in range(block.units)]
        stream, streams, reads = stack.carry.open(stack.ends, embedded, stack.units), [], []
        for block, unit, layer in places:
            streams.append(stream)
            update, memo, *_ = block.produce(unit, stream, layer, EVALUATION)
            stream, _ = block.write(unit, stream, memo, update, None, layer, EVALUATION)
            reads.append((update, block.produce(unit, stream, layer, EVALUATION)[0]))
        undone = []
        for block, unit, layer in reversed(places):
            update, *_ = block.produce(unit, stream, layer, EVALUATION)
            stream = block.undo(unit, stream, update, layer)
            undone.append(stream)
        return list(zip([layer.index for *_, layer in places], reads, streams, reversed(undone), strict=True))

    found = up_and_down(stack, embedded)
    for index, (update, again), _, _ in found:
        if (off := relative(again, update)) > 1e-5:
            return f"what block {index} reads changes by {off:.1e} once it has written"
    for number, (index, _, before, back) in reversed([*enumerate(found)]):
        if scheme.written.rows:
            before, back = before[: number + 1], back[: number + 1]
        if (off := apart(back, before)) > 1e-4:
            return f"undoing block {index} does not give the stream before it back: it is off by {off:.1e}"
    return ""


CHECKS: dict[str, Callable[[Scheme], str]] = {
    "it has a name, an equation and a source": _documented,
    "it is a value: hashable, and equal to its copies": _is_a_value,
    "scanned and unrolled, the model is the same": _unrolled,
    "scanned and unrolled, the gradient is the same": _unrolled_gradient,
    "rematerialised, the gradient is the same": _rematerialised,
    "two models at once are as one after the other": _mapped,
    "the stream keeps its dtype, whatever branches compute in": _strict,
    "outputs are finite in bfloat16 and float16": _finite_in_half,
    f"gradients are finite at {DEEP} blocks": _deep,
    "every parameter takes part": _all_used,
    "no position sees a later one, no sample another": _causal,
    "where the backward pass takes updates back, reading survives writing and undo gives the stream back": _undone,
}
