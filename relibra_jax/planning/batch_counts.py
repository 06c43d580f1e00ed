"""What a search knows of a batch: how many token copies its samples send to each expert, and some tokens' routes."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from relibra_jax.planning.token_sample import Routes, sample_routes
from relibra_jax.planning.transitions import transitions_for
from relibra_jax.replay import sample_load
from relibra_jax.types import Array, Planner, RoutingReplay, Topology, Transitions, check_shape


class BatchCounts(NamedTuple):
    """The counts of all samples of a batch."""

    sample_load: Integer[Array, "B L E"]
    """Token copies of each sample for each expert."""
    tokens: Integer[Array, " B"]
    """The length of each sample, in real tokens."""
    routes: Routes | None = None
    """Some tokens with their routes, where time or residents are planned."""
    transitions: Transitions | None = None
    """Which experts follow which, for planners that take them."""


def count_batch(
    replay: RoutingReplay, planner: Planner, topology: Topology, *, with_routes: bool
) -> BatchCounts:
    """Count what a planner takes of a batch. Works under jit.

    Args:
        replay: the routing of all samples of the batch.
        planner: the planner, which may take transitions.
        topology: the expert-parallel group.
        with_routes: whether to take routes, as for time; residents are planned from them in any case.

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
    )


def widen_counts(counts: BatchCounts, topology: Topology) -> BatchCounts:
    """Counts in int32, as sums over samples need: workers send the smallest integers that hold their own.

    Raises:
        ValueError: if ``sample_load`` is not ``[B, L, E]`` of as many samples as ``tokens`` and the topology's experts.
    """
    load, tokens = jnp.asarray(counts.sample_load, jnp.int32), jnp.asarray(counts.tokens, jnp.int32)
    check_shape("sample_load", load.shape, (len(tokens), *load.shape[1:2], topology.num_experts))
    return counts._replace(sample_load=load, tokens=tokens)
