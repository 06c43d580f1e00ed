"""Tests of the Triton kernels' tile table, block sizes and launches, without a GPU."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter

from pallas_kernels import grouped_dot, grouped_mlp
from pallas_kernels.triton.block_sizes import row_product_blocks, weight_gradient_blocks
from pallas_kernels.triton.row_tiles import row_tiles

PATTERNS = np.array(list(itertools.product((0, 1), repeat=8)))


@pytest.mark.parametrize(("rows", "height"), [(64, 64), (130, 32), (400, 128), (7, 16)])
def test_row_tiles_hold_every_row_in_one_tile_of_its_group(rows, height):
    """This holds for every pattern of empty groups, with and without padding."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.multinomial(total, np.ones(8) / 8, size=256) for total in (rows, rows - 5)])
    sizes = (sizes * np.tile(PATTERNS, (2, 1))).astype(np.int32)
    tables = jax.jit(jax.vmap(lambda own: row_tiles(own, rows, height)))(sizes)
    for own, table in zip(sizes, np.asarray(tables), strict=True):
        owner = np.searchsorted(np.cumsum(own), np.arange(rows), side="right")
        owned = []
        for group, start, end in table.T:
            assert 0 <= end - start <= height
            assert group == 9 or end > start
            assert (owner[start:end] == group).all()
            owned += range(start, end)
        assert owned == list(range(rows))


def test_row_tiles_of_invalid_sizes_are_those_of_clipped_sizes():
    for impossible, possible in (([9, -3, 2**31 - 1], [9, 0, 11]), ([-1, 25, 4], [0, 20, 0])):
        tables = (row_tiles(jnp.array(sizes, jnp.int32), 20, 16) for sizes in (impossible, possible))
        np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_block_sizes_suit_triton_and_every_gpu(dtype):
    """Sizes are powers of two of at least 16; operands fit into 99 KiB of shared memory, and sums into registers."""
    for rows, k, n, count in itertools.product((1, 200, 1024), (1, 40, 300), (1, 96, 300), (1, 2, 3)):
        x, y = (jnp.zeros((rows, width), dtype) for width in (k, n))
        for blocks, sums in (
            (row_product_blocks(x, 4, n, count), count),
            (weight_gradient_blocks(x, y), 1),
        ):
            assert all(size >= 16 and size & (size - 1) == 0 for size in blocks[:3])
            step = (blocks.height + sums * blocks.width) * blocks.step * x.dtype.itemsize
            assert step * blocks.stages <= 99 * 1024
            assert blocks.height * blocks.width * sums <= 128 * blocks.warps * 32


@pytest.mark.parametrize(
    ("call", "matrix", "kernels"), [(grouped_dot, (64, 128), 3), (grouped_mlp, (3, 64, 128), 5)]
)
def test_grouped_dot_and_grouped_mlp_launch_no_more_for_several_buffers(call, matrix, kernels):
    def program(slots):
        def run(rows, weights):
            sizes = jnp.array([0, 9, 20, 1, 7])
            function = functools.partial(call, group_sizes=sizes, implementation="triton")
            out, pull = jax.vjp(function, rows, weights)
            return out, *pull(out)

        weights = [jax.ShapeDtypeStruct((count, *matrix), jnp.bfloat16) for count in slots]
        with gpu_interpreter("triton"):
            return str(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((40, 64), jnp.bfloat16), weights))

    joined, apart = program((5,)), program((0, 1, 2, 0, 2))
    assert joined.count("pallas_call[") == apart.count("pallas_call[") == kernels
    # An array of all weights has one of two shapes: with separate axes for slots and matrices, or with one axis.
    matrices = matrix[0] if len(matrix) == 3 else 1
    all_weights = rf"\[(5,(\d,)?|{5 * matrices},)64,128\]"
    assert re.search(all_weights, joined)
    assert not re.search(all_weights, apart)
