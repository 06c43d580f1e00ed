"""UltraEP's replication (arXiv 2606.04101; github.com/Dots-Infra/UltraEP), as a planner.

The smallest rank load is searched to which the domain can be brought by spilling: the fullest rank first, its largest
expert first, always to the rank with most room.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.limits import check_integer, check_not_negative
from relibra_jax.planning.baselines.fixed_homes import replicate_from_fixed_homes
from relibra_jax.planning.baselines.spill import spill, unspilled
from relibra_jax.types import Planner

QUICK_TRIES = 3
"""Thresholds that UltraEP tries before it searches."""


def ultraep(
    *,
    tolerance: float = 0.01,
    min_tokens: int | None = 1024,
    packed: bool = False,
    across_nodes: bool = False,
) -> Planner:
    """UltraEP as a planner: homes that stay, and replicas by the smallest threshold to which ranks can be spilled.

    Source: ``quota_placement_solve_kernel`` of github.com/Dots-Infra/UltraEP (1.0.0); arXiv 2606.04101. First the mean
    plus ``tolerance`` is tried, then twice one hundredth of the largest rank load more. In these tries a replica is too
    small if it is below its rank's excess divided by the ranks that could take some. The first threshold that can be
    reached is taken. If none can, the smallest is searched between mean and maximum, with ``min_tokens``. At least one
    token of every expert stays at home. What differs:

    - The search halves its interval, where four warps divide it by five: the same thresholds are in reach, but one may
      be found that the other passes by, as a higher threshold is not always easier.
    - ``min_tokens=None``, for the most that the method can balance: the rule of the first tries holds in the search
      too, and the second and third try, which buy time with balance, are left out. On random domains of 8 ranks with
      two slots the largest rank load is then 0.8% above the mean, with ``min_tokens=1`` 1.3%.
    - Quotas are not divided over the ranks where tokens lie; in this project that follows from the plan.

    Args:
        tolerance: how far above the mean the first threshold is, UltraEP's ``QUOTA_ORACLE_EPS``; 0.01 is one per cent.
        min_tokens: the fewest tokens of a replica that the search plans, UltraEP's ``QUOTA_MIN_TOKENS_PER_REPLICA``;
            None as above.
        packed: whether homes are packed once, from the first batch's loads, as a checkpoint could be laid out;
            otherwise they are contiguous, as in the source.
        across_nodes: whether all ranks are one domain of fast interconnect; otherwise every node is one.

    Returns:
        A Planner whose state is a KeptHomes.

    Raises:
        ValueError: if ``tolerance`` is negative, or ``min_tokens`` is not an integer of at least 1.

    >>> from relibra_jax.types import Topology
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> planner = ultraep(tolerance=0.0)
    >>> plan, _ = planner.update(load, planner.init(topology, 1), topology)
    >>> plan.quota.tolist()
    [[[[[40, 10, 0], [6, 4, 40]]]]]
    """
    check_not_negative("tolerance", tolerance)
    if min_tokens is not None:
        check_integer("min_tokens", min_tokens, least=1)
    rule = functools.partial(_replicate, tolerance=tolerance, min_tokens=min_tokens)
    return replicate_from_fixed_homes(rule, packed=packed, across_nodes=across_nodes)


def _replicate(
    load: Int[jax.Array, "P H"], replica_slots: int, *, tolerance: float, min_tokens: int | None
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """UltraEP's search in one domain."""
    start = load.sum(1, dtype=jnp.int32)
    mean, top = -(-start.sum(dtype=jnp.int32) // start.size), start.max()
    above = jnp.ceil(mean.astype(jnp.float32) * jnp.float32(tolerance))
    first = mean + jnp.minimum(above, (top - mean).astype(jnp.float32)).astype(jnp.int32)
    tries = 1 if min_tokens is None else QUICK_TRIES
    order = _turns(load)

    def attempt(carry):
        best, low, high, turn = carry
        quick = turn < tries
        tried = first + jnp.minimum(turn * -(-top // 100), top - first)
        threshold = jnp.where(quick, tried, low + (high - low) // 2)

        def fewest(need, _, takers):
            share = -(-need // jnp.maximum(takers, 1))
            return share if min_tokens is None else jnp.where(quick, share, min_tokens)

        spilled = spill(load, threshold, order, replica_slots=replica_slots, kept=1, fewest=fewest)
        reached = spilled.excess.max() == 0
        best = jax.tree.map(functools.partial(jnp.where, reached), spilled, best)
        low = jnp.where(reached & quick, threshold, jnp.where(reached | quick, low, threshold + 1))
        return best, low, jnp.where(reached, threshold, high), turn + 1

    nothing = (unspilled(load, top, replica_slots), mean, top, jnp.int32(0))
    best, *_ = jax.lax.while_loop(lambda carry: carry[1] < carry[2], attempt, nothing)
    return best.replica, best.quota()


def _turns(load: Int[jax.Array, "P H"]) -> Int[jax.Array, " E"]:
    """Experts of the fullest rank first, the largest expert of each rank first."""
    by_rank = jnp.argsort(-load.sum(1, dtype=jnp.int32), stable=True)
    by_load = jnp.argsort(-load, axis=1, stable=True)
    return (by_rank[:, None] * load.shape[1] + by_load[by_rank]).ravel().astype(jnp.int32)
