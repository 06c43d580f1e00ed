"""Buffer sizes, counted before the step: replay is exact, so no buffer has to be larger than what will fill it.

Shapes are static under jit, loads are not. `capacities` counts, on the host and between plan and step, the most
rows that any rank will send, receive and compute, and rounds up (at most 1/32 more); `grow_capacities` keeps the sizes
of earlier batches, so that after a few batches the same compiled step serves them all. A step that meets a plan too
large for its sizes drops nothing: see `check_capacities` before it, and `relibra_jax.execution.moe` for what happens
without.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.plan import check_quotas, check_shapes, expert_totals
from relibra_jax.replay import check_replay, expert_load
from relibra_jax.token_split import node_visits, source_quota
from relibra_jax.types import EMPTY, Array, Assignment, Plan, RoutingReplay, Topology


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """Rows of one exchange. The padded one needs `pair`, the ragged one `send` and `receive`."""

    pair: int
    """Most rows from one rank to one other (or itself)."""
    send: int
    """Most rows that one rank sends."""
    receive: int
    """Most rows that one rank receives."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Capacities:
    """Sizes of the buffers of a step, the same for all its micro-batches, layers and ranks.

    A tree of Python numbers, so that checkpoints hold it; static under jit, as part of `ExpertParallel`.
    """

    rows: int
    """Most token copies that one rank computes."""
    flat: ExchangeSizes
    """Token copies exchanged between all ranks."""
    node: ExchangeSizes | None
    """Distinct tokens exchanged between nodes; None where they were not counted."""
    local: ExchangeSizes
    """Token copies exchanged inside a node, after tokens have crossed between nodes."""
    exports: int
    """Most replicas that one rank's home experts are copied to."""


def count_capacities(
    plan: Plan,
    load: Int[Array, "M L N G E"],
    topology: Topology,
    *,
    visits: Int[np.ndarray, "M L P N"] | None = None,
) -> Capacities:
    """Count what a step under ``plan`` needs. Runs on the host.

    Args:
        plan: of all micro-batches that share the compiled step; those of data-parallel copies of the group as
            further entries of M.
        load: token copies by the rank where the tokens lie, as given to the planner.
        topology: of both.
        visits: from `relibra_jax.token_split.node_visits`; only the hierarchical path needs them.

    Returns:
        Sizes that suffice, rounded up.

    Raises:
        ValueError: shapes that do not belong to ``topology``, or an expert whose quotas do not add up to its load.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> plan = Plan(jnp.array([[[[[0, -1], [1, 0]]]]]), jnp.array([[0, 1]]), jnp.array([[[[[60, 0], [40, 40]]]]]))
    >>> sizes = count_capacities(plan, jnp.array([[[[[50, 20], [50, 20]]]]]), topology)
    >>> sizes.rows, sizes.flat.pair, sizes.exports
    (80, 64, 1)
    """
    check_shapes(plan, topology)
    totals = expert_totals(load, topology)
    if totals.shape[:2] != np.shape(plan.quota)[:2]:
        raise ValueError(
            f"load of {totals.shape[:2]} micro-batches and layers, plan of {np.shape(plan.quota)[:2]}"
        )
    check_quotas(plan, load, topology)
    most = {name: int(value) for name, value in _count(plan, load, topology).items()}
    rows = round_capacity(most["rows"])
    node = None
    if visits is not None:
        by_rank = visits.reshape(*visits.shape[:2], topology.num_nodes, topology.ranks_per_node, -1)
        node = ExchangeSizes(
            pair=round_capacity(int(visits.max(initial=0))),
            send=round_capacity(int(visits.sum(-1).max(initial=0))),
            receive=round_capacity(int(by_rank.sum(2).max(initial=0))),
        )
    return Capacities(
        rows=rows,
        flat=ExchangeSizes(pair=round_capacity(most["flat_pair"]), send=round_capacity(most["flat_send"]), receive=rows),
        node=node,
        local=ExchangeSizes(pair=round_capacity(most["local_pair"]), send=round_capacity(most["local_send"]), receive=rows),
        exports=most["exports"],
    )


def batch_capacities(
    replay: RoutingReplay,
    assignment: Assignment,
    plan: Plan,
    topology: Topology,
    *,
    hierarchical: bool = False,
) -> Capacities:
    """`capacities` from the replay itself, after a look at whether replay, assignment and plan are of one batch.

    The last thing to call on the host between plan and step.

    Args:
        replay: of the batch, checked as `relibra_jax.replay.check_replay` does.
        assignment: of its samples.
        plan: of their loads.
        topology: of the plan.
        hierarchical: count the node hop too, token by token. At hundreds of ranks that takes longer than the batch is
            worth: `worst_case_capacities` bounds the hop by the tokens of a rank.

    Returns:
        Sizes that suffice.

    Raises:
        ValueError: another number of layers, ids outside the model, ranks or loads that are not the plan's; with both
            numbers.
    """
    check_shapes(plan, topology)
    layers, planned = np.shape(replay.expert_ids)[2], plan.home.shape[0]
    if layers != planned:
        raise ValueError(f"replay of {layers} MoE layers, plan of {planned}")
    check_replay(replay, num_experts=topology.num_experts)
    ranks, found = (topology.num_nodes, topology.ranks_per_node), np.shape(assignment.sample)[:3]
    if found != (len(plan.quota), *ranks):
        raise ValueError(
            f"assignment of {found} micro-batches, nodes and ranks, plan of {(len(plan.quota), *ranks)}"
        )
    load = expert_load(replay, assignment, num_experts=topology.num_experts)
    visits = node_visits(replay, assignment, plan, topology) if hierarchical else None
    return count_capacities(plan, load, topology, visits=visits)


def worst_case_capacities(tokens: int, top_k: int, topology: Topology) -> Capacities:
    """Sizes that suffice whatever the router does: what systems without foresight have to hold.

    A token has ``top_k`` different experts, so it sends at most ``min(top_k, S)`` copies to one rank.

    Args:
        tokens: of one rank.
        top_k: K.
        topology: gives N, G and S.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=0)
    >>> worst_case_capacities(1024, 4, topology).rows
    32768
    """
    nodes, local, slots = topology.num_nodes, topology.ranks_per_node, topology.slots
    to_rank, rows = tokens * min(top_k, slots), tokens * topology.num_ranks * min(top_k, slots)
    return Capacities(
        rows=rows,
        flat=ExchangeSizes(pair=to_rank, send=tokens * top_k, receive=rows),
        node=ExchangeSizes(pair=tokens, send=tokens * min(nodes, top_k), receive=nodes * tokens),
        local=ExchangeSizes(pair=nodes * to_rank, send=nodes * tokens * min(top_k, local * slots), receive=rows),
        exports=topology.num_ranks * topology.replica_slots,
    )


def check_capacities(have: Capacities, need: Capacities) -> None:
    """Raise unless every buffer of ``have`` holds what ``need`` asks for.

    Raises:
        ValueError: the first buffer that is too small, with both sizes.
    """
    found, wanted = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): size
            for path, size in jax.tree.leaves_with_path(each)
        }
        for each in (have, need)
    )
    for name, size in wanted.items():
        if name not in found or found[name] < size:
            raise ValueError(f"buffer {name}: {found.get(name, 'not counted')}, this batch needs {size}")


def grow_capacities(
    have: Capacities | None, need: Capacities, *, round_up: Callable[[int], int] = lambda size: size
) -> Capacities:
    """Sizes that serve the batches so far and the next one: those at hand where they suffice, so that the compiled step
    does too.

    Args:
        have: of the batches so far; None before the first.
        need: of the next one. Buffers that only one of the two counted stay uncounted.
        round_up: what to make of a size that has to grow. Room to spare costs memory and saves compilations.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=0)
    >>> small, large = worst_case_capacities(7, 4, topology), worst_case_capacities(9, 4, topology)
    >>> grow_capacities(large, small) == grow_capacities(small, large) == large
    True
    >>> grow_capacities(small, large, round_up=lambda size: 1 << size.bit_length()).flat
    ExchangeSizes(pair=64, send=64, receive=512)
    """
    if have is None:
        have = jax.tree.map(lambda _: 0, need)
    if have.node is None or need.node is None:
        have, need = (dataclasses.replace(each, node=None) for each in (have, need))
    return jax.tree.map(lambda size, needed: size if needed <= size else round_up(needed), have, need)


def round_capacity(count: int) -> int:
    """``count`` rounded up to a multiple of 8 and of a power of two that is at most 1/32 of it.

    >>> round_capacity(0), round_capacity(100), round_capacity(100_000)
    (8, 104, 100352)
    """
    step = 1 << max(3, count.bit_length() - 6)
    return max(-(-count // step), 1) * step


@functools.partial(jax.jit, static_argnums=2)
def _count(plan: Plan, load, topology: Topology) -> dict[str, jax.Array]:
    """The most rows and exports of any micro-batch, layer and rank."""

    def one(micro_batch):
        slot_expert, quota, load = (leaf[None] for leaf in micro_batch)
        pairs = source_quota(Plan(slot_expert, plan.home, quota), load, topology)[0].sum(-1)
        layers = pairs.shape[0]
        flat = pairs.reshape(layers, topology.num_ranks, topology.num_ranks)
        # A token crosses to the rank of its own local index: [L, source node, local, node, local].
        local = pairs.reshape(layers, topology.num_nodes, topology.ranks_per_node, *pairs.shape[2:]).sum(1)
        return {
            "rows": flat.sum(1).max(),
            "flat_pair": flat.max(),
            "flat_send": flat.sum(2).max(),
            "local_pair": local.max(),
            "local_send": local.sum(3).max(),
            "exports": jax.vmap(lambda layer: export_count(layer, topology))(
                Plan(slot_expert[0], plan.home, quota[0])
            ).max(),
        }

    found = jax.lax.map(one, (plan.slot_expert, plan.quota, jnp.asarray(load, jnp.int32)))
    return {name: values.max() for name, values in found.items()}


def export_count(plan: Plan, topology: Topology) -> Int[jax.Array, " P"]:
    """Replicas of the experts of each rank in one layer, whose leaves have no leading axes."""
    replica = plan.slot_expert[..., topology.home_slots :].ravel()
    owner = jnp.where(replica == EMPTY, topology.num_ranks, plan.home[replica] // topology.home_slots)
    return jnp.zeros(topology.num_ranks, jnp.int32).at[owner].add(1, mode="drop")
