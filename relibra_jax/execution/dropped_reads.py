"""A workaround for the reads that Orbax abandons when one read of a restore fails.

Orbax (0.12) starts all reads of a restore at once. When one fails, it raises its error and closes the event loop. The
other reads end later on TensorStore's threads, without an event loop, and each prints a useless traceback.
"""

import asyncio
import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final

PATIENCE: Final = 30.0
"""The seconds after which the event loop stops waiting if no other task has ended."""
_PATCH_LOCK: Final = threading.RLock()


@contextlib.contextmanager
def finish_reads() -> Iterator[None]:
    """Make every event loop created in this context wait for all of its tasks, even if one of them fails.

    A lock admits one thread at a time, so that each thread restores the original `asyncio.new_event_loop`.
    """
    with _PATCH_LOCK:
        new_event_loop = asyncio.new_event_loop
        asyncio.new_event_loop = _WaitingEventLoop
        try:
            yield
        finally:
            asyncio.new_event_loop = new_event_loop


def collect_reads() -> None:
    """Collect the garbage of failed reads without warnings; reads that never started would warn later.

    Call it after the exception of the failed read has been released.
    """
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        gc.collect()


class _WaitingEventLoop(asyncio.SelectorEventLoop):
    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        except Exception:
            tasks = asyncio.all_tasks(self)
            while tasks:
                ended, _ = super().run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))
                # The last tasks may have started new ones.
                tasks = asyncio.all_tasks(self) if ended else set()
            raise
