"""What lies in a run's folder, and may this run use it? Names, facts about the run, one writer at a time."""

import fcntl
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from resjax.config import folder as config_folder
from resjax.config.schema import FIELDS
from resjax.config.scheme import source as scheme_source
from resjax.config.tree import to_dict
from resjax.data import Corpus
from resjax.errors import Refused
from resjax.train.writers import read_json, write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
FINISHED, NONFINITE = "finished", "nonfinite"


class RunFolder:
    """The paths in a run's folder. Making the object touches nothing."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.health = self.path / "health"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.profile = self.path / "profile"
        self._lock: int | None = None

    def facts(self) -> dict[str, Any] | None:
        """What config.json holds, or None where there is no run.

        Raises:
          Refused: the folder holds something else, or its config.json cannot be read.
        """
        if self.path.exists() and not self.path.is_dir():
            raise Refused(f"--workdir is '{self.path}', which is a file; give a folder")
        if not self.config.exists():
            if self.path.is_dir() and any(self.path.iterdir()):
                raise Refused(f"--workdir is '{self.path}', which holds other files and no run; give a new or empty folder")
            return None
        try:
            return read_json(self.config)
        except ValueError as error:
            raise Refused(f"{self.config} cannot be read ({error}); give another --workdir") from None

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary of a run that has done ``steps`` steps and ended well, else None."""
        try:
            summary = read_json(self.summary)
        except (OSError, ValueError):
            return None
        return summary if summary.get("status") == FINISHED and summary.get("steps", 0) >= steps else None

    def check_writable(self) -> None:
        """Refuse, before any work, a folder that cannot be made or written. Leaves nothing behind."""
        place = self.path.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise Refused(f"--workdir is '{self.path}', which cannot be written ('{place}' is not writable); give another folder")

    def open(self, facts: Mapping[str, Any]) -> None:
        """Make the folder, take its lock (released when the process ends) and write config.json.

        Raises:
          Refused: another process trains in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise Refused(f"another process is training in '{self.path}'; wait for it, or give another --workdir") from None
        write_json(self.config, facts)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def describe(config: Any, corpus: Corpus, lineage: Mapping[str, Any] | None) -> dict[str, Any]:
    """What config.json holds: the resolved fields, and where they came from."""
    return {
        **to_dict(config),
        "lineage": lineage,
        "corpus": {"source": corpus.name, "sha256": corpus.sha256, "train": len(corpus.train), "held_out": len(corpus.held_out)},
        "scheme_source": scheme_source(config),
        "versions": {"resjax": _resjax_version(), "python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "device": {"kind": jax.devices()[0].device_kind, "platform": jax.default_backend(), "count": jax.device_count()},
        "git_commit": _git_commit(),
    }


def fields_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Only the config's fields, from what :func:`describe` wrote."""
    sections = {path.partition(".")[0] for path in FIELDS}
    return {name: value for name, value in facts.items() if name in sections}


def refuse_other_run(facts: Mapping[str, Any], now: Mapping[str, Any], config: Any, where: Path) -> None:
    """Refuse to go on in a folder whose run was another one, with the list of what differs.

    Raises:
      Refused: fields that change numbers differ, or the corpus, the user's scheme file, or the state it was forked from.
    """
    found = config_folder.differences(fields_of(facts), config)
    for key, what in (("corpus", "the corpus"), ("scheme_source", "the file of residual.name")):
        was, is_ = ((side.get(key) or {}).get("sha256") for side in (facts, now))
        if was != is_:
            found.append(f"{what} had sha256 {str(was)[:12]}, has now {str(is_)[:12]}")
    if now["lineage"] and facts.get("lineage") != now["lineage"]:
        found.append(f"--from was {_lineage(facts.get('lineage'))}, is now {_lineage(now['lineage'])}")
    if found:
        lines = "\n  ".join(found)
        raise Refused(
            f"the run in '{where}' cannot go on under another configuration; give a new --workdir"
            f" (and --from={where} to start from its state):\n  {lines}"
        )


def _lineage(lineage: Mapping[str, Any] | None) -> str:
    return f"{lineage['run']}@{lineage['step']}" if lineage else "not given"


def _resjax_version() -> str:
    from resjax import __version__

    return __version__


def _git_commit() -> str | None:
    """The commit of the checkout that resjax runs from, '+' behind it where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = lambda *words: subprocess.run(  # noqa: E731
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return run("rev-parse", "HEAD") + ("+" if run("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
