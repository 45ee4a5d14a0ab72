"""What do the probes of a training step say of a state, on held-out text? All groups that need no gradient, whatever the run recorded."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resjax.health.probes import finished, measure_block, measuring, merged, observing
from resjax.health.studies.study import Study
from resjax.health.studies.subject import Subject
from resjax.health.studies.told import Told
from resjax.models.lm import LM

GROUPS = ("forward", "tokens", "ranks", "precision", "attention")


def probed(subject: Subject) -> dict[str, Any]:
    """Every probe by name: (depth, sites), (depth,) or a number; over batches merged as over the slices of one."""
    told = Told.of(
        replace(subject.context, measure=measuring(GROUPS), measure_block=measure_block, observers=observing(GROUPS))
    )
    rows = [jax.device_get(_probes(told, subject.model, jnp.asarray(batch[:, :-1]))) for batch in subject.batches]
    return {name: np.asarray(merged(name, jnp.stack([row[name] for row in rows]))) for name in rows[0]}


@jax.jit
def _probes(told: Told, model: LM, tokens: jax.Array) -> dict[str, jax.Array]:
    return finished(model(tokens, told.context)[1], told.context)


STUDY = Study(
    "probes",
    probed,
    "All probes",
    "The probes of every group that needs no gradient, on held-out text; see resjax.health.record for their names.",
    "quick",
)
