"""Some tokens of a batch with their routes: what planners see beyond loads.

A few thousand tokens say how many distinct tokens cross between nodes: the mean over a layer is then known to about 1%.
"""

from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.limits import check_integer
from relibra_jax.types import EMPTY, Array, Assignment, RoutingReplay, TokenSample

TOKENS: Final = 16_384
"""Tokens of a batch that are sampled; 12 MB for 94 layers of top-8."""
MOST_TOKENS: Final = 46_340
"""Its square fits int32, in which the distances are reckoned."""


class Routes(NamedTuple):
    """Some tokens of a batch, by the sample that they are of. It does not depend on where samples are assigned."""

    expert_ids: Int[Array, "Q L K"]
    """The experts of Q tokens, logical ids."""
    sample: Int[Array, " Q"]
    """The sample that each token is of; EMPTY where the batch has no tokens at all."""


def sample_routes(replay: RoutingReplay, *, count: int = TOKENS) -> Routes:
    """Take tokens of a batch at even distances, so that every sample gives as large a part as of the batch it is.

    Works under jit, and draws nothing.

    Args:
        replay: expert_ids ``[B, T, L, K]``, mask ``[B, T]``.
        count: Q, the number of tokens; in a batch of fewer, some are taken repeatedly.

    Returns:
        Routes.

    Raises:
        ValueError: if ``count`` is not an integer from 1 to `MOST_TOKENS`.

    >>> import numpy as np
    >>> replay = RoutingReplay(np.arange(6).reshape(2, 3, 1, 1), np.array([[True, True, False], [True, True, True]]))
    >>> routes = sample_routes(replay, count=5)
    >>> routes.expert_ids.ravel().tolist(), routes.sample.tolist()
    ([0, 1, 3, 4, 5], [0, 0, 1, 1, 1])
    """
    check_integer("count", count, least=1, most=MOST_TOKENS)
    mask = jnp.asarray(replay.mask)
    until = jnp.cumsum(mask.ravel(), dtype=jnp.int32)
    total = until[-1]
    # The n-th token of the batch is where the count first reaches n + 1. Whole and remainder, so that int32 holds it.
    number = jnp.arange(count, dtype=jnp.int32)
    wanted = number * (total // count) + number * (total % count) // count
    place = jnp.searchsorted(until, wanted + 1).astype(jnp.int32)
    place = jnp.minimum(place, until.size - 1)
    ids = jnp.asarray(replay.expert_ids)
    sample = jnp.where(total > 0, place // mask.shape[1], EMPTY)
    return Routes(ids.reshape(-1, *ids.shape[2:])[place], sample)


def place_routes(routes: Routes, assignment: Assignment) -> TokenSample:
    """Say where sampled tokens lie under an assignment.

    Args:
        routes: from `sample_routes`.
        assignment: where samples of the batch are, all or some, each once.

    Returns:
        TokenSample; EMPTY in both places for tokens of samples that are nowhere.

    >>> import numpy as np
    >>> routes = Routes(np.zeros((3, 1, 1), np.uint8), np.array([1, 0, 1]))
    >>> placed = place_routes(routes, Assignment(np.array([[[[1]], [[-1]]], [[[-1]], [[0]]]])))
    >>> placed.micro_batch.tolist(), placed.rank.tolist()
    ([0, 1, 0], [0, 1, 0])
    """
    sample = jnp.asarray(assignment.sample, jnp.int32)
    _, nodes, local, room = sample.shape
    ranks = nodes * local
    order = jnp.argsort(sample.ravel()).astype(jnp.int32)
    found = order[jnp.minimum(jnp.searchsorted(sample.ravel()[order], routes.sample), sample.size - 1)]
    nowhere = (sample.ravel()[found] != routes.sample) | (routes.sample == EMPTY)
    bin_ = found // room
    micro_batch = jnp.where(nowhere, EMPTY, bin_ // ranks)
    return TokenSample(routes.expert_ids, micro_batch, jnp.where(nowhere, EMPTY, bin_ % ranks))
