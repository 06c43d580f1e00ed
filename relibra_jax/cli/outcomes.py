"""Evaluation of planners on the same batches: balance, traffic, replicas, moved experts, measured and modelled time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from relibra_jax.cli.batch_prices import (
    count_crossings,
    count_visits,
    mean_prices,
    price_batch,
    with_fetch_of,
)
from relibra_jax.cli.batching import Batches
from relibra_jax.cli.planner_runs import Contender, PlannedBatch, run_contender
from relibra_jax.contract.plan import rank_load, replica_count, resident_experts
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.least_time import least_time
from relibra_jax.cost.memory import rank_memory
from relibra_jax.planning.metrics import (
    batch_imbalance,
    cross_node_load,
    imbalance,
    moved_experts,
    replication_bound,
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one planner on a trace."""

    planner: str
    """The name of the planner, or of the contender that it is part of."""
    imbalance: float
    """The imbalance of rank load over all measured batches: sum of maxima / sum of means, averaged over layers."""
    imbalance_p95: float
    """The 95th percentile of the imbalance over layers and micro-batches."""
    imbalance_max: float
    """The largest imbalance of any layer and micro-batch."""
    bound: float
    """The imbalance if every layer and micro-batch reached its replication bound, given the homes."""
    attention_imbalance: float
    """The imbalance of tokens over ranks, computed like ``imbalance``."""
    forecast_error: float
    """The mean error of expected loads as MoE-GPS (arXiv 2506.07366) defines it; 0 with foresight."""
    cross_node_share: float
    """The share of token copies that leave their node at dispatch."""
    crossings: float
    """The crossings between nodes per token: tokens on the hierarchical path, token copies on the flat path."""
    crossings_busiest: float
    """The crossings per token of the busiest rank, sent or received; of the busiest node if its ranks share a link."""
    replicas: float
    """The mean number of replicas of a layer in a micro-batch."""
    residents: float
    """The mean number of residents of a layer."""
    rank_memory: float
    """The modelled memory of a rank, in bytes. Resident slots count only if the planner fills any."""
    moved_experts: float
    """The mean number of experts of a layer that change rank before a batch."""
    modelled_seconds: float
    """The modelled time of a batch, in seconds."""
    modelled_parts: dict[str, float]
    """The parts of ``modelled_seconds``, by their names in `relibra_jax.cost.batch_time.BatchTime`."""
    share_of_balanced: float
    """The modelled time of a perfectly balanced batch with uniform routing, divided by ``modelled_seconds``. It is
    above 1 if fewer tokens cross than with uniform routing. Planning is taken to be hidden, here and below."""
    share_overlapped: float
    """The same if every exchange overlapped the compute of its layer, in both runs. Nothing runs so."""
    share_of_local: float
    """The same for a balanced batch with the locality of the same samples: as many crossings as they have under the
    same assignment at contiguous homes, evenly spread."""
    share_as_needed: float
    """The same if exchanges sent only the rows that are needed, without padding."""
    share_planning_exposed: float
    """The same if nothing hid planning on this machine: ``plan_seconds`` count as part of the time."""
    least_seconds: float
    """A lower bound of the modelled time over all homes, residents, replicas and assignments of samples
    (`relibra_jax.cost.least_time`). Replicas may be on any node if the planner may place them there."""
    left: float
    """The share by which the modelled time exceeds this bound: the most that any plan could still gain."""
    plan_seconds: float
    """The measured time to plan one batch after compilation, in seconds: the median of several runs."""
    batches: list[PlannedBatch] = dataclasses.field(repr=False)
    """The measured batches. They are not written to the JSON file."""

    @property
    def rank_load(self) -> np.ndarray:
        """The token copies that each rank computes, ``[M L N G]``, with the measured batches concatenated along M."""
        return np.concatenate([np.asarray(rank_load(batch.batch_plan.plan)) for batch in self.batches])

    def numbers(self) -> dict[str, object]:
        """Return all fields except the batches, for the JSON file."""
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
    """Run every contender on the same batches, and evaluate its plans.

    Args:
        contenders: the contenders, by name.
        batches: the batches of a trace.
        topology: the expert-parallel group.
        cost_model: the cost model that computes the modelled times.
        seed: the seed of the planners' random keys.
        progress: a function that is called with the name of each contender when it has finished.

    Returns:
        The outcome of each contender, in the order of ``contenders``.

    Raises:
        ValueError: if a planner rejects its input, or returns a plan that is not valid.
    """
    outcomes = []
    cost = cost_model.price(topology)
    measured = batches.replays[batches.history :]
    least = {
        across_nodes: float(
            np.mean(
                [least_time(each, topology, cost=cost, across_nodes=across_nodes).total for each in measured]
            )
        )
        for across_nodes in {contender.entry.across_nodes for contender in contenders.values()}
    }
    for name, contender in contenders.items():
        across_nodes = contender.entry.across_nodes
        own_model = with_fetch_of(cost_model, topology, across_nodes=across_nodes)
        own_cost = own_model.price(topology)
        planned, seconds = run_contender(contender, batches, topology, cost=own_cost, seed=seed)
        outcomes.append(
            _judge(
                name,
                planned,
                seconds,
                topology,
                own_model,
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
    cost = cost_model.price(topology)
    visits = [count_visits(batch, topology, cost) for batch in batches]
    crossings = [
        count_crossings(batch, topology, cost, visits=each)
        for batch, each in zip(batches, visits, strict=True)
    ]
    prices = mean_prices(
        [
            price_batch(batch, topology, cost_model, visits=each)
            for batch, each in zip(batches, visits, strict=True)
        ]
    )
    modelled = prices.total
    held = topology if any(residents) else dataclasses.replace(topology, resident_slots=0)
    memory = rank_memory(held, cost_model.model, shards=cost_model.shards)
    imbalances, mean = np.asarray(imbalance(by_rank)), by_rank.mean((2, 3)).sum(0)
    return Outcome(
        planner=name,
        imbalance=float(batch_imbalance(by_rank)),
        imbalance_p95=float(np.percentile(imbalances, 95)),
        imbalance_max=float(imbalances.max()),
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
        rank_memory=memory.total,
        moved_experts=float(np.mean(moved)),
        modelled_seconds=modelled,
        modelled_parts=prices.parts,
        share_of_balanced=prices.balanced / modelled,
        share_overlapped=prices.balanced_overlapped / prices.overlapped,
        share_of_local=prices.local / modelled,
        share_as_needed=prices.balanced / prices.as_needed,
        share_planning_exposed=prices.balanced / (modelled + seconds),
        least_seconds=least_seconds,
        left=modelled / least_seconds - 1 if least_seconds else 0.0,
        plan_seconds=seconds,
        batches=batches,
    )
