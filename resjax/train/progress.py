"""What does a person see while a run trains? A bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 2.0


def make_console() -> Console:
    """Where a run prints: text as it is, lines never broken."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


class Board:
    """Shows the loss, tokens per second and the time left; ``say`` prints a line above the bar."""

    def __init__(self, first: int, steps: int, console: Console | None = None):
        self.console = console or make_console()
        self.first, self.steps = first, steps
        self._started = time.monotonic()
        self._printed = 0.0
        self._bar: Progress | None = None
        self._up = False
        if self.console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[state]}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("", total=steps, completed=first, state="")

    def __enter__(self) -> "Board":
        self._started = time.monotonic()
        self._show(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._show(False)

    def _show(self, up: bool) -> None:
        self._up = up
        if self._bar:
            (self._bar.start if up else self._bar.stop)()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """No bar meanwhile, so that something else can print."""
        was = self._up
        self._show(False)
        yield
        self._show(was)

    def say(self, text: str) -> None:
        self.console.print(text)

    def advance(self, step: int, row: dict[str, Any]) -> None:
        """Show ``row`` (loss, lr, tokens_per_s) as the state after ``step``."""
        state = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=step, state=state)
            return
        now = time.monotonic()
        if step < self.steps and now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        left = (now - self._started) / max(step - self.first, 1) * (self.steps - step)
        self.say(f"step {step}/{self.steps}  {state}  lr {row['lr']:.2e}  {clock(left)} left")


def clock(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
