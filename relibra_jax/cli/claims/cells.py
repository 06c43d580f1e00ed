"""A cell: one trace read at the sizes of one model on some ranks, and what its rows come to."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.claims.rows import contenders
from relibra_jax.cli.modelled_time import make_cost_model
from relibra_jax.cli.options import Batching, Costs, Ranks
from relibra_jax.cli.outcomes import compare
from relibra_jax.cost.memory import rank_memory
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.traces.trace import Trace
from relibra_jax.types import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting in which rows are compared."""

    ranks: Ranks
    """The ranks, with the replica slots of every row; resident slots are the row's."""
    batching: Batching
    """How the trace becomes batches."""
    costs: Costs
    """What modelled times stand for."""


@dataclasses.dataclass(frozen=True)
class CellResult:
    """What a cell came to, as it is kept in the JSON."""

    trace: str
    """The trace's name."""
    synthetic: bool
    """Whether its routing was drawn, not recorded."""
    cell: dict[str, Any]
    """The setting."""
    rows: dict[str, dict[str, Any]]
    """The numbers of each row: those of `relibra_jax.cli.outcomes.Outcome`, and ``fits``, whether its memory fits a
    rank of the cluster."""
    skipped: str = ""
    """Why nothing was run; empty where something was."""

    @property
    def model(self) -> str:
        """The name of the model whose sizes are priced."""
        return self.cell["costs"]["model"]

    @property
    def ranks(self) -> str:
        """Nodes x ranks of a node."""
        return f"{self.cell['ranks']['nodes']}x{self.cell['ranks']['ranks_per_node']}"


def run_cell(
    trace: Trace, cell: Cell, rows: Sequence[str], *, progress: Callable[[str], None] = lambda name: None
) -> CellResult:
    """Run the rows of a cell; a cell that the trace does not fit is skipped with the reason.

    Args:
        trace: the routing.
        cell: the setting.
        rows: names from `relibra_jax.cli.claims.rows.contenders`.
        progress: called with the name of each row that has finished.
    """
    setting = dataclasses.asdict(cell)
    try:
        numbers, share = _run(trace, cell, rows, progress)
    except (ValueError, MemoryError) as error:
        reason = str(error) or "this machine has too little memory"
        return CellResult(trace.name, trace.synthetic, setting, {}, skipped=reason)
    return CellResult(trace.name, trace.synthetic, {**setting, "replica_share": share}, numbers)


def _run(
    trace: Trace, cell: Cell, rows: Sequence[str], progress: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], float]:
    """The numbers of the rows, and `replica_share`. Memory is that of the model with all its experts."""
    topology = cell.ranks.topology(trace.num_experts)
    batches = make_batches(trace, cell.batching, topology)
    cost_model = make_cost_model(cell.costs, trace, batches, topology)
    table, model = contenders(cost_model), MODELS[cell.costs.model]
    numbers: dict[str, dict[str, Any]] = {}
    slots_of = {name: max(table[name].resident_slots, cell.ranks.resident_slots) for name in rows}
    for slots in sorted(set(slots_of.values())):
        chosen = {name: table[name].contender for name in rows if slots_of[name] == slots}
        given = dataclasses.replace(topology, resident_slots=slots)
        for outcome in compare(
            chosen, batches, given, cost_model, seed=cell.batching.seed, progress=progress
        ):
            held = dataclasses.replace(
                given, num_experts=model.num_experts, resident_slots=slots if outcome.residents else 0
            )
            memory = rank_memory(held, model, shards=cell.costs.shards).total
            fits = memory <= cost_model.cluster.memory
            numbers[outcome.planner] = {**outcome.numbers(), "rank_memory": memory, "fits": fits}
    whole = dataclasses.replace(topology, num_experts=model.num_experts)
    return {name: numbers[name] for name in rows}, replica_share(model, whole)


def replica_share(model: Model, topology: Topology) -> float:
    """The one buffer of a rank's replicas over the weights that the rank holds, as ReLibra's paper counts it.

    >>> topology = Topology(num_nodes=2, ranks_per_node=8, num_experts=128, replica_slots=2)
    >>> f"{replica_share(MODELS['qwen3-30b-a3b'], topology):.2%}"
    '0.35%'
    """
    weights = model.moe_layers * (topology.home_slots * model.expert_params + model.attention_params)
    return topology.replica_slots * model.expert_params / weights
