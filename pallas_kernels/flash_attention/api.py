"""The public function for attention: it checks shapes, chooses an implementation, and calls it.

To add an implementation, write a function ``(query, key, value, first, last, block)`` that JAX can differentiate and
add it to `IMPLEMENTATIONS`; the tests run every entry. It returns the output, and the logarithm of the sum of each
query's weights, float32 ``[T, heads]``. An implementation can rely on checked shapes and dtypes, on at least one query
and one key, and on ranges that are empty or inside the keys.
"""

from collections.abc import Callable, Mapping
from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.triton import flash_attention_triton
from pallas_kernels.flash_attention.xla import flash_attention_xla
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.operands import Array, as_arrays, describe
from pallas_kernels.triton.block_sizes import WIDEST_BYTES
from pallas_kernels.varying_axes import match_varying_axes

IMPLEMENTATIONS: Final[Mapping[str, Callable[..., tuple[jax.Array, jax.Array]]]] = {
    "xla": flash_attention_xla,
    "triton": flash_attention_triton,
}
"""All implementations of attention, by name."""
CHECK: Final = "attention"
"""The name of the check of the kernels (`pallas_kernels.self_check`)."""
BLOCK: Final = 512
"""The number of tokens of a block of the XLA implementation. Every step of its loops waits for the host on GPUs, so
blocks are large. On two CPU cores, blocks of 256 take a tenth to a half less time at 2,048 and 4,096 tokens
(``python -m experiments.bench_attention``)."""


def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    first: Array,
    last: Array,
    *,
    sinks: Array | None = None,
    block: int = BLOCK,
    implementation: str | None = None,
) -> jax.Array:
    """Attend from every query to a range of keys: ``softmax(query . key / sqrt(d)) value``.

    This is FlashAttention-2 (Dao, arXiv 2307.08691). Softmax runs over one block of keys at a time, and the backward
    pass computes the weights again from the saved logarithms of their sums. Pairs of blocks in which no query has a key
    are skipped, so causal attention inside packed samples takes time in proportion to the sum of their squared lengths.
    Scores, weights and sums are float32. On GPUs, products round float32 operands as JAX's default precision says. The
    function works under `jax.jit`, `jax.grad` (first order, reverse mode) and `jax.shard_map`.

    Args:
        query: the queries, floating-point ``[T, heads, d]``. Heads ``[i * g, (i + 1) * g)`` use key head i, where g is
            the number of query heads over the number of key heads.
        key: the keys, ``[S, key heads, d]`` in the dtype of the queries.
        value: the values, like ``key``.
        first: the index of the first key of each query, int32 ``[T]``.
        last: the index of its last key, int32 ``[T]``. A query whose last key is before its first one has no key, and
            gets zeros. Ranges are cut at the ends of the keys. Any ranges give the right result; blocks are skipped if
            neighbouring queries have neighbouring ranges.
        sinks: the score of each query head's attention sink, floating-point ``[heads]``: one more key, whose value is
            zero (StreamingLLM, arXiv 2309.17453; GPT-OSS, arXiv 2508.10925). None for none.
        block: the number of tokens of a block of the XLA implementation, which holds the scores of a block of queries
            and a block of keys. The Triton kernels choose their own.
        implementation: the name of the implementation to run, a key of `IMPLEMENTATIONS`. None chooses "triton" on
            NVIDIA GPUs of compute capability 8.0 or higher, for bfloat16 and float16 with heads of at most 512 and
            float32 with heads of at most 256, if it has passed `pallas_kernels.self_check` on this machine. Else None
            chooses "xla", which runs on every platform of JAX.

    Returns:
        The weighted means of the values, ``[T, heads, d]`` in the dtype of the queries.

    Raises:
        ValueError: if shapes or dtypes do not match, if no implementation has the given name, or if the named
            implementation cannot run on this device with these operands.

    >>> query, key = jnp.zeros((3, 2, 8)), jnp.zeros((4, 1, 8))
    >>> value = jnp.broadcast_to(jnp.arange(4.0)[:, None, None], key.shape)
    >>> out = flash_attention(query, key, value, jnp.array([0, 0, 3]), jnp.array([0, 3, 2]))
    >>> out[:, 0, 0].tolist()
    [0.0, 1.5, 0.0]
    """
    query, key, value, first, last = as_arrays(query=query, key=key, value=value, first=first, last=last)
    _check_operands(query, key, value, first, last)
    if sinks is not None:
        (sinks,) = as_arrays(sinks=sinks)
        if sinks.shape != query.shape[1:2] or not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise ValueError(
                f"sinks: expected floating [{query.shape[1]}] for queries {describe(query)}, found {describe(sinks)}"
            )
    if block < 1:
        raise ValueError(f"block={block} must be at least 1")
    name = _choose(implementation, query)
    if query.size == 0 or key.size == 0:
        return jnp.zeros_like(query)
    first, last = first.astype(jnp.int32), last.astype(jnp.int32)
    ranges = jnp.maximum(first, 0), jnp.minimum(last, len(key) - 1)
    operands = match_varying_axes(query, key, value, *ranges)
    output, log_sum = IMPLEMENTATIONS[name](*operands, min(block, len(key)))
    if sinks is None:
        return output
    log_sum, sinks = match_varying_axes(log_sum, sinks.astype(jnp.float32)[None])
    # The share of the weights that the sink leaves to the keys.
    share = jax.nn.sigmoid(log_sum - jnp.broadcast_to(sinks, log_sum.shape))
    return (output.astype(jnp.float32) * share[..., None]).astype(output.dtype)


def _choose(implementation: str | None, query: jax.Array) -> str:
    """Return the name of the implementation to run. The kernels have a limit on the width of heads."""
    width = query.shape[2]
    size = query.dtype.itemsize << max(width - 1, 0).bit_length()
    if size > WIDEST_BYTES:
        if implementation == "triton":
            raise ValueError(
                f"implementation='triton' cannot run: {query.dtype} heads of {width} take {size} bytes in blocks, more"
                f" than {WIDEST_BYTES}"
            )
        implementation = implementation or "xla"
    return choose_implementation(implementation, IMPLEMENTATIONS, query, query.dtype, check=CHECK)


def _check_operands(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, last: jax.Array
) -> None:
    if query.ndim != 3 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query: expected floating [T, heads, d], found {describe(query)}")
    _, heads, width = query.shape
    if key.ndim != 3 or key.shape[2] != width or key.dtype != query.dtype:
        raise ValueError(f"key: expected {query.dtype}[S, key heads, {width}], found {describe(key)}")
    if not key.shape[1] or heads % key.shape[1]:
        raise ValueError(f"key: {key.shape[1]} heads do not divide the {heads} heads of the queries")
    if value.shape != key.shape or value.dtype != key.dtype:
        raise ValueError(f"value: expected {describe(key)} like the keys, found {describe(value)}")
    for name, ends in {"first": first, "last": last}.items():
        if ends.shape != query.shape[:1] or not jnp.issubdtype(ends.dtype, jnp.integer):
            raise ValueError(
                f"{name}: expected integer [{query.shape[0]}] for queries {describe(query)}, found {describe(ends)}"
            )
