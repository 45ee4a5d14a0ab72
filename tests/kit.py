"""What do the tests of models share? Small models made without compiling, a fast jit, comparisons."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resjax import check
from resjax.check import apart as largest_difference
from resjax.check import fast, functional, quick_options, relative
from resjax.models.lm import LM, Shape
from resjax.residual import CATALOGUE, Context, Init, NormDefaults, Scheme, Site
from resjax.residual.parameters import is_variable
from resjax.stack import Stack

__all__ = ["fast", "functional", "largest_difference", "quick_options", "relative"]  # of those imported: for the tests

KINDS = ("attention", "mlp")
EVALUATION, DEFAULT_INIT = Context(), Init()
EPS = 1e-3  # of the norms: large enough that a wrong or forgotten one shows in float32
SMALL: dict[str, Any] = dict(vocab=11, length=6, depth=4, width=8, heads=2, norms=NormDefaults("layernorm", EPS))
TOKENS = np.random.default_rng(5).integers(0, 11, (2, 6)).astype(np.int32)


def variables(tree: Any) -> list[nnx.Variable]:
    return jax.tree.leaves(tree, is_leaf=is_variable)


def by_role(tree: Any) -> dict[str, list[np.ndarray]]:
    """Values by role; of a fused kernel by its first role."""
    found: dict[str, list[np.ndarray]] = {}
    for v in variables(tree):
        found.setdefault(v.role[0], []).append(np.asarray(v[...]))
    return found


def perturbed(build: Callable[[], Any], seed: int = 0, out_scale: float = 1.0) -> Any:
    """The module that ``build()`` would make, with values away from its own; see :func:`resjax.check.perturbed`."""
    return check.perturbed(jax.eval_shape(build), seed, out_scale)


def abstract(scheme: Scheme | str, **shape: Any) -> LM:
    """A language model without values, not to be changed; ``shape`` over the sizes in SMALL."""
    return check.abstract(CATALOGUE[scheme] if isinstance(scheme, str) else scheme, Shape(**(SMALL | shape)))


def make(scheme: Scheme | str, seed: int = 0, out_scale: float = 1.0, **shape: Any) -> LM:
    """A language model under ``scheme``, all parameters away from their start; ``shape`` over the sizes in SMALL."""
    return check.perturbed(abstract(scheme, **shape), seed, out_scale)


def start(scheme: Scheme | str, init: Init = DEFAULT_INIT, seed: int = 0, **shape: Any) -> LM:
    """The same as it starts."""
    scheme = CATALOGUE[scheme] if isinstance(scheme, str) else scheme
    return fast(lambda: LM(Shape(**(SMALL | shape)), scheme, init, key=jax.random.key(seed)))()


def stack(
    scheme: Scheme | str, make_branch: Any, depth: int, width: int, kinds: tuple[str, ...] = KINDS, **options: Any
) -> Stack:
    """A stack of branches of one's own, as it starts."""
    scheme = CATALOGUE[scheme] if isinstance(scheme, str) else scheme
    options = dict(norms=NormDefaults("layernorm", 1e-6), init=Init(), key=jax.random.key(0)) | options
    return Stack(scheme, kinds, depth, width, make_branch, **options)


def forward(model: LM, context: Context = EVALUATION, tokens: np.ndarray = TOKENS) -> jax.Array:
    """Logits, compiled with quick options."""
    return fast(lambda m: m(jnp.asarray(tokens), context)[0])(model)


def site(kind: str = "attention", pos: int = 0, depth: int = 4, block: int = 0) -> Site:
    return Site(kind, pos, 2, depth, block)
