"""How do blocks become a deep network? Built by vmap, run by scan (or unrolled, same numbers), rematerialised, probed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from resjax.block import Block, Layer, Probes, whole
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
)
from resjax.residual.connection import stored
from resjax.residual.inside import Chain, First, Side
from resjax.residual.parameters import is_variable
from resjax.residual.scheme import GAINS
from resjax.undo import undoing_scan

MakeBranch = Callable[[str, jax.Array], Branch]  # kind of sub-layer, key -> branch
END_ROLES = frozenset({"emb", "pos", "head"})
BLOCK_KERNELS = frozenset(KERNEL_ROLES) - END_ROLES
REMAT: dict[str, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
CARRY = 1000  # folded into a block's key for the parameters of carries; branches fold in their position


class Fused(nnx.Module):
    """Several branches that read one input and are added: GPT-J's parallel attention and feed-forward."""

    def __init__(self, branches: list[Branch]):
        self.branches = nnx.List(branches)

    def __call__(self, x: jax.Array) -> jax.Array:
        first, *more = [branch(x) for branch in self.branches]
        return sum(more, start=first)


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
        scheme.carry.refuse(scheme.sites(kinds), width)
        self.scheme, self.depth, self.scan, self.remat = scheme, depth, scan, remat
        self.kinds = scheme.sites(kinds)
        self.plan: tuple[Run, ...] = tuple(scheme.runs(kinds, depth))
        outer = scheme.outer
        # what the stack's ends see: the carry that units write to, and how many of them there are
        self.carry, self.units = scheme.written, depth * (len(self.kinds) if outer is None else 1)

        def made(site: Site, key: jax.Array) -> Branch:
            key = jax.random.fold_in(key, site.pos)
            if not scheme.fuse:
                return make_branch(site.kind, key)
            return Fused([make_branch(kind, jax.random.fold_in(key, i)) for i, kind in enumerate(kinds)])

        def build(run: Run) -> Callable[[jax.Array, jax.Array], Block]:
            def block(key: jax.Array, index: jax.Array) -> Block:
                of_carry = jax.random.fold_in(key, CARRY)
                sites = []
                for resolved, site in zip(run.sites, self.places(index), strict=True):
                    branch = made(site, key)
                    start(branch, init, site, resolved.init)
                    views = outer.views if outer is not None and site.pos == 0 else ()
                    if views and not getattr(branch, "views", False):
                        raise ValueError(
                            f"'{scheme.name}' gives the first sub-layer {', '.join(views)} apart, and a "
                            f"{type(branch).__name__} takes one input"
                        )
                    key_here = jax.random.fold_in(of_carry, site.pos)
                    sites.append(Connection(resolved, branch, width, site, norms, dropout, key=key_here, views=views))
                around = None
                if outer is not None:
                    around = outer.build(width, whole(self.places(index)), norms, jax.random.fold_in(of_carry, CARRY))
                    start(around, Init(), whole(self.places(index)), scheme.init)
                return Block(sites, around, self.carry, tuple(self.places(0)))

            return block

        keys = jax.random.split(key, depth)
        self.runs = nnx.List(
            [jax.vmap(build(run))(keys[run.first : run.first + run.length], numbered(run)) for run in self.plan]
        )
        weights = jax.tree.leaves(self.runs, is_leaf=is_variable)
        known = BLOCK_KERNELS.union(*(variable.role for variable in weights if hasattr(variable, "fans")))
        if wrong := set(scheme.init) - known - END_ROLES:
            raise ValueError(
                f"the init rule for '{sorted(wrong)[0]}' starts nothing: roles of weights in blocks are {', '.join(sorted(known))}"
            )
        for variable in weights:
            variable.set_metadata(stacked=True)
        announced = {name for run in self.runs for site in run.sites for name in getattr(site.branch, "slots", {})}
        if wrong := {*scheme.inside, *scheme.share} - announced:
            raise ValueError(
                f"'{scheme.name}' acts at the point '{sorted(wrong)[0]}' inside branches, and these branches "
                f"announce {', '.join(sorted(announced)) or 'none'}"
            )
        self.ends = self.carry.build_ends(width, self.units, norms, jax.random.fold_in(key, CARRY))
        start(self.ends, Init(), Site("ends", 0, 1, depth), scheme.init)

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
        side: Side = {}
        with jax.named_scope("open"):
            stream, probes = stored(self.carry.open(self.ends, embedded, self.units), -1, context), []
        for run, blocks in zip(self.plan, self.runs, strict=True):
            here = slice(run.first, run.first + run.length)
            taps = None if context.taps is None else context.taps[here]
            layers = Layer(jnp.arange(run.first, run.first + run.length), self.numbers(run, context), taps)
            stream, side, seen = self._run(run, blocks, layers, stream, side, context)
            probes.append(seen)
        with jax.named_scope("close"):
            last = self.carry.close(self.ends, stream)
        return last, jax.tree.map(lambda *parts: jnp.concatenate(parts), *probes)

    def numbers(self, run: Run, context: Context) -> list[dict[str, jax.Array]]:
        """The gains that are rules, evaluated once a step for all blocks of the run: one vector (length,) a gain and site."""
        sites = self.places(numbered(run), jnp.asarray(context.step, jnp.float32))
        rows = [
            {name: evaluate(getattr(scheme, name), site) for name in GAINS}
            for scheme, site in zip(run.sites, sites, strict=True)
        ]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def _run(
        self, run: Run, blocks: Block, layers: Layer, stream: Any, side: dict, context: Context
    ) -> tuple[Any, dict, Probes]:
        """The stream after one run of blocks, what they hand to the next runs, and the probes, stacked."""
        # The names of the scopes, here and below, are how health.places tells where in the network an operation stands.
        scope = f"blocks_{run.first}"
        if self.scan and self.carry.undoable:
            with jax.named_scope(scope):
                stream, probes = undoing_scan(blocks, layers, stream, context)
            return stream, side, probes

        # Of what blocks hand on, a chain goes from each to the next; the first block's is the same for all, so it is not
        # stored once a layer.
        shares = {name: share for scheme in run.sites for name, share in scheme.share.items()}
        chain = {name: side[name] for name, share in shares.items() if isinstance(share, Chain)}
        fixed = {name: side[name] for name, share in shares.items() if isinstance(share, First)}

        def body(carried: tuple, x: tuple) -> tuple[tuple, tuple]:
            stream, chain = carried
            block, layer = x
            stream, handed, probes = block(stream, layer, dataclasses.replace(context, side=fixed | chain))
            return (stream, {name: handed[name] for name in chain}), (handed if run.first == 0 else {}, probes)

        if self.remat != "none":
            # inside a scan the loop itself keeps the two computations apart; unrolled, XLA would merge them again
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=not self.scan)
        if self.scan:
            with jax.named_scope(scope):
                (stream, chain), (handed, probes) = jax.lax.scan(body, (stream, chain), (blocks, layers))
        else:
            carried, rows = (stream, chain), []
            for i, layer in enumerate(unstacked((blocks, layers), run.length), run.first):
                with jax.named_scope(f"block_{i}"):
                    carried, row = body(carried, layer)
                rows.append(row)
            stream, chain = carried
            handed, probes = jax.tree.map(lambda *parts: jnp.stack(parts), *rows)
        return stream, side | {name: value[0] for name, value in handed.items()} | chain, probes


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
