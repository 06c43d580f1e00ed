"""What a rank of the miniature computes, reads and sends in a second, measured with the functions that a layer runs."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.interleaving import alternating, interleaved
from experiments.miniature.policy import FLOAT, Attention, Block, Sizes, own_experts
from pallas_kernels import grouped_mlp
from pallas_kernels.group_loops import TILE_ROWS
from relibra_jax.contract.types import Topology
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.execution.mesh import RANKS, expert_mesh
from relibra_jax.nnx.batch_sequences import SequencePacking
from relibra_jax.nnx.variables import ExpertParam

PASSES: Final = 3
"""A forward pass, and a backward pass that costs two."""
SMALL, LARGE = 1 << 14, 1 << 22
"""The bytes that a rank sends to each other in the two exchanges. The large one is at least as large as those of a
layer, and takes much longer than ranks wait for each other."""
LATEST: Final = 0.05
"""The most seconds by which a rank arrives late."""
LENGTHS: Final = (64, 448)
"""The lengths of the samples with which attention is measured."""
READING: Final = 0.2
"""The seconds of a reading of computation, many periods of the quota."""
BETWEEN, MEETINGS, SIDE = 0.02, 20, 128
"""The seconds of computation between two exchanges, their number, and the sides of the matrices."""
PER_SECOND: Final = ("flops", "memory", "slow", "fast")
"""The fields of `Rates` that are larger on faster ranks."""


class Rates(NamedTuple):
    """The measured rates of one rank, of the slowest one where they differ."""

    flops: float
    """FLOP/s of the experts' products, forward and backward."""
    memory: float
    """Bytes/s of reading rows in any order and writing them."""
    token: float
    """Seconds of one token outside the experts and in one layer, forward and backward, without its attention."""
    pair: float
    """Seconds of attention of one token to one token of its sample, likewise; a sample has the square of its length."""
    slow: float
    """Bytes/s that a rank sends between nodes, and at the same time receives."""
    fast: float
    """The same inside nodes."""
    meet: float
    """Seconds of an exchange besides its bytes, between ranks that compute: quotas pause them at different times."""
    sums: float
    """Seconds of the sum of one layer's dense gradients over all ranks."""

    def cluster(self, memory: float) -> Cluster:
        """Return a rank of the miniature for the cost model, with a number of bytes of memory.

        A network that connects nothing is as fast as the other.
        """
        return Cluster(
            matmul_flops=self.flops,
            fast_bandwidth=self.fast or self.slow,
            slow_bandwidth=self.slow or self.fast,
            memory=memory,
            memory_bandwidth=self.memory,
            matmul_efficiency=1.0,
            network_efficiency=1.0,
            memory_efficiency=1.0,
            tile=TILE_ROWS[-1],
            wait_seconds=self.meet,
        )

    def model(self, sizes: Sizes, num_experts: int) -> Model:
        """Return the sizes of a model for the cost model, whose attention takes the measured time."""
        return Model(
            moe_layers=sizes.layers,
            num_experts=num_experts,
            top_k=sizes.top_k,
            width=sizes.width,
            expert_width=sizes.expert_width,
            shared_width=0,
            attention_params=round(self.token * self.flops / PASSES / 2),
            attention_width=round(self.pair * self.flops / PASSES),
            cache_width=2 * sizes.width,
            cache_heads=1,
        )


def attention_rates(sizes: Sizes, *, tokens: int, repeats: int) -> tuple[float, float]:
    """Measure attention on samples of two lengths.

    Args:
        sizes: the sizes of the model.
        tokens: the number of tokens of a rank.
        repeats: the number of timed rounds.

    Returns:
        The seconds of a token and of a pair of tokens (`Rates`).
    """
    mesh = jax.make_mesh((1, 1), RANKS, devices=jax.local_devices(), axis_types=(AxisType.Auto,) * 2)
    attention = Attention(sizes, nnx.Rngs(0))
    x = jnp.ones((1, tokens, sizes.width))

    @nnx.jit
    def gradients(attention, x, packing):
        return nnx.grad(lambda attention, x: attention(x, packing, mesh).sum(), argnums=(0, 1))(attention, x)

    def packing(length: int) -> SequencePacking:
        index = np.arange(tokens)[None]
        return SequencePacking(index // length, index % length)

    runs = {length: functools.partial(gradients, attention, x, packing(length)) for length in LENGTHS}
    seconds = interleaved(runs, repeats=repeats, shortest=READING)
    short, long = LENGTHS
    pair = max(seconds[long] - seconds[short], 0.0) / tokens / (long - short)
    return max(seconds[short] / tokens - pair * short, 0.0), pair


def core_rates(sizes: Sizes, *, experts: int, rows: int, repeats: int) -> tuple[float, float]:
    """Measure the experts of one rank, and the gather of their rows.

    Args:
        sizes: the sizes of the model.
        experts: the number of experts of a rank.
        rows: the rows of each expert.
        repeats: the number of timed rounds.

    Returns:
        FLOP/s of the experts, and bytes/s of a gather, which reads and writes every row.
    """
    draw, width, hidden = np.random.default_rng(0), sizes.width, sizes.expert_width
    tokens = jnp.asarray(draw.normal(size=(experts * rows, width)), jnp.float32)
    weights = jnp.asarray(draw.normal(size=(experts, 3, width, hidden)) / np.sqrt(width), jnp.float32)
    group_sizes = jnp.full(experts, rows, jnp.int32)
    order = jnp.asarray(draw.permutation(len(tokens)), jnp.int32)

    def loss(tokens, weights):
        return grouped_mlp(tokens, (weights,), group_sizes, jnp.ones(len(tokens))).sum()

    runs: dict[str, Callable[[], Any]] = {
        "mlp": functools.partial(jax.jit(jax.grad(loss, argnums=(0, 1))), tokens, weights),
        "gather": functools.partial(jax.jit(lambda tokens, order: tokens[order]), tokens, order),
    }
    seconds = interleaved(runs, repeats=repeats, shortest=READING)
    return (
        PASSES * 2 * 3 * width * hidden * len(tokens) / seconds["mlp"],
        2 * FLOAT * tokens.size / seconds["gather"],
    )


def link_rate(mesh: Mesh, axis: str, *, repeats: int) -> float:
    """Measure an all-to-all over one axis of the mesh, which every line of ranks runs at the same time.

    Ranks arrive at different times, as in a step. The mean counts and not the median: gloo sends both ways of a
    connection at the same time or one after the other, as ranks arrive.

    Args:
        mesh: the mesh of nodes and their ranks.
        axis: ``node`` or ``local``.
        repeats: the number of timed rounds.

    Returns:
        Bytes/s that a rank sends to others; 0 for a single rank.
    """
    ends = mesh.shape[axis]
    if ends == 1:
        return 0.0

    def exchange(data):
        return jax.lax.all_to_all(data, axis, 0, 0, tiled=True)

    runs = {size: _on_ranks(mesh, exchange, [(ends, size // FLOAT)]) for size in (SMALL, LARGE)}
    seconds = _means(runs, repeats)
    return (ends - 1) * (LARGE - SMALL) / (seconds[LARGE] - seconds[SMALL])


def meeting_seconds(mesh: Mesh, flops: float, *, repeats: int) -> float:
    """Measure an exchange of hardly any bytes between ranks that compute.

    Args:
        mesh: the mesh of nodes and their ranks.
        flops: FLOP/s of a rank.
        repeats: the number of timed rounds.
    """
    products = max(round(BETWEEN * flops / (2 * SIDE**3)), 1)

    def of(meet: bool) -> Callable[[], float]:
        def on_rank(values, data):
            def step(carry, _):
                values, data = carry
                values = jax.lax.fori_loop(0, products, lambda _, values: values @ values, values)
                if meet:
                    # The sum of the two makes the next products wait for the exchange.
                    data = jax.lax.all_to_all(data + values[0, 0], RANKS, 0, 0, tiled=True)
                    values = values + data[0, 0]
                return (values, data), None

            return jax.lax.scan(step, (values, data), length=MEETINGS)[0]

        return _on_ranks(mesh, on_rank, [(SIDE, SIDE), (mesh.size, 1)])

    seconds = _means({meet: of(meet) for meet in (False, True)}, repeats)
    return max(seconds[True] - seconds[False], 0.0) / MEETINGS


def sum_seconds(mesh: Mesh, sizes: Sizes, topology: Topology, *, repeats: int) -> float:
    """Measure the sum over all ranks of one layer's dense gradients, as `link_rate` measures exchanges.

    Args:
        mesh: the mesh of nodes and their ranks.
        sizes: the sizes of the model.
        topology: the grid of ranks, and the number of experts.
        repeats: the number of timed rounds.
    """
    block = nnx.eval_shape(lambda: Block(sizes, own_experts(sizes, topology), nnx.Rngs(0)))
    dense = nnx.state(block, nnx.All(nnx.Param, nnx.Not(ExpertParam)))
    shapes = [leaf.shape for leaf in jax.tree.leaves(dense)]

    def total(*gradients):
        return jax.lax.psum(gradients, RANKS)

    return _means({"sums": _on_ranks(mesh, total, shapes)}, repeats)["sums"]


def _on_ranks(
    mesh: Mesh, on_rank: Callable[..., Any], shapes: Sequence[tuple[int, ...]]
) -> Callable[[], float]:
    """Return a function that runs another on arrays of every rank, and returns the seconds from the last arrival."""
    spec, late = PartitionSpec(RANKS), np.random.default_rng(jax.process_index())

    def zeros(shape: tuple[int, ...]) -> jax.Array:
        whole = (mesh.size * shape[0], *shape[1:])
        return jax.make_array_from_callback(
            whole, NamedSharding(mesh, spec), lambda _: np.zeros(shape, np.float32)
        )

    arrays = [zeros(shape) for shape in shapes]
    run = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def seconds() -> float:
        multihost_utils.sync_global_devices("collective")
        time.sleep(late.uniform(0, LATEST))
        begin = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        # Processes of one machine have the same clock.
        times = multihost_utils.process_allgather(np.asarray([begin, time.perf_counter()]).view(np.int32))
        begins, ends = times.reshape(-1, 4).view(np.float64).T
        return ends.max() - begins.max()

    return seconds


def _means[K](runs: Mapping[K, Callable[[], float]], repeats: int) -> dict[K, float]:
    readings = alternating(runs, repeats=repeats, warm_up=2)
    return {name: float(np.mean(values)) for name, values in readings.items()}


def measure(topology: Topology, sizes: Sizes, *, tokens: int, repeats: int) -> Rates:
    """Measure the rates of all ranks at the same time. Every rank's process must call it.

    Args:
        topology: the grid of ranks, and the number of experts.
        sizes: the sizes of the model.
        tokens: the number of tokens of a rank in a micro-batch.
        repeats: the number of timed rounds.

    Returns:
        The rates, equal on all ranks: those of the slowest.
    """
    mesh = expert_mesh(topology)
    rows = max(round(tokens * topology.num_ranks * sizes.top_k / topology.num_experts), 1)
    core = core_rates(sizes, experts=topology.home_slots, rows=rows, repeats=repeats)
    attention = attention_rates(sizes, tokens=tokens, repeats=repeats)
    # Exchanges vary more than computation.
    links = [link_rate(mesh, axis, repeats=3 * repeats) for axis in ("node", "local")]
    sums = sum_seconds(mesh, sizes, topology, repeats=repeats)
    own = np.asarray([*core, *attention, *links, 0.0, sums], np.float32)
    of_ranks = multihost_utils.process_allgather(own).reshape(-1, own.size)
    slowest = np.where(np.isin(Rates._fields, PER_SECOND), of_ranks.min(0), of_ranks.max(0))
    rates = Rates(*slowest.tolist())
    # The ranks must agree on the work between two exchanges, and on the result.
    meet = multihost_utils.broadcast_one_to_all(meeting_seconds(mesh, rates.flops, repeats=repeats))
    return rates._replace(meet=float(meet))
