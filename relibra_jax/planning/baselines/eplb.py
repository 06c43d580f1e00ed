"""EPLB, DeepSeek's expert-parallelism load balancer (github.com/deepseek-ai/EPLB), exactly and as a planner.

`rebalance_experts` is the published function: a function of arrays that decides physical experts from loads. It
packs groups of experts to nodes, copies the expert with the largest load per copy inside each node, and packs
the copies to ranks, always heaviest first to the lightest that is not full. `eplb` is what becomes of it when
master copies have homes and replicas have slots of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from relibra_jax.plan import inverse_permutation
from relibra_jax.planning.baselines.forecasts import plan_expected
from relibra_jax.planning.packing import add_copies, lightest_pack, pack_evenly
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.types import EMPTY, Array, PhysicalExperts, Plan, Planner, Topology


def rebalance_experts(
    load: Num[Array, "L E"], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> PhysicalExperts:
    """Place and copy experts as EPLB does, with EPLB's own call.

    Source: ``rebalance_experts`` of github.com/deepseek-ai/EPLB; the names of the arguments are kept, so that
    code written for it runs unchanged. When the groups divide over the nodes they are packed to nodes first
    (hierarchical policy), else nodes and groups are ignored (global policy).

    Args:
        load: load of each expert; compared and summed in float32, as by EPLB. Equal loads, which above 2**24 may have
            been different integers, go in order of the expert: EPLB's results to the last slot if its sort is stable.
            PyTorch's default sort leaves the order of equal loads open, and EPLB's results with it.
        num_replicas: physical slots P, a multiple of ``num_gpus``.
        num_groups: groups of neighbouring experts that stay together in a node; divides E.
        num_nodes: the number of nodes, which divides ``num_gpus``.
        num_gpus: the number of ranks.

    Returns:
        PhysicalExperts, int32. C is the largest count, as in EPLB; under a trace, where no shape can depend
        on a value, it is ``P - E + 1``.

    Raises:
        ValueError: if the counts do not divide evenly, or there are fewer slots than experts.

    >>> load = jnp.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]])
    >>> rebalance_experts(load, 16, 4, 2, 8).physical_to_logical.tolist()
    [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]]
    """
    experts = load.shape[-1]
    for name, value, by, divisor in (
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
        ("experts", experts, "num_groups", num_groups),
    ):
        if divisor < 1 or value % divisor:
            raise ValueError(f"{name}={value} must divide evenly over {by}={divisor}")
    if num_replicas < experts:
        raise ValueError(f"num_replicas={num_replicas} is too few for {experts} experts")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    placed = _rebalance(
        jnp.asarray(load, jnp.float32),
        num_slots=num_replicas,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_gpus,
    )
    if isinstance(load, jax.core.Tracer):
        return placed
    widest = int(np.max(placed.logical_count, initial=1))
    return placed._replace(logical_to_physical=placed.logical_to_physical[..., :widest])


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
    """Homes by EPLB's packing without redundancy: as many slots as experts, exactly H a rank."""
    placed = rebalance_experts(load, topology.num_experts, num_groups, num_nodes, topology.num_ranks)
    return jax.vmap(inverse_permutation)(placed.physical_to_logical)


def eplb(
    *,
    loads: str = "true",
    scope: str = "micro_batch",
    across_nodes: bool = False,
    expert_groups: int | None = None,
    keep_homes: bool = False,
) -> Planner:
    """EPLB as a planner with fixed homes: its packing gives the homes, its copying rule fills replica slots.

    Source: github.com/deepseek-ai/EPLB; with true loads it is the EPLB+ of ReLibra (arXiv 2605.08639). Without
    redundancy, EPLB's packing puts exactly H experts on each rank. In each micro-batch the expert with the
    largest load per copy is copied until the R slots of all ranks are used, the copies go heaviest first to the
    lightest rank with a free slot, and the load of an expert is split evenly over its copies. Copies that meet
    on a rank share one slot; a copy left without tokens is not held, and none is where homes alone balance better.

    Args:
        loads: the loads that are planned from: the batch's ``true`` ones, or what another of
            `relibra_jax.planning.baselines.forecasts.FORECASTS` expects, for example ``history``.
        scope: how often replicas are chosen: once a ``batch``, or anew for every ``micro_batch``.
        across_nodes: whether nodes are ignored, in packing and by replicas (EPLB's global policy). Otherwise experts
            are packed to nodes first and replicas stay in their home's node (its hierarchical policy).
        expert_groups: into how many groups of neighbouring experts, each of which stays in one node, the experts are
            divided; every expert is a group of its own when None.
        keep_homes: whether homes stay where the first batch has put them. Packing moves nearly every expert; it pays
            only where loads change more from batch to batch than within one.

    Returns:
        A Planner whose state is a PlacedState.

    Raises:
        ValueError: if an option is unknown, or ``expert_groups`` does not divide over the nodes.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> planner = eplb()
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = planner.update(load, planner.init(topology, 1, key=jax.random.key(0)), topology)
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

    def fill(load, expected, home, topology: Topology) -> Plan:
        rule = functools.partial(copy_evenly, replica_slots=topology.replica_slots)
        return plan_per_node(rule, load, expected, home, topology, across_nodes=across_nodes)

    return plan_expected(pack, fill, loads=loads, scope=scope, keep_homes=keep_homes)


def copy_evenly(
    load: Num[jax.Array, "P H"], known: Num[jax.Array, "P H"], *, replica_slots: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """EPLB's copying, packing and even split in one domain: a `relibra_jax.planning.per_node.Rule`.

    Args:
        load: true loads, which the quotas sum to.
        known: the loads that copies are chosen by.
        replica_slots: R.

    Returns:
        The domain's home slot that each replica is of, EMPTY for none, and the quotas.
    """
    ranks, homes = load.shape
    item, copy, count = add_copies(known.ravel(), ranks * replica_slots)
    share = known.ravel() / count
    rank, position = lightest_pack(share[item], share.reshape(ranks, homes).sum(-1), room=replica_slots)
    # The first so many copies of an expert get one token more, so that quotas are whole and sum to the load.
    each, rest = load.ravel() // count, load.ravel() % count
    tokens = each[item] + (copy < rest[item])
    at_home = (each + (rest > 0)).reshape(ranks, homes)

    # EPLB always fills its slots; where even splitting would raise the largest rank load, homes alone are better.
    alone = known.sum(-1)
    after = share.reshape(ranks, homes).sum(-1).at[rank].add(share[item])
    copied = after.max() < alone.max()
    replica = jnp.full((ranks, replica_slots), EMPTY, jnp.int32).at[rank, position].set(item)
    quota = jnp.zeros((ranks, replica_slots), load.dtype).at[rank, position].set(tokens)
    spread = jnp.concatenate([at_home, quota], -1)
    return merge_copies(replica, jnp.where(copied, spread, jnp.pad(load, ((0, 0), (0, replica_slots)))))
