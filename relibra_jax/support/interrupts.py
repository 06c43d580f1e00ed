"""Blocks that signals do not interrupt: Ctrl-C, a timer or a termination request waits until the block ends."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Run a block to its end before any signal handler of the program runs, and the handlers after it.

    Python runs signal handlers on the main thread only, so blocks on other threads need nothing. Signals that end the
    process without a handler still end it.

    >>> order = []
    >>> before = signal.signal(signal.SIGALRM, lambda number, frame: order.append("handler"))
    >>> with signals_deferred():
    ...     signal.raise_signal(signal.SIGALRM)
    ...     order.append("block")
    >>> _ = signal.signal(signal.SIGALRM, before)
    >>> order
    ['block', 'handler']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        try:
            _each(signal.signal, list(handlers.items()))
        finally:
            _each(signal.raise_signal, [(number,) for number in arrived])


def _each(call: Callable[..., object], arguments: list[tuple[Any, ...]]) -> None:
    """Make a call for all arguments, even if a handler that runs meanwhile raises."""
    if arguments:
        try:
            call(*arguments[0])
        finally:
            _each(call, arguments[1:])
