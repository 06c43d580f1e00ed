"""A semidefinite relaxation of where samples, homes and residents are, for lower bounds of crossings.

Let u_n be N unit vectors with inner products -1 / (N - 1). A sample in node n is z = u_n, and an expert that k nodes
hold is the sum v of their vectors, with |v|^2 = k (N - k) / (N - 1). The number of nodes that two of them share, which
is 1 or 0 unless both have copies, is k k' / N + (1 - 1/N) times their inner product. The cost of a batch is therefore
at least a quadratic function of all these vectors:

    crossings   height - sum of own x (sample shares a node with expert) - sum of pair x (experts share a node). All
                layers have the same samples
    unevenness  the fullest node has at least the sum of squares of the nodes' shares, which is
                (1 + (N - 1) |sum of share x vector|^2) / N: of the tokens, and of the copies of a layer if nobody has
                residents
    pushes      in proportion to the residents

The vectors of the experts of a layer add up to 0, but for residents. The relaxation allows any vectors of these lengths
in any number of dimensions (Goemans and Williamson, J. ACM 42, 1995). For any numbers d, if the quadratic function less
the sum of d x squared lengths is nowhere negative, then it is at least this sum: of d, as samples have length 1, and
for experts at the best number of residents. Coordinate descent on the vectors finds d (the mixing method: Wang, Chang
and Kolter, arXiv 1706.00476). These numbers are lowered until Cholesky decompositions exist, first of every layer's
experts, then of the samples' Schur complement. So the bound holds wherever the descent stops.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

RANK: Final = 12
"""The number of dimensions of the vectors in the descent."""
EVENNESS: Final = 0.25
"""The price of the squared sum of a layer's experts, as a multiple of the mean weight of an expert with an expert. With
residents the sum may differ from 0, so a high price costs; without, a low one lets experts be where they cannot."""
LEAST_LENGTH: Final = 0.01
"""The least squared length of an expert's vector in the descent."""
MARGIN: Final = 0.05
"""The least amount by which d is lowered, as a share of the mean amount."""


class Weights(NamedTuple):
    """The coefficients of the crossings of every layer."""

    height: Float[np.ndarray, " L"]
    """The crossings if nothing shared a node."""
    own: Float[np.ndarray, "L B E"]
    """The crossings that a sample saves by an expert in its node."""
    pair: Float[np.ndarray, "L E E"]
    """The crossings that two experts save in the same node; symmetric, zero on the diagonal."""


class Vectors(NamedTuple):
    """The samples and experts in the relaxation."""

    sample: Float[np.ndarray, "B r"]
    expert: Float[np.ndarray, "L E r"]
    holders: Float[np.ndarray, "L E"]
    """The number of nodes that hold each expert, averaged over steps."""
    squares: Float[np.ndarray, "L E"]
    """The squared length of each expert's vector, averaged over steps."""


class Relaxation(NamedTuple):
    """The cost of a batch as a quadratic function of its vectors, for given weights. Prices are in crossings."""

    nodes: int
    share: Float[np.ndarray, " B"]
    """Each sample's share of the tokens."""
    uneven: float
    """The price of the squared sum of share x vector of the samples."""
    between: Float[np.ndarray, "L B E"]
    """Half of the coefficients of the inner products of samples and experts."""
    inside: Float[np.ndarray, "L E E"]
    """The coefficients of the inner products of experts."""
    constant: float
    copy: Float[np.ndarray, "L E"]
    """What a further node that holds an expert costs."""
    copies: int
    """The most further nodes of all experts of a layer."""


class Dual(NamedTuple):
    """The numbers d, and by how much it is natural to lower each."""

    sample: Float[np.ndarray, " B"]
    expert: Float[np.ndarray, "L E"]
    sample_scale: Float[np.ndarray, " B"]
    expert_scale: Float[np.ndarray, "L E"]


def random_vectors(samples: int, layers: int, experts: int, *, copies: int, nodes: int) -> Vectors:
    """Return random vectors. All experts have equally many copies."""
    rng = np.random.default_rng(0)
    sample, expert = rng.normal(size=(samples, RANK)), rng.normal(size=(layers, experts, RANK))
    more = copies / experts
    squares = np.full((layers, experts), max(1 - more / 2 / (nodes - 1), LEAST_LENGTH))
    return Vectors(
        sample / np.linalg.norm(sample, axis=1, keepdims=True),
        expert / np.linalg.norm(expert, axis=2, keepdims=True),
        np.full((layers, experts), 1 + more),
        squares,
    )


def relax(
    weights: Weights,
    load: Float[np.ndarray, "L E"],
    share: Float[np.ndarray, " B"],
    *,
    nodes: int,
    token: float,
    copy: float,
    push: float,
    copies: int,
) -> Relaxation:
    """Return the relaxation for given weights.

    Args:
        weights: the coefficients of the crossings.
        load: token copies of each expert.
        share: each sample's share of the tokens.
        nodes: N, at least 2.
        token, copy: the price of the unevenness of the tokens in all layers, and of a token copy.
        push: the price of a resident.
        copies: the most residents of a layer, in all nodes.
    """
    experts, part = load.shape[1], 1 - 1 / nodes
    inside = -part / 2 * weights.pair
    if not copies:
        loads = load / np.sqrt(np.maximum(load.sum(1, keepdims=True), 1))
        inside = inside + copy * (nodes - 1) * loads[:, :, None] * loads[:, None]
    even = EVENNESS * (weights.own.sum((1, 2)) + weights.pair.sum((1, 2))) / experts**2
    # A node has between 0 and `copies / nodes` residents.
    off = nodes / (nodes - 1) * nodes * (copies / nodes) ** 2 / 4
    constant = weights.height.sum() - (weights.own.sum() + weights.pair.sum() / 2) / nodes - off * even.sum()
    return Relaxation(
        nodes,
        share,
        token * (nodes - 1),
        -part / 2 * weights.own,
        inside + even[:, None, None],
        float(constant),
        push - weights.own.sum(1) / nodes,
        min(copies, experts * (nodes - 1)),
    )


def descend(relaxation: Relaxation, vectors: Vectors, *, sweeps: int) -> tuple[Vectors, Dual]:
    """Move one vector after another to where the function is least, and return the numbers d of the last point."""
    sample, expert = vectors.sample.copy(), vectors.expert.copy()
    between, inside, share = relaxation.between, relaxation.inside, relaxation.share
    own, length = np.diagonal(inside, axis1=1, axis2=2), np.sqrt(vectors.squares)
    uneven = relaxation.uneven
    for _ in range(sweeps):
        pull = between.transpose(0, 2, 1) @ sample
        for e in range(expert.shape[1]):
            slope = pull[:, e] + (inside[:, e, None] @ expert)[:, 0] - own[:, e, None] * expert[:, e]
            norm = np.maximum(np.linalg.norm(slope, axis=1), 1e-300)
            expert[:, e] = -slope * (length[:, e] / norm)[:, None]
        pull, mean = (between @ expert).sum(0), share @ sample
        for s in range(len(sample)):
            mean -= share[s] * sample[s]
            slope = pull[s] + uneven * share[s] * mean
            sample[s] = -slope / max(np.sqrt(slope @ slope), 1e-300)
            mean += share[s] * sample[s]
    slopes = between.transpose(0, 2, 1) @ sample + inside @ expert - own[..., None] * expert
    expert_scale = np.linalg.norm(slopes, axis=2) / length
    mean = share @ sample
    slopes = (between @ expert).sum(0) + uneven * share[:, None] * (mean - share[:, None] * sample)
    sample_scale = np.linalg.norm(slopes, axis=1)
    at_expert = own - expert_scale
    if relaxation.copies:
        at_expert = np.minimum(at_expert, 0)  # so that further copies are best taken one by one
    dual = Dual(uneven * share**2 - sample_scale, at_expert, sample_scale, expert_scale)
    return vectors._replace(sample=sample, expert=expert), dual


def follow_residents(relaxation: Relaxation, vectors: Vectors, dual: Dual, *, step: float) -> Vectors:
    """Move the lengths of vectors towards those of the best residents."""
    if not relaxation.copies:
        return vectors
    nodes, holders = relaxation.nodes, 1 + _best_copies(relaxation, dual.expert)[1]
    squares = np.maximum(holders * (nodes - holders) / (nodes - 1), LEAST_LENGTH)
    return vectors._replace(
        holders=(1 - step) * vectors.holders + step * holders,
        squares=(1 - step) * vectors.squares + step * squares,
    )


def certified(relaxation: Relaxation, dual: Dual) -> float:
    """Return the bound of the numbers d, lowered by about as little as makes it valid."""
    expert, sample = (
        np.maximum(scale, MARGIN * scale.mean()) for scale in (dual.expert_scale, dual.sample_scale)
    )
    lower, upper = 0.0, 1e-4

    def lowered(by: float) -> Dual:
        return dual._replace(sample=dual.sample - by * sample, expert=dual.expert - by * expert)

    while not _is_valid(relaxation, lowered(upper)):
        lower, upper = upper, 3 * upper
        if upper > 1e6:
            return -np.inf
    for _ in range(4):
        middle = (lower + upper) / 2
        lower, upper = (lower, middle) if _is_valid(relaxation, lowered(middle)) else (middle, upper)
    valid = lowered(upper)
    saved, _ = _best_copies(relaxation, valid.expert)
    return relaxation.constant + float(valid.sample.sum() + valid.expert.sum() + saved)


def _is_valid(relaxation: Relaxation, dual: Dual) -> bool:
    """Return whether the function less the sum of d x squared lengths is nowhere negative."""
    experts, share = dual.expert.shape[1], relaxation.share
    try:
        factor = np.linalg.cholesky(relaxation.inside - dual.expert[..., None] * np.eye(experts))
        reduced = np.linalg.solve(factor, relaxation.between.transpose(0, 2, 1)).reshape(-1, len(share))
        rest = relaxation.uneven * np.outer(share, share) - np.diag(dual.sample) - reduced.T @ reduced
        np.linalg.cholesky(rest)
    except np.linalg.LinAlgError:
        return False
    return True


def _best_copies(
    relaxation: Relaxation, expert: Float[np.ndarray, "L E"]
) -> tuple[float, Float[np.ndarray, "L E"]]:
    """Return what the best further nodes of all experts add to the bound, and their numbers."""
    layers, experts, nodes = *expert.shape, relaxation.nodes
    if not relaxation.copies:
        return 0.0, np.zeros((layers, experts))
    holders = np.arange(1, nodes)
    longer = ((holders + 1) * (nodes - holders - 1) - holders * (nodes - holders)) / (nodes - 1)
    # Each further node costs at least as much as the one before it, because d is at most 0.
    added = (expert[..., None] * longer + relaxation.copy[..., None]).reshape(layers, -1)
    best = np.argsort(added, 1)[:, : relaxation.copies]
    taken: Bool[np.ndarray, "L n"] = np.zeros(added.shape, bool)
    np.put_along_axis(taken, best, True, 1)
    taken &= added < 0
    return float(added[taken].sum()), taken.reshape(layers, experts, -1).sum(-1).astype(float)
