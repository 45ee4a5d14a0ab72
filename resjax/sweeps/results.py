"""What does a sweep's folder hold? results.jsonl, a strict-JSON line for each cell that ended; meanwhile which are under way.

Beside it lie only figures made of it.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from resjax.errors import Refused
from resjax.sweeps.cells import Cell
from resjax.sweeps.one import DIVERGED, DONE, KILLED
from resjax.sweeps.texts import Known
from resjax.sweeps.wanted import ENDS_ONLY, Wanted
from resjax.train.runfolder import DISK, LEFTOVER, RunFolder
from resjax.train.writers import JsonlWriter, read_json, read_metrics, write_json

NAME, UNDER_WAY = "results.jsonl", "under_way.json"
ENDED = (DONE, DIVERGED)


class Results:
    """The lines of a sweep's folder. Making the object touches nothing.

    Args:
      folder: of the sweep.

    Raises:
      Refused: the folder holds something else, or a line that is no JSON.

    Attributes:
      rows: the last line of each cell, by name.
      known: the texts that they were trained on.
    """

    def __init__(self, folder: RunFolder):
        self.path = folder.path / NAME
        self._under_way = folder.path / UNDER_WAY
        self._folder = folder
        self._file: JsonlWriter | None = None
        try:
            if folder.path.exists() and not folder.path.is_dir():
                raise Refused(f"--workdir is '{folder.path}', which is a file; give a folder")
            there = self.path.exists()
            others = [] if there or not folder.path.exists() else list(folder.path.iterdir())
            if [path for path in others if not path.match(LEFTOVER)]:
                what = "a run" if folder.config.exists() else "other files"
                raise Refused(
                    f"--workdir is '{folder.path}', which holds {what} and no sweep; give a new or empty folder"
                )
            self._size = self.path.stat().st_size if there else 0
            rows = read_metrics(self.path) if there else []
        except OSError as error:
            raise Refused(
                f"--workdir is '{folder.path}', which cannot be read ({error.strerror}); give another folder"
            ) from None
        self.rows: dict[str, dict[str, Any]] = {}
        self.known = Known()
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get("cell"), str):
                raise Refused(f"line {number} of {self.path} is no line of a sweep; mend or remove it")
            self._keep(row)

    def _keep(self, row: Mapping[str, Any]) -> None:
        """The last line of a cell counts, but a failure takes nothing from a cell that had ended."""
        before = self.rows.get(row["cell"], {})
        if row.get("status") in ENDED or before.get("status") not in ENDED:
            self.rows[row["cell"]] = dict(row)
        self.known.add(row)

    def refused(self, name: str, sentence: str) -> bool:
        """Is this refusal on record already?"""
        return self.rows.get(name, {}).get("error") == sentence

    def open(self) -> list[dict[str, Any]]:
        """Make the folder, take its lock, cut off a last line that a kill left unfinished, and mark the cells that were under way then.

        Returns:
          Their lines.

        Raises:
          Refused: another process sweeps in it, or has done so since this object was made; it cannot be written.
          OSError: the disk is full.
        """
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            self._folder.lock()
            if (self.path.stat().st_size if self.path.exists() else 0) != self._size:
                raise Refused(f"another process has swept in '{self._folder.path}' just now; give the command again")
            for leftover in self._folder.path.glob(LEFTOVER):
                leftover.unlink(missing_ok=True)
            self._file = JsonlWriter(self.path)
        except OSError as error:
            if error.errno in DISK:
                raise
            raise Refused(f"{self.path} cannot be written ({error.strerror}); give another --workdir") from None
        killed = []
        with contextlib.suppress(FileNotFoundError, ValueError):
            killed = [
                row | {"status": KILLED, "error": "the sweep was killed while this cell was trained"}
                for row in read_json(self._under_way)
                if self.rows.get(row["cell"], {}).get("status") not in ENDED
            ]
        for row in killed:
            self.add(row)
        self._under_way.unlink(missing_ok=True)
        return killed

    def begin(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Note what is trained from now on (what lines begin with), so that a kill leaves a mark.

        Raises:
          OSError: the disk is full.
        """
        write_json(self._under_way, cells)

    def close(self) -> None:
        """No cell is under way any more."""
        if self._file is not None:
            self._file.close()
            self._under_way.unlink(missing_ok=True)

    def finished(self, cell: Cell, wanted: Wanted = ENDS_ONLY) -> bool:
        """Has the cell ended by itself, and its line what is wanted of it? One that failed is tried again."""
        row = self.rows.get(cell.name, {})
        return row.get("status") in ENDED and wanted.held(row, cell.config)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a line; it is on the disk when this returns.

        Raises:
          OSError: the disk is full; the lines before are whole.
        """
        assert self._file is not None
        self._file.append(row)
        self._file.flush()
        self._keep(row)
