"""What devices hold when attention and experts are served apart, in bytes.

Source: the memory constraint of MegaScale-Infer (arXiv 2504.02263): weights of a side, and beside attention the
key-value caches of all sequences in flight. Counted in float64 on the host, so that what just fits does.

Not counted: activations, buffers of the exchange and for the gather of returned rows, embeddings and the output
projection, dense layers (those without experts) with their caches, routers and norms, and what the runtime takes. For
these a search leaves a part of the memory free (``memory_share`` of `relibra_jax.serving.deployments`).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Num

from relibra_jax.cost.copies import WEIGHT_BYTES
from relibra_jax.cost.models import Model
from relibra_jax.serving.phase_times import cache_bytes


def attention_memory(
    sequences: Num[np.ndarray, " C"] | Sequence[int],
    devices: Num[np.ndarray, " C"] | Sequence[int],
    *,
    model: Model,
    context: float,
) -> Float[np.ndarray, " C"]:
    """Bytes of one attention device: its part of the weights and of the caches.

    Args:
        sequences: the sequences that one copy of attention has in flight, in all micro-batches together.
        devices: the devices over which that copy is divided.
        model: the sizes of the model.
        context: the mean tokens of a sequence in the cache.

    >>> from relibra_jax.cost.models import MODELS
    >>> needed = attention_memory([100, 100], [1, 8], model=MODELS["gpt-oss-20b"], context=4096.0)
    >>> (needed / 1e9).round(2).tolist()
    [21.41, 2.68]
    """
    divided = np.asarray(devices, np.float64)
    weights = WEIGHT_BYTES * (model.attention_params + 3 * model.width * model.shared_width)
    cache = np.asarray(sequences, np.float64) * cache_bytes(context, model)
    return model.moe_layers * (weights / divided + cache / np.minimum(divided, model.cache_heads))


def expert_memory(
    slots: Num[np.ndarray, " C"] | Sequence[int],
    devices: Num[np.ndarray, " C"] | Sequence[int],
    *,
    model: Model,
) -> Float[np.ndarray, " C"]:
    """Bytes of one expert device: its part of the weights of the experts in its group's slots.

    Args:
        slots: the slots of its group, homes and replicas.
        devices: the devices over which each expert is divided.
        model: the sizes of the model.

    >>> from relibra_jax.cost.models import MODELS
    >>> (expert_memory([8, 8], [1, 2], model=MODELS["gpt-oss-20b"]) / 1e9).round(2).tolist()
    [9.56, 4.78]
    """
    held = np.asarray(slots, np.float64) / np.asarray(devices, np.float64)
    return model.moe_layers * WEIGHT_BYTES * model.expert_params * held
