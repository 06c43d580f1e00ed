"""Assignment of the token copies of one rank to slots: it meets the quotas exactly and makes tokens visit few nodes.

`relibra_jax.routing.split.source_quota` says how many of a rank's copies of an expert each slot gets, but not which
ones. Under hierarchical dispatch a token crosses to a node once, however many of its experts are there. If an expert
has slots in several nodes, its copies are therefore best given to tokens that visit those nodes anyway.

The rule is greedy and uses integers only, so that every process gets the same result. The copies of experts that only
one node serves determine which nodes each token visits anyway. Then the other nodes, in order from the rank's own,
take undecided copies up to their quota: first the copies of tokens that visit them anyway, then those of tokens that
bring three copies at once, then two, then one. The remaining copies stay in the rank's own node, where they do not
cross.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, Topology
from relibra_jax.routing.segments import segment_of_row, starts

_UNDECIDED = -2
_MOST_AT_ONCE = 3
"""Tokens that bring three or more copies to a node at once are treated alike: to distinguish them would take more
iterations and avoid hardly any crossing."""


def copy_slots(
    expert_ids: Int[Array, "t K"],
    slot_expert: Int[Array, "N G S"],
    sent: Int[Array, "N G S"],
    topology: Topology,
    node: Int[Array, ""] | int,
    *,
    across_nodes: bool = True,
) -> Int[jax.Array, "t K"]:
    """Choose the slot that computes each token copy of one rank, in one layer of one micro-batch.

    Args:
        expert_ids: the experts of this rank's tokens; EMPTY for no copy.
        slot_expert: the expert in each slot; EMPTY for none.
        sent: the number of copies that this rank sends to each slot, its row of
            `relibra_jax.routing.split.source_quota`. For each expert they sum to its copies in ``expert_ids``.
        topology: the expert-parallel group.
        node: the node of this rank.
        across_nodes: True if an expert may have slots in several nodes. False skips the choice between nodes, and gives
            the same result if no expert has.

    Returns:
        int32 flat slots, ``(n * G + g) * S + s``; EMPTY for no copy. Each slot occurs ``sent`` times. Within a node the
        first copies of an expert, in the order of tokens, go to its first slot.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=1)
    >>> slots, sent = jnp.array([[[0, -1]], [[1, 0]]]), jnp.array([[[1, 0]], [[1, 1]]])
    >>> copy_slots(jnp.array([[0, -1], [0, 1]]), slots, sent, topology, node=0).tolist()  # token 1 visits node 1 anyway
    [[0, -1], [3, 2]]
    """
    ids, experts = jnp.asarray(expert_ids, jnp.int32), jnp.asarray(slot_expert, jnp.int32)
    key, slot_key = ids, experts
    if across_nodes and topology.num_nodes > 1:
        nodes = topology.num_nodes
        served = copy_nodes(ids, experts, sent, topology, node)
        key = jnp.where(ids == EMPTY, EMPTY, ids * nodes + served)
        slot_key = jnp.where(experts == EMPTY, EMPTY, experts * nodes + jnp.arange(nodes)[:, None, None])
    sent = jnp.asarray(sent)
    order, slots, begin = line_up(key, slot_key, sent)
    segment, _ = segment_of_row(key.size, begin, sent.ravel()[slots])
    slot = jnp.where(segment == EMPTY, EMPTY, slots[segment])
    return jnp.zeros_like(slot).at[order].set(slot, unique_indices=True).reshape(ids.shape)


def line_up(
    key: Int[jax.Array, "*copies"], slot_key: Int[jax.Array, "*slots"], sent: Int[jax.Array, "*slots"]
) -> tuple[Int[jax.Array, " c"], Int[jax.Array, " s"], Int[jax.Array, " s"]]:
    """Sort copies and slots by key, so that each slot gets a contiguous range of the sorted copies.

    Args:
        key: the key of each copy, which only slots with the same key may serve. EMPTY for no copy, sorted last.
        slot_key: the key of each slot. EMPTY for none.
        sent: the number of copies of each slot.

    Returns:
        The indices of the copies in sorted order, the indices of the slots in sorted order, and for each sorted slot
        the position of its first copy among the sorted copies.

    >>> line_up(jnp.array([[5, 2], [5, -1]]), jnp.array([5, -1, 2, 5]), jnp.array([1, 0, 1, 1]))
    (Array([1, 0, 2, 3], dtype=int32), Array([2, 0, 3, 1], dtype=int32), Array([0, 1, 2, 3], dtype=int32))
    """
    order, slots = (jnp.argsort(_empty_last(keys.ravel()), stable=True) for keys in (key, slot_key))
    return order, slots, starts(sent.ravel()[slots])


def copy_nodes(
    expert_ids: Int[Array, "t K"],
    slot_expert: Int[Array, "N G S"],
    sent: Int[Array, "N G S"],
    topology: Topology,
    node: Int[Array, ""] | int,
) -> Int[jax.Array, "t K"]:
    """Choose the node that computes each token copy of one rank; `copy_slots` then chooses slots inside the nodes.

    Args:
        expert_ids: the experts of this rank's tokens; EMPTY for no copy.
        slot_expert: the expert in each slot; EMPTY for none.
        sent: the number of copies that this rank sends to each slot, as for `copy_slots`.
        topology: the expert-parallel group.
        node: the node of this rank.

    Returns:
        int32 nodes; EMPTY for no copy.
    """
    nodes, experts, node = topology.num_nodes, topology.num_experts, jnp.asarray(node, jnp.int32)
    most = min(expert_ids.shape[1], _MOST_AT_ONCE)
    ids = jnp.where(jnp.asarray(expert_ids) == EMPTY, experts, jnp.asarray(expert_ids, jnp.int32))
    quota = _node_quota(slot_expert, sent, topology)
    settled = (quota > 0).sum(1) <= 1
    settled_in = jnp.where(settled, jnp.argmax(quota, axis=1).astype(jnp.int32), _UNDECIDED)
    within, count = _by_expert(ids, experts)

    def one_node(state):
        number, served, left = state
        sweep, step = number // (nodes - 1), number % (nodes - 1)
        target = (node + 1 + step) % nodes
        room, undecided = left[:, target], served == _UNDECIDED
        visiting = within(undecided & (served == target).any(1, keepdims=True), room)
        room = room - count(visiting)

        # Sweep 0 adds no visits. The next sweeps add tokens that bring three copies at once, then two, then one.
        def enough(mask):
            return mask & (sweep > 0) & (mask.sum(1, keepdims=True) > most - sweep)

        coming = enough(within(enough(undecided & ~visiting & (room > 0)[ids]), room))
        left = left.at[:, target].set(room - count(coming))
        return number + 1, jnp.where(visiting | coming, target, served), left

    def unfinished(state):
        number, _, left = state
        elsewhere = jnp.arange(nodes) != node
        return (number < (nodes - 1) * (most + 1)) & ((left > 0) & elsewhere[None]).any()

    start = (jnp.int32(0), settled_in[ids], jnp.where(settled[:, None], 0, quota))
    _, served, _ = jax.lax.while_loop(unfinished, one_node, start)
    served = jnp.where(served == _UNDECIDED, node, served)
    return jnp.where(ids == experts, EMPTY, served)


def _node_quota(slot_expert, sent, topology: Topology):
    """Sum the copies of each expert that the rank sends to each node, ``[E + 1, N]``; the last row is padding."""
    nodes, experts = topology.num_nodes, topology.num_experts
    expert = jnp.where(jnp.asarray(slot_expert) == EMPTY, experts, jnp.asarray(slot_expert, jnp.int32))
    quota = jnp.zeros((experts + 1, nodes), jnp.int32)
    return (
        quota.at[expert, jnp.arange(nodes)[:, None, None]]
        .add(jnp.asarray(sent, jnp.int32))
        .at[experts]
        .set(0)
    )


def _by_expert(ids, experts: int):
    """Return two functions of a mask over copies: ``within`` keeps the first copies of each expert, up to a number per
    expert; ``count`` counts the copies of each expert."""
    order = jnp.argsort(ids.ravel(), stable=True)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(ids.size), unique_indices=True).reshape(ids.shape)
    begin = jnp.searchsorted(ids.ravel()[order], jnp.arange(experts + 1))

    def within(mask, room):
        before = starts(mask.ravel()[order].astype(jnp.int32))
        return mask & (before[back] < (before.at[begin].get(mode="clip") + room)[ids])

    def count(mask):
        return jnp.zeros(experts + 1, jnp.int32).at[ids].add(mask.astype(jnp.int32))

    return within, count


def _empty_last(keys):
    return jnp.where(keys == EMPTY, jnp.iinfo(keys.dtype).max, keys)
