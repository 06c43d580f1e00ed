"""The settings of a comparison as plain values: ranks, the division of a trace into batches, and what is priced."""

import dataclasses
import math
from typing import Literal

from relibra_jax.contract.types import Topology
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer


@checks_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of one expert-parallel group."""

    nodes: int = 2
    """The number of nodes, N."""
    ranks_per_node: int = 4
    """The number of ranks on each node, G."""
    replica_slots: int = 2
    """The number of replica slots on each rank, R."""
    resident_slots: int = 0
    """The number of resident slots on each rank, B. Planners that do not support residents leave them empty."""

    def topology(self, num_experts: int) -> Topology:
        """Make the topology of a model on these ranks.

        Args:
            num_experts: the number of logical experts of a layer.

        Raises:
            ValueError: if the experts do not divide over the ranks, a number is out of its range, or a rank has more
                replica or resident slots than there are experts.
        """
        for name, number in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            check_integer(name, number, least=1)
        if num_experts % (self.nodes * self.ranks_per_node):
            raise ValueError(
                f"num_experts={num_experts} must divide evenly over {self.nodes * self.ranks_per_node} ranks"
                f" (nodes={self.nodes} x ranks_per_node={self.ranks_per_node}); {_divisors_text(num_experts)}"
            )
        # A Plan may have more slots than experts. On the command line that is a mistake, and planning would need memory
        # that grows with the square of the slots.
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


def _divisors_text(num_experts: int) -> str:
    """Return the clause that says over which numbers of ranks the experts divide.

    >>> _divisors_text(12)
    'they divide over 1, 2, 3, 4, 6, 12 ranks'
    """
    small = [number for number in range(1, math.isqrt(num_experts) + 1) if num_experts % number == 0]
    divisors = sorted({*small, *(num_experts // number for number in small)})
    return f"they divide over {', '.join(map(str, divisors))} ranks"


@checks_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How the samples of a trace are divided into batches and micro-batches.

    Samples are packed over the ranks and micro-batches of a batch by their lengths, in the same way for every planner
    that does not assign them itself. If there are two or more batches, the first is planned but not counted in the
    results, so that planners that need a history have one.
    """

    batch_size: int | None = None
    """The number of samples in a batch. None for the steps that the trace records, or else half the trace."""
    bootstrap: int | None = None
    """The number of batches to draw from the trace with replacement; needs batch_size, which may exceed the trace.
    Whole samples are drawn, from each domain in proportion to its size. None to cut the trace into batches, with each
    sample used once."""
    micro_batches: int | None = None
    """The number of micro-batches in a batch. None for about four samples of a rank in each."""
    token_budget: int | None = None
    """The most tokens that a rank holds in a micro-batch if samples are packed by their numbers of tokens. It sets the
    number of micro-batches. None for no limit."""
    order: Literal["given", "shuffled"] = "given"
    """The order of the samples: as the trace has them, or shuffled by ``seed``."""
    seed: int = 0
    """The seed of the shuffled order, of drawn batches, and of planning."""

    def __post_init__(self) -> None:
        if self.order not in ("given", "shuffled"):
            raise ValueError(f"order={self.order!r} must be given or shuffled")


@checks_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The hardware, model and sizes that modelled times are computed for; see relibra_jax.cost.batch_time.

    The planners get the same costs as the report.
    """

    cluster: str = "h100"
    """The cluster whose speeds and memory are modelled: h100, h200, gb200-nvl72, h100-ethernet-200 and others."""
    model: str = "gpt-oss-20b"
    """The model whose sizes are modelled: gpt-oss-20b, qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3 and others."""
    context: float = 4096.0
    """The mean length of a sample, in tokens, for the cost of attention."""
    tokens_per_rank: float = 16384.0
    """The mean number of tokens that a rank has in a micro-batch. The trace is scaled to it."""
    dispatch: Literal["auto", "flat", "hierarchical"] = "auto"
    """What is sent: every token copy by itself (flat), or a token once to each node, or on one node to each rank
    (hierarchical). By default what layers run: hierarchical if a token has several experts."""
    exchange: Literal["auto", "padded", "fitted", "ragged", "needed"] = "auto"
    """What an exchange sends: lanes as long as the longest of the batch (padded) or of the layer and micro-batch
    (fitted), only needed rows inside nodes and the latter between them (ragged), or only needed rows (needed).
    By default what layers run on GPUs: fitted."""
    sequence_layout: Literal["packed", "padded"] = "packed"
    """How samples lie in sequences: several in one (packed), or each in one of its own, as long as the longest."""
    updates: int = 1
    """The number of optimizer updates in a batch, which share its micro-batches. Each one pushes the residents."""
    recompute: bool = False
    """Model one more forward pass over every micro-batch, which recomputes old log-probabilities."""
    shards: int = 1
    """The number of data-parallel groups that share the optimizer state, for its memory on a rank and the time of an
    update. Times of plans do not have what the groups exchange; ``relibra advise`` adds it in its table of groups."""
