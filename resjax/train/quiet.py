"""Which noise of Orbax and TensorStore is held back, and why? Only what repeats an error that is raised as well."""

import logging
import os
import sys
from typing import Any


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/checkpoint/" not in record.pathname.replace(os.sep, "/")


def _is_late_callback(unraisable: Any) -> bool:
    """A write that ends after the failure of another has closed their event loop: no Python code called it or waits."""
    trace = unraisable.exc_traceback
    outermost = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
    return outermost and str(unraisable.exc_value) == "Event loop is closed"


def install() -> None:
    """Hold back, from now on, Orbax's part of absl's log and TensorStore's callbacks after a failed save (a full disk).

    Orbax logs the traceback of each error that it raises, and warns of leftovers that resjax reports itself.
    """
    logging.getLogger("absl").addFilter(_is_not_orbax)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not _is_late_callback(unraisable):
            before(unraisable)

    sys.unraisablehook = hook
