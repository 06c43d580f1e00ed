"""Modelled time and memory of strategies on a trace, and how the gain changes with micro-batch size and skew."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from relibra_jax.evaluation.comparison import run_planner
from relibra_jax.evaluation.setting import Setting
from relibra_jax.evaluation.strategies import Strategy
from relibra_jax.evaluation.thresholds import Point

STEP: Final = 4.0
"""The factor between successive micro-batch sizes that are tried."""
STEPS: Final = 5
"""The number of micro-batch sizes that are tried."""
TRANSFERS: Final = ("exposed", "push", "reorder")
"""The parts of a batch's modelled time in which experts are transferred and nothing else runs."""


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
    exchange: float
    """The part of ``seconds`` for dispatch and combine."""


def price(
    strategies: Sequence[Strategy], setting: Setting, *, progress: Callable[[], None] = lambda: None
) -> list[Advice]:
    """Plan the batches of a setting with every strategy, and compute the modelled time of the plans.

    Args:
        strategies: the strategies.
        setting: the batches, ranks and costs. Each strategy brings its own numbers of slots.
        progress: a function that is called after each strategy.

    Raises:
        ValueError: if a planner rejects its input.
    """
    priced = []
    for strategy in strategies:
        slots = {"replica_slots": strategy.replica_slots, "resident_slots": strategy.resident_slots}
        own = dataclasses.replace(setting, topology=dataclasses.replace(setting.topology, **slots))
        outcome = run_planner(strategy.label, strategy.entry, own, timed_runs=0)
        transfers = sum(outcome.modelled_parts[part] for part in TRANSFERS)
        numbers = (outcome.imbalance, outcome.modelled_seconds, transfers, outcome.rank_memory)
        priced.append(Advice(strategy, *numbers, outcome.exchange_seconds))
        progress()
    return priced


def over_tokens(
    strategies: Sequence[Strategy],
    setting: Setting,
    tokens_per_rank: float,
    *,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Find the best strategy at several micro-batch sizes.

    Args:
        strategies: the strategies. The first one does nothing.
        setting: the batches, ranks and costs, scaled to the largest size.
        tokens_per_rank: the largest size, in tokens of a rank.
        progress: a function that is called after each strategy at each size.

    Returns:
        The best strategy at each size, in ascending order of tokens per rank.
    """
    points = []
    for smaller in (STEP**power for power in reversed(range(STEPS))):
        cost_model = dataclasses.replace(setting.cost_model, scale=setting.cost_model.scale / smaller)
        advice = price(strategies, dataclasses.replace(setting, cost_model=cost_model), progress=progress)
        points.append(fastest_point(advice, tokens_per_rank / smaller))
    return points


def over_skew(
    strategies: Sequence[Strategy],
    settings: Iterable[Setting],
    *,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Find the best strategy at several skews of the routing.

    Args:
        strategies: the strategies. The first one does nothing.
        settings: the settings, of traces that differ in their skew.
        progress: a function that is called after each strategy at each skew.

    Returns:
        The best strategy at each skew, in ascending order of the first strategy's imbalance.
    """
    priced = [price(strategies, setting, progress=progress) for setting in settings]
    return sorted(fastest_point(advice, advice[0].imbalance) for advice in priced)


def best_slots(advice: Sequence[Advice]) -> list[Strategy]:
    """Keep, for each strategy, the numbers of slots with which it takes the least time, in the order of ``advice``."""
    best: dict[tuple[str, str], Advice] = {}
    for each in advice:
        key = (each.strategy.name, each.strategy.foresight)
        if each.seconds < best.get(key, each._replace(seconds=math.inf)).seconds:
            best[key] = each
    return [each.strategy for each in best.values()]


def fastest_point(advice: Sequence[Advice], at: float) -> Point:
    """Return the strategy that takes the least time in one setting, and its gain.

    Args:
        advice: the results of the strategies. The first one does nothing, and may be the fastest.
        at: the value that is varied.
    """
    fastest = min(advice, key=lambda each: each.seconds)
    return Point(at, advice[0].seconds / fastest.seconds - 1, fastest.strategy.label)
