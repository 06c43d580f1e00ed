"""Timing of alternating runs: a temporary disturbance of the machine then affects all compared runs alike."""

import functools
import math
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np


def interleaved[Name](
    runs: Mapping[Name, Callable[[], object]], *, repeats: int, shortest: float = 0.0
) -> dict[Name, float]:
    """Time alternating runs and return the median seconds of each.

    Args:
        runs: the functions to time, by name.
        repeats: the number of timed rounds.
        shortest: the minimum duration of a reading in seconds, as for `interleaved_seconds`.
    """
    readings = interleaved_seconds(runs, repeats=repeats, shortest=shortest)
    return {name: float(np.median(values)) for name, values in readings.items()}


def interleaved_seconds[Name](
    runs: Mapping[Name, Callable[[], object]], *, repeats: int, shortest: float = 0.0
) -> dict[Name, list[float]]:
    """Time alternating runs, after one untimed round to compile and warm up.

    Args:
        runs: the functions to time, by name.
        repeats: the number of timed rounds.
        shortest: the minimum duration of a reading in seconds. A reading calls its function as often as this needs, so
            that the time to launch a program does not matter on a GPU. With 0, a reading is one call.

    Returns:
        The seconds of one call in every reading, by name.
    """

    def call(run: Callable[[], object], count: int) -> float:
        start, result = time.perf_counter(), None
        for _ in range(count):
            result = run()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    counts = dict.fromkeys(runs, 1)
    if shortest:
        for name, run in runs.items():
            call(run, 1)  # compiles
            counts[name] = math.ceil(shortest / call(run, 1))
    timed = {name: functools.partial(call, run, counts[name]) for name, run in runs.items()}
    return alternating(timed, repeats=repeats)


def alternating[Name, Result](
    runs: Mapping[Name, Callable[[], Result]], *, repeats: int, warm_up: int = 1
) -> dict[Name, list[Result]]:
    """Call alternating runs, each once a round, and return what they measured.

    Args:
        runs: the functions, by name; each returns its own measurement.
        repeats: the number of rounds whose results are returned.
        warm_up: the number of rounds before them, whose results are dropped.
    """
    rounds = [{name: run() for name, run in runs.items()} for _ in range(warm_up + repeats)]
    return {name: [results[name] for results in rounds[warm_up:]] for name in runs}
