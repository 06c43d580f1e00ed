"""Log-probabilities of tokens from hidden states, without the logits of all tokens at the same time.

    hidden [B, T, D] of a rank   ->   chunks of tokens   ->   logits [chunk, V], log-softmax, one entry of each row

Entropies of the distributions of tokens come from the same chunks.

The logits of a long batch would be its largest array: with a vocabulary of 151,936 tokens, 0.6 MB for every token, and
several times as much in the backward pass. So each rank computes them for one chunk of its tokens after another. The
backward pass computes the logits of a chunk again, and adds the chunk's gradient of the output head to a sum in
float32. The ranks sum that once, after the last chunk, in float32 or, if the head is sharded, in the dtype of the
computation.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

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
    return _over_chunks(_log_prob, model, hidden, tokens, parallel, temperature, packing)


@checks_arguments
def token_log_probs_and_entropies(
    model: LanguageModel,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    parallel: ExpertParallel,
    temperature: float = 1.0,
    packing: SequencePacking | None = None,
) -> tuple[Float[jax.Array, "B T"], Float[jax.Array, "B T"]]:
    """Compute the log-probability of every token, and the entropy of the distribution that the token is drawn from.

    Both come from one pass over the logits, and gradients flow through both.

    Args:
        model: the model, as for `token_log_probs`.
        hidden: the final hidden states, as for `token_log_probs`.
        tokens: the tokens that the model ran on.
        parallel: the mesh over whose ranks the sequences are sharded.
        temperature: the temperature, which divides the logits, above 0.
        packing: the samples of each sequence, as for `token_log_probs`.

    Returns:
        The log-probabilities, as `token_log_probs` returns them; and the entropies in nats, float32, of the whole
        vocabulary at this temperature. Entry t of both comes from the hidden state of token t - 1, and is 0 for the
        first token of a sample.

    Raises:
        ValueError: while tracing, if the shapes of the arguments are inconsistent.
    """
    return _over_chunks(_log_prob_and_entropy, model, hidden, tokens, parallel, temperature, packing)


def _log_prob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probabilities of ``tokens[R]`` from rows of logits over the vocabulary, ``[R, V]``."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]


@jax.custom_vjp
def _log_prob_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward(logits, tokens)[0]


def _forward(logits: jax.Array, tokens: jax.Array) -> Any:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_prob = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - total
    entropy = -(jnp.exp(logits - total) * (logits - total)).sum(-1, keepdims=True)
    return (log_prob[:, 0], entropy[:, 0]), (logits, tokens, total, entropy)


def _backward(residuals: Any, slopes: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    """Return the gradient by the logits in one expression, so that no other array ``[R, V]`` is made."""
    logits, tokens, total, entropy = residuals
    of_log_prob, of_entropy = (slope[:, None] for slope in slopes)
    log_probs = logits - total
    is_token = jnp.arange(logits.shape[-1])[None] == tokens[:, None]
    slope = of_log_prob + of_entropy * (log_probs + entropy)
    return jnp.where(is_token, of_log_prob, 0) - jnp.exp(log_probs) * slope, None


_log_prob_and_entropy.defvjp(_forward, _backward)


def _over_chunks(
    of_rows: Callable[[jax.Array, jax.Array], Any],
    model: LanguageModel,
    hidden: Array,
    tokens: Array,
    parallel: ExpertParallel,
    temperature: float,
    packing: SequencePacking | None,
) -> Any:
    """Compute numbers of every token from its logits over the vocabulary, for one chunk after another."""
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
        numbers = _in_chunks(of_rows, rows, next_tokens.ravel(), head, temperature)
        return jax.tree.map(lambda number: number.reshape(next_tokens.shape), numbers)

    def of_tokens(of_next):
        shifted = shift_tokens(of_next, 1, parallel=parallel)
        return shifted if packing is None else jnp.where(jnp.asarray(packing.positions) == 0, 0, shifted)

    # A hidden state stays on its rank: the token after it, and then its log-probability, may be on another one.
    numbers = on_rank(hidden, shift_tokens(tokens, -1, parallel=parallel), weights[...])
    return jax.tree.map(of_tokens, numbers)


def _in_chunks(of_rows, rows, next_tokens, head, temperature):
    """Compute numbers of ``next_tokens[R]`` after the tokens with the hidden states ``rows[R, D]``."""
    chunks = max(1, -(-len(rows) // CHUNK))
    size = -(-len(rows) // chunks)

    def split(array):
        padding = [(0, chunks * size - len(array)), *[(0, 0)] * (array.ndim - 1)]
        return jnp.pad(array, padding).reshape(chunks, size, *array.shape[1:])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(_, chunk):
        rows, next_tokens = chunk
        return None, of_rows(head_logits(rows, head) / temperature, next_tokens)

    _, numbers = jax.lax.scan(of_chunk, None, (split(rows), split(next_tokens)))
    return jax.tree.map(lambda number: number.ravel()[: len(rows)], numbers)
