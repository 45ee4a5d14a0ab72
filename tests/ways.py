"""How do the tests of metrics run one? Plainly, and as the body of a scan in a compiled program; on seeded arrays."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain(f: Callable) -> Callable:
    return f


def scanned(f: Callable, compile_: Callable = jax.jit) -> Callable:
    """``f`` as the body of a compiled scan of two steps over twice the same; with :func:`kit.fast`, not for tests of rounding."""
    compiled = compile_(lambda rows: lax.scan(lambda _, row: (None, f(*row)), None, rows)[1])

    def run(*arguments: Any) -> Any:
        both = compiled(jax.tree.map(lambda a: np.stack([a, a]), arguments))
        jax.tree.map(lambda a: np.testing.assert_array_equal(a[0], a[1]), both)
        return jax.tree.map(lambda a: a[0], both)

    return run


both_ways = pytest.mark.parametrize("way", [plain, scanned], ids=["plain", "scan"])
