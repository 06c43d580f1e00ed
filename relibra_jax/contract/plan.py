"""Quantities that are derived from a plan: the experts in copies, rank loads, and the slots that copies come from.

A `Plan` stores one map, and everything else is derived from it here, so that no two stored copies can disagree.
Planning and execution both import this module and never each other. All functions are pure and work under jit and vmap.
`relibra_jax.contract.check` checks whether a plan is valid.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Plan, Topology
from relibra_jax.support.argument_types import checks_arguments


def inverse_permutation(permutation: Int[Array, " n"]) -> Int[jax.Array, " n"]:
    """Return the inverse of a permutation of ``0..n-1``; it is a scatter, several times faster than an argsort.

    >>> inverse_permutation(jnp.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = jnp.arange(permutation.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(places).at[permutation].set(places, unique_indices=True)


@checks_arguments
def contiguous_homes(topology: Topology, num_layers: int) -> Int[jax.Array, "L E"]:
    """Return Megatron-LM's homes: expert ``e`` in flat home slot ``e``, in every layer."""
    row = jnp.arange(topology.num_experts, dtype=jnp.int32)
    return jnp.tile(row[None], (num_layers, 1))


@checks_arguments
def home_layout(home: Int[Array, "... E"], topology: Topology) -> Int[jax.Array, "... N G H"]:
    """Return the expert in every home slot, the inverse of ``home``.

    Args:
        home: flat home slot of each expert, a permutation of ``0..E-1`` in every row.
        topology: the expert-parallel group.

    Returns:
        Logical expert ids, int32.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> home_layout(jnp.array([3, 0, 1, 2]), topology).tolist()
    [[[1, 2], [3, 0]]]
    """
    experts = jax.vmap(inverse_permutation)(jnp.asarray(home).reshape(-1, home.shape[-1]))
    shape = (topology.num_nodes, topology.ranks_per_node, topology.home_slots)
    return experts.reshape(*home.shape[:-1], *shape)


@checks_arguments
def assemble_plan(
    home: Int[Array, "L E"],
    replica: Int[Array, "M L N G R"],
    quota: Int[Array, "M L N G S"],
    topology: Topology,
    *,
    resident: Int[Array, "L N G B"] | None = None,
) -> Plan:
    """Build a plan from homes, residents, replicas and quotas.

    Args:
        home: flat home slot of each expert.
        replica: the flat home slot of the expert in each replica slot, in any order; EMPTY for none.
        quota: token copies of each slot: first the home slots, then the resident slots in the order of ``resident``,
            then the replica slots in the order of ``replica``.
        topology: the expert-parallel group.
        resident: the flat home slot of the expert in each resident slot, in any order; EMPTY for none. None leaves all
            resident slots empty, and ``quota`` then has no entries for them.

    Returns:
        A Plan of int32 arrays, with the residents and replicas of each rank sorted by home slot, empty slots last.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
    >>> replica, quota = jnp.array([[[[[-1, 2], [1, 0]]]]]), jnp.array([[[[[9, 9, 0, 5], [9, 9, 7, 6]]]]])
    >>> plan = assemble_plan(jnp.array([[0, 1, 2, 3]]), replica, quota, topology)
    >>> plan.slot_expert.tolist(), plan.quota.tolist()
    ([[[[[0, 1, 2, -1], [2, 3, 0, 1]]]]], [[[[[9, 9, 5, 0], [9, 9, 6, 7]]]]])
    """
    layout = home_layout(home, topology)
    experts = layout.reshape(layout.shape[0], -1)
    lead = quota.shape[:-1]
    replica, quota = jnp.asarray(replica), jnp.asarray(quota, jnp.int32)
    homes, room = topology.home_slots, topology.resident_slots
    if resident is None:
        resident = jnp.full((*layout.shape[:-1], room), EMPTY, jnp.int32)
        zeros = jnp.zeros((*lead, room), jnp.int32)
        quota = jnp.concatenate([quota[..., :homes], zeros, quota[..., homes:]], axis=-1)
    at_home, at_resident, at_replica = jnp.split(quota, [homes, homes + room], axis=-1)
    resident = jnp.broadcast_to(resident, at_resident.shape)
    resident, at_resident = _canonical_order(resident, at_resident, topology)
    replica, at_replica = _canonical_order(replica, at_replica, topology)
    copied = jnp.concatenate([resident, replica], axis=-1)
    chosen = jax.vmap(lambda row, slots: row[slots], (0, 1), 1)(experts, jnp.maximum(copied, 0))
    slot_expert = jnp.concatenate(
        [
            jnp.broadcast_to(layout, (*lead, homes)),
            jnp.where(copied == EMPTY, EMPTY, chosen),
        ],
        axis=-1,
    )
    quota = jnp.concatenate([at_home, at_resident, at_replica], axis=-1)
    return Plan(slot_expert, jnp.asarray(home, jnp.int32), quota)


def _canonical_order(slots, quota, topology: Topology):
    """Sort copies and their quotas by the home slots of their experts, empty slots last."""
    if slots.shape[-1] < 2:
        return slots, quota
    key = jnp.where(slots == EMPTY, topology.num_experts, slots)
    key, quota = jax.lax.sort((key, quota), num_keys=1)
    return jnp.where(key == topology.num_experts, EMPTY, key), quota


def expert_totals(load: Int[Array, "M L N G E"]) -> Int[jax.Array, "M L E"]:
    """Sum the load over the ranks that hold the tokens, int32.

    >>> expert_totals(jnp.array([[[[[1, 2], [3, 4]]]]])).tolist()
    [[[4, 6]]]
    """
    return jnp.asarray(load, jnp.int32).sum((2, 3), dtype=jnp.int32)


@checks_arguments
def rank_load(plan: Plan) -> Int[Array, "M L N G"]:
    """Return the number of token copies that each rank computes."""
    return plan.quota.sum(-1)


@checks_arguments
def resident_experts(plan: Plan, topology: Topology) -> Int[Array, "L N G B"]:
    """Return the experts in the resident slots, which are the same in every micro-batch; EMPTY for none."""
    return plan.slot_expert[0, ..., topology.home_slots : topology.held_slots]


@checks_arguments
def replica_experts(plan: Plan, topology: Topology) -> Int[Array, "M L N G R"]:
    """Return the experts in the replica slots; EMPTY for none."""
    return plan.slot_expert[..., topology.held_slots :]


def copy_source(plan: LayerPlan, topology: Topology) -> Int[jax.Array, "N G R"]:
    """Return the slot from which each replica is copied, in one layer of one micro-batch.

    A replica is copied from the home slot of its expert if that is in the same node. Otherwise it is copied from the
    first rank of its node that has the expert as a resident. If there is none, it is copied from the home slot.

    Args:
        plan: a valid layer plan. Only its slots and homes are read.
        topology: the expert-parallel group.

    Returns:
        int32 slots ``flat rank * topology.held_slots + slot``, counted over the H + B home and resident slots of each
        rank; EMPTY for an empty replica slot.

    >>> topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=1, resident_slots=1)
    >>> slots = jnp.array([[[0, -1, -1], [1, -1, 0]], [[2, -1, 0], [3, 0, -1]]])
    >>> copy_source(LayerPlan(slots, jnp.arange(4), jnp.zeros_like(slots), None), topology).tolist()
    [[[-1], [0]], [[7], [-1]]]
    """
    homes, held_slots, per_node = topology.home_slots, topology.held_slots, topology.ranks_per_node
    slot_expert = jnp.asarray(plan.slot_expert, jnp.int32)
    replica = slot_expert[..., held_slots:]
    home = jnp.asarray(plan.home, jnp.int32)[jnp.maximum(replica, 0)]
    source = home // homes * held_slots + home % homes
    if topology.resident_slots:
        no_slot = topology.num_ranks * held_slots
        rank = jnp.arange(topology.num_ranks, dtype=jnp.int32).reshape(topology.num_nodes, per_node, 1)
        resident = slot_expert[..., homes:held_slots]
        slot = rank * held_slots + jnp.arange(homes, held_slots, dtype=jnp.int32)[None, None]
        first = jnp.full((topology.num_nodes, topology.num_experts), no_slot, jnp.int32)
        # Empty slots get index E, which is out of range, so the scatter drops them.
        resident = jnp.where(resident == EMPTY, topology.num_experts, resident)
        first = first.at[rank // per_node, resident].min(slot, mode="drop")
        resident_slot = first[rank // per_node, jnp.maximum(replica, 0)]
        away = home // (homes * per_node) != rank // per_node
        source = jnp.where(away & (resident_slot < no_slot), resident_slot, source)
    return jnp.where(replica == EMPTY, EMPTY, source)


def replica_count(plan: Plan, topology: Topology) -> Int[Array, "M L"]:
    """Count the replicas of each layer of each micro-batch, on all ranks together."""
    return (replica_experts(plan, topology) != EMPTY).sum((-3, -2, -1))


def node_quota(plan: LayerPlan) -> Int[jax.Array, "N E"]:
    """Count the token copies of each expert that each node computes, in one layer of one micro-batch."""
    num_experts = plan.home.shape[-1]

    def one_node(experts, quota):
        # EMPTY slots have quota 0, so it does not matter to which expert they are added.
        return jnp.zeros(num_experts, jnp.int32).at[experts.ravel()].add(quota.ravel(), mode="drop")

    return jax.vmap(one_node)(jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota))
