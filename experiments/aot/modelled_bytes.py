"""The bytes that the cost model prices for an update or a recompute, beside those that the compiled program sends.

A cost model whose networks send one byte a second prices bytes. The rows, experts and lanes are those of the buffers:
`tests/test_cost.py` holds `relibra_jax.cost.traffic.count_sent` against the buffers of a plan. The cost model leaves
out:

    tokens     one of five exchanges of an update: the backward pass computes layers again, and dispatches once more. So
               the program sends 5/4 of what is priced, and 2/2 in a recompute
    gates      the float32 gates that travel with the tokens, K for a row that crosses and 1 for a row inside a node
    dense      it prices one sum of float32 gradients an update, 8 bytes a parameter. The program sends dense gradients
               in every micro-batch, those of experts over data-parallel groups once an update, and sharded parameters
               are gathered in both passes, in the dtype of the computation

Experts that are sharded over copies are priced by `relibra_jax.cost.group_exchange`, which is not part of the price of
plans. Of a resident, each copy sends its part; the cost model prices whole experts, so what it prices is divided among
the copies here.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax.numpy as jnp

from experiments.aot.bytes import Axes, Sent
from experiments.model_memory import num_parameters
from experiments.rl.devices import FSDP
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.group_exchange import group_exchange_time
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.cost.models import Model
from relibra_jax.execution import ExpertParallel
from relibra_jax.models import ModelConfig

NO_TIME: Final = 1e30
"""A speed at which bytes and operations take no time."""
PRICED: Final = ("tokens", "replicas", "residents", "experts")
"""The contents that the cost model prices as they run."""
LEAST: Final = 0.99
MOST: Final = 1.26
"""The ratios of sent to priced bytes that are allowed for `PRICED`: 5/4 for tokens, 1 for the others."""


class Compared(NamedTuple):
    """The bytes of one content over one network that a device sends, and those that the cost model prices."""

    content: str
    axes: Axes
    sent: float
    priced: float

    @property
    def good(self) -> bool:
        """Whether the cost model prices about what is sent."""
        return self.content not in PRICED or LEAST * self.priced <= self.sent <= MOST * self.priced


def compare_bytes(
    sent: Sent,
    config: ModelConfig,
    parallel: ExpertParallel,
    *,
    tokens: int,
    micro_batches: int,
    updates: int,
) -> list[Compared]:
    """Compare what a compiled program sends with what the cost model prices.

    Args:
        sent: the counted bytes of the program, from `experiments.aot.bytes.count_sent`.
        config: the sizes of the model.
        parallel: the mesh, topology, buffer sizes and kinds of exchange.
        tokens: the number of tokens of a rank in a micro-batch.
        micro_batches: the number of micro-batches.
        updates: 1 for an update, 0 for a recompute.
    """
    joined: dict[tuple[str, Axes], float] = {}
    for (content, axes), size in sent.items():
        # The returned gradients of groups are summed over them once an update, like those of other experts.
        moved = content in ("push", "return")
        name: str = "dense" if moved and axes == "data" else "residents" if moved else content
        # Dense parameters are sharded over copies only together with ranks, or not at all.
        name = "experts" if name in ("dense", "residents") and axes == FSDP else name
        joined[name, axes] = joined.get((name, axes), 0) + size
    priced = priced_bytes(config, parallel, tokens=tokens, micro_batches=micro_batches, updates=updates)
    keys = sorted({*joined, *priced})
    return [Compared(*key, joined.get(key, 0), priced.get(key, 0)) for key in keys]


def priced_bytes(
    config: ModelConfig, parallel: ExpertParallel, *, tokens: int, micro_batches: int, updates: int
) -> dict[tuple[str, Axes], float]:
    """Return the bytes that the cost model prices for a device, by content and network.

    Args:
        config: the sizes of the model.
        parallel: the mesh, topology, buffer sizes and kinds of exchange. The path must be hierarchical.
        tokens: the number of tokens of a rank in a micro-batch.
        micro_batches: the number of micro-batches.
        updates: 1 for an update, 0 for a recompute.
    """
    topology, sizes = parallel.topology, parallel.capacities
    assert sizes is not None
    assert sizes.node is not None
    nodes, local = parallel.ranks
    runs = micro_batches * config.moe_layers
    across, inside = (
        CostModel(
            cluster=_bytes_of(network),
            model=_sizes(config),
            striped=parallel.is_striped,
            compute_bytes=jnp.dtype(config.dtype).itemsize,
        ).price(topology, updates=updates, recompute=not updates)
        for network in ("slow", "fast")
    )
    stripes = inside.stripe * tokens * config.top_k
    last = sizes.local if nodes > 1 else sizes.node
    priced: dict[tuple[str, Axes], Any] = {
        ("tokens", "node"): runs * across.crossing * (nodes - 1) * sizes.node.pair,
        ("tokens", "local"): runs * (inside.spread * (local - 1) * last.pair + stripes),
    }
    if slots := topology.replica_slots:
        priced["replicas", "local"] = runs * inside.fetch * (sizes.exports + slots) * (1 - 1 / local)
    if topology.resident_slots and updates:
        assert sizes.push is not None
        experts = (sizes.push.exports + config.moe_layers * topology.resident_slots) * (1 - 1 / local)
        copies = parallel.mesh.shape.get(FSDP, 1)
        priced["residents", "local"] = inside.push_inside * experts / copies
        priced["residents", "node"] = across.push * sizes.push.pair * (nodes - 1) / local / copies
    if updates:
        priced["dense", "all"] = config.moe_layers * (across.update + inside.update)
    if FSDP in parallel.mesh.shape:
        experts_alone = CostModel(
            cluster=_bytes_of("slow"),
            model=dataclasses.replace(_sizes(config), attention_params=0, vocabulary=0),
            compute_bytes=jnp.dtype(config.dtype).itemsize,
            shards=parallel.mesh.shape[FSDP],
            updates=updates,
            recompute=not updates,
        )
        priced["experts", FSDP] = config.moe_layers * group_exchange_time(
            experts_alone, topology, micro_batches=micro_batches, gather_once=parallel.gather_once
        )
    return {key: float(size) for key, size in priced.items()}


def _bytes_of(network: str) -> Cluster:
    """Return hardware on which only one network takes time, a second a byte."""
    speeds = ("matmul_flops", "memory_bandwidth", "slow_bandwidth", "fast_bandwidth")
    efficiencies = ("matmul_efficiency", "network_efficiency", "memory_efficiency")
    numbers: dict[str, Any] = {
        **dict.fromkeys(speeds, NO_TIME),
        **dict.fromkeys(efficiencies, 1.0),
        f"{network}_bandwidth": 1.0,
    }
    return dataclasses.replace(CLUSTERS["h100"], **numbers)


def _sizes(config: ModelConfig) -> Model:
    """Return the sizes of a model as the cost model has them, with all dense parameters in layers with experts."""
    dense = num_parameters(config)[1] - 2 * config.width * config.vocabulary
    return Model(
        moe_layers=config.moe_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        width=config.width,
        expert_width=config.expert_width,
        shared_width=0,
        attention_params=dense // config.moe_layers,
        attention_width=2 * config.heads * config.head_width,
        cache_width=2 * config.kv_heads * config.head_width,
        cache_heads=config.kv_heads,
        vocabulary=config.vocabulary,
    )
