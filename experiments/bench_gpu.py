"""``python -m experiments.bench_gpu``: the Hopper kernels checked, then timed beside their peers, on one GPU.

Three products and the whole grouped MLP at the shapes of named models, over group sizes that real plans give one
rank, before (static) and after balancing (ReLibra), scaled to a mean of rows a group. A rate counts only rows that
exist. The roofline is the smaller of a dense matmul's rate and of what memory allows when every operand moves once,
both measured in the same run. Then the stragglers: the sum over micro-batches and layers of the slowest rank's
grouped MLP. Refuses to run without a Hopper GPU; kernels that were not installed or refuse a shape have no number.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

# PyTorch wants memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments import gpu_peers
from experiments.bench import interleaved
from experiments.traces import read_trace
from experiments.workload import Work, contenders
from pallas_kernels import grouped_dot, grouped_mlp, grouped_outer
from pallas_kernels.arrays import why_no_hopper
from pallas_kernels.hopper.tiles import MODELS, Shape
from relibra_jax.types import Topology

OURS, DENSE = "ours", "dense matmul"
CALLS = 8
"""Calls in flight for one reading, so that launching them hides behind them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchGpu:
    """Check and time the Hopper kernels."""

    trace: Annotated[Path | None, tyro.conf.Positional] = None
    """A trace (.npz); else the one that RELIBRA_TRACE names, else the recorded one of this project."""
    rows: tuple[int, ...] = (256, 1024, 2048)
    """Mean rows a group."""
    repeats: int = 30
    micro_batches: int = 4
    layers: int = 2


class Case(NamedTuple):
    """One table: an operation by all who can do it."""

    runs: dict[str, Callable[[], Any]]
    flops: float
    bytes: float
    """That have to move at least: every operand and result once."""


def scaled_sizes(quota: np.ndarray, mean: int) -> np.ndarray:
    """A rank's group sizes ``[S]`` in the same proportions, with the wanted mean; rows are rounded down.

    >>> scaled_sizes(np.array([1, 0, 3]), 100).tolist()
    [75, 0, 225]
    """
    return (quota * (mean * quota.size / max(quota.sum(), 1))).astype(np.int32)


def roofline_seconds(case: Case, dense_rate: float, bandwidth: float) -> float:
    """The least time that this GPU has been seen to need for as many operations or bytes.

    >>> roofline_seconds(Case({}, 6e12, 1e9), dense_rate=6e14, bandwidth=2e12)
    0.01
    """
    return max(case.flops / dense_rate, case.bytes / bandwidth)


def buffer_rows(sizes: np.ndarray) -> int:
    """Rows of a buffer that holds the groups: a multiple of 8, as a step's buffers are.

    >>> buffer_rows(np.array([5, 0, 6]))
    16
    """
    return -(-int(sizes.sum()) // 8) * 8


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Normal bfloat16 of the size of trained weights."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / np.sqrt(shape[-1])


def products(shape: Shape, sizes: np.ndarray, homes: int) -> Iterator[tuple[str, Case]]:
    """Forward, input gradient and weight gradient of the gate product."""
    rows, k, n, slots = int(sizes.sum()), shape.width, shape.expert_width, sizes.size
    room = buffer_rows(sizes)
    x, d_out, weights = array(room, k), array(room, n, seed=1), array(slots, k, n, seed=2)
    home, replica, group_sizes = weights[:homes], weights[homes:], jnp.asarray(sizes)
    used = int((sizes > 0).sum())
    dot = functools.partial(grouped_dot, implementation="mosaic")
    outer = functools.partial(grouped_outer, home_slots=homes, implementation="mosaic")
    calls: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[jax.Array, jax.Array], int]] = {
        "forward": (
            lambda x, _: dot(x, home, replica, group_sizes),
            lambda x, _: x @ weights[0],
            (x, d_out),
            used,
        ),
        "input gradient": (
            lambda _, dy: dot(dy, home, replica, group_sizes, transposed=True),
            lambda _, dy: dy @ weights[0].T,
            (x, d_out),
            used,
        ),
        "weight gradient": (
            lambda x, dy: outer(x, dy, group_sizes),
            lambda x, dy: x.T @ dy,
            (x, d_out),
            slots,
        ),
    }
    for name, (ours, dense, operands, matrices) in calls.items():
        runs: dict[str, Callable[[], Any]] = {OURS: functools.partial(jax.jit(ours), *operands)}
        runs[DENSE] = functools.partial(jax.jit(dense), *operands)
        runs |= gpu_peers.products(name, x, d_out, weights, group_sizes)
        yield name, Case(runs, 2.0 * rows * k * n, 2.0 * (rows * (k + n) + matrices * k * n))


def mlps(shape: Shape, sizes: np.ndarray, homes: int) -> Iterator[tuple[str, Case]]:
    """The grouped MLP, and the same as products one at a time: what fusing them is worth."""
    rows, k, n = int(sizes.sum()), shape.width, shape.expert_width
    room = buffer_rows(sizes)
    x, d_out, weights = array(room, k), array(room, k, seed=1), array(sizes.size, 3, k, n, seed=2)
    home, replica, group_sizes = weights[:homes], weights[homes:], jnp.asarray(sizes)
    scale = jnp.ones(room, jnp.float32)

    def fused(x, home, replica, scale):
        return grouped_mlp(x, home, replica, group_sizes, scale, implementation="mosaic")

    def unfused(x, home, replica, scale):
        dot = functools.partial(grouped_dot, group_sizes=group_sizes, implementation="mosaic")
        gate, up = (dot(x, home[:, part], replica[:, part]) for part in range(2))
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        return dot(hidden, home[:, 2], replica[:, 2], transposed=True) * scale[:, None].astype(x.dtype)

    def dense(x, home, replica, scale):
        gate, up, down = home[0]
        return ((jax.nn.silu(x @ gate) * (x @ up)) @ down.T) * scale[:, None].astype(x.dtype)

    operands = (x, home, replica, scale)
    calls = {OURS: fused, "products one at a time": unfused, DENSE: dense}
    matrices = 2.0 * 3 * int((sizes > 0).sum()) * k * n
    forward: dict[str, Callable[[], Any]]
    forward = {name: functools.partial(jax.jit(call), *operands) for name, call in calls.items()}
    yield "MLP forward", Case(forward, 6.0 * rows * k * n, 2.0 * 2 * rows * k + matrices)

    def gradients(call: Callable[..., Any]) -> Callable[[], Any]:
        def run(*operands):
            out, pull = jax.vjp(call, *operands)
            return out, *pull(d_out)

        return functools.partial(jax.jit(run), *operands)

    # What has to be computed: that ours computes gate and up again, 4 r k n, counts as time, not as work.
    both = {name: gradients(call) for name, call in calls.items()}
    yield "MLP with gradients", Case(both, 18.0 * rows * k * n, 2.0 * 5 * rows * k + 3 * matrices)


def check(cases: Mapping[str, Case]) -> None:
    """Ours against dense products of each group, before anything is timed.

    Raises:
        AssertionError: a result is off by more than bfloat16 explains.
    """
    for name, case in cases.items():
        for peer, run in case.runs.items():
            if peer in (gpu_peers.CHECK, "products one at a time"):
                for ours, theirs in zip(
                    jax.tree.leaves(case.runs[OURS]()), jax.tree.leaves(run()), strict=True
                ):
                    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
                    off = np.abs(ours.reshape(theirs.shape) - theirs).max() / np.abs(theirs).max()
                    assert off < 0.02, f"{name}: {off:.3f} of the largest entry off {peer}"


def seconds(runs: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Median seconds of one call, all taking turns."""
    flights = {name: (lambda run=run: [run() for _ in range(CALLS)]) for name, run in runs.items()}
    return {name: value / CALLS for name, value in interleaved(flights, repeats=repeats).items()}


def copy_bandwidth(repeats: int) -> float:
    """Bytes a second, read and written, of a copy of 2 GB."""
    ones = jnp.ones(2**30, jnp.bfloat16)
    copy = jax.jit(lambda array: array + 1)
    return 2 * ones.nbytes / seconds({"copy": lambda: copy(ones)}, repeats)["copy"]


def stragglers(works: Mapping[str, Work], topology: Topology, shape: Shape, repeats: int) -> dict[str, float]:
    """Sum over micro-batches and layers of the slowest rank's grouped MLP with gradients, by contender."""
    total = {}
    for name, work in works.items():
        quota = np.asarray(work.plan.quota).reshape(-1, topology.num_ranks, topology.slots)
        x = array(work.sizes.rows, shape.width)
        weights = array(topology.slots, 3, shape.width, shape.expert_width, seed=2)
        home, replica = weights[: topology.home_slots], weights[topology.home_slots :]

        @jax.jit
        def step(x, home, replica, sizes):
            def call(x, home, replica):
                return grouped_mlp(x, home, replica, sizes)

            out, pull = jax.vjp(call, x, home, replica)
            return pull(out)

        runs = {
            place: functools.partial(step, x, home, replica, jnp.asarray(quota[place]))
            for place in np.ndindex(quota.shape[:2])
        }
        slowest: dict[int, float] = {}
        for (row, _), value in seconds(runs, repeats).items():
            slowest[row] = max(slowest.get(row, 0.0), value)
        total[name] = sum(slowest.values())
    return total


def main(config: BenchGpu) -> int:
    """Print the tables; 1 where there is no Hopper GPU."""
    console = Console()
    kind = jax.devices()[0].device_kind
    if reason := why_no_hopper(kind):
        console.print(f"bench_gpu measures the Hopper kernels: {reason}. No number is printed.")
        return 1
    trace = read_trace(config.trace)
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=trace.num_experts, replica_slots=2)
    works = contenders(
        trace,
        topology,
        micro_batches=config.micro_batches,
        samples_per_rank=4,
        layers=config.layers,
    )
    bandwidth = copy_bandwidth(config.repeats)
    console.print(f"{kind}, jax {jax.__version__}, {trace.name}; a copy moves {bandwidth / 1e12:.2f} TB/s")
    for model, shape in MODELS.items():
        table = Table(title=model, title_justify="left")
        for column in ("rows a group", "operation", "by", "ms", "TFLOP/s", "of the roofline"):
            table.add_column(column)
        for mean in config.rows:
            for plan in ("static", "relibra"):
                sizes = scaled_sizes(np.asarray(works[plan].plan.quota)[0, 0, 0, 0], mean)
                homes = topology.home_slots
                cases = dict([*products(shape, sizes, homes), *mlps(shape, sizes, homes)])
                check(cases)
                for operation, case in cases.items():
                    times = seconds(case.runs, config.repeats)
                    times |= gpu_peers.torch_seconds(operation, shape, sizes, config.repeats)
                    best = roofline_seconds(case, case.flops / times[DENSE], bandwidth)
                    for name, value in times.items():
                        cells = (
                            f"{value * 1e3:.3f}",
                            f"{case.flops / value / 1e12:.0f}",
                            f"{best / value:.0%}",
                        )
                        table.add_row(f"{mean}, {plan}", operation, name, *cells)
        console.print(table)
        total = stragglers(works, topology, shape, config.repeats)
        console.print(
            "slowest ranks, ms:", ", ".join(f"{name} {value * 1e3:.2f}" for name, value in total.items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(BenchGpu, description=__doc__)))
