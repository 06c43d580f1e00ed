"""The memory of a rank: weights, gradients and optimizer state of a model, and a check that residents fit.

Bytes of every parameter with which a rank computes:

    weights       2  bfloat16, all layers, unsharded on every rank that computes with them
    masters       4  float32
    moments       8  float32, the two of Adam
    accumulators  4  float32 gradients, summed over micro-batches

With ``gather_once`` a rank accumulates the gradients of its whole experts (`relibra_jax.execution.ExpertParallel`).

Residents have weights and accumulators only, both unsharded. Masters, moments and accumulators of homes are divided by
``shards``, the number of data-parallel groups over which FSDP or ZeRO shards them. Those of attention and
shared experts, which all ranks hold, are divided by ``shards`` times the ranks of the group. All layers share one
buffer of replicas. A compiled stack of layers allocates 1.9 to 2.5 times this buffer with either fetch (``make aot``),
for the packed experts, the received experts and their gradient. This module counts 3 times.

Not counted are activations, gradients of one micro-batch before they are added to the accumulators (2 bytes per
parameter of a resident: ``make aot``), exchange buffers, embeddings, routers and norms, layers without experts, and the
memory of the runtime itself. The engine casts the weights of homes layer by layer from the masters, so it holds fewer
of them than are counted.
"""

from typing import Final, NamedTuple

from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import ACCUMULATOR_BYTES, COMPUTE_BYTES, STATE_BYTES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer

REPLICA_BUFFERS: Final = 3
"""The memory that is counted for replicas, in multiples of one buffer."""


class RankMemory(NamedTuple):
    """The memory of one rank in bytes, by purpose."""

    homes: float
    """Weights, masters, moments and accumulators of home slots."""
    residents: float
    """Weights and accumulators of resident slots."""
    replicas: float
    """The buffers of replica slots."""
    attention: float
    """Weights, masters, moments and accumulators of attention and of shared experts."""

    @property
    def total(self) -> float:
        """The sum of all parts, in bytes."""
        return sum(self)


@checks_arguments
def rank_memory(
    topology: Topology, model: Model, *, shards: int = 1, gather_once: bool = False
) -> RankMemory:
    """Compute the memory of a rank in bytes.

    Args:
        topology: the expert-parallel group.
        model: the sizes of the model.
        shards: the number of data-parallel groups over which optimizer state and accumulators are sharded.
            1 for no sharding.
        gather_once: whether experts are gathered once an update, so that accumulators of homes are not sharded.

    Raises:
        ValueError: if ``shards`` is below 1, or if the topology has fewer experts than the model.

    >>> from relibra_jax.cost.models import MODELS
    >>> topology = Topology(num_nodes=2, ranks_per_node=8, num_experts=32, replica_slots=2, resident_slots=1)
    >>> [round(each / 1e9, 1) for each in rank_memory(topology, MODELS["gpt-oss-20b"])]
    [21.5, 3.6, 0.3, 1.9]
    """
    check_integer("shards", shards, least=1)
    if topology.num_experts < model.num_experts:
        raise ValueError(
            f"the topology has num_experts={topology.num_experts}, fewer than the model's {model.num_experts}"
        )
    expert = model.moe_layers * model.expert_params
    dense = model.moe_layers * (model.attention_params + 3 * model.width * model.shared_width)
    state = STATE_BYTES + ACCUMULATOR_BYTES
    own = COMPUTE_BYTES + state / shards + gather_once * ACCUMULATOR_BYTES * (1 - 1 / shards)
    return RankMemory(
        homes=topology.home_slots * expert * own,
        residents=float(topology.resident_slots * expert * (COMPUTE_BYTES + ACCUMULATOR_BYTES)),
        replicas=float(REPLICA_BUFFERS * topology.replica_slots * model.expert_params * COMPUTE_BYTES),
        attention=dense * (COMPUTE_BYTES + state / (shards * topology.num_ranks)),
    )


@checks_arguments
def check_rank_memory(topology: Topology, model: Model, *, cluster: Cluster, shards: int = 1) -> None:
    """Raise ValueError unless the memory of a rank suffices for its slots and attention.

    Args:
        topology: the expert-parallel group.
        model: the sizes of the model.
        cluster: the hardware.
        shards: the number of data-parallel groups over which state is sharded, as in `rank_memory`.

    Raises:
        ValueError: under the conditions of `rank_memory`, or if a rank needs more memory than it has. The message has
            all parts in GB.
    """
    needed = rank_memory(topology, model, shards=shards)
    if needed.total > cluster.memory:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needed._asdict().items())
        raise ValueError(
            f"resident_slots={topology.resident_slots}: a rank needs {needed.total / 1e9:.1f} GB ({parts};"
            f" shards={shards}) and has {cluster.memory / 1e9:.1f} GB"
        )
