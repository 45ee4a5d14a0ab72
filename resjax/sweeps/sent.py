"""How does what is wanted of a cell reach another process? As it is, but for a look's function: that is read there, from its file."""

import hashlib
import os
from dataclasses import dataclass, replace

from resjax.config.load import from_file, split
from resjax.config.pyfile import read
from resjax.errors import Refused
from resjax.sweeps.wanted import Wanted, from_config

WHAT = "config file"


@dataclass(frozen=True)
class Sent:
    """What is wanted, in a form that can be pickled: a function of a config file cannot.

    Attributes:
      rest: all but the looks.
      spec: 'FILE[:variant]' whose keep() has the looks, an absolute path; None = there are none.
      sha256: of that file.
    """

    rest: Wanted
    spec: str | None = None
    sha256: str = ""

    @classmethod
    def of(cls, wanted: Wanted, spec: str) -> "Sent":
        """From what was read of the config file ``spec``, with what the command line adds."""
        if wanted.looks is None:
            return cls(wanted)
        path, variant = split(spec)
        whole = os.path.abspath(path) + ("" if variant is None else f":{variant}")
        return cls(replace(wanted, looks=None), whole, _digest(path))

    def opened(self) -> Wanted:
        """What was sent, in the process that it was sent to.

        Raises:
          Refused: the config file with the looks is not there, or not the same.
        """
        if self.spec is None:
            return self.rest
        path = split(self.spec)[0]
        if _digest(path) != self.sha256:
            raise Refused(
                f"{WHAT} '{path}', whose looks each worker reads for itself, is another one there, or has changed since the "
                "sweep began; give all machines the same file, and the command again"
            )
        return replace(self.rest, looks=from_config(from_file(self.spec, "keep"), path).looks)


def _digest(path: str) -> str:
    return hashlib.sha256(read(path, WHAT)).hexdigest()
