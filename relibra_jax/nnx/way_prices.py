"""The modelled time of a batch in each way of running its layers, from which a balancer chooses one for its run."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.contract.types import EMPTY, BatchPlan, Price, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.derived_cost import priced_kind
from relibra_jax.nnx.stage_plans import on_host, to_host
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_price import WORTH, may_save_across, price_unloaded
from relibra_jax.routing.exchange_rules import Way

DEAR: Final = 0.01
"""The share of a batch's time above which replicas cost so much that a plan without them is searched too."""

type PriceCost = Callable[[CostModel], tuple[Price, ...]]
"""Returns the price of each stage of a batch for a cost model."""


def cost_in_way(cost: CostModel, way: Way, parallel: ExpertParallel) -> CostModel:
    """Return the cost model of layers that run in a given way; their path may depend on their exchange."""
    kinds = run_in_way(parallel, way).kinds(cost.model.top_k)
    return dataclasses.replace(
        cost,
        path=kinds.path,
        exchange=priced_kind(kinds.exchange),
        striped=way.striped,
        across_nodes=way.across_nodes,
    )


def run_in_way(parallel: ExpertParallel, way: Way) -> ExpertParallel:
    """Return settings with which layers run in a given way. Without replicas there are no slots for them."""
    topology = parallel.topology
    if not way.replicas:
        topology = dataclasses.replace(topology, replica_slots=0)
    return dataclasses.replace(
        parallel,
        topology=topology,
        exchange=way.exchange,
        striped=way.striped,
        across_nodes=way.across_nodes,
    )


def allowed_way(way: Way, parallel: ExpertParallel) -> Way:
    """Return a way in which settings can run layers: the given one where they leave the choice."""
    striped = way.striped if parallel.striped is None else parallel.striped
    return Way(
        exchange=way.exchange if way.exchange in parallel.exchanges else parallel.exchanges[0],
        striped=striped and parallel.topology.ranks_per_node > 1,
        replicas=way.replicas and parallel.topology.replica_slots > 0,
        across_nodes=way.across_nodes if parallel.may_choose_across else bool(parallel.across_nodes),
    )


def cheapest_way(
    plans: Sequence[BatchPlan],
    batch: Batch,
    parallel: ExpertParallel,
    ways: Iterable[Way],
    cost: CostModel,
    prices: PriceCost,
) -> Way:
    """Return the way of running layers in which the plans of a batch are estimated to take the least time.

    Args:
        plans: the plan of each stage.
        batch: the samples of the batch.
        parallel: the settings, which leave the choice.
        ways: the ways. With a single one, nothing is priced.
        cost: the cost model.
        prices: the price of each stage for a cost model.
    """
    first, *others = ways
    if not others:
        return first
    return min(
        (first, *others),
        key=lambda way: estimate_seconds(
            plans, batch, parallel.topology, prices(cost_in_way(cost, way, parallel))
        ),
    )


def are_replicas_doubtful(
    plans: Sequence[BatchPlan], batch: Batch, parallel: ExpertParallel, prices: Sequence[Price]
) -> bool:
    """Return whether plans have no replicas, or the exchange of replicas takes more than `DEAR` of a batch's time.

    Args:
        plans: the plan of each stage.
        batch: the samples of the batch.
        parallel: the settings as they were given.
        prices: the price of each stage.
    """
    topology = parallel.topology
    if all(
        (np.asarray(stage.plan.slot_expert)[..., topology.held_slots :] == EMPTY).all() for stage in plans
    ):
        return True
    free = tuple(dataclasses.replace(price, fetch=0.0, fetch_across=0.0) for price in prices)
    seconds, least = (estimate_seconds(plans, batch, topology, each) for each in (prices, free))
    return seconds - least > DEAR * seconds


def may_pay_across(
    plans: Sequence[BatchPlan], batch: Batch, parallel: ExpertParallel, prices: Sequence[Price]
) -> bool:
    """Return whether replicas on other nodes are left to choice and may pay (`may_save_across`).

    Args:
        plans: the plan of each stage, without such replicas.
        batch: the samples of the batch.
        parallel: the settings as they were given.
        prices: the price of each stage.
    """
    if not parallel.may_choose_across:
        return False
    with on_host():
        return bool(may_save_across(to_host(tuple(plans)), to_host(batch), parallel.topology, tuple(prices)))


class OtherReplicas(NamedTuple):
    """Another use of replica slots, for which the first batch is planned once more."""

    change: Callable[[Way], Way]
    """Returns a way with this use of replica slots."""
    may_pay: Callable[[Sequence[BatchPlan], Batch, ExpertParallel, Sequence[Price]], bool]
    """Returns whether plans for it are searched."""
    least: float
    """The least share of the batch's time that they have to save."""
    line: str
    """What is printed if it is taken, before what it saves."""


OTHER_REPLICAS: Final = (
    OtherReplicas(
        lambda way: way._replace(across_nodes=True),
        may_pay_across,
        WORTH,
        "replicas may be on other nodes: so",
    ),
    OtherReplicas(
        lambda way: way._replace(replicas=False),
        are_replicas_doubtful,
        0.0,
        "replica slots are left out: without them",
    ),
)
"""The uses of replica slots in the order in which they are tried."""


def estimate_seconds(
    plans: Sequence[BatchPlan], batch: Batch, topology: Topology, prices: Sequence[Price]
) -> float:
    """Estimate the seconds of a batch on the host (`relibra_jax.planning.plan_price.price_unloaded`)."""
    with on_host():
        return float(price_unloaded(to_host(tuple(plans)), to_host(batch), topology, tuple(prices)))
