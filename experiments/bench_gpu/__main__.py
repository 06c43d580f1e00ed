"""``python -m experiments.bench_gpu``: the Hopper kernels checked, then timed beside their peers, on one GPU.

Three products and the whole grouped MLP at the shapes of named models, over group sizes of real plans, before (static)
and after balancing (ReLibra): those of one rank, the one that is given most copies, in as many micro-batches and layers
as fill the model's slots on one rank of eight, scaled to a mean of rows a group. A rate counts only rows that exist.
The roofline is the smaller of a dense matmul's rate and of what memory allows when every operand moves once, both
measured in the same run. Then the stragglers: the sum over micro-batches and layers of the slowest rank's grouped MLP.

An operation's programs compile side by side before any of them runs; its lines are printed, and recorded, as soon as
they are there. This needs a Hopper GPU and an environment that sees it (``pip install -e ".[cuda,dev]"``); kernels that
were not installed or refuse a shape have no number.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# PyTorch wants memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench_gpu import peers
from experiments.bench_gpu.checks import PATTERNS, assert_close, check_patterns
from experiments.bench_gpu.group_sizes import buffer_rows, planned_sizes
from experiments.bench_gpu.operations import DENSE, OURS, Operands, Operation, mlps, operand_sets, products
from experiments.bench_gpu.timing import (
    compile_all,
    copy_bandwidth,
    median_seconds,
    roofline_seconds,
    straggler_seconds,
)
from experiments.contenders import ContenderBatch, contenders
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, REPLICAS
from pallas_kernels.implementation import why_not_hopper
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.parsing import run_program
from relibra_jax.traces.read import read_trace
from relibra_jax.types import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchGpu:
    """Check and time the Hopper kernels."""

    trace: TraceName = None
    """The trace to plan, by name or path (.npz); else the one that RELIBRA_TRACE gives, else this project's own."""
    models: tuple[str, ...] = tuple(MODELS)
    """The models whose shapes are measured: names in `pallas_kernels.hopper.tile_sizes.MODELS`."""
    rows: tuple[int, ...] = (256, 1024, 2048)
    """The mean rows of a group."""
    repeats: int = 15
    """The number of readings of each run; the median counts."""
    micro_batches: int = 4
    """The number of the trace's micro-batches that are planned."""
    layers: int = 2
    """The number of the trace's layers that are planned."""
    record: Path | None = None
    """A text file to which everything that is printed is added."""

    def __post_init__(self) -> None:
        for name in ("repeats", "micro_batches", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.rows or min(self.rows) < 1:
            raise ValueError(f"rows={self.rows} must be numbers of at least 1")
        if not self.models:
            raise ValueError(f"models: name some of {', '.join(MODELS)}")
        if unknown := set(self.models) - set(MODELS):
            raise ValueError(f"models: {', '.join(sorted(unknown))} not among {', '.join(MODELS)}")


def measure_operation(
    operation: Operation,
    sets: list[Operands],
    sizes_by_plan: Mapping[str, np.ndarray],
    dense_rates: dict[str, float],
    bandwidth: float,
    repeats: int,
    console: Console,
) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a table: one operation, checked and timed with each plan's group sizes.

    Args:
        operation: what is measured.
        sets: the sets of operands that programs work on in turn.
        sizes_by_plan: the group sizes of each plan.
        dense_rates: the rate of a dense matmul with each plan's rows; products write it, MLPs read it.
        bandwidth: the bytes that a copy moves in a second.
        repeats: the number of readings of each run.
        console: where peers that refuse are named.
    """
    programs = compile_all(operation, sets, jnp.asarray(next(iter(sizes_by_plan.values()))), console)
    reference = jax.jit(operation.reference)
    for plan_name, sizes in sizes_by_plan.items():
        on_device = jnp.asarray(sizes)
        runs = {name: functools.partial(program, sets, on_device) for name, program in programs.items()}
        assert_close(f"{operation.name}, {plan_name}", runs[OURS]()[0], reference(sets[0], on_device))
        times = {name: value / len(sets) for name, value in median_seconds(runs, repeats).items()}
        if product := next((name for name in peers.PRODUCTS if name == operation.name), None):
            dense_rates[plan_name] = operation.flops(sizes) / times[DENSE]
            k, n = sets[0].weights[0].shape[-2:]
            times |= peers.torch_seconds(product, (k, n), sizes, sets=len(sets), repeats=repeats)
        best = roofline_seconds(operation, sizes, dense_rates[plan_name], bandwidth)
        for name, value in times.items():
            rate = f"{operation.flops(sizes) / value / 1e12:.0f}"
            yield plan_name, name, f"{value * 1e3:.3f}", rate, f"{best / value:.0%}"


def measure_model(
    model: str,
    contenders: Mapping[str, ContenderBatch],
    topology: Topology,
    bandwidth: float,
    implementation: str,
    config: BenchGpu,
    console: Console,
) -> Iterator[None]:
    """Print a model's tables, and yield after each.

    Args:
        model: the name of the model.
        contenders: the batch as each contender runs it, by the contender's name.
        topology: the topology that the plans were made for.
        bandwidth: the bytes that a copy moves in a second.
        implementation: the implementation of `pallas_kernels` that is measured.
        config: the command's options.
        console: where tables are printed.
    """
    shape = MODELS[model]
    homes, matrix = shape.experts // RANKS, (shape.width, shape.expert_width)
    quotas = {name: contender.batch_plan.plan.quota for name, contender in contenders.items()}
    for mean in config.rows:
        sizes_by_plan = planned_sizes(quotas, topology, homes, mean)
        rows = buffer_rows(list(sizes_by_plan.values()))
        dense_rates: dict[str, float] = {}
        for operations, weight_shape, columns in (
            (products(shape, implementation), matrix, shape.expert_width),
            (mlps(shape, implementation), (3, *matrix), shape.width),
        ):
            sets = operand_sets(weight_shape, rows, homes, columns)
            for operation in operations:
                console.print(f"{model}, {homes}+{REPLICAS} slots, {mean} rows a group: {operation.name}")
                table = Table("plan", "by", "ms", "TFLOP/s", "of the roofline")
                for line in measure_operation(
                    operation, sets, sizes_by_plan, dense_rates, bandwidth, config.repeats, console
                ):
                    table.add_row(*line)
                console.print(table)
                yield


def versions() -> str:
    """Return the date, the device, and the versions of the packages that are measured."""
    parts = [f"{datetime.date.today().isoformat()}: {jax.devices()[0].device_kind}"]
    for package in ("jax", "jaxlib", "tokamax", "torch"):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)


def main(config: BenchGpu, *, implementation: str = "mosaic") -> int:
    """Check the kernels, then print the tables; return 1 if there is no Hopper GPU.

    Args:
        config: the command's options.
        implementation: the implementation of `pallas_kernels` that is measured.
    """
    console = Console(record=config.record is not None, width=None if sys.stdout.isatty() else 120)

    def keep() -> None:
        if config.record:
            config.record.parent.mkdir(parents=True, exist_ok=True)
            with config.record.open("a") as file:
                file.write(console.export_text())

    if reason := why_not_hopper(jax.devices()[0].device_kind):
        console.print(f"bench_gpu measures the Hopper kernels: {reason}. No number is printed.")
        return 1
    trace = read_trace(config.trace)
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=trace.num_experts, replica_slots=REPLICAS)
    by_name = contenders(
        trace, topology, micro_batches=config.micro_batches, samples_per_rank=4, layers=config.layers
    )
    compared = sum(check_patterns(*size, implementation) for size in PATTERNS)
    console.print(
        f"{compared} patterns of group sizes: results and gradients agree with the XLA implementation's"
    )
    bandwidth = copy_bandwidth(config.repeats)
    console.print(f"{versions()}; {trace.name}; a copy moves {bandwidth / 1e12:.2f} TB/s")
    keep()
    for model in config.models:
        for _ in measure_model(model, by_name, topology, bandwidth, implementation, config, console):
            keep()
        total = straggler_seconds(by_name, topology, MODELS[model], implementation, config.repeats)
        times = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in total.items())
        console.print(f"{model}, slowest ranks, ms: {times}")
        keep()
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, BenchGpu, prog="python -m experiments.bench_gpu", description=__doc__))
