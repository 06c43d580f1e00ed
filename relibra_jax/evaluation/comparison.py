"""Comparison of planners on the same batches of a trace."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from relibra_jax.contract.planner import Planner
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.evaluation.outcome import Outcome
from relibra_jax.evaluation.planned import plan_in_turn
from relibra_jax.evaluation.replica_nodes import with_replica_nodes
from relibra_jax.evaluation.setting import Setting, make_setting
from relibra_jax.evaluation.settings import Batching, Costs
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.routing.exchange_rules import AUTO
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.traces.trace import Trace

TIMED_RUNS: Final = 5
"""The number of timed runs of planning, of which the median is reported."""


@checks_arguments
def compare(
    planners: Mapping[str, Planner | PlannerEntry],
    trace: Trace,
    topology: Topology,
    *,
    batching: Batching = Batching(),  # noqa: B008
    cost: Costs | CostModel = Costs(),  # noqa: B008
    timed_runs: int = TIMED_RUNS,
) -> list[Outcome]:
    """Run every planner on the same batches of a trace, and check every plan.

    It is `make_setting`, and `run_planner` for each planner.

    Args:
        planners: the planners by name. A `PlannerEntry` also says how samples are assigned, and what to expect of its
            plans.
        trace: the trace, for example from `relibra_jax.traces.read.read_trace`.
        topology: the expert-parallel group.
        batching: how the trace is divided into batches and micro-batches, and the seed of planning.
        cost: what is priced, for the planners and for the outcomes: `Costs`, which names hardware and a model, or a
            `CostModel`, which is striped only with ``striped=True``.
        timed_runs: how many times planning of the last batch is timed. 0 does not time it.

    Returns:
        The outcome of each planner, in the order of ``planners``. Its numbers are computed when they are first read.

    Raises:
        ValueError: under the conditions of `make_setting`; if a planner rejects its input; or if it returns a plan that
            is not valid or does not fit this machine's memory.

    >>> from relibra_jax import relibra, static
    >>> from relibra_jax.evaluation import Ranks
    >>> from relibra_jax.traces.read import read_trace
    >>> trace, planners = read_trace("recorded"), {"static": static(), "relibra": relibra()}
    >>> topology = Ranks(nodes=2, ranks_per_node=2).topology(trace.num_experts)
    >>> placed, balanced = compare(planners, trace, topology, batching=Batching(micro_batches=2), timed_runs=0)
    >>> balanced.imbalance < placed.imbalance and balanced.modelled_seconds < placed.modelled_seconds
    True
    """
    setting = make_setting(trace, topology, batching=batching, cost=cost)
    return [run_planner(name, planner, setting, timed_runs=timed_runs) for name, planner in planners.items()]


@checks_arguments
def run_planner(
    name: str, planner: Planner | PlannerEntry, setting: Setting, *, timed_runs: int = TIMED_RUNS
) -> Outcome:
    """Run one planner on a setting, and check its plans.

    A system that computes home experts while replicas arrive is priced with or without this order, whichever is faster:
    it pays only where attention is too short to hide copies.

    Args:
        name: the name of the planner, for the outcome and for error messages.
        planner: the planner, as in `compare`.
        setting: the batches, ranks and costs.
        timed_runs: how many times planning of the last batch is timed. 0 does not time it.

    Raises:
        ValueError: if the planner rejects its input, or returns a plan that is not valid or does not fit this machine's
            memory.
    """
    entry = PlannerEntry(planner=planner, summary=name) if isinstance(planner, Planner) else planner
    setting = with_replica_nodes(entry, setting)
    batches, timings = plan_in_turn(name, entry, setting, timed_runs=timed_runs)
    outcome = Outcome(name, entry, setting, batches, timings)
    cost_model = setting.cost_model
    may_be_late = (
        cost_model.pieces == 1 and not cost_model.host_slots and cost_model.fetch in (AUTO, "padded")
    )
    if not entry.late_replicas or not may_be_late:
        return outcome
    setting = dataclasses.replace(setting, cost_model=dataclasses.replace(cost_model, late_replicas=True))
    late = Outcome(name, entry, setting, batches, timings)
    return min(outcome, late, key=lambda each: each.modelled_seconds)
