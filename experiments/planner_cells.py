"""``python -m experiments.planner_cells``: ReLibra beside every other planner, over a sample of settings.

A *cell* is one setting: a trace, a number of tokens, ranks, slots, a path, and what planning may look at. The sample
covers every pair of values, and is drawn with a seed. In each cell all planners plan the same batches one after the
other. All are priced as they are sent: `relibra_jax.cost.batch_time` with the node visits of their tokens, and with the
moves of experts before them; `CellTimes` says for which loads of a node's ranks. Planners do not assign samples here.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num
from rich.console import Console
from rich.table import Table

from experiments.program import parse_ranks, run_program, topology_of
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import Array, Price, RoutingReplay, Topology
from relibra_jax.evaluation import Batching, Costs, PlannedBatch, make_setting
from relibra_jax.evaluation.prices import count_visits, time_of_balanced, time_of_batch
from relibra_jax.evaluation.replica_nodes import choose_replica_nodes
from relibra_jax.planning.assignment import with_positions
from relibra_jax.planning.batch import count_batch
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.starts import start_assignment
from relibra_jax.routing.striping import with_striped_load
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.traces.bootstrap import bootstrap
from relibra_jax.traces.read import NAMED_TRACES, read_trace
from relibra_jax.traces.trace import Trace, make_trace, some_layers

MICRO_BATCHES: Final = 4
BATCHES: Final = 8
LAYERS: Final = 3
SHARDS: Final = 16
"""The number of data-parallel groups over which optimizer state is sharded, so that it fits in every cell."""
AHEAD: Final = 1.002
"""The ratio of times above which another planner counts as ahead."""
RIVALS: Final = tuple(name for name in PLANNERS if name != "relibra")


class Cell(NamedTuple):
    """One setting."""

    trace: str
    """A name of `NAMED_TRACES`, ``zipf-1``, ``zipf-2``, or ``one-hot``: all tokens use the same experts."""
    tokens: int
    """The number of tokens of a rank in a micro-batch."""
    ranks: str
    """Nodes x local ranks."""
    replicas: int
    """R, the number of replica slots of a rank."""
    residents: int
    """The number of resident slots of a rank."""
    path: Literal["flat", "hierarchical"]
    """``flat`` or ``hierarchical``."""
    pieces: int
    """The number of pieces in which tokens travel; with one, nothing overlaps."""
    sees: str
    """What is planned from: ``routes`` or ``loads`` alone."""


VALUES: Final[dict[str, tuple]] = {
    # Without the trace of several steps, which takes long to draw and is as uneven as synthetic-128.
    "trace": (*(name for name in NAMED_TRACES if not name.endswith("-steps")), "zipf-1", "zipf-2", "one-hot"),
    "tokens": (64, 1024, 4096, 16384),
    "ranks": ("1x8", "2x4", "4x4", "2x8", "4x8", "8x8"),
    "replicas": (0, 1, 2),
    "residents": (0, 1),
    "path": ("flat", "hierarchical"),
    "pieces": (1, 2),
    "sees": ("routes", "loads"),
}
"""The values of every field of a `Cell`."""


def draw_cells(count: int, *, seed: int = 0) -> list[Cell]:
    """Draw cells that cover all pairs of values of two fields early.

    Args:
        count: the number of cells.
        seed: the seed of the draw.

    >>> len(set(draw_cells(20)))
    20
    """
    rng = np.random.default_rng(seed)
    fields = [VALUES[name] for name in Cell._fields]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(fields)), 2)
        for a, b in itertools.product(fields[i], fields[j])
    }

    def pairs(cell: Cell) -> set[tuple]:
        return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(fields)), 2)}

    cells: list[Cell] = []
    while len(cells) < count:
        options = [Cell(*(values[rng.integers(len(values))] for values in fields)) for _ in range(100)]
        best = max(options, key=lambda cell: len(pairs(cell) & missing))
        if best not in cells:
            cells.append(best)
            missing -= pairs(best)
    return cells


@functools.lru_cache(maxsize=4)
def _trace(name: str) -> Trace:
    if name.startswith("zipf"):
        return synthetic_trace(layers=LAYERS, skew=float(name.removeprefix("zipf-")))
    if name == "one-hot":
        ids = np.broadcast_to(np.arange(4, dtype=np.uint8), (256, 64, LAYERS, 4)).copy()
        return make_trace(RoutingReplay(ids, np.ones((256, 64), bool)), 32, name)
    return some_layers(read_trace(name), LAYERS)


class CellTimes(NamedTuple):
    """The mean modelled seconds of a cell's batches, by planner.

    Ranks of a node deal their tokens to each other, so that the longest lane of a real micro-batch is hardly longer
    than the mean. A cell has a few hundred tokens on a rank, priced as if they were up to 16,384. The lanes of so few
    tokens differ by chance, and by the rule of the workloads W0 to W7, which repeat after four or eight tokens.
    """

    level: dict[str, float]
    """With equal parts of every node's tokens on its ranks, as plans are made."""
    counted: dict[str, float]
    """With the parts that the cell's own tokens have."""


def run_cell(cell: Cell, planners: tuple[str, ...]) -> CellTimes:
    """Return the mean modelled seconds of a cell's batches, by planner.

    Args:
        cell: the setting.
        planners: names in `PLANNERS`. ``balanced`` is added: a run in which nothing is uneven.
    """
    trace, ranks = _trace(cell.trace), math.prod(parse_ranks(cell.ranks))
    samples, experts = 2 * ranks * MICRO_BATCHES, -(-trace.num_experts // ranks) * ranks
    topology = topology_of(cell.ranks, experts, replica_slots=cell.replicas, resident_slots=cell.residents)
    if len(trace.replay.mask) < BATCHES * samples:
        trace = bootstrap(trace, BATCHES * samples, seed=0)
    setting = make_setting(
        trace,
        topology,
        batching=Batching(batch_size=samples, micro_batches=MICRO_BATCHES),
        cost=Costs(tokens_per_rank=float(cell.tokens), dispatch=cell.path, shards=SHARDS),
    )
    setting = dataclasses.replace(
        setting, cost_model=dataclasses.replace(setting.cost_model, pieces=cell.pieces)
    )
    replays = setting.batches.replays[:BATCHES]
    stages = _stages_of_one_shape(replays, topology, setting.cost_model.price(topology))
    seconds: dict[str, float] = {}
    seconds_counted: dict[str, float] = {}
    for name in (*planners, "balanced"):
        entry = PLANNERS.get(name, PLANNERS["static"])
        planner_key, key = jax.random.split(jax.random.key(0))
        state: Any = entry.planner.init(topology, LAYERS, key=planner_key)
        home: Any = contiguous_homes(topology, LAYERS)
        count = functools.partial(
            count_batch,
            topology=topology,
            with_routes=cell.sees == "routes",
            with_transitions=entry.planner.uses_transitions,
        )
        price = choose_replica_nodes(
            entry, setting.cost_model, topology, functools.partial(count, replays[0]), stages[0], seed=0
        ).price(topology)
        times: list[list[float]] = []
        for replay, stage in zip(replays, stages, strict=True):
            batch = count(replay)
            (batch_plan,), state = plan_batch(
                batch, entry.planner, state, topology, stages=[stage], cost=price, key=key
            )
            counted = with_striped_load(batch_plan, replay, topology) if price.striped else batch_plan
            no_errors = np.zeros(batch_plan.load.shape[:2], np.float32)
            planned = PlannedBatch(replay, counted, home, no_errors)
            if name == "balanced":
                times.append([float(time_of_balanced(planned, topology, price).total)] * 2)
            else:
                visits = count_visits(planned, topology, price)
                level = planned._replace(batch_plan=batch_plan)
                both = ((level, _level_visits(visits, topology, price)), (planned, visits))
                times.append(
                    [float(time_of_batch(each, topology, price, visits=own).total) for each, own in both]
                )
            home = batch_plan.plan.home
        seconds[name], seconds_counted[name] = np.mean(times, 0).tolist()
    return CellTimes(seconds, seconds_counted)


def _level_visits(
    visits: Num[Array, "M L P V"] | None, topology: Topology, price: Price
) -> Num[Array, "M L P V"] | None:
    """Average the visits of a node's ranks, if these deal their tokens."""
    if visits is None or not price.striped:
        return visits
    by_node = jnp.asarray(visits, jnp.float32).reshape(
        *visits.shape[:2], topology.num_nodes, topology.ranks_per_node, -1
    )
    return jnp.broadcast_to(by_node.mean(3, keepdims=True), by_node.shape).reshape(visits.shape)


def _stages_of_one_shape(replays: Sequence[RoutingReplay], topology: Topology, price: Price) -> list[Stage]:
    """Return the stage of every batch, with as many positions for samples as the batch that needs most.

    Batches of one shape compile once.
    """
    lengths = [replay.mask.sum(1) for replay in replays]
    packed = [
        start_assignment(each, topology, num_micro_batches=MICRO_BATCHES, price=price) for each in lengths
    ]
    room = max(each.sample.shape[-1] for each in packed)
    return [Stage(MICRO_BATCHES, start=with_positions(each, room)) for each in packed]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerCells:
    """Compare ReLibra with every other planner over a sample of settings."""

    cells: int = 200
    """The number of cells."""
    first: int = 0
    """The first cell to run; those before it are drawn and skipped."""
    seed: int = 0
    """The seed of the sample."""
    rivals: tuple[str, ...] = RIVALS
    """The other planners."""
    record: Path | None = None
    """The JSON file for the numbers. None writes no file."""


def main(config: PlannerCells) -> int:
    """Run the cells, and print each as soon as it is known."""
    console, records = Console(), []
    check_integer("cells", config.cells, least=1)
    for number, cell in enumerate(draw_cells(config.cells, seed=config.seed)):
        if number < config.first:
            continue
        seconds = run_cell(cell, ("relibra", *config.rivals))
        jax.clear_caches()  # every cell compiles programs of its own
        level = seconds.level
        best = min(config.rivals, key=lambda name: level[name])
        records.append(
            {"cell": number, **cell._asdict(), "best": best, "seconds": level, "counted": seconds.counted}
        )
        ratio, share = level["relibra"] / level[best], level["balanced"] / level["relibra"]
        console.print(f"{number:3} {_title(cell)}: {ratio:.3f} x {best}, {share:.1%} of balanced")
        if config.record:
            write_json(config.record, records)
    console.print(_summary(records))
    return 0


def _title(cell: Cell) -> str:
    return (
        f"{cell.trace} {cell.tokens} tokens {cell.ranks} R={cell.replicas} B={cell.residents} {cell.path}"
        f" in {cell.pieces} from {cell.sees}"
    )


def _summary(records: list[dict[str, Any]]) -> Table:
    """Return, for each other planner, in how many cells it is ahead of ReLibra by more than a fifth of a per cent."""
    table = Table("planner", "ahead in", "by at most", "behind by, median")
    for name in [name for name in records[0]["seconds"] if name not in ("relibra", "balanced")]:
        ratios = np.array([each["seconds"]["relibra"] / each["seconds"][name] for each in records])
        ahead = f"{(ratios > AHEAD).sum()} of {len(ratios)}"
        table.add_row(name, ahead, f"{max(ratios.max() - 1, 0):.1%}", f"{1 / np.median(ratios) - 1:.1%}")
    return table


if __name__ == "__main__":
    sys.exit(run_program(main, PlannerCells))
