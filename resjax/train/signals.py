"""How does a run learn that it should stop, or report? Signals set a flag; the loop reads it between steps and evaluation batches."""

import os
import signal
from types import FrameType

STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143}  # exit code after a clean save


class Signals:
    """While entered: Ctrl-C and SIGTERM ask for a save and a stop, SIGUSR1 asks for a report.

    A second Ctrl-C or SIGTERM ends the process at once, without a save.

    Attributes:
      stop: the signal that asked for a stop, or None.
      report: whether a report was asked for; the loop sets it back.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self.report = False
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        return STOPPING[self.stop] if self.stop else 0

    def __enter__(self) -> "Signals":
        wanted = {number: self._on_stop for number in STOPPING} | {signal.SIGUSR1: self._on_report}
        self._before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        if self.stop is not None:
            os._exit(STOPPING[signal.Signals(number)])
        self.stop = signal.Signals(number)

    def _on_report(self, number: int, _: FrameType | None) -> None:
        self.report = True
