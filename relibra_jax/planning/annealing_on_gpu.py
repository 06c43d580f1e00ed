"""Simulated annealing as one kernel on a Hopper GPU, and the placement that searches with it.

A planner uses it only if the caller asks for it, with ``relibra(place=place_experts_on_gpu)``. The steps, the random
numbers and the use of the result are the same as in `relibra_jax.planning.annealing.anneal`. The arithmetic differs
only in the order of one sum: the kernel sums a price over micro-batches in their order, which `anneal` leaves to the
compiler. The kernel is `pallas_kernels.swap_annealing`. It has not run on a GPU.
"""

import functools

import jax
from jaxtyping import Float, Int, PRNGKeyArray

from pallas_kernels.swap_annealing import swap_annealing
from relibra_jax.planning.annealing import HOTTEST, Bins, bin_load, draw_steps, keep_better, reorder_items
from relibra_jax.planning.placement import STATIC_ARGUMENTS, place_by_search


def anneal_on_gpu(
    start: Bins, key: PRNGKeyArray, *, steps: int, hottest: Float[jax.Array, ""] | float = HOTTEST
) -> Int[jax.Array, "I rows"]:
    """Search like `relibra_jax.planning.annealing.anneal`, in one kernel that keeps each row in shared memory.

    Source: ReLibra (arXiv 2605.08639); the module docstring describes the differences from `anneal`.

    Args:
        start: the items in the order from which the search starts, in at least 2 bins.
        key: random key, consumed; the same key gives the same result.
        steps: the number of annealing steps. The last tenth accepts only improvements.
        hottest: the temperature of the first step, in units of imbalance.

    Returns:
        The item at each position.

    Raises:
        ValueError: if a row does not fit into shared memory, or if the device does not support Mosaic GPU.
    """
    bins, items, _ = start.cost.shape
    draws = draw_steps(key, steps=steps, bins=bins, items=items, hottest=hottest)
    order = swap_annealing(start.share, start.cost, bin_load(start), *draws)
    return keep_better(start, reorder_items(start, order))


place_experts_on_gpu = jax.jit(
    functools.partial(place_by_search, anneal_on_gpu), static_argnames=STATIC_ARGUMENTS
)
"""`relibra_jax.planning.placement.place_experts` with `anneal_on_gpu` as its search.

With ``tokens``, the search over nodes is for time and has no kernel. The kernel then searches only over the ranks of a
node, and only if there are no replica slots."""
