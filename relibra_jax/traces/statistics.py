"""Statistics of a trace that matter for load balancing: skew, its changes, and experts that tokens use together.

Loads here are the token copies ``[M, L, E]`` of micro-batches, which are consecutive samples of the trace. All is
counted on the host.
"""

import itertools
import math
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.planning.metrics import batch_imbalance

HOT_SHARE: Final = 8
"""The inverse of the share of hot experts: an eighth of the experts of a layer, and at least one."""
PAIRS_EXPECTED: Final = 10
"""The smallest number of times that chance must produce a pair of experts for its lift to count; fewer are noise."""


class PairLift(NamedTuple):
    """The lift of pairs of experts: how much more often tokens use two experts together than by chance."""

    mean: Float[np.ndarray, " L"]
    """The mean lift over the pairs of experts that tokens use, in each layer."""
    largest: Float[np.ndarray, " L"]
    """The largest lift among pairs that chance would produce at least `PAIRS_EXPECTED` times; NaN if there is none."""


def count_load(replay: RoutingReplay, num_experts: int) -> Int[np.ndarray, "B L E"]:
    """Count the token copies that every sample sends to every expert."""
    return np.asarray(sample_load(replay, num_experts=num_experts))


def micro_batch_load(load: Int[np.ndarray, "B L E"], micro_batches: int) -> Int[np.ndarray, "M L E"]:
    """Sum the loads of consecutive samples into micro-batches, whose numbers of samples differ by at most one.

    >>> micro_batch_load(np.array([[[1, 0]], [[2, 0]], [[0, 4]]]), 2).tolist()
    [[[3, 0]], [[0, 4]]]
    """
    return np.stack([part.sum(0) for part in np.array_split(load, micro_batches)])


def hottest_expert(load: Int[np.ndarray, "L E"]) -> Float[np.ndarray, " L"]:
    """Return the load of the hottest expert of each layer / the mean.

    >>> hottest_expert(np.array([[6, 1, 1, 0]])).tolist()
    [3.0]
    """
    return load.max(-1) / load.mean(-1)


def load_spread(load: Int[np.ndarray, "*layers E"]) -> Float[np.ndarray, "*layers"]:
    """Return the standard deviation of experts' loads / their mean, in each layer.

    >>> load_spread(np.array([[3, 1, 3, 1]])).tolist()
    [0.5]
    """
    return load.std(-1) / load.mean(-1)


def contiguous_imbalance(load: Int[np.ndarray, "M L E"], ranks: int) -> float:
    """Return the imbalance of ranks that hold equally many consecutive experts, as `batch_imbalance` defines it.

    Args:
        load: token copies.
        ranks: the number of ranks, which must divide E.

    Returns:
        The sum of the maxima / the sum of the means over micro-batches, averaged over layers; 1 is perfect.

    >>> round(contiguous_imbalance(np.array([[[6, 2, 1, 1]], [[1, 1, 6, 2]]]), ranks=2), 4)
    1.6
    """
    by_rank = load.reshape(*load.shape[:2], 1, ranks, -1).sum(-1)
    return float(batch_imbalance(by_rank))


def hot_experts(load: Int[np.ndarray, "M L E"]) -> Int[np.ndarray, "M L H"]:
    """Return the hottest eighth of the experts of every layer and micro-batch; ties go to the lower id."""
    return np.argsort(-load, axis=-1, kind="stable")[..., : max(1, load.shape[-1] // HOT_SHARE)]


def hot_expert_churn(load: Int[np.ndarray, "M L E"]) -> float:
    """Return the share of hot experts that were not hot in the micro-batch before; 0 if the hot experts never change.

    Args:
        load: token copies of at least two micro-batches.

    Returns:
        The mean over layers and neighbouring micro-batches.

    >>> first, second = np.arange(16), np.array([*range(14), 3, 15])
    >>> hot_expert_churn(np.stack([first, second])[:, None])
    0.5
    """
    hot = np.zeros(load.shape, bool)
    np.put_along_axis(hot, hot_experts(load), True, axis=-1)
    return float(1 - (hot[1:] & hot[:-1]).sum() / hot[1:].sum())


def neighbour_correlation(load: Int[np.ndarray, "M L E"]) -> float:
    """Return the correlation of experts' loads in one micro-batch with those in the next.

    Args:
        load: token copies of at least two micro-batches.

    Returns:
        The mean over layers and neighbouring micro-batches, without layers whose experts are equally loaded; 1 if all
        are.

    >>> neighbour_correlation(np.array([[[4, 0, 2]], [[8, 2, 5]]]))
    1.0
    """
    deviation = load - load.mean(-1, keepdims=True)
    norm = np.sqrt((deviation**2).sum(-1))
    shared, scale = (deviation[1:] * deviation[:-1]).sum(-1), norm[1:] * norm[:-1]
    return float((shared[scale > 0] / scale[scale > 0]).mean()) if (scale > 0).any() else 1.0


def pair_lift(replay: RoutingReplay, num_experts: int) -> PairLift:
    """Compute how much more often tokens use two experts together than by chance, given how often each is used.

    The lift of a pair is its share of all pairs of experts that tokens use / the product of the two experts' loads,
    where the products are scaled so that they sum to 1 over all pairs.

    Args:
        replay: a replay with at least one token, and K of 2 or more.
        num_experts: E, the number of logical experts of a layer.

    Returns:
        The lifts in each layer.

    >>> ids = np.array([[0, 1], [0, 1], [2, 3], [2, 3]])[None, :, None]
    >>> pair_lift(RoutingReplay(ids, np.ones((1, 4), bool)), 4).mean.tolist()
    [3.0]
    """
    rows = np.asarray(replay.expert_ids)[np.asarray(replay.mask)]
    lifts = [_layer_lift(rows[:, layer], num_experts) for layer in range(rows.shape[1])]
    return PairLift(*map(np.array, zip(*lifts, strict=True)))


def _layer_lift(rows: Integer[np.ndarray, "Q K"], num_experts: int) -> tuple[float, float]:
    count = np.zeros(num_experts**2, np.int64)
    wide = rows.astype(np.int64)
    for one, other in itertools.combinations(range(rows.shape[1]), 2):
        count += np.bincount(wide[:, one] * num_experts + wide[:, other], minlength=num_experts**2)
    upper = np.triu_indices(num_experts, 1)
    square = count.reshape(num_experts, num_experts)
    pairs = (square + square.T)[upper]
    load = np.bincount(wide.ravel(), minlength=num_experts).astype(float)
    expected = np.outer(load, load)[upper]
    expected *= pairs.sum() / expected.sum()
    lift = pairs / np.where(expected > 0, expected, 1)
    counted = lift[expected >= PAIRS_EXPECTED]
    return float((lift * pairs).sum() / pairs.sum()), float(counted.max()) if counted.size else math.nan
