"""`relibra_jax.planning.annealing.anneal` as one kernel on a Hopper GPU, and the placement that searches with it.

No planner takes it unless it is named: ``relibra(place=place_experts_on_gpu)``. The steps, their random numbers and
what is made of the result are those of the jitted form, and so is all arithmetic but the order of one sum: a price is
summed over micro-batches in their order, which the jitted form leaves to the compiler. The kernel itself is
`pallas_kernels.swap_annealing`. It has not run on a GPU.
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
    """Search as `relibra_jax.planning.annealing.anneal` does, in one kernel that keeps each row in shared memory.

    Source: ReLibra (arXiv 2605.08639); the file's docstring says what is different.

    Args:
        start: the items in the order from which the search starts, in at least 2 bins.
        key: random key, consumed; the same key gives the same result.
        steps: the number of annealing steps, of which the last tenth only takes improvements.
        hottest: the temperature of the first step, in units of imbalance.

    Returns:
        The item at each position.

    Raises:
        ValueError: if a row does not fit into shared memory, or the program is for a device without Mosaic GPU.
    """
    bins, items, _ = start.cost.shape
    draws = draw_steps(key, steps=steps, bins=bins, items=items, hottest=hottest)
    order = swap_annealing(start.share, start.cost, bin_load(start), *draws)
    return keep_better(start, reorder_items(start, order))


place_experts_on_gpu = jax.jit(
    functools.partial(place_by_search, anneal_on_gpu), static_argnames=STATIC_ARGUMENTS
)
"""`relibra_jax.planning.placement.place_experts` by `anneal_on_gpu`. With ``tokens`` nodes are searched for in time,
for which there is no kernel: then the two are the same, but for ranks where there are no replicas."""
