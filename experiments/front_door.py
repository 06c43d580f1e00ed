"""``python -m experiments.front_door TRACE``: check that every entry point to planning gives the plan that is shown.

The first table plans held-out samples of a trace through `relibra compare`'s runs, `plan_batch`, and the functions with
which `Balancer.prepare` plans, with the same price, state and random key. All of them must give the same plan, bit for
bit.

The second table prices the plans of `plan_batch`, with samples assigned, as their exchanges send them: only the rows
that are needed, with the hops between and inside nodes at the same time or one after the other; lanes as long as the
longest of the layer and micro-batch, as a fitted exchange sends them; with the spare room that buffers have by default;
and in two and four pieces. The ideal is always the balanced run whose exchange needs no padding, in one piece; the last
columns have the balanced run in pieces.
Homes were planned beforehand, on samples that come before those of the batch. All times are modelled.
"""

import dataclasses
import functools
import gc
import itertools
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.program import TraceName, run_program, topology_of
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import BatchPlan, RoutingReplay
from relibra_jax.cost.step_time import attention_time, rank_time
from relibra_jax.evaluation import (
    Batches,
    Batching,
    Costs,
    Outcome,
    PlannedBatch,
    Setting,
    make_setting,
    run_planner,
)
from relibra_jax.evaluation.prices import time_of_balanced, time_of_batch
from relibra_jax.evaluation.replica_nodes import with_replica_nodes
from relibra_jax.evaluation.variants import with_samples_assigned
from relibra_jax.nnx.balancer_state import saved_way
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.stage_plans import check_plans, plan_on_host, with_exact_loads
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace, make_trace, some_layers

PIECES: Final = (2, 4)
"""The numbers of pieces of the second table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontDoor:
    """Plan the same batch through every entry point, and price plans as they are sent."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    record: Path | None = None
    """The JSON file for the numbers. None writes no file."""
    model: str = "gpt-oss-20b"
    """The model whose sizes are priced, on H100."""
    ranks: tuple[str, ...] = ("2x8", "4x8")
    """The topologies, each as nodes x local ranks."""
    residents: tuple[int, ...] = (0, 1)
    """The numbers of resident slots of a rank."""
    replica_slots: int = 2
    """The number of replica slots of a rank."""
    samples: int = 256
    """The number of samples of the batch. The remaining samples of the trace are the previous batch."""
    micro_batches: int = 8
    """The number of micro-batches of a batch."""
    layers: int = 8
    """The number of layers of the trace, evenly spaced."""
    seed: int = 0
    """The seed of the planner, and of the assignment of samples."""


def costs_of(config: FrontDoor) -> Costs:
    """Return what is priced: the model on H100, in packed sequences."""
    return Costs(model=config.model, sequence_layout="packed")


def make_case(trace: Trace, config: FrontDoor, ranks: str, residents: int) -> Setting:
    """Draw the batch of a case and the one before it, and price them, with replicas where a Balancer has them.

    Args:
        trace: the recorded routing.
        config: the settings.
        ranks: nodes x local ranks.
        residents: the number of resident slots of a rank.

    Raises:
        ValueError: if ``ranks`` does not have this form, or the trace has too few samples.
    """
    topology = topology_of(
        ranks, trace.num_experts, replica_slots=config.replica_slots, resident_slots=residents
    )
    check_integer("samples", config.samples, least=config.micro_batches)
    order = np.random.default_rng(0).permutation(len(trace.replay.mask))
    if len(order) < config.samples + config.micro_batches:
        raise ValueError(
            f"{trace.name} has {len(order)} samples; samples={config.samples} leaves fewer than"
            f" micro_batches={config.micro_batches} for the previous batch"
        )
    parts = order[config.samples :], order[: config.samples]
    before, batch = (RoutingReplay(*(np.asarray(leaf)[part] for leaf in trace.replay)) for part in parts)
    batching = Batching(batch_size=config.samples, micro_batches=config.micro_batches, seed=config.seed)
    priced = make_setting(
        make_trace(batch, trace.num_experts, trace.name), topology, batching=batching, cost=costs_of(config)
    )
    case = dataclasses.replace(priced, batches=Batches([before, batch], config.micro_batches, 1, 0))
    return with_replica_nodes(with_samples_assigned("relibra"), case)


def plan_roads(case: Setting, *, only: str | None = None) -> dict[str, Outcome]:
    """Plan both batches of a case through every entry; return the outcome of the second batch.

    Args:
        case: the batches and their price.
        only: the name of the only entry to run; None for all.
    """
    cost, topology, number = (
        case.cost_model.price(case.topology),
        case.topology,
        case.batches.num_micro_batches,
    )
    entry, layers = with_samples_assigned("relibra"), case.batches.replays[0].expert_ids.shape[2]
    planner_key, key = jax.random.split(jax.random.key(case.seed))
    first_state = entry.planner.init(topology, layers, key=planner_key)
    keys = []
    for _ in case.batches.replays:
        key, assign_key = jax.random.split(key)
        keys.append(assign_key)

    def follow(plan: Any) -> Outcome:
        """Plan the batches one after another with ``plan(replay, state, key)``."""
        state, homes = first_state, [np.asarray(contiguous_homes(topology, layers))]
        for replay, assign_key in zip(case.batches.replays, keys, strict=True):
            batch_plan, state = plan(replay, state, assign_key)
            homes.append(np.asarray(batch_plan.plan.home))
        no_errors = np.zeros(batch_plan.load.shape[:2], np.float32)
        return Outcome("relibra", entry, case, [PlannedBatch(replay, batch_plan, homes[-2], no_errors)])

    def prepare(replay: RoutingReplay, state: Any, key: Any) -> tuple[BatchPlan, Any]:
        routes = BatchRoutes(replay)
        counts = routes.count(entry.planner, topology, [cost])
        options: dict[str, Any] = {"stages": [Stage(number)], "prices": [cost], "assign": assign_samples}
        plans, state = plan_on_host(counts, entry.planner, state, topology, key=key, **options)
        (batch_plan,) = with_exact_loads(plans, routes, counts, (), topology, striped=cost.striped)
        check_plans([batch_plan], topology, across_nodes=bool(cost.across_nodes), way=saved_way(None))
        return batch_plan, state

    def batch(replay: RoutingReplay, state: Any, key: Any, assign: Any) -> tuple[BatchPlan, Any]:
        options = {"stages": number, "cost": cost, "assign": assign, "key": key}
        return plan_batch(replay, entry.planner, state, topology, **options)

    roads = {
        NOT_ASSIGNED: lambda: follow(functools.partial(batch, assign=None)),
        "plan_batch": lambda: follow(functools.partial(batch, assign=assign_samples)),
        "relibra compare": lambda: run_planner("relibra", entry, case, timed_runs=0),
        PREPARE: lambda: follow(prepare),
    }
    outcomes: dict[str, Outcome] = {}
    for name, run in roads.items():
        if only in (None, name):
            outcome = run()
            # Counting takes much longer than planning, so equal plans share an outcome.
            equal = (other for other in outcomes.values() if _equal(outcome, other))
            outcomes[name] = next(equal, outcome)
    return outcomes


NOT_ASSIGNED: Final = "plan_batch, samples not assigned"
PREPARE: Final = "Balancer.prepare"


def share_without_spare_room(outcome: Outcome) -> float:
    """Return the share of balanced if the buffers of exchanges had no spare room."""
    topology, (batch,), (visits,) = outcome.setting.topology, outcome.batches, outcome.visits
    cost = dataclasses.replace(outcome.cost_model, spare_room=False).price(topology)
    return outcome.balanced_seconds / float(time_of_batch(batch, topology, cost, visits=visits).total)


def shares_in_pieces(outcome: Outcome, pieces: int) -> tuple[float, float]:
    """Return the shares of balanced if layers run in pieces, of the plan and of the balanced run itself."""
    topology, (batch,), (visits,) = outcome.setting.topology, outcome.batches, outcome.visits
    cost = dataclasses.replace(outcome.cost_model, pieces=pieces).price(topology)
    times = time_of_batch(batch, topology, cost, visits=visits), time_of_balanced(batch, topology, cost)
    plan, balanced = (outcome.balanced_seconds / float(time.total) for time in times)
    return plan, balanced


def hops_at_once(outcome: Outcome) -> float:
    """Return the share of balanced if exchanges sent only needed rows, over both networks at the same time."""
    topology, (batch,), (visits,) = outcome.setting.topology, outcome.batches, outcome.visits
    cost = dataclasses.replace(outcome.cost_model, exchange="needed").price(topology)
    attention, _ = attention_time(batch.batch_plan.assignment, batch.lengths, cost)
    ranks = _rank_time(batch.batch_plan.layer_plans(), attention, topology, cost, visits=visits)
    between, inside, at_once = (
        float(part.max((-2, -1)).sum())
        for part in (ranks.between, ranks.inside, jnp.maximum(ranks.between, ranks.inside))
    )
    seconds = float(time_of_batch(batch, topology, cost, visits=visits).total)
    return outcome.balanced_seconds / (seconds - (between + inside - at_once))


_rank_time = jax.jit(rank_time)


def _equal(one: Outcome, other: Outcome) -> bool:
    """Return whether two plans are equal, bit for bit."""
    plans = [jax.tree.leaves(each.batches[-1].batch_plan) for each in (one, other)]
    return all(np.array_equal(*pair) for pair in zip(*plans, strict=True))


def road_rows(case: Setting, roads: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Return the lines of the first table for one case: every entry, and a Balancer with padded sequences."""
    padded_cost = dataclasses.replace(case.cost_model, sequences="padded")
    padded = plan_roads(dataclasses.replace(case, cost_model=padded_cost), only=PREPARE)
    lines = [*roads.items(), (f"{PREPARE}, a sequence for each sample", padded[PREPARE])]
    return [
        {
            "entry": entry,
            "sent": outcome.share_of_balanced,
            "needed": outcome.share_as_needed,
            "same_plan": outcome is roads[PREPARE],
        }
        for entry, outcome in lines
    ]


def price_as_sent(outcome: Outcome) -> dict[str, float]:
    """Return the line of the second table for one plan."""
    pairs = [shares_in_pieces(outcome, pieces) for pieces in PIECES]
    return {
        "needed, hops at once": hops_at_once(outcome),
        "hops in turn": outcome.share_as_needed,
        "fitted lanes": share_without_spare_room(outcome),
        "+ spare room": outcome.share_of_balanced,
        **{f"{pieces} pieces": plan for pieces, (plan, _) in zip(PIECES, pairs, strict=True)},
        **{f"balanced, {pieces} pieces": even for pieces, (_, even) in zip(PIECES, pairs, strict=True)},
    }


def roads_table(cases: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the first table, with a column for each case."""
    title = "share of balanced, as sent by default (as needed), %; '=' marks equal plans"
    table = Table("entry", title=title, title_justify="left")
    for case in cases:
        table.add_column(case, justify="right")
    for lines in zip(*cases.values(), strict=True):
        cells = [
            f"{100 * row['sent']:.1f} ({100 * row['needed']:.1f}){' =' * row['same_plan']}" for row in lines
        ]
        table.add_row(lines[0]["entry"], *cells)
    return table


def sent_table(cases: dict[str, dict[str, float]]) -> Table:
    """Return the second table, with a line for each case."""
    table = Table("plan", title="the same plans as they are sent, share of balanced, %", title_justify="left")
    for column in next(iter(cases.values())):
        table.add_column(column, justify="right")
    for case, shares in cases.items():
        table.add_row(case, *(f"{100 * share:.1f}" for share in shares.values()))
    return table


def _forget_programs() -> None:
    """Free the compiled programs of a setting: all of them need more memory maps than Linux allows a process."""
    jax.clear_caches()
    gc.collect()


def main(config: FrontDoor) -> None:
    """Print both tables, and write their numbers.

    Args:
        config: the settings.

    Raises:
        ValueError: if the trace does not fit the settings.
    """
    trace, console = some_layers(read_trace(config.trace), config.layers), Console(width=140)
    settings = {field: value for field, value in dataclasses.asdict(config).items() if field != "record"}
    about = settings | dataclasses.asdict(costs_of(config)) | {"trace": trace.name}
    roads, sent = {}, {}
    for ranks, residents in itertools.product(config.ranks, config.residents):
        name, case = f"{ranks}, {residents or 'no'} resident", make_case(trace, config, ranks, residents)
        outcomes = plan_roads(case)
        roads[name], sent[name] = road_rows(case, outcomes), price_as_sent(outcomes["plan_batch"])
        _forget_programs()
        if config.record is not None:  # after every case: one takes minutes
            write_json(config.record, about | {"roads": roads, "sent": sent})
    console.print(roads_table(roads))
    console.print(sent_table(sent))


if __name__ == "__main__":
    sys.exit(run_program(main, FrontDoor, description=__doc__))
