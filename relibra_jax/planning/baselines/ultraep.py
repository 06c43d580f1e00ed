"""UltraEP's replication (arXiv 2606.04101; github.com/Dots-Infra/UltraEP), as a planner.

The planner searches for the smallest rank load to which spilling can bring the domain. The fullest rank spills first,
its largest expert first, always to the rank with the most room.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.planner import Planner
from relibra_jax.planning.baselines.fixed_homes import replicate_from_fixed_homes
from relibra_jax.planning.baselines.spill import initial_spill, spill
from relibra_jax.support.limits import check_integer, check_not_negative

QUICK_TRIES = 3
"""The number of thresholds that UltraEP tries before it searches."""


@functools.cache
def ultraep(
    *,
    tolerance: float = 0.01,
    min_tokens: int | None = 1024,
    packed: bool = False,
    across_nodes: bool = False,
) -> Planner:
    """Make a planner from UltraEP: homes stay, and ranks spill load down to the smallest threshold found.

    Source: ``quota_placement_solve_kernel`` of github.com/Dots-Infra/UltraEP (1.0.0); arXiv 2606.04101. The first
    threshold tried is the mean plus ``tolerance``. The second and the third are each higher by one hundredth of the
    largest rank load. In these tries, a replica is too small if it has fewer tokens than its rank's excess divided by
    the number of ranks that could take some. The first threshold that spilling reaches is taken. If it reaches none,
    the smallest one between mean and maximum is searched, with replicas of at least ``min_tokens``. At least one token
    of every expert stays at home. Differences from the source:

    - The search halves its interval. In the source, four warps divide it by five. Both can reach the same thresholds,
      but one may find a threshold that the other skips, because a higher threshold is not always easier to reach.
    - ``min_tokens=None`` balances as well as the method can. It applies the size rule of the first tries in the search
      too, and leaves out the second and third try, which trade balance for time. On random domains of 8 ranks with two
      slots, the largest rank load is then 0.8% above the mean; with ``min_tokens=1`` it is 1.3% above.
    - Quotas are not divided over the ranks that hold the tokens; in this project that follows from the plan.

    Args:
        tolerance: the distance of the first threshold from the mean, as a fraction of the mean: UltraEP's
            ``QUOTA_ORACLE_EPS``.
        min_tokens: the fewest tokens of a replica in the search: UltraEP's ``QUOTA_MIN_TOKENS_PER_REPLICA``. None
            applies the rule described above.
        packed: whether to pack homes once, from the first batch's loads, as a checkpoint could store them. Otherwise
            homes are contiguous, as in the source.
        across_nodes: whether all ranks are one domain of fast interconnect. Otherwise every node is one.

    Returns:
        A Planner whose state is a KeptHomes.

    Raises:
        ValueError: if ``tolerance`` is negative, or if ``min_tokens`` is not an integer of at least 1.

    >>> from relibra_jax.contract.types import Topology
    >>> from relibra_jax import PlanRequest
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> planner = ultraep(tolerance=0.0)
    >>> plan, _ = planner.update(PlanRequest(load), planner.init(topology, 1), topology)
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
    """Run UltraEP's search in one domain."""
    start = load.sum(1, dtype=jnp.int32)
    mean, top = -(-start.sum(dtype=jnp.int32) // start.size), start.max()
    margin = jnp.ceil(mean.astype(jnp.float32) * jnp.float32(tolerance))
    first = mean + jnp.minimum(margin, (top - mean).astype(jnp.float32)).astype(jnp.int32)
    tries = 1 if min_tokens is None else QUICK_TRIES
    order = _spill_order(load)

    def attempt(carry):
        best, low, high, number = carry
        quick = number < tries
        quick_threshold = first + jnp.minimum(number * -(-top // 100), top - first)
        threshold = jnp.where(quick, quick_threshold, low + (high - low) // 2)

        def fewest(need, _, takers):
            share = -(-need // jnp.maximum(takers, 1))
            return share if min_tokens is None else jnp.where(quick, share, min_tokens)

        spilled = spill(load, threshold, order, replica_slots=replica_slots, kept=1, fewest=fewest)
        reached = spilled.excess.max() == 0
        best = jax.tree.map(functools.partial(jnp.where, reached), spilled, best)
        low = jnp.where(reached & quick, threshold, jnp.where(reached | quick, low, threshold + 1))
        return best, low, jnp.where(reached, threshold, high), number + 1

    start_state = (initial_spill(load, top, replica_slots), mean, top, jnp.int32(0))
    best, *_ = jax.lax.while_loop(lambda carry: carry[1] < carry[2], attempt, start_state)
    return best.replica, best.quota()


def _spill_order(load: Int[jax.Array, "P H"]) -> Int[jax.Array, " E"]:
    """Order the experts: those of the fullest rank first, and the largest expert of each rank first."""
    by_rank = jnp.argsort(-load.sum(1, dtype=jnp.int32), stable=True)
    by_load = jnp.argsort(-load, axis=1, stable=True)
    return (by_rank[:, None] * load.shape[1] + by_load[by_rank]).ravel().astype(jnp.int32)
