"""The clock of a step, which measures its named phases and the whole step; and profiles, which show the same names."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import jax


class StepClock:
    """A clock for one step, which starts when it is constructed.

    >>> clock = StepClock()
    >>> with clock("generate"):
    ...     pass
    >>> list(clock.report())
    ['time/step_seconds', 'time/generate_seconds']
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.phases: dict[str, float] = {}
        """The seconds of each phase so far."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase ``name``."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to the phase ``name``."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    def report(self) -> dict[str, float]:
        """Return the seconds of the step so far and of its phases, as metrics."""
        step = time.perf_counter() - self._start
        return {"time/step_seconds": step} | {
            f"time/{name}_seconds": seconds for name, seconds in self.phases.items()
        }


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Write a profiler trace of the block into a folder.

    The trace names the phases of a step on the host, and the operations of the layers in programs;
    docs/guides/metrics.md lists these names. It leaves out calls of Python functions, which would be most of it.

    Args:
        folder: the folder of the trace. None writes no trace.
    """
    if folder is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        yield


PLANNING: Final = ("plan", "size", "migrate")
"""The phases that planning adds to a step, in their order."""


def exposed_seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """Compute the seconds by which each phase of planning delayed a step.

    Between generation and update a step recomputes log-probabilities and scores rewards, concurrently with everything
    else. Without planning this would take the longer of the two. The time beyond that is exposed::

        plan + size + migrate + recompute + score_wait - max(recompute, score)

    Scoring hides the phases of planning in their order: first the plan, then sizes, then migration.

    Args:
        phases: the seconds of the phases ``plan``, ``size``, ``migrate``, ``recompute``, ``score_wait`` and ``score``.
            Scoring starts at the end of generation, and is the only phase that runs beside the others.

    Returns:
        The exposed seconds of ``plan``, ``size`` and ``migrate``: each whole phase if scoring takes no longer than the
        recompute, and 0 if scoring takes longer than everything else together. If planning slows down scoring, because
        they share cores, the longer scoring hides more of planning.

    >>> phases = {"plan": 2.0, "size": 0.5, "migrate": 1.0, "recompute": 4.0, "score": 6.25, "score_wait": 0.0}
    >>> exposed_seconds(phases)
    {'plan': 0.0, 'size': 0.25, 'migrate': 1.0}
    """
    planning = sum(phases[name] for name in PLANNING)
    total = planning + phases["recompute"] + phases["score_wait"]
    hidden = planning - max(total - max(phases["recompute"], phases["score"]), 0.0)
    exposed = {}
    for name in PLANNING:
        exposed[name] = max(phases[name] - max(hidden, 0.0), 0.0)
        hidden -= phases[name]
    return exposed
