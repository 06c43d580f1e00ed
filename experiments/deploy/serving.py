"""What a deployment search is asked: the model, the hardware of both sides, the limits, and the values to try."""

import dataclasses
from typing import Final

import jax

from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.support.limits import check_integer, check_positive

MEMORY_SHARE: Final = 0.9
"""The default share of a device's memory that weights and caches may take: an assumption. Serving engines keep the rest
for activations, exchange buffers and the runtime."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """A model that is served with attention and experts on separate devices, and the limits that it must keep.

    Raises:
        ValueError: if a number is out of its range.
    """

    model: Model
    """The sizes of the model."""
    attention: Cluster
    """The hardware of the attention devices."""
    experts: Cluster
    """The hardware of the expert devices."""
    attention_price: float = 1.0
    """The price of one attention device, in any unit."""
    expert_price: float = 1.0
    """The price of one expert device, in the same unit."""
    context: float = 4096.0
    """The mean number of tokens of a sequence in the key-value cache."""
    slo: float = 0.1
    """The most seconds of a decoding step, which is the time between two tokens of a sequence."""
    memory_share: float = MEMORY_SHARE
    """The share of a device's memory that weights and caches may take, above 0 and at most 1. The rest is for what
    `experiments.deploy.costs` does not count."""

    def __post_init__(self) -> None:
        for name in ("slo", "context", "attention_price", "expert_price"):
            check_positive(name, getattr(self, name))
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share={self.memory_share} must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The values that a search tries: every combination of them, with every placement of the experts."""

    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers to try: devices that share a copy of attention, or an expert.
    Each must fit in a node, and divide the model's heads and expert width."""
    attention_copies: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    """Numbers to try: copies of attention, each of which serves its own sequences."""
    micro_batches: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers to try: micro-batches in flight."""
    sequences: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    """Numbers to try: sequences that a copy of attention serves in one micro-batch."""

    def check(self, serving: Serving) -> None:
        """Raise ValueError if a field is empty, a value is below 1, or ``tensor_parallel`` does not fit the serving."""
        for name, values in dataclasses.asdict(self).items():
            if not values:
                raise ValueError(f"{name} must have at least one value")
            for value in values:
                check_integer(name, value, least=1)
        node = min(serving.attention.node_ranks, serving.experts.node_ranks)
        for devices in self.tensor_parallel:
            if devices > node:
                raise ValueError(f"tensor_parallel={devices} must be at most the {node} devices of a node")
            for size, number in (
                ("heads", serving.model.heads),
                ("expert width", serving.model.expert_width),
            ):
                if number is not None and number % devices:
                    raise ValueError(f"tensor_parallel={devices} must divide the model's {size} {number}")
