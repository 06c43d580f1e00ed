"""The clock of a step: seconds of its named phases, and of all of it. In a profile the phases have the same names."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Final

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
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds of the phase ``name`` that were measured elsewhere."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    def report(self) -> dict[str, float]:
        """The seconds, as metrics."""
        step = time.perf_counter() - self._start
        return {"time/step_seconds": step} | {
            f"time/{name}_seconds": spent for name, spent in self.phases.items()
        }


PLANNING: Final = ("plan", "size", "migrate")
"""What planning adds to a step, in its order."""


def exposed_seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """The seconds by which each phase of planning delayed a step.

    Between generation and update a step recomputes log-probabilities and needs rewards, which are scored beside
    everything else. Without planning it would have taken the longer of the two. What it took beyond that is exposed::

        plan + size + migrate + recompute + score_wait - max(recompute, score)

    Scoring hides what comes first of planning: the plan, then sizes, then migration.

    Args:
        phases: seconds of the phases ``plan``, ``size``, ``migrate``, ``recompute``, ``score_wait`` and ``score``;
            scoring runs from the end of generation on and is the only one beside others.

    Returns:
        Seconds of ``plan``, ``size`` and ``migrate``: all of each if scoring takes no longer than the recompute, 0 if
        it takes longer than everything else together. Scoring that planning slows down, on cores that they share, hides
        more of it.

    >>> phases = {"plan": 2.0, "size": 0.5, "migrate": 1.0, "recompute": 4.0, "score": 6.25, "score_wait": 0.0}
    >>> exposed_seconds(phases)
    {'plan': 0.0, 'size': 0.25, 'migrate': 1.0}
    """
    planning = sum(phases[name] for name in PLANNING)
    passed = planning + phases["recompute"] + phases["score_wait"]
    hidden = planning - max(passed - max(phases["recompute"], phases["score"]), 0.0)
    exposed = {}
    for name in PLANNING:
        exposed[name] = max(phases[name] - max(hidden, 0.0), 0.0)
        hidden -= phases[name]
    return exposed
