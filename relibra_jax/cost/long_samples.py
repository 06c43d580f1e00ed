"""Attention of samples that are longer than a rank's even share: the least wait, and the price of splitting them.

A sample that is not split is on one rank, and the other ranks of its micro-batch wait for it. `least_waits` bounds what
any packing of whole samples leaves. `split_waits` models what would be left if the ranks of a node shared the longest
samples, as context parallelism does: every rank has an equal part of the queries, and gathers the keys and values of
the whole sample inside the node in each layer. ``Balancer(sequences="split")`` does so with all samples of a node
(`relibra_jax.routing.node_streams`); other trainers have context parallelism (ring attention, arXiv 2310.01889).
"""

import heapq

import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.types import Array, Topology
from relibra_jax.cost.cost_model import COMPUTE_BYTES, CostModel, count_passes
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer


@checks_arguments
def least_waits(
    lengths: Int[Array, " B"], topology: Topology, *, num_micro_batches: int, tokens_per_rank: int
) -> float:
    """Bound the squared lengths of the busiest ranks, summed over micro-batches, of every packing of whole samples.

    The micro-batches in descending order of their busiest rank have two bounds. As a rank holds only so many long
    samples, the j-th micro-batch lasts at least as long as the longest sample that does not fit into those before it.
    And as the first k micro-batches hold only so many tokens, they leave at least the squared lengths of the shortest
    samples for the others, where they are even at best. Of all k, the best bound is taken.

    Args:
        lengths: the number of tokens of each sample.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        tokens_per_rank: the most tokens of a rank in a micro-batch, at least the longest sample.

    Returns:
        The bound in squared tokens; 0 if no sample has tokens.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1, or a sample is longer than ``tokens_per_rank``.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> least_waits(np.array([4, 4, 4, 1, 1]), topology, num_micro_batches=2, tokens_per_rank=5)
    32.0
    """
    check_integer("num_micro_batches", num_micro_batches, least=1)
    tokens = np.sort(np.asarray(lengths, float))[::-1]
    tokens = tokens[tokens > 0]
    if not tokens.size:
        return 0.0
    if tokens[0] > tokens_per_rank:
        raise ValueError(
            f"tokens_per_rank={tokens_per_rank} must be at least the longest sample, {tokens[0]:g}"
        )
    ranks, squares = topology.num_ranks, tokens**2
    micro_batches = np.arange(num_micro_batches + 1)
    # The number of micro-batches that the samples up to each one need.
    needed = np.ceil(np.arange(1, len(tokens) + 1) / (ranks * (tokens_per_rank // tokens)))
    at_least = [squares[needed >= number].max(initial=0) for number in micro_batches[1:]]
    held = np.interp(
        micro_batches * ranks * tokens_per_rank,
        np.append(0, tokens.cumsum()),
        np.append(0, squares.cumsum()),
    )
    return float((np.append(0, np.cumsum(at_least)) + (squares.sum() - held) / ranks).max())


@checks_arguments
def split_exchange(cost_model: CostModel, topology: Topology) -> float:
    """Model the time to exchange keys and values inside a node, in tokens of attention.

    Keys and values are gathered in the forward pass and again in the backward pass, and their gradients are returned.

    Args:
        cost_model: the hardware and the model, whose cache gives the size of one token's keys and values.
        topology: the expert-parallel group. Samples are split over the ranks of a node.

    Returns:
        The length at which the exchange of a sample takes as long as all its attention on one rank. A longer sample
        that makes ranks wait is worth splitting.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> cost_model = CostModel(cluster=CLUSTERS["h100"], model=MODELS["gpt-oss-20b"])
    >>> topology = Topology(num_nodes=2, ranks_per_node=8, num_experts=32, replica_slots=0)
    >>> round(split_exchange(cost_model, topology))
    323
    """
    cluster, model = cost_model.cluster, cost_model.model
    number = COMPUTE_BYTES if cost_model.compute_bytes is None else cost_model.compute_bytes
    passes = count_passes(cost_model.updates, recompute=cost_model.recompute).compute
    token = passes * number * model.cache_width / (cluster.fast_bandwidth * cluster.network_efficiency)
    pair = float(cost_model.price(topology).pair)
    return cost_model.scale * token / pair if pair else float("inf")


@checks_arguments
def split_waits(
    lengths: Int[Array, " B"], topology: Topology, *, num_micro_batches: int, exchange: float
) -> float:
    """Model the squared lengths of the busiest ranks, summed over micro-batches, if the longest samples are split.

    A sample that is longer than a rank's even share of attention and than ``exchange`` is split over the ranks of a
    node. Samples go, longest first, to the node or rank with the least attention, whatever tokens it holds.

    Args:
        lengths: the number of tokens of each sample.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        exchange: the price of a token's keys and values, from `split_exchange`.

    Returns:
        Squared tokens, including the exchange of keys and values.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> split_waits(np.array([8, 4, 4]), topology, num_micro_batches=1, exchange=1.0)  # 64 / 2 + 8 / 2 + 16
    52.0
    """
    check_integer("num_micro_batches", num_micro_batches, least=1)
    tokens = np.sort(np.asarray(lengths, float))[::-1]
    ranks, local = topology.num_ranks, topology.ranks_per_node
    share = (tokens**2).sum() / (num_micro_batches * ranks)
    is_split = (tokens**2 > share) & (tokens > exchange) & (local > 1)
    long, rest = tokens[is_split], tokens[~is_split]
    parts = long**2 / local + exchange * long * (1 - 1 / local)
    by_node = _lightest(parts, np.zeros(num_micro_batches * topology.num_nodes))
    by_rank = _lightest(rest**2, np.repeat(by_node, local))
    return float(by_rank.reshape(num_micro_batches, ranks).max(1).sum())


def _lightest(work: Float[np.ndarray, " items"], start: Float[np.ndarray, " bins"]) -> np.ndarray:
    """Give every item, in the given order, to the lightest bin; return the work of the bins."""
    heap = [(float(each), number) for number, each in enumerate(start)]
    heapq.heapify(heap)
    for each in work.tolist():
        least, number = heap[0]
        heapq.heapreplace(heap, (least + each, number))
    total = np.empty(len(start))
    for each, number in heap:
        total[number] = each
    return total
