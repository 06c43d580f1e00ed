"""Exact counts of the tokens that visit each node under hierarchical dispatch, from the replayed routes.

Under hierarchical dispatch a token goes to a node once, however many of its experts are there. The number of visits
does not follow from loads, but from the recorded route of each token. On a single node, where every rank counts as a
node (`relibra_jax.contract.types.Topology.visited`), they are visits of ranks: N is then the number of ranks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.replay import rank_tokens
from relibra_jax.contract.types import EMPTY, Array, BatchPlan, LayerPlan, RoutingReplay, Topology
from relibra_jax.routing.slots import copy_nodes, copy_slots
from relibra_jax.routing.split import pair_load, source_quota
from relibra_jax.routing.striping import stripe_tokens
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def node_visits(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology, *, striped: bool = False
) -> Int[jax.Array, "M L P V"]:
    """Count the distinct tokens that each source rank sends to each node, or on a single node to each rank.

    The count follows the same rule as dispatch: `relibra_jax.routing.split.source_quota` gives the number of copies of
    an expert that go to each slot, and `relibra_jax.routing.slots` selects them. The function works under
    jit. It needs little more memory than the routes of one micro-batch, in their own dtype, also if the ids are a
    memory-mapped array, and widens those of one layer.

    Args:
        replay: the routing of the samples of the batch.
        batch_plan: the plan that was made for the replay.
        topology: the expert-parallel group.
        striped: whether layers are striped, and the load of the plan as well (`relibra_jax.routing.striping`).

    Returns:
        int32 tokens for every micro-batch, layer, flat source rank and node of ``topology.visited``. The entry of the
        source's own node counts the tokens that do not leave it.
    """
    count = functools.partial(_count_visits, topology=topology, striped=striped)
    sample, plans = batch_plan.assignment.sample, batch_plan.layer_plans()
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((replay, sample, plans))):
        traced = RoutingReplay(*map(jnp.asarray, replay))
        inputs = jax.tree.map(jnp.asarray, (sample, plans))
        return jax.lax.map(lambda each: count(*(leaf[each[0]] for leaf in traced), *each), inputs)
    ids, mask = map(np.asarray, replay)
    parts = zip(np.asarray(sample), map(batch_plan.micro_batch, range(len(sample))), strict=True)
    return jnp.stack([count(ids[samples], mask[samples], samples, plans) for samples, plans in parts])


@functools.partial(jax.jit, static_argnames=("topology", "striped"))
def _count_visits(
    ids: Integer[Array, "N G b T L K"],
    mask: Bool[Array, "N G b T"],
    sample: Int[Array, "N G b"],
    plans: LayerPlan,
    *,
    topology: Topology,
    striped: bool,
) -> Int[jax.Array, "L P V"]:
    """Count the visits of one micro-batch, whose layer plans are stacked ``[L]``."""
    real_token = (mask & (sample != EMPTY)[..., None]).reshape(topology.num_ranks, *mask.shape[2:])
    routes = jnp.moveaxis(ids.reshape(topology.num_ranks, *ids.shape[2:]), 3, 0)

    def one_layer(inputs):
        routes, plan = inputs
        routes = jnp.where(real_token[..., None], routes.astype(jnp.int32), EMPTY)
        if striped:
            routes = stripe_tokens(routes, topology, padding=EMPTY)
        return _layer_visits(routes.reshape(len(routes), -1, routes.shape[-1]), plan, topology)

    return jax.lax.map(one_layer, (routes, plans))


@checks_arguments
def most_visits(
    lengths: Integer[Array, " B"], batch_plan: BatchPlan, topology: Topology
) -> Int[np.ndarray, "M L P V"]:
    """Bound the visits of `node_visits` from above without routes, for buffers of a batch that was planned from counts.

    A rank sends no more tokens to a node than it has, and no more than it sends token copies there.

    Args:
        lengths: the number of real tokens of each sample.
        batch_plan: the plan, with the load of layers that are not striped.
        topology: the expert-parallel group.

    Returns:
        int32 tokens, as `node_visits` returns them, and at least as many.

    >>> from relibra_jax.contract.types import Assignment, Plan
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> plan = Plan(np.array([[[[[0]], [[1]]]]]), np.array([[0, 1]]), np.array([[[[[5]], [[5]]]]]))
    >>> load = np.array([[[[[4, 3]], [[1, 2]]]]])
    >>> batch_plan = BatchPlan(Assignment(np.array([[[[0]], [[1]]]])), load, plan)
    >>> most_visits(np.array([4, 2]), batch_plan, topology).tolist()
    [[[[4, 3], [1, 2]]]]
    """
    tokens = rank_tokens(batch_plan.assignment, lengths)
    return np.minimum(most_copies(batch_plan, topology), tokens.reshape(len(tokens), 1, -1, 1)).astype(
        np.int32
    )


@checks_arguments
def possible_visits(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology, *, striped: bool = False
) -> Int[np.ndarray, "M L P V"]:
    """Count the nodes that every token may visit: those to which its rank sends copies of any of its experts.

    These are the visits of `node_visits` if every rank sends all copies of an expert to one node, and otherwise more.
    Unlike them they are sums over tokens, so that processes that have the routes of some samples each can add them up,
    and nothing is sorted. `most_copies` bounds them too. Runs on the host.

    Args:
        replay: the routing of some samples of the batch.
        batch_plan: the plan of the whole batch, whose assignment has the numbers of these samples, and EMPTY for all
            others.
        topology: the expert-parallel group.
        striped: whether layers are striped, and the load of the plan as well.

    Returns:
        int32 tokens of these samples, as `node_visits` returns them.
    """
    ids, mask = map(np.asarray, replay)
    sample = np.asarray(batch_plan.assignment.sample).reshape(len(batch_plan.assignment.sample), -1)
    nodes = topology.visited.num_nodes
    # A bit for each node: the nodes of a token are the union of those of its experts.
    reach = np.packbits(_reach(batch_plan.layer_plans(), topology), axis=-1, bitorder="little")
    visits = np.zeros((*reach.shape[:3], nodes), np.int32)
    room, local = sample.shape[1] // topology.num_ranks, topology.ranks_per_node
    for micro_batch, place in np.argwhere(sample != EMPTY):
        number, rank = sample[micro_batch, place], place // room
        position = np.flatnonzero(mask[number])
        routes = ids[number, position]
        parts = [(rank, routes)]
        if striped:
            first = rank // local * local
            parts = [(first + turn, routes[position % local == turn]) for turn in range(local)]
        for source, tokens in parts:
            for layer, to_nodes in enumerate(reach[micro_batch, :, source]):
                union = np.bitwise_or.reduce(to_nodes[tokens[:, layer]], axis=1)
                bits = np.unpackbits(union, axis=-1, count=nodes, bitorder="little")
                visits[micro_batch, layer, source] += bits.sum(0, dtype=np.int32)
    return visits


def most_copies(batch_plan: BatchPlan, topology: Topology) -> Int[np.ndarray, "M L P V"]:
    """Bound the visits of `node_visits` from above: a rank sends no more tokens to a node than token copies."""
    return np.asarray(_copies_to_nodes(batch_plan.layer_plans(), topology)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=1)
def _reach(plans: LayerPlan, topology: Topology) -> Bool[jax.Array, "M L P E V"]:
    """Return whether each rank sends copies of each expert to each node."""

    visited = topology.visited

    def one_layer(plan: LayerPlan) -> Bool[jax.Array, "P E V"]:
        plan, node = plan.visited(topology), jnp.arange(visited.num_nodes)[:, None, None]
        expert = jnp.where(plan.slot_expert == EMPTY, topology.num_experts, plan.slot_expert)
        sends = source_quota(plan, visited) > 0
        reach = jnp.zeros((topology.num_ranks, topology.num_experts + 1, visited.num_nodes), bool)
        return reach.at[:, expert, node].max(sends)[:, :-1]

    return jax.lax.map(lambda layers: jax.lax.map(one_layer, layers), jax.tree.map(jnp.asarray, plans))


@functools.partial(jax.jit, static_argnums=1)
def _copies_to_nodes(plans: LayerPlan, topology: Topology) -> Int[jax.Array, "M L P V"]:
    def one_layer(plan: LayerPlan) -> Int[jax.Array, "P V"]:
        by_rank = pair_load(plan, topology).reshape(topology.num_ranks, topology.visited.num_nodes, -1)
        return by_rank.sum(-1, dtype=jnp.int32)

    return jax.lax.map(jax.vmap(one_layer), jax.tree.map(jnp.asarray, plans))


def _layer_visits(ids: Int[jax.Array, "P t K"], plan: LayerPlan, topology: Topology) -> Int[jax.Array, "P V"]:
    """Count the visits of one layer of one micro-batch."""
    if topology.num_nodes == 1:
        return _rank_visits(ids, plan, topology)
    nodes, experts = topology.num_nodes, topology.num_experts
    source = jnp.arange(topology.num_ranks) // topology.ranks_per_node
    expert = jnp.where(plan.slot_expert == EMPTY, experts, plan.slot_expert)
    holds = jnp.zeros((experts + 1, nodes), bool).at[expert, jnp.arange(nodes)[:, None, None]].set(True)

    def chosen_nodes(ids):
        sent = source_quota(plan, topology)
        serve = functools.partial(copy_nodes, slot_expert=plan.slot_expert, topology=topology)
        return jax.vmap(lambda ids, sent, node: serve(ids, sent=sent, node=node))(ids, sent, source)

    def only_nodes(ids):
        return jnp.where(ids == EMPTY, EMPTY, jnp.argmax(holds, axis=1).astype(jnp.int32)[ids])

    # If no expert has slots in two nodes, for example with replicas inside the node only, there is no choice to make.
    across = (holds[:experts].sum(1) > 1).any()
    return _count_distinct(jax.lax.cond(across, chosen_nodes, only_nodes, ids), nodes)


def _rank_visits(ids: Int[jax.Array, "P t K"], plan: LayerPlan, topology: Topology) -> Int[jax.Array, "P P"]:
    """Count the visits of ranks on a single node, where copies go to slots in the order of tokens."""

    def of_rank(ids: Int[jax.Array, "t K"], sent: Int[jax.Array, "N G S"]) -> Int[jax.Array, "t K"]:
        slot = copy_slots(ids, plan.slot_expert, sent, topology, 0, across_nodes=False)
        return jnp.where(slot == EMPTY, EMPTY, slot // topology.slots)

    return _count_distinct(jax.vmap(of_rank)(ids, source_quota(plan, topology)), topology.num_ranks)


def _count_distinct(served: Int[jax.Array, "P t K"], places: int) -> Int[jax.Array, "P places"]:
    """Count the tokens of each rank that some of their copies take to each place."""
    return jnp.stack([(served == n).any(-1).sum(-1, dtype=jnp.int32) for n in range(places)], axis=-1)
