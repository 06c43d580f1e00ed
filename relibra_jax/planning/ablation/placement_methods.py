"""Alternative searches for homes, for the ablation: steepest descent over swaps, and heaviest expert first.

Both can be the ``search`` of `relibra_jax.planning.placement.place_experts`; the levels, the costs and the choice of
slots are the same for all three.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.planning.bin_search import (
    Bins,
    bin_load,
    keep_better,
    price_swaps,
    relabel_bins,
    reorder_items,
)
from relibra_jax.planning.packing import pack_evenly


def longest_first(
    start: Bins, key: PRNGKeyArray, *, steps: int, hottest: Float[jax.Array, ""] | float
) -> Int[jax.Array, "I rows"]:
    """Give the heaviest item first to the lightest bin that has room (LPT), regardless of micro-batches and costs.

    The result may be worse than the start.

    Args:
        start: the items in their bins.
        key, steps, hottest: the arguments of `relibra_jax.planning.bin_search.search_bins`, not used.

    Returns:
        The item at each position.
    """
    del key, steps, hottest
    return relabel_bins(_pack_longest_first(start))[0]


def descend(
    start: Bins, key: PRNGKeyArray, *, steps: int, hottest: Float[jax.Array, ""] | float
) -> Int[jax.Array, "I rows"]:
    """Make the best of all swaps repeatedly until none improves, starting from the result of `longest_first`.

    Args:
        start: the items in their bins. They stay if the result of descent is not better.
        key, steps, hottest: the arguments of `relibra_jax.planning.bin_search.search_bins`, not used.

    Returns:
        The item at each position.
    """
    del key, steps, hottest
    return keep_better(start, _descend(_pack_longest_first(start)))


def _pack_longest_first(state: Bins) -> Bins:
    pack = jax.vmap(lambda load: pack_evenly(load, state.cost.shape[0])[0], 1, 1)
    return reorder_items(state, jnp.argsort(pack(state.share.sum(1)), axis=0))


def _descend(state: Bins) -> Bins:
    """Make the best of all swaps in every row, repeatedly, until no swap improves any row."""
    bins, items, rows = state.cost.shape
    size = items // bins
    column = jnp.arange(rows)
    i, q = jnp.asarray(np.nonzero(np.arange(items)[:, None] // size < np.arange(bins)[None]), jnp.int32)

    def sweep(state):
        total = bin_load(state)

        def look(best, pair):
            stay_price, swap_prices = price_swaps(state, total, *pair)
            gain, j = (
                (stay_price - swap_prices).max(0),
                swap_prices.argmin(0).astype(jnp.int32) + pair[1] * size,
            )
            wins = gain > best[0]
            return jax.tree.map(
                lambda a, b: jnp.where(wins, a, b), (gain, jnp.full_like(j, pair[0]), j), best
            ), None

        no_positions = jnp.zeros(rows, jnp.int32)
        # Smaller gains can be rounding errors of float32, with which descent would not end.
        return jax.lax.scan(look, (jnp.full(rows, 1e-6), no_positions, no_positions), (i, q))[0]

    def swap(carry):
        state, (_, i, j) = carry
        order = jnp.tile(jnp.arange(items)[:, None], (1, rows)).at[i, column].set(j).at[j, column].set(i)
        state = reorder_items(state, order)
        return state, sweep(state)

    carry = (state, sweep(state))
    return jax.lax.while_loop(lambda carry: (carry[1][0] > 1e-6).any(), swap, carry)[0]
