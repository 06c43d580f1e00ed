"""FEPLB as a planner: in every micro-batch, the busiest experts of a rank move whole to other ranks of their node.

Source: arXiv 2604.19654. Its code is not public, so this module follows the text of the paper.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.planning.baselines.kept_homes import KeptHomes, init_homes, kept_homes
from relibra_jax.planning.baselines.whole_moves import all_at_home, move_whole
from relibra_jax.planning.compiled_update import compiled_update
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.support.limits import check_integer


@functools.cache
def feplb(*, dynamic: int = 4, min_tokens: int = 1) -> Planner:
    """Make a planner from FEPLB, with fixed homes and moves of whole experts inside nodes.

    Source: arXiv 2604.19654. Some experts of every rank are dynamic: they may be computed on another rank. The
    scheduler takes the most loaded rank and its busiest dynamic expert, and copies that expert with all its tokens to
    the least loaded rank. It repeats this until no move helps or no slot is free. Homes change only at long
    intervals, when a checkpoint is written. Differences from the source, and the reasons:

    - Copies use the replica slots, as in all planners. The source has room for 8 copies per rank.
    - If the busiest dynamic expert is too large to help, the next one is tried. The source says that moves end when
      none is useful, but not in which order they are tried. Stopping at the first would only be weaker.
    - The source does not publish which experts are dynamic. Here they are the busiest ones of each micro-batch, the
      best choice with foresight.
    - The source does not publish how it places experts. Here EPLB packs them once, from the first batch's true loads.

    Static experts are computed first, while the weights of dynamic ones travel, in layers with late replicas
    (`relibra_jax.execution.late_replicas`). The source sends tokens to the home of their expert, and copies them on
    with the copy engines of GPUs. With replay their places are known before, so dispatch sends them there at once.
    Weights travel through NCCL, whose kernels take some of a GPU's multiprocessors, as copy engines would not.

    Args:
        dynamic: the largest number of experts of a rank that may move; the source's default is 4.
        min_tokens: the fewest token copies for which an expert moves, the source's threshold tau, whose value is not
            published. The default allows every move that helps.

    Returns:
        A Planner whose state is a KeptHomes.

    Raises:
        ValueError: if ``dynamic`` is not an integer of at least 0, or ``min_tokens`` is not an integer of at least 1.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[60, 50, 6, 4], [0, 0, 0, 0]]]], [[[[10, 20, 70, 50], [0, 0, 0, 0]]]]])
    >>> planner = feplb()
    >>> plan, _ = planner.update(PlanRequest(load), planner.init(topology, 1), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[56, 64]]], [[[80, 70]]]]
    """
    check_integer("dynamic", dynamic, least=0)
    check_integer("min_tokens", min_tokens, least=1)

    @compiled_update
    def update(request: PlanRequest, state: KeptHomes, topology: Topology) -> tuple[Plan, KeptHomes]:
        load = request.by_expert
        home = kept_homes(load, state, topology)

        def rule(load, _):
            return _move_dynamic(load, topology.replica_slots, dynamic=dynamic, min_tokens=min_tokens)

        return plan_per_node(rule, load, load, home, topology), KeptHomes(home)

    return Planner(init_homes, update)


def _move_dynamic(
    load: Int[jax.Array, "P H"], replica_slots: int, *, dynamic: int, min_tokens: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Run FEPLB's scheduler in one node."""
    busiest_first = jnp.argsort(-load, axis=1, stable=True)
    place = jnp.argsort(busiest_first, axis=1)
    movable = (place < dynamic) & (load >= min_tokens)
    spread = move_whole(all_at_home(load, replica_slots), movable)
    return merge_copies(spread.replica, jnp.concatenate([spread.at_home, spread.tokens], 1))
