"""What follows from a Plan: one map is stored, everything else is derived here, so that nothing drifts apart.

Planning and execution both stand on this file and never on each other. All functions are pure and work under jit and
vmap. Whether a plan is valid is checked in `relibra_jax.plan_check`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.types import EMPTY, Array, LayerPlan, Plan, Topology


def inverse_permutation(permutation: Int[Array, " n"]) -> Int[jax.Array, " n"]:
    """Where each of ``0..n-1`` stands in ``permutation``; a scatter, several times faster than an argsort.

    >>> inverse_permutation(jnp.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = jnp.arange(permutation.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(places).at[permutation].set(places, unique_indices=True)


def home_layout(home: Int[Array, "... E"], topology: Topology) -> Int[jax.Array, "... N G H"]:
    """The expert in every home slot: the inverse of ``home``.

    Args:
        home: flat home slot of each expert, a permutation of ``0..E-1`` in every row.
        topology: gives N, G and H.

    Returns:
        Logical expert ids, int32.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> home_layout(jnp.array([3, 0, 1, 2]), topology).tolist()
    [[[1, 2], [3, 0]]]
    """
    experts = jax.vmap(inverse_permutation)(jnp.asarray(home).reshape(-1, home.shape[-1]))
    shape = (topology.num_nodes, topology.ranks_per_node, topology.home_slots)
    return experts.reshape(*home.shape[:-1], *shape)


def assemble_plan(
    home: Int[Array, "L E"],
    replica: Int[Array, "M L N G R"],
    quota: Int[Array, "M L N G S"],
    topology: Topology,
) -> Plan:
    """The Plan of a placement and of what each micro-batch adds to it.

    Args:
        home: flat home slot of each expert.
        replica: flat home slot whose expert is copied into each replica slot, in any order; EMPTY for none.
        quota: token copies of each slot, home slots first, replica slots in the order of ``replica``.
        topology: the expert-parallel group, which gives N, G and H.

    Returns:
        A Plan of int32 arrays, its replicas in the canonical order: by home slot, empty slots last.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
    >>> replica, quota = jnp.array([[[[[-1, 2], [1, 0]]]]]), jnp.array([[[[[9, 9, 0, 5], [9, 9, 7, 6]]]]])
    >>> plan = assemble_plan(jnp.array([[0, 1, 2, 3]]), replica, quota, topology)
    >>> plan.slot_expert.tolist(), plan.quota.tolist()
    ([[[[[0, 1, 2, -1], [2, 3, 0, 1]]]]], [[[[[9, 9, 5, 0], [9, 9, 6, 7]]]]])
    """
    replica, quota = _canonical_order(jnp.asarray(replica), jnp.asarray(quota), topology)
    layout = home_layout(home, topology)
    experts = layout.reshape(layout.shape[0], -1)
    copied = jax.vmap(lambda row, slots: row[slots], (0, 1), 1)(experts, jnp.maximum(replica, 0))
    slot_expert = jnp.concatenate(
        [
            jnp.broadcast_to(layout, (*quota.shape[:-1], topology.home_slots)),
            jnp.where(replica == EMPTY, EMPTY, copied),
        ],
        axis=-1,
    )
    return Plan(slot_expert, jnp.asarray(home, jnp.int32), jnp.asarray(quota, jnp.int32))


def _canonical_order(replica, quota, topology: Topology):
    """Replica slots, and their quotas, in the order of home slots, empty slots last."""
    if topology.replica_slots < 2:
        return replica, quota
    at_home, copied = jnp.split(quota, [topology.home_slots], axis=-1)
    key = jnp.where(replica == EMPTY, topology.num_experts, replica)
    key, copied = jax.lax.sort((key, copied), num_keys=1)
    replica = jnp.where(key == topology.num_experts, EMPTY, key)
    return replica, jnp.concatenate([at_home, copied], axis=-1)


def expert_totals(load: Int[Array, "M L N G E"]) -> Int[jax.Array, "M L E"]:
    """``load`` summed over the ranks where tokens lie, int32.

    >>> expert_totals(jnp.array([[[[[1, 2], [3, 4]]]]])).tolist()
    [[[4, 6]]]
    """
    return jnp.asarray(load, jnp.int32).sum((2, 3), dtype=jnp.int32)


def rank_load(plan: Plan) -> Int[Array, "M L N G"]:
    """Token copies that each rank computes."""
    return plan.quota.sum(-1)


def replica_experts(plan: Plan) -> Int[Array, "M L N G R"]:
    """The experts in the replica slots; EMPTY for none."""
    num_ranks = plan.slot_expert.shape[2] * plan.slot_expert.shape[3]
    return plan.slot_expert[..., plan.home.shape[-1] // num_ranks :]


def replica_count(plan: Plan) -> Int[Array, "M L"]:
    """Replicas that each layer of each micro-batch holds on all ranks together."""
    return (replica_experts(plan) != EMPTY).sum((-3, -2, -1))


def node_quota(plan: LayerPlan) -> Int[jax.Array, "N E"]:
    """Token copies of each expert that each node computes, in one layer of one micro-batch."""
    num_experts = plan.home.shape[-1]

    def one_node(experts, quota):
        # EMPTY slots have no quota, so where they are counted does not matter.
        return jnp.zeros(num_experts, jnp.int32).at[experts.ravel()].add(quota.ravel(), mode="drop")

    return jax.vmap(one_node)(jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota))
