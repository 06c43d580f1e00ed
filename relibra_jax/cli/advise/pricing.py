"""What strategies come to on a trace, in modelled time and in memory, and how that changes with size and skew."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.cli.advise.strategies import Strategy
from relibra_jax.cli.advise.thresholds import EVEN_SHARES, Point, route_some_evenly
from relibra_jax.cli.batching import Batches, make_batches
from relibra_jax.cli.modelled_time import CostModel, make_cost_model
from relibra_jax.cli.options import Batching, Costs
from relibra_jax.cli.planner_runs import run_contender
from relibra_jax.plan import rank_load
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.traces.trace import Trace
from relibra_jax.types import Topology

STEP: Final = 4.0
"""The factor between two sizes of micro-batches that are tried."""
STEPS: Final = 5
"""How many sizes are tried."""


class Advice(NamedTuple):
    """What a strategy comes to."""

    strategy: Strategy
    """The strategy."""
    imbalance: float
    """The imbalance of ranks over the batch."""
    seconds: float
    """The modelled time of a batch."""
    transfers: float
    """The part of it in which experts travel and nothing else runs."""
    memory: float
    """The bytes of a rank."""


class Setting(NamedTuple):
    """What strategies are priced on."""

    trace: Trace
    """The routing."""
    topology: Topology
    """The ranks; slots are the strategies'."""
    batching: Batching
    """How the trace becomes batches."""
    costs: Costs
    """What modelled times stand for."""

    def read(self) -> tuple[Batches, CostModel]:
        """The batches of the trace, and the cost model for them."""
        batches = make_batches(self.trace, self.batching, self.topology)
        return batches, make_cost_model(self.costs, self.trace, batches, self.topology)


def price(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Advice]:
    """Plan the batches of a setting by every strategy, and price the plans.

    Args:
        strategies: the strategies.
        setting: what they are priced on.
        progress: called after each strategy.

    Raises:
        ValueError: if the settings do not fit the trace or each other.
    """
    batches, cost_model = setting.read()
    priced = []
    for strategy in strategies:
        topology = dataclasses.replace(
            setting.topology, replica_slots=strategy.replica_slots, resident_slots=strategy.resident_slots
        )
        planned, _ = run_contender(
            strategy.contender,
            batches,
            topology,
            cost=cost_model.unit_times(),
            seed=setting.batching.seed,
            timed_runs=0,
        )
        times = [cost_model.batch_time(each, topology, cost_model.visits(each, topology)) for each in planned]
        load = np.concatenate([np.asarray(rank_load(each.batch_plan.plan)) for each in planned])
        priced.append(
            Advice(
                strategy,
                float(batch_imbalance(load)),
                float(np.mean([time.total for time in times])),
                float(np.mean([time.exposed + time.push + time.reorder for time in times])),
                cost_model.rank_memory(topology, residents=strategy.resident_slots > 0).total,
            )
        )
        progress()
    return priced


def over_tokens(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Point]:
    """The best strategy in micro-batches of fewer and fewer tokens, by rising tokens of a rank.

    Args:
        strategies: the strategies, of which the first does nothing.
        setting: the largest size.
        progress: called after each strategy of each size.
    """
    points = []
    for power in reversed(range(STEPS)):
        tokens = setting.costs.tokens_per_rank / STEP**power
        smaller = setting._replace(costs=dataclasses.replace(setting.costs, tokens_per_rank=tokens))
        points.append(_best(price(strategies, smaller, progress=progress), tokens))
    return points


def over_skew(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Point]:
    """The best strategy where fewer and fewer tokens are routed evenly, by rising imbalance of the first.

    Args:
        strategies: the strategies, of which the first does nothing.
        setting: what they are priced on; some of its tokens are routed evenly.
        progress: called after each strategy of each skew.
    """
    points = []
    for share in EVEN_SHARES:
        flatter = setting._replace(trace=route_some_evenly(setting.trace, share, seed=setting.batching.seed))
        advice = price(strategies, flatter, progress=progress)
        points.append(_best(advice, advice[0].imbalance))
    return sorted(points)


def best_slots(advice: Sequence[Advice]) -> list[Strategy]:
    """Of each strategy the slots with which it takes least time, in the order in which strategies come first."""
    best: dict[tuple[str, str], Advice] = {}
    for each in advice:
        key = (each.strategy.name, each.strategy.foresight)
        if each.seconds < best.get(key, each._replace(seconds=math.inf)).seconds:
            best[key] = each
    return [each.strategy for each in best.values()]


def _best(advice: Sequence[Advice], at: float) -> Point:
    base, *others = advice
    fastest = min(others, key=lambda each: each.seconds)
    return Point(at, base.seconds / fastest.seconds - 1, fastest.strategy.label)
