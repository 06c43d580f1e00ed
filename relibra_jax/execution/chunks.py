"""A layer that prepares its own plan, in chunks of tokens if its load is unknown, so that its buffers stay small.

    tokens of a rank [t, D]   ->   chunks [n, chunk, D]   ->   chunk by chunk: prepare, dispatch, compute, combine

Buffers for a load that is not known beforehand must suffice if all tokens of a group go to one rank. They have a row
for every token copy of all ranks: with 8,192 tokens, 32 ranks and 4 of a rank's experts for each token, a million rows,
which take 4 GB for each array of width 2,048 in bfloat16. So a rank dispatches at most `ExpertParallel.chunk_tokens` of
its tokens at a time. The backward pass computes each chunk again, and sums the gradients of expert weights in float32.
Tokens do not depend on each other in this layer, so the results are those of all tokens at once.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Integer, Shaped

from relibra_jax.contract.types import EMPTY, Array, LayerPlan
from relibra_jax.execution.moe import ExpertMlp, LayerOutput, moe_layer
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.prepared_layer import prepare_layer
from relibra_jax.execution.replicas import LayerExperts
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def moe_layer_in_chunks(
    x: Float[Array, "..."],
    expert_ids: Integer[Array, "..."],
    gates: Float[Array, "..."],
    experts: LayerExperts,
    plan: LayerPlan,
    parallel: ExpertParallel,
    *,
    expert_mlp: ExpertMlp | None = None,
) -> LayerOutput:
    """Prepare a layer and run it with `relibra_jax.execution.moe.moe_layer`, in chunks if its load is unknown.

    It runs all tokens at once if ``plan`` has a load, ``parallel`` has capacities, or no rank has more than
    ``parallel.chunk_tokens`` tokens.

    Args:
        x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis.
        expert_ids: the logical experts of each token, ``[B, *tokens, K]``; EMPTY on padding.
        gates: the weight of each token copy, ``[B, *tokens, K]`` float32.
        experts: the experts that `relibra_jax.execution.replicas.fetch_replicas` returned for ``plan``.
        plan: the plan of this layer and micro-batch, ``[*data, ...]``. If its load is None, the quotas are refitted to
            the load of every chunk.
        parallel: the mesh, topology, buffer sizes and exchanges with which the layer executes the plan.
        expert_mlp: the function with which every rank computes its rows. None takes `pallas_kernels.grouped_mlp`.

    Returns:
        The output, and the number of rows that each slot computed, summed over chunks. NaN as for `moe_layer`.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    check_tokens("x", x, parallel)
    own_tokens = x.size // x.shape[-1] // parallel.num_ranks
    chunks = -(-own_tokens // parallel.chunk_tokens)
    if chunks <= 1 or plan.load is not None or parallel.capacities is not None:
        layer = prepare_layer(expert_ids, plan, parallel)
        return moe_layer(x, expert_ids, gates, experts, layer, parallel, expert_mlp=expert_mlp)

    # A chunk has one sequence of each rank.
    parallel = dataclasses.replace(parallel, num_sequences=None)
    dtype = experts.home.dtype
    # A scan sums the gradients of what all chunks share in its dtype.
    shared = _cast(experts, jnp.promote_types(dtype, jnp.float32))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run_chunk(slot_rows, chunk):
        x, ids, gates = chunk
        layer = prepare_layer(ids, plan, parallel)
        output = moe_layer(x, ids, gates, _cast(shared, dtype), layer, parallel, expert_mlp=expert_mlp)
        return slot_rows + output.slot_rows, output.output

    inputs = (
        _split(x, chunks, parallel),
        _split(jnp.asarray(expert_ids, jnp.int32), chunks, parallel, padding=EMPTY),
        _split(gates, chunks, parallel),
    )
    no_rows = jnp.zeros(jnp.shape(plan.slot_expert), jnp.int32)
    slot_rows, outputs = jax.lax.scan(run_chunk, no_rows, inputs)
    return LayerOutput(_join(outputs, x.shape, parallel), slot_rows)


def _cast(experts: LayerExperts, dtype: jnp.dtype) -> LayerExperts:
    """Return the experts with their weights in ``dtype``."""
    home, residents, replicas = jax.tree.map(lambda buffer: jnp.asarray(buffer, dtype), experts.weights)
    return LayerExperts(home, residents, replicas, experts.slot_expert)


def _split(
    array: Shaped[Array, "B *rest"], chunks: int, parallel: ExpertParallel, *, padding: int = 0
) -> Shaped[jax.Array, "chunks ranks chunk d"]:
    """Divide the tokens of every rank into equal chunks; ``padding`` fills the last one."""

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=parallel.token_spec,
        out_specs=PartitionSpec(None, *parallel.token_spec),
    )
    def on_rank(array):
        tokens = array.reshape(-1, array.shape[-1])
        missing = -len(tokens) % chunks
        tokens = jnp.pad(tokens, ((0, missing), (0, 0)), constant_values=padding)
        return tokens.reshape(chunks, 1, -1, array.shape[-1])

    return on_rank(array)


def _join(
    chunks: Shaped[Array, "chunks ranks chunk D"], shape: tuple[int, ...], parallel: ExpertParallel
) -> Shaped[jax.Array, "B *rest"]:
    """Return the values of all tokens as an array of a shape: the inverse of `_split`."""
    own_shape = (shape[0] // parallel.num_ranks, *shape[1:])

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=PartitionSpec(None, *parallel.token_spec),
        out_specs=parallel.token_spec,
    )
    def on_rank(chunks):
        tokens = chunks.reshape(-1, shape[-1])
        return tokens[: math.prod(own_shape[:-1])].reshape(own_shape)

    return on_rank(chunks)
