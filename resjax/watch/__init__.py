"""How is a model watched that is not ours? Name its residual adds, and get the probes, findings and report of resjax.

In the model, where an update joins the stream::

    h = watch.add(h, self.mlp(self.norm(h)), block=i, site="mlp")

In the loss, the taps are an argument more, and their gradient is the probes::

    taps = watch.Plan(blocks=6, sites=("attention", "mlp")).taps()

    def loss_fn(model, taps):
        with watch.into(taps):
            return cross_entropy(model(x), y)

    loss, (grads, found) = jax.value_and_grad(loss_fn, argnums=(0, 1))(model, taps)
    log.write(step, found, loss=loss)

Of a state, :func:`study` makes the studies that need no more than the adds, such as what each block is worth, or what a narrower stream
would lose. docs/your_model.md says the rest. :mod:`resjax.watch.linen` meets Linen blocks from outside; it is not imported here.
"""

from resjax.watch.arrays import from_arrays, gradient_norms, rows, site
from resjax.watch.context import add, block, change, embedded, final, find, into, joined
from resjax.watch.log import Log
from resjax.watch.plan import Plan, Taps, row, stream_dtype
from resjax.watch.studies import Studies, study, study_streams

__all__ = [
    "Log",
    "Plan",
    "Studies",
    "Taps",
    "add",
    "block",
    "change",
    "embedded",
    "final",
    "find",
    "from_arrays",
    "gradient_norms",
    "into",
    "joined",
    "row",
    "rows",
    "site",
    "stream_dtype",
    "study",
    "study_streams",
]
