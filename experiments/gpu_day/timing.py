"""Measurement of times: parallel compilation, alternating readings, and the roofline.

A program applies an operation to several sets of operands in sequence, so that no operands are still in a cache.
Readings are long enough that the time to launch a program does not matter.
"""

import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from experiments.gpu_day.operations import DENSE, OWN_KERNELS, Call, Operands, Operation
from experiments.interleaving import interleaved_seconds
from experiments.ladder.facts import print_facts


class Reading(NamedTuple):
    """The seconds of a run, summarised over several readings."""

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""


type Program = Callable[[list[Operands], jax.Array], list[Any]]
"""A compiled function ``(sets of operands, group sizes) -> results``."""


def compile_all(operation: Operation, sets: list[Operands], sizes: jax.Array) -> dict[str, Program]:
    """Compile all versions of an operation, run each once, and report the baselines that fail.

    Args:
        operation: the operation.
        sets: the sets of operands to which a program applies the operation.
        sizes: the group sizes for the first run.

    Returns:
        The programs by name, without the baselines that fail.

    Raises:
        Exception: the error of the compiler or of the run, if this project's kernels or the dense matmul fail.
    """

    def compile_one(call: Call) -> Program:
        # With its own jit, the call is lowered only once for all sets.
        call = jax.jit(call)

        def run_sets(sets: list[Operands], sizes: jax.Array) -> list[Any]:
            results: list[Any] = []
            for operands in sets:
                # The barrier makes the calls sequential, so that they share temporary memory.
                operands, results = jax.lax.optimization_barrier((operands, results))
                results = [*results, call(operands, sizes)]
            return results

        return jax.jit(run_sets).lower(sets, sizes).compile()

    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(compile_one, call) for name, call in operation.calls.items()}
    programs = {}
    for name, future in futures.items():
        try:
            program = future.result()
            jax.block_until_ready(program(sets, sizes))
        # Baselines raise different exceptions for shapes or devices that they do not support.
        except Exception as error:
            if name in (OWN_KERNELS, DENSE):
                raise
            reason = (str(error) or repr(error)).splitlines()[0][:100]
            print_facts(operation=operation.name, by=name, refused=reason)
        else:
            programs[name] = program
    return programs


def median_seconds(
    runs: Mapping[Any, Callable[[], Any]], repeats: int, *, shortest: float = 0.02
) -> dict[Any, Reading]:
    """Measure the seconds of several runs, with alternating readings.

    Args:
        runs: the functions to time, by name.
        repeats: the number of readings of each function.
        shortest: the minimum duration of a reading in seconds.

    Returns:
        The seconds of one call of each function, by name.
    """

    readings = interleaved_seconds(runs, repeats=repeats, shortest=shortest)
    return {
        name: Reading(*np.quantile(seconds, (0.5, 0.25, 0.75)).tolist()) for name, seconds in readings.items()
    }


def copy_bandwidth(repeats: int, *, gigabytes: float = 2.0) -> float:
    """Return the measured memory bandwidth: the bytes per second that a copy reads and writes in total."""
    ones = jnp.ones(int(gigabytes * 2**29), jnp.bfloat16)
    copy = jax.jit(lambda array: array + 1)
    return 2 * ones.nbytes / median_seconds({"copy": lambda: copy(ones)}, repeats)["copy"].median


def kernel_milliseconds(program: Callable[..., Any], *operands: Any, repeats: int) -> float | None:
    """Return the median time of a program's kernels in milliseconds from CUPTI, or None if it reports nothing."""
    try:
        run = profiler.measure(program)
        times = [milliseconds for _, milliseconds in (run(*operands) for _ in range(repeats)) if milliseconds]
    # CUPTI may be missing, or another profiler may be using it.
    except Exception as error:
        print_facts(cupti=(str(error) or repr(error)).splitlines()[0][:100])
        return None
    return statistics.median(times) if len(times) == repeats else None


def roofline_seconds(operation: Operation, sizes: np.ndarray, dense_rate: float, bandwidth: float) -> float:
    """Return the time of an operation at the measured roofline: the larger of its FLOP time and its memory time.

    Args:
        operation: the operation.
        sizes: the group sizes.
        dense_rate: the measured floating-point operations per second of a dense matmul.
        bandwidth: the measured bytes per second that a copy moves.

    >>> slow_memory = Operation("", {}, lambda sizes: 6e12, lambda sizes: 1e9, lambda *_: None)
    >>> roofline_seconds(slow_memory, np.array([1]), dense_rate=6e14, bandwidth=2e10)
    0.05
    """
    return max(operation.flops(sizes) / dense_rate, operation.bytes(sizes) / bandwidth)
