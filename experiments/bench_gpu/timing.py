"""How long things take: programs that are compiled side by side, readings that take turns, and the roofline.

A program calls an operation on sets of operands in turn, so that none is found in a cache, and readings are long
enough to hide how programs are started.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.bench import interleaved
from experiments.bench_gpu.operations import DENSE, OURS, Call, Operands, Operation, random_array
from experiments.contenders import ContenderBatch
from pallas_kernels import grouped_mlp
from pallas_kernels.hopper.tile_sizes import ModelShape
from relibra_jax.types import Topology

type Program = Callable[[list[Operands], jax.Array], list[Any]]
"""A compiled function ``(sets of operands, group sizes) -> results``."""


def compile_all(
    operation: Operation, sets: list[Operands], sizes: jax.Array, console: Console
) -> dict[str, Program]:
    """Compile a program for everyone who can do an operation, and run each once.

    Args:
        operation: what is computed.
        sets: the sets of operands that a program works on in turn.
        sizes: the group sizes of the run.
        console: where peers that refuse are named.

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
            console.print(f"{name}, {operation.name}: {reason}", markup=False)
        else:
            programs[name] = program
    return programs


def median_seconds(
    runs: Mapping[Any, Callable[[], Any]], repeats: int, *, reading: float = 0.02
) -> dict[Any, float]:
    """Return the median seconds of each run.

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
    readings = {name: functools.partial(run_often, run, counts[name]) for name, run in runs.items()}
    return {name: value / counts[name] for name, value in interleaved(readings, repeats=repeats).items()}


def copy_bandwidth(repeats: int) -> float:
    """Return the bytes that a copy of 2 GB reads and writes in a second."""
    ones = jnp.ones(2**30, jnp.bfloat16)
    copy = jax.jit(lambda array: array + 1)
    return 2 * ones.nbytes / median_seconds({"copy": lambda: copy(ones)}, repeats)["copy"]


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


def straggler_seconds(
    contenders: Mapping[str, ContenderBatch],
    topology: Topology,
    shape: ModelShape,
    implementation: str,
    repeats: int,
) -> dict[str, float]:
    """Return the time of the slowest ranks' grouped MLPs with gradients, summed over micro-batches and layers.

    Args:
        contenders: the batch as each contender runs it, by the contender's name.
        topology: the topology that the plans were made for.
        shape: the sizes of a model's experts.
        implementation: the implementation of `pallas_kernels` that is measured.
        repeats: the number of readings of each rank's MLP; the median counts.

    Returns:
        The seconds by the contender's name.
    """
    total = {}
    for name, contender in contenders.items():
        quota = np.asarray(contender.batch_plan.plan.quota).reshape(-1, topology.num_ranks, topology.slots)
        x = random_array(contender.capacities.rows, shape.width)
        weights = random_array(topology.slots, 3, shape.width, shape.expert_width, seed=2)
        buffers = weights[: topology.home_slots], weights[topology.home_slots :]

        @jax.jit
        def step(x, buffers, sizes):
            def call(x, buffers):
                return grouped_mlp(x, buffers, sizes, implementation=implementation)

            out, pull = jax.vjp(call, x, buffers)
            return pull(out)

        runs = {
            place: functools.partial(step, x, buffers, jnp.asarray(quota[place]))
            for place in np.ndindex(quota.shape[:2])
        }
        slowest: dict[int, float] = {}
        for (layer, _), value in median_seconds(runs, repeats, reading=0.004).items():
            slowest[layer] = max(slowest.get(layer, 0.0), value)
        total[name] = sum(slowest.values())
    return total
