"""How does a sweep go? Architecture by architecture, cell by cell, a line for each; what fails stops no other."""

from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from resjax.config.schema import FIELDS
from resjax.config.tree import flat
from resjax.errors import Refused
from resjax.sweeps import grid, one
from resjax.sweeps.cells import Architecture, Cell
from resjax.sweeps.one import DONE, FAILED, Stopped
from resjax.sweeps.results import Results
from resjax.sweeps.shared import Shared, compile_shared
from resjax.sweeps.texts import DRAWN_BY_SEED, Texts
from resjax.sweeps.wanted import ENDS_ONLY, Wanted
from resjax.train.progress import clock
from resjax.train.signals import Signals

ALL_DONE, SOME_FAILED = 0, 1
PROGRAMS = ("start", "step", "evaluation")  # of an architecture


class Sweep:
    """One session of a sweep.

    Args:
      cells: all of it.
      groups: their architectures.
      results: of its folder.
      wanted: what each line keeps beside the ends.
      scale: what --scale says, noted in each line.
      figures: whether figures are drawn at the end.
      console: where it prints.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        groups: Sequence[Architecture],
        results: Results,
        console: Console,
        wanted: Wanted = ENDS_ONLY,
        scale: str | None = None,
        figures: bool = True,
    ):
        self.cells, self.groups, self.results, self.console = cells, groups, results, console
        self.wanted, self.scale, self.figures = wanted, scale, figures
        self.texts = Texts()
        self.compiled = 0

    # ------------------------------------------------------------------ what is to be done

    def listing(self) -> list[str]:
        """Every cell, by architecture, and what there is to compile."""
        lines = [self._counted()]
        for cell in self.cells:
            if cell.refusal:
                lines.append(f"refused: {grid.text(cell.fields)}: {cell.refusal}")
        for number, group in enumerate(self.groups, 1):
            taken = ", ".join(("seed", *group.traced))
            lines.append(f"architecture {number} of {len(self.groups)}, {group.name}: values of its programs: {taken}")
            for cell in group.cells:
                lines.append(f"  {cell.name}  {grid.text(cell.fields)}{'  (finished)' if self._finished(cell) else ''}")
        return lines

    def _counted(self) -> str:
        finished = sum(map(self._finished, self.cells))
        left = [group for group in self.groups if self._left(group)]
        return (
            f"{_count(len(self.cells), 'cell')}, {finished} of them finished; {_count(len(left), 'architecture')} to compile "
            f"({_count(len(PROGRAMS) * len(left), 'program')}: {', '.join(PROGRAMS)} of each)"
        )

    def _finished(self, cell: Cell) -> bool:
        return self.results.finished(cell, self.wanted)

    def _left(self, group: Architecture) -> list[Cell]:
        return [cell for cell in group.cells if not self._finished(cell)]

    # ------------------------------------------------------------------ doing it

    def run(self, signals: Signals) -> int:
        """Train what is not finished; returns the exit code.

        Raises:
          OSError: a line cannot be written; those before are whole.
        """
        self.console.print(self._counted())
        try:
            for cell in self.cells:
                if cell.refusal and not self.results.refused(cell.name, cell.refusal):
                    self._add(cell, {"status": FAILED, "error": cell.refusal})
            for number, group in enumerate(self.groups, 1):
                if left := self._left(group):
                    self.console.print(
                        f"architecture {number} of {len(self.groups)}: {_count(len(left), 'cell')} to train"
                    )
                    self._train(group, left, signals)
                    jax.clear_caches()  # so that memory is that of the largest architecture, not of all
        except Stopped:
            done = sum(map(self._finished, self.cells))
            name = signals.stop.name if signals.stop else ""
            self.console.print(
                f"stopped by {name}: {done} of {_count(len(self.cells), 'cell')} finished; the same command goes on"
            )
            return signals.exit_code
        return self.end()

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

    def _train(self, group: Architecture, cells: Sequence[Cell], signals: Signals) -> None:
        """The cells of one architecture; what fails in compiling fails for all of them."""
        shared: Shared | None = None
        fault: dict[str, Any] | None = None
        for cell in cells:
            waited = 0.0
            row = fault
            if row is None:
                try:
                    corpus = self.texts.corpus(cell.config)
                    text = _facts(cell.config, corpus.sha256)
                    self.results.refuse_other_text(text)
                    pipeline = self.texts.pipeline(cell.config)
                    if signals.stop:
                        raise Stopped
                    if shared is None:
                        try:
                            shared = self._compiled(group, cell.config.model.vocab or corpus.vocab)
                        except Exception as error:
                            fault = _failed(error)
                            raise
                        waited = shared.seconds
                    row = one.train(cell.config, shared, corpus, pipeline, signals, self.wanted)
                    baselines, floors = corpus.baselines, corpus.baselines.floors
                    row |= {
                        "baselines": baselines.as_dict(),
                        "floors": floors and {name: getattr(floors, name) for name in ("unigram", "bigram", "trigram")},
                        "corpus": text,
                        "compile_seconds": round(waited, 3),
                    }
                except Stopped:
                    raise
                except Exception as error:
                    row = _failed(error)
            self._add(cell, row)

    def _compiled(self, group: Architecture, vocab: int) -> Shared:
        shared = compile_shared(group, vocab)
        self.compiled += 1
        self.console.print(f"  compiled in {clock(shared.seconds)}; the stream is {shared.stream_dtype}")
        return shared

    def _add(self, cell: Cell, row: dict[str, Any]) -> None:
        about: dict[str, Any] = {"cell": cell.name, "fields": dict(cell.fields), "scale": self.scale}
        if cell.config is not None:
            about["config"] = changed(cell.config)
            about["device"] = jax.devices()[0].device_kind
        self.results.add({**about, **row})
        place = f"{list(self.cells).index(cell) + 1}/{len(self.cells)}"
        self.console.print(f"  {place}  {grid.text(cell.fields)}: {told(row)}")


def changed(config: Any) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {path: value for path, value in flat(config).items() if value != FIELDS[path].default}


def told(row: dict[str, Any]) -> str:
    """What became of a cell, in a line."""
    if row["status"] == FAILED:
        return f"failed: {row['error']}"
    took = clock(row["seconds"])
    if row["error"]:
        return f"{row['status']}: {row['error']} ({took})"
    word = f", {row['outcome']}" if row["outcome"] else ""
    return f"held-out loss {row['eval_loss']:.4f}{word} ({took})"


def _facts(config: Any, sha256: str) -> dict[str, Any]:
    source = config.data.source
    return {"source": source, "seed": config.seed if source in DRAWN_BY_SEED else None, "sha256": sha256}


def _failed(error: Exception) -> dict[str, Any]:
    sentence = " ".join(str(error).split())
    if not isinstance(error, Refused):
        sentence = f"{type(error).__name__}: {sentence[:500]}"
    return {"status": FAILED, "error": sentence}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
