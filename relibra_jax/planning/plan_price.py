"""The price of a batch's plans while they are searched: modelled time, estimated from sampled tokens and layers.

`relibra_jax.cost.batch_time` prices a plan exactly if it gets exact node visits, whose count takes much longer than a
plan. Here visits are estimated from the sampled tokens that the search itself uses, sample by sample, and only
`PRICED_LAYERS` layers are priced.
"""

import functools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import Placement
from relibra_jax.contract.replay import assigned_load
from relibra_jax.contract.types import EMPTY, Array, BatchPlan, Price, Topology
from relibra_jax.cost.batch_time import BatchTime, batch_time
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.sample_crossings import crossings_by_node
from relibra_jax.routing.striping import split_evenly

PRICED_LAYERS: Final = 12
"""The most layers that are priced, evenly spaced."""


def price_stages(
    stages: Sequence[BatchPlan],
    batch: Batch,
    topology: Topology,
    prices: Sequence[Price],
    *,
    previous_home: Int[Array, "L E"] | None,
) -> Float[jax.Array, ""]:
    """Estimate the modelled seconds of a batch under the plans of its stages. Works under jit.

    Args:
        stages: the plan of each stage, with the same homes and residents.
        batch: the samples of the batch.
        topology: the expert-parallel group.
        prices: the price of each stage.
        previous_home: flat home slot of each expert before the batch. None counts no moves.

    Returns:
        The seconds of the priced layers, in proportion to those of all layers.
    """
    layers = len(stages[0].plan.home)
    chosen = np.unique(np.linspace(0, layers - 1, min(layers, PRICED_LAYERS)).round().astype(int))
    some = _take_layers(batch, chosen)
    home = None if previous_home is None else jnp.asarray(previous_home)[chosen]
    seconds = jnp.zeros((), jnp.float32)
    for number, (stage, price) in enumerate(zip(stages, prices, strict=True)):
        plan = stage.plan._replace(
            slot_expert=stage.plan.slot_expert[:, chosen],
            home=stage.plan.home[chosen],
            quota=stage.plan.quota[:, chosen],
        )
        stage_plan = BatchPlan(stage.assignment, stage.load[:, chosen], plan)
        before = home if number == 0 else None
        seconds += estimate_time(stage_plan, some, topology, price, previous_home=before).total.astype(
            jnp.float32
        )
    return seconds


@functools.partial(jax.jit, static_argnames="topology")
def price_unloaded(
    stages: Sequence[BatchPlan], batch: Batch, topology: Topology, prices: Sequence[Price]
) -> Float[jax.Array, ""]:
    """Estimate the modelled seconds of a batch as `price_stages` does, whatever the plans' loads are.

    The loads are computed anew, striped or not as the prices say. Moves are not counted.
    """
    loads = [assigned_load(batch.sample_load, stage.assignment) for stage in stages]
    loads = [split_evenly(load) if prices[0].striped else load for load in loads]
    stages = [stage._replace(load=load) for stage, load in zip(stages, loads, strict=True)]
    return price_stages(stages, batch, topology, prices, previous_home=None)


def estimate_time(
    batch_plan: BatchPlan,
    batch: Batch,
    topology: Topology,
    price: Price,
    *,
    previous_home: Int[Array, "L E"] | None,
) -> BatchTime:
    """Model the time of a batch under its plan, with visits of nodes that are estimated from the sampled routes.

    Args:
        batch_plan: the plan.
        batch: the samples of the batch.
        topology: the expert-parallel group.
        price: the price.
        previous_home: flat home slot of each expert before the batch. None counts no moves.

    Returns:
        The modelled time (`relibra_jax.cost.batch_time.batch_time`).
    """
    return batch_time(
        batch_plan,
        batch.lengths,
        topology,
        price,
        visits=_estimate_visits(batch, batch_plan, topology, price.striped) if price.hierarchical else None,
        previous_home=previous_home,
        sequence_length=batch.sequence_length,
    )


def _mean_of_nodes(counts: Float[jax.Array, "M P ..."], topology: Topology) -> Float[jax.Array, "M P ..."]:
    """Return the mean over the ranks of each node, for each of them."""
    by_node = counts.reshape(len(counts), topology.num_nodes, topology.ranks_per_node, *counts.shape[2:])
    return jnp.broadcast_to(by_node.mean(2, keepdims=True), by_node.shape).reshape(counts.shape)


def _estimate_visits(
    batch: Batch, batch_plan: BatchPlan, topology: Topology, striped: bool
) -> Float[jax.Array, "M L P N"]:
    """Estimate the tokens that each rank sends to each node, as `relibra_jax.routing.visits.node_visits` counts them.

    Tokens are taken to visit the homes of their experts unless their own node has a resident. Copies that exceed the
    quotas of a node with a resident leave it, and count where their token would not have gone anyway. Without sampled
    routes every copy counts as a token.
    """
    plan, layers = batch_plan.plan, len(batch_plan.plan.home)
    placement = Placement(plan.home, resident_experts(plan, topology))
    by_sample = crossings_by_node(
        batch, placement, topology, hierarchical=True, groups=layers
    )  # [B N N L]; the sum over layers is a mean
    if batch.routes is None and layers:
        top_k = batch.sample_load[:, 0].sum() / jnp.maximum(batch.lengths.sum(), 1)
        by_sample *= top_k
    by_sample = jnp.pad(by_sample * layers, ((0, 1), (0, 0), (0, 0), (0, 0)))
    lengths = jnp.append(jnp.asarray(batch.lengths, jnp.float32), 0)
    sample = jnp.asarray(batch_plan.assignment.sample)
    sample = jnp.where(sample == EMPTY, len(lengths) - 1, sample)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    on_node = sample.reshape(len(sample), nodes, -1)
    visits = by_sample[on_node, jnp.arange(nodes)[None, :, None]]  # [M N G*b N L]
    visits = visits.reshape(len(sample), nodes * local, -1, nodes, layers).sum(2)
    own = lengths[sample].sum(-1).reshape(len(sample), nodes * local)
    if striped:
        own, visits = (_mean_of_nodes(each, topology) for each in (own, visits))
    stays = np.repeat(np.eye(nodes, dtype=bool), local, 0)[None, :, :, None]
    visits = jnp.moveaxis(jnp.where(stays, own[:, :, None, None], visits), 3, 1)
    if not topology.resident_slots:
        return visits
    elsewhere = 1 - visits / jnp.maximum(own, 1)[:, None, :, None]
    return visits + jnp.maximum(elsewhere, 0) * _overflow(batch_plan, topology)


def _overflow(batch_plan: BatchPlan, topology: Topology) -> Float[jax.Array, "M L P N"]:
    """Count the token copies that leave a node that holds their expert, because its quotas there are too small."""
    load = jnp.asarray(batch_plan.load, jnp.float32)
    plan, experts = batch_plan.plan, topology.num_experts
    micro_batches, layers, nodes, local, _ = load.shape
    slot_expert = jnp.asarray(plan.slot_expert).reshape(micro_batches, layers, nodes, -1)
    quota = jnp.asarray(plan.quota, jnp.float32).reshape(slot_expert.shape)
    index = jnp.where(slot_expert == EMPTY, experts, slot_expert)
    place = tuple(jnp.ogrid[:micro_batches, :layers, :nodes])
    place = tuple(axis[..., None] for axis in place)
    served = (
        jnp.zeros((micro_batches, layers, nodes, experts + 1), jnp.float32).at[(*place, index)].add(quota)
    )
    held = jnp.zeros(served.shape, bool).at[(*place, index)].set(True)[..., :experts]
    served, supply = served[..., :experts], load.sum(3)
    excess = jnp.where(held, jnp.maximum(supply - served, 0), 0)
    free = jnp.maximum(served - supply, 0)
    target = free / jnp.maximum(free.sum(2, keepdims=True), 1)
    by_rank = load * (excess / jnp.maximum(supply, 1))[:, :, :, None]
    leaving = jnp.einsum("mlnge,mlke->mlngk", by_rank, target)
    return leaving.reshape(micro_batches, layers, nodes * local, nodes)


def _take_layers(batch: Batch, chosen: Int[np.ndarray, " some"]) -> Batch:
    routes = batch.routes
    if routes is not None:
        routes = routes._replace(expert_ids=jnp.asarray(routes.expert_ids)[:, chosen])
    return batch._replace(sample_load=batch.sample_load[:, chosen], routes=routes)
