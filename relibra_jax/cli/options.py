"""Options that several commands take, as frozen dataclasses that tyro reads."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from relibra_jax.types import Topology

TracePath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]
"""A trace as the argument of a command; None stands for what `relibra_jax.cli.traces.read_trace` then reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of one expert-parallel group."""

    nodes: int = 2
    """The number of nodes N."""
    ranks_per_node: int = 4
    """The number of ranks of a node G."""
    replica_slots: int = 2
    """The number of replica slots of a rank R."""

    def topology(self, num_experts: int) -> Topology:
        """The topology of a model with so many experts on these ranks.

        Args:
            num_experts: the logical experts of a layer.

        Raises:
            ValueError: if the numbers do not fit each other, or there are more replica slots than experts.
        """
        # A plan may have them and leave them empty; here they are a slip, and planning takes their square in memory.
        if self.replica_slots > num_experts:
            raise ValueError(
                f"replica_slots={self.replica_slots} must be at most num_experts={num_experts}: a rank holds no expert"
                " twice"
            )
        return Topology(
            num_nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            num_experts=num_experts,
            replica_slots=self.replica_slots,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How the samples of a trace become batches and micro-batches.

    With two batches or more the first is only looked at, so that planners that need a history have one.
    """

    micro_batch_size: int = 8
    """The samples of one micro-batch, over all ranks."""
    batch_size: int | None = None
    """The samples of one batch; half the trace when not given."""
    order: Literal["given", "shuffled"] = "given"
    """Whether samples come as the trace has them, or in an order drawn by ``seed``."""
    seed: int = 0
    """The seed of the order and of planners that draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What modelled times stand for; see relibra_jax.cost.batch_time."""

    hardware: str = "h100"
    """The name of a cluster."""
    model: str = "gpt-oss-20b"
    """The name of a model."""
    context: float = 4096.0
    """The mean length of a sequence, tokens."""
    tokens_per_rank: float = 16384.0
    """The mean tokens of a rank in a micro-batch to which the trace is scaled."""
    dispatch: Literal["flat", "hierarchical"] = "flat"
    """Whether every token copy crosses the slow network, or a token once for each node, counted from the trace."""
