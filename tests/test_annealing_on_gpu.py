"""The annealing kernel for homes in JAX's GPU interpreter, compared with the jitted form.

Shares and costs are multiples of a power of two, so sums are the same in any order; the jitted form leaves the order of
its sums to the compiler. Every step must then draw the same swap, for all sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.swap_annealing import swap_annealing
from relibra_jax.contract.types import Topology
from relibra_jax.planning import annealing
from relibra_jax.planning.annealing import Bins, bin_load, draw_steps
from relibra_jax.planning.annealing_on_gpu import anneal_on_gpu, place_experts_on_gpu
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.relibra import relibra

HOT = 0.3
"""A temperature at which about half of the steps swap, in units of the imbalance of a few random items."""


def random_bins(bins, size, micro_batches, rows, seed=0):
    """Make items of random shares and costs, in multiples of 2^-10."""
    rng, items = np.random.default_rng(seed), bins * size
    share = rng.integers(0, 1024, (items, micro_batches, rows)) / 1024
    cost = rng.integers(0, 64, (bins, items, rows)) / 1024
    item = np.tile(np.arange(items, dtype=np.int32)[:, None], (1, rows))
    return Bins(jnp.asarray(share, jnp.float32), jnp.asarray(cost, jnp.float32), jnp.asarray(item))


@functools.partial(jax.jit, static_argnames="steps")
def jitted(start, key, steps):
    return annealing._anneal(start, key, steps, HOT).item


@functools.partial(jax.jit, static_argnames="steps")
def in_kernel(start, key, steps):
    bins, items, _ = start.cost.shape
    draws = draw_steps(key, steps=steps, bins=bins, items=items, hottest=HOT)
    return swap_annealing(start.share, start.cost, bin_load(start), *draws)


def check_equal(sizes, steps, seeds, interpreter):
    for seed in range(seeds):
        start, key = random_bins(*sizes, seed=seed), jax.random.key(seed)
        expected = np.asarray(jitted(start, key, steps))
        with interpreter():
            result = np.asarray(in_kernel(start, key, steps))
        assert (expected != start.item).any(0).all(), "nothing was swapped"
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("sizes", [(2, 4, 3, 2), (3, 3, 9, 1)], ids=str)
def test_every_step_is_that_of_the_jitted_form(sizes):
    """Test 2 and more bins, and micro-batches for one and two iterations of the kernel's loops."""
    check_equal(sizes, steps=12, seeds=2, interpreter=functools.partial(gpu_interpreter, "mosaic"))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 4, 3, 2), (4, 4, 17, 1), (2, 130, 2, 1), (2, 64, 32, 1)], ids=str)
def test_long_searches_are_those_of_the_jitted_form(sizes):
    """Test bins of more items than a warpgroup has threads, and the nodes of 128 experts in 32 micro-batches.

    The race detector is off, because its time grows with the square of the steps.
    """
    check_equal(sizes, steps=30, seeds=2, interpreter=plgpu.force_gpu_interpret_mode)


def test_a_placement_is_that_of_the_jitted_form():
    """Whole plans are equal with two micro-batches, which can be added in only one order."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    load = np.random.default_rng(0).integers(1, 99, (2, 1, 2, 2, 8))
    plans = []
    for place in (place_experts, place_experts_on_gpu):
        planner = relibra(place=functools.partial(place, steps=12))
        with gpu_interpreter("mosaic"):
            plans.append(planner.update(load, planner.init(topology, 1, key=jax.random.key(1)), topology)[0])
    jax.tree.map(np.testing.assert_array_equal, *plans)
    assert (np.asarray(plans[0].home) != np.arange(8)[None]).any()


def test_on_a_cpu_it_does_not_run():
    start = random_bins(2, 2, 1, 1)
    with pytest.raises(ValueError, match="CPU backend"):
        anneal_on_gpu(start, jax.random.key(0), steps=2)


def test_a_row_that_is_too_large_is_rejected():
    start = jax.eval_shape(lambda: random_bins(2, 256, 128, 1))
    with pytest.raises(ValueError, match="512 items x 128 micro-batches in 2 bins take 282112 bytes"):
        jax.eval_shape(lambda start: anneal_on_gpu(start, jax.random.key(0), steps=2), start)
