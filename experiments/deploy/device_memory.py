"""Memory of attention devices and of expert devices, in bytes, if attention and experts are served separately.

Source: the memory constraint of MegaScale-Infer (arXiv 2504.02263). All devices hold weights; attention devices also
hold the key-value caches of all sequences in flight. The bytes are computed in float64 on the host, so that rounding
does not reject a deployment that just fits.

Not counted: activations, buffers of the exchange and for the gather of returned rows, embeddings and the output
projection, dense layers (those without experts) with their caches, routers and norms, and the runtime. A search leaves
a share of the memory free for them (``memory_share`` of `experiments.deploy.deployments`).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Num

from experiments.deploy.phase_times import cache_bytes
from relibra_jax.cost.cost_model import WEIGHT_BYTES
from relibra_jax.cost.models import Model


def attention_memory(
    sequences: Num[np.ndarray, " C"] | Sequence[int],
    devices: Num[np.ndarray, " C"] | Sequence[int],
    *,
    model: Model,
    context: float,
) -> Float[np.ndarray, " C"]:
    """Compute the bytes of one attention device: its part of the weights and of the key-value caches.

    Args:
        sequences: the number of sequences that a copy of attention has in flight, in all micro-batches together.
        devices: the number of devices that share this copy.
        model: the sizes of the model.
        context: the mean number of tokens of a sequence in the key-value cache.

    Returns:
        Bytes, for each pair of ``sequences`` and ``devices``.

    >>> from relibra_jax.cost.models import MODELS
    >>> needed = attention_memory([100, 100], [1, 8], model=MODELS["gpt-oss-20b"], context=4096.0)
    >>> (needed / 1e9).round(2).tolist()
    [21.41, 2.68]
    """
    parts = np.asarray(devices, np.float64)
    weights = WEIGHT_BYTES * (model.attention_params + 3 * model.width * model.shared_width)
    cache = np.asarray(sequences, np.float64) * cache_bytes(context, model)
    return model.moe_layers * (weights / parts + cache / np.minimum(parts, model.cache_heads))


def expert_memory(
    slots: Num[np.ndarray, " C"] | Sequence[int],
    devices: Num[np.ndarray, " C"] | Sequence[int],
    *,
    model: Model,
) -> Float[np.ndarray, " C"]:
    """Compute the bytes of one expert device: its part of the weights of the experts in its group's slots.

    Args:
        slots: the number of slots of its group, homes and replicas together.
        devices: the number of devices that share each expert.
        model: the sizes of the model.

    Returns:
        Bytes, for each pair of ``slots`` and ``devices``.

    >>> from relibra_jax.cost.models import MODELS
    >>> (expert_memory([8, 8], [1, 2], model=MODELS["gpt-oss-20b"]) / 1e9).round(2).tolist()
    [9.56, 4.78]
    """
    experts_per_device = np.asarray(slots, np.float64) / np.asarray(devices, np.float64)
    return model.moe_layers * WEIGHT_BYTES * model.expert_params * experts_per_device
