"""The memory of a rank during generation, by item: the prompt pass of a wave, and its decoding steps.

Both have the weights and the cache of the wave, which the prompt pass returns and decoding steps write in place.
Routing is live, so the buffers of a layer have the worst case of rows: all tokens of a group at the experts of one
rank. The counts are held against XLA's for CPUs and for described H100s in `tests/test_generation_memory.py`.
"""

import math
from typing import Final, NamedTuple

import jax.numpy as jnp

from experiments.rl.generation import chunks_of_prompts
from relibra_jax.contract.types import Topology
from relibra_jax.models import ModelConfig
from relibra_jax.routing.sizes import worst_case_capacities

WEIGHT_COPIES: Final = 1.7
"""The copies of a layer's weights in the dtype of the computation."""
ROW_ARRAYS: Final = 4
"""The arrays ``[rows, D]`` of one layer at the same time: sent, received, sorted by slot, and computed."""
HIDDEN_ARRAYS: Final = 3
"""The float32 arrays ``[rows, F]`` of experts that `relibra_jax.execution.expert_mlp.GeneralMlp` computes, likewise."""
SCORE_ARRAYS: Final = 2
"""The float32 scores of a chunk and the prompts' columns, for all heads, at the same time."""
LOGIT_ARRAYS: Final = 8
"""The float32 arrays ``[samples, V]`` of a draw at the same time. Top-p sorts and sums."""


class Wave(NamedTuple):
    """The sizes of a wave on a rank."""

    samples: int
    """The number of samples."""
    columns: int
    """The number of columns of the cache: the largest number of tokens of a sample."""
    prompt_tokens: int
    """The largest number of tokens of a prompt."""
    responses: int
    """The number of samples that share a prompt, as a run gives it to `experiments.rl.generation.generate`."""
    chunk_tokens: int
    """The largest number of tokens of a rank that a prompt pass runs at once."""


class GatheredWeights(NamedTuple):
    """The weights that a rank gathers while it generates, in numbers of parameters."""

    layer: int
    """The parameters of the largest layer: the rank's experts, and all others."""
    embedding: int
    """The parameters of the embedding, if it is sharded; 0 otherwise."""
    experts: int
    """The parameters of the rank's experts of all layers, if each is sharded over copies; 0 otherwise. Before decoding
    steps, XLA for GPUs copies them once into the layout in which it gathers them."""


def prompt_items(
    wave: Wave, config: ModelConfig, topology: Topology, weights: GatheredWeights
) -> dict[str, int]:
    """Count the bytes of the prompt pass on a rank besides its states.

    Args:
        wave: the sizes of the wave.
        config: the sizes of the model.
        topology: the expert-parallel group.
        weights: the weights that the rank gathers.
    """
    width = jnp.dtype(config.dtype).itemsize
    copies = math.gcd(wave.samples, wave.responses)
    prompts = wave.samples // copies
    chunk, columns = chunks_of_prompts(wave.prompt_tokens, prompts, wave.chunk_tokens)
    tokens = chunk * prompts
    cache = wave.samples * wave.columns * config.cache_bytes
    room = columns if copies > 1 else wave.columns
    scores = 4 * tokens * config.heads * room
    rows = live_rows(tokens, config, topology)
    hidden = _hidden_bytes(rows, config)
    rows *= width * config.width
    embedding = width * weights.embedding
    arrays = max(SCORE_ARRAYS * scores, ROW_ARRAYS * rows + hidden, embedding)
    largest = max(scores, rows, hidden // HIDDEN_ARRAYS, embedding)
    # XLA puts the arrays of a chunk where it will put the cache of the wave, but for the last one.
    fits = copies > 1 and largest <= cache / 2
    return {
        "cache": cache,
        "cache of prompts": prompts * columns * config.cache_bytes if copies > 1 else 0,
        "arrays of a chunk": max(largest, arrays - cache) if fits else arrays,
        "weights of a layer": round(WEIGHT_COPIES * width * weights.layer),
    }


def decoding_items(
    wave: Wave, config: ModelConfig, topology: Topology, weights: GatheredWeights
) -> dict[str, int]:
    """Count the bytes of decoding steps on a rank besides its states; the arguments are those of `prompt_items`."""
    width = jnp.dtype(config.dtype).itemsize
    cache = wave.samples * wave.columns * config.cache_bytes
    rows = live_rows(wave.samples, config, topology)
    return {
        "cache": cache,
        "keys and values of a layer": cache // config.layers,
        "buffers of live routing": ROW_ARRAYS * width * rows * config.width + _hidden_bytes(rows, config),
        "logits of the last tokens": 4 * LOGIT_ARRAYS * wave.samples * config.vocabulary,
        "gathered embedding": width * weights.embedding,
        "weights of a layer": round(WEIGHT_COPIES * width * weights.layer),
        "experts in another layout": 4 * weights.experts,
    }


def _hidden_bytes(rows: int, config: ModelConfig) -> int:
    return 0 if config.has_plain_experts else HIDDEN_ARRAYS * 4 * rows * config.expert_width


def live_rows(tokens: int, config: ModelConfig, topology: Topology) -> int:
    """Return the rows of a layer's buffers for live routing of ``tokens`` tokens on each rank."""
    home = Topology(
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        num_experts=topology.num_experts,
        replica_slots=0,
    )
    return worst_case_capacities(tokens, config.top_k, home).rows
