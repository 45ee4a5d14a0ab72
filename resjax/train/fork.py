"""How does a new run start from the state of another one, under a changed config?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from resjax.config.tree import flat, from_dict
from resjax.errors import Refused
from resjax.train.assemble import Parts
from resjax.train.checkpoint import Checkpoints
from resjax.train.runfolder import RunFolder, fields_of
from resjax.train.state import TrainState

WRITE = "write RUN or RUN@STEP with a whole number"


@dataclass(frozen=True)
class Origin:
    """The saved state that a run starts from: a run's folder, the step (None = the newest), its hash if on record."""

    folder: RunFolder
    step: int | None
    hash: str | None = None

    def __str__(self) -> str:
        return f"{self.folder.path}" + ("" if self.step is None else f"@{self.step}")


def parse(text: str) -> Origin:
    """'RUN' or 'RUN@STEP'.

    Raises:
      Refused: no run there, or a step that is no number.
    """
    path, at, number = text.rpartition("@")
    if not at or Path(text).exists():
        path, at = text, ""
    if at and not (number.isascii() and number.isdigit()):
        raise Refused(f"--from is '{text}', but '{number}' is not a step; {WRITE}")
    if not path:
        raise Refused(f"--from is '{text}', which names no run; {WRITE}")
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise Refused(f"--from is '{text}', but '{path}' holds no run (it has no config.json)")
    return Origin(folder, int(number) if at else None)


def recorded(lineage: Mapping[str, Any] | None) -> Origin | None:
    """The origin that a run's config.json names."""
    return Origin(RunFolder(lineage["run"]), lineage["step"], lineage["hash"]) if lineage else None


def refuse_other_origin(lineage: Mapping[str, Any] | None, given: Origin | None) -> None:
    """Refuse to go on in a folder with a ``--from`` that is not the one it was started with; none given is fine.

    Raises:
      Refused: another run or step.
    """
    if given is None:
        return
    was = recorded(lineage)
    same = was and was.folder.path.resolve() == given.folder.path.resolve() and given.step in (None, was.step)
    if not same:
        began = f"from {was}" if was else "without --from"
        raise Refused(f"--from is '{given}', but the run in --workdir was started {began}; give a new --workdir")


def load(origin: Origin, parts: Parts) -> tuple[TrainState, dict[str, Any], list[str]]:
    """The state to start from, the lineage to record, and a line for each newer step that was skipped.

    Parameters and moments are taken over as they are (in the new dtypes), and the step: the schedule goes on from
    there. Where seed or data differ the run draws its own batches, from the first; where the seed differs its own
    dropout too; where the precision differs the loss scale starts anew.

    Raises:
      Refused: what does not fit, listed; a state that is not the one on record; or no steps left to do.
    """
    facts = origin.folder.facts()
    if facts is None:
        raise Refused(
            f"the run started from {origin}, which is no longer there, and it has no checkpoint of its own yet"
        )
    old, new = flat(from_dict(fields_of(facts))), flat(parts.config)
    checkpoints = Checkpoints(origin.folder.checkpoints)
    try:
        state, meta, skipped = checkpoints.restore(
            origin.step, parts.abstract, config=parts.config.to_dict(), cast=True
        )
    finally:
        checkpoints.close()
    step = int(state.step)
    if origin.hash not in (None, meta["hash"]):
        raise Refused(f"the run started from {origin}, whose state is now another one; give a new --workdir")
    if parts.config.train.steps <= step:
        steps = parts.config.train.steps
        raise Refused(f"train.steps is {steps}, but the state of --from={origin} has done {step}; give more steps")
    changed = {path: {"was": old.get(path), "is": value} for path, value in new.items() if old.get(path) != value}
    differs = lambda *prefixes: any(path.startswith(prefixes) for path in changed)  # noqa: E731
    if differs("seed"):
        state = replace(state, key=parts.key())
    if differs("seed", "data."):
        state = replace(state, cursor=jnp.int32(0))
    if differs("precision."):
        state = replace(state, loss_scale=parts.loss_scale())
    state = replace(state, halted=jnp.asarray(False), skipped=jnp.int32(0))
    lineage = {"run": str(origin.folder.path.absolute()), "step": step, "hash": meta["hash"], "changed": changed}
    return state, lineage, skipped
