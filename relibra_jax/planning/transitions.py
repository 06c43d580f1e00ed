"""Count transitions between experts: from token to token, and from layer to layer."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.planner import Transitions
from relibra_jax.contract.types import EMPTY, RoutingReplay


@functools.partial(jax.jit, static_argnames="num_experts")
def count_transitions(replay: RoutingReplay, *, num_experts: int) -> Transitions:
    """Count the pairs of experts of neighbouring tokens, and of neighbouring layers of a token.

    Each of a token's K experts is paired with each of the K experts that follow. The function counts one sample and
    layer at a time, so it needs memory only for the counts and for one sample's tokens by experts.

    Args:
        replay: the routing of all samples of the batch. Only real tokens count, and along tokens only pairs that are
            adjacent in a sample.
        num_experts: E, the number of logical experts of a layer.

    Returns:
        The transition counts of the batch, float32.

    >>> import numpy as np
    >>> replay = RoutingReplay(np.array([[[[0], [1]], [[0], [2]]]]), np.array([[True, True]]))
    >>> counts = count_transitions(replay, num_experts=3)
    >>> counts.along_tokens[1].tolist()  # in layer 1, expert 2 follows expert 1
    [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    >>> counts.across_layers[1].tolist()  # once each from expert 0 of layer 0 to experts 1 and 2
    [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    zeros = jnp.zeros((replay.expert_ids.shape[2], num_experts, num_experts), jnp.float32)
    count = functools.partial(_count_sample, num_experts=num_experts)

    def add(total: Transitions, sample) -> tuple[Transitions, None]:
        ids, mask = sample
        return jax.tree.map(jnp.add, total, count(ids.astype(jnp.int32), mask)), None

    return jax.lax.scan(add, Transitions(zeros, zeros), tuple(map(jnp.asarray, replay)))[0]


def _count_sample(
    ids: Int[jax.Array, "T L K"], mask: Bool[jax.Array, " T"], *, num_experts: int
) -> Transitions:
    ids = jnp.where(mask[:, None, None], ids, EMPTY).swapaxes(0, 1)
    below = jnp.concatenate([jnp.full_like(ids[:1], EMPTY), ids[:-1]])

    def one_layer(pair) -> Transitions:
        below, above = (_tokens_by_experts(each, num_experts) for each in pair)
        # Sums of zeros and ones, exact in float32 in any order for fewer than 2**24 tokens.
        return Transitions(above[:-1].T @ above[1:], below.T @ above)

    return jax.lax.map(one_layer, (below, ids))


def _tokens_by_experts(ids: Int[jax.Array, "T K"], num_experts: int) -> Float[jax.Array, "T E"]:
    """Return 1 for each expert that a token uses, 0 for the others; rows of EMPTY are zeros."""
    return jax.nn.one_hot(ids, num_experts, dtype=jnp.float32).sum(1)
