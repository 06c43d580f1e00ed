"""What a rank of the miniature computes, reads and exchanges in a second, measured with the functions that a layer runs.

The seconds of an exchange are those of its start and of its bytes: a straight line through a small and a large one.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.interleaving import interleaved, interleaved_seconds
from pallas_kernels import grouped_mlp
from pallas_kernels.group_loops import TILE_ROWS
from relibra_jax.contract.types import Topology
from relibra_jax.cost.hardware import Cluster
from relibra_jax.execution.mesh import RANKS, expert_mesh

PASSES: Final = 3
"""A forward pass, and a backward pass that costs two."""
FLOAT: Final = 4
"""The bytes of a number; all arrays are float32."""
SMALL, LARGE = 1 << 14, 1 << 18
"""The bytes that a rank sends to each other in the two exchanges."""


class Rates(NamedTuple):
    """The measured rates of one rank, of the slowest one where they differ."""

    flops: float
    """FLOP/s of the experts' products, forward and backward."""
    memory: float
    """Bytes/s of reading rows in any order and writing them."""
    slow: float
    """Bytes/s that a rank sends between nodes, and at the same time receives."""
    fast: float
    """The same inside nodes."""
    slow_start: float
    """The seconds of an exchange between nodes of nothing."""
    fast_start: float
    """The same inside nodes."""


def core_rates(*, width: int, hidden: int, experts: int, rows: int, repeats: int) -> tuple[float, float]:
    """Measure the experts of one rank, and the gather of their rows.

    Args:
        width: the model width D.
        hidden: the expert width F.
        experts: the number of experts of a rank.
        rows: the rows of each expert.
        repeats: the number of timed rounds.

    Returns:
        FLOP/s of the experts, and bytes/s of a gather, which reads and writes every row.
    """
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.normal(size=(experts * rows, width)), jnp.float32)
    weights = jnp.asarray(draw.normal(size=(experts, 3, width, hidden)) / np.sqrt(width), jnp.float32)
    sizes = jnp.full(experts, rows, jnp.int32)
    order = jnp.asarray(draw.permutation(len(tokens)), jnp.int32)

    def loss(tokens, weights):
        return grouped_mlp(tokens, (weights,), sizes, jnp.ones(len(tokens))).sum()

    runs: dict[str, Callable[[], Any]] = {
        "mlp": functools.partial(jax.jit(jax.grad(loss, argnums=(0, 1))), tokens, weights),
        "gather": functools.partial(jax.jit(lambda tokens, order: tokens[order]), tokens, order),
    }
    seconds = interleaved(runs, repeats=repeats)
    return (
        PASSES * 2 * 3 * width * hidden * len(tokens) / seconds["mlp"],
        2 * FLOAT * tokens.size / seconds["gather"],
    )


def exchange_rates(mesh: Mesh, axis: str, *, repeats: int) -> tuple[float, float]:
    """Measure an all-to-all over one axis of the mesh, which every line of ranks runs at the same time.

    Args:
        mesh: the mesh of nodes and their ranks.
        axis: ``node`` or ``local``.
        repeats: the number of timed rounds.

    Returns:
        Bytes/s that a rank sends to others, and the seconds of an exchange of nothing. 0 bytes/s for a single rank.
    """
    ends = mesh.shape[axis]
    if ends == 1:
        return 0.0, 0.0

    def exchange_of(size: int) -> Callable[[], Any]:
        spec = PartitionSpec(RANKS)
        shape = (mesh.size * ends, size // FLOAT)
        data = jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda at: np.zeros((ends, shape[1]), np.float32)
        )

        def on_rank(data):
            return jax.lax.all_to_all(data, axis, 0, 0, tiled=True)

        run = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))
        return functools.partial(run, data)

    # The mean, not the median: gloo sends both ways of an exchange at the same time, or one after the other.
    readings = interleaved_seconds({size: exchange_of(size) for size in (SMALL, LARGE)}, repeats=repeats)
    seconds = {size: float(np.mean(values)) for size, values in readings.items()}
    per_byte = (seconds[LARGE] - seconds[SMALL]) / ((ends - 1) * (LARGE - SMALL))
    return 1 / per_byte, max(seconds[SMALL] - (ends - 1) * SMALL * per_byte, 0.0)


def measure(topology: Topology, *, width: int, hidden: int, rows: int, repeats: int) -> Rates:
    """Measure the rates of all ranks at the same time. Every rank's process must call it.

    Args:
        topology: the grid of ranks, and the number of experts.
        width: the model width D.
        hidden: the expert width F.
        rows: the token copies of an expert in a micro-batch.
        repeats: the number of timed rounds.

    Returns:
        The rates, equal on all ranks: those of the slowest.
    """
    mesh = expert_mesh(topology)
    core = core_rates(width=width, hidden=hidden, experts=topology.home_slots, rows=rows, repeats=repeats)
    slow, fast = (exchange_rates(mesh, axis, repeats=repeats) for axis in ("node", "local"))
    own = np.asarray([*core, slow[0], fast[0], slow[1], fast[1]], np.float32)
    of_ranks = multihost_utils.process_allgather(own).reshape(-1, own.size)
    slowest = [*of_ranks[:, :4].min(0), *of_ranks[:, 4:].max(0)]
    return Rates(*(float(rate) for rate in slowest))


def cluster_of(rates: Rates, memory: float) -> Cluster:
    """Return a rank of the miniature for the cost model. A network that has no second rank is as fast as the other."""
    slow, fast = rates.slow or rates.fast, rates.fast or rates.slow
    return Cluster(
        matmul_flops=rates.flops,
        fast_bandwidth=fast,
        slow_bandwidth=slow,
        memory=memory,
        memory_bandwidth=rates.memory,
        matmul_efficiency=1.0,
        network_efficiency=1.0,
        memory_efficiency=1.0,
        tile=TILE_ROWS[-1],
    )
