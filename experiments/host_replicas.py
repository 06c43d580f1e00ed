"""What replicas from host memory gain and cost, modelled, and what is kept there: for two clusters and two stages.

    python -m experiments.host_replicas recorded

For every planner, the number of replicas that come from the host is chosen by the price
(`relibra_jax.cost.host_slots`), for a recompute and for an update on their own. All times are modelled, not measured.
"""

import dataclasses
import sys
from typing import Annotated, Final, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from experiments.program import TraceName, run_program
from relibra_jax.contract.types import EMPTY, Price, Topology
from relibra_jax.cost.batch_time import BatchTime
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.host_slots import choose_host_slots
from relibra_jax.evaluation import Batching, Costs, PlannedBatch, Ranks, make_setting, run_planner
from relibra_jax.evaluation.prices import count_visits, time_of_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.routing.host_share import share_with_host
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace

STAGES: Final = {"recompute": (0, True), "update": (1, False)}
"""The updates of a stage, and whether it recomputes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostReplicas:
    """Model the batches of a trace with replicas from other ranks, from the host, and from both."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    planners: tuple[str, ...] = ("relibra", "foremoe", "foremoe_published")
    """The planners, by their names in PLANNERS."""
    clusters: tuple[str, ...] = ("h100", "gb200-nvl72")
    """The clusters, by their names in CLUSTERS."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    batching: Annotated[Batching, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Batching)
    costs: Annotated[Costs, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Costs)


class Priced(NamedTuple):
    """A stage of one batch, priced."""

    seconds: tuple[float, ...]
    """The modelled seconds of the stage with 0, 1, ..., R replicas of a rank from the host."""
    exposed: tuple[float, ...]
    """Of these, the seconds of replicas that nothing hides, and of sending what is kept."""
    chosen: int
    """The number that the price chooses."""


class Kept(NamedTuple):
    """What a rank keeps in host memory if all its replicas come from there, in experts of a layer."""

    plan: int
    """The most experts that its plan reads; those are kept."""
    replicas: float
    """The mean number of replicas of a rank in a batch, which other ranks would send one by one."""


def price_stage(batch: PlannedBatch, topology: Topology, cost_model: CostModel, stage: str) -> Priced:
    """Price one stage of a batch with every number of replicas from the host.

    Args:
        batch: the batch with its plan; moves of experts are not counted.
        topology: the expert-parallel group.
        cost_model: the cost model of the batch.
        stage: a name in `STAGES`.
    """
    updates, recompute = STAGES[stage]
    price = cost_model.price(topology, updates=updates, recompute=recompute)
    visits = count_visits(batch, topology, price)
    still = batch._replace(previous_home=batch.batch_plan.plan.home)

    def times(price: Price) -> BatchTime:
        return time_of_batch(still, topology, price, visits=visits)

    counts = range(topology.replica_slots + 1)
    every = [times(dataclasses.replace(price, host_slots=count)) for count in counts]
    seconds = tuple(float(time.total) for time in every)
    exposed = tuple(float(time.exposed + time.push) for time in every)
    return Priced(seconds, exposed, choose_host_slots(lambda one: seconds[one.host_slots], topology, price))


def count_what_is_kept(batch: PlannedBatch, topology: Topology) -> Kept:
    """Count what ranks keep in host memory if all replicas come from there.

    Args:
        batch: the batch with its plan.
        topology: the expert-parallel group.
    """
    plans = batch.batch_plan.layer_plans()
    share, _ = share_with_host(plans, topology, topology.replica_slots)
    replicas = (plans.slot_expert[..., topology.held_slots :] != EMPTY).sum()
    per_rank = float(replicas) / (share.kept.shape[0] * topology.num_ranks)
    return Kept(share.kept.shape[-1], per_rank)


def main(options: HostReplicas) -> None:
    """Price the batches, and print one row for each planner, cluster and stage.

    Raises:
        ValueError: if a planner or a cluster is unknown, or the trace cannot be read.
    """
    entries = {name: look_up("planner=", name, PLANNERS) for name in options.planners}
    clusters = {name: look_up("cluster=", name, CLUSTERS) for name in options.clusters}
    trace = read_trace(options.trace or "recorded")
    topology = options.ranks.topology(trace.num_experts)
    slots = range(topology.replica_slots + 1)
    table = Table(title="Modelled ms of a stage, with 0 to R replicas of a rank from the host")
    headers = ("planner", "cluster", "stage", *(f"{slot}" for slot in slots), "exposed", "chosen", "kept")
    for header in headers:
        table.add_column(header, justify="left" if header in headers[:3] else "right")
    for name, entry in entries.items():
        setting = make_setting(trace, topology, batching=options.batching, cost=options.costs)
        outcome = run_planner(name, entry, setting, timed_runs=0)
        batch = outcome.batches[-1]
        kept = count_what_is_kept(batch, topology)
        for label, cluster in clusters.items():
            model = dataclasses.replace(outcome.setting.cost_model, cluster=cluster)
            for stage in STAGES:
                priced = price_stage(batch, topology, model, stage)
                table.add_row(
                    name,
                    label,
                    stage,
                    *(f"{1e3 * seconds:.2f}" for seconds in priced.seconds),
                    " ".join(f"{1e3 * seconds:.2f}" for seconds in priced.exposed),
                    f"{priced.chosen}",
                    f"{kept.plan} for {kept.replicas:.1f} replicas",
                )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, HostReplicas))
