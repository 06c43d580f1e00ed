"""How long things take: programs that are compiled side by side, readings that take turns, and the roofline.

A program calls an operation on sets of operands in turn, so that none is found in a cache, and readings are long
enough to hide how programs are started.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from experiments.gpu_day.facts import say
from experiments.gpu_day.operations import DENSE, OURS, Call, Operands, Operation
from experiments.interleaving import interleaved_seconds


class Reading(NamedTuple):
    """The seconds of a run, of several readings."""

    median: float
    low: float
    """The quarter of the readings below it ends here."""
    high: float
    """The quarter of the readings above it begins here."""


type Program = Callable[[list[Operands], jax.Array], list[Any]]
"""A compiled function ``(sets of operands, group sizes) -> results``."""


def compile_all(operation: Operation, sets: list[Operands], sizes: jax.Array) -> dict[str, Program]:
    """Compile a program for everyone who can do an operation, and run each once; peers that refuse are said.

    Args:
        operation: what is computed.
        sets: the sets of operands that a program works on in turn.
        sizes: the group sizes of the run.

    Returns:
        The programs by name, without peers that refuse.

    Raises:
        Exception: whatever the compiler or the run raises, if it is ours or the dense matmul that fails.
    """

    def compile_one(call: Call) -> Program:
        # Under a jit of its own, a call is lowered once for all sets.
        call = jax.jit(call)

        def in_turn(sets: list[Operands], sizes: jax.Array) -> list[Any]:
            results: list[Any] = []
            for operands in sets:
                # One after the other, so that they share temporary memory.
                operands, results = jax.lax.optimization_barrier((operands, results))
                results = [*results, call(operands, sizes)]
            return results

        return jax.jit(in_turn).lower(sets, sizes).compile()

    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(compile_one, call) for name, call in operation.calls.items()}
    programs = {}
    for name, future in futures.items():
        try:
            program = future.result()
            jax.block_until_ready(program(sets, sizes))
        # Each refuses in its own way.
        except Exception as error:
            if name in (OURS, DENSE):
                raise
            reason = (str(error) or repr(error)).splitlines()[0][:100]
            say(operation=operation.name, by=name, refused=reason)
        else:
            programs[name] = program
    return programs


def median_seconds(
    runs: Mapping[Any, Callable[[], Any]], repeats: int, *, reading: float = 0.02
) -> dict[Any, Reading]:
    """Time runs, and return the seconds of each.

    Args:
        runs: the functions to time, by name; they take turns.
        repeats: the number of readings of each.
        reading: the seconds that a reading takes at least, with as many runs as that needs.
    """

    def run_often(run: Callable[[], Any], count: int) -> Any:
        for _ in range(count - 1):
            run()
        return run()

    counts = {}
    for name, run in runs.items():
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        counts[name] = math.ceil(reading / (time.perf_counter() - start))
    often = {name: functools.partial(run_often, run, counts[name]) for name, run in runs.items()}
    return {
        name: Reading(*(np.quantile(seconds, (0.5, 0.25, 0.75)) / counts[name]).tolist())
        for name, seconds in interleaved_seconds(often, repeats=repeats).items()
    }


def copy_bandwidth(repeats: int, *, gigabytes: float = 2.0) -> float:
    """Return the bytes that a copy reads and writes in a second."""
    ones = jnp.ones(int(gigabytes * 2**29), jnp.bfloat16)
    copy = jax.jit(lambda array: array + 1)
    return 2 * ones.nbytes / median_seconds({"copy": lambda: copy(ones)}, repeats)["copy"].median


def kernel_milliseconds(program: Callable[..., Any], *operands: Any, repeats: int) -> float | None:
    """The median time of a program's kernels alone, as CUPTI reports it; None where it reports nothing."""
    try:
        run = profiler.measure(program)
        times = [milliseconds for _, milliseconds in (run(*operands) for _ in range(repeats)) if milliseconds]
    # There may be no CUPTI, or another profiler that has it already.
    except Exception as error:
        say(cupti=(str(error) or repr(error)).splitlines()[0][:100])
        return None
    return statistics.median(times) if len(times) == repeats else None


def roofline_seconds(operation: Operation, sizes: np.ndarray, dense_rate: float, bandwidth: float) -> float:
    """Return the least time that this GPU has been seen to need for as many operations or bytes.

    Args:
        operation: what is computed.
        sizes: the group sizes.
        dense_rate: the operations of a dense matmul in a second.
        bandwidth: the bytes that a copy moves in a second.

    >>> slow_memory = Operation("", {}, lambda sizes: 6e12, lambda sizes: 1e9, lambda *_: None)
    >>> roofline_seconds(slow_memory, np.array([1]), dense_rate=6e14, bandwidth=2e10)
    0.05
    """
    return max(operation.flops(sizes) / dense_rate, operation.bytes(sizes) / bandwidth)
