"""Bytes that a rank holds of a model's weights, gradients and optimizer state, and whether residents fit.

For every parameter that a rank computes with:

    weights       2  bfloat16, all layers, whole on every rank that computes with them
    masters       4  float32
    moments       8  float32, Adam's two
    accumulators  4  float32 gradients, summed over micro-batches

Residents have weights and accumulators alone, whole. Masters, moments and accumulators of homes are divided by
``shards``, the data-parallel copies of the group over which FSDP or ZeRO shards them; those of attention and shared
experts, which all ranks hold, by ``shards`` times the ranks of the group. Replicas have one buffer that all layers
share; a compiled stack of layers holds 1.9 to 2.5 times that with either fetch (``make aot``), for what is packed, what
arrived and its gradient, and 3 is counted.

Not counted: activations, gradients of one micro-batch before they are added to the accumulators (2 bytes for each
parameter of a resident: ``make aot``), exchange buffers, embeddings, routers and norms, layers without experts, and
what the runtime itself takes. The engine casts weights of homes layer by layer from the masters and then holds fewer of
them.
"""

from typing import Final, NamedTuple

from relibra_jax.cost.copies import ACCUMULATOR_BYTES, STATE_BYTES, WEIGHT_BYTES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.limits import check_integer
from relibra_jax.types import Topology

REPLICA_BUFFERS: Final = 3


class RankMemory(NamedTuple):
    """Bytes of one rank, by what they are for."""

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
        """Bytes of all of them."""
        return sum(self)


def rank_memory(topology: Topology, model: Model, *, shards: int = 1) -> RankMemory:
    """The bytes that a rank holds.

    Args:
        topology: the expert-parallel group, which gives the slots of a rank.
        model: the sizes of the model.
        shards: the data-parallel copies of the group over which optimizer state and accumulators are sharded; 1 if
            there are none.

    Raises:
        ValueError: if ``shards`` is no integer of at least 1, or the topology has fewer experts than the model.

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
    return RankMemory(
        homes=topology.home_slots * expert * (WEIGHT_BYTES + state / shards),
        residents=float(topology.resident_slots * expert * (WEIGHT_BYTES + ACCUMULATOR_BYTES)),
        replicas=float(REPLICA_BUFFERS * topology.replica_slots * model.expert_params * WEIGHT_BYTES),
        attention=dense * (WEIGHT_BYTES + state / (shards * topology.num_ranks)),
    )


def check_rank_memory(topology: Topology, model: Model, *, cluster: Cluster, shards: int = 1) -> None:
    """Raise unless a rank of the cluster holds its slots and attention.

    Args:
        topology: the expert-parallel group.
        model: the sizes of the model.
        cluster: the hardware.
        shards: as in `rank_memory`.

    Raises:
        ValueError: as `rank_memory`, or if the bytes exceed the cluster's memory, with all of them in GB.
    """
    needed = rank_memory(topology, model, shards=shards)
    if needed.total > cluster.memory:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needed._asdict().items())
        raise ValueError(
            f"resident_slots={topology.resident_slots}: a rank needs {needed.total / 1e9:.1f} GB ({parts};"
            f" shards={shards}) and has {cluster.memory / 1e9:.1f} GB"
        )
