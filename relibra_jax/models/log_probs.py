"""Log-probabilities of tokens from hidden states, without the logits of all tokens at the same time.

    hidden [B, T, D] of a rank   ->   chunks of tokens   ->   logits [chunk, V], log-softmax, one entry of each row

The logits of a long batch would be its largest array: with a vocabulary of 151,936 tokens, 0.6 MB for every token, and
several times as much in the backward pass. So each rank computes them for one chunk of its tokens after another. The
backward pass computes the logits of a chunk again, and adds the chunk's gradient of the output head to a sum in
float32. The ranks sum that once, after the last chunk, in float32 or, if the head is sharded, in the dtype of the
computation.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.types import Array, check_shape
from relibra_jax.execution.mesh import vary_over, varying_axes
from relibra_jax.execution.node_streams import shift_tokens
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models.language_model import LanguageModel, head_logits
from relibra_jax.nnx import SequencePacking
from relibra_jax.nnx.dense_sharding import dense_spec_of, gather_on_rank
from relibra_jax.support.argument_types import checks_arguments

CHUNK: Final = 2048
"""The largest number of tokens of a rank whose logits exist at the same time.

With a vocabulary of 151,936 tokens, float32 logits of a chunk take 1.2 GB. The backward pass reads and writes the
summed gradient of the head once for each chunk, so smaller chunks spend a larger part of the time on memory traffic.
"""


@checks_arguments
def token_log_probs(
    model: LanguageModel,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    parallel: ExpertParallel,
    temperature: float = 1.0,
    packing: SequencePacking | None = None,
) -> Float[jax.Array, "B T"]:
    """Compute the log-probability of every token given the tokens before it.

    Args:
        model: the model, for its output head.
        hidden: the final hidden states of `ModelOutput`.
        tokens: the tokens that the model ran on.
        parallel: the mesh over whose ranks the sequences are sharded.
        temperature: the temperature, which divides the logits, above 0.
        packing: the samples of each sequence, if sequences hold several. None for one sample in each sequence.

    Returns:
        The log-probabilities, float32. Entry t belongs to token t and comes from the hidden state of token t - 1. It is
        0 for the first token of a sample.

    Raises:
        ValueError: while tracing, if the shapes of the arguments are inconsistent.
    """
    check_shape("tokens", tokens.shape, hidden.shape[:2])
    tied = model.head is None
    weights = model.embedding if model.head is None else model.head
    spec = dense_spec_of(weights, parallel.mesh)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(parallel.token_spec, parallel.token_spec, spec),
        out_specs=parallel.token_spec,
    )
    def on_rank(hidden, next_tokens, head):
        dtype = hidden.dtype if any(spec) else head.dtype
        head = gather_on_rank(head, spec, dtype, token_axes=varying_axes(hidden))
        # The gradient is summed in float32 over chunks, and over ranks only where this is transposed.
        head = vary_over((head.T if tied else head).astype(jnp.float32), varying_axes(hidden))
        rows = hidden.reshape(-1, hidden.shape[-1])
        return _in_chunks(rows, next_tokens.ravel(), head, temperature).reshape(next_tokens.shape)

    # A hidden state stays on its rank: the token after it, and then its log-probability, may be on another one.
    of_next = on_rank(hidden, shift_tokens(tokens, -1, parallel=parallel), weights[...])
    of_tokens = shift_tokens(of_next, 1, parallel=parallel)
    return of_tokens if packing is None else jnp.where(jnp.asarray(packing.positions) == 0, 0, of_tokens)


def _in_chunks(rows, next_tokens, head, temperature):
    """Compute the log-probabilities of ``next_tokens[R]`` after the tokens with the hidden states ``rows[R, D]``."""
    chunks = max(1, -(-len(rows) // CHUNK))
    size = -(-len(rows) // chunks)

    def split(array):
        padding = [(0, chunks * size - len(array)), *[(0, 0)] * (array.ndim - 1)]
        return jnp.pad(array, padding).reshape(chunks, size, *array.shape[1:])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(_, chunk):
        rows, next_tokens = chunk
        log_probs = jax.nn.log_softmax(head_logits(rows, head) / temperature)
        return None, jnp.take_along_axis(log_probs, next_tokens[:, None], axis=-1)[:, 0]

    _, log_probs = jax.lax.scan(of_chunk, None, (split(rows), split(next_tokens)))
    return log_probs.ravel()[: len(rows)]
