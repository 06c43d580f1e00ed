"""A cell of the claims: one trace at the sizes of one model on some ranks, and the numbers of its rows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.claims.rows import RESIDENT_SLOTS, entries
from relibra_jax.contract.types import Topology
from relibra_jax.cost.memory import rank_memory
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.evaluation import Batching, Costs, Outcome, Ranks, make_setting, run_planner
from relibra_jax.traces.trace import Trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting in which rows are compared."""

    ranks: Ranks
    """The ranks, with the replica slots of every row. A row may add resident slots."""
    batching: Batching
    """How the trace is divided into batches and micro-batches."""
    costs: Costs
    """The hardware, model and sizes of the modelled times."""


@dataclasses.dataclass(frozen=True)
class CellResult:
    """The results of a cell, as they are kept in the JSON file."""

    trace: str
    """The name of the trace."""
    synthetic: bool
    """Whether the routing of the trace was drawn at random instead of recorded."""
    cell: dict[str, Any]
    """The setting: the fields of `Cell`; ``experts``, the trace's number of experts; and ``replica_share``, the memory
    of replicas over that of the weights."""
    rows: dict[str, dict[str, Any]]
    """The numbers of each row: those of `relibra_jax.evaluation.Outcome`, and ``fits``, whether its memory fits a
    rank of the cluster."""
    skipped: str = ""
    """The reason why nothing was run; empty if the cell was run."""

    @property
    def model(self) -> str:
        """The name of the model whose sizes are priced."""
        return self.cell["costs"]["model"]

    @property
    def routing(self) -> str:
        """The trace with its number of experts, which the figures of a cell depend on."""
        return f"{self.trace}, {self.cell['experts']} experts"

    @property
    def ranks(self) -> str:
        """The numbers of nodes and of ranks per node, for example ``2x8``."""
        return f"{self.cell['ranks']['nodes']}x{self.cell['ranks']['ranks_per_node']}"


def run_cell(
    trace: Trace, cell: Cell, rows: Sequence[str], *, progress: Callable[[str], None] = lambda name: None
) -> CellResult:
    """Run the rows of a cell. If the trace does not fit the setting, skip the cell and keep the reason.

    Args:
        trace: the trace.
        cell: the setting.
        rows: the names of the rows, from `experiments.claims.rows.entries`.
        progress: a function that is called with the name of each row when it has finished.

    Returns:
        The numbers of the rows, or the reason why the cell was skipped.
    """
    setting = {**dataclasses.asdict(cell), "experts": trace.num_experts}
    try:
        numbers, share = _run(trace, cell, rows, progress)
    except (ValueError, MemoryError) as error:
        reason = str(error) or "this machine has too little memory"
        return CellResult(trace.name, trace.synthetic, setting, {}, skipped=reason)
    return CellResult(trace.name, trace.synthetic, {**setting, "replica_share": share}, numbers)


def _run(
    trace: Trace, cell: Cell, rows: Sequence[str], progress: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], float]:
    """Run the rows; return their numbers, with the memory of all of the model's experts, and `replica_share`."""
    setting = make_setting(
        trace, cell.ranks.topology(trace.num_experts), batching=cell.batching, cost=cell.costs
    )
    slots_of = {name: max(RESIDENT_SLOTS.get(name, 0), cell.ranks.resident_slots) for name in rows}
    settings = {
        slots: dataclasses.replace(
            setting, topology=dataclasses.replace(setting.topology, resident_slots=slots)
        )
        for slots in set(slots_of.values())
    }
    numbers, table = {}, entries()
    for name in rows:
        numbers[name] = _numbers(run_planner(name, table[name], settings[slots_of[name]]), cell.costs)
        progress(name)
    model = MODELS[cell.costs.model]
    whole_model = dataclasses.replace(setting.topology, num_experts=model.num_experts)
    return numbers, replica_share(model, whole_model)


def _numbers(outcome: Outcome, costs: Costs) -> dict[str, Any]:
    """Return the numbers of a row, with the memory that a rank needs for all of the model's own experts."""
    model, topology = MODELS[costs.model], outcome.setting.topology
    whole_model = dataclasses.replace(
        topology,
        num_experts=model.num_experts,
        resident_slots=topology.resident_slots if outcome.residents else 0,
    )
    memory = rank_memory(whole_model, model, shards=costs.shards).total
    fits = memory <= outcome.cost_model.cluster.memory
    return {**outcome.numbers(), "rank_memory": memory, "fits": fits}


def replica_share(model: Model, topology: Topology) -> float:
    """Return the memory of a rank's replica buffer divided by that of the rank's weights, as ReLibra's paper counts it.

    Args:
        model: the sizes of the model.
        topology: the expert-parallel group.

    >>> topology = Topology(num_nodes=2, ranks_per_node=8, num_experts=128, replica_slots=2)
    >>> f"{replica_share(MODELS['qwen3-30b-a3b'], topology):.2%}"
    '0.35%'
    """
    weights = model.moe_layers * (topology.home_slots * model.expert_params + model.attention_params)
    return topology.replica_slots * model.expert_params / weights
