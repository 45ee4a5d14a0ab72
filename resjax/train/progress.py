"""What does a person see while a run trains? A bar on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 2.0


class Board:
    """Shows the loss, tokens per second and the time left; ``say`` prints a line above the bar."""

    def __init__(self, first: int, steps: int, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.first, self.steps = first, steps
        self._started = time.monotonic()
        self._printed = 0.0
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("", total=steps, completed=first, state="")

    def __enter__(self) -> "Board":
        self._started = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

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
