"""How does a run learn that it should stop, or report? Signals set a flag, which the loop reads between steps."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType

# exit code after a clean save; SIGHUP: the terminal is gone
STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class Stopped(Exception):
    """A signal asked for a stop in the middle of what is not kept."""


class Signals:
    """While entered: Ctrl-C, SIGTERM and SIGHUP (unless ignored, as under nohup) ask for a save and a stop, SIGUSR1 for
    a report.

    A second Ctrl-C or SIGTERM ends the process at once, without a save. Python runs signal handlers between two steps
    of Python code, which may be minutes apart while XLA compiles; so a thread reads the signals too, and it is this
    thread that ends the process. Outside of the main thread, where Python allows no handlers, nothing is asked for.

    Args:
      promise: what a stop will do, said when the first one arrives.

    Attributes:
      stop: the signal that asked for a stop, or None.
      report: whether a report was asked for; the loop sets it back.
    """

    def __init__(
        self, promise: str = "saving and stopping after this step; a second one stops at once, unsaved"
    ) -> None:
        self.promise = promise
        self.stop: signal.Signals | None = None
        self.report = False
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        return STOPPING[self.stop] if self.stop else 0

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        wanted = {number: self._on_stop for number in STOPPING} | {signal.SIGUSR1: self._on_report}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            del wanted[signal.SIGHUP]
        self._before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        self._end, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._bell_before = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="resjax-signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._bell_before)
        os.close(self._bell)
        self._watcher.join()
        os.close(self._end)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        self.stop = self.stop or signal.Signals(number)

    def _on_report(self, number: int, _: FrameType | None) -> None:
        self.report = True

    def _watch(self) -> None:
        """Count the signals as they arrive, until the other end of the pipe is closed."""
        stops = 0
        while word := os.read(self._end, 1):
            if word[0] not in STOPPING:
                continue
            stops += 1
            if stops == 2:
                if sys.stdout is not None and sys.stdout.isatty():
                    os.write(1, SHOW_CURSOR)
                os._exit(STOPPING[signal.Signals(word[0])])
            name = signal.Signals(word[0]).name
            text = f"resjax: {name}: {self.promise}\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
