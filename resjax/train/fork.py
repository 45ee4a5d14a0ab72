"""How does a new run start from the state of another one, under a changed config?"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from resjax.config.tree import flat, from_dict
from resjax.errors import Refused
from resjax.train.assemble import Parts
from resjax.train.checkpoint import Checkpoints
from resjax.train.runfolder import RunFolder, fields_of
from resjax.train.state import TrainState


def parse(text: str) -> tuple[RunFolder, int | None]:
    """'RUN' or 'RUN@STEP': the folder and the step (None = the newest).

    Raises:
      Refused: no run there, or a step that is no number.
    """
    path, at, step = text.rpartition("@")
    if not at or Path(text).exists():
        path, step = text, ""
    if step and not step.isdigit():
        raise Refused(f"--from is '{text}', but '{step}' is not a step; write RUN or RUN@STEP with a whole number")
    folder = RunFolder(path)
    if not folder.config.exists():
        raise Refused(f"--from is '{text}', but '{path}' holds no run (it has no config.json)")
    return folder, int(step) if step else None


def load(text: str, parts: Parts) -> tuple[TrainState, dict[str, Any]]:
    """The state to start from, and the lineage to record.

    Parameters and moments are taken over as they are (in the new dtypes), and the step: the schedule goes on from there. Where seed or
    data differ the run draws its own batches, from the first; where the seed differs its own dropout too; where the precision
    differs the loss scale starts anew.

    Raises:
      Refused: what does not fit, listed; or no steps left to do.
    """
    folder, number = parse(text)
    facts = folder.facts()
    assert facts is not None
    old, new = flat(from_dict(fields_of(facts))), flat(parts.config)
    checkpoints = Checkpoints(folder.checkpoints)
    state, meta, _ = checkpoints.restore(number, parts.abstract, config=parts.config.to_dict(), cast=True)
    checkpoints.close()
    step = int(state.step)
    if parts.config.train.steps <= step:
        raise Refused(f"train.steps is {parts.config.train.steps}, but the state of --from={text} has done {step}; give more steps")
    differs = lambda prefix: any(old.get(path) != value for path, value in new.items() if path.startswith(prefix))  # noqa: E731
    fresh = parts.initial()
    if differs("seed"):
        state = replace(state, key=fresh.key)
    if differs("seed") or differs("data."):
        state = replace(state, cursor=jnp.int32(0))
    if differs("precision."):
        state = replace(state, loss_scale=fresh.loss_scale)
    state = replace(state, halted=fresh.halted, skipped=fresh.skipped)
    changed = {path: {"was": old.get(path), "is": value} for path, value in new.items() if old.get(path) != value}
    return state, {"run": str(folder.path), "step": step, "hash": meta["hash"], "changed": changed}
