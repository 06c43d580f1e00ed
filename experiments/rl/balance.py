"""The balance metrics of a batch: imbalance with and without the plan, crossings, replicas and residents."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments.rl.step import StepMetrics
from relibra_jax.contract.plan import contiguous_homes, rank_load, replica_experts, resident_experts
from relibra_jax.contract.types import EMPTY, Array, BatchPlan, Plan, Topology
from relibra_jax.nnx import PreparedBatch
from relibra_jax.planning.metrics import batch_imbalance, cross_node_load, replication_bound
from relibra_jax.planning.replication import without_replicas
from relibra_jax.routing.resident_push import push_counts


def measure_batch(
    batches: Sequence[PreparedBatch], metrics: StepMetrics, num_tokens: int, *, live: bool
) -> dict[str, Any]:
    """Measure the plan of a batch, for its line of metrics.

    Args:
        batches: the prepared updates of the batch, all of one shape, as `Balancer.prepare_stages` returned them.
        metrics: the metrics that the updates of the last pass returned.
        num_tokens: the number of tokens in the batch.
        live: whether the updates routed live, without replay.

    Returns:
        The metrics ``balance/...``, ``buffers/...`` and ``routing/...``.
    """
    batch_plan, parallel = _join_plans(batches), batches[0].parallel
    imbalance = measure_imbalance(
        batch_plan, metrics.load, topology=parallel.topology, across_nodes=bool(parallel.across_nodes)
    )
    changed = np.asarray(metrics.routing_changed).sum(0)
    choices = np.asarray(batch_plan.load).sum((0, 2, 3, 4))
    return {
        **{name: np.asarray(value).tolist() for name, value in imbalance.items()},
        **({} if live else {"balance/imbalance_live": None}),
        **measure_copies(batches, batch_plan, num_tokens),
        **measure_push(batch_plan.plan, parallel.topology),
        "routing/changed_share": float(changed.sum() / choices.sum()),
        "routing/changed_share_by_layer": (changed / choices).tolist(),
    }


@functools.partial(jax.jit, static_argnames=("topology", "across_nodes"))
def measure_imbalance(
    batch_plan: BatchPlan, ran_load: Int[Array, "M L N G E"], *, topology: Topology, across_nodes: bool
) -> dict[str, Float[jax.Array, "..."]]:
    """Compute the imbalances of a batch, each the max / mean of rank load.

    Args:
        batch_plan: the plan of the batch.
        ran_load: the load that the update counted as it ran.
        topology: the expert-parallel group of the plan.
        across_nodes: whether replicas may be on different nodes than the homes of their experts.

    Returns:
        The metrics ``balance/imbalance...`` and ``balance/..._by_rank``. ``balance/imbalance_live`` is the imbalance of
        ``ran_load`` with all experts at home.
    """
    _, load, plan = batch_plan
    in_order = contiguous_homes(topology, len(plan.home))
    planned, static = rank_load(plan), _load_at_home(load, in_order, topology)
    bound = replication_bound(load, plan.home, topology, across_nodes=across_nodes).sum(0)
    each = jax.vmap(lambda by_rank: batch_imbalance(by_rank[None]))
    by_layer = jax.vmap(lambda by_rank: batch_imbalance(by_rank[:, None]), in_axes=1)
    return {
        "balance/imbalance": batch_imbalance(planned),
        "balance/imbalance_static": batch_imbalance(static),
        "balance/imbalance_bound": (bound / planned.mean((2, 3)).sum(0)).mean(),
        "balance/imbalance_live": batch_imbalance(_load_at_home(ran_load, plan.home, topology)),
        "balance/imbalance_by_micro_batch": each(planned),
        "balance/imbalance_static_by_micro_batch": each(static),
        "balance/imbalance_by_layer": by_layer(planned),
        "balance/imbalance_static_by_layer": by_layer(static),
        "balance/load_by_rank": planned.sum((0, 1)).ravel(),
        "balance/busy_by_rank": (planned.sum((0, 1)) / jnp.maximum(planned.max((2, 3)).sum(), 1)).ravel(),
    }


def measure_copies(
    batches: Sequence[PreparedBatch], batch_plan: BatchPlan, num_tokens: int
) -> dict[str, float]:
    """Count crossings per token and layer, replicas and residents, and measure how full the buffers are.

    Args:
        batches: the prepared updates of the batch, all of one shape, as `Balancer.prepare_stages` returned them.
        batch_plan: the plans of all updates, joined along the micro-batches.
        num_tokens: the number of tokens in the batch.

    Returns:
        The metrics ``balance/crossings_per_token``, ``balance/replicas``, ``balance/residents`` and ``buffers/fill``.
    """
    parallel = batches[0].parallel
    plan = jax.tree.map(np.asarray, batch_plan.plan)
    topology, (micro_batches, layers) = parallel.topology, plan.quota.shape[:2]
    assert parallel.capacities is not None, "a replayed batch has counted capacities"
    replicas = (replica_experts(plan, topology) != EMPTY).sum()
    residents = (resident_experts(plan, topology) != EMPTY).sum()
    return {
        "balance/crossings_per_token": sum(map(_crossings, batches)) / max(num_tokens * layers, 1),
        "balance/replicas": float(replicas / (micro_batches * layers)),
        "balance/residents": float(residents / layers),
        "buffers/fill": float(rank_load(plan).max() / parallel.capacities.rows),
    }


def _crossings(batch: PreparedBatch) -> int:
    """Count the crossings of all layers at dispatch: tokens on the hierarchical path, token copies on the flat one."""
    if batch.visits is None:
        return int(np.asarray(cross_node_load(batch.batch_plan.layer_plans())).sum(dtype=np.int64))
    topology = batch.parallel.topology
    other_node = ~np.repeat(np.eye(topology.num_nodes, dtype=bool), topology.ranks_per_node, 0)
    return int(np.where(other_node, batch.visits, 0).sum(dtype=np.int64))


def measure_push(plan: Plan, topology: Topology) -> dict[str, float]:
    """Count the experts that one push of the batch's residents transfers, in all layers together.

    Args:
        plan: the plan of the batch.
        topology: the expert-parallel group of the plan.

    Returns:
        ``balance/pushed_by_busiest_rank``, the experts that the busiest rank sends, each of them once; and
        ``balance/pushed_across_by_busiest_rank``, the experts that one rank's share of the busiest node's link carries
        to other nodes. Both are 0 without residents.
    """
    exports, pairs = push_counts(plan.home, resident_experts(plan, topology), topology)
    crossing = np.asarray(pairs) * ~np.eye(topology.num_nodes, dtype=bool)
    return {
        "balance/pushed_by_busiest_rank": float(exports.max()),
        "balance/pushed_across_by_busiest_rank": float(crossing.sum(1).max() / topology.ranks_per_node),
    }


@jax.jit
def planned_imbalance(plan: Plan) -> Float[jax.Array, ""]:
    """Compute the imbalance of a plan over all its micro-batches."""
    return batch_imbalance(rank_load(plan))


@functools.partial(jax.jit, static_argnames="topology")
def unplanned_imbalance(
    load: Int[Array, "M L N G E"], home: Int[Array, "L E"], *, topology: Topology
) -> Float[jax.Array, ""]:
    """Compute the imbalance of a load over all its micro-batches, with all experts at home."""
    return batch_imbalance(_load_at_home(load, home, topology))


def _load_at_home(load: Array, home: Array, topology: Topology) -> Int[Array, "M L N G"]:
    """Compute the load of every rank with all experts at home."""
    return rank_load(without_replicas(jnp.asarray(load).sum((2, 3), dtype=jnp.int32), home, topology))


def _join_plans(batches: Sequence[PreparedBatch]) -> BatchPlan:
    """Join the plans of stages of one shape and the same homes along their micro-batches, on the host."""
    plans = [jax.device_get(batch.batch_plan) for batch in batches]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *plans)
    return joined._replace(plan=joined.plan._replace(home=plans[0].plan.home))
