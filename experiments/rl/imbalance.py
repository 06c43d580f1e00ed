"""Imbalance of a batch as runs report it: under its plan, and beside it what the same loads would have been."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.plan import contiguous_homes, rank_load, resident_experts
from relibra_jax.planning.metrics import batch_imbalance, replication_bound
from relibra_jax.planning.replication import without_replicas
from relibra_jax.resident_push import push_counts
from relibra_jax.types import Array, BatchPlan, Plan, Topology


@functools.partial(jax.jit, static_argnames=("topology", "across_nodes"))
def measure_imbalance(
    batch_plan: BatchPlan, ran_load: Int[Array, "M L N G E"], *, topology: Topology, across_nodes: bool
) -> dict[str, Float[jax.Array, "..."]]:
    """The imbalances of a batch, max / mean of rank load.

    Args:
        batch_plan: the plan of the batch.
        ran_load: the load that the update ran.
        topology: the expert-parallel group of the plan.
        across_nodes: whether replicas may be on other nodes than their experts' homes.

    Returns:
        ``imbalance`` under the plan and ``imbalance_static`` under static placement, over the batch and, named
        ``..._by_micro_batch``, of each; ``imbalance_bound``, what any replication could reach with the plan's homes;
        ``imbalance_live`` of ``ran_load`` with all experts at home.
    """
    _, load, plan = batch_plan
    in_order = contiguous_homes(topology, len(plan.home))

    def at_home(load, home):
        return rank_load(without_replicas(load.sum((2, 3), dtype=jnp.int32), home, topology))

    planned, static = rank_load(plan), at_home(load, in_order)
    bound = replication_bound(load, plan.home, topology, across_nodes=across_nodes).sum(0)
    each = jax.vmap(lambda by_rank: batch_imbalance(by_rank[None]))
    return {
        "imbalance": batch_imbalance(planned),
        "imbalance_static": batch_imbalance(static),
        "imbalance_bound": (bound / planned.mean((2, 3)).sum(0)).mean(),
        "imbalance_live": batch_imbalance(at_home(ran_load, plan.home)),
        "imbalance_by_micro_batch": each(planned),
        "imbalance_static_by_micro_batch": each(static),
    }


def measure_push(plan: Plan, topology: Topology) -> dict[str, float]:
    """What a push of the batch's residents takes, in experts of all layers together; nothing without resident slots.

    Returns:
        ``pushed_by_busiest_rank``, experts that one rank gives away, each of which leaves it once; and
        ``crossing_by_busiest_rank``, those that one rank's share of its node's link carries to other nodes.
    """
    if not topology.resident_slots:
        return {}
    exports, pairs = push_counts(plan.home, resident_experts(plan, topology), topology)
    crossing = np.asarray(pairs) * ~np.eye(topology.num_nodes, dtype=bool)
    return {
        "pushed_by_busiest_rank": float(exports.max()),
        "crossing_by_busiest_rank": float(crossing.sum(1).max() / topology.ranks_per_node),
    }
