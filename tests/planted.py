"""Runs with a fault planted in them, for tests of what finds it: weights changed at the start or in a checkpoint, one block's step
size, or fields.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import runs
from resjax.train import assemble
from resjax.train.assemble import Parts
from resjax.train.checkpoint import Checkpoints
from resjax.train.leaves import named
from resjax.train.rebuild import Again
from resjax.train.state import TrainState

WRITE = "stack/runs/0/sites/{}/branch/write/kernel"
CONFIG = """
from resjax.config import default


def get_config():
    config = default()
    config.data.source, config.data.length, config.data.batch = "markov", 16, 8
    config.model.depth, config.model.width, config.model.heads = 12, 16, 2
    config.train.steps, config.train.log_every, config.train.eval_every = 120, 2, 0
    config.train.save_every, config.health.every = 60, 5
    return config
"""
Change = Callable[[str, jax.Array], jax.Array]  # path and value of a parameter -> its value


def trained(
    folder: Path, change: Change | None = None, faster: tuple[str, int, float] | None = None, **fields: Any
) -> Path:
    """A run of 12 blocks; returns its folder.

    Args:
      change: what becomes of every parameter at the start.
      faster: part of a path, block and factor: the steps of those weights are that many times as large.
      fields: ``optimizer__lr=1`` is optimizer.lr=1.
    """
    config = folder / "base.py"
    config.write_text(CONFIG)
    workdir = folder / "run"
    with runs.compiled_anew(), _changed_start(change), _changed_rule(faster):
        code = runs.run(config, workdir, **fields)
    assert code in (0, 4)
    return workdir


def spoilt(run: Path, folder: Path, change: Change) -> Path:
    """A copy of a run that was stopped, with the parameters of its newest checkpoint changed: the command goes on from them."""
    shutil.copytree(run, folder)
    step = runs.steps(folder)[-1]
    read, write = Checkpoints(folder / "checkpoints"), Checkpoints(folder / "checkpoints")
    try:
        state, meta, _ = read.restore(step, Again.of(folder).parts.abstract)
        write.save(step, replace(state, params=changed(state.params, change)), {"config": meta["config"]})
    finally:
        read.close()
        write.close()
    return folder


def changed(params: Any, change: Change) -> Any:
    """Parameters, each as ``change`` has it."""
    leaves, structure = jax.tree.flatten(params)
    now = [change(path, x) for path, x in zip(named(params), leaves, strict=True)]
    assert any(one is not x for one, x in zip(now, leaves, strict=True)), "no parameter was changed"
    return jax.tree.unflatten(structure, now)


@contextlib.contextmanager
def _changed_start(change: Change | None) -> Iterator[None]:
    original = Parts.initial

    def initial(self: Parts, batch: Any = None) -> TrainState:
        state = original(self, batch)
        assert change is not None
        return replace(state, params=changed(state.params, change))

    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            patch.setattr(Parts, "initial", initial)
        yield


@contextlib.contextmanager
def _changed_rule(faster: tuple[str, int, float] | None) -> Iterator[None]:
    original = assemble.update_rule

    def rule(config: Any, scheme: Any, params: Any) -> tuple[Any, Any]:
        optimizer, rate = original(config, scheme, params)
        assert faster is not None
        part, block, factor = faster

        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            updates, state = optimizer.update(grads, state, params)
            leaves, structure = jax.tree.flatten(updates)
            paths = list(named(updates))
            scaled = [
                x.at[block].multiply(factor) if part in path else x for path, x in zip(paths, leaves, strict=True)
            ]
            return jax.tree.unflatten(structure, scaled), state

        return optax.GradientTransformation(optimizer.init, update), rate

    with pytest.MonkeyPatch.context() as patch:
        if faster is not None:
            patch.setattr(assemble, "update_rule", rule)
        yield


def at_block(block: int, factor: float, *parts: str) -> Change:
    """The stacked weights whose path holds one of ``parts`` (all without any), times a factor in one block."""

    def change(path: str, x: jax.Array) -> jax.Array:
        hit = path.startswith("stack/runs") and (not parts or any(part in path for part in parts))
        return x.at[block].multiply(factor) if hit else x

    return change


def put(value: float, path: str, *index: Any) -> Change:
    """The parameter at ``path`` with ``value`` at an index."""
    return lambda name, x: x.at[index].set(value) if name == path else x


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(path: str, x: jax.Array) -> jax.Array:
        for one in changes:
            x = one(path, x)
        return x

    return change


def everywhere(factor: float, part: str) -> Change:
    """The weights whose path holds ``part``, times a factor."""
    return lambda path, x: x * jnp.asarray(factor, x.dtype) if part in path else x
