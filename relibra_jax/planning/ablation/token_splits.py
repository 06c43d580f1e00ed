"""Replication that optimises only the places of replicas or only the token split, for the ablation.

ReLibra (arXiv 2605.08639) decides jointly where replicas are and how many tokens they compute, as does
`relibra_jax.planning.greedy_replication`. `replicate_with_even_split`, `replicate_with_fixed_places` and
`relibra_jax.planning.heaviest_replicas.replicate_heaviest` each simplify one of these decisions, which measures its
value.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import Array, Plan, Topology
from relibra_jax.planning.greedy_replication import replicate_domain
from relibra_jax.planning.heaviest_replicas import place_heaviest, quotas_by_slot, split_tokens
from relibra_jax.planning.per_node import plan_per_node


def replicate_with_even_split(request: PlanRequest, placement: Placement, topology: Topology) -> Plan:
    """Choose replicas as `replicate_experts` does, but split each expert's tokens evenly over its copies.

    This function is a `relibra_jax.contract.planner.Replicate`. All resident slots stay EMPTY.
    """

    def rule(load, _):
        replica, _ = replicate_domain(load, replica_slots=topology.replica_slots)
        return split_evenly(load, replica)

    return plan_per_node(rule, request.by_expert, request.by_expert, placement.home, topology)


def replicate_with_fixed_places(request: PlanRequest, placement: Placement, topology: Topology) -> Plan:
    """Place replicas once a batch by EPLB's rule, and split the tokens of each micro-batch as well as they allow.

    No domain is more imbalanced than it would be without replicas.

    This function is a `relibra_jax.contract.planner.Replicate`. All resident slots stay EMPTY.
    """

    def rule(load, expected):
        return split_tokens(load, place_heaviest(expected, replica_slots=topology.replica_slots))

    load = request.by_expert
    batch_load = load.astype(jnp.float32).sum(0, keepdims=True)  # a sum over a batch may exceed int32
    return plan_per_node(rule, load, batch_load, placement.home, topology)


def split_evenly(
    load: Int[Array, "P H"], replica: Int[Array, "P R"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Split each expert evenly over its copies; the home computes the remainder.

    Args:
        load: the number of token copies for each expert of the domain, by home slot.
        replica: flat home slot of the expert in each replica slot, EMPTY for none.

    Returns:
        The replicas that have tokens, and the quotas, as `replicate_domain` returns them.
    """
    copies = 1 + (replica[:, :, None] == jnp.arange(load.size)[None, None]).sum((0, 1), dtype=jnp.int32)
    return quotas_by_slot(load, replica, (load.ravel() // copies)[replica])
