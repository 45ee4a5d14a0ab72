"""What lies in a run's folder, and may this run use it? Names, facts about the run, one writer at a time."""

import contextlib
import errno
import fcntl
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from resjax.config import folder as config_folder
from resjax.config.entry import source as scheme_source
from resjax.config.schema import FIELDS
from resjax.config.tree import to_dict
from resjax.data import Corpus
from resjax.errors import Refused
from resjax.train.writers import read_json, write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
FINISHED, NONFINITE = "finished", "nonfinite"
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO}  # the disk's fault, not that of the name that the user gave
LEFTOVER = ".*.tmp"  # what a kill leaves of a small file that was being replaced


class RunFolder:
    """The paths in a run's folder. Making the object touches nothing; entered, it lets go of its lock at the end.

    Raises:
      Refused: not the path of a local folder.
    """

    def __init__(self, path: str | os.PathLike):
        if "://" in os.fspath(path):
            raise Refused(f"'{path}' is no local folder, and a run can only be kept in one in this version")
        self.path = Path(path)
        with contextlib.suppress(RuntimeError):  # ~name of a user that there is not: a folder of that name
            self.path = self.path.expanduser()
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.health = self.path / "health"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.nonfinite = self.path / "nonfinite"
        self.profile = self.path / "profile"
        self._lock: int | None = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> dict[str, Any] | None:
        """What config.json holds, or None where there is no run.

        Raises:
          Refused: the folder holds something else, or it cannot be read.
        """
        try:
            if self.path.exists() and not self.path.is_dir():
                raise Refused(f"--workdir is '{self.path}', which is a file; give a folder")
            if not self.config.exists():
                others = (
                    [path for path in self.path.iterdir() if not path.match(LEFTOVER)] if self.path.exists() else []
                )
                if others:
                    raise Refused(
                        f"--workdir is '{self.path}', which holds other files and no run; give a new or empty folder"
                    )
                return None
            return read_json(self.config)
        except ValueError as error:
            raise Refused(f"{self.config} cannot be read ({error}); give another --workdir") from None
        except OSError as error:
            raise Refused(
                f"--workdir is '{self.path}', which cannot be read ({error.strerror}); give another folder"
            ) from None

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary of a run that has done ``steps`` steps and ended well, else None."""
        try:
            summary = read_json(self.summary)
        except (OSError, ValueError):
            return None
        return summary if summary.get("status") == FINISHED and summary.get("steps", 0) >= steps else None

    def check_writable(self) -> None:
        """Refuse, before any work, a folder that cannot be made or written. Leaves nothing behind."""
        try:
            place = self.path.absolute()
            while not place.exists():
                place = place.parent
            os.rmdir(
                tempfile.mkdtemp(prefix=".resjax-", dir=place)
            )  # permissions alone do not tell, least of all to root
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> Refused:
        return Refused(f"--workdir is '{self.path}', which cannot be written ({error.strerror}); give another folder")

    def lock(self) -> bool:
        """Take the folder for this process until :meth:`close` or the process's end; False where there is none.

        On file systems without locks (some network ones) nothing is taken.

        Raises:
          Refused: another process trains in it.
        """
        if not os.path.isdir(self.path):
            return False
        if self._lock is None:
            with contextlib.suppress(OSError):
                self._lock = os.open(self.path, os.O_RDONLY)
            try:
                if self._lock is not None:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise Refused(
                    f"another process is training in '{self.path}'; wait for it, or give another --workdir"
                ) from None
            except OSError:
                pass
        return True

    def open(self, facts: Mapping[str, Any], new: bool) -> None:
        """Make the folder, take its lock, write config.json; clear half-written files and an earlier summary.

        Args:
          facts: see :func:`describe`.
          new: there was no run in it when this one looked.

        Raises:
          Refused: another process trains in it, or it cannot be written.
          OSError: the disk is full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if new and self.config.exists():
                raise Refused(f"another process has started a run in '{self.path}' just now; give another --workdir")
            for leftover in (*self.path.glob(LEFTOVER), self.summary):
                leftover.unlink(missing_ok=True)
            write_json(self.config, facts)
        except OSError as error:
            if error.errno in DISK:
                raise
            raise self._unwritable(error) from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


MACHINE = ("versions", "device", "git_commit")  # what may change from one session of a run to the next


def continued(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> dict[str, Any]:
    """``now`` for a run that goes on from ``step``: what the first session ran on stays, this one is added to 'continued'."""
    first = {name: before.get(name) for name in MACHINE}
    session = {"step": step, **{name: now[name] for name in MACHINE}}
    return {**now, **first, "continued": [*before.get("continued", []), session]}


def describe(config: Any, corpus: Corpus, lineage: Mapping[str, Any] | None) -> dict[str, Any]:
    """What config.json holds: the resolved fields, and where they came from."""
    return {
        **to_dict(config),
        "lineage": lineage,
        "corpus": {
            "source": corpus.name,
            "sha256": corpus.sha256,
            "train": len(corpus.train),
            "held_out": len(corpus.held_out),
        },
        "scheme_source": scheme_source(config),
        "versions": {"resjax": _resjax_version(), "python": platform.python_version(), **installed()},
        "device": {
            "kind": jax.devices()[0].device_kind,
            "platform": jax.default_backend(),
            "count": jax.device_count(),
        },
        "git_commit": _git_commit(),
    }


def installed() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    return {name: version(name) for name in PACKAGES}


def fields_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Only the config's fields, from what :func:`describe` wrote."""
    sections = {path.partition(".")[0] for path in FIELDS}
    return {name: value for name, value in facts.items() if name in sections}


def refuse_other_run(facts: Mapping[str, Any], now: Mapping[str, Any], config: Any, where: Path) -> None:
    """Refuse to go on in a folder whose run was another one, with the list of what differs.

    Raises:
      Refused: fields that change numbers differ, or the corpus, or the user's scheme file.
    """
    found = config_folder.differences(fields_of(facts), config)
    for key, what in (("corpus", "the corpus"), ("scheme_source", "the file of residual.name")):
        was, is_ = ((side.get(key) or {}).get("sha256") for side in (facts, now))
        if was != is_:
            found.append(f"{what} had sha256 {str(was)[:12]}, has now {str(is_)[:12]}")
    if found:
        lines = "\n  ".join(found)
        raise Refused(
            f"the run in '{where}' cannot go on under another configuration; give a new --workdir"
            f" (and --from={where} to start from its state):\n  {lines}"
        )


def _resjax_version() -> str:
    from resjax import __version__

    return __version__


def _git_commit() -> str | None:
    """The commit of the checkout that resjax runs from, with '+' if files differ from it; None outside a checkout."""
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
