"""The grouped product of float8 operands with scales of blocks, of every implementation, against NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter, sizes_of_every_pattern

from pallas_kernels import grouped_dot_float8
from pallas_kernels.grouped_dot_float8 import mosaic
from pallas_kernels.grouped_dot_float8.api import IMPLEMENTATIONS
from pallas_kernels.hopper.persistent_kernel import TileSizes

ROWS, WIDTH, COLUMNS = 81, 256, 256
SLOTS, SIZES = (2, 0, 1), np.array([5, 0, 70], np.int32)
"""Groups of less than a tile of 64 rows, of none and of more than a tile; padding follows."""


def operands():
    """Return operands whose blocks have different scales, and padding that is NaN."""
    rng = np.random.default_rng(0)
    rows, weights = (rng.normal(size=size) * 8 for size in ((ROWS, WIDTH), (3, COLUMNS, WIDTH)))
    rows[SIZES.sum() :] = np.nan
    scales = [
        jnp.asarray(rng.uniform(0.25, 4, size), jnp.float32)
        for size in ((ROWS, WIDTH // 128), (3, COLUMNS // 128, WIDTH // 128))
    ]
    rows, weights = (jnp.asarray(array, jnp.float8_e4m3fn) for array in (rows, weights))
    ends = np.cumsum(SLOTS)[:-1]
    return rows, scales[0], jnp.split(weights, ends), jnp.split(scales[1], ends), SIZES


def oracle(rows, row_scales, weights, weight_scales, sizes):
    """Sum the scaled products of all blocks, row by row, in float64."""
    rows, row_scales = np.asarray(rows, np.float64), np.asarray(row_scales, np.float64)
    weights, weight_scales = (
        np.concatenate(list(map(np.float64, each))) for each in (weights, weight_scales)
    )
    out = np.zeros((len(rows), weights.shape[1]))
    for row, slot in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        for block in range(rows.shape[1] // 128):
            own = slice(128 * block, 128 * block + 128)
            products = weights[slot, :, own] @ rows[row, own]
            out[row] += row_scales[row, block] * np.repeat(weight_scales[slot, :, block], 128) * products
    return out


def run(implementation, *arrays, **options):
    call = functools.partial(grouped_dot_float8, implementation=implementation, **options)
    with gpu_interpreter(implementation):
        return jax.block_until_ready(jax.jit(call)(*arrays))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_products_equal_a_float64_sum_of_scaled_blocks(implementation):
    """The largest numbers need the sums in float32; bfloat16 rounds the result once."""
    result = run(implementation, *operands(), out_dtype=jnp.float32)
    expected = oracle(*operands())
    assert np.abs(result - expected).max() <= 1e-6 * np.abs(expected).max()
    assert not np.asarray(result[SIZES.sum() :]).any()


@pytest.mark.long
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_products_are_right_for_every_pattern_of_empty_groups(implementation):
    sizes = sizes_of_every_pattern()
    rng = np.random.default_rng(1)
    rows, weights = (
        jnp.asarray(rng.normal(size=size), jnp.float8_e4m3fn)
        for size in ((sizes.sum(), 128), (len(sizes), 128, 128))
    )
    scales = [
        jnp.asarray(rng.uniform(0.5, 2, size), jnp.float32) for size in ((len(rows), 1), (len(sizes), 1, 1))
    ]
    arrays = rows, scales[0], [weights], [scales[1]], sizes
    result, expected = run(implementation, *arrays, out_dtype=jnp.float32), oracle(*arrays)
    assert np.abs(result - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles", [TileSizes(128, 64, 2), pytest.param(TileSizes(64, 128, 2, cluster=2), marks=pytest.mark.long)]
)
def test_hopper_products_are_right_with_explicit_tile_sizes(tiles, monkeypatch):
    """Two tiles of 64 columns share a scale of the weights, and the blocks of a cluster load half of a matrix each."""
    monkeypatch.setattr(mosaic, "choose_float8_tile_sizes", lambda _: tiles)
    result, expected = run("mosaic", *operands()), oracle(*operands())
    assert result.dtype == jnp.bfloat16
    assert np.abs(result.astype(jnp.float32) - expected).max() <= 4e-3 * np.abs(expected).max()


def test_a_scale_of_a_row_is_the_scale_of_its_blocks():
    rows, _, *weights = operands()
    of_row = jnp.linspace(0.5, 2, ROWS)
    blocks = jnp.broadcast_to(of_row[:, None], (ROWS, WIDTH // 128))
    scaled, unscaled = (
        run("xla", rows, scales, *weights, out_dtype=jnp.float32)
        for scales in (blocks, jnp.ones_like(blocks))
    )
    np.testing.assert_allclose(scaled, unscaled * of_row[:, None], rtol=1e-4, atol=1e-2)


def test_a_named_kernel_runs_or_raises():
    """A GPU without float8 tensor cores has no kernel, and neither has a CPU."""
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), operands())

    def trace(implementation, kind):
        device = jax.sharding.AbstractDevice(kind, num_cores=100, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
            call = functools.partial(grouped_dot_float8, implementation=implementation)
            return str(jax.make_jaxpr(call)(*shapes))

    for kind in ("NVIDIA L40S", "NVIDIA H100 80GB HBM3", "NVIDIA B200"):
        assert "grouped_row_product" in trace("triton", kind)
    with pytest.raises(ValueError, match=r"'triton' cannot run: NVIDIA A100.* 8.9 or higher"):
        trace("triton", "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ValueError, match="'mosaic' cannot run: NVIDIA B200 is not a Hopper GPU"):
        trace("mosaic", "NVIDIA B200")
    for name in ("mosaic", "triton"):
        with pytest.raises(ValueError, match=f"implementation='{name}' cannot run: cpu"):
            grouped_dot_float8(*operands(), implementation=name)


def changed(place, change):
    arrays = list(operands())
    arrays[place] = change(arrays[place])
    return arrays


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            changed(0, lambda rows: rows[:, :64]),
            r"rows: expected float8_e4m3fn\[r, k\] with k a positive multiple",
        ),
        (changed(0, lambda rows: rows.astype("bfloat16")), r"rows: expected .*, found bfloat16\[81, 256\]"),
        (
            changed(1, lambda scales: scales[1:]),
            r"row_scales: expected float32\[81, 2\], found float32\[80, 2\]",
        ),
        (
            changed(1, lambda scales: scales.astype("int32")),
            r"row_scales: expected float32\[81, 2\], found int32",
        ),
        (
            changed(2, lambda buffers: [buffer[:, :64] for buffer in buffers]),
            "weights: n=64 is not a positive mult",
        ),
        (changed(3, lambda scales: scales[1:]), "weight_scales: expected 3 arrays like the weights, found 2"),
        (
            changed(3, lambda scales: [scales[2]] * 3),
            r"weight_scales\[0\]: expected float32\[2, 2, 2\], found",
        ),
        (changed(4, lambda sizes: sizes[1:]), r"group_sizes: expected integers \[3\]"),
    ],
)
def test_invalid_operands_raise(arrays, message):
    with pytest.raises(ValueError, match=message):
        grouped_dot_float8(*arrays)


def test_there_is_no_gradient():
    _, scales, *rest = operands()
    with pytest.raises(ValueError, match="grouped_dot_float8 has no gradient"):
        jax.grad(lambda scales: grouped_dot_float8(operands()[0], scales, *rest).sum())(scales)
