"""The numbers that compare a plan with the idealised balanced run: crossings, time, and the cost of residents."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from relibra_jax.cli.batch_prices import price_batch
from relibra_jax.cli.planner_runs import PlannedBatch
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import BatchPlan, RoutingReplay, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.memory import rank_memory
from relibra_jax.planning.metrics import batch_imbalance, cross_node_load
from relibra_jax.routing.visits import node_visits


class Crossings(NamedTuple):
    """The number of token crossings between nodes on the hierarchical path, per token."""

    mean: float
    """The mean per token and layer."""
    busiest_node: float
    """The crossings of the node that sends or receives most, per token of a node; the exchange waits for this node."""
    busiest_rank: float
    """The same for ranks. A rank receives from the ranks with the same local index on other nodes."""


def count_crossings(
    visits: Int[np.ndarray, "M L P N"], tokens: Int[np.ndarray, " M"], topology: Topology
) -> Crossings:
    """Count crossings: the largest of each micro-batch and layer, summed, and divided by the number of tokens.

    Args:
        visits: the distinct tokens that each rank sends to each node, from `relibra_jax.routing.visits.node_visits`.
        tokens: the number of tokens of each micro-batch.
        topology: the expert-parallel group.
    """
    nodes, ranks = topology.num_nodes, topology.ranks_per_node
    by_rank = np.asarray(visits, np.int64).reshape(*visits.shape[:2], nodes, ranks, nodes)
    by_rank = by_rank * ~np.eye(nodes, dtype=bool)[:, None]  # [M L node, rank, destination node]
    sent, received = by_rank.sum(-1), by_rank.sum(2).swapaxes(-1, -2)
    rank = np.maximum(sent, received)
    node = np.maximum(sent.sum(-1), received.sum(-1))
    all_tokens = max(int(tokens.sum()), 1) * visits.shape[1]
    return Crossings(
        float(sent.sum() / all_tokens),
        float(node.max(-1).sum() * nodes / all_tokens),
        float(rank.max((-1, -2)).sum() * topology.num_ranks / all_tokens),
    )


def uniform_crossings(topology: Topology, top_k: int) -> float:
    """Compute the expected crossings per token if all sets of experts are equally likely.

    >>> topology = Topology(num_nodes=4, ranks_per_node=4, num_experts=32, replica_slots=1)
    >>> f"{uniform_crossings(topology, 4):.2f}"
    '2.11'
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    avoided = math.comb(experts - experts // nodes, top_k) / math.comb(experts, top_k)
    return (nodes - 1) * (1 - avoided)


def measure_plan(
    replay: RoutingReplay,
    batch_plan: BatchPlan,
    previous_home: Int[np.ndarray, "L E"],
    topology: Topology,
    cost_model: CostModel,
) -> dict[str, float]:
    """Measure one plan.

    Args:
        replay: the routing of the batch.
        batch_plan: the plan of the batch.
        previous_home: the homes before the batch.
        topology: the expert-parallel group.
        cost_model: the cost model.

    Returns:
        The numbers by name. Shares are of the speed of the balanced run with uniform routing: as sent
        (``of_balanced``), if exchanges overlapped compute (``overlapped``), and if they sent only needed rows
        (``as_needed``); ``of_local`` is the share of a balanced run with the locality of the same samples.
    """
    visits = node_visits(replay, batch_plan, topology)
    load = np.asarray(batch_plan.load)
    tokens = load[:, 0].sum((1, 2, 3)) // cost_model.model.top_k
    no_errors = np.zeros(load.shape[:2], np.float32)
    batch = PlannedBatch(replay, batch_plan, previous_home, no_errors)
    prices = price_batch(batch, topology, cost_model, visits=visits)
    seconds, push, reorder = prices.total, prices.parts["push"], prices.parts["reorder"]
    return {
        "imbalance": float(batch_imbalance(rank_load(batch_plan.plan))),
        "copies_crossing": float(cross_node_load(batch_plan.layer_plans()).sum() / load.sum()),
        **count_crossings(np.asarray(visits), tokens, topology)._asdict(),
        "of_balanced": prices.balanced / seconds,
        "overlapped": prices.balanced_overlapped / prices.overlapped,
        "as_needed": prices.balanced / prices.as_needed,
        "of_local": prices.local / seconds,
        "seconds": seconds,
        "reorder_seconds": reorder,
        "push_seconds": push,
        "micro_batch_seconds": (seconds - push - reorder) / len(load),
        "resident_memory_bytes": rank_memory(topology, cost_model.model).residents,
        "memory_bytes": rank_memory(topology, cost_model.model).total,
    }


def mean_over_seeds(measures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the numbers over seeds, and add the range of the throughput."""
    means = {name: float(np.mean([each[name] for each in measures])) for name in measures[0]}
    throughput = [each["of_balanced"] for each in measures]
    return {**means, "of_balanced_least": min(throughput), "of_balanced_most": max(throughput)}


def micro_batches_to_pay(residents: Mapping[str, float], without: Mapping[str, float]) -> float | None:
    """Return the number of micro-batches per update from which residents save time; None if they never do.

    Args:
        residents: the numbers of a plan with residents.
        without: the numbers of the plan without residents.

    >>> micro_batches_to_pay({"micro_batch_seconds": 2.0, "push_seconds": 3.0}, {"micro_batch_seconds": 3.5})
    2.0
    """
    saved = without["micro_batch_seconds"] - residents["micro_batch_seconds"]
    return residents["push_seconds"] / saved if saved > 0 else None
