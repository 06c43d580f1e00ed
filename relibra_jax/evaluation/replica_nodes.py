"""The choice whether replicas may be on other nodes than their experts, as a `relibra_jax.nnx.Balancer` makes it."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from relibra_jax.contract.types import BatchPlan, Price, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.evaluation.setting import Setting
from relibra_jax.planning.batch import Batch, count_for_planner
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.plan_price import WORTH, may_save_across, price_unloaded
from relibra_jax.planning.planners import PlannerEntry


def with_replica_nodes(entry: PlannerEntry, setting: Setting) -> Setting:
    """Choose where replicas may be by the modelled time of the first batch, if the cost model leaves the choice.

    Args:
        entry: the planner, and how samples are assigned for it.
        setting: the batches, ranks and costs.

    Returns:
        The setting with the choice in its cost model.
    """
    topology, cost_model = setting.topology, setting.cost_model
    price = cost_model.price(topology)
    count = functools.partial(count_for_planner, setting.batches.replays[0], entry.planner, topology, [price])
    stage = Stage(setting.batches.num_micro_batches)
    cost_model = choose_replica_nodes(entry, cost_model, topology, count, stage, seed=setting.seed)
    return dataclasses.replace(setting, cost_model=cost_model)


def choose_replica_nodes(
    entry: PlannerEntry,
    cost_model: CostModel,
    topology: Topology,
    count: Callable[[], Batch],
    stage: Stage,
    *,
    seed: int,
) -> CostModel:
    """Choose where replicas may be by the modelled time of a batch, if the cost model leaves the choice.

    Replicas on other nodes make every fetch of replicas run over all ranks, so that one choice holds for all batches.
    Only planners that take given homes choose; the others are run as published, and priced by where their replicas are.

    Args:
        entry: the planner, and how samples are assigned for it.
        cost_model: the cost model.
        topology: the expert-parallel group.
        count: the counts of the first batch; called only if there is a choice.
        stage: the micro-batches of the batch.
        seed: the seed of the planner's random keys.

    Returns:
        The cost model with the choice.
    """
    planner = entry.planner
    several = topology.num_nodes > 1 and topology.replica_slots > 0
    if entry.across_nodes:
        return dataclasses.replace(cost_model, across_nodes=True)
    if cost_model.across_nodes is not None or not planner.takes_homes or not several:
        return cost_model
    batch = count()
    planner_key, key = jax.random.split(jax.random.key(seed))
    state = planner.init(topology, batch.sample_load.shape[1], key=planner_key)
    assign_key = jax.random.split(key)[1]

    def plan(cost_model: CostModel) -> tuple[tuple[BatchPlan, ...], Batch, Topology, tuple[Price]]:
        price = cost_model.price(topology)
        batch_plans, _ = plan_batch(
            batch, planner, state, topology, stages=[stage], assign=entry.assign, key=assign_key, cost=price
        )
        return batch_plans, batch, topology, (price,)

    inside, across = (dataclasses.replace(cost_model, across_nodes=where) for where in (False, True))
    planned = plan(inside)
    now = price_unloaded(*planned)
    pays = may_save_across(*planned) and price_unloaded(*plan(across)) <= (1 - WORTH) * now
    return across if pays else inside
