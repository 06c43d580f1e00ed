"""Reads that Orbax drops when one of them fails, brought to their end in silence.

Orbax (0.12) starts all reads of a restore at once, raises what the first one raises and closes their event loop. The
others would end later on TensorStore's threads, with nowhere to go, and print a traceback each that says nothing.
"""

import asyncio
import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final

PATIENCE: Final = 30.0
"""The seconds without the end of any task after which nobody waits for the others any longer."""
_PATCHED: Final = threading.RLock()


@contextlib.contextmanager
def reads_to_the_end() -> Iterator[None]:
    """Let event loops that are made within end after the last of their tasks, also where one of them fails.

    One thread at a time, so that what makes event loops afterwards is what made them before.
    """
    with _PATCHED:
        new_event_loop = asyncio.new_event_loop
        asyncio.new_event_loop = _Patient
        try:
            yield
        finally:
            asyncio.new_event_loop = new_event_loop


def collect_reads() -> None:
    """Collect reads that failed, once their exception is gone: those that were never started would complain later."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        gc.collect()


class _Patient(asyncio.SelectorEventLoop):
    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        except Exception:
            tasks = asyncio.all_tasks(self)
            while tasks:
                ended, _ = super().run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))
                # The last of them may have begun others.
                tasks = asyncio.all_tasks(self) if ended else set()
            raise
