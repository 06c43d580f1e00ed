"""Every kind of tile that the Hopper kernels can be compiled for, in JAX's GPU interpreter and with race detection.

What the heuristic chooses at the shapes of the other suites is tested there; here the sizes are named.
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
"""Rows of each group, with padding behind: less than a tile of 64 rows, none, and more than one."""
ROWS = 81


@pytest.fixture
def tiles(request, monkeypatch):
    """The sizes of tiles that every kernel is compiled for, whatever the problem."""
    for module in (dot_mosaic, mlp_mosaic):
        monkeypatch.setattr(module, "choose_tile_sizes", lambda _: request.param)
    return request.param


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def out_and_gradients(call, implementation, arrays, d_out):
    """The output of ``call`` and its gradients, in float64."""

    def run(*arrays):
        out, pull = jax.vjp(functools.partial(call, implementation=implementation), *arrays)
        return out, *pull(d_out)

    with gpu_interpreter(implementation):
        found = jax.block_until_ready(jax.jit(run)(*arrays))
    return [np.asarray(one, np.float64) for one in jax.tree.leaves(found)]


def check(call, arrays, d_out, tolerance):
    pairs = [out_and_gradients(call, name, arrays, d_out) for name in ("mosaic", "reference")]
    for found, wanted in zip(*pairs, strict=True):
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


# Of 192 columns the last tile of 128 has 64; of 64 columns, those of the input gradient, the only one has half.
PARTIAL = TileSizes(64, 128, 2)
# The same shared by two blocks, one of which finds a group's rows at an end before its own tile.
CLUSTER = TileSizes(64, 128, 2, cluster=2)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [PARTIAL, CLUSTER], indirect=True)
def test_products(tiles):
    rows, weights, d_out = draw((ROWS, 64), (len(SIZES), 64, 192), (ROWS, 192))
    sizes = jnp.array(SIZES)

    def call(rows, weights, implementation):
        return grouped_dot(rows, [weights], sizes, implementation=implementation)

    check(call, (rows, weights), d_out, 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [pytest.param(PARTIAL, marks=pytest.mark.long), CLUSTER], indirect=True)
def test_mlp(tiles):
    """The row sums of the backward pass are sums of the columns that there are."""
    rows, weights, d_out = draw((ROWS, 64), (len(SIZES), 3, 64, 192), (ROWS, 64))
    sizes, scale = jnp.array(SIZES), jnp.linspace(0.5, 1.5, ROWS)

    def call(rows, weights, scale, implementation):
        return grouped_mlp(rows, [weights], sizes, scale, implementation=implementation)

    check(call, (rows, weights / 3, scale), d_out, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [CLUSTER], indirect=True)
def test_a_block_that_does_not_wait_for_its_partner_is_found(tiles, monkeypatch):
    """If each block waited for its own warpgroups only, it would write over what those of the other still read."""
    monkeypatch.setattr(plgpu, "ClusterBarrier", lambda collective_axes, **rest: plgpu.Barrier(**rest))
    # Four steps in a ring of two.
    (rows, weights), sizes = draw((ROWS, 256), (len(SIZES), 256, 64)), jnp.array(SIZES)
    with pytest.raises(AssertionError), gpu_interpreter("mosaic"):
        jax.block_until_ready(grouped_dot(rows, [weights], sizes, implementation="mosaic"))
