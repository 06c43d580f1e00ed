"""An estimate of the token copies that ranks send to each other, in a fraction of the time of the exact count.

`relibra_jax.routing.split.pair_load` matches the copies of every expert with its slots one by one. Here the ranks that
have copies share each slot in proportion, which is nearly what the exact rule does, because it lays out the copies of
all ranks in turn. The search for a plan prices every layer and micro-batch of many plans by it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from relibra_jax.contract.types import EMPTY, LayerPlan, Topology


@functools.partial(jax.jit, static_argnames="topology")
def even_pairs(plans: LayerPlan, topology: Topology) -> Float[jax.Array, "M L N G N G"]:
    """Estimate the token copies that each rank sends to each rank.

    Args:
        plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``.
        topology: the expert-parallel group.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[[[0, -1], [1, 0]]]]]), jnp.array([[[[[6, 0], [4, 4]]]]])
    >>> load = jnp.array([[[[[5, 2], [5, 2]]]]])
    >>> plans = LayerPlan(slots, jnp.array([[[0, 1]]]), quota, load)
    >>> even_pairs(plans, topology)[0, 0, 0, :, 0].tolist()
    [[5.0, 2.0], [1.0, 6.0]]
    """
    nodes, local, experts = topology.num_nodes, topology.ranks_per_node, topology.num_experts
    slot_expert, quota = jnp.asarray(plans.slot_expert), jnp.asarray(plans.quota, jnp.float32)
    stack = slot_expert.shape[:2]
    shape = (*stack, topology.num_ranks, experts)
    supply = jnp.asarray(plans.load, jnp.float32).reshape(shape)
    place = tuple(axis[..., None] for axis in jnp.ogrid[: stack[0], : stack[1], : topology.num_ranks])
    expert = jnp.where(slot_expert == EMPTY, experts, slot_expert).reshape(*shape[:3], -1)
    demand = jnp.zeros(shape, jnp.float32).at[(*place, expert)].add(quota.reshape(expert.shape), mode="drop")
    own = jnp.minimum(supply, demand)
    supply, demand = supply - own, demand - own
    same_rank = np.eye(topology.num_ranks, dtype=np.float32).reshape(nodes, local, nodes, local)
    same_node = np.eye(nodes, dtype=np.float32)[:, None, :, None]
    pairs = own.sum(-1).reshape(*stack, nodes, local, 1, 1) * same_rank[None, None]
    for domains in (nodes, 1)[: 1 + (nodes > 1)]:
        given, taken = (each.reshape(*stack, domains, -1, experts) for each in (supply, demand))
        offered, wanted = given.sum(3, keepdims=True), taken.sum(3, keepdims=True)
        matched = jnp.minimum(offered, wanted)
        from_rank = given * (matched / jnp.maximum(offered, 1e-9))
        to_rank = taken * (matched / jnp.maximum(wanted, 1e-9))
        flow = jnp.einsum(
            "mldpe,mldqe->mldpq",
            from_rank / jnp.maximum(matched, 1e-9),
            to_rank,
            precision=jax.lax.Precision.HIGHEST,
        )
        if domains == nodes:
            pairs = pairs + flow[:, :, :, :, None] * same_node[None, None]
        else:
            pairs = pairs + flow.reshape(pairs.shape)
        supply, demand = (
            (each - part).reshape(shape) for each, part in ((given, from_rank), (taken, to_rank))
        )
    return pairs
