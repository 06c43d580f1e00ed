"""The Triton kernels of attention: output, gradient of the queries, and gradients of keys and values.

A block of the grid computes one tile of one head, in a loop over the tiles on the other side whose ranges meet it, so
there are no sums between blocks and results do not depend on their order. The kernel for keys and values loops over the
query heads of its key head as well. Heads lie next to each other in a row, so a tile of a head is a range of rows and a
range of columns. Scores are in units of ``log2(e)``, because GPUs compute powers of two.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_ranges import LOWEST, Ranges
from pallas_kernels.triton.block_sizes import BlockSizes
from pallas_kernels.triton.launch import Span, block_span, launch, load, store


class Operands(NamedTuple):
    """The arrays that the kernels read; in a kernel, references to them."""

    query: Any
    """The queries, ``[T, heads * d]``."""
    key: Any
    """The keys, ``[S, key heads * d]``."""
    value: Any
    """The values, ``[S, key heads * d]``."""
    first: Any
    """The first key of each query in whole tiles, int32 ``[tiles * tile]``."""
    last: Any
    """The last key of each query."""
    begin: Any
    """The first tile on the other side of each tile, int32 ``[tiles]``."""
    end: Any
    """The tile after the last one."""


class OutputGradient(NamedTuple):
    """What the backward pass knows of the output; in a kernel, references to it."""

    gradient: Any
    """The gradient of the output, ``[T, heads * d]``."""
    log_sum: Any
    """The logarithm to base 2 of the sum of each query's weights, float32 ``[heads, tiles * tile]``."""
    mean: Any
    """The product of the output and its gradient, float32 ``[heads, tiles * tile]``."""


class Heads(NamedTuple):
    """The heads and their width."""

    query_heads: int
    """The number of query heads."""
    key_heads: int
    """The number of key heads."""
    width: int
    """The width of a head."""

    @property
    def group(self) -> int:
        """The number of query heads of a key head."""
        return self.query_heads // self.key_heads

    def columns(self, head: Any, size: int) -> Span:
        """Return the columns of a head in a row of all heads, with ``size`` of them for a power of two."""
        start = head * self.width
        return Span(start, size, None if size == self.width else start + self.width)

    def key_columns(self, head: Any, size: int) -> Span:
        """Return the columns of the key head of a query head, likewise."""
        return self.columns(jax.lax.div(head, jnp.int32(self.group)), size)


def attention_kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, ranges: Ranges, *, heads: Heads, blocks: BlockSizes
) -> tuple[jax.Array, jax.Array]:
    """Compute the output of attention.

    Args:
        query: the queries, ``[T, heads * d]``.
        key: the keys, ``[S, key heads * d]``.
        value: the values, like the keys.
        ranges: the ranges of the queries in tiles of ``blocks.height`` queries and ``blocks.step`` keys.
        heads: the heads.
        blocks: the block sizes: the queries of a tile, the columns of a head, and the keys of a step.

    Returns:
        The output ``[T, heads * d]``, and the logarithms to base 2 of the sums of weights, float32
        ``[heads, tiles * tile]``.
    """
    operands = Operands(query, key, value, ranges.first, ranges.last, ranges.key_begin, ranges.key_end)

    def body(refs: Operands, outs: Any) -> None:
        tile, head = pl.program_id(0), pl.program_id(1)
        rows, whole = _tile(tile, blocks.height, query.shape[0])
        columns, key_columns = heads.columns(head, blocks.width), heads.key_columns(head, blocks.width)
        queries = load(refs.query, (), rows, columns)
        first, last = load(refs.first, (), whole), load(refs.last, (), whole)

        def step(number: jax.Array, carry: Any) -> Any:
            output, total, largest = carry
            own = _tile(number, blocks.step, key.shape[0])[0]
            keys, values = (load(ref, (), own, key_columns) for ref in (refs.key, refs.value))
            visible = _visible(first[:, None], last[:, None], _numbers(own)[None])
            scores = jnp.where(visible, _product(queries, keys, 1, 1) * _scale(heads), LOWEST)
            new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
            weights = jnp.where(visible, jnp.exp2(scores - new_largest[:, None]), 0.0)
            shrink = jnp.exp2(largest - new_largest)
            output = output * shrink[:, None] + _product(weights.astype(values.dtype), values, 1, 0)
            return output, total * shrink + jnp.sum(weights, axis=1), new_largest

        start = (
            jnp.zeros((blocks.height, blocks.width), jnp.float32),
            jnp.zeros(blocks.height, jnp.float32),
            jnp.full(blocks.height, LOWEST, jnp.float32),
        )
        output, total, largest = jax.lax.fori_loop(refs.begin[tile], refs.end[tile], step, start)
        total = jnp.where(total == 0, 1.0, total)
        store(outs[0], (), rows, columns, values=output / total[:, None])
        store(outs[1], (head,), whole, values=largest + jnp.log2(total))

    tiles = len(ranges.key_begin)
    outs = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((heads.query_heads, tiles * blocks.height), jnp.float32),
    ]
    grid = (tiles, heads.query_heads)
    output, log_sum = launch(body, operands, outs, grid=grid, blocks=blocks, name="flash_attention")
    return output, log_sum


def query_gradient_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ranges: Ranges,
    of_output: OutputGradient,
    *,
    heads: Heads,
    blocks: BlockSizes,
) -> jax.Array:
    """Compute the gradient of the queries.

    Args:
        query: the queries, as for `attention_kernel`, like the following ones.
        key: the keys.
        value: the values.
        ranges: the ranges of the queries.
        of_output: what is known of the output.
        heads: the heads.
        blocks: the block sizes.
    """
    operands = Operands(query, key, value, ranges.first, ranges.last, ranges.key_begin, ranges.key_end)

    def body(refs: tuple[Operands, OutputGradient], outs: Any) -> None:
        operands, of_output = refs
        tile, head = pl.program_id(0), pl.program_id(1)
        rows, whole = _tile(tile, blocks.height, query.shape[0])
        columns, key_columns = heads.columns(head, blocks.width), heads.key_columns(head, blocks.width)
        queries, gradients = (load(ref, (), rows, columns) for ref in (operands.query, of_output.gradient))
        first, last = load(operands.first, (), whole), load(operands.last, (), whole)
        log_sum, mean = load(of_output.log_sum, (head,), whole), load(of_output.mean, (head,), whole)

        def step(number: jax.Array, total: jax.Array) -> jax.Array:
            own = _tile(number, blocks.step, key.shape[0])[0]
            keys, values = (load(ref, (), own, key_columns) for ref in (operands.key, operands.value))
            visible = _visible(first[:, None], last[:, None], _numbers(own)[None])
            scores = _product(queries, keys, 1, 1) * _scale(heads)
            weights = jnp.where(visible, jnp.exp2(scores - log_sum[:, None]), 0.0)
            of_scores = weights * (_product(gradients, values, 1, 1) - mean[:, None])
            return total + _product(of_scores.astype(keys.dtype), keys, 1, 0)

        start = jnp.zeros((blocks.height, blocks.width), jnp.float32)
        total = jax.lax.fori_loop(operands.begin[tile], operands.end[tile], step, start)
        store(outs[0], (), rows, columns, values=total * heads.width**-0.5)

    (gradient,) = launch(
        body,
        (operands, of_output),
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
        grid=(len(ranges.key_begin), heads.query_heads),
        blocks=blocks,
        name="flash_attention_query_gradient",
    )
    return gradient


def key_gradient_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ranges: Ranges,
    of_output: OutputGradient,
    *,
    heads: Heads,
    blocks: BlockSizes,
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of keys and values.

    Args:
        query: the queries, as for `attention_kernel`, like the following ones.
        key: the keys.
        value: the values.
        ranges: the ranges of the queries in tiles of ``blocks.height`` queries and as many keys.
        of_output: what is known of the output.
        heads: the heads.
        blocks: the block sizes, whose step is their height.
    """
    tiles = pl.cdiv(key.shape[0], blocks.height)
    operands = Operands(query, key, value, ranges.first, ranges.last, *ranges.of_keys(tiles))

    def body(refs: tuple[Operands, OutputGradient], outs: Any) -> None:
        operands, of_output = refs
        tile, key_head = pl.program_id(0), pl.program_id(1)
        own, _ = _tile(tile, blocks.height, key.shape[0])
        key_columns = heads.columns(key_head, blocks.width)
        keys, values = (load(ref, (), own, key_columns) for ref in (operands.key, operands.value))
        begin, end = operands.begin[tile], operands.end[tile]

        def of_head(number: jax.Array, sums: Any) -> Any:
            head = key_head * heads.group + number
            columns = heads.columns(head, blocks.width)

            def step(number: jax.Array, sums: Any) -> Any:
                of_keys, of_values = sums
                rows, whole = _tile(number, blocks.step, query.shape[0])
                queries, gradients = (
                    load(ref, (), rows, columns) for ref in (operands.query, of_output.gradient)
                )
                first, last = load(operands.first, (), whole), load(operands.last, (), whole)
                log_sum = load(of_output.log_sum, (head,), whole)
                mean = load(of_output.mean, (head,), whole)
                visible = _visible(first[None], last[None], _numbers(own)[:, None])
                scores = _product(keys, queries, 1, 1) * _scale(heads)
                weights = jnp.where(visible, jnp.exp2(scores - log_sum[None]), 0.0)
                of_scores = weights * (_product(values, gradients, 1, 1) - mean[None])
                of_keys += _product(of_scores.astype(queries.dtype), queries, 1, 0)
                of_values += _product(weights.astype(gradients.dtype), gradients, 1, 0)
                return of_keys, of_values

            return jax.lax.fori_loop(begin, end, step, sums)

        zeros = jnp.zeros((blocks.height, blocks.width), jnp.float32)
        of_keys, of_values = jax.lax.fori_loop(0, heads.group, of_head, (zeros, zeros))
        store(outs[0], (), own, key_columns, values=of_keys * heads.width**-0.5)
        store(outs[1], (), own, key_columns, values=of_values)

    of_keys, of_values = launch(
        body,
        (operands, of_output),
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (key, value)],
        grid=(tiles, heads.key_heads),
        blocks=blocks,
        name="flash_attention_key_gradient",
    )
    return of_keys, of_values


def _tile(number: Any, size: int, length: int) -> tuple[Span, Span]:
    """Return the rows of a tile that an array of ``length`` rows has, and the same rows of an array in whole tiles."""
    rows = block_span(number, size, length)
    return rows, rows._replace(end=None)


def _numbers(span: Span) -> jax.Array:
    return span.start + jnp.arange(span.size, dtype=jnp.int32)


def _visible(first: jax.Array, last: jax.Array, keys: jax.Array) -> jax.Array:
    return (first <= keys) & (keys <= last)


def _scale(heads: Heads) -> float:
    return heads.width**-0.5 * math.log2(math.e)


def _product(lhs: jax.Array, rhs: jax.Array, lhs_axis: int, rhs_axis: int) -> jax.Array:
    """Multiply two tiles over an axis of each, and sum in float32."""
    dimensions = (((lhs_axis,), (rhs_axis,)), ((), ()))
    return jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32)
