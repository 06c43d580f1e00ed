"""An event loop in a thread of its own. Several threads start tasks in it, which run one at a time.

Objects that only these tasks use need no locks, because another task runs only where a task waits.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class EventLoop:
    """An event loop, whose thread starts with the first task and does not keep the process alive."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run[Result](self, task: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a task and return its result; of the errors of its parts, raise the first alone."""
        future = asyncio.run_coroutine_threadsafe(task(), self._started())
        try:
            return future.result()
        except BaseException as error:
            future.cancel()  # the wait may have been interrupted, and not the task
            first = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the thread after its tasks and a last one. Return at once."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_stop(loop, last), loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _stop(loop: asyncio.AbstractEventLoop, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    await last()
    loop.stop()
