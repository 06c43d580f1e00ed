"""The Triton kernel for weight gradients: the product of a group's transposed rows and its rows of another operand.

A block sums one tile of one group's matrix over all rows of the group, so there are no sums between blocks, and the
matrix of an empty group is written as zeros. In the last step, the rows of other groups are read as zeros in both
operands, since these rows may have any value, and zero times infinity is not zero.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.products import WeightGradientOperands
from pallas_kernels.triton.block_sizes import BlockSizes
from pallas_kernels.triton.launch import Span, block_span, branch, launch, load, store


def weight_gradient_kernel(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    bounds: jax.Array,
    slots: tuple[int, ...],
    *,
    out_dtype: Any,
    blocks: BlockSizes,
) -> list[jax.Array]:
    """Compute ``a[group]^T b[group]`` for every group and each of J pairs of row operands.

    Args:
        pairs: the pairs (a, b) of row operands, ``[r, k]`` and ``[r, n]``, in bfloat16, float16 or float32.
        bounds: the group bounds as `group_bounds` returns them, int32 ``[all slots + 1]``.
        slots: the number of slots of each weight buffer, each at least 1.
        out_dtype: the dtype of the results.
        blocks: the block sizes. A step is a number of rows.

    Returns:
        One array ``[slots, J, k, n]`` for each weight buffer, with zeros for empty groups.
    """
    height, width = pairs[0][0].shape[1], pairs[0][1].shape[1]
    across_blocks = pl.cdiv(width, blocks.width)

    def body(operands: WeightGradientOperands, outs: Sequence[Any]) -> None:
        place, pair, group = (pl.program_id(axis) for axis in range(3))
        down = block_span(jax.lax.div(place, jnp.int32(across_blocks)), blocks.height, height)
        across = block_span(jax.lax.rem(place, jnp.int32(across_blocks)), blocks.width, width)
        start, end = operands.groups[group], operands.groups[group + 1]
        steps = jax.lax.div(end - start + (blocks.step - 1), jnp.int32(blocks.step))

        def multiply(a: Any, b: Any) -> jax.Array:
            def step(index: jax.Array, total: jax.Array) -> jax.Array:
                own = Span(start + index * blocks.step, blocks.step, end)
                x, y = load(a, (), own, down), load(b, (), own, across)
                dimensions = (((0,), (0,)), ((), ()))
                return total + jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)

            return jax.lax.fori_loop(0, steps, step, jnp.zeros((blocks.height, blocks.width), jnp.float32))

        def of_pair(number: int, _: jax.Array) -> None:
            total = multiply(*operands.pairs[number])

            def write(buffer: int, slot: jax.Array) -> None:
                store(outs[buffer], (slot * len(pairs) + number,), down, across, values=total)

            branch(slots, group, write)

        branch([1] * len(pairs), pair, of_pair)

    # The interpreter does not support constant indices next to slices, so slots and pairs share one axis.
    outs = [jax.ShapeDtypeStruct((count * len(pairs), height, width), out_dtype) for count in slots]
    gradients = launch(
        body,
        WeightGradientOperands(bounds, list(pairs)),
        outs,
        grid=(pl.cdiv(height, blocks.height) * across_blocks, len(pairs), sum(slots)),
        blocks=blocks,
        name="grouped_weight_gradient",
    )
    return [gradient.reshape(-1, len(pairs), height, width) for gradient in gradients]
