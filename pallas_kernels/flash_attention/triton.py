"""Attention on NVIDIA GPUs of compute capability 8.0 or higher: one Triton kernel forward, two backward.

Unlike the loops that XLA compiles, the kernels know the bounds of their loops on the device, so no step waits for the
host.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_ranges import block_ranges
from pallas_kernels.triton.attention_kernels import (
    Heads,
    OutputGradient,
    attention_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from pallas_kernels.triton.block_sizes import attention_blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention_triton(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, last: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """Compute `flash_attention` for bfloat16, float16 or float32, with heads of at most `WIDEST_BYTES`.

    Returns:
        The output, and the logarithms of the sums of weights.
    """
    return _forward(query, key, value, first, last, block)[0]


def _forward(query: Any, key: Any, value: Any, first: Any, last: Any, _: int) -> tuple[Any, Any]:
    heads, (blocks, __) = _heads(query, key), attention_blocks(query, key)
    ranges = block_ranges(first, last, blocks.height, blocks.step)
    output, log_sum = attention_kernel(
        _rows(query), _rows(key), _rows(value), ranges, heads=heads, blocks=blocks
    )
    output, log_sum = output.reshape(query.shape), log_sum[:, : len(query)]
    return (output, log_sum.T * math.log(2)), (query, key, value, first, last, output, log_sum)


def _backward(_: int, saved: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    gradient, of_log_sum = gradients
    query, key, value, first, last, output, log_sum = saved
    heads, (__, blocks) = _heads(query, key), attention_blocks(query, key)
    # The blocks are square, so one table of ranges serves both kernels.
    ranges = block_ranges(first, last, blocks.height, blocks.step)
    mean = ((output.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1) - of_log_sum).T
    padding = [(0, 0), (0, len(ranges.first) - len(query))]
    of_output = OutputGradient(_rows(gradient), jnp.pad(log_sum, padding), jnp.pad(mean, padding))
    rows = _rows(query), _rows(key), _rows(value)
    of_query = query_gradient_kernel(*rows, ranges, of_output, heads=heads, blocks=blocks)
    of_key, of_value = key_gradient_kernel(*rows, ranges, of_output, heads=heads, blocks=blocks)
    return of_query.reshape(query.shape), of_key.reshape(key.shape), of_value.reshape(key.shape), None, None


flash_attention_triton.defvjp(_forward, _backward)


def _heads(query: jax.Array, key: jax.Array) -> Heads:
    return Heads(query.shape[1], key.shape[1], query.shape[2])


def _rows(x: jax.Array) -> jax.Array:
    """Put the heads of a token next to each other, which moves nothing."""
    return x.reshape(len(x), -1)
