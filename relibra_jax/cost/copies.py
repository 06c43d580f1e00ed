"""Modelled seconds of the transfers of experts as they run: replicas, residents, and experts that change home.

What is transferred, and when:

    replicas   bfloat16 weights, for each layer and micro-batch, in the forward and again in the backward pass; then
               their gradients, also in bfloat16. The source is the home, or a resident of the same node
               (`relibra_jax.contract.plan.copy_source`). A ragged fetch sends these experts. A padded one sends as many
               exports from every rank as the rank with the most has, in pieces, and then R experts to each rank
               (`relibra_jax.execution.replicas`). Some or all of the weights may come from the host's memory at the
               same time (`relibra_jax.execution.host_replicas`): then the longer of both ways counts, and experts are
               kept there once an update
    residents  bfloat16 weights before an update, float32 gradients after it, on the route of
               `relibra_jax.routing.resident_push`: one hop inside the home's node, one between nodes, one inside the
               target's. Gradients take the same route back and are summed on the way
    homes      float32 master weights and two Adam moments, once per batch. Every expert that leaves its rank goes in
               pieces through all ranks, and as many experts leave every rank as leave the one with the most, rounded up
               to a power of two (`relibra_jax.execution.migration`). So a move inside a node costs as much as one
               between nodes
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.plan import copy_source, resident_experts
from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Plan, Price, Topology
from relibra_jax.cost.traffic import Traffic, busier_way, count_experts
from relibra_jax.routing.host_share import choose_from_host, count_kept, without_chosen
from relibra_jax.routing.resident_push import push_sizes
from relibra_jax.routing.sizes import exported_slots, power_of_two


@functools.partial(jax.jit, static_argnames="topology")
def fetch_time(layer_plans: LayerPlan, topology: Topology, cost: Price) -> Float[jax.Array, "M L N G"]:
    """Model the seconds in which each rank sends and receives the replicas of a layer, in all passes together.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``. The load is not read.
        topology: the expert-parallel group.
        cost: the price.
    """
    plans = jax.tree.map(jnp.asarray, layer_plans._replace(load=None))
    if not topology.replica_slots:
        return jnp.zeros(plans.slot_expert.shape[:4], jnp.float32)
    seconds = _link_time(plans, topology, cost)
    if not cost.host_slots:
        return seconds
    rest, chosen = _without_host(plans, topology, cost.host_slots)
    share = jnp.asarray(cost.weights_share, jnp.float32)
    left = (rest.slot_expert[..., topology.held_slots :] != EMPTY).sum(-1, dtype=jnp.int32).max()
    links = share * _link_time(rest, topology, cost, slots=left) + (1 - share) * seconds
    # A program copies equally many on all ranks.
    return jnp.maximum(links, cost.from_host * chosen.sum(-1).max())


def keep_time(layer_plans: LayerPlan, topology: Topology, cost: Price) -> Float[jax.Array, ""]:
    """Model the seconds in which ranks get the experts that they keep in host memory, for all layers together.

    Nothing hides it: it comes before the first pass of an update.

    Args:
        layer_plans: as for `fetch_time`.
        topology: the expert-parallel group.
        cost: the price.
    """
    if not cost.host_slots or not topology.replica_slots:
        return jnp.zeros(())
    plans = jax.tree.map(jnp.asarray, layer_plans._replace(load=None))
    _, chosen = _without_host(plans, topology, cost.host_slots)
    return jnp.asarray(cost.keep * len(plans.home[0]) * count_kept(plans, chosen, topology).max())


def _without_host(plans: LayerPlan, topology: Topology, count: int) -> tuple[LayerPlan, jax.Array]:
    """Return the plans of what other ranks send, and the replicas that come from the host."""

    def one(plan: LayerPlan) -> tuple[LayerPlan, jax.Array]:
        chosen = choose_from_host(plan, topology, count)
        return without_chosen(plan, chosen, topology), chosen

    return jax.vmap(jax.vmap(one))(plans)


def _link_time(
    plans: LayerPlan, topology: Topology, cost: Price, *, slots: jax.Array | None = None
) -> Float[jax.Array, "M L N G"]:
    """Return the seconds of each rank on the links; a padded fetch sends ``slots`` replicas to each, or R."""
    shape = plans.slot_expert.shape[:4]

    def one(plan: LayerPlan) -> Traffic:
        source = copy_source(plan, topology)
        target = jnp.broadcast_to(_own_rank(topology), source.shape)
        return count_experts(source // topology.held_slots, target, source != EMPTY, topology)

    slow, fast = busier_way(jax.vmap(jax.vmap(one))(plans), shared_link=cost.shared_link)
    if cost.fetches == "padded":
        most = padded_exports(plans, topology)
        # Without any export there is nothing to fetch.
        experts = jnp.where(most > 0, most + (topology.replica_slots if slots is None else slots), 0.0)
        across = 1.0 if cost.across_nodes else (slow.max() > 0).astype(jnp.float32)
        return jnp.broadcast_to(_padded_time(experts, topology, cost, across), shape)
    return jnp.maximum(slow * cost.fetch_across, fast * cost.fetch)


@functools.partial(jax.jit, static_argnames="topology")
def opening_time(layer_plans: LayerPlan, topology: Topology, cost: Price) -> Float[jax.Array, ""]:
    """Model the part of `fetch_time` that is the first exchange of a padded fetch.

    XLA puts only the second of its two exchanges beside attention. For a fetch inside nodes this is neglected. Between
    nodes it decides whether replicas there pay at all. With late replicas the first is beside attention.

    Args:
        layer_plans: as for `fetch_time`.
        topology: the expert-parallel group.
        cost: the price. The part is 0 unless replicas may be on other nodes, or arrive late.
    """
    open_fetch = cost.across_nodes or cost.late_replicas
    if cost.fetches != "padded" or not topology.replica_slots or not open_fetch:
        return jnp.zeros(())
    plans = jax.tree.map(jnp.asarray, layer_plans._replace(load=None))
    exports = padded_exports(plans, topology)
    if cost.late_replicas:
        share = exports / (exports + topology.replica_slots)
        return share * fetch_time(layer_plans, topology, cost).max()
    if cost.host_slots:
        rest, _ = _without_host(plans, topology, cost.host_slots)
        share = jnp.asarray(cost.weights_share, jnp.float32)
        exports = share * padded_exports(rest, topology) + (1 - share) * exports
    return _padded_time(exports, topology, cost, 1.0)


def padded_exports(plans: LayerPlan, topology: Topology) -> Float[jax.Array, ""]:
    """Return the number of experts that every rank exports in a padded fetch: that of the fullest rank, made even."""
    exports = jax.vmap(jax.vmap(lambda plan: exported_slots(plan, topology).sum(1, dtype=jnp.int32).max()))
    return jnp.ceil(exports(plans).max() / 2) * 2


def _padded_time(
    experts: Float[jax.Array, ""], topology: Topology, cost: Price, across: Float[Array, ""] | float
) -> Float[jax.Array, ""]:
    """Return the seconds of an exchange in which every rank sends a number of experts in pieces to all others."""
    near, far = 1 - 1 / topology.ranks_per_node, 1 - 1 / topology.num_nodes
    return jnp.maximum(experts * far * across * cost.fetch_across, experts * near * cost.fetch)


@functools.partial(jax.jit, static_argnames="topology")
def push_time(plan: Plan, topology: Topology, cost: Price) -> Float[jax.Array, ""]:
    """Model the seconds in which residents' weights are sent and their gradients returned, for all layers together.

    No computation hides these transfers: weights are sent before the first micro-batch of an update, and gradients are
    returned after its last one. Its three hops run one after another.

    Args:
        plan: the plan of a batch.
        topology: the expert-parallel group.
        cost: the price, which includes the number of updates.
    """
    if not topology.resident_slots or topology.num_nodes == 1:
        return jnp.zeros(())
    resident = jnp.asarray(resident_experts(plan, topology))
    sizes = push_sizes(jnp.asarray(plan.home), resident, topology)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    slots = len(plan.home) * topology.resident_slots
    inside = (sizes["exports"] + slots) * (1 - 1 / local)
    seconds = cost.push_inside * inside + cost.push * sizes["pair"] * (nodes - 1) / local
    return jnp.where(sizes["exports"] > 0, seconds, 0.0)


def reorder_time(
    home: Int[Array, "L E"], previous_home: Int[Array, "L E"], topology: Topology, cost: Price
) -> Float[jax.Array, ""]:
    """Model the seconds to move experts with their optimizer state to new homes, once per batch, for all layers.

    Args:
        home: flat home slot of each expert in this batch.
        previous_home: flat home slot of each expert before this batch.
        topology: the expert-parallel group.
        cost: the price.
    """
    return jnp.asarray(cost.move * moves_of_layers(home, previous_home, topology).sum())


def moves_of_layers(
    home: Int[Array, "L E"], previous_home: Int[Array, "L E"], topology: Topology
) -> Float[jax.Array, " L"]:
    """Return the number of experts that every rank sends to move those of each layer to new homes.

    Args:
        home: flat home slot of each expert in this batch.
        previous_home: flat home slot of each expert before this batch.
        topology: the expert-parallel group.
    """
    source, target = (jnp.asarray(slots) // topology.home_slots for slots in (previous_home, home))

    def most_leaving(source: jax.Array, target: jax.Array) -> jax.Array:
        leaving = jnp.zeros(topology.num_ranks, jnp.int32).at[source].add(source != target)
        return leaving.max()

    most = jax.vmap(most_leaving)(source, target)
    rounded = jnp.maximum(2 * power_of_two(jnp.maximum(most - 1, 0).astype(jnp.float32)), 1)
    rounded = jnp.minimum(rounded, topology.home_slots)
    return jnp.where(most > 0, rounded, 0.0)


def _own_rank(topology: Topology) -> Int[np.ndarray, "N G 1"]:
    """Return the flat rank of every slot, ``[N, G, 1]``."""
    ranks = np.arange(topology.num_ranks)
    return ranks.reshape(topology.num_nodes, topology.ranks_per_node, 1)
