"""How does a sweep go? Architecture by architecture, cell by cell, a line for each; what fails stops no other."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from resjax.config.field import show
from resjax.config.schema import FIELDS
from resjax.config.tree import flat
from resjax.errors import Refused
from resjax.sweeps import grid
from resjax.sweeps.cells import WITHOUT_EFFECT, Architecture, Cell
from resjax.sweeps.crew import Crew
from resjax.sweeps.estimate import Estimate, about
from resjax.sweeps.lines import value
from resjax.sweeps.one import DONE, FAILED, KILLED
from resjax.sweeps.results import Results
from resjax.sweeps.wanted import ENDS_ONLY, Wanted
from resjax.sweeps.worker import Row, Worker, failed
from resjax.train.progress import clock
from resjax.train.signals import Signals, Stopped

ALL_DONE, SOME_FAILED = 0, 1
MOST_TOLD = 3  # fields that are named in a note
PROGRAMS = ("start", "step", "evaluation")  # of an architecture


class Sweep:
    """One session of a sweep.

    Args:
      cells: all of it.
      groups: their architectures.
      results: of its folder.
      console: where it prints.
      wanted: what each line keeps beside the ends.
      scale: what --scale says, noted in each line.
      device: the kind that it runs on.
      figures: whether figures are drawn at the end.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        groups: Sequence[Architecture],
        results: Results,
        console: Console,
        wanted: Wanted = ENDS_ONLY,
        scale: str | None = None,
        device: str = "cpu",
        figures: bool = True,
    ):
        self.cells, self.groups, self.results, self.console = cells, groups, results, console
        self.wanted, self.scale, self.figures = wanted, scale, figures
        self.estimate = Estimate(groups, wanted, device).learn(results.rows.values())
        self._ended: set[str] = set()  # in this session
        self._places = {cell.name: place for place, cell in enumerate(cells, 1)}

    # ------------------------------------------------------------------ what is to be done

    def listing(self, workers: int = 1) -> list[str]:
        """Every cell, by architecture, what there is to compile, and how long it will take on so many workers."""
        lines = [self._counted()]
        left = [(group, self._left(group)) for group in self.groups]
        whole = about(self.estimate.left(left, workers))
        of = f" by {workers} workers" if workers > 1 else ""
        lines.append(f"time: {whole}{of}" if any(cells for _, cells in left) else "time: nothing is left to train")
        for cell in self.cells:
            if cell.refusal:
                lines.append(f"refused: {grid.text(cell.fields)}: {cell.refusal}")
        for number, (group, open_) in enumerate(left, 1):
            taken = ", ".join(("seed", *group.traced))
            guess = self.estimate.guess(group)
            time = f"; {about(guess.cell)} a cell, {guess.basis}" if guess and open_ else ""
            lines.append(
                f"architecture {number} of {len(self.groups)}, {group.name}: values of its programs: {taken}{time}"
            )
            for cell in group.cells:
                lines.append(f"  {cell.name}  {grid.text(cell.fields)}{self._noted(cell)}")
        return lines

    def others(self) -> str:
        """A note where the folder has lines of cells that are not of this sweep; empty where it has none.

        Where it has no other lines: also by which fields, as far as the grids do not set them, those are another sweep's.
        """
        names, rows = {cell.name for cell in self.cells}, self.results.rows
        strange = [row for name, row in rows.items() if name not in names]
        if not strange:
            return ""
        told = f"note: {self.results.path} keeps lines of {_count(len(strange), 'cell')} that are not of this sweep"
        mine = next((cell for cell in self.cells if cell.config is not None), None)
        theirs = next((row for row in strange if "config" in row), None)
        if len(strange) < len(rows) or mine is None or theirs is None:
            return told
        here, aside = flat(mine.config), {*mine.fields, *theirs["fields"]}
        paths = [path for path in FIELDS if path not in aside and not path.startswith(WITHOUT_EFFECT)]
        apart = [path for path in paths if value(theirs, path) != here[path]]
        differ = ", ".join(
            f"{path} was {show(value(theirs, path))}, is {show(here[path])}" for path in apart[:MOST_TOLD]
        )
        return f"{told}: {differ}{', ...' * (len(apart) > MOST_TOLD)}" if differ else told

    def _noted(self, cell: Cell) -> str:
        status = self.results.rows.get(cell.name, {}).get("status")
        noted = "finished" if self._finished(cell) else status if status in (FAILED, KILLED) else ""
        return f"  ({noted})" if noted else ""

    def _counted(self) -> str:
        finished = sum(map(self._finished, self.cells))
        left = [group for group in self.groups if self._left(group)]
        refused = sum(cell.config is None for cell in self.cells)
        ends = f"{finished} of them finished" + (f", {refused} refused" if refused else "")
        return (
            f"{_count(len(self.cells), 'cell')}, {ends}; {_count(len(left), 'architecture')} to compile "
            f"({_count(len(PROGRAMS) * len(left), 'program')}: {', '.join(PROGRAMS)} of each)"
        )

    def _finished(self, cell: Cell) -> bool:
        return self.results.finished(cell, self.wanted)

    def _left(self, group: Architecture) -> list[Cell]:
        return [cell for cell in group.cells if not self._finished(cell)]

    def measure(self) -> None:
        """Time some steps, so that what is said of the time is of this machine."""
        self.estimate.measure([group for group in self.groups if self._left(group)])

    # ------------------------------------------------------------------ doing it

    def run(self, signals: Signals, at_once: int = 0, crew: Crew | None = None) -> int:
        """Train what is not finished; returns the exit code.

        Args:
          at_once: cells at once in this process; 0 = as many as pays.
          crew: workers that train them instead.

        Raises:
          OSError: a line cannot be written; those before are whole.
        """
        self.console.print(self._counted())
        try:
            for cell in self.cells:
                if cell.refusal and not self.results.refused(cell.name, cell.refusal):
                    self._add(cell, {"status": FAILED, "error": cell.refusal})
            if crew is not None:
                left = [(group, self._left(group)) for group in self.groups]
                for cell, row in crew.train(left, signals, self._begin, self.estimate):
                    self._add(cell, self._same_text(row), crew.count)
            else:
                worker = Worker(self.wanted, self.results.known, self.console.print, at_once)
                for cell, row in self._by_one(worker, signals):
                    self._add(cell, row)
        except Stopped:
            done = sum(map(self._finished, self.cells))
            name = signals.stop.name if signals.stop else ""
            self.console.print(
                f"stopped by {name}: {done} of {_count(len(self.cells), 'cell')} finished; the same command goes on"
            )
            return signals.exit_code
        return self.end()

    def _by_one(self, worker: Worker, signals: Signals) -> Iterator[tuple[Cell, Row]]:
        for number, group in enumerate(self.groups, 1):
            if left := self._left(group):
                self.console.print(f"architecture {number} of {len(self.groups)}: {_count(len(left), 'cell')} to train")
                yield from worker.train(group, left, signals, self._begin)

    def _begin(self, cells: Sequence[Cell]) -> None:
        self.results.begin([self._about(cell) for cell in cells])

    def _same_text(self, row: Row) -> Row:
        """The row, or a failure where its text is not that of other workers."""
        try:
            if "corpus" in row:
                self.results.known.refuse_other(row["corpus"])
        except Refused as refused:
            return failed(refused)
        return row

    def end(self) -> int:
        """Say how the cells ended, and draw it; returns the exit code."""
        ends = [self.results.rows[cell.name]["status"] for cell in self.cells]
        counts = ", ".join(f"{ends.count(status)} {status}" for status in dict.fromkeys(ends))
        self.console.print(f"{_count(len(ends), 'cell')}: {counts}; everything is in {self.results.path}")
        if self.figures:
            from resjax.sweeps.figures import automatic  # loads Matplotlib

            automatic.write(
                self.results.path.parent, [self.results.rows[cell.name] for cell in self.cells], self.console.print
            )
        return ALL_DONE if set(ends) <= {DONE} else SOME_FAILED

    def _about(self, cell: Cell) -> dict[str, Any]:
        """What the line of a cell begins with."""
        about = {"cell": cell.name, "fields": dict(cell.fields), "scale": self.scale}
        return about if cell.config is None else about | {"config": changed(cell.config)}

    def _add(self, cell: Cell, row: Row, workers: int = 1) -> None:
        line = self._about(cell) | row
        self.results.add(line)
        self.estimate.learn([line])
        self._ended.add(cell.name)
        left = [(group, [c for c in self._left(group) if c.name not in self._ended]) for group in self.groups]
        here = next((group.name for group in self.groups if cell in group.cells), "")
        time = self.estimate.left(left, workers, here)
        ending = f", {about(time)} left" if time else ""
        place = f"{self._places[cell.name]}/{len(self.cells)}"
        self.console.print(f"  {place}  {grid.text(cell.fields)}: {told(row)}{ending}")


def changed(config: Any) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {path: value for path, value in flat(config).items() if value != FIELDS[path].default}


def told(row: dict[str, Any]) -> str:
    """What became of a cell, in a line."""
    if row["status"] in (FAILED, KILLED):
        return f"{row['status']}: {row['error']}"
    took = clock(row["seconds"])
    if row["error"]:
        return f"{row['status']}: {row['error']} ({took})"
    word = f", {row['outcome']}" if row["outcome"] else ""
    return f"held-out loss {row['eval_loss']:.4f}{word} ({took})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
