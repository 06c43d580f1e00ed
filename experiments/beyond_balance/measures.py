"""The numbers that compare a plan with the idealised balanced run: crossings, time, and the cost of residents."""

from collections.abc import Mapping, Sequence

import numpy as np

from relibra_jax.contract.types import Topology
from relibra_jax.cost.hop_rows import visit_share
from relibra_jax.cost.memory import rank_memory
from relibra_jax.evaluation import Outcome
from relibra_jax.evaluation.prices import count_crossings


def uniform_crossings(topology: Topology, top_k: int) -> float:
    """Compute the expected crossings per token if all sets of experts are equally likely.

    >>> topology = Topology(num_nodes=4, ranks_per_node=4, num_experts=32, replica_slots=1)
    >>> f"{uniform_crossings(topology, 4):.2f}"
    '2.11'
    """
    return (topology.num_nodes - 1) * visit_share(topology, top_k)


def measure_plan(outcome: Outcome) -> dict[str, float]:
    """Measure the plan of one batch.

    Args:
        outcome: the plan of a planner for one batch.

    Returns:
        The numbers by name. Shares are of the speed of the balanced run with uniform routing: as sent
        (``of_balanced``), if exchanges overlapped compute (``overlapped``), and if they sent only needed rows
        (``as_needed``); ``of_local`` is the share of a balanced run with the locality of the same samples. Crossings
        are tokens per token: the ``mean``, and those of the busiest node and of the busiest rank, for which the
        exchange waits.
    """
    topology, (batch,), (visits,) = outcome.setting.topology, outcome.batches, outcome.visits
    node, rank = (
        count_crossings(batch, topology, shared_link=shared, visits=visits) for shared in (True, False)
    )
    seconds, push, reorder = outcome.modelled_seconds, outcome.push_seconds, outcome.reorder_seconds
    memory = rank_memory(topology, outcome.cost_model.model, shards=outcome.cost_model.shards)
    return {
        "imbalance": outcome.imbalance,
        "copies_crossing": outcome.cross_node_share,
        "mean": rank.mean,
        "busiest_node": node.busiest,
        "busiest_rank": rank.busiest,
        "of_balanced": outcome.share_of_balanced,
        "overlapped": outcome.share_overlapped,
        "as_needed": outcome.share_as_needed,
        "of_local": outcome.share_of_local,
        "seconds": seconds,
        "reorder_seconds": reorder,
        "push_seconds": push,
        "micro_batch_seconds": (seconds - push - reorder) / len(outcome.rank_load),
        "resident_memory_bytes": memory.residents,
        "memory_bytes": memory.total,
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
