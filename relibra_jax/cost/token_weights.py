"""Weights by which the crossings of every token are bounded from below, chosen where the relaxation puts its experts.

Let sa be 1 if sample s and expert a share a node and else 0, and ab the same for two experts. A token of sample s
crosses to each other node that has one of its experts, so it has at least these crossings:

    one expert a    1 - sa
    two experts     (3 - sa - sb - ab) / 2, and with more than two nodes also 2 - sa - sb - ab
    all experts     a plane height - own x (sum of sa) - pair x (sum of ab) that holds for all ways to distribute K
                    experts

Every token may take a different one of these, or a mean of several, and the bound on the crossings of a batch is as
good as the choice. The best choice and the best relaxation are a saddle point. It is approached step by step: tokens
take what is best for the mean of the relaxations so far, and the next relaxation is for the mean of what tokens took
(fictitious play). A whole layer takes one plane, if that is better than what its tokens take alone.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from relibra_jax.cost.node_relaxation import Weights

PLANES: Final = 65
"""The number of slopes to try on each axis."""


class Together(NamedTuple):
    """How much of a node samples and experts share, in the mean of the relaxations."""

    own: Float[np.ndarray, "L B E"]
    pair: Float[np.ndarray, "L E E"]


def best_weights(
    ids: Integer[np.ndarray, "t L K"],
    sample: Int[np.ndarray, " t"],
    load: Float[np.ndarray, "B L E"],
    pairs: Float[np.ndarray, "L E E"],
    together: Together,
    planes: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    *,
    nodes: int,
) -> Weights:
    """Return the weights of the crossings that are best for given places.

    Args:
        ids: the experts of each token.
        sample: the sample of each token.
        load: token copies of each sample for each expert.
        pairs: the number of tokens that use two experts together.
        together: how much of a node samples and experts share.
        planes: from `visit_planes`. None if nodes have residents: only single experts are then worthwhile.
        nodes: N.
    """
    layers = []
    for layer in range(ids.shape[1]):
        own_share, pair_share = together.own[layer], together.pair[layer]
        weights, crossings = _token_weights(
            ids[:, layer].astype(np.int64), sample, own_share, pair_share, nodes, pairwise=planes is not None
        )
        if planes is not None:
            height, own, pair = planes
            shared, shared_pairs = (load[:, layer] * own_share).sum(), (pairs[layer] * pair_share).sum() / 2
            values = height * len(ids) - own * shared - pair * shared_pairs
            best = values.argmax()
            if values[best] > crossings:
                weights = height[best] * len(ids), own[best] * load[:, layer], pair[best] * pairs[layer]
        layers.append(weights)
    return Weights(*map(np.stack, zip(*layers, strict=True)))


def _token_weights(
    ids: Int[np.ndarray, "t K"],
    sample: Int[np.ndarray, " t"],
    own: Float[np.ndarray, "B E"],
    pair: Float[np.ndarray, "E E"],
    nodes: int,
    *,
    pairwise: bool,
) -> tuple[tuple[np.floating, np.ndarray, np.ndarray], float]:
    """Return the weights of one layer if every token takes one or two of its experts, and their crossings."""
    (samples, experts), token = own.shape, np.arange(len(ids))
    place = sample[:, None] * experts + ids
    shared = own.ravel()[place]
    first = shared.argmin(1)
    least = shared[token, first]
    at_first = place[token, first]
    if not pairwise or ids.shape[1] == 1:
        one = np.bincount(at_first, minlength=samples * experts).reshape(samples, experts)
        return (np.float64(len(ids)), one.astype(float), np.zeros_like(pair)), float((1 - least).sum())
    slope, height = (0.5, 1.5) if nodes == 2 else (1.0, 2.0)
    expert = ids[token, first]
    more = shared + pair.ravel()[expert[:, None] * experts + ids]
    more[token, first] = np.inf
    second = more.argmin(1)
    of_two = height - slope * (least + more[token, second])
    two = of_two > 1 - least
    weight = np.bincount(at_first, np.where(two, slope, 1.0), minlength=samples * experts)
    weight = weight + slope * np.bincount(place[token, second][two], minlength=samples * experts)
    both = np.bincount((expert * experts + ids[token, second])[two], minlength=experts**2) * slope
    both = both.reshape(experts, experts)
    total = np.where(two, height, 1.0).sum()
    crossings = float(np.maximum(of_two, 1 - least).sum())
    return (total, weight.reshape(samples, experts), both + both.T), crossings


def visit_planes(top_k: int, nodes: int, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return planes ``height - own * j - pair * (pairs in a node)`` that are lower bounds of a token's crossings.

    Args:
        top_k: K, the number of experts of a token.
        nodes: N.
        room: the number of experts of a node.
    """
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
