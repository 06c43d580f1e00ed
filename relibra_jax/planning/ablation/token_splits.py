"""The two halves of replication alone, for the ablation: places blind to the split, and splits of given places.

ReLibra (arXiv 2605.08639) decides jointly where replicas live and how many tokens they compute, as does
`relibra_jax.planning.greedy_replication`; the halves show what each is worth. `replicate_with_even_split` and
`replicate_with_eplb_places` each give up one of them. They are made of rules for one domain of ranks: `place_heaviest`
chooses places by EPLB's rule, `split_evenly` and `split_tokens` divide tokens over places that are given.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.planning.greedy_replication import replicate_domain
from relibra_jax.planning.packing import add_copies, lightest_pack
from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.types import EMPTY, Array, Plan, Topology

SWEEPS = 16
"""Times that `split_tokens` goes over the replicas: then 0.01% above the linear program in the mean and 1.3% in the
worst of 800 domains; with 8, 0.07% and 6%."""

_MAX = np.int32(np.iinfo(np.int32).max)


def replicate_with_even_split(
    load: Int[Array, "M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
) -> Plan:
    """The replicas of `replicate_experts`, each expert's tokens split evenly over its copies.

    Args:
        load: token copies of each expert, summed over where they lie; below 2**31 in each layer.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        A Plan; unused replica slots and all resident slots are EMPTY.
    """

    def rule(load, _):
        replica, _ = replicate_domain(load, replica_slots=topology.replica_slots)
        return split_evenly(load, replica)

    load = jnp.asarray(load, jnp.int32)
    return plan_per_node(rule, load, load, home, topology)


def replicate_with_eplb_places(
    load: Int[Array, "M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
) -> Plan:
    """Replicas placed by EPLB's rule, which assumes an even split, and tokens split as well as the places allow.

    No domain is more imbalanced than it would be without replicas.

    Args:
        load: token copies of each expert, summed over where they lie; below 2**31 in each layer.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        A Plan; unused replica slots and all resident slots are EMPTY.
    """

    def rule(load, _):
        return split_tokens(load, place_heaviest(load, replica_slots=topology.replica_slots))

    load = jnp.asarray(load, jnp.int32)
    return plan_per_node(rule, load, load, home, topology)


def place_heaviest(load: Int[Array, "P H"], *, replica_slots: int) -> Int[jax.Array, "P R"]:
    """Replica places by EPLB's rule, blind to the split: copy what is heaviest per copy, pack evenly.

    A copy that meets another of its expert on a rank is left out.

    Args:
        load: token copies of each expert of the domain, by home slot.
        replica_slots: replica slots of a rank.

    Returns:
        The flat home slot of the expert in each replica slot, EMPTY for none, as from `replicate_domain`.
    """
    ranks, homes = load.shape
    item, _, count = add_copies(load.ravel(), ranks * replica_slots)
    share = load.ravel() / count
    rank, position = lightest_pack(share[item], share.reshape(ranks, homes).sum(1), room=replica_slots)
    replica = jnp.full((ranks, replica_slots), EMPTY, jnp.int32).at[rank, position].set(item)
    earlier = np.tri(replica_slots, k=-1, dtype=bool)
    again = ((replica[:, :, None] == replica[:, None, :]) & earlier[None]).any(-1)
    at_home = replica // homes == jnp.arange(ranks)[:, None]
    return jnp.where(again | at_home, EMPTY, replica)


def split_evenly(
    load: Int[Array, "P H"], replica: Int[Array, "P R"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Split each expert evenly over its copies; the home computes what is left over.

    Args:
        load: token copies of each expert of the domain, by home slot.
        replica: flat home slot of the expert in each replica slot, EMPTY for none.

    Returns:
        The replicas that compute something, and the quotas, as from `replicate_domain`.
    """
    copies = 1 + (replica[:, :, None] == jnp.arange(load.size)[None, None]).sum((0, 1), dtype=jnp.int32)
    return _by_slot(load, replica, (load.ravel() // copies)[replica])


def split_tokens(
    load: Int[Array, "P H"], replica: Int[Array, "P R"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Split tokens over given copies so that the largest rank load is nearly least.

    One expert after the other, its tokens are poured over the ranks that hold it, up to a common level, as if all
    other tokens lay still. Every step lowers the sum of squares of the rank loads, at whose minimum the largest
    is least too; the largest never rises.

    Args:
        load: token copies of each expert of the domain, by home slot.
        replica: flat home slot of the expert in each replica slot, no expert twice on a rank; EMPTY for none.

    Returns:
        The replicas that compute something, and the quotas, as from `replicate_domain`.
    """
    ranks, homes = load.shape
    rank = jnp.arange(ranks)

    def pour(carry, expert_tokens):
        rank_load, quota = carry
        expert, tokens = expert_tokens
        slot, home = replica == expert, rank == expert // homes
        computed = jnp.where(slot, quota, 0).sum(1, dtype=jnp.int32)
        below = rank_load - computed - jnp.where(home, tokens - computed.sum(dtype=jnp.int32), 0)
        poured = _pour(tokens, below, slot.any(1) | home)
        return (below + poured, jnp.where(slot, poured[:, None], quota)), None

    def sweep(carry, _):
        return jax.lax.scan(pour, carry, (replica.ravel(), expert_load.ravel()))

    expert_load = jnp.where(replica == EMPTY, 0, load.ravel()[replica])
    start = (load.sum(1, dtype=jnp.int32), jnp.zeros_like(replica))
    (_, quota), _ = jax.lax.scan(sweep, start, length=SWEEPS)
    return _by_slot(load, replica, quota)


def _pour(tokens: Int[Array, ""], below: Int[Array, " P"], held: Bool[Array, " P"]) -> Int[jax.Array, " P"]:
    """Tokens for each of the ranks ``held``, which are at ``below``, so that the highest is least."""
    under = held[None, :] & (below[None, :] <= below[:, None])
    # The level that the ranks up to p's height alone would reach; with more or fewer of them it is no lower.
    level = -(
        -(tokens + jnp.where(under, below[None, :], 0).sum(1, dtype=jnp.int32))
        // jnp.maximum(under.sum(1, dtype=jnp.int32), 1)
    )
    poured = jnp.where(held, jnp.maximum(jnp.where(held, level, _MAX).min() - below, 0), 0)
    wet = poured > 0
    return poured - (wet & (jnp.cumsum(wet, dtype=jnp.int32) <= poured.sum(dtype=jnp.int32) - tokens))


def _by_slot(
    load: Int[Array, "P H"], replica: Int[Array, "P R"], tokens: Int[Array, "P R"]
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Replicas with tokens, and all quotas: homes compute what the replicas of their experts do not."""
    tokens = jnp.where(replica == EMPTY, 0, tokens)
    given = jnp.zeros(load.size, jnp.int32).at[jnp.maximum(replica, 0)].add(tokens).reshape(load.shape)
    return jnp.where(tokens > 0, replica, EMPTY), jnp.concatenate([load - given, tokens], 1)
