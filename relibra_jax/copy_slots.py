"""Which slot serves each token copy of a rank: the quotas exactly, and few distinct (token, node) pairs.

`relibra_jax.token_split.source_quota` says how many of a rank's copies of an expert go to each slot, not which. On the
hierarchical path a token crosses to a node once, however many of its experts are there; so where an expert is served in
several nodes, its copies are best given to tokens that visit those nodes anyway.

The rule is a greedy one, in whole numbers, the same wherever it is run. Copies of experts that a single node serves
say which nodes each token visits anyway. Then the other nodes, one after another from the rank's own, take from what
is undecided: first copies of tokens that visit them, then copies of tokens that bring three at once, then two, then
one. What remains stays in the own node, where a visit costs nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.segments import segment_of_row, starts
from relibra_jax.types import EMPTY, Array, Topology

_UNDECIDED = -2
_MOST_AT_ONCE = 3
"""Tokens that bring more copies to a node at once are not told apart: it costs turns and spares hardly a visit."""


def copy_slots(
    expert_ids: Int[Array, "t K"],
    slot_expert: Int[Array, "N G S"],
    sent: Int[Array, "N G S"],
    topology: Topology,
    node: Int[Array, ""] | int,
    *,
    across_nodes: bool = True,
) -> Int[jax.Array, "t K"]:
    """The slot that serves each token copy of one rank, in one layer of one micro-batch.

    Args:
        expert_ids: the experts of this rank's tokens; EMPTY for no copy.
        slot_expert: the expert in each slot; EMPTY for none.
        sent: copies that this rank sends to each slot, its row of `relibra_jax.token_split.source_quota`: those of an
            expert sum to its copies in ``expert_ids``.
        topology: the expert-parallel group.
        node: the node of this rank.
        across_nodes: whether an expert may have slots in several nodes. False spares the choice between them, and
            changes nothing where no expert has.

    Returns:
        int32 flat slots, ``(n * G + g) * S + s``; EMPTY for no copy. Each slot is named ``sent`` times. Of the copies
        of an expert in one node, those of the first tokens have the first slot.

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
    """Copies and slots, both sorted by key, and where among the sorted copies those of each sorted slot begin.

    Args:
        key: what says which slots may serve a copy; EMPTY for no copy, sorted last.
        slot_key: the key that each slot serves; EMPTY for none.
        sent: copies of each slot.

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
    """The node that serves each token copy of one rank: the part of `copy_slots` that decides who crosses.

    Args:
        expert_ids, slot_expert, sent, topology, node: as in `copy_slots`.

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

    def turn(state):
        number, served, left = state
        sweep, step = number // (nodes - 1), number % (nodes - 1)
        there = (node + 1 + step) % nodes
        room, undecided = left[:, there], served == _UNDECIDED
        visiting = within(undecided & (served == there).any(1, keepdims=True), room)
        room = room - count(visiting)

        # In sweep 0 nobody comes anew; in the next ones tokens that bring three copies at once, two, one.
        def enough(mask):
            return mask & (sweep > 0) & (mask.sum(1, keepdims=True) > most - sweep)

        coming = enough(within(enough(undecided & ~visiting & (room > 0)[ids]), room))
        left = left.at[:, there].set(room - count(coming))
        return number + 1, jnp.where(visiting | coming, there, served), left

    def unfinished(state):
        number, _, left = state
        elsewhere = jnp.arange(nodes) != node
        return (number < (nodes - 1) * (most + 1)) & ((left > 0) & elsewhere[None]).any()

    start = (jnp.int32(0), settled_in[ids], jnp.where(settled[:, None], 0, quota))
    _, served, _ = jax.lax.while_loop(unfinished, turn, start)
    served = jnp.where(served == _UNDECIDED, node, served)
    return jnp.where(ids == experts, EMPTY, served)


def _node_quota(slot_expert, sent, topology: Topology):
    """Copies of each expert that the rank sends to each node ``[E + 1, N]``; the last row is of no expert."""
    nodes, experts = topology.num_nodes, topology.num_experts
    held = jnp.where(jnp.asarray(slot_expert) == EMPTY, experts, jnp.asarray(slot_expert, jnp.int32))
    quota = jnp.zeros((experts + 1, nodes), jnp.int32)
    return (
        quota.at[held, jnp.arange(nodes)[:, None, None]].add(jnp.asarray(sent, jnp.int32)).at[experts].set(0)
    )


def _by_expert(ids, experts: int):
    """Two functions of a mask over copies: the first ones of each expert, as many as there is room for; how many each
    expert has."""
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
