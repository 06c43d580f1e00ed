"""The table of planners, and Megatron-LM's placement, which is what the others are measured against.

A planner is a pair of pure functions (see `relibra_jax.types.Planner`). Adding one is one function and one row
in `PLANNERS`, which the tests, the command line and the figures read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.plan import expert_totals
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.eplb import eplb
from relibra_jax.planning.lplb import lplb
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import without_replicas, replicate_experts
from relibra_jax.replay import assigned_load, sample_load
from relibra_jax.types import Array, Assignment, Plan, Planner, RoutingReplay, Topology


def static() -> Planner:
    """Megatron-LM's contiguous placement: expert ``e`` lives in flat home slot ``e``, and nothing is copied.

    Returns:
        A Planner without state.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = static().update(load, (), topology)
    >>> plan.quota.tolist()
    [[[[[80, 10], [6, 4]]]]]
    """

    def init(topology: Topology, num_layers: int, *, key=None) -> tuple[()]:
        del topology, num_layers, key
        return ()

    def update(load, state, topology: Topology, *, refine=None):
        del refine
        load = expert_totals(load, topology)
        home = jnp.broadcast_to(jnp.arange(topology.num_experts, dtype=jnp.int32), load.shape[1:])
        return without_replicas(load, home, topology), state

    return Planner(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerEntry:
    """A planner at the settings that reports use, and what may be expected of its plans."""

    planner: Planner
    summary: str
    intra_node: bool = True
    """Whether replicas stay in their home's node."""
    foresight: bool = True
    """Whether it sees the true loads, as routing replay allows."""


PLANNERS: dict[str, PlannerEntry] = {
    "static": PlannerEntry(planner=static(), summary="Megatron-LM: contiguous placement, no replicas"),
    "eplb_history": PlannerEntry(
        planner=eplb(loads="history", scope="batch"),
        summary="EPLB from the batch before",
        foresight=False,
    ),
    "eplb_batch": PlannerEntry(planner=eplb(scope="batch"), summary="EPLB from the batch's true loads"),
    "eplb": PlannerEntry(planner=eplb(), summary="EPLB from each micro-batch's true loads (EPLB+)"),
    "eplb_global": PlannerEntry(
        planner=eplb(hierarchical=False), summary="the same, nodes ignored", intra_node=False
    ),
    "lplb_history": PlannerEntry(
        planner=lplb(loads="history", scope="batch"),
        summary="LPLB placed from the batch before, split from true loads",
        foresight=False,
    ),
    "lplb": PlannerEntry(planner=lplb(), summary="LPLB from each micro-batch's true loads (LPLB+)"),
    "relibra": PlannerEntry(
        planner=relibra(), summary="reordered between batches, replicated in each micro-batch"
    ),
    "relibra_across": PlannerEntry(
        planner=relibra(replicate=functools.partial(replicate_experts, across_nodes=True)),
        summary="the same, replicas on any node",
        intra_node=False,
    ),
}

type Assign = Callable[..., Assignment]
"""``(sample_load[B L E], tokens[B], home[L E], topology, *, num_micro_batches) -> Assignment``."""


def plan_batch(
    replay: RoutingReplay,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    num_micro_batches: int,
    assign: Assign | None = None,
    rounds: int = 1,
) -> tuple[Assignment, Plan, Any]:
    """Plan a batch from its routing replay: which rank holds which sample when, and where experts live.

    Assignment and placement each take the other as given, so they take turns: samples in order, a plan; then
    ``rounds`` times samples to its homes, and a plan of what they bring that starts from those homes.

    Args:
        replay: of all samples of the batch; works under jit.
        planner: of any kind.
        state: from the planner's ``init``, or from the batch before.
        topology: of the group.
        num_micro_batches: M.
        assign: for example ``functools.partial(assign_samples, key=key)``; None keeps samples in order.
        rounds: turns of assignment and placement.

    Returns:
        The assignment, the plan of its loads, and the planner's state after this batch.
    """
    per_sample = sample_load(replay, num_experts=topology.num_experts)
    tokens = jnp.asarray(replay.mask).sum(1, dtype=jnp.int32)
    return plan_loads(
        per_sample,
        tokens,
        planner,
        state,
        topology,
        num_micro_batches=num_micro_batches,
        assign=assign,
        rounds=rounds,
    )


def plan_loads(
    per_sample: Int[Array, "B L E"],
    tokens: Int[Array, " B"],
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    num_micro_batches: int,
    assign: Assign | None = None,
    rounds: int = 1,
) -> tuple[Assignment, Plan, Any]:
    """`plan_batch` from the counts of each sample, for callers that have them without the replay.

    Args:
        per_sample: from `relibra_jax.replay.sample_load`.
        tokens: of each sample.
        planner, state, topology, num_micro_batches, assign, rounds: as in `plan_batch`.

    Returns:
        As `plan_batch`.
    """
    assignment = assign_in_order(len(tokens), topology, num_micro_batches=num_micro_batches)
    plan, after = planner.update(assigned_load(per_sample, assignment), state, topology)
    if assign is None:
        return assignment, plan, after
    for _ in range(rounds):
        assignment = assign(per_sample, tokens, plan.home, topology, num_micro_batches=num_micro_batches)
        plan, after = planner.update(assigned_load(per_sample, assignment), state, topology, refine=plan.home)
    return assignment, plan, after
