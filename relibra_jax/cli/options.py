"""Options that several commands take, as frozen dataclasses that tyro reads."""

import dataclasses
from typing import Annotated, Literal

import tyro

from relibra_jax.types import Topology

TraceName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]
"""A trace as the argument of a command: a name or a path, for `relibra_jax.traces.read.read_trace`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of one expert-parallel group."""

    nodes: int = 2
    """The number of nodes N."""
    ranks_per_node: int = 4
    """The number of ranks of a node G."""
    replica_slots: int = 2
    """The number of replica slots of a rank R."""
    resident_slots: int = 0
    """The number of resident slots of a rank B; planners that know no residents leave them empty."""

    def topology(self, num_experts: int) -> Topology:
        """The topology of a model with so many experts on these ranks.

        Args:
            num_experts: the logical experts of a layer.

        Raises:
            ValueError: if the numbers do not fit each other, or there are more replica or resident slots than experts.
        """
        # A plan may have them and leave them empty; here they are a slip, and planning takes their square in memory.
        for name, slots in (("replica_slots", self.replica_slots), ("resident_slots", self.resident_slots)):
            if slots > num_experts:
                raise ValueError(
                    f"{name}={slots} must be at most num_experts={num_experts}: a rank holds no expert twice"
                )
        return Topology(
            num_nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            num_experts=num_experts,
            replica_slots=self.replica_slots,
            resident_slots=self.resident_slots,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How the samples of a trace become batches and micro-batches.

    Samples are packed by their tokens over the ranks and micro-batches of a batch, the same for every planner. With two
    batches or more the first is only looked at, so that planners that need a history have one.
    """

    batch_size: int | None = None
    """The samples of one batch; half the trace when not given."""
    bootstrap: int | None = None
    """The number of batches, each drawn anew from the trace with replacement: whole samples, in each domain as many as
    its share. Needs a batch_size, which may exceed the trace."""
    micro_batches: int | None = None
    """The micro-batches of one batch; without this and a token_budget, as many as leave four samples a rank."""
    token_budget: int | None = None
    """The most tokens of the trace that a rank holds in one micro-batch, from which the micro-batches follow."""
    order: Literal["given", "shuffled"] = "given"
    """Whether samples come as the trace has them, or in an order drawn by ``seed``."""
    seed: int = 0
    """The seed of the order, of drawn batches and of planners that draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What modelled times stand for, which planners are told; see relibra_jax.cost.batch_time."""

    cluster: str = "h100"
    """The name of a cluster."""
    model: str = "gpt-oss-20b"
    """The name of a model."""
    context: float = 4096.0
    """The mean length of a sequence, tokens."""
    tokens_per_rank: float = 16384.0
    """The mean tokens of a rank in a micro-batch to which the trace is scaled."""
    dispatch: Literal["flat", "hierarchical"] = "hierarchical"
    """Whether every token copy crosses the slow network, or a token once for each node, counted from the trace."""
    updates: int = 1
    """The optimizer updates among which the micro-batches of a batch are divided; each pushes residents."""
    recompute: bool = False
    """Whether each micro-batch is run forward once more, for old log-probabilities."""
    shards: int = 1
    """The data-parallel copies over which optimizer state and accumulators are sharded, for the memory of a rank."""
