"""Exact counts of the tokens that cross between nodes under hierarchical dispatch, from the replayed routes.

Under hierarchical dispatch a token crosses to a node once, however many of its experts are there. The number of
crossings does not follow from loads, but from the recorded route of each token.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, BatchPlan, LayerPlan, RoutingReplay, Topology
from relibra_jax.routing.slots import copy_nodes
from relibra_jax.routing.split import source_quota
from relibra_jax.routing.striping import stripe_tokens
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
@functools.partial(jax.jit, static_argnames=("topology", "striped"))
def node_visits(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology, *, striped: bool = False
) -> Int[jax.Array, "M L P N"]:
    """Count the distinct tokens that each source rank sends to each node.

    The count follows the same rule as dispatch: `relibra_jax.routing.split.source_quota` gives the number of copies of
    an expert that go to each slot, and `relibra_jax.routing.slots.copy_nodes` selects them. The function works under
    jit, and goes layer by layer, so that it needs little more memory than the routes of one micro-batch.

    Args:
        replay: the routing of the samples of the batch.
        batch_plan: the plan that was made for the replay.
        topology: the expert-parallel group.
        striped: whether layers are striped, and the load of the plan as well (`relibra_jax.routing.striping`).

    Returns:
        int32 tokens for every micro-batch, layer, flat source rank and node. The entry of the source's own node counts
        the tokens that do not cross.
    """
    ids, mask = jnp.asarray(replay.expert_ids), jnp.asarray(replay.mask)

    def one_micro_batch(inputs):
        sample, plans = inputs
        sample = sample.reshape(topology.num_ranks, -1)
        real_token, routes = mask[sample] & (sample != EMPTY)[..., None], jnp.moveaxis(ids[sample], 3, 0)

        def one_layer(inputs):
            routes, plan = inputs
            routes = jnp.where(real_token[..., None], routes.astype(jnp.int32), EMPTY)
            if striped:
                routes = stripe_tokens(routes, topology, padding=EMPTY)
            return _layer_visits(routes.reshape(len(routes), -1, routes.shape[-1]), plan, topology)

        return jax.lax.map(one_layer, (routes, plans))

    plans = jax.tree.map(jnp.asarray, batch_plan.layer_plans())
    return jax.lax.map(one_micro_batch, (jnp.asarray(batch_plan.assignment.sample), plans))


def _layer_visits(ids: Int[jax.Array, "P t K"], plan: LayerPlan, topology: Topology) -> Int[jax.Array, "P N"]:
    """Count the visits of one layer of one micro-batch."""
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
    served = jax.lax.cond(across, chosen_nodes, only_nodes, ids)
    return jnp.stack([(served == n).any(-1).sum(-1, dtype=jnp.int32) for n in range(nodes)], axis=-1)
