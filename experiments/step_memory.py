"""The memory that a step of reinforcement learning needs on a rank, and what it keeps on the host.

`memory_by_stage` counts the bytes of a rank by item for the stages of a step. A stage has the states, which stay on the
device in all stages, and what it holds at its peak:

    states     parameters 4 bytes in float32, AdamW's two moments 8 (4 with ``moments=bfloat16``)
    recompute  arrays of one layer in the forward pass, or logits of a chunk of tokens
    reference  as recompute, and the reference's weights, which other stages have only with ``reference_memory=device``
    loss       the sum of gradients (4 bytes), layer inputs, logits of a chunk of tokens
    backward   the sum of gradients, layer inputs, arrays of one layer
    live recompute, live
               as recompute and backward, for passes that route live in buffers for the worst case of a chunk
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
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from experiments.generation_memory import GatheredWeights, Wave, decoding_items, prompt_items
from relibra_jax.contract.types import Topology
from relibra_jax.execution.memory import HOST
from relibra_jax.models import ModelConfig
from relibra_jax.models.language_model import abstract_model, model_maker
from relibra_jax.models.log_probs import CHUNK
from relibra_jax.models.packed_attention import BLOCK
from relibra_jax.nnx import ExpertParam
from relibra_jax.nnx.dense_sharding import STACKS
from relibra_jax.nnx.variables import is_variable
from relibra_jax.routing.sizes import worst_case_capacities

ROW_ARRAYS: Final = 4.2
"""The arrays ``[rows, D]`` of one layer at the same time."""
HIDDEN_ARRAYS: Final = 7.5
"""The float32 arrays ``[rows, F]`` of experts that `relibra_jax.execution.expert_mlp.GeneralMlp` computes, likewise."""
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
REFERENCE_BYTES: Final = 4
"""The bytes of a token's log-probability under the reference."""
SPARE_ROWS: Final = 1.25
"""The rows of buffers, in multiples of those of even loads: ranks differ, and buffers come in a few sizes."""
FORWARD: Final = 0.53
"""The arrays of one layer in a forward pass alone, as a share of those with the backward pass."""
RECOMPUTE_ARRAYS: Final = 3
"""The arrays ``[tokens, D]`` beside the logits of a recompute."""
CHUNKED_ARRAYS: Final = 2
"""The further arrays ``[tokens, D]`` of a layer in chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The sizes of a run that determine the memory of a rank."""

    config: ModelConfig
    """The sizes of the model."""
    topology: Topology
    """The expert-parallel group with its replica and resident slots."""
    fsdp: int = 1
    """The number of copies of the group over which experts are sharded. Data-parallel copies change nothing."""
    gather_once: bool = False
    """Whether experts are gathered over ``fsdp`` once an update or recompute."""
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
    critic: bool = False
    """Whether hidden vectors of the batch's tokens wait with its targets, for a critic."""
    reference_memory: str | None = None
    """The memory of the reference's weights. None without a reference."""
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


type Items = dict[str, int | float]
"""Bytes by item."""


class _Arrays:
    """The bytes of arrays of a rank that depend on its tokens, and of an expert, in the computation's dtype."""

    def __init__(self, sizes: RunSizes):
        config, topology = sizes.config, sizes.topology
        self.width = jnp.dtype(config.dtype).itemsize
        self.tokens = sizes.sequences * sizes.length
        self.larger = (sizes.recompute_sequences or sizes.sequences) / sizes.sequences
        """The tokens of a recompute in a micro-batch, over those of an update."""
        self.target = TARGET_BYTES + (0 if sizes.reference_memory is None else REFERENCE_BYTES)
        self.target += sizes.critic * self.width * config.width
        self.hidden = self.width * self.tokens * config.width
        self.rows = counted_rows(sizes)
        self.expert = self.width * config.expert_size
        self.vocabulary = config.width * config.vocabulary if self.tokens else 0
        chunks = max(1, -(-self.tokens // CHUNK))
        # XLA takes the only step of a loop out of the loop, and then keeps one more array.
        self.logits = (2 if chunks > 1 else 3) * -(-self.tokens // chunks) * config.vocabulary * 4
        at_once, span = BLOCK if sizes.length > BLOCK else self.tokens, min(sizes.length, BLOCK)
        self.scores = SCORE_ARRAYS * config.heads * at_once * span * 4
        # The keys and values of the other ranks of the node, and their gradients in float32, as XLA's blocks have them.
        # The Triton kernels need less.
        others = (topology.ranks_per_node - 1) * sizes.split * self.tokens
        self.scores += (self.width + 4) * 2 * config.kv_heads * config.head_width * others
        heads = QUERY_ARRAYS * config.heads + KEY_ARRAYS * 2 * config.kv_heads
        self.layer = TOKEN_ARRAYS * self.hidden + self.width * self.tokens * heads * config.head_width
        self.chunks = max(1, -(-self.tokens // sizes.chunk_tokens))
        alone = dataclasses.replace(topology, replica_slots=0, resident_slots=0)
        live_rows = worst_case_capacities(-(-self.tokens // self.chunks), config.top_k, alone).rows
        self.live_rows = live_rows if sizes.live else 0

    def of_rows(self, rows: int | float, config: ModelConfig) -> float:
        """Return the bytes of the arrays of a layer's buffers."""
        hidden = 0 if config.has_plain_experts else HIDDEN_ARRAYS * 4 * config.expert_width
        return rows * (ROW_ARRAYS * self.width * config.width + hidden)


def counted_rows(sizes: RunSizes) -> int:
    """Return the rows of a rank's buffers in a layer for which memory is counted."""
    if sizes.rows is not None:
        return sizes.rows
    return math.ceil(SPARE_ROWS * sizes.sequences * sizes.length * sizes.config.top_k)


def memory_by_stage(sizes: RunSizes) -> dict[str, dict[str, int]]:
    """Count the bytes of a rank at the peak of each stage of a step, by item.

    Args:
        sizes: the sizes of the run.

    Returns:
        The items of the stages recompute, loss, backward, with a reference of that name, with live updates live
        recompute and live, and with samples prompts and decoding, in bytes. The states are items of every stage.
    """
    arrays, states = _Arrays(sizes), _states(sizes)
    update = states | _update_items(sizes, arrays)
    backward = update | _backward_items(sizes, arrays)
    stages = {
        "recompute": states | _recompute_items(sizes, arrays, arrays.larger * arrays.rows),
        "loss": update | _loss_items(sizes, arrays),
        "backward": backward,
    }
    if sizes.reference_memory is not None:
        # Its copy takes the place of the policy's, if that is in the host's memory, too.
        copies = {"reference": _reference_bytes(sizes)}
        if sizes.state_memory == HOST:
            copies["parameters"] = 0
        stages["reference"] = stages["recompute"] | copies
    if sizes.live:
        stages["live recompute"] = states | _recompute_items(sizes, arrays, arrays.live_rows)
        stages["live"] = backward | _live_items(sizes, arrays)
    if sizes.samples:
        stages |= {name: states | items for name, items in _generation_items(sizes).items()}
    return {name: {item: round(size) for item, size in stage.items()} for name, stage in stages.items()}


def _states(sizes: RunSizes) -> Items:
    parameters, on_host = rank_parameters(sizes).all, sizes.state_memory == HOST
    width = jnp.dtype(sizes.config.dtype).itemsize
    return {
        "parameters": (width if on_host else 4) * parameters,
        "moments": 0 if on_host else 2 * jnp.dtype(sizes.moments).itemsize * parameters,
        **({"reference": _reference_bytes(sizes)} if sizes.reference_memory == "device" else {}),
    }


def _reference_bytes(sizes: RunSizes) -> int:
    """Return the bytes of the reference's weights, which have the dtype of the computation."""
    return jnp.dtype(sizes.config.dtype).itemsize * rank_parameters(sizes).all


def _update_items(sizes: RunSizes, arrays: _Arrays) -> Items:
    config, topology, tokens = sizes.config, sizes.topology, arrays.tokens
    kept = topology.resident_slots * config.moe_layers * arrays.expert
    layers = 1 if config.activation_memory == HOST else config.layers
    tables = config.moe_layers * (TABLE_BYTES * arrays.rows + tokens * config.top_k)
    return {
        # Whole totals of experts in place of the rank's part.
        "sum of gradients": 4 * (rank_parameters(sizes).all + _gathered(sizes) * (1 - 1 / sizes.fsdp)),
        "gathered experts": arrays.width * _gathered(sizes),
        "residents": kept + 4 * kept / arrays.width,
        "layer inputs": layers * arrays.hidden,
        "tables, routes and targets": _at_once(sizes) * (tables + arrays.target * tokens),
        "router logits": 8 * config.moe_layers * tokens * config.num_experts,
    }


def _loss_items(sizes: RunSizes, arrays: _Arrays) -> Items:
    # The gradient of the head in float32, and the gathered head.
    return {
        "logits of a chunk": arrays.logits,
        "output head": (8 if sizes.shard_dense else 4) * arrays.vocabulary,
        "arrays of the loss": LOSS_ARRAYS * arrays.hidden,
    }


def _backward_items(sizes: RunSizes, arrays: _Arrays) -> Items:
    parameters = rank_parameters(sizes)
    return {
        "gradients of a micro-batch": 4 * parameters.outside,
        "arrays of a layer": arrays.layer + max(arrays.scores, arrays.of_rows(arrays.rows, sizes.config)),
        "weights of a layer": LAYER_BYTES * parameters.layer if arrays.tokens else 0,
        "replicas": REPLICA_BUFFERS * sizes.topology.replica_slots * arrays.expert,
    }


def _recompute_items(sizes: RunSizes, arrays: _Arrays, rows: int | float) -> Items:
    larger = arrays.larger
    layer = FORWARD * (larger * arrays.layer + arrays.of_rows(rows, sizes.config))
    loss = larger * RECOMPUTE_ARRAYS * arrays.hidden + arrays.logits + arrays.width * arrays.vocabulary
    tables = _update_items(sizes, arrays)["tables, routes and targets"]
    return {
        "gathered experts": arrays.width * _gathered(sizes),
        "residents": sizes.topology.resident_slots * sizes.config.moe_layers * arrays.expert,
        "tables, routes and targets": tables * (larger if _at_once(sizes) == 1 else 1),
        "arrays of a layer or of the loss": max(layer, loss),
    }


def _live_items(sizes: RunSizes, arrays: _Arrays) -> Items:
    chunked = CHUNKED_ARRAYS * arrays.hidden if arrays.chunks > 1 else 0
    of_rows = arrays.of_rows(arrays.live_rows, sizes.config)
    return {
        "residents": 0,
        "tables, routes and targets": _at_once(sizes) * arrays.target * arrays.tokens,
        "arrays of a layer": arrays.layer + max(arrays.scores, chunked + of_rows),
        "replicas": 0,
    }


def _gathered(sizes: RunSizes) -> int:
    """Return the number of parameters of experts that are gathered once; 0 if layers gather them."""
    return _whole_experts(sizes) if sizes.gather_once and sizes.fsdp > 1 else 0


def _whole_experts(sizes: RunSizes) -> int:
    """Return the number of parameters of a rank's whole experts."""
    return sizes.config.moe_layers * sizes.topology.home_slots * sizes.config.expert_size


def _generation_items(sizes: RunSizes) -> dict[str, Items]:
    config, topology = sizes.config, sizes.topology
    wave = Wave(sizes.samples, sizes.columns, sizes.prompt_tokens, sizes.responses, sizes.chunk_tokens)
    experts = _whole_experts(sizes) // sizes.fsdp
    gathered = GatheredWeights(
        layer=rank_parameters(sizes).layer,
        embedding=config.width * config.vocabulary if sizes.shard_dense else 0,
        experts=experts if sizes.fsdp > 1 else 0,
    )
    return {
        "prompts": {**prompt_items(wave, config, topology, gathered)},
        "decoding": {**decoding_items(wave, config, topology, gathered)},
    }


def _at_once(sizes: RunSizes) -> int:
    """Return the number of micro-batches whose tables are on the device at the same time."""
    return 1 if sizes.batch_memory == HOST else sizes.micro_batches


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
    leaves = jax.tree.leaves_with_path(shapes, is_leaf=is_variable)
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


def rank_gigabytes(sizes: RunSizes) -> float:
    """Return the memory that a run needs on a rank, in GB (1e9 bytes): that of the stage that needs most."""
    return max(sum(items.values()) for items in memory_by_stage(sizes).values()) / 1e9


def host_bytes(sizes: RunSizes) -> int:
    """Return the bytes of a rank in host memory: the states twice, because an update writes new ones beside the old.

    The reference is there once, because no program writes it.

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
        + _reference_bytes(sizes) * (sizes.reference_memory == HOST)
        + sizes.updates * items["tables, routes and targets"] * (sizes.batch_memory == HOST)
        + items["layer inputs"] * (sizes.config.activation_memory == HOST)
    )
