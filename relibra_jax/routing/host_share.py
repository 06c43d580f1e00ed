"""Which replicas come from the host's memory instead of from other ranks, and what every rank keeps there.

ForeMoE (arXiv 2606.11867) transfers experts in two ways at once: from device to device, and from the host's memory,
which holds weights that do not change between two optimizer steps. Here each rank keeps there, for every layer, the
experts of those of its replicas that come from the host, in any micro-batch: an expert that it needs in several
micro-batches is sent to it once an update. A compiled program copies equally many replicas on all ranks.

What else could be kept, for H home experts of each of G local ranks:

    the home experts of each rank, once a node   H a rank. But a program reads the host memory of its own device alone,
                                                 so the rank of the home would have to send them over the links
    all experts of the node, on each of its ranks   G x H a rank, all of which are sent and written in every update
    the experts that its plan reads (this module)   at most the replicas of the batch, M x R a rank, and no more than
                                                 all experts of the node if replicas stay in their node

The plan of a batch is known before it runs, so the last is possible, and it is the least of those that leave the links
to tokens.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.contract.plan import copy_source
from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Topology
from relibra_jax.routing.resident_push import PushSizes, push_sizes
from relibra_jax.routing.sizes import export_count, exported_slots
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class HostSizes:
    """The buffer sizes of a program whose replicas come from the host's memory too; static under jit."""

    copies: int
    """The number of replicas that every rank copies from host memory in a layer, some of which may be empty."""
    links: int
    """The most replicas of a rank in a layer that other ranks still send; 0 if all come from the host."""
    exports: int
    """The most different experts that other ranks still fetch from one rank."""
    export_copies: int
    """The most replicas that other ranks still fetch from one rank."""
    push: PushSizes
    """The sizes with which one layer's kept experts are sent to their ranks."""


class HostShare(NamedTuple):
    """The replicas of a batch that come from the host's memory."""

    from_host: Bool[Array, "*stack N G R"]
    """Whether the replica in each replica slot comes from the host, ``[M, L, *data, N, G, R]``."""
    kept: Int[Array, "L N G K"]
    """The experts that each rank keeps in host memory; EMPTY for none."""


@checks_arguments
def choose_from_host(plan: LayerPlan, topology: Topology, count: int) -> Bool[jax.Array, "N G R"]:
    """Choose the replicas of one layer that come from the host: up to ``count`` on every rank.

    Each rank takes one after another. First come those from other nodes, whose network is the slower one, then those
    from the rank from which the most replicas would still be fetched. Works under jit.

    Args:
        plan: a valid layer plan, of which slots and homes are read.
        topology: the expert-parallel group.
        count: the number of replicas for each rank.

    Returns:
        True for replica slots that are filled from the host; False for empty slots.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
    >>> slots = jnp.array([[[0, 1, 2, 3], [2, 3, 0, -1]]])
    >>> plan = LayerPlan(slots, jnp.arange(4), jnp.zeros_like(slots), None)
    >>> choose_from_host(plan, topology, 1).tolist()
    [[[True, False], [True, False]]]
    """
    source = copy_source(plan, topology)
    ranks, local = topology.num_ranks, topology.ranks_per_node
    rank = jnp.where(source == EMPTY, ranks, source // topology.held_slots)
    node = jnp.arange(topology.num_nodes, dtype=jnp.int32)[:, None, None]
    away = jnp.where(rank // local == node, 0, source.size)
    chosen = jnp.zeros(source.shape, bool)
    for _ in range(min(count, topology.replica_slots)):
        left = jnp.where(chosen, ranks, rank)
        sends = jnp.zeros(ranks + 1, jnp.int32).at[left].add(1).at[ranks].set(0)
        value = jnp.where(left < ranks, sends[left] + away, 0)
        best = jnp.argmax(value, -1, keepdims=True) == jnp.arange(topology.replica_slots)[None, None]
        chosen |= best & (value > 0)
    return chosen


def without_chosen(plan: LayerPlan, chosen: Bool[Array, "N G R"], topology: Topology) -> LayerPlan:
    """Return the plan without the chosen replicas: what other ranks still send.

    Args:
        plan: a layer plan.
        chosen: the replica slots that the host fills.
        topology: the expert-parallel group.

    Returns:
        The plan with the replicas that are left first, in their order, and empty slots after them.
    """
    held, replicas = jnp.split(jnp.asarray(plan.slot_expert, jnp.int32), [topology.held_slots], axis=-1)
    left = jnp.where(chosen, EMPTY, replicas)
    order = jnp.argsort(left == EMPTY, axis=-1, stable=True)
    left = jnp.take_along_axis(left, order, -1)
    return plan._replace(slot_expert=jnp.concatenate([held, left], axis=-1))


def count_kept(
    plans: LayerPlan, chosen: Bool[Array, "M L N G R"], topology: Topology
) -> Int[jax.Array, "L N G"]:
    """Return the number of experts that each rank keeps for each layer: the different ones of all micro-batches.

    Args:
        plans: the layer plans, stacked ``[M, L]``.
        chosen: the replica slots that the host fills.
        topology: the expert-parallel group.
    """
    return _used(plans, chosen, topology).sum(-1, dtype=jnp.int32)


def keeping(topology: Topology, slots: int) -> Topology:
    """Return the topology for a push to host memory, whose resident slots are the kept experts of a rank."""
    return dataclasses.replace(topology, replica_slots=0, resident_slots=slots)


@checks_arguments
def share_with_host(plans: LayerPlan, topology: Topology, count: int) -> tuple[HostShare, HostSizes]:
    """Choose the replicas of a batch that come from the host, and what every rank keeps for them. Runs on the host.

    Args:
        plans: ``batch_plan.layer_plans()``, stacked ``[M, L, *data]``.
        topology: the expert-parallel group, with replica slots.
        count: the number of replicas of a rank that come from the host, in a layer of a micro-batch.
            `relibra_jax.cost.host_slots.choose_host_slots` chooses it by the price.

    Returns:
        The share, and the buffer sizes that it needs.

    Raises:
        ValueError: if ``count`` is not an integer from 1 to R.
    """
    check_integer("count", count, least=1, most=topology.replica_slots)
    plans = jax.tree.map(jnp.asarray, plans._replace(load=None))
    lead = plans.slot_expert.shape[:-3]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) :]), plans)
    chosen, left = _choose_stack(flat, topology, count)
    chosen = chosen.reshape(*lead, *chosen.shape[1:])
    # Micro-batches and groups of data parallelism share what is kept.
    by_layer = (-1, lead[1], *chosen.shape[-3:])
    moved = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, len(lead) - 1), (plans, chosen))
    each = jax.tree.map(lambda leaf: leaf.reshape(-1, lead[1], *leaf.shape[len(lead) :]), moved[0])
    used = np.asarray(_used(each, moved[1].reshape(by_layer), topology))
    # A batch without replicas copies one expert that is EMPTY.
    most = max(int(used.sum(-1).max()), 1)
    order = np.argsort(~used, axis=-1, kind="stable")[..., :most].astype(np.int32)
    kept = jnp.asarray(np.where(np.take_along_axis(used, order, -1), order, EMPTY))
    sizes = jax.vmap(functools.partial(_layer_push, topology=keeping(topology, most)))(each.home[0], kept)
    push = PushSizes(**{name: int(size.max()) for name, size in sizes.items()})
    return HostShare(chosen, kept), HostSizes(
        copies=max(int(chosen.sum(-1).max()), 1),
        **{name: int(size) for name, size in left.items()},
        push=push,
    )


@functools.partial(jax.jit, static_argnames=("topology", "count"))
def _choose_stack(plans: LayerPlan, topology: Topology, count: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Choose for a stack of layer plans, and return what remains for other ranks, as sizes of `HostSizes`."""

    def one(plan: LayerPlan) -> tuple[jax.Array, dict[str, jax.Array]]:
        chosen = choose_from_host(plan, topology, count)
        rest = without_chosen(plan, chosen, topology)
        left = rest.slot_expert[..., topology.held_slots :] != EMPTY
        return chosen, {
            "links": left.sum(-1, dtype=jnp.int32).max(),
            "exports": exported_slots(rest, topology).sum(1, dtype=jnp.int32).max(),
            "export_copies": export_count(rest, topology).max(),
        }

    chosen, left = jax.vmap(one)(plans)
    return chosen, jax.tree.map(jnp.max, left)


def _used(plans: LayerPlan, chosen: Array, topology: Topology) -> Bool[jax.Array, "L N G E"]:
    """Mark the experts that each rank copies from the host in any micro-batch."""
    replicas = jnp.asarray(plans.slot_expert)[..., topology.held_slots :]
    expert = jnp.where(chosen, replicas, topology.num_experts)
    return jax.nn.one_hot(expert, topology.num_experts, dtype=bool).any((0, -2))


def _layer_push(home: jax.Array, kept: jax.Array, topology: Topology) -> dict[str, jax.Array]:
    return push_sizes(home[None], kept[None], topology)
