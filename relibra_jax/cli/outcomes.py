"""Contenders judged on the same batches: balance, traffic, replicas, moved experts, measured and modelled time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from relibra_jax.cli.batching import Batches
from relibra_jax.cli.modelled_time import CostModel
from relibra_jax.cli.planner_runs import Contender, PlannedBatch, run_contender
from relibra_jax.cost.batch_time import BatchTime
from relibra_jax.plan import rank_load, replica_count, resident_experts
from relibra_jax.planning.metrics import (
    batch_imbalance,
    cross_node_load,
    imbalance,
    moved_experts,
    replication_bound,
)
from relibra_jax.types import EMPTY, Topology


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one contender made of a trace."""

    planner: str
    """The contender's name."""
    imbalance: float
    """Over the measured batches: a layer's sum of maxima over its sum of means, averaged over layers."""
    imbalance_p95: float
    """The 95th percentile over layers and micro-batches."""
    imbalance_max: float
    """The largest of all layers and micro-batches."""
    bound: float
    """The same imbalance if every layer and micro-batch reached its replication bound, given the homes."""
    attention_imbalance: float
    """The imbalance of tokens over ranks, in the same sense."""
    forecast_error: float
    """Mean error of expected loads as MoE-GPS defines it; 0 with foresight."""
    cross_node_share: float
    """The share of token copies that leave their node at dispatch."""
    crossings: float
    """What crosses between nodes for each token: tokens on the hierarchical path, token copies on the flat one."""
    crossings_busiest: float
    """The same for what the busiest rank sends or receives, or the busiest node where a node's ranks share a link."""
    replicas: float
    """The replicas of one layer in one micro-batch, on average."""
    residents: float
    """The residents of one layer, on average."""
    rank_memory: float
    """The modelled bytes of a rank; those of resident slots only if the planner fills any."""
    moved_experts: float
    """The experts of one layer that change rank before a batch, on average."""
    modelled_seconds: float
    """The modelled time of the layers of one batch, pushes of residents and the reorder included; not measured."""
    modelled_parts: dict[str, float]
    """Its parts, by their names in `relibra_jax.cost.batch_time.BatchTime`."""
    share_of_balanced: float
    """The modelled time of a perfectly balanced batch with uniform routing over this one's; above 1 where fewer tokens
    cross than there."""
    least_seconds: float
    """A lower bound of the modelled time over all homes, residents, replicas and assignments of samples
    (`relibra_jax.cost.least_time`); with replicas on any node if the contender may have them there."""
    left: float
    """How far the modelled time is above it: what any plan could still gain, at most."""
    plan_seconds: float
    """The measured time of one batch's plan after compilation, the median of several runs."""
    batches: list[PlannedBatch] = dataclasses.field(repr=False)
    """The measured batches, which stay out of the JSON."""

    @property
    def rank_load(self) -> np.ndarray:
        """Token copies that each rank computes, the measured batches one after another: ``[M L N G]``."""
        return np.concatenate([np.asarray(rank_load(batch.batch_plan.plan)) for batch in self.batches])

    def numbers(self) -> dict[str, object]:
        """Everything but the arrays."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "batches"}


def compare(
    contenders: Mapping[str, Contender],
    batches: Batches,
    topology: Topology,
    cost_model: CostModel,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """Run every contender over the same batches and judge its plans.

    Args:
        contenders: the contenders by name.
        batches: the batches of a trace.
        topology: the expert-parallel group.
        cost_model: the cost model for modelled times.
        seed: the seed of the planners' random keys.
        progress: called with the name of each contender that has finished.

    Returns:
        One outcome for each contender, in their order.

    Raises:
        ValueError: if a planner refuses its input, or a plan is not valid.
    """
    outcomes = []
    measured = batches.replays[batches.history :]
    least = {
        across_nodes: float(
            np.mean([cost_model.least_time(each, topology, across_nodes).total for each in measured])
        )
        for across_nodes in {contender.entry.across_nodes for contender in contenders.values()}
    }
    for name, contender in contenders.items():
        planned, seconds = run_contender(
            contender, batches, topology, cost=cost_model.unit_times(), seed=seed
        )
        across_nodes = contender.entry.across_nodes
        outcomes.append(
            _judge(
                name,
                planned,
                seconds,
                topology,
                cost_model,
                across_nodes=across_nodes,
                least_seconds=least[across_nodes],
            )
        )
        progress(name)
    return outcomes


def _judge(
    name: str,
    batches: list[PlannedBatch],
    seconds: float,
    topology: Topology,
    cost_model: CostModel,
    *,
    across_nodes: bool,
    least_seconds: float,
) -> Outcome:
    plans = [batch.batch_plan.plan for batch in batches]
    loads = [batch.batch_plan.load for batch in batches]
    by_rank = np.concatenate([np.asarray(rank_load(plan)) for plan in plans])
    tokens = np.concatenate([np.asarray(load.sum(-1)) for load in loads])
    bound = jax.jit(functools.partial(replication_bound, topology=topology, across_nodes=across_nodes))
    bounds = np.concatenate(
        [np.asarray(bound(load, plan.home)) for load, plan in zip(loads, plans, strict=True)]
    )
    crossing = [np.asarray(cross_node_load(batch.batch_plan.layer_plans())) for batch in batches]
    moved = [
        moved_experts(batch.batch_plan.plan.home, batch.previous_home, home_slots=topology.home_slots).mean()
        for batch in batches
    ]
    residents = [
        (np.asarray(resident_experts(plan, topology)) != EMPTY).sum((1, 2, 3)).mean() for plan in plans
    ]
    times, crossings = [], []
    for batch in batches:
        visits = cost_model.visits(batch, topology)
        times.append(cost_model.batch_time(batch, topology, visits))
        crossings.append(cost_model.crossings(batch, topology, visits))
    parts = {part: float(np.mean([getattr(time, part) for time in times])) for part in BatchTime._fields}
    modelled = sum(parts.values())
    balanced = sum(float(cost_model.balanced_time(load, topology).total) for load in loads)
    each, mean = np.asarray(imbalance(by_rank)), by_rank.mean((2, 3)).sum(0)
    return Outcome(
        planner=name,
        imbalance=float(batch_imbalance(by_rank)),
        imbalance_p95=float(np.percentile(each, 95)),
        imbalance_max=float(each.max()),
        bound=float(np.where(mean > 0, bounds.sum(0) / np.maximum(mean, 1e-9), 1).mean()),
        attention_imbalance=float(batch_imbalance(tokens)),
        forecast_error=float(np.mean([batch.forecast_error for batch in batches])),
        cross_node_share=float(
            sum(int(copies.sum(dtype=np.int64)) for copies in crossing)
            / max(1, int(tokens.sum(dtype=np.int64)))
        ),
        crossings=float(np.mean([each.mean for each in crossings])),
        crossings_busiest=float(np.mean([each.busiest for each in crossings])),
        replicas=float(np.mean([replica_count(plan, topology).mean() for plan in plans])),
        residents=float(np.mean(residents)),
        rank_memory=cost_model.rank_memory(topology, residents=any(residents)).total,
        moved_experts=float(np.mean(moved)),
        modelled_seconds=modelled,
        modelled_parts=parts,
        share_of_balanced=balanced / len(batches) / modelled if modelled else 1.0,
        least_seconds=least_seconds,
        left=modelled / least_seconds - 1 if least_seconds else 0.0,
        plan_seconds=seconds,
        batches=batches,
    )
