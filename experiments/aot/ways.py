"""The ways in which the compiled programs run plans, and the sizes that they run them at."""

from dataclasses import replace
from typing import Final, Literal

from experiments.aot.h100 import h100_mesh
from experiments.aot.stack import Model
from relibra_jax.capacity import Capacities, ExchangeSizes
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.resident_push import PushSizes
from relibra_jax.types import Topology

type Way = Literal["auto", "padded", "hierarchical padded"]
"""``auto`` is what `ExpertParallel` chooses on 2 nodes of GPUs: hierarchical, padded between nodes, ragged inside, with
the ragged replica fetch. ``padded`` is flat."""

MODEL: Final = Model()
TOPOLOGY: Final = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
EXPERT: Final = 3 * MODEL.width * MODEL.expert_width
"""Elements of one expert's weights."""


def parallel_of(
    way: Way, *, replica_slots: int = TOPOLOGY.replica_slots, resident_slots: int = 0, layers: int = 1
) -> ExpertParallel:
    """How plans are run in one way, with buffers as a plan that is not quite even would ask for.

    Args:
        way: the way.
        replica_slots: the replica slots of a rank.
        resident_slots: the resident slots of a rank.
        layers: the layers that residents are pushed for.
    """
    topology = replace(TOPOLOGY, replica_slots=replica_slots, resident_slots=resident_slots)
    return ExpertParallel(
        mesh=h100_mesh(topology),
        topology=topology,
        capacities=capacities_of(topology, layers),
        path="auto" if way == "auto" else "flat" if way == "padded" else "hierarchical",
        exchange="auto" if way == "auto" else "padded",
        fetch="auto" if way == "auto" else "padded",
        implementation="mosaic",
    )


def capacities_of(topology: Topology, layers: int) -> Capacities:
    """Buffer sizes: loads a quarter off the even ones, and nearly every token on both nodes."""
    even = MODEL.tokens * MODEL.top_k
    rows = even * 33 // 32
    visits = MODEL.tokens * 31 // 32
    to_rank, inside = (even // ranks * 5 // 4 for ranks in (topology.num_ranks, topology.ranks_per_node))
    push = None
    if topology.resident_slots:
        each = layers * topology.resident_slots
        push = PushSizes(exports=each + 2, pair=each * topology.ranks_per_node - 3, own=1)
    return Capacities(
        rows=rows,
        flat=ExchangeSizes(pair=to_rank, own=to_rank, send=even, receive=rows),
        node=ExchangeSizes(pair=visits, own=visits, send=2 * visits, receive=2 * visits),
        local=ExchangeSizes(pair=inside, own=inside, send=rows, receive=rows),
        # As many exports as replicas on every rank: a rank that exports more holds that much more.
        exports=topology.replica_slots,
        export_copies=topology.replica_slots,
        push=push,
    )
