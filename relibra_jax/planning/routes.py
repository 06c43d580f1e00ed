"""Routes of sampled tokens of a batch, from which planners estimate crossings.

A few thousand tokens are enough to estimate the number of distinct tokens that cross between nodes: the mean over a
layer is then known to about 1%.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer

from relibra_jax.contract.planner import PlacedRoutes, Routes
from relibra_jax.contract.types import EMPTY, Array, Assignment, RoutingReplay
from relibra_jax.support.limits import check_integer

TOKENS: Final = 16_384
"""The default number of tokens that are sampled from a batch; 12 MB for 94 layers of top-8."""
MOST_TOKENS: Final = 46_340
"""The most tokens that may be sampled; the square of this number fits int32, in which sample positions are computed."""


def sample_routes(replay: RoutingReplay, *, count: int = TOKENS) -> Routes:
    """Take tokens that are spread over a batch, so every sample is represented in proportion to its length.

    Works under jit, and uses no random numbers. Only the routes that are taken are read.

    Args:
        replay: the routing of all samples of the batch.
        count: Q, the number of tokens. If the batch has fewer, some are repeated.

    Returns:
        The sampled tokens with their experts.

    Raises:
        ValueError: if ``count`` is not an integer from 1 to `MOST_TOKENS`, or under jit if int32 cannot number the
            token positions of the batch.

    >>> replay = RoutingReplay(np.arange(6).reshape(2, 3, 1, 1), np.array([[True, True, False], [True, True, True]]))
    >>> routes = sample_routes(replay, count=5)
    >>> routes.expert_ids.ravel().tolist(), routes.sample.tolist()
    ([0, 1, 3, 4, 5], [0, 0, 1, 1, 1])
    """
    check_integer("count", count, least=1, most=MOST_TOKENS)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in replay):
        return _sample(replay, count)
    ids, mask = map(np.asarray, replay)
    sample, position = token_places(mask.sum(1), count)
    if not mask.any():
        return Routes(np.zeros((count, *ids.shape[2:]), ids.dtype), sample)
    numbers, starts = np.unique(sample, return_index=True)
    for number, part in zip(numbers, np.split(position, starts[1:]), strict=True):
        part[:] = np.flatnonzero(mask[number])[part]
    return Routes(ids[sample, position], sample)


def token_places(
    lengths: Integer[np.ndarray, " B"], count: int
) -> tuple[Int[np.ndarray, " Q"], Int[np.ndarray, " Q"]]:
    """Return the sample and the number within it of Q real tokens that are spread over a batch.

    Args:
        lengths: the number of real tokens of each sample.
        count: Q, the number of tokens.

    Returns:
        The samples, int32, which do not decrease; EMPTY if the batch has no tokens. The numbers of tokens, int64.
    """
    ends, total = np.cumsum(lengths, dtype=np.int64), np.asarray(lengths.sum(dtype=np.int64))
    if not total:
        return np.full(count, EMPTY, np.int32), np.zeros(count, np.int64)
    token = spread(total, count)
    sample = np.searchsorted(ends, token, side="right")
    return sample.astype(np.int32), token - (ends - lengths)[sample]


def spread(total: Integer[Array, "*shape"], count: int) -> Integer[Array, "*shape Q"]:
    """Return the numbers of Q items of a row: one from each of Q equal intervals, at a place that varies.

    Items at even distances would miss a part of routing whose period divides the distance. Places are those of the
    golden ratio's multiples, modulo 1.

    Args:
        total: the number of items. If it is below Q, some items are taken several times.
        count: Q, at most `MOST_TOKENS`.

    >>> spread(np.array([1000, 3]), 5).tolist()
    [[0, 323, 447, 770, 894], [0, 0, 1, 1, 2]]
    """
    index = np.arange(count + 1, dtype=np.int32).reshape(*[1] * total.ndim, -1)
    total = total[..., None]
    # Quotient and remainder keep all products within int32.
    first = index * (total // count) + index * (total % count) // count
    width = first[..., 1:] - first[..., :-1]
    place = (index[..., :-1].astype(np.uint32) * np.uint32(0x9E3779B9) >> 20).astype(np.int32)  # of 4,096
    return first[..., :-1] + (width >> 12) * place + ((width & 4095) * place >> 12)


def _sample(replay: RoutingReplay, count: int) -> Routes:
    mask = jnp.asarray(replay.mask)
    check_integer("token positions of a replay under jit, B * T", mask.size, least=0)
    counts = jnp.cumsum(mask.ravel(), dtype=jnp.int32)
    total = counts[-1]
    # The n-th token of the batch is where the count first reaches n + 1.
    position = jnp.searchsorted(counts, spread(total, count) + 1).astype(jnp.int32)
    position = jnp.minimum(position, counts.size - 1)
    ids = jnp.asarray(replay.expert_ids)
    sample = jnp.where(total > 0, position // mask.shape[1], EMPTY)
    return Routes(ids.reshape(-1, *ids.shape[2:])[position], sample)


def place_routes(routes: Routes, assignment: Assignment) -> PlacedRoutes:
    """Find the micro-batch and rank of sampled tokens under an assignment.

    Args:
        routes: the sampled tokens, as `sample_routes` returns them.
        assignment: the assignment of all or some samples of the batch, each at most once.

    Returns:
        The sampled tokens with their micro-batches and ranks; both are EMPTY for tokens of unassigned samples.

    >>> routes = Routes(np.zeros((3, 1, 1), np.uint8), np.array([1, 0, 1]))
    >>> placed = place_routes(routes, Assignment(np.array([[[[1]], [[-1]]], [[[-1]], [[0]]]])))
    >>> placed.micro_batch.tolist(), placed.rank.tolist()
    ([0, 1, 0], [0, 1, 0])
    """
    sample = jnp.asarray(assignment.sample, jnp.int32)
    _, nodes, local, positions = sample.shape
    ranks = nodes * local
    order = jnp.argsort(sample.ravel()).astype(jnp.int32)
    position = order[jnp.minimum(jnp.searchsorted(sample.ravel()[order], routes.sample), sample.size - 1)]
    unassigned = (sample.ravel()[position] != routes.sample) | (routes.sample == EMPTY)
    bin_ = position // positions
    micro_batch = jnp.where(unassigned, EMPTY, bin_ // ranks)
    return PlacedRoutes(routes.expert_ids, micro_batch, jnp.where(unassigned, EMPTY, bin_ % ranks))
