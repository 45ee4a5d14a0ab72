"""What does a sweep's folder hold? results.jsonl, a strict-JSON line for each cell that ended; beside it only figures made of it."""

from collections.abc import Mapping
from typing import Any

from resjax.errors import Refused
from resjax.sweeps.cells import Cell
from resjax.sweeps.one import DIVERGED, DONE
from resjax.sweeps.wanted import ENDS_ONLY, Wanted
from resjax.train.runfolder import LEFTOVER, RunFolder
from resjax.train.writers import JsonlWriter, read_metrics

NAME = "results.jsonl"
ENDED = (DONE, DIVERGED)


class Results:
    """The lines of a sweep's folder. Making the object touches nothing.

    Args:
      folder: of the sweep.

    Raises:
      Refused: the folder holds something else, or a line that is no JSON.

    Attributes:
      rows: the last line of each cell, by name.
    """

    def __init__(self, folder: RunFolder):
        self.path = folder.path / NAME
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
            rows = read_metrics(self.path) if there else []
        except OSError as error:
            raise Refused(
                f"--workdir is '{folder.path}', which cannot be read ({error.strerror}); give another folder"
            ) from None
        self.rows: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get("cell"), str):
                raise Refused(f"line {number} of {self.path} is no line of a sweep; mend or remove it")
            self._keep(row)

    def _keep(self, row: Mapping[str, Any]) -> None:
        """The last line of a cell counts, but a failure takes nothing from a cell that had ended."""
        before = self.rows.get(row["cell"], {})
        if row.get("status") in ENDED or before.get("status") not in ENDED:
            self.rows[row["cell"]] = dict(row)

    def refused(self, name: str, sentence: str) -> bool:
        """Is this refusal on record already?"""
        return self.rows.get(name, {}).get("error") == sentence

    def open(self) -> None:
        """Make the folder, take its lock, and cut off a last line that a kill left unfinished.

        Raises:
          Refused: another process sweeps in it.
          OSError: it cannot be written.
        """
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._folder.lock()
        self._file = JsonlWriter(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

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

    def refuse_other_text(self, text: Mapping[str, Any]) -> None:
        """Refuse a text (source, seed, sha256) that is not the one that cells of the same source were trained on.

        Raises:
          Refused: it has changed meanwhile.
        """
        for row in self.rows.values():
            was = row.get("corpus") or text
            if all(was.get(name) == text[name] for name in ("source", "seed")) and was.get("sha256") != text["sha256"]:
                raise Refused(
                    f"the text of data.source '{text['source']}' has changed since cell {row['cell']}: its sha256 was "
                    f"{str(was.get('sha256'))[:12]} and is {text['sha256'][:12]}; give a new --workdir"
                )
