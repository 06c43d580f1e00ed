"""Metrics of plans: imbalance, forecast error, bounds on replication, traffic between nodes, and moved experts.

Imbalance is max / mean of rank load. Over several micro-batches it is the sum of maxima over the sum of means, because
every micro-batch waits for its own slowest rank. Sums over a batch are taken in float32; no decision depends on its
error of 1 part in 10^7.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from relibra_jax.contract.plan import expert_totals, home_layout, node_quota
from relibra_jax.contract.types import Array, LayerPlan, Topology
from relibra_jax.planning.greedy_replication import least_top_load
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def imbalance(rank_load: Int[Array, "M L N G"]) -> Float[jax.Array, "M L"]:
    """Return max / mean of rank load in each layer of each micro-batch; 1 where there is no load.

    Args:
        rank_load: the number of token copies that each rank computes.

    Returns:
        The imbalance of each layer and micro-batch, float32.

    >>> imbalance(jnp.array([[[[30, 10]]]])).tolist()
    [[1.5]]
    """
    top, mean = _top_and_mean(rank_load)
    return jnp.where(mean > 0, top / jnp.where(mean > 0, mean, 1), 1)


@checks_arguments
def batch_imbalance(rank_load: Int[Array, "M L N G"]) -> Float[jax.Array, ""]:
    """Return the imbalance of a batch: a layer's sum of maxima over its sum of means, averaged over layers.

    Layers without load count as balanced.

    Args:
        rank_load: the number of token copies that each rank computes.

    Returns:
        The imbalance of the batch, a float32 scalar.

    >>> round(float(batch_imbalance(jnp.array([[[[30, 10]]], [[[5, 5]]]]))), 3)
    1.4
    """
    top, mean = (per_layer.sum(0) for per_layer in _top_and_mean(rank_load))
    return jnp.where(mean > 0, top / jnp.where(mean > 0, mean, 1), 1).mean()


def _top_and_mean(rank_load):
    rank_load = jnp.asarray(rank_load, jnp.float32)
    return rank_load.max((-2, -1)), rank_load.mean((-2, -1))


def forecast_error(expected: Num[Array, "#M L E"], load: Int[Array, "M L E"]) -> Float[jax.Array, "M L"]:
    """Return the error of forecast loads, by the measure of MoE-GPS (arXiv 2506.07366).

    With p the share of an expert in the load of its layer and q the expected share, ``|q - p| / (1 / E)`` is averaged
    over the E experts. It is between 0 and 2.

    Args:
        expected: the expected loads, of which only the proportions count. A layer of zeros stands for equal loads. A
            single row applies to all micro-batches.
        load: the true loads of the experts.

    Returns:
        The error in each layer of each micro-batch, float32; 0 where there is no load.

    >>> forecast_error(jnp.array([[[1.0, 1.0]]]), jnp.array([[[30, 10]]])).tolist()
    [[0.5]]
    """
    total = jnp.asarray(load, jnp.float32).sum(-1, keepdims=True)
    share = load / jnp.maximum(total, 1)
    expected = jnp.asarray(expected, jnp.float32)
    expected_total = expected.sum(-1, keepdims=True)
    expected_share = jnp.where(
        expected_total > 0, expected / jnp.where(expected_total > 0, expected_total, 1), 1 / load.shape[-1]
    )
    return jnp.where(total[..., 0] > 0, jnp.abs(expected_share - share).sum(-1), 0)


@functools.partial(jax.jit, static_argnames=("topology", "across_nodes"))
def replication_bound(
    load: Int[Array, "M L N G E"], home: Int[Array, "L E"], topology: Topology, *, across_nodes: bool = False
) -> Int[jax.Array, "M L"]:
    """Return a lower bound of the maximum rank load that any replication can reach for given homes.

    Replicas that stay in their node cannot take load out of it, so no plan is below the mean of the fullest node. Nor
    can a rank take over more load than its slots hold (`relibra_jax.planning.greedy_replication.least_top_load`).
    Residents may be on any node, and replicas may be on nodes with a resident, so with resident slots all ranks are one
    domain, and the bound is looser.

    Args:
        load: the number of token copies for each expert, by the rank that holds them.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        across_nodes: whether replicas may be on any node.

    Returns:
        The bound in each layer of each micro-batch, in token copies.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=1)
    >>> load = jnp.array([[[[[70, 30]], [[0, 0]]]]])
    >>> replication_bound(load, jnp.array([[0, 1]]), topology).tolist()
    [[70]]
    """
    domains = 1 if across_nodes or topology.resident_slots else topology.num_nodes
    layout = home_layout(home, topology).reshape(home.shape[0], domains, -1, topology.home_slots)
    in_domain = functools.partial(least_top_load, replica_slots=topology.slots - topology.home_slots)

    def one_layer(load, layout):
        return jax.vmap(in_domain)(load[layout]).max()

    return jax.vmap(jax.vmap(one_layer), (0, None))(expert_totals(load), layout)


@jax.jit
def cross_node_load(layer_plans: LayerPlan) -> Int[jax.Array, "M L"]:
    """Count the token copies that dispatch sends to another node; combine brings the same number back.

    Dispatch keeps a token copy in its node as long as the node has quota left for its expert.

    Args:
        layer_plans: the layer plans of a batch, ``batch_plan.layer_plans()``, stacked ``[M, L]``, with their loads.

    Returns:
        The number of token copies that cross in each layer of each micro-batch.
    """

    def one_layer(plan: LayerPlan) -> jax.Array:
        return jnp.maximum(jnp.asarray(plan.load).sum(1) - node_quota(plan), 0).sum()

    return jax.vmap(jax.vmap(one_layer))(jax.tree.map(jnp.asarray, layer_plans))


@checks_arguments
def moved_experts(
    home: Int[Array, "... E"], previous_home: Int[Array, "... E"], *, home_slots: int
) -> Int[jax.Array, "..."]:
    """Count the experts whose home is on a different rank than before, which a reorder has to send.

    Args:
        home: flat home slot of each expert.
        previous_home: flat home slot of each expert before the reorder.
        home_slots: H, the number of home slots of a rank.

    Returns:
        The number of experts that move.

    >>> moved_experts(jnp.array([0, 1, 2, 3]), jnp.array([1, 2, 0, 3]), home_slots=2).tolist()
    2
    """
    old_rank, new_rank = jnp.asarray(previous_home) // home_slots, jnp.asarray(home) // home_slots
    return (old_rank != new_rank).sum(-1)
