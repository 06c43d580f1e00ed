"""How often tokens cross between nodes, counted token by token from the replayed ids.

On the hierarchical path a token crosses to a node once, however many of its experts are there. Loads cannot say how
often that is; the recorded routes can.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.copy_slots import copy_nodes
from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, BatchPlan, LayerPlan, RoutingReplay, Topology


@functools.partial(jax.jit, static_argnames="topology")
def node_visits(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology
) -> Int[jax.Array, "M L P N"]:
    """Distinct tokens that each source rank sends to each node.

    Counted exactly, by the rule that dispatch follows: `relibra_jax.token_split.source_quota` says how many copies of
    an expert go where, `relibra_jax.copy_slots.copy_nodes` which. It goes layer by layer, so that it needs little more
    memory than the routes of one micro-batch, and works under jit.

    Args:
        replay: the routing of the batch's samples.
        batch_plan: the plan that was made for it.
        topology: the expert-parallel group.

    Returns:
        int32, tokens; the entry of the source's own node counts tokens that stay.
    """
    ids, mask = jnp.asarray(replay.expert_ids), jnp.asarray(replay.mask)

    def one_micro_batch(inputs):
        sample, plans = inputs
        sample = sample.reshape(topology.num_ranks, -1)
        held = (mask[sample] & (sample != EMPTY)[..., None]).reshape(topology.num_ranks, -1)
        routes = jnp.moveaxis(ids[sample].reshape(*held.shape, *ids.shape[2:]), 2, 0)

        def one_layer(inputs):
            routes, plan = inputs
            return _layer_visits(jnp.where(held[..., None], routes.astype(jnp.int32), EMPTY), plan, topology)

        return jax.lax.map(one_layer, (routes, plans))

    plans = jax.tree.map(jnp.asarray, batch_plan.layer_plans())
    return jax.lax.map(one_micro_batch, (jnp.asarray(batch_plan.assignment.sample), plans))


def _layer_visits(ids: Int[jax.Array, "P t K"], plan: LayerPlan, topology: Topology) -> Int[jax.Array, "P N"]:
    """The visits of one layer of one micro-batch."""
    nodes, experts = topology.num_nodes, topology.num_experts
    source = jnp.arange(topology.num_ranks) // topology.ranks_per_node
    expert = jnp.where(plan.slot_expert == EMPTY, experts, plan.slot_expert)
    holds = jnp.zeros((experts + 1, nodes), bool).at[expert, jnp.arange(nodes)[:, None, None]].set(True)

    def chosen(ids):
        sent = source_quota(plan, topology)
        serve = functools.partial(copy_nodes, slot_expert=plan.slot_expert, topology=topology)
        return jax.vmap(lambda ids, sent, node: serve(ids, sent=sent, node=node))(ids, sent, source)

    def given(ids):
        return jnp.where(ids == EMPTY, EMPTY, jnp.argmax(holds, axis=1).astype(jnp.int32)[ids])

    # Where no expert has slots in two nodes, as with replicas that stay in theirs, there is nothing to choose.
    across = (holds[:experts].sum(1) > 1).any()
    served = jax.lax.cond(across, chosen, given, ids)
    return jnp.stack([(served == n).any(-1).sum(-1, dtype=jnp.int32) for n in range(nodes)], axis=-1)
