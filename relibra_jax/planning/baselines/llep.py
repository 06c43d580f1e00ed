"""LLEP, least-loaded expert parallelism (arXiv 2601.17111), as a planner.

In order of load, largest first, each expert gives the load that its rank has above a fixed capacity to the least loaded
rank, which fetches the weights of the expert.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.planner import Planner
from relibra_jax.contract.types import EMPTY
from relibra_jax.planning.baselines.fixed_homes import replicate_from_fixed_homes
from relibra_jax.planning.baselines.spill import spill
from relibra_jax.support.limits import check_integer, check_not_negative


@functools.cache
def llep(
    *,
    capacity: float | None = None,
    min_tokens: int = 1024,
    fallback: float = 1.3,
    packed: bool = False,
    across_nodes: bool = False,
) -> Planner:
    """Make a planner from LLEP: homes stay, and load above a capacity spills to the least loaded ranks.

    Source: ``compute_llep_lpt_plan`` of github.com/SalesforceAIResearch/LeastLoadedEP; arXiv 2601.17111. Differences
    from the source:

    - A rank has R replica slots. In LLEP it fetches the weights of as many experts as are assigned to it.
    - Load for which no rank has room and a slot stays at home. LLEP puts it on the least loaded other rank, above that
      rank's capacity.
    - With enough slots no rank is above its capacity. With one or two slots per rank, the slots run out first.
    - If the largest rank load would not fall, nothing moves.
    - A domain is a node, as for all planners with replicas inside nodes. In LLEP it is the whole group, which is
      ``across_nodes`` here. The fallback uses the imbalance of the domain.

    Args:
        capacity: the load that a rank may compute, as a multiple of the mean: LLEP's alpha, ``max_tokens_factor``,
            which its authors set to 1 and say must be tuned. None is 1.05 with one replica slot per rank and 1 with
            more: of 1, 1.02, 1.05, 1.1 and 1.2 these balance recorded loads best. With few slots, leaving a margin
            needs fewer of them.
        min_tokens: the fewest tokens that are worth a matrix product, unless fewer are left to move: LLEP's m,
            ``min_tokens_per_gemm``.
        fallback: the imbalance below which nothing moves (plain expert parallelism): LLEP's lambda,
            ``MOE_ADAPTIVE_LPT_ROUTING_RATIO``. 1 disables the fallback, as in LLEP if the variable is unset.
        packed: whether to pack homes once, from the first batch's loads, as a checkpoint could store them. Otherwise
            homes are contiguous, as in the source.
        across_nodes: whether all ranks are one domain. Otherwise every node is one.

    Returns:
        A Planner whose state is a KeptHomes.

    Raises:
        ValueError: if ``capacity`` is below 1, if ``fallback`` is negative, or if ``min_tokens`` is not an integer of
            at least 1.

    >>> from relibra_jax.contract.types import Topology
    >>> from relibra_jax import PlanRequest
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> planner = llep(min_tokens=1)
    >>> plan, _ = planner.update(PlanRequest(load), planner.init(topology, 1), topology)
    >>> plan.quota.tolist()
    [[[[[42, 10, 0], [6, 4, 38]]]]]
    """
    check_integer("min_tokens", min_tokens, least=1)
    check_not_negative("fallback", fallback)
    if capacity is not None and not capacity >= 1:
        raise ValueError(f"capacity={capacity} must be at least 1 (1 is the mean rank load)")
    rule = functools.partial(_replicate, capacity=capacity, min_tokens=min_tokens, fallback=fallback)
    return replicate_from_fixed_homes(rule, packed=packed, across_nodes=across_nodes)


def _replicate(
    load: Int[jax.Array, "P H"],
    replica_slots: int,
    *,
    capacity: float | None,
    min_tokens: int,
    fallback: float,
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Run LLEP's assignment in one domain."""
    start = load.sum(1, dtype=jnp.int32)
    total, top = start.sum(dtype=jnp.int32), start.max()
    mean = jnp.maximum(total // start.size, 1)
    if capacity is None:
        capacity = 1.05 if replica_slots == 1 else 1.0
    margin = jnp.floor(mean.astype(jnp.float32) * jnp.float32(capacity - 1))
    margin = jnp.minimum(margin, (jnp.maximum(top, mean) - mean).astype(jnp.float32)).astype(jnp.int32)
    spilled = spill(
        load,
        mean + margin,
        jnp.argsort(-load.ravel(), stable=True).astype(jnp.int32),
        replica_slots=replica_slots,
        kept=0,
        fewest=lambda _, movable, __: jnp.minimum(movable, min_tokens),
    )
    balanced = top.astype(jnp.float32) * jnp.float32(start.size) < total.astype(jnp.float32) * jnp.float32(
        fallback
    )
    improves = ~balanced & (spilled.quota().sum(1, dtype=jnp.int32).max() < top)
    home_quota = jnp.pad(load, ((0, 0), (0, replica_slots)))
    return jnp.where(improves, spilled.replica, EMPTY), jnp.where(improves, spilled.quota(), home_quota)
