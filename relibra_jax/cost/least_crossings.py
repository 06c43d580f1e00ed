"""Lower bounds of the crossings between nodes, over all homes, residents and assignments of samples.

All tokens of a sample are on the node of the sample. If this node holds j of a token's K experts, then:

    flat dispatch          K - j copies of the token cross
    hierarchical dispatch  the token visits every other node that has one of its experts: none only if j = K

**Every sample for itself.** Each node holds a set of h experts, with the indicator x_n. Let w_s be non-negative weights
of a sample's experts, such that the copies (or tokens) that do not cross are at most the sum over samples of
w_s . x_(node of s). For flat dispatch the weights are the loads. For hierarchical dispatch they may be any weights of a
token's experts that sum to 1 for each token; here an expert that the sample uses often gets a small weight. The sum is
at most that of the h largest entries of each w_s, as if every sample had a node for itself. It also holds for replicas
in any node.

**All samples together.** Samples share N nodes, whose sets are a partition of the experts, and residents. The crossings
of a token are bounded by which of its experts share a node with each other and with the sample
(`relibra_jax.cost.token_weights`), and a semidefinite relaxation bounds the sum
(`relibra_jax.cost.node_relaxation`).

**The price of unevenness.** If all tokens, or all popular experts, were in one node, fewer tokens would cross, but
attention, or compute, would take longer. The relaxation weighs them against each other, so the bound is of crossings
plus what the unevenness of plans with so few of them costs.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.cost.least_spread import largest_sums
from relibra_jax.cost.node_relaxation import (
    Relaxation,
    Vectors,
    Weights,
    certified,
    descend,
    follow_residents,
    random_vectors,
    relax,
)
from relibra_jax.cost.token_weights import Together, best_weights, visit_planes

ROWS: Final = 1 << 16
"""The number of tokens whose pairs are counted at a time."""
MOST_SAMPLES: Final = 2048
"""The most samples of a batch that are relaxed together; work grows with the cube of this number."""
ROUNDS: Final = 16
"""The number of times that tokens choose their weights."""
MOST_CHOICES: Final = 200_000_000
"""The most ids of experts, over all rounds, among which tokens choose. In larger batches, layers take turns."""
SWEEPS: Final = 3
"""The number of sweeps of descent in each round."""
LAST_SWEEPS: Final = 50
"""The number of sweeps for the last weights."""


class Routing(NamedTuple):
    """The counts of a replay from which the bounds are computed."""

    tokens: Int[np.ndarray, " B"]
    """The number of tokens of each sample."""
    load: Float[np.ndarray, "B L E"]
    """Token copies of each sample for each expert."""
    share: Float[np.ndarray, "B L E"]
    """Tokens, each divided over its experts in proportion to 1 / (copies of the sample for the expert)^2."""
    pairs: Float[np.ndarray, "L E E"]
    """The number of tokens that use two experts together; zero on the diagonal."""


def count_routing(replay: RoutingReplay, *, num_experts: int) -> Routing:
    """Count the loads, shares and pairs of a replay, layer by layer.

    Args:
        replay: the routing of all samples of a batch, which `relibra_jax.contract.replay.check_replay` accepts.
        num_experts: E, the number of logical experts of a layer.
    """
    mask = np.asarray(replay.mask)
    routes = np.asarray(replay.expert_ids)[mask]  # [tokens L K]
    samples, sample = len(mask), np.nonzero(mask)[0]
    loads, shares, pairs = [], [], []
    for layer in range(routes.shape[1]):
        ids = routes[:, layer].astype(np.int64)
        place = sample[:, None] * num_experts + ids
        count = np.bincount(place.ravel(), minlength=samples * num_experts)
        part = 1.0 / count[place].astype(float) ** 2
        part /= part.sum(1, keepdims=True)
        loads.append(count.astype(float))
        shares.append(np.bincount(place.ravel(), part.ravel(), minlength=samples * num_experts))
        pairs.append(_count_pairs(ids, num_experts))
    shape = (samples, num_experts)
    load, share = (np.stack([each.reshape(shape) for each in counts], 1) for counts in (loads, shares))
    return Routing(mask.sum(1), load, share, np.stack(pairs))


def _count_pairs(ids: Int[np.ndarray, "t K"], num_experts: int) -> Float[np.ndarray, "E E"]:
    counts = np.zeros((num_experts, num_experts))
    for start in range(0, len(ids), ROWS):
        rows = ids[start : start + ROWS]
        uses = np.zeros((len(rows), num_experts), np.float32)  # float32 is exact for counts up to 65,536
        uses[np.arange(len(rows))[:, None], rows] = 1
        counts += uses.T @ uses
    np.fill_diagonal(counts, 0)
    return counts


def crossings_of_samples(
    weight: Float[np.ndarray, "B L E"], topology: Topology, *, push: float, across_nodes: bool
) -> float:
    """Bound the crossings and pushes from below as if every sample had a node for itself.

    Args:
        weight: `Routing.load` for flat dispatch, `Routing.share` for hierarchical dispatch.
        topology: the expert-parallel group.
        push: the cost of one resident's push, in crossings.
        across_nodes: True if replicas may be in any node; the sets then differ between micro-batches.

    Returns:
        The sum over all layers, in crossings.
    """
    local, experts = topology.ranks_per_node, topology.num_experts
    own = experts // topology.num_nodes + across_nodes * local * topology.replica_slots
    set_sizes = np.minimum(own + np.arange(local * topology.resident_slots + 1), experts)
    most_kept = largest_sums(weight).sum(0)[:, set_sizes - 1]
    crossings = weight.sum((0, 2))[:, None] - most_kept + push * np.arange(len(set_sizes))
    return float(crossings.min(1).sum())


def crossings_together(
    replay: RoutingReplay,
    routing: Routing,
    topology: Topology,
    *,
    token: float,
    copy: float,
    push: float,
    hierarchical: bool,
) -> float:
    """Bound the crossings, pushes and unevenness from below if replicas are in nodes that hold their experts.

    Args:
        replay: the routing of a batch of at most `MOST_SAMPLES` samples.
        routing: its counts.
        topology: the expert-parallel group, of several nodes.
        token: the cost of one token in one layer outside the experts, in crossings.
        copy: the cost of the compute of one token copy, in crossings.
        push: the cost of one resident's push, in crossings.
        hierarchical: True for hierarchical dispatch, False for flat dispatch.

    Returns:
        The sum over all layers, in crossings.
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    sample, ids = np.nonzero(replay.mask)[0], np.asarray(replay.expert_ids)[np.asarray(replay.mask)]
    tokens, layers, top_k = ids.shape
    used = np.flatnonzero(routing.tokens)
    sample = np.searchsorted(used, sample)
    load, share = routing.load[used], routing.tokens[used] / tokens
    copies = nodes * topology.ranks_per_node * topology.resident_slots
    planes = None if copies else visit_planes(top_k, nodes, experts // nodes)
    own = routing.share[used] if hierarchical else load
    height = np.full(layers, tokens * (1.0 if hierarchical else top_k))
    weights = Weights(
        height, np.ascontiguousarray(own.transpose(1, 0, 2)), np.zeros((layers, experts, experts))
    )

    def relaxed(weights: Weights) -> Relaxation:
        return relax(
            weights,
            load.sum(0),
            share,
            nodes=nodes,
            token=token * tokens * layers,
            copy=copy,
            push=push,
            copies=copies,
        )

    vectors = random_vectors(len(used), layers, experts, copies=copies, nodes=nodes)
    turns = min(-(-ids.size * ROUNDS // MOST_CHOICES), layers)
    together = None
    for number in range(ROUNDS if hierarchical or copies else 0):
        step, relaxation = (number + 1) ** -0.7, relaxed(weights)
        vectors, dual = descend(relaxation, vectors, sweeps=SWEEPS)
        vectors = follow_residents(relaxation, vectors, dual, step=step)
        if hierarchical:
            shared = _shared_nodes(vectors, nodes)
            together = shared if together is None else _mean(together, shared, step)
            turn = slice(number % turns, None, turns)
            part = Together(together.own[turn], together.pair[turn])
            best = best_weights(
                ids[:, turn], sample, load[:, turn], routing.pairs[turn], part, planes, nodes=nodes
            )
            for kept, each in zip(weights, best, strict=True):
                kept[turn] += (number // turns + 1) ** -0.7 * (each - kept[turn])
    relaxation = relaxed(weights)
    _, dual = descend(relaxation, vectors, sweeps=LAST_SWEEPS)
    return certified(relaxation, dual)


def _shared_nodes(vectors: Vectors, nodes: int) -> Together:
    """Return how much of a node the samples and experts share in a relaxation."""
    expert, part = vectors.expert, 1 - 1 / nodes
    across, held = expert.transpose(0, 2, 1), vectors.holders / nodes
    return Together(
        held[:, None] + part * (vectors.sample @ across),
        held[:, :, None] * vectors.holders[:, None] + part * (expert @ across),
    )


def _mean(last: Together, new: Together, step: float) -> Together:
    """Return the running mean."""
    return Together(*((1 - step) * old + step * each for old, each in zip(last, new, strict=True)))
