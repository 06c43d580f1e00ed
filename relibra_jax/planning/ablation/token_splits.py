"""Replication that optimises only the places of replicas or only the token split, for the ablation.

ReLibra (arXiv 2605.08639) decides jointly where replicas are and how many tokens they compute, as does
`relibra_jax.planning.greedy_replication`. `replicate_with_even_split`, `replicate_with_eplb_places` and
`replicate_with_fixed_places` each simplify one of these decisions, which measures its value. Three rules for one
domain of ranks make them up: `place_heaviest` chooses places by EPLB's rule, and `split_evenly` and `split_tokens`
divide tokens over given places.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Num

from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.planning.greedy_replication import replicate_domain
from relibra_jax.planning.packing import add_copies, lightest_pack
from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.support.limits import INT32_MAX

SWEEPS = 16
"""The number of times that `split_tokens` goes over the replicas. On 800 domains the result is 0.01% above the linear
program in the mean and 1.3% in the worst case; with 8 sweeps 0.07% and 6%."""


def replicate_with_even_split(request: PlanRequest, placement: Placement, topology: Topology) -> Plan:
    """Choose replicas as `replicate_experts` does, but split each expert's tokens evenly over its copies.

    This function is a `relibra_jax.contract.planner.Replicate`. All resident slots stay EMPTY.
    """

    def rule(load, _):
        replica, _ = replicate_domain(load, replica_slots=topology.replica_slots)
        return split_evenly(load, replica)

    return plan_per_node(rule, request.by_expert, request.by_expert, placement.home, topology)


def replicate_with_eplb_places(request: PlanRequest, placement: Placement, topology: Topology) -> Plan:
    """Place replicas by EPLB's rule, which assumes an even split, and split tokens as well as the places allow.

    No domain is more imbalanced than it would be without replicas.

    This function is a `relibra_jax.contract.planner.Replicate`. All resident slots stay EMPTY.
    """

    def rule(load, _):
        return split_tokens(load, place_heaviest(load, replica_slots=topology.replica_slots))

    return plan_per_node(rule, request.by_expert, request.by_expert, placement.home, topology)


def replicate_with_fixed_places(request: PlanRequest, placement: Placement, topology: Topology) -> Plan:
    """Place replicas once for all micro-batches of a request by EPLB's rule, and split tokens as well as they allow.

    No domain is more imbalanced than it would be without replicas.

    This function is a `relibra_jax.contract.planner.Replicate`. All resident slots stay EMPTY.
    """

    def rule(load, expected):
        return split_tokens(load, place_heaviest(expected, replica_slots=topology.replica_slots))

    load = request.by_expert
    batch_load = load.astype(jnp.float32).sum(0, keepdims=True)  # a sum over a batch may exceed int32
    return plan_per_node(rule, load, batch_load, placement.home, topology)


def place_heaviest(load: Num[Array, "P H"], *, replica_slots: int) -> Int[jax.Array, "P R"]:
    """Choose replica places by EPLB's rule, assuming an even split: copy the heaviest expert per copy, pack evenly.

    A second copy of an expert on the same rank is left out.

    Args:
        load: the load of each expert of the domain, by home slot.
        replica_slots: R, the number of replica slots of a rank.

    Returns:
        The flat home slot of the expert in each replica slot, EMPTY for none, as `replicate_domain` returns it.
    """
    ranks, homes = load.shape
    item, _, count = add_copies(load.ravel(), ranks * replica_slots)
    share = load.ravel() / count
    rank, position = lightest_pack(share[item], share.reshape(ranks, homes).sum(1), capacity=replica_slots)
    replica = jnp.full((ranks, replica_slots), EMPTY, jnp.int32).at[rank, position].set(item)
    earlier = np.tri(replica_slots, k=-1, dtype=bool)
    repeated = ((replica[:, :, None] == replica[:, None, :]) & earlier[None]).any(-1)
    at_home = replica // homes == jnp.arange(ranks)[:, None]
    return jnp.where(repeated | at_home, EMPTY, replica)


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
    return _by_slot(load, replica, (load.ravel() // copies)[replica])


def split_tokens(
    load: Int[Array, "P H"], replica: Int[Array, "P R"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Split tokens over given copies so that the largest rank load is nearly minimal.

    One expert after the other, the tokens of the expert are distributed over the ranks that hold it, up to a common
    level, while all other tokens stay. Every step lowers the sum of squares of the rank loads. At its minimum the
    largest rank load is minimal too, and the largest rank load never rises.

    Args:
        load: the number of token copies for each expert of the domain, by home slot.
        replica: flat home slot of the expert in each replica slot, no expert twice on a rank; EMPTY for none.

    Returns:
        The replicas that have tokens, and the quotas, as `replicate_domain` returns them.
    """
    ranks, homes = load.shape
    rank = jnp.arange(ranks)

    def redistribute(carry, expert_tokens):
        rank_load, quota = carry
        expert, tokens = expert_tokens
        is_slot, is_home = replica == expert, rank == expert // homes
        computed = jnp.where(is_slot, quota, 0).sum(1, dtype=jnp.int32)
        below = rank_load - computed - jnp.where(is_home, tokens - computed.sum(dtype=jnp.int32), 0)
        tokens_of_ranks = _fill_to_level(tokens, below, is_slot.any(1) | is_home)
        return (below + tokens_of_ranks, jnp.where(is_slot, tokens_of_ranks[:, None], quota)), None

    def sweep(carry, _):
        return jax.lax.scan(redistribute, carry, (replica.ravel(), expert_load.ravel()))

    expert_load = jnp.where(replica == EMPTY, 0, load.ravel()[replica])
    start = (load.sum(1, dtype=jnp.int32), jnp.zeros_like(replica))
    (_, quota), _ = jax.lax.scan(sweep, start, length=SWEEPS)
    return _by_slot(load, replica, quota)


def _fill_to_level(
    tokens: Int[Array, ""], below: Int[Array, " P"], holds: Bool[Array, " P"]
) -> Int[jax.Array, " P"]:
    """Distribute tokens over the ranks in ``holds``, with loads ``below``, so that the largest load is minimal."""
    at_most = holds[None, :] & (below[None, :] <= below[:, None])
    # The level if only the ranks that are not above p take tokens. The smallest of these levels is the solution.
    level = -(
        -(tokens + jnp.where(at_most, below[None, :], 0).sum(1, dtype=jnp.int32))
        // jnp.maximum(at_most.sum(1, dtype=jnp.int32), 1)
    )
    tokens_of_ranks = jnp.where(holds, jnp.maximum(jnp.where(holds, level, INT32_MAX).min() - below, 0), 0)
    receives = tokens_of_ranks > 0
    return tokens_of_ranks - (
        receives & (jnp.cumsum(receives, dtype=jnp.int32) <= tokens_of_ranks.sum(dtype=jnp.int32) - tokens)
    )


def _by_slot(
    load: Int[Array, "P H"], replica: Int[Array, "P R"], tokens: Int[Array, "P R"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Return the replicas with tokens, and all quotas; homes compute the tokens that no replica computes."""
    tokens = jnp.where(replica == EMPTY, 0, tokens)
    moved_tokens = jnp.zeros(load.size, jnp.int32).at[jnp.maximum(replica, 0)].add(tokens).reshape(load.shape)
    return jnp.where(tokens > 0, replica, EMPTY), jnp.concatenate([load - moved_tokens, tokens], 1)
