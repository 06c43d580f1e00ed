"""How fast is it: grouped products and the MLP beside their peers, and beside the roofline of the same run.

The groups are those of a rank of a real plan, before (static) and after balancing (ReLibra), scaled to a mean of rows.
A rate counts only rows that exist. The roofline is the smaller of a dense matmul's rate and of what memory allows when
every operand moves once, both measured in the same process. Every operation is checked before it is timed.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp

from experiments.gpu_day import peers
from experiments.gpu_day.facts import say
from experiments.gpu_day.group_sizes import buffer_rows, planned_sizes
from experiments.gpu_day.operations import DENSE, OURS, mlps, operand_sets, products
from experiments.gpu_day.plan import plan_topology, read_quotas
from experiments.gpu_day.timing import (
    Reading,
    compile_all,
    copy_bandwidth,
    kernel_milliseconds,
    median_seconds,
    roofline_seconds,
)
from pallas_kernels.compare import check_close
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, ModelShape

REPEATS: Final = 9
"""Readings of each run."""
REHEARSED: Final = ModelShape(64, 128, 32, 2)
"""The shape that takes the place of any model's in a rehearsal."""


def measure_model(model: str, mean: int, folder: str, implementation: str, *, rehearsal: bool) -> None:
    """Measure every operation at a model's shape, and say each result as soon as it is there.

    Args:
        model: a name of `pallas_kernels.hopper.tile_sizes.MODELS`.
        mean: the mean rows of a group.
        folder: where `experiments.gpu_day.plan.make_plan` has left its plan.
        implementation: the implementation of `pallas_kernels` that is measured.
        rehearsal: whether small sizes and one reading on blocked XLA are enough.

    Raises:
        ValueError: if a result is off.
    """
    shape, repeats = MODELS[model], REPEATS
    if rehearsal:
        shape, mean, implementation, repeats = REHEARSED, 16, "xla", 1
    reading = 1e-4 if rehearsal else 0.02
    quotas = read_quotas(folder)
    homes = shape.experts // RANKS
    topology = plan_topology(_experts(quotas["static"].shape))
    sizes_by_plan = planned_sizes(quotas, topology, homes, mean)
    rows = buffer_rows(list(sizes_by_plan.values()))
    bandwidth = copy_bandwidth(repeats, gigabytes=0.01 if rehearsal else 2.0)
    say(bandwidth=bandwidth)
    matrix, dense_rates = (shape.width, shape.expert_width), {}
    for operations, weights, columns in (
        (products(shape, implementation), matrix, shape.expert_width),
        (mlps(shape, implementation), (3, *matrix), shape.width),
    ):
        sets = operand_sets(weights, rows, homes, columns)
        for operation in operations:
            programs = compile_all(operation, sets, jnp.asarray(sizes_by_plan["static"]))
            reference = jax.jit(operation.reference)
            for plan, sizes in sizes_by_plan.items():
                there = jnp.asarray(sizes)
                runs = {name: functools.partial(program, sets, there) for name, program in programs.items()}
                found, wanted = runs[OURS]()[0], reference(sets[0], there)
                check_close(f"{operation.name}, {plan}", found, wanted)
                seconds = {
                    name: Reading(*(value / len(sets) for value in one))
                    for name, one in median_seconds(runs, repeats, reading=reading).items()
                }
                if product := next((name for name in peers.PRODUCTS if name == operation.name), None):
                    dense_rates[plan] = operation.flops(sizes) / seconds[DENSE].median
                    of_torch = peers.torch_seconds(product, matrix, sizes, sets=len(sets), repeats=repeats)
                    seconds |= {name: Reading(one, one, one) for name, one in of_torch.items()}
                best = roofline_seconds(operation, sizes, dense_rates[plan], bandwidth)
                kernels = kernel_milliseconds(programs[OURS], sets, there, repeats=repeats)
                for name, one in seconds.items():
                    own = {} if name != OURS or kernels is None else {"kernel_ms": kernels / len(sets)}
                    say(
                        operation=operation.name,
                        plan=plan,
                        by=name,
                        milliseconds=one.median * 1e3,
                        quartiles=[one.low * 1e3, one.high * 1e3],
                        teraflops=operation.flops(sizes) / one.median / 1e12,
                        of_roofline=best / one.median,
                        **own,
                    )


def _experts(shape: tuple[int, ...]) -> int:
    """The experts of the group whose quotas have this shape, two slots of each rank being for replicas."""
    *_, nodes, local, slots = shape
    return nodes * local * (slots - 2)
