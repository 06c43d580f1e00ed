"""Times and memory of separate attention devices and expert devices, for one layer of one micro-batch of decoding.

Source of the setting: MegaScale-Infer (arXiv 2504.02263). It fits lines to measurements: T_a = k1 b_a + k2 for
attention and T_e = k3 b_e + k4 for experts. Here the four constants follow from counts. Each product takes the longer
of the time for its operations and the time for its bytes (the roofline), so it is a line in either regime:

    reading weights  k2, k4  bytes of the weights over the memory's bandwidth, while it hides the products
    products         k1, k3  FLOP of a row over the peak; with many rows they hide the reading, and k2 and k4 vanish
    cache            k1      the longer of reading the keys and values of a sequence's context for its new token, and
                             the FLOP of its attention
    partial sums     k1, k3  the sums of tensor parallelism over the fast network, twice (p - 1) / p rows for p devices

Weights, activations and the cache are bfloat16. Peaks and the assumed efficiencies are those of
`relibra_jax.cost.hardware`. Times do not count launches, latencies of the network, routers, norms, embeddings and
sampling, dense layers (those without experts), the partial sums of shared experts, the gather and weighted sum of
returned rows, padding rows of tiles, and the uneven load of experts on the same device. Windowed attention is counted
as full attention, and latent attention as if its keys and values were expanded. All times are modelled; none was
measured.

All devices hold weights; attention devices also hold the key-value caches of all sequences in flight. Bytes are
computed in float64 on the host, so that rounding does not reject a deployment that just fits. Memory does not count
activations, buffers of the exchange and for the gather of returned rows, embeddings and the output projection, dense
layers with their caches, routers and norms, and the runtime.
"""

from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from experiments.deploy.serving import Serving
from relibra_jax.contract.types import Array
from relibra_jax.cost.cost_model import COMPUTE_BYTES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model

CACHE_BYTES: Final = 2  # bfloat16

type Number = Num[Array, "..."] | float | int
"""A number of one deployment, or an array over many deployments. The arguments of a call broadcast together."""


def attention_time(sequences: Number, devices: Number, serving: Serving) -> Float[jax.Array, "..."]:
    """Return the seconds of attention, with its projections and shared experts, for one new token of each sequence.

    Args:
        sequences: the number of sequences of the micro-batch that one copy of attention serves.
        devices: the number of devices that share this copy (tensor parallelism).
        serving: the model and the hardware.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> [f"{1e6 * float(attention_time(sequences, 1.0, serving)):.0f} us" for sequences in (1.0, 100.0)]
    ['23 us', '333 us']
    """
    model = serving.model
    core = 2 * model.attention_width * serving.context  # FLOP of one token that attends to the whole context
    flops, read = _rates(serving.attention)
    weights, cache = model.dense_params, _cache_bytes(serving) / jnp.minimum(devices, model.cache_heads)
    products = jnp.maximum(sequences * (2 * weights / flops), COMPUTE_BYTES * weights / read) / devices
    attention = sequences * jnp.maximum(core / flops / devices, cache / read)
    return products + attention + _partial_sums(sequences, devices, serving.attention, model)


def expert_time(copies: Number, slots: Number, devices: Number, serving: Serving) -> Float[jax.Array, "..."]:
    """Return the seconds of the experts of one group of expert devices.

    Args:
        copies: the number of token copies that the group computes.
        slots: the number of experts that the group holds, homes and replicas. It reads the weights of all of them.
        devices: the number of devices that share each expert (tensor parallelism).
        serving: the model and the hardware.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> [f"{1e6 * float(expert_time(copies, 2.0, 1.0, serving)):.0f} us" for copies in (1.0, 400.0, 800.0)]
    ['37 us', '43 us', '86 us']
    """
    model = serving.model
    flops, read = _rates(serving.experts)
    products = copies * (2 * model.expert_params / flops)
    reading = slots * (COMPUTE_BYTES * model.expert_params / read)
    return jnp.maximum(products, reading) / devices + _partial_sums(copies, devices, serving.experts, model)


def exchange_time(
    sent: Number, received: Number, attention_devices: Number, expert_devices: Number, serving: Serving
) -> Float[jax.Array, "..."]:
    """Return the seconds to send rows from attention to experts over the slow network. The way back takes as long.

    Each device sends or receives its part of a row, and the slower side determines the time.

    Args:
        sent: the number of rows that one copy of attention sends.
        received: the number of rows that the busiest group of expert devices receives.
        attention_devices: the number of devices of one copy of attention.
        expert_devices: the number of devices of one group of expert devices.
        serving: the model and the hardware.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> f"{1e6 * float(exchange_time(400.0, 200.0, 1.0, 1.0, serving)):.0f} us"
    '58 us'
    """
    row = COMPUTE_BYTES * serving.model.width
    sending, receiving = (
        rows * (row / (cluster.slow_bandwidth * cluster.network_efficiency))
        for rows, cluster in ((sent, serving.attention), (received, serving.experts))
    )
    return jnp.maximum(sending / attention_devices, receiving / expert_devices)


def attention_memory(
    sequences: Num[np.ndarray, " C"] | Sequence[int],
    devices: Num[np.ndarray, " C"] | Sequence[int],
    serving: Serving,
) -> Float[np.ndarray, " C"]:
    """Compute the bytes of one attention device: its part of the weights and of the key-value caches.

    Args:
        sequences: the number of sequences that a copy of attention has in flight, in all micro-batches together.
        devices: the number of devices that share this copy.
        serving: the model and the hardware.

    Returns:
        Bytes, for each pair of ``sequences`` and ``devices``.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> (attention_memory([100, 100], [1, 8], serving) / 1e9).round(2).tolist()
    [21.41, 2.68]
    """
    model, parts = serving.model, np.asarray(devices, np.float64)
    weights = COMPUTE_BYTES * model.dense_params
    cache = np.asarray(sequences, np.float64) * _cache_bytes(serving)
    return model.moe_layers * (weights / parts + cache / np.minimum(parts, model.cache_heads))


def expert_memory(
    slots: Num[np.ndarray, " C"] | Sequence[int],
    devices: Num[np.ndarray, " C"] | Sequence[int],
    serving: Serving,
) -> Float[np.ndarray, " C"]:
    """Compute the bytes of one expert device: its part of the weights of the experts in its group's slots.

    Args:
        slots: the number of slots of its group, homes and replicas together.
        devices: the number of devices that share each expert.
        serving: the model and the hardware.

    Returns:
        Bytes, for each pair of ``slots`` and ``devices``.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> serving = Serving(model=MODELS["gpt-oss-20b"], attention=CLUSTERS["h100"], experts=CLUSTERS["h100"])
    >>> (expert_memory([8, 8], [1, 2], serving) / 1e9).round(2).tolist()
    [9.56, 4.78]
    """
    experts_per_device = np.asarray(slots, np.float64) / np.asarray(devices, np.float64)
    return serving.model.moe_layers * COMPUTE_BYTES * serving.model.expert_params * experts_per_device


def _cache_bytes(serving: Serving) -> float:
    """Return the bytes of the keys and values of one sequence in one layer."""
    return CACHE_BYTES * serving.model.cache_width * serving.context


def _rates(cluster: Cluster) -> tuple[float, float]:
    """Return the FLOP/s and the bytes/s of memory reads that one device reaches."""
    return (
        cluster.matmul_flops * cluster.matmul_efficiency,
        cluster.memory_bandwidth * cluster.memory_efficiency,
    )


def _partial_sums(rows: Number, devices: Number, cluster: Cluster, model: Model) -> Number:
    """Return the seconds of the all-reduce of rows over tensor-parallel devices."""
    row = COMPUTE_BYTES * model.width / (cluster.fast_bandwidth * cluster.network_efficiency)
    return rows * row * 2 * (devices - 1) / devices
