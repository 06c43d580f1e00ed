"""What the commands of ``experiments.run`` can be told: one frozen dataclass a command."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from relibra_jax.types import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How the samples of a trace become batches and micro-batches.

    With two batches or more the first is only looked at, so that planners that need a history have one.
    """

    micro_batch_size: int = 8
    """Samples of one micro-batch, over all ranks."""
    batch_size: int | None = None
    """Samples of one policy update; half the trace when not given."""
    order: Literal["given", "shuffled"] = "given"
    """Take samples as the trace has them, or in an order drawn by ``seed``."""
    seed: int = 0
    """Of the order and of planners that draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks of one expert-parallel group."""

    nodes: int = 2
    """Nodes N."""
    ranks_per_node: int = 4
    """Ranks of a node G."""
    replica_slots: int = 2
    """Replica slots of a rank R."""

    def topology(self, num_experts: int) -> Topology:
        """With the experts of a model."""
        return Topology(
            num_nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            num_experts=num_experts,
            replica_slots=self.replica_slots,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What modelled times stand for; see relibra_jax.cost.step_time."""

    hardware: str = "h100"
    """A named cluster."""
    model: str = "gpt-oss-20b"
    """A named model."""
    context: float = 4096.0
    """Mean length of a sequence, tokens."""
    tokens_per_rank: float = 16384.0
    """The mean tokens of a rank in a micro-batch to which the trace is scaled."""
    dispatch: Literal["flat", "hierarchical"] = "flat"
    """Whether every token copy crosses the slow network, or a token once for each node, counted from the trace."""


TracePath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Run every planner over a trace: one table, one figure, the numbers as JSON."""

    trace: TracePath = None
    """A trace (.npz); else the one that RELIBRA_TRACE names, else the recorded one of this project."""
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = Cluster()
    batching: Annotated[Batching, tyro.conf.arg(name="")] = Batching()
    costs: Annotated[Costs, tyro.conf.arg(name="")] = Costs()
    ablation: bool = False
    """Run ReLibra's parts instead of the planner table: each alone, their alternatives, sample assignment."""
    out: Path = Path("out/compare")
    """Where the figures and the numbers go."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakePlan:
    """Write the plan of one planner for the last batch of a trace."""

    trace: TracePath = None
    """A trace (.npz); else the one that RELIBRA_TRACE names, else the recorded one of this project."""
    planner: str = "relibra"
    """A name from the table that ``compare`` prints."""
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = Cluster()
    batching: Annotated[Batching, tyro.conf.arg(name="")] = Batching()
    out: Path = Path("out/plan.npz")
    """The plan: slot_expert, home, quota and the numbers of the topology."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a trace: its size, and how unevenly its experts are used."""

    trace: TracePath = None
    """A trace (.npz); else the one that RELIBRA_TRACE names, else the recorded one of this project."""
