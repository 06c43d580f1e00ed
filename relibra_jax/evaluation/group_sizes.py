"""Modelled time of smaller expert-parallel groups with data parallelism between them, beside one group of all nodes.

The same ranks run the same samples. Tokens of a smaller group cross fewer nodes, its ranks hold more experts, and
groups exchange the weights and gradients of experts (`relibra_jax.cost.group_exchange`).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from relibra_jax.contract.types import Topology
from relibra_jax.cost.group_exchange import group_exchange_time
from relibra_jax.cost.memory import rank_memory
from relibra_jax.evaluation.advice import Advice
from relibra_jax.evaluation.setting import Setting, make_setting
from relibra_jax.evaluation.settings import Batching, Costs
from relibra_jax.evaluation.strategies import Strategy
from relibra_jax.routing.exchange_rules import AUTO
from relibra_jax.traces.trace import Trace


class GroupPrice(NamedTuple):
    """The fastest strategy of groups of one size."""

    nodes: int
    """The number of nodes of a group."""
    groups: int
    """The number of data-parallel groups over which experts are sharded: those of the nodes times `Costs.shards`."""
    gather_once: bool
    """Whether experts that are sharded over groups are gathered once an update, and not in every micro-batch."""
    strategy: Strategy
    """The fastest strategy that fits the memory; if none does, the one that takes the least memory."""
    seconds: float
    """The modelled time of a batch, with the exchange between groups."""
    exchange: float
    """The part of ``seconds`` in which groups exchange weights and gradients."""
    memory: float
    """The modelled memory of a rank, in bytes."""


def group_setting(
    trace: Trace, topology: Topology, batching: Batching, costs: Costs, *, whole: Setting, nodes: int
) -> Setting:
    """Return the setting of smaller groups with the ranks, samples and micro-batches of one group.

    Args:
        trace: the trace.
        topology: the group of all nodes, without slots.
        batching: how the trace is divided into batches.
        costs: what is priced for the group of all nodes.
        whole: the setting of the group of all nodes.
        nodes: the number of nodes of a smaller group, a divisor of those of ``topology``.

    Raises:
        ValueError: under the conditions of `make_setting`.
    """
    groups = topology.num_nodes // nodes
    # The path that a ragged exchange needs is another one on a single node.
    dispatch = AUTO if costs.exchange == "ragged" else costs.dispatch
    micro_batches = groups * whole.batches.num_micro_batches
    setting = make_setting(
        trace,
        dataclasses.replace(topology, num_nodes=nodes),
        batching=dataclasses.replace(batching, micro_batches=micro_batches, token_budget=None),
        cost=dataclasses.replace(costs, shards=groups * costs.shards, dispatch=dispatch),
    )
    cost_model = dataclasses.replace(setting.cost_model, data_parallel=groups)
    return dataclasses.replace(setting, cost_model=cost_model)


def smaller_groups(whole: Setting) -> list[int]:
    """Return the numbers of nodes of smaller groups, largest first, whose micro-batches all have a sample.

    Args:
        whole: the setting of one group of all nodes.
    """
    return [size for size in _divisors(whole) if _has_samples(whole, size)]


def groups_without_samples(whole: Setting) -> list[int]:
    """Return the numbers of nodes of smaller groups that would have more micro-batches than a batch has samples.

    Args:
        whole: the setting of one group of all nodes.
    """
    return [size for size in _divisors(whole) if not _has_samples(whole, size)]


def _divisors(whole: Setting) -> list[int]:
    nodes = whole.topology.num_nodes
    return [size for size in range(nodes - 1, 0, -1) if nodes % size == 0]


def _has_samples(whole: Setting, nodes: int) -> bool:
    micro_batches = whole.topology.num_nodes // nodes * whole.batches.num_micro_batches
    return micro_batches <= min(len(replay.mask) for replay in whole.batches.replays)


def price_groups(advice: Sequence[Advice], setting: Setting, limit: float) -> list[GroupPrice]:
    """Return the fastest strategy of groups of one size: one for each value of ``gather_once`` if there are several.

    Args:
        advice: the results of the strategies in groups of this size.
        setting: the setting of the groups.
        limit: the memory of a rank, in bytes.
    """
    cost_model = setting.cost_model
    micro_batches = setting.batches.num_micro_batches // cost_model.data_parallel
    layers = setting.batches.replays[0].expert_ids.shape[2]

    def with_exchange(each: Advice, once: bool) -> GroupPrice:
        slots = {"replica_slots": each.strategy.replica_slots, "resident_slots": each.strategy.resident_slots}
        topology = dataclasses.replace(setting.topology, **slots)
        exchange = layers * group_exchange_time(
            cost_model, topology, micro_batches=micro_batches, gather_once=once
        )
        part, whole = (
            rank_memory(topology, cost_model.model, shards=cost_model.shards, gather_once=gathered).total
            for gathered in (False, once)
        )
        return GroupPrice(
            topology.num_nodes,
            cost_model.shards,
            once,
            each.strategy,
            each.seconds + exchange,
            exchange,
            each.memory + whole - part,
        )

    def fastest(once: bool) -> GroupPrice:
        rows = [with_exchange(each, once) for each in advice if each.strategy.runs]
        fitting = [each for each in rows if each.memory <= limit]
        if fitting:
            return min(fitting, key=lambda each: each.seconds)
        return min(rows, key=lambda each: each.memory)

    return [fastest(once) for once in ((False, True) if cost_model.shards > 1 else (False,))]


def strategies_of(strategies: Sequence[Strategy], nodes: int) -> list[Strategy]:
    """Return the strategies to try in groups of some nodes: those that run; on one node, where nothing crosses, without
    residents."""
    return [each for each in strategies if each.runs and (nodes > 1 or not each.resident_slots)]
