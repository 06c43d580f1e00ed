"""Which token copy goes to which slot: nearest copy first, the same on every process.

A Plan says how many token copies each slot computes, not whose. `source_quota` splits that over the ranks where the
tokens lie: a copy on the same rank serves first, then copies in the same node, then the rest. In each of the
three rounds supply and demand are laid out along one line, in rank order, and matched where they overlap (the
north-west corner rule), so that everything is whole, exact and deterministic.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.types import EMPTY, Array, Assignment, Plan, RoutingReplay, Topology


def source_quota(
    plan: Plan, load: Int[Array, "M L N G E"], topology: Topology
) -> Int[jax.Array, "M L P N G S"]:
    """Token copies that each source rank sends to each slot.

    Args:
        plan: a valid plan of ``load``.
        load: token copies by the rank where the tokens lie.
        topology: of both.

    Returns:
        int32; P counts source ranks flat. Summed over P it is the plan's quota, summed over the slots of an expert
        it is the load. It takes P times the memory of the plan: at hundreds of ranks, call it layer by layer.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> plan = Plan(jnp.array([[[[[0, -1], [1, 0]]]]]), jnp.array([[0, 1]]), jnp.array([[[[[6, 0], [4, 4]]]]]))
    >>> load = jnp.array([[[[[5, 2], [5, 2]]]]])
    >>> source_quota(plan, load, topology)[0, 0, :, 0].tolist()
    [[[5, 0], [2, 0]], [[1, 0], [2, 4]]]
    """
    ranks, slots = topology.num_ranks, topology.slots

    def one(slot_expert, quota, load):
        supply, expert = load.reshape(ranks, -1), slot_expert.reshape(-1)
        held = jnp.where(expert == EMPTY, 0, expert)
        rank = np.repeat(np.arange(ranks), slots)
        demand = jnp.zeros_like(supply).at[rank, held].add(quota.reshape(-1))
        sent = jnp.zeros((ranks, expert.size), supply.dtype)
        for per_group in (1, topology.ranks_per_node, ranks):
            matched = _overlap(supply, demand, held, rank, per_group)
            matched = jnp.where(expert == EMPTY, 0, matched)
            supply = supply - jnp.zeros_like(supply).at[:, held].add(matched)
            demand = demand - jnp.zeros_like(demand).at[rank, held].add(matched.sum(0, dtype=matched.dtype))
            sent = sent + matched
        return sent.reshape(ranks, topology.num_nodes, topology.ranks_per_node, slots)

    return jax.vmap(jax.vmap(one))(jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota), jnp.asarray(load))


def refit_quota(plan: Plan, load: Int[Array, "N G E"], topology: Topology) -> Plan:
    """``plan`` of one layer with its quotas refitted to another load: same slots, same shares.

    For routing that the plan was not made for. Each expert's token copies are split over its slots in proportion to
    their quotas; an expert that the plan saw no load of is computed at home.

    Args:
        plan: of one layer, leaves without leading axes.
        load: token copies by the rank where the tokens lie.
        topology: of both.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> plan = Plan(jnp.array([[[0, -1], [1, 0]]]), jnp.array([0, 1]), jnp.array([[[3, 0], [0, 1]]]))
    >>> refit_quota(plan, jnp.array([[[5, 2], [5, 2]]]), topology).quota.tolist()
    [[[7, 0], [4, 3]]]
    """
    expert = plan.slot_expert.reshape(-1)
    total = jnp.asarray(load, jnp.int32).sum((0, 1), dtype=jnp.int32)
    held = jnp.where(expert == EMPTY, topology.num_experts, expert)
    planned = jnp.zeros(topology.num_experts + 1, jnp.int32).at[held].add(plan.quota.reshape(-1))
    at_home = np.tile(np.arange(topology.slots) < topology.home_slots, topology.num_ranks)
    share = jnp.where(planned[held] > 0, plan.quota.reshape(-1), at_home.astype(np.int32))
    share = jnp.where(expert == EMPTY, 0, share)

    # Shares laid end to end, expert by expert, cut each expert's copies at whole numbers.
    slots = jnp.argsort(held, stable=True)
    held, share = held[slots], share[slots]
    whole = jnp.maximum(planned, 1)[held]
    first = jnp.searchsorted(held, held, side="left")
    until = jnp.cumsum(share, dtype=jnp.int32)
    until = until - (until - share)[first]
    total = jnp.append(total, 0)[held]
    end = jnp.where(until == whole, total, jnp.floor(total * (until / whole)).astype(jnp.int32))
    end = jnp.minimum(end, total)
    begin = jnp.where(jnp.arange(held.size) == first, 0, jnp.roll(end, 1))
    quota = jnp.zeros_like(end).at[slots].set(end - begin, unique_indices=True)
    return plan._replace(quota=quota.reshape(plan.quota.shape))


def _overlap(
    supply: Int[jax.Array, "P E"],
    demand: Int[jax.Array, "P E"],
    expert: Int[jax.Array, " PS"],
    rank: Int[np.ndarray, " PS"],
    per_group: int,
) -> Int[jax.Array, "P PS"]:
    """What flows from each rank to each slot, inside groups of ``per_group`` neighbouring ranks."""
    ranks = supply.shape[0]

    def ends(amount):
        groups = amount.reshape(ranks // per_group, per_group, -1)
        return jnp.cumsum(groups, axis=1, dtype=groups.dtype).reshape(amount.shape)

    supply_end, demand_end = ends(supply)[:, expert], ends(demand)[rank, expert][None]
    supply_start, demand_start = supply_end - supply[:, expert], demand_end - demand[rank, expert][None]
    overlap = jnp.minimum(supply_end, demand_end) - jnp.maximum(supply_start, demand_start)
    together = np.arange(ranks)[:, None] // per_group == rank[None] // per_group
    return jnp.where(together, jnp.maximum(overlap, 0), 0)


def node_visits(
    replay: RoutingReplay, assignment: Assignment, plan: Plan, topology: Topology
) -> Int[np.ndarray, "M L P N"]:
    """Tokens that each source rank sends to each node when a token crosses to a node once, however many of its
    experts are there.

    Counted exactly, from the replayed ids: copies of one expert on one rank are taken in token order and go to the
    expert's slots in slot order, as `source_quota` splits them. Runs on the host.

    Args:
        replay: the batch.
        assignment: of its samples.
        plan: of their loads.
        topology: of the plan.

    Returns:
        int64; the entry of the source's own node counts tokens that stay.
    """
    ids, mask = np.asarray(replay.expert_ids), np.asarray(replay.mask)
    sample = np.asarray(assignment.sample).reshape(len(assignment.sample), topology.num_ranks, -1)
    node = np.repeat(np.arange(topology.num_nodes), topology.ranks_per_node * topology.slots)
    visits = np.zeros((*plan.quota.shape[:2], topology.num_ranks, topology.num_nodes), np.int64)
    split = jax.jit(source_quota)
    for m, on_rank in enumerate(sample):
        rows = [ids[chosen][mask[chosen]] for chosen in (held[held != EMPTY] for held in on_rank)]
        part = jax.tree.map(lambda leaf, m=m: leaf[m : m + 1], plan)._replace(home=plan.home)
        sent = np.asarray(split(part, _count(rows, topology), topology))[0]
        for layer, p in np.ndindex(*visits.shape[1:3]):
            slot_expert = np.asarray(plan.slot_expert[m, layer]).ravel()
            where = _copy_nodes(rows[p][:, layer], slot_expert, sent[layer, p].ravel(), node)
            visited = (where[..., None] == np.arange(topology.num_nodes)).any(1)
            visits[m, layer, p] = visited.sum(0)
    return visits


def _count(rows: list[np.ndarray], topology: Topology) -> Int[np.ndarray, "1 L N G E"]:
    """The load of one micro-batch from the rows ``[tokens, L, K]`` of every rank."""
    experts, layers = topology.num_experts, rows[0].shape[1]
    load = np.zeros((len(rows), layers, experts), np.int32)
    for rank, row in enumerate(rows):
        np.add.at(load[rank], (np.arange(layers)[:, None], row), 1)
    return np.moveaxis(load, 0, 1).reshape(1, layers, topology.num_nodes, topology.ranks_per_node, experts)


def _copy_nodes(ids: np.ndarray, slot_expert: np.ndarray, sent: np.ndarray, node: np.ndarray) -> np.ndarray:
    """The node that serves each token copy ``[tokens, K]`` of one rank in one layer."""
    copies = np.argsort(ids.ravel(), kind="stable")
    slots = np.argsort(slot_expert, kind="stable")
    where = np.empty(ids.size, np.int64)
    where[copies] = np.repeat(node[slots], sent[slots])
    return where.reshape(ids.shape)
