"""Plans of a batch's stages, searched for by programs that are compiled for the host, and checked there.

The host has cores to spare while devices compute, so that a search may run beside a rollout.
"""

import dataclasses
import functools
from typing import Any, Final

import jax
from jaxtyping import Bool, Integer, PRNGKeyArray

from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.plan import resident_experts
from relibra_jax.plan_check import check_plan
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.batch_counts import BatchCounts, count_batch
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.plan_stages import plan_stage_loads
from relibra_jax.planning.turns import Assign, shift_samples
from relibra_jax.planning.unfinished import fill_unfinished
from relibra_jax.types import Array, BatchPlan, Planner, RoutingReplay, Topology

ROUNDS: Final = 4
"""Turns of assignment and placement, of a search that begins with nothing."""
WARM_ROUNDS: Final = 2
"""Turns of a search with a warm start. From three quarters of the samples, on recorded loads, they came within 0.1% of
the same imbalance in 0.4 of the time; one turn came short by up to 0.3% (``python -m experiments.bench_warm_start``).
"""


@dataclasses.dataclass(frozen=True)
class Search:
    """How the stages of a batch are searched for; equal ones share a compiled program."""

    planner: Planner
    topology: Topology
    num_micro_batches: tuple[int, ...]
    """M of each stage, those of data-parallel copies of the group among them."""
    samples: tuple[range, ...]
    """The samples of each stage."""
    assign: Assign | None
    """How samples are assigned, with a ``key``; None keeps them where they start."""
    by_length: bool
    """Whether samples start packed by their lengths, as rows want that hold several; in order otherwise."""


def plan_checked(
    replay: RoutingReplay,
    state: Any,
    key: PRNGKeyArray,
    search: Search,
    *,
    across_nodes: bool,
    warm_start: Placement | None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan the stages of a batch, and hold each plan to the rules.

    Args:
        replay: the routing of all samples, on the host.
        state: the planner's state.
        key: random key of the assignment, consumed.
        search: how stages are searched for.
        across_nodes: whether replicas may be on other nodes than their experts' homes.
        warm_start: what `plan_unfinished` has found; None for a search that begins with nothing.

    Returns:
        The batch plan of each stage, on the host, and the planner's state after the batch.

    Raises:
        ValueError: if a plan breaks a rule, processes hold different ones, or as
            `relibra_jax.planning.plan_stages.plan_stages` says.
    """
    given = jax.device_put((replay, state, key, warm_start), host_device())
    replay, state, key, warm_start = given
    counts = _count(replay, search.planner, search.topology, with_routes=False)
    stages, after = _plan(counts, state, key, warm_start, search=search)
    stages = jax.device_get(stages)
    for stage in stages:
        check_plan(stage.plan, stage.load, search.topology, across_nodes=across_nodes)
    if jax.process_count() > 1:
        check_same_plan(stages)
    return stages, after


def plan_unfinished(
    sample_load: Integer[Array, "B L E"],
    tokens: Integer[Array, " B"],
    finished: Bool[Array, " B"],
    state: Any,
    key: PRNGKeyArray,
    search: Search,
) -> Placement:
    """Homes and residents of a batch of which some samples still run, on the host.

    Args:
        sample_load: the counts of finished samples, as `relibra_jax.planning.unfinished.fill_unfinished` takes them.
        tokens: the lengths of finished samples.
        finished: the samples that have finished.
        state: the planner's state.
        key: random key of the assignment, consumed.
        search: how stages are searched for.
    """
    given = jax.device_put((sample_load, tokens, finished, state, key), host_device())
    sample_load, tokens, finished, state, key = given
    counts = BatchCounts(*fill_unfinished(sample_load, tokens, finished))
    (stage, *_), _ = jax.device_get(_plan(counts, state, key, None, search=search))
    return Placement(stage.plan.home, jax.device_get(resident_experts(stage.plan, search.topology)))


def host_device() -> jax.Device:
    """The host as a device; the first device of this process where JAX was told to leave the host out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


_count = jax.jit(count_batch, static_argnames=("planner", "topology", "with_routes"))


@functools.partial(jax.jit, static_argnames="search")
def _plan(
    counts: BatchCounts, state: Any, key: PRNGKeyArray, warm_start: Placement | None, *, search: Search
):
    """`plan_stage_loads`, compiled once for equal settings, whoever asks."""
    # Rows are padded to one length, so ranks with more of them would compute more.
    starts = [
        shift_samples(assign_in_order(len(own), search.topology, num_micro_batches=number), own.start)
        for own, number in zip(search.samples, search.num_micro_batches, strict=True)
    ]
    return plan_stage_loads(
        *(counts.sample_load, counts.tokens, search.planner, state, search.topology),
        num_micro_batches=search.num_micro_batches,
        samples=search.samples,
        starts=None if search.by_length else starts,
        assign=None if search.assign is None else functools.partial(search.assign, key=key),
        rounds=ROUNDS if warm_start is None else WARM_ROUNDS,
        routes=counts.routes,
        transitions=counts.transitions,
        warm_start=warm_start,
    )
