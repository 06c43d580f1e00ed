"""Timing of alternating runs: a temporary disturbance of the machine then affects all compared runs alike."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np


def interleaved[Name](runs: Mapping[Name, Callable[[], object]], *, repeats: int) -> dict[Name, float]:
    """Time alternating runs and return the median seconds of each.

    Args:
        runs: the functions to time, by name.
        repeats: the number of timed rounds.
    """
    return {
        name: float(np.median(values)) for name, values in interleaved_seconds(runs, repeats=repeats).items()
    }


def interleaved_seconds[Name](
    runs: Mapping[Name, Callable[[], object]], *, repeats: int
) -> dict[Name, list[float]]:
    """Time alternating runs: each round calls every function once, after one untimed round to compile and warm up.

    Args:
        runs: the functions to time, by name.
        repeats: the number of timed rounds.

    Returns:
        The seconds of every call, by name.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if round_:
                times[name].append(time.perf_counter() - start)
    return times
