"""Modelled time and memory of strategies on a trace, and how the gain changes with micro-batch size and skew."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.cli.advise.strategies import Strategy
from relibra_jax.cli.advise.thresholds import EVEN_SHARES, Point, route_some_evenly
from relibra_jax.cli.batch_prices import count_visits, time_of_batch, with_fetch_of
from relibra_jax.cli.batching import Batches, make_batches
from relibra_jax.cli.modelled_time import make_cost_model
from relibra_jax.cli.planner_runs import run_contender
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.memory import rank_memory
from relibra_jax.evaluation import Batching, Costs
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.traces.trace import Trace

STEP: Final = 4.0
"""The factor between successive micro-batch sizes that are tried."""
STEPS: Final = 5
"""The number of micro-batch sizes that are tried."""


class Advice(NamedTuple):
    """The results of one strategy."""

    strategy: Strategy
    """The strategy."""
    imbalance: float
    """The imbalance of rank load over the batch."""
    seconds: float
    """The modelled time of a batch, in seconds."""
    transfers: float
    """The part of ``seconds`` in which experts are transferred and nothing else runs."""
    memory: float
    """The modelled memory of a rank, in bytes."""


class Setting(NamedTuple):
    """The trace, ranks and costs that strategies are compared on."""

    trace: Trace
    """The trace."""
    topology: Topology
    """The nodes and ranks. Each strategy brings its own numbers of slots."""
    batching: Batching
    """How the trace is divided into batches and micro-batches."""
    costs: Costs
    """The hardware, model and sizes of the modelled times."""

    def read(self) -> tuple[Batches, CostModel]:
        """Make the batches of the trace, and the cost model for them."""
        batches = make_batches(self.trace, self.batching, self.topology)
        return batches, make_cost_model(self.costs, self.trace, batches, self.topology)


def price(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Advice]:
    """Plan the batches of a setting with every strategy, and compute the modelled time of the plans.

    Args:
        strategies: the strategies.
        setting: the trace, ranks and costs.
        progress: a function that is called after each strategy.

    Raises:
        ValueError: if the settings do not fit the trace or each other.
    """
    batches, cost_model = setting.read()
    priced = []
    for strategy in strategies:
        topology = dataclasses.replace(
            setting.topology, replica_slots=strategy.replica_slots, resident_slots=strategy.resident_slots
        )
        across_nodes, seed = strategy.contender.entry.across_nodes, setting.batching.seed
        cost = with_fetch_of(cost_model, topology, across_nodes=across_nodes).price(topology)
        planned, _ = run_contender(strategy.contender, batches, topology, cost=cost, seed=seed, timed_runs=0)
        times = [
            time_of_batch(each, topology, cost, visits=count_visits(each, topology, cost)) for each in planned
        ]
        load = np.concatenate([np.asarray(rank_load(each.batch_plan.plan)) for each in planned])
        priced.append(
            Advice(
                strategy,
                float(batch_imbalance(load)),
                float(np.mean([time.total for time in times])),
                float(np.mean([time.exposed + time.push + time.reorder for time in times])),
                rank_memory(topology, cost_model.model, shards=cost_model.shards).total,
            )
        )
        progress()
    return priced


def over_tokens(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Point]:
    """Find the best strategy at several micro-batch sizes.

    Args:
        strategies: the strategies. The first one does nothing.
        setting: the setting at the largest size.
        progress: a function that is called after each strategy at each size.

    Returns:
        The best strategy at each size, in ascending order of tokens per rank.
    """
    points = []
    for power in reversed(range(STEPS)):
        tokens = setting.costs.tokens_per_rank / STEP**power
        smaller = setting._replace(costs=dataclasses.replace(setting.costs, tokens_per_rank=tokens))
        points.append(fastest_point(price(strategies, smaller, progress=progress), tokens))
    return points


def over_skew(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Point]:
    """Find the best strategy at several skews of the routing, made by routing a share of the tokens evenly.

    Args:
        strategies: the strategies. The first one does nothing.
        setting: the setting with the trace's own routing.
        progress: a function that is called after each strategy at each skew.

    Returns:
        The best strategy at each skew, in ascending order of the first strategy's imbalance.
    """
    points = []
    for share in EVEN_SHARES:
        flatter = setting._replace(trace=route_some_evenly(setting.trace, share, seed=setting.batching.seed))
        advice = price(strategies, flatter, progress=progress)
        points.append(fastest_point(advice, advice[0].imbalance))
    return sorted(points)


def best_slots(advice: Sequence[Advice]) -> list[Strategy]:
    """Keep, of each strategy, the numbers of slots with which it takes least time; in the order of ``advice``."""
    best: dict[tuple[str, str], Advice] = {}
    for each in advice:
        key = (each.strategy.name, each.strategy.foresight)
        if each.seconds < best.get(key, each._replace(seconds=math.inf)).seconds:
            best[key] = each
    return [each.strategy for each in best.values()]


def fastest_point(advice: Sequence[Advice], at: float) -> Point:
    """Return the strategy that takes least time in one setting, and its gain.

    Args:
        advice: the results of the strategies. The first one does nothing, and may be the fastest.
        at: the value that is varied.
    """
    fastest = min(advice, key=lambda each: each.seconds)
    return Point(at, advice[0].seconds / fastest.seconds - 1, fastest.strategy.label)
