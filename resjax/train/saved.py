"""What has a run left in its folder? Its configuration, and its model at a saved step, to look into or to use."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from resjax.config.entry import source as scheme_source
from resjax.config.tree import from_dict
from resjax.config.validate import BYTES, SYMBOLS
from resjax.errors import Refused, nearest
from resjax.models.lm import LM
from resjax.train.assemble import assemble
from resjax.train.checkpoint import Checkpoints
from resjax.train.runfolder import RunFolder, fields_of
from resjax.train.writers import read_json


@dataclass(frozen=True)
class SavedRun:
    """A run's model at one saved step.

    Attributes:
      folder: of the run.
      config: its resolved fields.
      step: optimizer steps that the model has done.
      model: the model; its parameters are ordinary arrays on this machine's first device.
      vocab: tokens of the data (the model's head may be larger, by model.vocab).
      compute: dtype of the branches.
      notes: a line for each newer step that was skipped because it is damaged.
    """

    folder: Path
    config: Any
    step: int
    model: LM
    vocab: int
    compute: str
    notes: list[str]


def load_run(folder: str | os.PathLike, step: int | None = None) -> SavedRun:
    """The run in ``folder`` at ``step`` (None = the newest step that is whole). Reads no corpus and writes nothing.

    Raises:
      Refused: no run there, no such step, damage, or the user's own scheme is no longer the one that was trained.
    """
    paths = RunFolder(folder)
    facts = facts_of(paths)
    config = from_dict(fields_of(facts))
    config.mesh.data = 1  # a model that was trained on many devices is looked into on one
    refuse_other_scheme(facts, config)
    vocab = SYMBOLS.get(config.data.source, BYTES)
    parts = assemble(config, vocab)
    checkpoints = Checkpoints(paths.checkpoints)
    try:
        wanted = {"params": parts.abstract.params, "step": parts.abstract.step}
        state, _, skipped = checkpoints.restore(step, wanted, config=facts, partial=True)
    finally:
        checkpoints.close()
    state = jax.device_put(state, jax.devices()[0])
    model = nnx.merge(parts.graphdef, state["params"])
    return SavedRun(paths.path, config, int(state["step"]), model, vocab, parts.compute, skipped)


def facts_of(paths: RunFolder) -> dict[str, Any]:
    """What the run's config.json holds.

    Raises:
      Refused: there is no run, or the file is damaged.
    """
    if not paths.config.is_file():
        siblings = [str(path.parent) for path in paths.path.parent.glob("*/config.json")]
        raise Refused(f"'{paths.path}' holds no run (it has no config.json){nearest(str(paths.path), siblings)}")
    try:
        return read_json(paths.config)
    except ValueError as error:
        raise Refused(f"{paths.config} cannot be read ({error})") from None


def refuse_other_scheme(facts: dict[str, Any], config: Any) -> None:
    """Refuse a run whose scheme came from a file of the user's that is another one now.

    Raises:
      Refused: with both hashes.
    """
    was, now = facts.get("scheme_source"), scheme_source(config)
    if was and now and was["sha256"] != now["sha256"]:
        then, today = (side["sha256"][:12] for side in (was, now))
        raise Refused(
            f"the file of residual.name, '{now['path']}', has changed since the run was made (sha256 {then} then, "
            f"{today} now); config.json of the run holds its old text, under scheme_source"
        )
