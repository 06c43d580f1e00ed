"""What a decoding step takes in one layer of one micro-batch, where attention and experts have devices of their own.

Source of the setting: MegaScale-Infer (arXiv 2504.02263), whose times are lines through measurements, T_a = k1 b_a + k2
of attention and T_e = k3 b_e + k4 of experts. Here the four constants follow from counts. Each product takes the longer
of what its operations and what its bytes take (the roofline), so it is a line in either regime:

    reading weights  k2, k4  bytes of the weights over the memory's bandwidth, while products are hidden behind it
    products         k1, k3  FLOP of a row over the peak; with many rows they hide the reading, and k2 and k4 vanish
    cache            k1      keys and values of a sequence's context, read for its new token, or the attention's FLOP
    partial sums     k1, k3  what tensor parallelism sums over the fast network, twice (p - 1) / p rows for p devices

Weights, activations and the cache are bfloat16. Peaks and the efficiencies that are assumed are those of
`relibra_jax.cost.hardware`. Not counted: launches, latencies of the network, routers, norms, embeddings and sampling,
dense layers (those without experts), the partial sums of shared experts, the gather and weighted sum of returned rows,
rows that only fill up a tile, and that one device's experts are not equally busy. Windowed attention is counted as
full, and latent attention as if its keys and values were expanded. All of it is a model: nothing here was measured.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from relibra_jax.cost.copies import WEIGHT_BYTES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.step_time import ACTIVATION_BYTES
from relibra_jax.types import Array

CACHE_BYTES: Final = 2  # bfloat16

type Number = Num[Array, "..."] | float | int
"""Numbers of one deployment or of many; those of a call broadcast against each other."""


def attention_time(
    sequences: Number, devices: Number, *, cluster: Cluster, model: Model, context: Number
) -> Float[jax.Array, "..."]:
    """Seconds of attention, with its projections and shared experts, for one new token of each sequence.

    Args:
        sequences: the sequences of the micro-batch that one copy of attention serves.
        devices: the devices over which that copy is divided (tensor parallelism).
        cluster: the hardware of the attention devices.
        model: the sizes of the model.
        context: the mean tokens of a sequence in the key-value cache.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> known = {"cluster": CLUSTERS["h100"], "model": MODELS["gpt-oss-20b"], "context": 4096.0}
    >>> [f"{1e6 * float(attention_time(rows, 1.0, **known)):.0f} us" for rows in (1.0, 100.0)]
    ['23 us', '333 us']
    """
    weights = model.attention_params + 3 * model.width * model.shared_width
    core = 2 * model.attention_width * context  # FLOP of one token that attends to the whole context
    flops, read = _rates(cluster)
    cache = cache_bytes(context, model) / jnp.minimum(devices, model.cache_heads)
    products = jnp.maximum(sequences * (2 * weights / flops), WEIGHT_BYTES * weights / read) / devices
    attention = sequences * jnp.maximum(core / flops / devices, cache / read)
    return products + attention + _partial_sums(sequences, devices, cluster, model)


def expert_time(
    copies: Number, slots: Number, devices: Number, *, cluster: Cluster, model: Model
) -> Float[jax.Array, "..."]:
    """Seconds of the experts of one group of expert devices.

    Args:
        copies: the token copies that the group computes.
        slots: the experts whose weights it reads, homes and replicas; all that it holds.
        devices: the devices over which each of its experts is divided (tensor parallelism).
        cluster: the hardware of the expert devices.
        model: the sizes of the model.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> known = {"cluster": CLUSTERS["h100"], "model": MODELS["gpt-oss-20b"]}
    >>> [f"{1e6 * float(expert_time(rows, 2.0, 1.0, **known)):.0f} us" for rows in (1.0, 400.0, 800.0)]
    ['37 us', '37 us', '67 us']
    """
    flops, read = _rates(cluster)
    products = copies * (2 * model.expert_params / flops)
    reading = slots * (WEIGHT_BYTES * model.expert_params / read)
    return jnp.maximum(products, reading) / devices + _partial_sums(copies, devices, cluster, model)


def exchange_time(
    sent: Number,
    received: Number,
    attention_devices: Number,
    expert_devices: Number,
    *,
    attention: Cluster,
    experts: Cluster,
    model: Model,
) -> Float[jax.Array, "..."]:
    """Seconds for rows to go from attention to experts over the slow network, which is as long as the way back.

    Each device sends or receives its part of a row, and the side that takes longer counts.

    Args:
        sent: the rows that one copy of attention sends.
        received: the rows that the busiest group of expert devices receives.
        attention_devices: the devices of one copy of attention.
        expert_devices: the devices of one group of expert devices.
        attention: the hardware of the attention devices.
        experts: the hardware of the expert devices.
        model: the sizes of the model.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> known = {"attention": CLUSTERS["h100"], "experts": CLUSTERS["h100"], "model": MODELS["gpt-oss-20b"]}
    >>> f"{1e6 * float(exchange_time(400.0, 200.0, 1.0, 1.0, **known)):.0f} us"
    '58 us'
    """
    row = ACTIVATION_BYTES * model.width
    sending = sent * (row / (attention.slow_bandwidth * attention.network_efficiency))
    receiving = received * (row / (experts.slow_bandwidth * experts.network_efficiency))
    return jnp.maximum(sending / attention_devices, receiving / expert_devices)


def cache_bytes(context: Number, model: Model) -> Number:
    """Bytes of the keys and values of one sequence in one layer."""
    return CACHE_BYTES * model.cache_width * context


def _rates(cluster: Cluster) -> tuple[float, float]:
    """FLOP/s and bytes/s that one device reaches."""
    return (
        cluster.matmul_flops * cluster.matmul_efficiency,
        cluster.memory_bandwidth * cluster.memory_efficiency,
    )


def _partial_sums(rows: Number, devices: Number, cluster: Cluster, model: Model) -> Number:
    """Seconds to sum rows that tensor-parallel devices hold in part, and to give all of them the sum."""
    row = ACTIVATION_BYTES * model.width / (cluster.fast_bandwidth * cluster.network_efficiency)
    return rows * row * 2 * (devices - 1) / devices
