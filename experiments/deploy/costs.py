"""Times of one layer of a decoding step, for one micro-batch, if attention and experts are served on separate devices.

Source of the setting: MegaScale-Infer (arXiv 2504.02263). It fits lines to measurements: T_a = k1 b_a + k2 for
attention and T_e = k3 b_e + k4 for experts. Here the four constants follow from counts. Each product takes the longer
of the time for its operations and the time for its bytes (the roofline), so it is a line in either regime:

    reading weights  k2, k4  bytes of the weights over the memory's bandwidth, while it hides the products
    products         k1, k3  FLOP of a row over the peak; with many rows they hide the reading, and k2 and k4 vanish
    cache            k1      the longer of reading the keys and values of a sequence's context for its new token, and
                             the FLOP of its attention
    partial sums     k1, k3  the sums of tensor parallelism over the fast network, twice (p - 1) / p rows for p devices

Weights, activations and the cache are bfloat16. Peaks and the assumed efficiencies are those of
`relibra_jax.cost.hardware`. Not counted: launches, latencies of the network, routers, norms, embeddings and sampling,
dense layers (those without experts), the partial sums of shared experts, the gather and weighted sum of returned rows,
padding rows of tiles, and the uneven load of experts on the same device. Windowed attention is counted as full
attention, and latent attention as if its keys and values were expanded. All times are modelled; none was measured.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from relibra_jax.contract.types import Array
from relibra_jax.cost.cost_model import ACTIVATION_BYTES, WEIGHT_BYTES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model

CACHE_BYTES: Final = 2  # bfloat16

type Number = Num[Array, "..."] | float | int
"""A number of one deployment, or an array over many deployments. The arguments of a call broadcast together."""


def attention_time(
    sequences: Number, devices: Number, *, cluster: Cluster, model: Model, context: Number
) -> Float[jax.Array, "..."]:
    """Return the seconds of attention, with its projections and shared experts, for one new token of each sequence.

    Args:
        sequences: the number of sequences of the micro-batch that one copy of attention serves.
        devices: the number of devices that share this copy (tensor parallelism).
        cluster: the hardware of the attention devices.
        model: the sizes of the model.
        context: the mean number of tokens of a sequence in the key-value cache.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> setting = {"cluster": CLUSTERS["h100"], "model": MODELS["gpt-oss-20b"], "context": 4096.0}
    >>> [f"{1e6 * float(attention_time(rows, 1.0, **setting)):.0f} us" for rows in (1.0, 100.0)]
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
    """Return the seconds of the experts of one group of expert devices.

    Args:
        copies: the number of token copies that the group computes.
        slots: the number of experts that the group holds, homes and replicas. It reads the weights of all of them.
        devices: the number of devices that share each expert (tensor parallelism).
        cluster: the hardware of the expert devices.
        model: the sizes of the model.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> setting = {"cluster": CLUSTERS["h100"], "model": MODELS["gpt-oss-20b"]}
    >>> [f"{1e6 * float(expert_time(rows, 2.0, 1.0, **setting)):.0f} us" for rows in (1.0, 400.0, 800.0)]
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
    """Return the seconds to send rows from attention to experts over the slow network. The way back takes as long.

    Each device sends or receives its part of a row, and the slower side determines the time.

    Args:
        sent: the number of rows that one copy of attention sends.
        received: the number of rows that the busiest group of expert devices receives.
        attention_devices: the number of devices of one copy of attention.
        expert_devices: the number of devices of one group of expert devices.
        attention: the hardware of the attention devices.
        experts: the hardware of the expert devices.
        model: the sizes of the model.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> setting = {"attention": CLUSTERS["h100"], "experts": CLUSTERS["h100"], "model": MODELS["gpt-oss-20b"]}
    >>> f"{1e6 * float(exchange_time(400.0, 200.0, 1.0, 1.0, **setting)):.0f} us"
    '58 us'
    """
    row = ACTIVATION_BYTES * model.width
    sending = sent * (row / (attention.slow_bandwidth * attention.network_efficiency))
    receiving = received * (row / (experts.slow_bandwidth * experts.network_efficiency))
    return jnp.maximum(sending / attention_devices, receiving / expert_devices)


def cache_bytes(context: Number, model: Model) -> Number:
    """Return the bytes of the keys and values of one sequence of ``context`` tokens in one layer."""
    return CACHE_BYTES * model.cache_width * context


def _rates(cluster: Cluster) -> tuple[float, float]:
    """Return the FLOP/s and the bytes/s of memory reads that one device reaches."""
    return (
        cluster.matmul_flops * cluster.matmul_efficiency,
        cluster.memory_bandwidth * cluster.memory_efficiency,
    )


def _partial_sums(rows: Number, devices: Number, cluster: Cluster, model: Model) -> Number:
    """Return the seconds of the all-reduce of rows over tensor-parallel devices."""
    row = ACTIVATION_BYTES * model.width / (cluster.fast_bandwidth * cluster.network_efficiency)
    return rows * row * 2 * (devices - 1) / devices
