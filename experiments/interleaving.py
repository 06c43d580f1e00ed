"""Timing of alternating runs: a temporary disturbance of the machine then affects all compared runs alike."""

import functools
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
    """Time alternating runs, after one untimed round to compile and warm up.

    Args:
        runs: the functions to time, by name.
        repeats: the number of timed rounds.

    Returns:
        The seconds of every call, by name.
    """

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return alternating({name: functools.partial(seconds, run) for name, run in runs.items()}, repeats=repeats)


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
