"""Tests of the Hopper kernels with explicit tile sizes, in JAX's GPU interpreter with race detection.

The other suites test the tile sizes that the heuristic chooses for their shapes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_dot, grouped_mlp
from pallas_kernels.grouped_dot import mosaic as dot_mosaic
from pallas_kernels.grouped_mlp import mosaic as mlp_mosaic
from pallas_kernels.hopper.persistent_kernel import TileSizes

SIZES = (5, 0, 70)
"""The rows of each group: less than a tile of 64 rows, none, and more than a tile. Padding follows."""
ROWS = 81


@pytest.fixture
def tiles(request, monkeypatch):
    """Compile all kernels with the given tile sizes, regardless of the problem."""
    for module in (dot_mosaic, mlp_mosaic):
        monkeypatch.setattr(module, "choose_tile_sizes", lambda _: request.param)
    return request.param


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def out_and_gradients(call, implementation, arrays, d_out):
    """Return the output of ``call`` and its gradients, in float64."""

    def run(*arrays):
        out, pull = jax.vjp(functools.partial(call, implementation=implementation), *arrays)
        return out, *pull(d_out)

    with gpu_interpreter(implementation):
        result = jax.block_until_ready(jax.jit(run)(*arrays))
    return [np.asarray(array, np.float64) for array in jax.tree.leaves(result)]


def check(call, arrays, d_out, tolerance):
    pairs = [out_and_gradients(call, name, arrays, d_out) for name in ("mosaic", "reference")]
    for result, expected in zip(*pairs, strict=True):
        assert result.shape == expected.shape
        assert np.abs(result - expected).max() <= tolerance * np.abs(expected).max()


# The last column tile is only half inside the output, both for 192 columns and for the input gradient's 64.
PARTIAL = TileSizes(64, 128, 2)
# The same tiles in clusters of two blocks; in some clusters the rows of the group end before the second tile.
CLUSTER = TileSizes(64, 128, 2, cluster=2)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [PARTIAL, CLUSTER], indirect=True)
def test_grouped_dot_is_accurate_with_explicit_tile_sizes(tiles):
    rows, weights, d_out = draw((ROWS, 64), (len(SIZES), 64, 192), (ROWS, 192))
    sizes = jnp.array(SIZES)

    def call(rows, weights, implementation):
        return grouped_dot(rows, [weights], sizes, implementation=implementation)

    check(call, (rows, weights), d_out, 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [pytest.param(PARTIAL, marks=pytest.mark.long), CLUSTER], indirect=True)
def test_grouped_mlp_is_accurate_with_explicit_tile_sizes(tiles):
    """The row sums of the backward pass must include only columns that exist."""
    rows, weights, d_out = draw((ROWS, 64), (len(SIZES), 3, 64, 192), (ROWS, 64))
    sizes, scale = jnp.array(SIZES), jnp.linspace(0.5, 1.5, ROWS)

    def call(rows, weights, scale, implementation):
        return grouped_mlp(rows, [weights], sizes, scale, implementation=implementation)

    check(call, (rows, weights / 3, scale), d_out, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [CLUSTER], indirect=True)
def test_gpu_interpreter_finds_a_block_not_waiting_for_its_partner(tiles, monkeypatch):
    """Race detection reports a block that waits only for its own warpgroups, and not for those of its partner."""
    monkeypatch.setattr(plgpu, "ClusterBarrier", lambda collective_axes, **rest: plgpu.Barrier(**rest))
    # The tile has 16 steps, and the ring two buffers. Whether a block comes too early depends on the scheduling of the
    # interpreter's threads.
    (rows, weights), sizes = draw((ROWS, 1024), (len(SIZES), 1024, 64)), jnp.array(SIZES)

    def has_race():
        try:
            with gpu_interpreter("mosaic"):
                jax.block_until_ready(grouped_dot(rows, [weights], sizes, implementation="mosaic"))
        except AssertionError:
            return True
        return False

    assert any(has_race() for _ in range(5))
