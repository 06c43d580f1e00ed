"""Stopping a run with SIGTERM or Ctrl-C, after the step in progress."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or Ctrl-C sets, so that a run can finish and save the step in progress.

    The first signal restores the previous handlers, so that a second one stops the process at once.
    """
    stop = threading.Event()
    previous_handlers: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    def request_stop(*_: object) -> None:
        stop.set()
        restore()

    for number in (signal.SIGTERM, signal.SIGINT):
        previous_handlers[number] = signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        restore()
