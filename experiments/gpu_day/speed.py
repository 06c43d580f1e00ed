"""Measured throughput of the grouped products and the MLP, compared with baselines and a roofline in the same run.

The groups are those of one rank of a real plan, before (static) and after balancing (ReLibra), scaled to a mean number
of rows. Rates do not count padding. The roofline is the smaller of two rates measured in the same process: that of a
dense matmul, and the rate that memory bandwidth allows if every operand is moved once. Every operation is checked
before it is timed.
"""

import functools
import os
from collections.abc import Mapping
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day import baselines
from experiments.gpu_day.group_sizes import buffer_rows, planned_sizes
from experiments.gpu_day.operations import (
    DENSE,
    OWN_KERNELS,
    Operands,
    Operation,
    mlps,
    operand_sets,
    products,
)
from experiments.gpu_day.plan import plan_topology, read_quotas
from experiments.gpu_day.timing import (
    Program,
    Reading,
    compile_all,
    copy_bandwidth,
    kernel_milliseconds,
    median_seconds,
    roofline_seconds,
)
from experiments.ladder.facts import print_facts
from pallas_kernels.compare import check_close
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, ModelShape
from pallas_kernels.hopper.tile_table import VARIABLE

REPEATS: Final = 9
"""The number of readings of each run."""
REHEARSAL_SHAPE: Final = ModelShape(64, 128, 32, 2)
"""The shape that replaces the shape of any model in a rehearsal."""


def measure_model(
    model: str,
    mean: int,
    what: str,
    folder: str,
    implementation: str,
    table: str | None = None,
    *,
    rehearsal: bool = False,
) -> None:
    """Measure every operation at the shape of a model, and print each result immediately.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        mean: the mean number of rows of a group.
        what: the measured operations, ``products`` or ``MLPs``.
        folder: the folder with the plan of `experiments.gpu_day.plan.make_plan`.
        implementation: the implementation of `pallas_kernels` to measure.
        table: the path of a table of tile sizes, with which only the dense baseline is measured. None measures the
            sizes that the heuristic chooses, and all baselines.
        rehearsal: whether to measure blocked XLA once at small sizes.

    Raises:
        ValueError: if a result is wrong.
    """
    shape, repeats = MODELS[model], REPEATS
    if rehearsal:
        shape, mean, implementation, repeats = REHEARSAL_SHAPE, 16, "xla", 1
    if table is not None and not rehearsal:
        os.environ[VARIABLE] = table
    shortest = 1e-4 if rehearsal else 0.02
    quotas = read_quotas(folder)
    homes = shape.experts // RANKS
    topology = plan_topology(_experts(quotas["static"].shape))
    sizes_by_plan = planned_sizes(quotas, topology, homes, mean)
    rows = buffer_rows(list(sizes_by_plan.values()))
    bandwidth = copy_bandwidth(repeats, gigabytes=0.01 if rehearsal else 2.0)
    print_facts(bandwidth=bandwidth)
    matrix, dense_rates = (shape.width, shape.expert_width), dict[str, float]()
    operations = list(products(shape, implementation))
    if what == "MLPs":
        # A dense product of the same rows gives the rate of the roofline.
        forward = operations[0]._replace(calls={DENSE: operations[0].calls[DENSE]})
        operations = [forward, *mlps(shape, implementation)]
        sets = operand_sets((3, *matrix), rows, homes, shape.width)
    else:
        sets = operand_sets(matrix, rows, homes, shape.expert_width)
    for operation in operations:
        if table is not None:
            calls = {name: call for name, call in operation.calls.items() if name in (OWN_KERNELS, DENSE)}
            operation = operation._replace(calls=calls)
        programs = compile_all(operation, sets, jnp.asarray(sizes_by_plan["static"]))
        reference = jax.jit(operation.reference)
        for plan, sizes in sizes_by_plan.items():
            device_sizes, kernels = jnp.asarray(sizes), None
            if run_kernels := programs.get(OWN_KERNELS):
                result, *_ = run_kernels(sets, device_sizes)
                check_close(f"{operation.name}, {plan}", result, reference(sets[0], device_sizes))
                kernels = kernel_milliseconds(run_kernels, sets, device_sizes, repeats=repeats)
            seconds = _seconds(operation, programs, sets, sizes, repeats=repeats, shortest=shortest)
            if operation.name in baselines.PRODUCTS:
                dense_rates[plan] = operation.flops(sizes) / seconds[DENSE].median
            best = roofline_seconds(operation, sizes, dense_rates[plan], bandwidth)
            for name, measurement in seconds.items():
                own = {"kernel_ms": kernels / len(sets)} if kernels and name == OWN_KERNELS else {}
                print_facts(
                    operation=operation.name,
                    plan=plan,
                    by=name,
                    milliseconds=measurement.median * 1e3,
                    quartiles=[measurement.low * 1e3, measurement.high * 1e3],
                    teraflops=operation.flops(sizes) / measurement.median / 1e12,
                    of_roofline=best / measurement.median,
                    **own,
                )


def _seconds(
    operation: Operation,
    programs: Mapping[str, Program],
    sets: list[Operands],
    sizes: np.ndarray,
    *,
    repeats: int,
    shortest: float,
) -> dict[str, Reading]:
    """Measure all versions of an operation, and PyTorch's beside other baselines, for one set of operands."""
    device_sizes = jnp.asarray(sizes)
    runs = {name: functools.partial(program, sets, device_sizes) for name, program in programs.items()}
    seconds = {
        name: Reading(*(value / len(sets) for value in measurement))
        for name, measurement in median_seconds(runs, repeats, shortest=shortest).items()
    }
    others = programs.keys() - {OWN_KERNELS, DENSE}
    if others and (product := next((name for name in baselines.PRODUCTS if name == operation.name), None)):
        k, n = sets[0].dense[0].shape
        torch_times = baselines.torch_seconds(product, (k, n), sizes, sets=len(sets), repeats=repeats)
        seconds |= {name: Reading(time, time, time) for name, time in torch_times.items()}
    return seconds


def _experts(shape: tuple[int, ...]) -> int:
    """Return the number of experts of a group from the shape of its quotas, with two replica slots per rank."""
    *_, nodes, local, slots = shape
    return nodes * local * (slots - 2)
