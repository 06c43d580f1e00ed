"""The exchange settings and the sizes with which programs are compiled."""

from dataclasses import replace
from typing import Final, Literal

from experiments.aot.h100 import h100_mesh
from experiments.aot.stack import Model
from relibra_jax.contract.types import Topology
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes

type Way = Literal["auto", "padded", "hierarchical padded", "ragged"]
"""The exchange settings of a program. ``auto`` is what `ExpertParallel` chooses on 2 GPU nodes: hierarchical and
fitted, with the padded replica fetch. ``padded`` is flat. ``ragged`` is hierarchical, and fetches replicas likewise.
All are striped, as a Balancer chooses."""

MODEL: Final = Model()
TOPOLOGY: Final = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
EXPERT: Final = 3 * MODEL.width * MODEL.expert_width
"""The number of elements of one expert's weights."""


def parallel_of(
    way: Way, *, replica_slots: int = TOPOLOGY.replica_slots, resident_slots: int = 0, layers: int = 1
) -> ExpertParallel:
    """Return the mesh, kinds of exchange and buffer sizes of a program; the sizes are those of a slightly uneven plan.

    Args:
        way: the exchange settings.
        replica_slots: the number of replica slots of a rank.
        resident_slots: the number of resident slots of a rank.
        layers: the number of layers for which residents are pushed.
    """
    topology = replace(TOPOLOGY, replica_slots=replica_slots, resident_slots=resident_slots)
    return ExpertParallel(
        mesh=h100_mesh(topology),
        topology=topology,
        capacities=capacities_of(topology, layers),
        path="flat" if way == "padded" else "hierarchical",
        exchange=way.split()[-1],
        fetch=way.split()[-1],
        implementation="mosaic",
        attention_implementation="triton",
    ).with_striping(MODEL.top_k)


def capacities_of(topology: Topology, layers: int) -> Capacities:
    """Return buffer sizes for loads up to a quarter above even ones, with nearly every token going to both nodes."""
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
        # Every rank exports as many experts as it has replicas; a rank that exports more needs more memory.
        exports=topology.replica_slots,
        export_copies=topology.replica_slots,
        push=push,
    )
