"""``python -m experiments.model_memory``: compute the memory that reinforcement learning needs on each rank.

`memory_by_stage` counts the bytes of a rank by item for the stages of a step. A stage has the states, which stay on the
device in all stages, and what it holds at its peak:

    states     parameters 4 bytes in float32, AdamW's two moments 8 (4 with ``moments=bfloat16``)
    recompute  arrays of one layer in the forward pass, or logits of a chunk of tokens
    loss       the sum of gradients (4 bytes), layer inputs, logits of a chunk of tokens
    backward   the sum of gradients, layer inputs, arrays of one layer
    live       as backward, for an update that routes live in buffers for the worst case of a chunk
    prompts    the cache of keys and values of a wave and of its prompts, arrays of one chunk, weights of one layer
    decoding   the cache of a wave, the part of one layer, buffers of live routing, logits of the last tokens

So a run needs 16 bytes for each parameter of a rank, 12 with moments in bfloat16, or with ``state_memory=pinned_host``
6 in bfloat16 computation, and the memory of its tokens. A rank has its part of the experts, and all other parameters
or, with ``shard_dense``, its part of them. `host_bytes` counts what the host keeps for a rank.

The states follow from shapes and shardings. The arrays of a layer are counted as XLA for CPUs allocates them:
`tests/test_model_memory.py` compares whole updates with XLA's own count. For GPUs XLA fuses more, so less is needed:
with a wide vocabulary two arrays of logits and not three (compiled for a described H100, not run). Not counted are
buffers of NCCL, and the runtime itself. `experiments.generation_memory` counts the stages of generation.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.generation_memory import GatheredWeights, Wave, decoding_items, prompt_items
from relibra_jax.contract.types import Topology
from relibra_jax.execution.memory import HOST
from relibra_jax.models import ModelConfig
from relibra_jax.models.block_attention import BLOCK
from relibra_jax.models.hf_config import model_config
from relibra_jax.models.language_model import abstract_model, model_maker
from relibra_jax.models.load_checks import memory_of_a_device
from relibra_jax.models.log_probs import CHUNK
from relibra_jax.nnx import ExpertParam
from relibra_jax.nnx.dense_sharding import STACKS
from relibra_jax.routing.sizes import worst_case_capacities
from relibra_jax.support.limits import check_memory

ROW_ARRAYS: Final = 4.2
"""The arrays ``[rows, D]`` of one layer at the same time."""
TOKEN_ARRAYS: Final = 13
"""The arrays ``[tokens, D]`` of one layer at the same time."""
QUERY_ARRAYS: Final = 10.5
"""The arrays ``[tokens, heads, head_width]`` of one layer at the same time."""
KEY_ARRAYS: Final = 4.3
"""The pairs of arrays ``[tokens, kv_heads, head_width]`` of one layer at the same time."""
SCORE_ARRAYS: Final = 4.3
"""The float32 scores of a block of queries and a block of keys, for all heads, at the same time."""
LAYER_BYTES: Final = 12
"""The bytes for each gathered parameter of one layer in its backward pass: the weight and its gradient, each in float32
and, for other dtypes of the computation, in that dtype too. For float32, one array is copied for its layout."""
LOSS_ARRAYS: Final = 8
"""The arrays ``[tokens, D]`` of the loss: hidden states by samples and by chunks, and their gradients."""
REPLICA_BUFFERS: Final = 3
"""The copies of one layer's replicas, as in `relibra_jax.cost.memory`."""
TABLE_BYTES: Final = 19
"""The bytes of prepared tables for each row of a layer's buffers."""
TARGET_BYTES: Final = 17
"""The bytes of the training targets of a token: token, mask, weight, advantage and old log-probability."""
SPARE_ROWS: Final = 1.25
"""The rows of buffers, in multiples of those of even loads: ranks differ, and buffers come in a few sizes."""
FORWARD: Final = 0.4
"""The arrays of one layer in a forward pass alone, as a share of those with the backward pass."""
RECOMPUTE_ARRAYS: Final = 3
"""The arrays ``[tokens, D]`` beside the logits of a recompute."""
CHUNKED_ARRAYS: Final = 2
"""The further arrays ``[tokens, D]`` of a layer in chunks."""


LARGEST: Final = 3
"""The number of items and of settings that an error names."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The sizes of a run that determine the memory of a rank."""

    config: ModelConfig
    """The sizes of the model."""
    topology: Topology
    """The expert-parallel group with its replica and resident slots."""
    fsdp: int = 1
    """The number of copies of the group over which experts are sharded. Data-parallel copies change nothing."""
    shard_dense: bool = False
    """Whether all other parameters are sharded over the ranks of the group and ``fsdp``."""
    moments: str = "float32"
    """The dtype of AdamW's moments."""
    updates: int = 1
    """The number of updates that share a batch."""
    micro_batches: int = 1
    """The number of micro-batches of an update."""
    sequences: int = 1
    """The number of sequences of a rank in a micro-batch."""
    length: int = 0
    """The number of tokens of a sequence. 0 counts nothing that depends on tokens."""
    split: bool = False
    """Whether the ranks of a node share its samples, so that attention gathers the keys and values of the node."""
    rows: int | None = None
    """The rows of a rank's buffers in a layer. None takes even loads with `SPARE_ROWS`."""
    state_memory: str = "device"
    """The memory of parameters and moments. From the host's, the device has parameters in the computation's dtype."""
    batch_memory: str = "pinned_host"
    """The memory of a batch's samples, routes and tables."""
    recompute_sequences: int | None = None
    """The number of sequences of a rank in a micro-batch of a recompute. None takes that of updates."""
    live: bool = False
    """Whether updates route live."""
    chunk_tokens: int = 1024
    """The largest number of tokens of a rank that layers with live routing, and prompts, run at once."""
    samples: int = 0
    """The number of samples of a rank in a rollout."""
    columns: int = 0
    """The number of columns of the rollout's cache: the tokens of a sample."""
    prompt_tokens: int = 1
    """The largest number of tokens of a prompt."""
    responses: int = 1
    """The number of samples of a rank that follow one another with the same prompt, which runs once for them."""

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh of one group, or of its copies along the axis ``fsdp``, without devices."""
        ranks = (self.topology.num_nodes, self.topology.ranks_per_node)
        return AbstractMesh((self.fsdp, *ranks), ("fsdp", "node", "local"), axis_types=(AxisType.Auto,) * 3)


def memory_by_stage(sizes: RunSizes) -> dict[str, dict[str, int]]:
    """Count the bytes of a rank at the peak of each stage of a step, by item.

    Args:
        sizes: the sizes of the run.

    Returns:
        The items of the stages recompute, loss, backward, with live updates live, and with samples prompts and
        decoding, in bytes. The states are items of every stage.
    """
    config, topology, parameters = sizes.config, sizes.topology, rank_parameters(sizes)
    width = jnp.dtype(config.dtype).itemsize
    tokens = sizes.sequences * sizes.length
    rows = math.ceil(SPARE_ROWS * tokens * config.top_k) if sizes.rows is None else sizes.rows
    expert = 3 * config.width * config.expert_width
    chunks = max(1, -(-tokens // CHUNK))
    # XLA takes the only step of a loop out of the loop, and then keeps one more array.
    logits = (2 if chunks > 1 else 3) * -(-tokens // chunks) * config.vocabulary * 4
    span = min(sizes.length, BLOCK)
    scores = SCORE_ARRAYS * config.heads * (BLOCK if sizes.length > BLOCK else tokens) * span * 4
    # The keys and values of the other ranks of the node, and their gradients in float32.
    others = (topology.ranks_per_node - 1) * sizes.split * tokens
    scores += (width + 4) * 2 * config.kv_heads * config.head_width * others
    kept = topology.resident_slots * config.moe_layers * expert
    heads = QUERY_ARRAYS * config.heads + KEY_ARRAYS * 2 * config.kv_heads
    layer = width * tokens * (TOKEN_ARRAYS * config.width + heads * config.head_width)
    on_host = sizes.state_memory == HOST
    states = {
        "parameters": (width if on_host else 4) * parameters.all,
        "moments": 0 if on_host else 2 * jnp.dtype(sizes.moments).itemsize * parameters.all,
    }
    inputs_on_host = config.activation_memory == HOST
    at_once = 1 if sizes.batch_memory == HOST else sizes.micro_batches
    update = {
        **states,
        "sum of gradients": 4 * parameters.all,
        "residents": (width + 4) * kept,
        "layer inputs": width * (1 if inputs_on_host else config.layers) * tokens * config.width,
        "tables, routes and targets": at_once
        * (config.moe_layers * (TABLE_BYTES * rows + tokens * config.top_k) + TARGET_BYTES * tokens),
        "router logits": 8 * config.moe_layers * tokens * config.num_experts,
    }
    # The gradient of the head in float32, and the gathered head.
    head = (8 if sizes.shard_dense else 4) * config.width * config.vocabulary
    backward = {
        **update,
        "gradients of a micro-batch": 4 * parameters.outside,
        "arrays of a layer": layer + max(scores, ROW_ARRAYS * width * rows * config.width),
        "weights of a layer": LAYER_BYTES * parameters.layer if tokens else 0,
        "replicas": REPLICA_BUFFERS * width * topology.replica_slots * expert,
    }
    number = max(1, -(-tokens // sizes.chunk_tokens))
    live = dataclasses.replace(topology, replica_slots=0, resident_slots=0)
    live_rows = worst_case_capacities(-(-tokens // number), config.top_k, live).rows if sizes.live else 0
    larger = (sizes.recompute_sequences or sizes.sequences) / sizes.sequences
    forward_rows = max(larger * rows, live_rows)
    forward_layer = FORWARD * (larger * layer + ROW_ARRAYS * width * forward_rows * config.width)
    forward_loss = RECOMPUTE_ARRAYS * width * tokens * config.width * larger + logits
    forward_loss += width * config.width * config.vocabulary if tokens else 0
    stages: dict[str, dict[str, float]] = {
        "recompute": {
            **states,
            "residents": width * kept,
            "tables, routes and targets": update["tables, routes and targets"]
            * (larger if at_once == 1 else 1),
            "arrays of a layer or of the loss": max(forward_layer, forward_loss),
        },
        "loss": {
            **update,
            "logits of a chunk": logits,
            "output head": head if tokens else 0,
            "arrays of the loss": LOSS_ARRAYS * width * tokens * config.width,
        },
        "backward": backward,
    }
    if sizes.live:
        chunked = CHUNKED_ARRAYS * width * tokens * config.width if number > 1 else 0
        stages["live"] = {
            **backward,
            "residents": 0,
            "tables, routes and targets": at_once * TARGET_BYTES * tokens,
            "arrays of a layer": layer + max(scores, chunked + ROW_ARRAYS * width * live_rows * config.width),
            "replicas": 0,
        }
    if sizes.samples:
        wave = Wave(sizes.samples, sizes.columns, sizes.prompt_tokens, sizes.responses, sizes.chunk_tokens)
        experts = config.moe_layers * topology.home_slots * expert // sizes.fsdp
        gathered = GatheredWeights(
            layer=parameters.layer,
            embedding=config.width * config.vocabulary if sizes.shard_dense else 0,
            experts=experts if sizes.fsdp > 1 else 0,
        )
        stages["prompts"] = {**states, **prompt_items(wave, config, topology, gathered)}
        stages["decoding"] = {**states, **decoding_items(wave, config, topology, gathered)}
    return {name: {item: round(size) for item, size in stage.items()} for name, stage in stages.items()}


class RankParameters(NamedTuple):
    """The number of parameters with which a rank works."""

    all: int
    """The parameters that the rank stores and updates: its parts of sharded ones, and those that every rank has."""
    layer: int
    """The parameters of the largest layer while the rank computes it: its experts, and all others whole."""
    outside: int
    """The parameters outside of layers that the rank stores: embedding, output head and last norm."""


@functools.cache
def rank_parameters(sizes: RunSizes) -> RankParameters:
    """Count the parameters of a rank, from the shapes and shardings of the model."""
    fsdp_axis = "fsdp" if sizes.fsdp > 1 else None
    make = model_maker(
        sizes.config, sizes.topology, sizes.mesh, fsdp_axis=fsdp_axis, shard_dense=sizes.shard_dense
    )
    _, shapes, shardings = abstract_model(make, sizes.mesh)
    own, outside, layers = 0, 0, dict.fromkeys(STACKS, 0)
    leaves = jax.tree.leaves_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    for (path, variable), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if not isinstance(variable, nnx.Param):
            continue
        size = math.prod(sharding.shard_shape(variable.shape))
        own += size
        outside += 0 if path[0].key in layers else size
        if path[0].key in layers:
            ranks = sizes.topology.num_ranks if isinstance(variable, ExpertParam) else 1
            layers[path[0].key] += math.prod(variable.shape[1:]) // ranks
    return RankParameters(own, max(layers.values()), outside)


def num_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the parameters of all routed experts, and all other parameters."""
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=config.num_experts, replica_slots=0)
    experts = 3 * config.moe_layers * config.num_experts * config.width * config.expert_width
    return experts, rank_parameters(RunSizes(config=config, topology=topology)).all - experts


def rank_gigabytes(sizes: RunSizes) -> float:
    """Return the memory that a run needs on a rank, in GB (1e9 bytes): that of the stage that needs most."""
    return max(sum(items.values()) for items in memory_by_stage(sizes).values()) / 1e9


def host_bytes(sizes: RunSizes) -> int:
    """Return the bytes of a rank in host memory: the states twice, because an update writes new ones beside the old.

    Args:
        sizes: the sizes of the run.
    """
    states = 2 * (4 + 2 * jnp.dtype(sizes.moments).itemsize) * rank_parameters(sizes).all
    on_device = dataclasses.replace(
        sizes, batch_memory="device", config=dataclasses.replace(sizes.config, activation_memory="device")
    )
    items = memory_by_stage(on_device)["backward"]
    return (
        states * (sizes.state_memory == HOST)
        + sizes.updates * items["tables, routes and targets"] * (sizes.batch_memory == HOST)
        + items["layer inputs"] * (sizes.config.activation_memory == HOST)
    )


def check_training_memory(name: str, sizes: RunSizes, mesh: Mesh) -> None:
    """Raise an error if a run needs more memory than a rank's device has, or the host of this process.

    Args:
        name: the name of the run's model, for the error message.
        sizes: the sizes of the run.
        mesh: the device mesh.

    Raises:
        ValueError: if it does. For a device the message has the largest items, and the settings that would reduce it
            most.
    """
    ranks = len(mesh.local_devices)
    check_memory(f"{name}: what {ranks} ranks keep in host memory", ranks * host_bytes(sizes))
    available, required = memory_of_a_device(mesh) / 1e9, rank_gigabytes(sizes)
    if required <= available:
        return
    stage, items = max(memory_by_stage(sizes).items(), key=lambda stage: sum(stage[1].values()))
    largest = sorted(items.items(), key=lambda item: -item[1])[:LARGEST]
    parts = ", ".join(f"{item} {size / 1e9:.1f}" for item, size in largest)
    smaller = {setting: rank_gigabytes(other) for setting, other in _smaller(sizes).items()}
    best = sorted(smaller.items(), key=lambda entry: entry[1])[:LARGEST]
    settings = ", ".join(f"{setting} ({size:.1f})" for setting, size in best if size < 0.99 * required)
    advice = f"; it would need less with {settings}" if settings else ""
    raise ValueError(
        f"{name}: the {stage} stage needs {required:.1f} GB on each of {mesh.size} ranks ({parts}), but a device has"
        f" {available:.1f} GB{advice}"
    )


def _smaller(sizes: RunSizes) -> dict[str, RunSizes]:
    """Return sizes that may need less memory, by the setting that a run would change. Each changes one setting."""
    replace = functools.partial(dataclasses.replace, sizes)
    others = {
        "moments=bfloat16": replace(moments="bfloat16"),
        "shard_dense=True": replace(shard_dense=True),
        "batch_memory=pinned_host": replace(batch_memory=HOST),
        "state_memory=pinned_host": replace(state_memory=HOST),
        "activation_memory=pinned_host": replace(
            config=dataclasses.replace(sizes.config, activation_memory=HOST)
        ),
    }
    ranks = sizes.topology.num_ranks
    if sizes.config.width % (2 * sizes.fsdp) == 0:
        name = f"fsdp={2 * sizes.fsdp} on {2 * sizes.fsdp * ranks} devices"
        others[name] = replace(fsdp=2 * sizes.fsdp)
    if sizes.sequences > 1:
        parts = sizes.sequences
        others[f"micro_batches={parts * sizes.micro_batches}"] = replace(
            micro_batches=parts * sizes.micro_batches, sequences=1
        )
    if sizes.samples > 1:
        others["wave_samples at one sample a rank"] = replace(samples=1)
    if sizes.live and sizes.chunk_tokens > 1:
        half = sizes.chunk_tokens // 2
        others[f"chunk_tokens={half}"] = replace(chunk_tokens=half)
    if sizes.topology.resident_slots:
        others["resident_slots=0"] = replace(topology=dataclasses.replace(sizes.topology, resident_slots=0))
    return others


def published_sizes(config: ModelConfig, ranks: int, *, shard_dense: bool) -> RunSizes:
    """Return the sizes of a run without its tokens, on nodes of 8 ranks."""
    topology = Topology(
        num_nodes=ranks // 8, ranks_per_node=8, num_experts=config.num_experts, replica_slots=0
    )
    return RunSizes(config=config, topology=topology, shard_dense=shard_dense)


def table_row(config: ModelConfig, *, shard_dense: bool) -> list[str]:
    """Return the GB of a rank for each number of `RANKS`; empty where experts do not divide evenly over ranks."""
    return [
        f"{rank_gigabytes(published_sizes(config, ranks, shard_dense=shard_dense)):.0f}"
        if config.num_experts % ranks == 0
        else ""
        for ranks in RANKS
    ]


def main() -> None:
    """Compute and print the table."""
    table = Table("model", "parameters", "all but experts", *map(str, RANKS), box=box.MARKDOWN)
    for name, fields in PUBLISHED.items():
        config = model_config(fields)
        experts, others = num_parameters(config)
        for shard_dense in (False, True):
            where = "sharded" if shard_dense else "on every rank"
            row = table_row(config, shard_dense=shard_dense)
            table.add_row(name, f"{(experts + others) / 1e9:.1f} B", f"{others / 1e9:.1f} B, {where}", *row)
    print("GB per rank, by the number of ranks")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
