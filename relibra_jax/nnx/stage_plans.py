"""Planning on the host, and the check of its plans.

Planning programs are compiled for the host because it has idle cores while the devices compute. A search can therefore
run during a rollout.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.planner import Placement, Planner
from relibra_jax.contract.replay import assigned_load
from relibra_jax.contract.types import BatchPlan, Price, Topology
from relibra_jax.execution.plan_agreement import check_same_plan
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.routing.pieces import dispatched_load
from relibra_jax.routing.sequence_packing import SequenceLayout

ROUNDS: Final = 4
"""Rounds of assignment and placement in a search without a warm start."""
WARM_ROUNDS: Final = 2
"""Rounds of assignment and placement in a search with a warm start.

Measured with recorded loads and a warm start from three quarters of the samples: two rounds reach the imbalance of the
full search within 0.1%, in 0.4 of its time; one round misses it by up to 0.3%
(``python -m experiments.bench_warm_start``).
"""


def on_host() -> contextlib.AbstractContextManager:
    """Compute on the host's CPU in a block.

    Where JAX computes on CPUs anyway nothing changes, so that `Balancer` and callers of the pure functions share
    compiled programs.
    """
    return contextlib.nullcontext() if _is_host() else jax.default_device(_host_device())


def to_host[T](tree: T) -> T:
    """Put arrays on one CPU device of the host; those that are on a single CPU device already stay as they are."""

    def put(leaf: Any) -> Any:
        stays = _is_host() and not (isinstance(leaf, jax.Array) and len(leaf.devices()) > 1)
        return leaf if stays else jax.device_put(leaf, _host_device())

    return jax.tree.map(put, tree)


def _is_host() -> bool:
    return jax.default_backend() == "cpu"


def _host_device() -> jax.Device:
    """Return the host's CPU device, or this process's first device if JAX runs without the CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def plan_on_host(
    batch: Batch,
    planner: Planner,
    state: Any,
    topology: Topology,
    *,
    stages: Sequence[Stage],
    prices: Sequence[Price],
    assign: Assign | None,
    key: PRNGKeyArray,
    start: Placement | None = None,
) -> tuple[tuple[BatchPlan, ...], Any]:
    """Plan a batch with `relibra_jax.plan_batch` on the host. The arguments are those of that function.

    Returns:
        The plan of each stage, as host arrays, and the planner's state after the batch.
    """
    batch, state, key, start = to_host((batch, state, key, start))
    with on_host():
        plans, state = plan_batch(
            batch,
            planner,
            state,
            topology,
            stages=stages,
            cost=prices,
            assign=assign,
            key=key,
            rounds=ROUNDS if start is None else WARM_ROUNDS,
            start=start,
        )
    return jax.device_get(plans), state


def with_exact_loads(
    plans: Sequence[BatchPlan],
    routes: BatchRoutes | None,
    batch: Batch,
    layouts: Sequence[SequenceLayout],
    topology: Topology,
    *,
    striped: bool,
) -> tuple[BatchPlan, ...]:
    """Give plans the exact load of the tokens that each rank dispatches, on the host.

    Args:
        plans: the plan of each stage, searched with an estimate of the load.
        routes: the routes of the batch; None only if layers are not striped and no sequences are given.
        batch: the counts of the samples.
        layouts: the sequences of each stage, if the ranks of a node share them; otherwise none.
        topology: the expert-parallel group.
        striped: whether layers are striped.
    """
    loads = []
    held: Sequence[SequenceLayout | None] = layouts if layouts else [None] * len(plans)
    with on_host():
        for plan, layout in zip(plans, held, strict=True):
            if layout is None and not striped:
                loads.append(assigned_load(batch.sample_load, plan.assignment))
                continue
            assert routes is not None
            replay, placed = routes.placed(plan, layout)
            loads.append(routes.total(dispatched_load(replay, placed.assignment, topology, striped=striped)))
    pairs = zip(plans, jax.device_get(loads), strict=True)
    return tuple(plan._replace(load=load) for plan, load in pairs)


def check_plans(
    plans: Sequence[BatchPlan], topology: Topology, *, across_nodes: bool, way: Int[np.ndarray, "4"]
) -> None:
    """Raise unless all plans are valid, and equal on all processes as the way is. Every process must call it.

    Args:
        plans: the plan of each stage, on the host.
        topology: the expert-parallel group.
        across_nodes: whether a replica may be on a different node than its expert's home.
        way: the way of running layers, as `relibra_jax.nnx.balancer_state.BalancerState` has it.

    Raises:
        ValueError: if a plan breaks a rule, or processes computed different plans or chose different ways.
    """
    for stage in plans:
        check_plan(stage.plan, stage.load, topology, across_nodes=across_nodes)
    if jax.process_count() > 1:
        check_same_plan((tuple(plans), way))
