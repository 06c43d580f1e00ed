"""The price of a batch's plans while they are searched: modelled time, estimated from sampled tokens.

`relibra_jax.cost.batch_time` prices a plan exactly if it gets exact node visits and counts the copies between ranks,
which takes much longer than a plan. Here both are estimated (`relibra_jax.planning.visit_estimates`,
`relibra_jax.planning.even_pairs`), for at most `PRICED` micro-batches.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.types import Array, Assignment, BatchPlan, Price, Topology
from relibra_jax.cost.batch_time import BatchTime, batch_time, rest_time
from relibra_jax.cost.copies import moves_of_layers, push_time
from relibra_jax.cost.step_time import attention_time, layer_time, rank_time
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.even_pairs import even_pairs
from relibra_jax.planning.routes import place_routes
from relibra_jax.planning.visit_estimates import estimate_visits, tokens_of_ranks
from relibra_jax.routing.striping import planned_load

PRICED: Final = 8
"""The most micro-batches of a data-parallel group that are priced, evenly spaced."""


WORTH: Final = 0.002
"""The least share of a batch's time that replicas on other nodes have to save."""


class StagePrice(NamedTuple):
    """The modelled seconds of a batch under the plans of its stages."""

    total: Float[jax.Array, ""]
    """All seconds."""
    by_layer: Float[jax.Array, " L"]
    """The seconds that depend on the plan of each layer, without what all plans have in common."""


def price_stages(
    stages: Sequence[BatchPlan],
    batch: Batch,
    topology: Topology,
    prices: Sequence[Price],
    *,
    previous_home: Int[Array, "L E"] | None,
    batches: Float[Array, " L"] | float = 1.0,
) -> StagePrice:
    """Estimate the modelled seconds of a batch under the plans of its stages. Works under jit.

    Args:
        stages: the plan of each stage, with the same homes and residents: of all micro-batches, or of the priced ones
            alone (`priced_micro_batches`). Assignments are of all.
        batch: the samples of the batch.
        topology: the expert-parallel group.
        prices: the price of each stage.
        previous_home: flat home slot of each expert before the batch. None counts no moves.
        batches: the number of batches among which the price of moves is divided.

    Returns:
        The seconds, those of micro-batches in proportion to the priced ones.
    """
    layers = len(stages[0].plan.home)
    total, by_layer = jnp.zeros((), jnp.float32), jnp.zeros(layers, jnp.float32)
    for number, (stage, price) in enumerate(zip(stages, prices, strict=True)):
        home = previous_home if number == 0 else None
        price_of_stage = _price_stage(stage, batch, topology, price, home, batches)
        total, by_layer = total + price_of_stage.total, by_layer + price_of_stage.by_layer
    return StagePrice(total, by_layer)


def _price_stage(
    stage: BatchPlan,
    batch: Batch,
    topology: Topology,
    price: Price,
    home: Int[Array, "L E"] | None,
    batches: Float[Array, " L"] | float,
) -> StagePrice:
    micro_batches = len(stage.assignment.sample)
    chosen = priced_micro_batches(micro_batches, price.data_parallel)
    if len(stage.load) > len(chosen):
        plan = stage.plan._replace(slot_expert=stage.plan.slot_expert[chosen], quota=stage.plan.quota[chosen])
        stage = stage._replace(load=stage.load[chosen], plan=plan)
    factor = micro_batches / len(chosen)
    some = stage._replace(assignment=Assignment(jnp.asarray(stage.assignment.sample)[chosen]))
    visits = _visits(some, batch, topology, price)
    plans = some.layer_plans()
    pairs = even_pairs(plans, topology)
    # Lengths of the fullest rank are those of the whole stage.
    attention, positions = attention_time(
        stage.assignment, batch.lengths, price, sequence_length=batch.sequence_length
    )
    attention = attention[chosen]
    ranks = rank_time(plans, attention, topology, price, visits=visits, pairs=pairs)
    seconds = layer_time(ranks, price).total * factor  # [M L]
    by_group = seconds.reshape(price.data_parallel, -1, seconds.shape[1]).sum(1)
    plan = some.plan
    rest = rest_time(positions, price, num_layers=len(plan.home), micro_batches=micro_batches)
    push = push_time(plan, topology, price)
    total = by_group.sum(1).max() + push + rest
    by_layer = by_group.mean(0)
    one_layer = plan._replace(
        slot_expert=jnp.asarray(plan.slot_expert)[:1].swapaxes(0, 1)[:, :, None],
        home=jnp.asarray(plan.home)[:, None],
        quota=jnp.asarray(plan.quota)[:1].swapaxes(0, 1)[:, :, None],
    )
    # The busiest rank of all layers together pushes less than those of the layers: each layer gets its part of that.
    pushes = jax.vmap(lambda plan: push_time(plan, topology, price))(one_layer)
    by_layer += pushes * (push / jnp.maximum(pushes.sum(), 1e-30))
    if home is not None:
        moves = price.move * moves_of_layers(plan.home, home, topology) / batches
        total, by_layer = total + moves.sum(), by_layer + moves
    return StagePrice(jnp.asarray(total, jnp.float32), by_layer.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="topology")
def price_unloaded(
    stages: Sequence[BatchPlan], batch: Batch, topology: Topology, prices: Sequence[Price]
) -> Float[jax.Array, ""]:
    """Estimate the modelled seconds of a batch as `price_stages` does, whatever the plans' loads are.

    The loads are computed anew, as the prices say. Moves are not counted.
    """
    loads = [planned_load(batch.sample_load, stage.assignment, prices[0]) for stage in stages]
    stages = [stage._replace(load=load) for stage, load in zip(stages, loads, strict=True)]
    return price_stages(stages, batch, topology, prices, previous_home=None).total


def may_save_across(
    stages: Sequence[BatchPlan], batch: Batch, topology: Topology, prices: Sequence[Price]
) -> Bool[jax.Array, ""]:
    """Return whether replicas on other nodes may save `WORTH`, so that plans with them are worth a search.

    They save at most all crossings, and cost at least the fetch of the plans' replicas from all ranks.

    Args:
        stages: the plan of each stage, without such replicas.
        batch: the samples of the batch.
        topology: the expert-parallel group.
        prices: the price of each stage.
    """

    def seconds(**changes: Any) -> Float[jax.Array, ""]:
        changed = tuple(dataclasses.replace(price, **changes) for price in prices)
        return price_unloaded(stages, batch, topology, changed)

    now = seconds()
    saved, paid = now - seconds(crossing=0.0), seconds(across_nodes=True) - now
    return saved - paid > WORTH * now


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
    visits = _visits(batch_plan, batch, topology, price)
    return batch_time(
        batch_plan,
        batch.lengths,
        topology,
        price,
        visits=visits,
        previous_home=previous_home,
        sequence_length=batch.sequence_length,
        pairs=even_pairs(batch_plan.layer_plans(), topology),
    )


def _visits(
    batch_plan: BatchPlan, batch: Batch, topology: Topology, price: Price
) -> Float[jax.Array, "M L P V"] | None:
    """Estimate the tokens that each rank sends to each node; None on the flat path."""
    if not price.hierarchical:
        return None
    routes = None if batch.routes is None else place_routes(batch.routes, batch_plan.assignment)
    tokens = tokens_of_ranks(batch_plan.assignment, batch.lengths)
    return estimate_visits(batch_plan.plan, batch_plan.load, tokens, routes, topology, even=price.even_ranks)


def priced_micro_batches(micro_batches: int, groups: int) -> Int[np.ndarray, " some"]:
    """Return the micro-batches of a stage that are priced: equally many of each data-parallel group.

    Args:
        micro_batches: M, the number of micro-batches of the stage.
        groups: the number of data-parallel groups.

    >>> priced_micro_batches(32, 2).tolist()
    [0, 2, 4, 6, 9, 11, 13, 15, 16, 18, 20, 22, 25, 27, 29, 31]
    """
    each = micro_batches // groups
    some = np.unique(np.linspace(0, each - 1, min(each, PRICED)).round().astype(int))
    return (np.arange(groups)[:, None] * each + some).ravel()
