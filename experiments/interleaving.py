"""Readings of the clock that take turns, so that what disturbs a machine for a while disturbs all that is compared."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np


def interleaved[Name](runs: Mapping[Name, Callable[[], object]], *, repeats: int) -> dict[Name, float]:
    """The median seconds of each run; arguments as of `interleaved_seconds`."""
    return {
        name: float(np.median(values)) for name, values in interleaved_seconds(runs, repeats=repeats).items()
    }


def interleaved_seconds[Name](
    runs: Mapping[Name, Callable[[], object]], *, repeats: int
) -> dict[Name, list[float]]:
    """The seconds of each run; all are called in turn, after one round to compile and warm up.

    Args:
        runs: the calls to time, by name.
        repeats: the number of rounds that are timed.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if round_:
                times[name].append(time.perf_counter() - start)
    return times
