"""How do blocks become a deep network? Built by vmap, run by scan (or unrolled, same numbers), rematerialised, probed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from resjax.residual import (
    KERNEL_ROLES,
    Branch,
    Connection,
    Context,
    Init,
    NormDefaults,
    Run,
    Scheme,
    Site,
    evaluate,
    start,
    tap,
)
from resjax.residual.equation import GAINS
from resjax.residual.parameters import is_variable

Probes = dict[str, jax.Array]
MakeBranch = Callable[[str, jax.Array], Branch]  # kind of sub-layer, key -> branch
BLOCK_KERNELS = frozenset(KERNEL_ROLES) - {"head"}
STREAM = "stream"  # the name that the stream after each site bears in the program, for checkpoint policies and for reading its dtype
REMAT: dict[str, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Block(nnx.Module):
    """The sites of one block, in order. In a stack every leaf has the run's length in front."""

    def __init__(self, sites: list[Connection]):
        self.sites = nnx.List(sites)

    def __call__(
        self, stream: Any, places: list[Site], numbers: list[dict], taps: jax.Array | None, context: Context
    ) -> tuple[Any, Probes]:
        """The stream after the block, and what was measured: site probes as (sites,), block probes as scalars."""
        entry, rows = stream, []
        for i, (connection, site) in enumerate(zip(self.sites, places, strict=True)):
            stream, flow = connection(stream, site, numbers[i], entry if site.last_in_block else None, context)
            stream = checkpoint_name(stream, STREAM)
            if taps is not None:
                stream = tap(stream, taps[i], jnp.asarray(context.on))
            if context.measure is not None:
                rows.append(measured(context, context.measure, flow))
        probes = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}
        if context.measure_block is not None:
            probes |= measured(context, context.measure_block, entry, stream)
        return stream, probes


def measured(context: Context, measure: Callable[..., Probes], *arrays: Any) -> Probes:
    """``measure(*arrays)`` in the steps that measure, zeros in the others; never differentiated, never paid for in other steps."""
    arrays = jax.lax.stop_gradient(arrays)
    shapes = jax.eval_shape(measure, *arrays)
    return jax.lax.cond(
        jnp.asarray(context.on),
        measure,
        lambda *_: {name: jnp.zeros(value.shape, value.dtype) for name, value in shapes.items()},
        *arrays,
    )


class Stack(nnx.Module):
    """``depth`` blocks under one residual scheme.

    Args:
      scheme: the residual scheme; its blocks of one form become one run each.
      kinds: the sub-layers of a block, such as ('attention', 'mlp').
      make_branch: builds the branch of one kind from a key.
      norms, init: what 'norm' means, and how weights start.
      dropout: rate on every branch's output.
      scan: run each run by ``lax.scan``; else unrolled. The parameters are stored alike, so a checkpoint fits both.
      remat: none, full, or dots (the results of weight products are kept, the rest is computed again in the backward pass).
    """

    def __init__(
        self,
        scheme: Scheme,
        kinds: tuple[str, ...],
        depth: int,
        width: int,
        make_branch: MakeBranch,
        norms: NormDefaults,
        init: Init,
        *,
        dropout: float = 0.0,
        scan: bool = True,
        remat: str = "none",
        key: jax.Array,
    ):
        if remat not in ("none", *REMAT):
            raise ValueError(f"remat is '{remat}', which is none of none, {', '.join(REMAT)}")
        self.kinds, self.depth, self.scan, self.remat = kinds, depth, scan, remat
        self.plan: tuple[Run, ...] = tuple(scheme.runs(kinds, depth))

        def build(run: Run) -> Callable[[jax.Array, jax.Array], Block]:
            def block(key: jax.Array, index: jax.Array) -> Block:
                sites = []
                for resolved, site in zip(run.sites, self.places(index), strict=True):
                    branch = make_branch(site.kind, jax.random.fold_in(key, site.pos))
                    start(branch, init, site, resolved.init)
                    sites.append(Connection(resolved, branch, width, site, norms, dropout))
                return Block(sites)

            return block

        keys = jax.random.split(key, depth)
        self.runs = nnx.List(
            [jax.vmap(build(run))(keys[run.first : run.first + run.length], numbered(run)) for run in self.plan]
        )
        weights = jax.tree.leaves(self.runs, is_leaf=is_variable)
        known = BLOCK_KERNELS.union(*(variable.role for variable in weights if hasattr(variable, "fans")))
        if wrong := set(scheme.init) - known:
            raise ValueError(
                f"the init rule for '{sorted(wrong)[0]}' starts nothing: roles of weights in blocks are {', '.join(sorted(known))}"
            )
        for variable in weights:
            variable.set_metadata(stacked=True)

    def places(self, block: Any, step: Any = 0) -> list[Site]:
        """The sites of a block; ``block`` may be traced, or a vector of blocks."""
        count = len(self.kinds)
        return [Site(kind, pos, count, self.depth, block, step) for pos, kind in enumerate(self.kinds)]

    def block(self, index: int) -> Block:
        """One block with its own parameters, to look into: a slice of the stored run."""
        for run, blocks in zip(self.plan, self.runs, strict=True):
            if run.first <= index < run.first + run.length:
                one = jax.tree.map(lambda leaf, here=index - run.first: leaf[here], blocks)
                for variable in jax.tree.leaves(one, is_leaf=is_variable):
                    variable.set_metadata(stacked=False)
                return one
        raise IndexError(f"block {index} is not one of 0..{self.depth - 1}")

    def __call__(self, embedded: jax.Array, context: Context) -> tuple[jax.Array, Probes]:
        """(batch, ..., width) in the stream's dtype -> the same after all blocks, and the probes.

        Site probes are (depth, sites), block probes (depth,).
        """
        carry = self.plan[0].sites[0].carry
        stream, probes = carry.open(embedded), []
        for run, blocks in zip(self.plan, self.runs, strict=True):
            here = slice(run.first, run.first + run.length)
            numbers = self._numbers(run, context)
            taps = None if context.taps is None else context.taps[here]
            stream, seen = self._run(
                blocks, np.arange(run.first, run.first + run.length), numbers, taps, stream, context
            )
            probes.append(seen)
        return carry.close(stream), jax.tree.map(lambda *parts: jnp.concatenate(parts), *probes)

    def _numbers(self, run: Run, context: Context) -> list[dict[str, jax.Array]]:
        """The gains that are rules, evaluated once a step for all blocks of the run: one vector (length,) a gain and site."""
        sites = self.places(numbered(run), jnp.asarray(context.step, jnp.float32))
        rows = [
            {name: evaluate(getattr(scheme, name), site) for name in GAINS}
            for scheme, site in zip(run.sites, sites, strict=True)
        ]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def _run(
        self, blocks: Block, index: np.ndarray, numbers: list[dict], taps: Any, stream: Any, context: Context
    ) -> tuple[Any, Probes]:
        def body(stream: Any, layer: tuple) -> tuple[Any, Probes]:
            block, i, numbers, taps = layer
            return block(stream, self.places(i), numbers, taps, context)

        if self.remat != "none":
            # inside a scan the loop itself keeps the two computations apart; unrolled, XLA would merge them again
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=not self.scan)
        layers = (blocks, jnp.asarray(index), numbers, taps)
        if self.scan:
            return jax.lax.scan(body, stream, layers)
        rows = []
        for layer in unstacked(layers, len(index)):
            stream, probes = body(stream, layer)
            rows.append(probes)
        return stream, jax.tree.map(lambda *parts: jnp.stack(parts), *rows)


def numbered(run: Run) -> jax.Array:
    """The blocks of a run as rules see them: float32, so that a rule may divide by one or raise it to a power."""
    return jnp.arange(run.first, run.first + run.length, dtype=jnp.float32)


def unstacked(tree: Any, length: int) -> list[Any]:
    """The ``length`` slices of a stacked tree. Their gradient is one stack, not a padded array a slice (which is quadratic)."""

    @jax.custom_vjp
    def split(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x[i] for i in range(length))

    split.defvjp(lambda x: (split(x), None), lambda _, parts: (jnp.stack(parts),))
    leaves, structure = jax.tree.flatten(tree)
    columns = [
        split(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else [leaf[i] for i in range(length)] for leaf in leaves
    ]
    return [jax.tree.unflatten(structure, [column[i] for column in columns]) for i in range(length)]
