"""A cell of the claims: one trace at the sizes of one model on some ranks, and the numbers of its rows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.claims.rows import contenders
from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.modelled_time import make_cost_model
from relibra_jax.cli.outcomes import compare
from relibra_jax.contract.types import Topology
from relibra_jax.cost.memory import rank_memory
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.evaluation import Batching, Costs, Ranks
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
    """The numbers of each row: those of `relibra_jax.cli.outcomes.Outcome`, and ``fits``, whether its memory fits a
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
        rows: the names of the rows, from `experiments.claims.rows.contenders`.
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
    topology = cell.ranks.topology(trace.num_experts)
    batches = make_batches(trace, cell.batching, topology)
    cost_model = make_cost_model(cell.costs, trace, batches, topology)
    table, model = contenders(), MODELS[cell.costs.model]
    numbers: dict[str, dict[str, Any]] = {}
    slots_of = {name: max(table[name].resident_slots, cell.ranks.resident_slots) for name in rows}
    for slots in sorted(set(slots_of.values())):
        chosen = {name: table[name].contender for name in rows if slots_of[name] == slots}
        with_residents = dataclasses.replace(topology, resident_slots=slots)
        for outcome in compare(
            chosen, batches, with_residents, cost_model, seed=cell.batching.seed, progress=progress
        ):
            whole_model = dataclasses.replace(
                with_residents,
                num_experts=model.num_experts,
                resident_slots=slots if outcome.residents else 0,
            )
            memory = rank_memory(whole_model, model, shards=cell.costs.shards).total
            fits = memory <= cost_model.cluster.memory
            numbers[outcome.planner] = {**outcome.numbers(), "rank_memory": memory, "fits": fits}
    whole_model = dataclasses.replace(topology, num_experts=model.num_experts)
    return {name: numbers[name] for name in rows}, replica_share(model, whole_model)


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
