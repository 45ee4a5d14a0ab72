"""What do the probes of a training step say of a state, on held-out text? All groups that need no gradient, whatever the run recorded."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.probes import finished, measure_block, measuring, merged, observing
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject

GROUPS = ("forward", "tokens", "ranks", "precision", "attention")


def probed(subject: Subject) -> dict[str, Any]:
    """Every probe by name: (depth, sites), (depth,) or a number; over batches merged as over the slices of one."""
    context = replace(
        subject.context, measure=measuring(GROUPS), measure_block=measure_block, observers=observing(GROUPS), on=True
    )

    def run(model: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        return finished(model(tokens, context)[1], context)

    program = jax.jit(run)
    rows = [jax.device_get(program(subject.model, jnp.asarray(batch[:, :-1]))) for batch in subject.batches]
    return {name: np.asarray(merged(name, jnp.stack([row[name] for row in rows]))) for name in rows[0]}


STUDY = Study(
    "probes",
    probed,
    "All probes",
    "The probes of every group that needs no gradient, on held-out text; see resjax.health.record for their names.",
    "quick",
)
