"""The data of a batch that planning needs: token counts per sample and expert, and the routes of sampled tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from relibra_jax.contract.check import check_load
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import (
    Array,
    Assignment,
    Planner,
    RoutingReplay,
    Topology,
    Transitions,
    check_shape,
)
from relibra_jax.planning.token_sample import Routes, sample_routes
from relibra_jax.planning.transitions import transitions_for


class BatchCounts(NamedTuple):
    """The token counts of all samples of a batch."""

    sample_load: Integer[Array, "B L E"]
    """The number of token copies of each sample for each expert."""
    tokens: Integer[Array, " B"]
    """The length of each sample, in real tokens."""
    routes: Routes | None = None
    """Sampled tokens with their experts; needed to plan time or residents."""
    transitions: Transitions | None = None
    """Transition counts, for planners that use them."""
    row_tokens: Float[Array, ""] | float | None = None
    """T, the number of token positions of a sample in the replay, to which rows that are not packed are padded; None
    for the longest sample."""


def count_batch(
    replay: RoutingReplay, planner: Planner, topology: Topology, *, with_routes: bool
) -> BatchCounts:
    """Compute the counts that a planner needs from the routing replay of a batch. Works under jit.

    Args:
        replay: the routing of all samples of the batch.
        planner: the planner, which decides whether transitions are counted.
        topology: the expert-parallel group.
        with_routes: whether to sample routes. They are always sampled if the topology has resident slots.

    Returns:
        The counts of the batch.

    >>> from relibra_jax import static
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> replay = RoutingReplay(np.zeros((2, 8, 3, 1), np.uint8), np.arange(8) < np.array([[8], [5]]))
    >>> counts = count_batch(replay, static(), topology, with_routes=False)
    >>> counts.sample_load[:, 0].tolist(), counts.tokens.tolist()
    ([[8, 0, 0, 0], [5, 0, 0, 0]], [8, 5])
    """
    return BatchCounts(
        sample_load(replay, num_experts=topology.num_experts),
        replay.mask.sum(1, dtype=np.int32),
        sample_routes(replay) if with_routes or topology.resident_slots else None,
        transitions_for(planner, replay, num_experts=topology.num_experts),
        float(replay.mask.shape[1]),
    )


def widen_counts(counts: BatchCounts, topology: Topology) -> BatchCounts:
    """Convert counts to int32, so that sums over samples do not overflow the small integers that workers send.

    Args:
        counts: the counts of a batch, in any integer dtypes.
        topology: the expert-parallel group.

    Returns:
        The counts in int32.

    Raises:
        ValueError: if ``sample_load`` is not ``[B, L, E]`` with B the length of ``tokens`` and E the experts of the
            topology.
    """
    load, tokens = jnp.asarray(counts.sample_load, jnp.int32), jnp.asarray(counts.tokens, jnp.int32)
    check_shape("sample_load", load.shape, (len(tokens), *load.shape[1:2], topology.num_experts))
    return counts._replace(sample_load=load, tokens=tokens)


def check_counts(counts: BatchCounts, starts: Sequence[Assignment], topology: Topology) -> None:
    """Raise ValueError unless planners can use the loads of the first assignments. Traced values are not checked.

    Args:
        counts: the counts of a batch.
        starts: the first assignment of every stage.
        topology: the expert-parallel group.

    Raises:
        ValueError: under the conditions of `relibra_jax.contract.check.check_load`.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((counts.sample_load, starts))):
        return
    load = np.asarray(counts.sample_load)
    if load.min(initial=0) >= 0 and load.sum((0, 2), dtype=np.int64).max(initial=0) < 2**31:
        return
    load = np.concatenate([load, np.zeros_like(load[:1])])  # of nobody
    for start in starts:
        by_rank = np.stack([load[ranks].sum(2) for ranks in np.asarray(start.sample)])
        check_load(np.moveaxis(by_rank, 3, 1), topology)
