"""``python -m experiments.model_memory``: compute the memory that reinforcement learning of published models needs.

The bytes are computed from the shapes of model and optimizer, for ``python -m experiments.run learn --model FOLDER``.
Experts are sharded over the ranks; all else (attention, embeddings, routers, dense and shared MLPs) is on every rank. A
rank needs for each of its parameters:

    parameters    4 bytes  float32 master weights, which each layer casts for its computation
    moments       8        the two moments of Adam
    gradients     8        float32: the sum over micro-batches, and those of one micro-batch

Memory that depends on the batch is not counted: the key-value cache of sampling, inputs of layers, logits (three times
4 bytes x vocabulary per token), exchange and replica buffers, and the runtime itself.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from relibra_jax.contract.types import Topology
from relibra_jax.models import LanguageModel, ModelConfig
from relibra_jax.models.hf_config import model_config
from relibra_jax.models.load_checks import memory_of_a_device
from relibra_jax.nnx import ExpertParam

GRADIENTS: Final = 2
"""The number of sets of float32 gradients that an update keeps in memory."""
RANKS: Final = (8, 16, 32, 64, 128)
QWEN3: Final = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}
GLM: Final = {
    "model_type": "glm4_moe",
    "head_dim": 128,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "attention_bias": True,
    "vocab_size": 151552,
    "rope_theta": 1e6,
}
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "OLMoE-1B-7B": {
            "model_type": "olmoe",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
        },
        "Qwen3-30B-A3B": {
            **QWEN3,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "moe_intermediate_size": 768,
        },
        "Mixtral-8x7B": {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
        "GLM-4.5-Air": {
            **GLM,
            "hidden_size": 4096,
            "num_hidden_layers": 46,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
        },
        "Qwen3-235B-A22B": {
            **QWEN3,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "moe_intermediate_size": 1536,
        },
        "GLM-4.5": {
            **GLM,
            "hidden_size": 5120,
            "num_hidden_layers": 92,
            "moe_intermediate_size": 1536,
            "intermediate_size": 12288,
            "first_k_dense_replace": 3,
            "n_routed_experts": 160,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
    }
)
"""Published models by name, with the fields of their ``config.json`` on Hugging Face that determine sizes."""


def num_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the parameters of all routed experts, and all other parameters."""
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=config.num_experts, replica_slots=0)
    model = nnx.eval_shape(lambda: LanguageModel(config, topology, rngs=nnx.Rngs(0)))
    counts = {True: 0, False: 0}
    for variable in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    ):
        counts[isinstance(variable, ExpertParam)] += int(np.prod(variable.shape, dtype=np.int64))
    return counts[True], counts[False]


def bytes_of_a_parameter() -> int:
    """Return the bytes that a run needs for each parameter of a rank: the parameter, AdamW's state, and gradients."""
    parameter = jax.ShapeDtypeStruct((1,), jnp.float32)
    state = jax.eval_shape(optax.adamw(1e-4).init, parameter)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == parameter.shape]
    return sum(leaf.dtype.itemsize for leaf in [parameter, *moments, *[parameter] * GRADIENTS])


def rank_gigabytes(config: ModelConfig, ranks: int) -> float:
    """Return the memory of a rank for model, optimizer and gradients, in GB (1e9 bytes)."""
    experts, others = num_parameters(config)
    return bytes_of_a_parameter() * (experts / ranks + others) / 1e9


def check_training_memory(folder: Path, config: ModelConfig, mesh: Mesh) -> None:
    """Raise an error if training needs more memory than a rank's device has.

    Args:
        folder: the folder of the checkpoint, for the error message.
        config: the model's sizes.
        mesh: the device mesh.

    Raises:
        ValueError: if it does; the message has the computed sizes.
    """
    available, required = memory_of_a_device(mesh) / 1e9, rank_gigabytes(config, mesh.size)
    if required > available:
        raise ValueError(
            f"{folder}: training needs {required:.1f} GB on each of {mesh.size} ranks ({bytes_of_a_parameter()} bytes"
            f" per parameter; experts are sharded, all else is on every rank), but a device has {available:.1f} GB"
        )


def main() -> None:
    """Compute and print the table."""
    table = Table("model", "parameters", "on every rank", *map(str, RANKS), box=box.MARKDOWN)
    for name, fields in PUBLISHED.items():
        config = model_config(fields)
        experts, others = num_parameters(config)
        sizes = [
            f"{rank_gigabytes(config, ranks):.0f}" if config.num_experts % ranks == 0 else ""
            for ranks in RANKS
        ]
        table.add_row(name, f"{(experts + others) / 1e9:.1f} B", f"{others / 1e9:.1f} B", *sizes)
    print("GB per rank, by the number of ranks")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
