"""The clock of a step: seconds of its named phases, and of all of it. In a profile the phases have the same names."""

import contextlib
import time
from collections.abc import Iterator, Mapping

import jax


class StepClock:
    """Runs from when it is made.

    >>> clock = StepClock()
    >>> with clock("generate"):
    ...     pass
    >>> list(clock.report())
    ['time/step_seconds', 'time/generate_seconds']
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.phases: dict[str, float] = {}
        """Seconds of each phase so far."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block as the phase ``name``."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def report(self) -> dict[str, float]:
        """The seconds, as metrics."""
        step = time.perf_counter() - self._start
        return {"time/step_seconds": step} | {
            f"time/{name}_seconds": spent for name, spent in self.phases.items()
        }


def exposed_seconds(phases: Mapping[str, float]) -> float:
    """The seconds by which planning and migration delayed a step.

    Between generation and update a step recomputes log-probabilities and needs rewards, which are scored beside
    everything else. Without planning it would have taken the longer of the two. What it took beyond that is exposed::

        plan + migrate + recompute + score_wait - max(recompute, score)

    Args:
        phases: seconds of the phases ``plan`` (buffers are sized in it), ``migrate``, ``recompute``, ``score_wait``
            and ``score``; scoring runs from the end of generation on and is the only one beside others.

    Returns:
        Seconds: all of planning and migration if scoring takes no longer than the recompute, 0 if it takes longer than
        everything else together. Scoring that planning slows down, on cores that they share, hides more of it.

    >>> exposed_seconds({"plan": 2.0, "migrate": 1.0, "recompute": 4.0, "score": 5.0, "score_wait": 0.0})
    2.0
    """
    passed = sum(phases[name] for name in ("plan", "migrate", "recompute", "score_wait"))
    return max(passed - max(phases["recompute"], phases["score"]), 0.0)
