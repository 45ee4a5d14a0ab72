"""How is a run of blocks differentiated without storing its streams? Each unit's update is taken back on the way down.

For carries with ``undo``: the gradient needs the parameters and the stream after the last block only. From the last unit to the first,

    (y, memo), back = vjp(produce)(parameters, S')       legal because read(S') == read(S), the law of such carries
    S = undo(S', y);   G_S, G_memo, G_y = vjp(write)(S, memo, y)(G);   G = G_S + back(G_y, G_memo)

so history schemes need memory linear in depth and reversible ones none that grows. Contexts (step, key, knobs) have no gradient here.
"""

import dataclasses
from typing import Any

import jax

from resjax.block import Block, Layer, Probes
from resjax.residual import Context


def undoing_scan(blocks: Block, layers: Layer, stream: Any, context: Context) -> tuple[Any, Probes]:
    """``lax.scan`` of the blocks over the stream, with the backward pass above; the stream after them, and the probes, stacked."""

    def told(given: tuple) -> Context:
        step, key, knobs, on = given
        return dataclasses.replace(context, step=step, key=key, knobs=knobs, on=on)

    def body(stream: Any, block: Block, index: Any, numbers: Any, taps: Any, given: tuple) -> tuple[Any, Probes]:
        stream, _, probes = block(stream, Layer(index, numbers, taps), told(given))
        return stream, probes

    def forward(blocks: Block, numbers: Any, taps: Any, stream: Any, given: tuple) -> tuple[Any, Probes]:
        return jax.lax.scan(
            lambda s, x: body(s, x[0], x[1], x[2], x[3], given), stream, (blocks, layers.index, numbers, taps)
        )

    scan = jax.custom_vjp(forward)

    def keep(blocks: Block, numbers: Any, taps: Any, stream: Any, given: tuple) -> tuple[Any, tuple]:
        out, probes = scan(blocks, numbers, taps, stream, given)
        return (out, probes), (blocks, numbers, taps, out, given)

    def backward(kept: tuple, gradients: tuple) -> tuple:
        blocks, numbers, taps, stream, given = kept
        unmeasured = dataclasses.replace(told(given), measure=None, measure_block=None, observers=())

        def down(carried: tuple, x: tuple) -> tuple[tuple, tuple]:
            stream, gradient = carried
            block, index, numbers, taps = x
            of_block, of_numbers, of_taps = None, None, None
            for unit in reversed(range(block.units)):

                def produce(block: Block, stream: Any, numbers: Any, taps: Any, unit: int = unit) -> tuple:
                    return block.produce(unit, stream, Layer(index, numbers, taps), unmeasured)[:2]

                def write(
                    block: Block, stream: Any, memo: Any, update: Any, numbers: Any, taps: Any, unit: int = unit
                ) -> Any:
                    return block.write(unit, stream, memo, update, None, Layer(index, numbers, taps), unmeasured)[0]

                (update, memo), back = jax.vjp(produce, block, stream, numbers, taps)
                stream = block.undo(unit, stream, update, Layer(index, numbers, taps))
                _, unwrite = jax.vjp(write, block, stream, memo, update, numbers, taps)
                block_w, gradient, of_memo, of_update, numbers_w, taps_w = unwrite(gradient)
                block_p, of_stream, numbers_p, taps_p = back((of_update, of_memo))
                gradient = added(gradient, of_stream)
                of_block = added(of_block, block_w, block_p)
                of_numbers, of_taps = added(of_numbers, numbers_w, numbers_p), added(of_taps, taps_w, taps_p)
            return (stream, gradient), (of_block, of_numbers, of_taps)

        (_, gradient), (of_blocks, of_numbers, of_taps) = jax.lax.scan(
            down, (stream, gradients[0]), (blocks, layers.index, numbers, taps), reverse=True
        )
        return of_blocks, of_numbers, of_taps, gradient, None

    scan.defvjp(keep, backward)
    given = (context.step, context.key, context.knobs, context.on)
    return scan(blocks, layers.numbers, layers.taps, stream, given)


def added(*trees: Any) -> Any:
    """The sum of trees of gradients, None being zero."""
    total = None
    for tree in trees:
        if total is None:
            total = tree
        elif tree is not None:
            total = jax.tree.map(lambda a, b: a if a.dtype == jax.dtypes.float0 else a + b, total, tree)
    return total
