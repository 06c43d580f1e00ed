"""How a run is stopped: by SIGTERM or Ctrl-C, behind the step in progress."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets, so that the step in progress can be finished and saved. The second one
    stops at once, as if there were none of this."""
    asked = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(*_: object) -> None:
        asked.set()
        restore()

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        restore()
