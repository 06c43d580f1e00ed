"""Lower bounds of the crossings between nodes, over all homes, residents and assignments of samples.

All tokens of a sample are on the node of the sample. If this node holds j of a token's K experts, then:

    flat dispatch          K - j copies of the token cross
    hierarchical dispatch  the token visits every other node that has one of its experts: none only if j = K

**Sets.** Each node n holds a set of h experts, with the indicator x_n. Let w_s be non-negative weights of a sample's
experts, such that the copies (or tokens) that do not cross are at most the sum over samples of w_s . x_(node of s). For
flat dispatch the weights are the loads. For hierarchical dispatch they may be any weights of a token's experts that sum
to 1 for each token; here an expert that the sample uses often gets a small weight. The sum is at most that of the h
largest entries of each w_s, as if every sample had a node for itself. It is also at most that of the h largest entries
of the sum of w, plus the contribution of the deviations c_s of samples from the mean. With positive weights v_s and
u_e, by von Neumann's trace inequality, this contribution is at most
sqrt(|V^(1/2) Z|^2 sum_i sigma_i(V^(-1/2) C U^(-1/2))^2 x_i^2), with x_i the singular values of U^(1/2) X, and Z and X
the indicators of samples and experts minus their means over nodes, of rank N - 1. All layers have the same Z, so the
singular values are those of all layers side by side.

**Parts.** Without residents, homes are a partition of the experts into equal parts. The pairs of a token's experts in
the same part are bounded like graph partitions (Donath and Hoffman, IBM J. Res. Dev. 17, 1973): for the matrix A of
their counts and any diagonal D, the trace of X' A X is at most 1'(A + D)1 / N - tr D + (E / N) x (the N - 1 largest
eigenvalues of A + D across 1). A few steps of descent choose D. The number of visits is at least
c0 - c1 j - c2 (pairs in the same part) if this holds for all ways to distribute K experts over parts; the best such
plane is used.

**The price of unevenness.** If all tokens, or all popular experts, were in one node, fewer tokens would cross, but
attention, or compute, would take longer. Let the fullest node have the share 1/N + d of the tokens, and K/N + a copies
per token of the batch (replicas stay in its node). From the mean load p, at most K/N + min(a, K d) copies per token are
local; and the pairs, from whose matrix b p p' is subtracted, get at most b (K^2 / N + K a) / 2 from it. Both are
linear: as long as crossings cost less than the additional attention and compute, even nodes are best. Beyond that, the
bound subtracts the largest possible net gain.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.cost.least_spread import largest_sums

ROWS: Final = 1 << 16
"""The number of tokens whose pairs are counted at a time."""
DIAGONAL_STEPS: Final = 20
"""The number of descent steps for the diagonal of a layer. With 80 steps the bound on the pairs of recorded routes was
0.3% lower."""
FIRST_AIM: Final = 0.07
"""The distance below the best bound so far at which the first step aims (Polyak's rule), as a share of all pairs."""
PLANES: Final = 65
"""The number of slopes to try on each axis."""


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


def crossings_of_sets(
    weight: Float[np.ndarray, "B L E"], topology: Topology, *, push: float, across_nodes: bool
) -> float:
    """Bound the crossings and pushes from below if nodes may hold any sets of experts.

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
    pushes = push * np.arange(len(set_sizes))
    total = weight.sum((0, 2))[:, None]

    def fewest(most_kept: Float[np.ndarray, "L E"]) -> float:
        return float((total - most_kept[:, set_sizes - 1] + pushes).min(1).sum())

    bounds = [fewest(largest_sums(weight).sum(0))]
    if not across_nodes:
        bounds.append(fewest(largest_sums(weight.sum(0))) - _gain_of_nodes(weight, topology.num_nodes))
    return max(0.0, *bounds)


def crossings_of_parts(
    routing: Routing, topology: Topology, *, token: float, copy: float, hierarchical: bool
) -> float:
    """Bound the crossings from below if the experts are partitioned over the nodes, with the price of unevenness.

    Args:
        routing: the counts of a batch.
        topology: the expert-parallel group, without residents.
        token: the cost of one more token in the fullest node, in crossings.
        copy: the cost of one more token copy in the fullest node, in crossings.
        hierarchical: True for hierarchical dispatch, False for flat dispatch.

    Returns:
        The sum over all layers, in crossings.
    """
    nodes, tokens, layers = topology.num_nodes, int(routing.tokens.sum()), routing.load.shape[1]
    top_k = round(routing.load[:, 0].sum() / tokens)
    kept, apart = _most_kept(routing.load, nodes) / tokens, 1 - 1 / nodes

    def fewest(planes, kept_pairs: float, removed: float) -> float:
        height, own, pair = planes
        offset_gain = np.minimum(own * top_k, token)  # the gain of local copies that longer attention offsets
        net_gain = np.maximum(own - offset_gain / top_k + pair * removed * top_k / 2 - copy, 0)
        crossings = layers * height - own * kept - pair * kept_pairs - layers * net_gain * top_k * apart
        return float(tokens * crossings.max())

    if not hierarchical:
        return max(0.0, fewest(np.array([[top_k], [1], [0]]), 0.0, 0.0))
    planes = _planes(top_k, nodes, topology.num_experts // nodes)
    pairs, mean = routing.pairs / tokens, routing.load.sum(0) / tokens
    # With the first value, no pairs would be left if experts were independent.
    removed = min((top_k - 1) / top_k, 4 * copy / top_k)
    by_pairs = fewest(planes, _most_same_part(pairs, mean, removed, nodes), removed)
    # A token stays only if the node holds all of its experts, so the held shares bound the tokens that stay.
    stay = _most_kept(routing.share, nodes) + max(0.0, 1 - token) * apart * layers * tokens
    return max(0.0, layers * tokens - stay, by_pairs)


def _most_kept(weight: Float[np.ndarray, "B L E"], nodes: int) -> float:
    """Bound the weight that the nodes of the samples hold, over all layers, if nodes have equal shares of the mean."""
    set_size = weight.shape[2] // nodes
    alone = largest_sums(weight)[..., set_size - 1].sum()
    return float(min(alone, weight.sum() / nodes + _gain_of_nodes(weight, nodes, set_size=set_size)))


def _gain_of_nodes(weight: Float[np.ndarray, "B L E"], nodes: int, set_size: int | None = None) -> float:
    """Bound what the deviations of samples from their mean can add.

    With ``set_size``, nodes hold a partition of the experts, ``set_size`` each; otherwise they may hold any sets.
    """
    length = weight.sum((1, 2), keepdims=True)
    deviation = weight - length / max(length.sum(), 1) * weight.sum(0)
    rows, columns = np.abs(deviation).sum((1, 2)), np.abs(deviation).sum(0)
    scaled = deviation / np.sqrt(np.where(rows > 0, rows, 1))[:, None, None]
    scaled = (scaled / np.sqrt(np.where(columns > 0, columns, 1))).reshape(len(weight), -1)
    room, most = nodes / 4 * columns.sum(), np.inf
    if set_size is not None:
        room, most = (1 - 1 / nodes) * columns.sum(), largest_sums(columns)[:, set_size - 1].sum()
    short = scaled if len(scaled) <= scaled.shape[1] else scaled.T
    squares = 0.0
    for square in np.linalg.eigvalsh(short @ short.T)[::-1][: nodes - 1]:  # of singular values
        squares += max(square, 0.0) * min(most, room)
        room -= min(most, room)
    return float(np.sqrt(squares * (1 - 1 / nodes) * rows.sum()))


def _most_same_part(
    pairs: Float[np.ndarray, "L E E"], mean: Float[np.ndarray, "L E"], removed: float, nodes: int
) -> float:
    """Bound the pairs in the same part, over all layers, if all parts have the same mean load."""
    popular = removed * mean[:, :, None] * mean[:, None]
    even = popular.sum() / nodes  # the part that was subtracted, for parts of equal load
    return float(_most_trace(pairs - popular, nodes, pairs.sum((1, 2))).sum() + even) / 2


def _most_trace(
    matrix: Float[np.ndarray, "L E E"], nodes: int, scale: Float[np.ndarray, " L"]
) -> Float[np.ndarray, " L"]:
    """Compute the Donath-Hoffman bound of the trace of X' A X over equal partitions X, layer by layer."""
    experts = matrix.shape[1]
    across, each = np.eye(experts) - 1 / experts, experts / nodes
    diagonal, best = -np.diagonal(matrix, axis1=1, axis2=2), np.full(len(matrix), np.inf)
    for step in range(DIAGONAL_STEPS):
        shifted = matrix + diagonal[..., None] * np.eye(experts)
        values, vectors = np.linalg.eigh(across @ shifted @ across)
        top = slice(experts - nodes + 1, None)
        bound = shifted.sum((1, 2)) / nodes - diagonal.sum(1) + each * values[:, top].sum(1)
        best = np.minimum(best, bound)
        slope = 1 / nodes - 1 + each * (vectors[..., top] ** 2).sum(2)
        aim = best - FIRST_AIM / np.sqrt(1 + step) * scale
        diagonal = diagonal - ((bound - aim) / np.maximum((slope**2).sum(1), 1e-9))[:, None] * slope
    return best


def _planes(top_k: int, nodes: int, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return planes ``height - own * j - pair * (pairs in the same part)`` that are lower bounds of the visits."""
    ways = np.array(
        [
            (own, sum(size * (size - 1) // 2 for size in (own, *others)), len(others))
            for own in range(min(top_k, room) + 1)
            for others in _parts(top_k - own, nodes - 1, room)
        ]
    )
    slopes = np.linspace(0, 1, PLANES)
    own, pair = (each.ravel() for each in np.meshgrid(slopes, slopes))
    height = (ways[:, 2] + own[:, None] * ways[:, 0] + pair[:, None] * ways[:, 1]).min(1)
    return height, own, pair


def _parts(total: int, most_parts: int, largest: int) -> list[tuple[int, ...]]:
    """List the ways to write ``total`` as a sum of at most ``most_parts`` positive numbers in descending order.

    No number exceeds ``largest``.

    >>> _parts(4, 2, 3)
    [(3, 1), (2, 2)]
    """
    if total == 0:
        return [()]
    if most_parts == 0:
        return []
    return [
        (first, *rest)
        for first in range(min(total, largest), 0, -1)
        for rest in _parts(total - first, most_parts - 1, first)
    ]
