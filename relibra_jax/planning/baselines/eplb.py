"""EPLB, DeepSeek's expert-parallelism load balancer (github.com/deepseek-ai/EPLB), as published and as a planner.

`rebalance_experts` is the published function, which computes physical experts from loads. It packs groups of experts
to nodes, copies the expert with the largest load per copy inside each node, and packs the copies to ranks. Packing
always gives the heaviest item to the lightest pack that is not full. `eplb` adapts the algorithm to a planner, where
experts have homes and replicas have their own slots.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from relibra_jax.contract.plan import inverse_permutation
from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, PhysicalExperts, Plan, Topology
from relibra_jax.planning.baselines.forecasts import plan_expected
from relibra_jax.planning.packing import add_copies, lightest_pack, pack_evenly
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def rebalance_experts(
    load: Num[Array, "L E"], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> PhysicalExperts:
    """Place and copy experts as EPLB does, with the signature of EPLB's function.

    Source: ``rebalance_experts`` of github.com/deepseek-ai/EPLB. The arguments have the same names, so code written for
    EPLB runs unchanged. If the number of groups is a multiple of the number of nodes, groups are packed to nodes first
    (hierarchical policy); otherwise nodes and groups are ignored (global policy).

    Args:
        load: the load of each expert, compared and summed in float32 as in EPLB. Experts with equal loads (above 2**24
            also different integers that round to the same float32) are taken in ascending order. The result equals
            EPLB's in every slot if EPLB's sort is stable; PyTorch's default sort does not define the order of equal
            loads.
        num_replicas: P, the number of physical slots, a multiple of ``num_gpus``.
        num_groups: the number of groups of neighbouring experts that stay together in a node; a divisor of E.
        num_nodes: the number of nodes, a divisor of ``num_gpus``.
        num_gpus: the number of ranks.

    Returns:
        The physical experts, int32. C is the largest number of copies of an expert, as in EPLB. Under a trace, where
        a shape cannot depend on a value, C is ``P - E + 1``.

    Raises:
        ValueError: if a count does not divide evenly, or if there are fewer slots than experts.

    >>> load = jnp.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]])
    >>> rebalance_experts(load, 16, 4, 2, 8).physical_to_logical.tolist()
    [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]]
    """
    experts = load.shape[-1]
    for name, value, divisor_name, divisor in (
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
        ("experts", experts, "num_groups", num_groups),
    ):
        if divisor < 1 or value % divisor:
            raise ValueError(f"{name}={value} must divide evenly over {divisor_name}={divisor}")
    if num_replicas < experts:
        raise ValueError(f"num_replicas={num_replicas} is too few for {experts} experts")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    physical = _rebalance(
        jnp.asarray(load, jnp.float32),
        num_slots=num_replicas,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_gpus,
    )
    if isinstance(load, jax.core.Tracer):
        return physical
    widest = int(np.max(physical.logical_count, initial=1))
    return physical._replace(logical_to_physical=physical.logical_to_physical[..., :widest])


@functools.partial(jax.jit, static_argnames=("num_slots", "num_groups", "num_nodes", "num_ranks"))
def _rebalance(load, *, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> PhysicalExperts:
    row = functools.partial(
        _rebalance_row, num_slots=num_slots, num_groups=num_groups, num_nodes=num_nodes, num_ranks=num_ranks
    )
    return jax.vmap(row)(load)


def _rebalance_row(
    load: Float[Array, " E"], *, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> PhysicalExperts:
    experts, per_group, slots_per_node = load.size, load.size // num_groups, num_slots // num_nodes
    node, position = pack_evenly(load.reshape(num_groups, per_group).sum(-1), num_nodes)
    group_start = (node * (num_groups // num_nodes) + position) * per_group
    by_node = inverse_permutation((group_start[:, None] + jnp.arange(per_group)[None]).ravel()).reshape(
        num_nodes, -1
    )

    def one_node(expert: Int[Array, " n"]):
        local_load = load[expert]
        item, copy, count = add_copies(local_load, slots_per_node - expert.size)
        item = jnp.concatenate([jnp.arange(expert.size, dtype=jnp.int32), item])
        copy = jnp.concatenate([jnp.zeros(expert.size, jnp.int32), copy])
        rank, position = pack_evenly((local_load / count)[item], num_ranks // num_nodes)
        order = inverse_permutation(rank * (num_slots // num_ranks) + position)
        return expert[item][order], copy[order]

    expert, copy = (leaf.ravel() for leaf in jax.vmap(one_node)(by_node))
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    slots = jnp.full((experts, num_slots - experts + 1), EMPTY, jnp.int32).at[expert, copy].set(slot)
    return PhysicalExperts(expert.astype(jnp.int32), slots, (slots != EMPTY).sum(-1, dtype=jnp.int32))


def pack_homes(
    load: Num[Array, "L E"], topology: Topology, *, num_groups: int, num_nodes: int
) -> Int[Array, "L E"]:
    """Choose homes by EPLB's packing without redundant experts, which puts exactly H experts on each rank."""
    physical = rebalance_experts(load, topology.num_experts, num_groups, num_nodes, topology.num_ranks)
    return jax.vmap(inverse_permutation)(physical.physical_to_logical)


@checks_arguments
@functools.cache
def eplb(
    *,
    loads: str = "true",
    scope: str = "micro_batch",
    across_nodes: bool = False,
    expert_groups: int | None = None,
    keep_homes: bool = False,
) -> Planner:
    """Make a planner from EPLB: its packing gives the homes, and its copying rule fills the replica slots.

    Source: github.com/deepseek-ai/EPLB; with true loads it is the EPLB+ of ReLibra (arXiv 2605.08639). Without
    redundant experts, EPLB's packing puts exactly H experts on each rank. In each micro-batch, the expert with the
    largest load per copy gets another copy until the R slots of all ranks are used. The copies go, heaviest first, to
    the lightest rank with a free slot, and the load of an expert is split evenly over its copies. Copies of an expert
    on the same rank are merged into one slot, and copies without tokens are dropped. If homes alone balance better,
    there are no copies.

    Args:
        loads: the loads from which to plan: ``true`` for those of the batch, or another name in
            `relibra_jax.planning.baselines.forecasts.FORECASTS`, for example ``history``.
        scope: how often to choose replicas: once per ``batch``, or for every ``micro_batch``.
        across_nodes: whether packing and replicas ignore nodes (EPLB's global policy). Otherwise experts are packed to
            nodes first and replicas stay in the node of their home (the hierarchical policy).
        expert_groups: the number of groups of neighbouring experts, each of which stays in one node. None makes every
            expert its own group.
        keep_homes: whether to keep the homes of the first batch. Otherwise homes are packed again in every batch, which
            moves nearly every expert and pays only if loads change more between batches than within one.

    Returns:
        A Planner whose state is a PlacedState.

    Raises:
        ValueError: if ``loads`` or ``scope`` is unknown. The planner raises it if ``expert_groups`` does not divide the
            experts or is not a multiple of the number of nodes.

    >>> from relibra_jax import PlanRequest
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> planner = eplb()
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = planner.update(PlanRequest(load), planner.init(topology, 1, key=jax.random.key(0)), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[57, 43]]]]
    """

    def pack(for_homes, topology: Topology) -> Array:
        groups = topology.num_experts if expert_groups is None else expert_groups
        nodes = topology.num_nodes
        if not across_nodes and (groups < 1 or groups % nodes or topology.num_experts % groups):
            raise ValueError(
                f"expert_groups={groups} must divide num_experts={topology.num_experts}"
                f" and be a multiple of num_nodes={nodes}"
            )
        groups, nodes = (1, 1) if across_nodes else (groups, nodes)
        return pack_homes(for_homes, topology, num_groups=groups, num_nodes=nodes)

    def fill(request: PlanRequest, expected, home, topology: Topology) -> Plan:
        rule = functools.partial(copy_evenly, replica_slots=topology.replica_slots)
        return plan_per_node(rule, request.by_expert, expected, home, topology, across_nodes=across_nodes)

    return plan_expected(pack, fill, loads=loads, scope=scope, keep_homes=keep_homes)


def copy_evenly(
    load: Num[jax.Array, "P H"], expected: Num[jax.Array, "P H"], *, replica_slots: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Copy, pack and split experts evenly as EPLB does, in one domain: a `relibra_jax.planning.per_node.Rule`.

    Args:
        load: the true loads, to which the quotas sum.
        expected: the loads by which copies are chosen.
        replica_slots: R, the number of replica slots of a rank.

    Returns:
        The domain's home slot of the expert in each replica slot, EMPTY for none, and the quotas.
    """
    ranks, homes = load.shape
    item, copy, count = add_copies(expected.ravel(), ranks * replica_slots)
    share = expected.ravel() / count
    rank, position = lightest_pack(share[item], share.reshape(ranks, homes).sum(-1), capacity=replica_slots)
    # The first copies of an expert get one token more each, so that the quotas are integers and sum to the load.
    quotient, remainder = load.ravel() // count, load.ravel() % count
    tokens = quotient[item] + (copy < remainder[item])
    at_home = (quotient + (remainder > 0)).reshape(ranks, homes)

    # EPLB always fills its slots. If even splitting would raise the largest rank load, homes alone are better.
    home_load = expected.sum(-1)
    rank_load = share.reshape(ranks, homes).sum(-1).at[rank].add(share[item])
    improves = rank_load.max() < home_load.max()
    replica = jnp.full((ranks, replica_slots), EMPTY, jnp.int32).at[rank, position].set(item)
    quota = jnp.zeros((ranks, replica_slots), load.dtype).at[rank, position].set(tokens)
    spread = jnp.concatenate([at_home, quota], -1)
    return merge_copies(replica, jnp.where(improves, spread, jnp.pad(load, ((0, 0), (0, replica_slots)))))
