"""Which cluster of Ray's does a sweep use? One that runs already, or workers on this machine. Loads no JAX, which must not be
there yet when Ray starts its processes: it warns of forks."""

import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from typing import Any

from resjax.errors import Refused

ANSWER = 5.0  # seconds that an address has to answer; Ray itself tries for minutes
INSTALL = "python -m pip install 'resjax[sweep]'"


@contextlib.contextmanager
def connected(count: int | None, address: str | None) -> Iterator[Any]:
    """Ray's module, connected while entered.

    Args:
      count: workers on this machine, where there is no ``address``.
      address: of a cluster that runs already ('auto': the one that this machine belongs to).

    Raises:
      Refused: Ray is not installed, or there is no cluster.
      OSError: it does not start on this machine, which may be too busy.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the machine unasked
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do by itself, and warns of
    try:
        import ray
    except ImportError:
        raise Refused(f"--workers and --ray need Ray, which is not installed; {INSTALL}") from None
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    local: dict[str, Any] = {"num_cpus": count, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
        if colon:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # of a process that has used JAX before
            ray.init(address or "local", **({} if address else local), log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # what Ray raises depends on what it meets
        sentence = " ".join(str(error).split())[:200]
        if address is None:  # nothing that was asked for is wrong
            raise OSError(f"Ray does not start on this machine for --workers={count} ({sentence})") from None
        raise Refused(f"--ray is '{address}', where no cluster answers ({sentence})") from None
    finally:
        for number, handler in before.items():  # Ray puts its own in the place of those that stop a sweep
            signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()
