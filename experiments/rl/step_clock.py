"""The clock of a step: seconds of its named phases, and of all of it."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class StepClock:
    """Runs from when it is made.

    >>> clock = StepClock()
    >>> with clock("generate"):
    ...     pass
    >>> list(clock.report())
    ['seconds', 'phases']
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.phases: dict[str, float] = {}
        """Seconds of each phase so far."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block as the phase ``name``."""
        start = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def report(self) -> dict[str, Any]:
        """The seconds, as metrics."""
        return {"seconds": time.perf_counter() - self._start, "phases": self.phases}
