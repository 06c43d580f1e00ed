"""What happens to a rollout before it is learned from, while its rewards are scored.

    plan_rollout      samples assigned to micro-batches and ranks, experts to homes and replicas     jit, no devices
    with_room         sizes of buffers that are counted on the host, few, so that few programs are compiled
    to_ranks          every sample's row goes to the rank that owns it
    reorder_experts   experts and their optimizer state move to the plan's homes, see `relibra_jax.nnx.layer`

What runs then, under this plan, is in `experiments.rl.step`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from relibra_jax.execution.mesh import RANKS
from relibra_jax.plan import rank_load
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.metrics import batch_imbalance, replication_bound
from relibra_jax.planning.planners import plan_batch
from relibra_jax.planning.replication import without_replicas
from relibra_jax.replay import expert_load
from relibra_jax.types import EMPTY, Array, Assignment, Plan, Planner, RoutingReplay, Topology


class Foresight(NamedTuple):
    """What is known of a batch before it runs."""

    plan: Plan
    load: Int[Array, "M L N G E"]


@functools.partial(jax.jit, static_argnames=("planner", "topology", "num_micro_batches", "anneal_steps"))
def plan_rollout(
    replay: RoutingReplay,
    state: Any,
    key: PRNGKeyArray,
    *,
    planner: Planner,
    topology: Topology,
    num_micro_batches: int,
    anneal_steps: int,
) -> tuple[Assignment, Foresight, Any]:
    """Assign the samples of a rollout and plan what they bring.

    Args:
        replay: of all samples.
        state: of the planner.
        key: of the assignment.
        planner: from `relibra_jax.planning.planners.PLANNERS`.
        topology: of the group.
        num_micro_batches: M.
        anneal_steps: of `assign_samples`; 0 keeps samples in order.

    Returns:
        The assignment, the plan with its load, and the planner's next state.
    """
    assign = functools.partial(assign_samples, key=key, steps=anneal_steps) if anneal_steps else None
    assignment, plan, state = plan_batch(
        replay, planner, state, topology, num_micro_batches=num_micro_batches, assign=assign
    )
    load = expert_load(replay, assignment, num_experts=topology.num_experts)
    return assignment, Foresight(plan, load), state


def with_room(size: int) -> int:
    """The size for a buffer that has to grow: a power of two with a quarter to spare, so that programs are few.

    >>> with_room(70), with_room(110)
    (128, 256)
    """
    return 1 << (size * 5 // 4 - 1).bit_length()


def to_ranks(samples: PyTree, assignment: Assignment, mesh: Mesh) -> PyTree:
    """Bring ``[B, ...]`` arrays of the host to the ranks that own the samples: ``[M, N, G, b, ...]``, 0 where none is.

    Args:
        samples: any tree of arrays.
        assignment: which rank holds which sample in which micro-batch.
        mesh: of the ranks.
    """
    places = np.asarray(assignment.sample)
    sharding = NamedSharding(mesh, PartitionSpec(None, *RANKS))

    def move(leaf):
        leaf = np.asarray(leaf)
        rows = leaf[np.maximum(places, 0)]
        rows[places == EMPTY] = 0
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    return jax.tree.map(move, samples)


@functools.partial(jax.jit, static_argnames=("topology", "across_nodes"))
def measure_balance(
    known: Foresight, ran_load: Int[Array, "M L N G E"], *, topology: Topology, across_nodes: bool
) -> dict[str, Float[jax.Array, "..."]]:
    """Imbalance of a batch under its plan, and beside it what the same loads would have been.

    Args:
        known: the batch's plan.
        ran_load: what the update ran.
        topology: of the plan.
        across_nodes: whether replicas may leave their home's node.

    Returns:
        ``imbalance`` under the plan and ``imbalance_static`` under static placement, over the batch and, named
        ``..._by_micro_batch``, of each; ``imbalance_bound``, what any replication could reach with the plan's homes;
        ``imbalance_live`` of ``ran_load`` with all experts at home.
    """
    plan, load = known
    by_home = load.sum((2, 3), dtype=jnp.int32)
    in_order = jnp.broadcast_to(jnp.arange(topology.num_experts, dtype=jnp.int32), plan.home.shape)
    unplanned = rank_load(without_replicas(by_home, in_order, topology))
    live = rank_load(without_replicas(ran_load.sum((2, 3), dtype=jnp.int32), plan.home, topology))
    planned = rank_load(plan)
    bound = replication_bound(load, plan.home, topology, across_nodes=across_nodes).sum(0)
    each = jax.vmap(lambda by_rank: batch_imbalance(by_rank[None]))
    return {
        "imbalance": batch_imbalance(planned),
        "imbalance_static": batch_imbalance(unplanned),
        "imbalance_bound": (bound / planned.mean((2, 3)).sum(0)).mean(),
        "imbalance_live": batch_imbalance(live),
        "imbalance_by_micro_batch": each(planned),
        "imbalance_static_by_micro_batch": each(unplanned),
    }
