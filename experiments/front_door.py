"""``python -m experiments.front_door TRACE``: whether every entry to planning gives the plan that is shown.

The first table plans held-out samples of a trace through `relibra compare`'s runs, `plan_batch`, and the functions with
which `Balancer.prepare` plans, with the same price, state and random key. All of them must give the same plan, bit for
bit.
The second table prices plans as their exchanges send them: only the rows that are needed, with the hops between and
inside nodes at the same time or one after the other; lanes as long as the longest, as a padded exchange between nodes
sends them; and with the spare room that buffers have by default. The ideal is always the balanced run whose exchange
needs no padding. Homes were planned beforehand, on samples that come before those of the batch. All times are modelled.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.claims.command import some_layers
from experiments.program import TraceName, run_program
from relibra_jax.cli.batching import Batches
from relibra_jax.cli.planner_runs import Contender, run_contender
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import BatchPlan, Price, RoutingReplay, Topology
from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import attention_time, rank_time
from relibra_jax.nnx.stage_plans import check_plans, count_on_host, plan_on_host
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.routing.visits import node_visits
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

CLUSTER, MODEL, CONTEXT, TOKENS_PER_RANK = "h100", "gpt-oss-20b", 4096.0, 16_384
ROADS: Final = (("2x8", 0), ("2x8", 1), ("4x8", 0))
"""The ranks and resident slots of the first table. On 4x8 ranks, a rank has one sample by default."""
PLANS: Final = (("2x4", 1, True), ("4x4", 1, True), ("4x4", 0, False))
"""The ranks, resident slots and whether samples are assigned, of the second table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontDoor:
    """Plan the same batch through every entry, and price plans as they are sent."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    record: Path | None = None
    """The JSON file for the numbers. None writes no file."""
    samples: int = 256
    """The number of samples of the batch. The remaining samples of the trace are the previous batch."""
    micro_batches: int = 8
    """The number of micro-batches of a batch."""
    layers: int = 8
    """The number of layers of the trace, evenly spaced."""
    seed: int = 0
    """The seed of the planner, and of the assignment of samples."""


class Case(NamedTuple):
    """The batches of a trace on some ranks, with their price."""

    batches: Batches
    topology: Topology
    cost_model: CostModel

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sample of the batch."""
        return np.asarray(self.batches.replays[-1].mask).sum(1)

    @property
    def row_length(self) -> float:
        """The number of positions of a row that holds one sample."""
        return float(self.batches.replays[-1].mask.shape[1])


def make_case(trace: Trace, config: FrontDoor, ranks: str, residents: int) -> Case:
    """Draw the batches of a case, and price them.

    Args:
        trace: the recorded routing.
        config: the settings.
        ranks: nodes x local ranks.
        residents: the number of resident slots of a rank.

    Raises:
        ValueError: if the trace has too few samples.
    """
    nodes, local = map(int, ranks.split("x"))
    topology = Topology(
        num_nodes=nodes,
        ranks_per_node=local,
        num_experts=trace.num_experts,
        replica_slots=2,
        resident_slots=residents,
    )
    check_integer("samples", config.samples, least=config.micro_batches)
    order = np.random.default_rng(0).permutation(len(trace.replay.mask))
    if len(order) < config.samples + config.micro_batches:
        raise ValueError(
            f"{trace.name} has {len(order)} samples; samples={config.samples} leaves fewer than"
            f" micro_batches={config.micro_batches} for the previous batch"
        )
    parts = order[config.samples :], order[: config.samples]
    replays = [RoutingReplay(*(np.asarray(leaf)[part] for leaf in trace.replay)) for part in parts]
    lengths = replays[-1].mask.sum(1)
    model = dataclasses.replace(
        MODELS[MODEL], num_experts=trace.num_experts, top_k=trace.replay.expert_ids.shape[-1]
    )
    scale = TOKENS_PER_RANK * topology.num_ranks * config.micro_batches / float(lengths.sum())
    cost_model = CostModel(
        cluster=CLUSTERS[CLUSTER],
        model=model,
        rows="packed",
        scale=scale,
        stretch=CONTEXT / float(lengths.mean()),
    )
    return Case(Batches(replays, config.micro_batches, 1, 0), topology, cost_model)


class Planned(NamedTuple):
    """The plan of a case's batch."""

    batch_plan: BatchPlan
    """The plan."""
    before: np.ndarray
    """The homes before the batch."""
    visits: jax.Array
    """The number of tokens that each rank sends to each node."""


def plan_roads(case: Case, config: FrontDoor, *, only: str | None = None) -> dict[str, Planned]:
    """Plan both batches of a case through every entry; return the second batch's plan.

    Args:
        case: the batches and their price.
        config: the settings.
        only: the name of the only entry to run; None for all.
    """
    cost, topology, number = case.cost_model.price(case.topology), case.topology, config.micro_batches
    entry = PLANNERS["relibra"]
    planner = entry.planner
    planner_key, key = jax.random.split(jax.random.key(config.seed))
    layers = case.batches.replays[0].expert_ids.shape[2]
    first_state = planner.init(topology, layers, key=planner_key)
    keys = []
    for _ in case.batches.replays:
        key, assign_key = jax.random.split(key)
        keys.append(assign_key)

    counted: dict[bytes, jax.Array] = {}

    def planned(batch_plan: BatchPlan, before: Any) -> Planned:
        plan_bytes = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch_plan))
        if plan_bytes not in counted:  # counting takes much longer than planning
            counted[plan_bytes] = node_visits(case.batches.replays[-1], batch_plan, topology)
        return Planned(batch_plan, np.asarray(before), counted[plan_bytes])

    def follow(plan: Any) -> Planned:
        """Plan the batches one after another with ``plan(replay, state, key)``."""
        state, homes = first_state, [np.asarray(contiguous_homes(topology, layers))]
        for replay, assign_key in zip(case.batches.replays, keys, strict=True):
            batch_plan, state = plan(replay, state, assign_key)
            homes.append(np.asarray(batch_plan.plan.home))
        return planned(batch_plan, homes[-2])

    def prepare(replay: RoutingReplay, state: Any, key: Any) -> tuple[BatchPlan, Any]:
        counts = count_on_host(replay, planner, topology, [cost])
        options: dict[str, Any] = {"stages": [Stage(number)], "prices": [cost], "assign": assign_samples}
        (batch_plan,), state = plan_on_host(counts, planner, state, topology, key=key, **options)
        check_plans([batch_plan], topology, across_nodes=False)
        return batch_plan, state

    def batch(replay: RoutingReplay, state: Any, key: Any, assign: Any) -> tuple[BatchPlan, Any]:
        return plan_batch(replay, planner, state, topology, stages=number, cost=cost, assign=assign, key=key)

    def compare() -> Planned:
        contender = Contender(entry=entry, assign=assign_samples)
        runs, _ = run_contender(contender, case.batches, topology, cost=cost, seed=config.seed, timed_runs=0)
        return planned(runs[-1].batch_plan, runs[-1].previous_home)

    roads = {
        NOT_ASSIGNED: lambda: follow(functools.partial(batch, assign=None)),
        "plan_batch": lambda: follow(functools.partial(batch, assign=assign_samples)),
        "relibra compare": compare,
        PREPARE: lambda: follow(prepare),
    }
    return {name: run() for name, run in roads.items() if only in (None, name)}


NOT_ASSIGNED: Final = "plan_batch, samples not assigned"
PREPARE: Final = "Balancer.prepare"


def balanced(case: Case, planned: Planned) -> BatchTime:
    """Return the time of the balanced run with as much work as a plan."""
    batch_plan = planned.batch_plan
    rows = batch_plan.assignment.sample.shape[-1]
    cost = case.cost_model.price(case.topology)
    return balanced_time(
        *(batch_plan.load, case.lengths, case.topology, cost), row_length=case.row_length, rows=rows
    )


def share_of_balanced(case: Case, planned: Planned, **exchange: Any) -> float:
    """Return the modelled time of the balanced run divided by that of a plan.

    Args:
        case: the batch.
        planned: its plan.
        **exchange: fields of the cost model that say how the exchange of the plan runs.
    """
    cost = dataclasses.replace(case.cost_model, **exchange).price(case.topology)
    return float(balanced(case, planned).total / _time(case, planned, cost).total)


def _time(case: Case, planned: Planned, cost: Price) -> BatchTime:
    return batch_time(
        *(planned.batch_plan, case.lengths, case.topology, cost),
        visits=planned.visits,
        previous_home=planned.before,
        row_length=case.row_length,
    )


NEEDED: Final[dict[str, Any]] = {"between": "ragged", "inside": "ragged"}
"""Exchanges that send only the rows that are needed."""
LANES: Final[dict[str, Any]] = {"spare_room": False}
"""Exchanges as they run, without spare room."""


def hops_at_once(case: Case, planned: Planned) -> float:
    """Return the share of balanced if exchanges sent only needed rows, over both networks at the same time."""
    cost = dataclasses.replace(case.cost_model, **NEEDED).price(case.topology)
    attention, _ = attention_time(planned.batch_plan.assignment, case.lengths, cost)
    ranks = _rank_time(
        planned.batch_plan.layer_plans(), attention, case.topology, cost, visits=planned.visits
    )
    between, inside, at_once = (
        float(part.max((-2, -1)).sum())
        for part in (ranks.between, ranks.inside, jnp.maximum(ranks.between, ranks.inside))
    )
    seconds = float(_time(case, planned, cost).total) - (between + inside - at_once)
    return float(balanced(case, planned).total) / seconds


_rank_time = jax.jit(rank_time)


def _equal(one: Planned, other: Planned) -> bool:
    """Return whether two plans are equal, bit for bit."""
    leaves = zip(jax.tree.leaves(one.batch_plan), jax.tree.leaves(other.batch_plan), strict=True)
    return all(np.array_equal(*pair) for pair in leaves)


def compare_roads(trace: Trace, config: FrontDoor) -> tuple[Table, list[dict[str, Any]]]:
    """Return the first table and its numbers."""
    table = Table(
        title="share of balanced, as sent by default (as needed), %; '=' marks equal plans",
        title_justify="left",
    )
    table.add_column("entry")
    rows: list[dict[str, Any]] = []
    cells: dict[str, list[str]] = {}
    for ranks, residents in ROADS:
        table.add_column(f"{ranks}, {residents or 'no'} resident", justify="right")
        case = make_case(trace, config, ranks, residents)
        roads = plan_roads(case, config)
        own_rows = case._replace(cost_model=dataclasses.replace(case.cost_model, rows="padded"))
        padded = plan_roads(own_rows, config, only=PREPARE)
        for group, each in ((case, roads), (own_rows, padded)):
            for road, planned in each.items():
                sent, needed = share_of_balanced(group, planned), share_of_balanced(group, planned, **NEEDED)
                rows_ = group.cost_model.rows
                equal = rows_ == "packed" and _equal(planned, roads[PREPARE])
                row = {"ranks": ranks, "residents": residents, "entry": road, "rows": rows_}
                rows.append({**row, "sent": sent, "needed": needed, "same_plan": equal})
                name = f"{road}, a row for each sample" if rows_ == "padded" else road
                mark = " =" if equal else ""
                cells.setdefault(name, []).append(f"{100 * sent:.1f} ({100 * needed:.1f}){mark}")
    for road, texts in cells.items():
        table.add_row(road, *texts)
    return table, rows


def price_as_sent(trace: Trace, config: FrontDoor) -> tuple[Table, list[dict[str, Any]]]:
    """Return the second table and its numbers."""
    table = Table(title="the same plans as they are sent, share of balanced, %", title_justify="left")
    for column in ("plan", "needed, hops at once", "hops in turn", "lanes as padded", "+ spare room"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    rows = []
    for ranks, residents, assigned in PLANS:
        case = make_case(trace, config, ranks, residents)
        road = "plan_batch" if assigned else NOT_ASSIGNED
        planned = plan_roads(case, config, only=road)[road]
        shares = {
            "hops_at_once": hops_at_once(case, planned),
            "needed": share_of_balanced(case, planned, **NEEDED),
            "lanes": share_of_balanced(case, planned, **LANES),
            "sent": share_of_balanced(case, planned),
        }
        name = f"{ranks}, {residents or 'no'} resident" + ", assigned" * assigned
        table.add_row(name, *(f"{100 * share:.1f}" for share in shares.values()))
        rows.append({"ranks": ranks, "residents": residents, "assigned": assigned, **shares})
    return table, rows


def main(config: FrontDoor) -> None:
    """Print both tables, and write their numbers.

    Args:
        config: the settings.

    Raises:
        ValueError: if the trace does not fit the settings.
    """
    trace, console = some_layers(read_trace(config.trace), config.layers), Console(width=110)
    roads, road_rows = compare_roads(trace, config)
    console.print(roads)
    sent, sent_rows = price_as_sent(trace, config)
    console.print(sent)
    if config.record is not None:
        settings = {name: getattr(config, name) for name in ("samples", "micro_batches", "layers", "seed")}
        about = {"trace": trace.name, "cluster": CLUSTER, "model": MODEL, "context": CONTEXT, **settings}
        write_json(config.record, {**about, "roads": road_rows, "sent": sent_rows})


if __name__ == "__main__":
    sys.exit(run_program(main, FrontDoor, description=__doc__))
