"""Where do the files of a study lie, and may they be written there? Never over anything that is not a study's own."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from resjax.config.folder import LONGEST, SAFE, default_folder
from resjax.errors import Refused
from resjax.train.writers import parse, write_bytes

COMMAND = "resjax.propagate"  # by which a study's file is known
ROOT = "propagation"
NUMBERS, FIGURE = "propagate.json", "propagate.svg"
OWN = (NUMBERS, FIGURE)
LEFTOVER = ".*.tmp"  # what a kill leaves of a file that was being replaced


def default(spec: str, overrides: Sequence[tuple[str, str]], asked: Sequence[tuple[str, str | None]]) -> str:
    """``propagation/<config>[-variant][,FIELD=VALUE...][,schemes=...]``; ``asked`` are the command's own options, None if not given."""
    name = os.path.basename(default_folder(spec, overrides))
    whole = name + "".join(f",{option}={quote(text, safe=SAFE)}" for option, text in asked if text is not None)
    if len(whole) > LONGEST:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
        whole = f"{whole[: LONGEST - 13].rstrip('%,=')}-{digest}"
    return os.path.join(ROOT, whole)


class Folder:
    """The folder of a study. Making the object only looks.

    Raises:
      Refused: it is no folder, holds other files and no study, or cannot be written.
    """

    def __init__(self, path: str):
        if "://" in path:
            raise Refused(f"--out is '{path}', which is no local folder")
        self.path = Path(os.path.expanduser(path))
        try:
            self._look()
        except OSError as error:
            raise Refused(f"--out is '{path}', which cannot be used ({error.strerror}); give another folder") from None

    def _look(self) -> None:
        if self.path.exists():
            if not self.path.is_dir():
                raise Refused(f"--out is '{self.path}', which is a file; give a folder")
            others = [one for one in self.path.iterdir() if not one.match(LEFTOVER)]
            if others and not self._own():
                raise Refused(
                    f"--out is '{self.path}', which holds other files and no study of propagation; give a new or empty folder"
                )
        place = self.path.absolute()
        while not place.exists():
            place = place.parent
        os.rmdir(tempfile.mkdtemp(prefix=".resjax-", dir=place))  # permissions alone do not tell, least of all to root

    def _own(self) -> bool:
        """Is what lies there a study's?"""
        try:
            found = parse((self.path / NUMBERS).read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("command") == COMMAND

    def write(self, name: str, content: bytes) -> None:
        """One of ``OWN``, replaced as a whole.

        Raises:
          OSError: the disk is full.
        """
        assert name in OWN
        self.path.mkdir(parents=True, exist_ok=True)
        write_bytes(self.path / name, content)
