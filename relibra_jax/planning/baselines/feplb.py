"""FEPLB as a planner: the busiest experts of a rank move whole, inside their node, in every micro-batch.

Source: arXiv 2604.19654; its code is not public, so this is our reading of what is written about it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.limits import check_integer
from relibra_jax.plan import expert_totals
from relibra_jax.plan_check import check_load
from relibra_jax.planning.baselines.kept_homes import KeptHomes, init_homes, kept_homes
from relibra_jax.planning.baselines.whole_moves import at_home_only, move_whole
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.types import Plan, Planner, Topology


def feplb(*, dynamic: int = 4, min_tokens: int = 1) -> Planner:
    """FEPLB as a planner with fixed homes: some experts of every rank are dynamic, and may be computed elsewhere.

    Source: arXiv 2604.19654. Its scheduler takes the most loaded rank and its busiest dynamic expert, and copies that
    expert, weights and all tokens, to the least loaded rank, until nothing helps or the room for copies is used up.
    Experts are placed at long intervals only, when a checkpoint is written. What differs here, and why:

    - The room is the replica slots, as for all planners; the source has room for 8 copies a rank.
    - If the busiest dynamic expert is too large to help, the next one is tried. The source says that moves end when
      none is useful, not in which order they are tried; stopping at the first would only be weaker.
    - Which experts are dynamic is not published: here the busiest of each micro-batch, the best that foresight allows.
    - How the source places experts is not published: here EPLB packs them, once, from the first batch's true loads.

    Args:
        dynamic: the most experts of a rank that may move; the source's default is 4.
        min_tokens: the fewest token copies for which an expert moves, the source's threshold tau. It is not published;
            the default moves whatever helps.

    Returns:
        A Planner whose state is a KeptHomes.

    Raises:
        ValueError: if ``dynamic`` is not an integer of at least 0, or ``min_tokens`` not one of at least 1.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[60, 50, 6, 4], [0, 0, 0, 0]]]], [[[[10, 20, 70, 50], [0, 0, 0, 0]]]]])
    >>> planner = feplb()
    >>> plan, _ = planner.update(load, planner.init(topology, 1), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[56, 64]]], [[[80, 70]]]]
    """
    check_integer("dynamic", dynamic, least=0)
    check_integer("min_tokens", min_tokens, least=1)

    def update(load, state: KeptHomes, topology: Topology) -> tuple[Plan, KeptHomes]:
        check_load(load, topology)
        load = expert_totals(load)
        home = kept_homes(load, state, topology)

        def rule(load, _):
            return _move_dynamic(load, topology.replica_slots, dynamic=dynamic, min_tokens=min_tokens)

        return plan_per_node(rule, load, load, home, topology), KeptHomes(home)

    return Planner(init_homes, update)


def _move_dynamic(
    load: Int[jax.Array, "P H"], replica_slots: int, *, dynamic: int, min_tokens: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """The scheduler in one node."""
    busiest_first = jnp.argsort(-load, axis=1, stable=True)
    place = jnp.argsort(busiest_first, axis=1)
    movable = (place < dynamic) & (load >= min_tokens)
    moved = move_whole(at_home_only(load, replica_slots), movable)
    return merge_copies(moved.replica, jnp.concatenate([moved.at_home, moved.tokens], 1))
