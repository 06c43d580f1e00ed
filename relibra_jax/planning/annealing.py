"""Items into bins of equal size, so that the fullest bin over all micro-batches holds least: the search.

The search is simulated annealing over swaps, as in ReLibra (arXiv 2605.08639), in heat-bath form: a step takes
one item, prices its swap with *every* item of one other bin, and draws one of them, or none, with probability
proportional to ``exp(-objective / temperature)`` (the Gumbel-max trick). Prices are incremental: only two bins
change. Items are kept in order of position, so that a bin is one contiguous block, and the layers ride along
as the last axis, so that a step is a handful of vector operations over all layers at once. Layers share the
random numbers and nothing else: each is a chain of its own, and its result does not depend on the others.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

HOTTEST: Final = 2e-3
COLDEST: Final = 1e-4
"""Temperatures in units of imbalance: from where the start no longer matters to where hardly any swap is left.
Of 1e-3..2e-2 and 1e-4..5e-4 within 0.001 of the best on recorded, lognormal and Zipf loads for 2 and 4 nodes;
on 64 nodes a start at 1e-3 was 0.7% better."""
REFINING: Final = 3e-4
"""Where annealing starts to refine a placement: any hotter and it forgets what it was given."""


class Bins(NamedTuple):
    """Items in order of position, for every row: bin ``b`` holds positions ``b * size`` to ``(b + 1) * size - 1``."""

    share: Float[jax.Array, "I M rows"]
    """What each item weighs in each micro-batch, as a multiple of the mean bin's weight over the batch."""
    cost: Float[jax.Array, "bins I rows"]
    """What each item would cost in each bin."""
    item: Int[jax.Array, "I rows"]
    """Which item is at each position."""


def anneal(
    start: Bins, key: PRNGKeyArray, *, steps: int, hottest: float = HOTTEST
) -> Int[jax.Array, "I rows"]:
    """Search by simulated annealing for items in bins whose peaks and costs are least; never worse than the start.

    Source: ReLibra (arXiv 2605.08639); the file's docstring has the method.

    Args:
        start: the items in the order from which the search starts.
        key: random key, consumed; the same key gives the same result.
        steps: the number of annealing steps, of which the last tenth only takes improvements.
        hottest: the temperature of the first step, in units of imbalance.

    Returns:
        The item at each position.
    """
    return keep_better(start, relabel_bins(_anneal(start, key, steps, hottest)))


def keep_better(start: Bins, result: Bins) -> Int[jax.Array, "I rows"]:
    """The item at each position: of each row as in ``result`` where that lowers the objective, else as in ``start``."""
    better = _objective(result) < _objective(start)
    return jnp.where(better[None], result.item, start.item)


def bin_load(state: Bins) -> Float[jax.Array, "bins M rows"]:
    """What each bin weighs in each micro-batch."""
    bins, items, _ = state.cost.shape
    return state.share.reshape(bins, items // bins, *state.share.shape[1:]).sum(1)


def _objective(state: Bins) -> Float[jax.Array, " rows"]:
    bins, _, rows = state.cost.shape
    own = jnp.diagonal(state.cost.reshape(bins, bins, -1, rows))  # [I/bins rows bins]
    return bin_load(state).max(0).sum(0) + own.sum((0, 2))


def reorder_items(state: Bins, order: Int[jax.Array, "I rows"]) -> Bins:
    """Bring to each position the item that is at position ``order``."""
    return Bins(
        jnp.take_along_axis(state.share, order[:, None], axis=0),
        jnp.take_along_axis(state.cost, order[None], axis=1),
        jnp.take_along_axis(state.item, order, axis=0),
    )


def relabel_bins(state: Bins) -> Bins:
    """Exchange whole bins while that lowers the cost: balance does not care which bin is called which."""
    bins, items, rows = state.cost.shape
    column = jnp.arange(rows)

    def gains(label):  # [bins bins rows], of exchanging the labels of two bins
        cost = jnp.take_along_axis(price, label[None], axis=1)  # [bin, by the present label of a bin, row]
        own = jnp.diagonal(cost).T
        return own[:, None] + own[None] - cost - cost.swapaxes(0, 1)

    def exchange(carry):
        label, gain = carry
        a, b = jnp.divmod(gain.reshape(bins * bins, rows).argmax(0), bins)
        label = label.at[a, column].set(label[b, column]).at[b, column].set(label[a, column])
        return label, gains(label)

    price = state.cost.reshape(bins, bins, -1, rows).sum(2).swapaxes(0, 1)  # of bin a under label b
    label = jnp.tile(jnp.arange(bins)[:, None], (1, rows))
    label, _ = jax.lax.while_loop(lambda carry: carry[1].max() > 1e-6, exchange, (label, gains(label)))
    block = jnp.argsort(label, axis=0) * (items // bins)  # where each label's items are
    order = block[:, None] + jnp.arange(items // bins)[None, :, None]
    return reorder_items(state, order.reshape(items, rows))


def price_swaps(
    state: Bins, total: Float[jax.Array, "bins M rows"], i: Int[jax.Array, ""], q: Int[jax.Array, ""]
) -> tuple[Float[jax.Array, "1 rows"], Float[jax.Array, "size rows"]]:
    """The objective now, and after the swap of one item with each item of another bin; what all share is left out.

    Args:
        state: the items in their bins.
        total: what the bins weigh, from `bin_load`.
        i: the position of the one item.
        q: the other bin, in which the item is not.

    Returns:
        The objective as it is, and after each of the swaps.
    """
    bins, items, _ = state.cost.shape
    size = items // bins
    p, first = i // size, q * size
    gain = jax.lax.dynamic_slice_in_dim(state.share, first, size) - state.share[i][None]
    index = jnp.arange(bins)[:, None, None]
    others = jnp.where((index == p) | (index == q), -jnp.inf, total)
    rest = jnp.maximum(others.max(0, keepdims=True), 0)

    def peak(mine, theirs):
        return jnp.maximum(jnp.maximum(mine, theirs), rest)

    mine, theirs = total[p][None], total[q][None]
    # The barrier keeps the sum over micro-batches out of the fusion, where XLA:CPU would not vectorise it.
    after = jax.lax.optimization_barrier(peak(mine + gain, theirs - gain)).sum(1)
    toll = state.cost[p] - state.cost[q]
    after += jax.lax.dynamic_slice_in_dim(toll, first, size) - toll[i][None]
    return peak(mine, theirs).sum(1), after


def _anneal(state: Bins, key: PRNGKeyArray, steps: int, hottest: float) -> Bins:
    bins, items, _ = state.cost.shape
    size = items // bins
    keys = jax.random.split(key, 3)
    i = jax.random.randint(keys[0], (steps,), 0, items)
    q = (i // size + jax.random.randint(keys[1], (steps,), 1, bins)) % bins
    noise = jax.random.gumbel(keys[2], (steps, size + 1, 1))
    temperature = jnp.geomspace(hottest, COLDEST, steps)
    # The last tenth only takes improvements.
    temperature = jnp.where(jnp.arange(steps) < 0.9 * steps, temperature, 0)

    def step(carry, draw):
        state, total = carry
        i, q, temperature, noise = draw
        now, after = price_swaps(state, total, i, q)
        choice = jnp.argmin(jnp.concatenate([now, after]) - temperature * noise, axis=0) - 1
        chosen = choice[None] == jnp.arange(size)[:, None]

        def swap(array, axis):
            row = [1] * (array.ndim - 1) + [-1]
            mine = jax.lax.dynamic_slice_in_dim(array, i, 1, axis)
            theirs = jax.lax.dynamic_slice_in_dim(array, q * size, size, axis)
            picked = jnp.take_along_axis(theirs, jnp.maximum(choice, 0).reshape(row), axis)
            got = jnp.where(choice.reshape(row) < 0, mine, picked)
            here = jnp.expand_dims(chosen, [d for d in range(array.ndim - 1) if d != axis])
            array = jax.lax.dynamic_update_slice_in_dim(array, jnp.where(here, mine, theirs), q * size, axis)
            return jax.lax.dynamic_update_slice_in_dim(array, got, i, axis), got - mine

        (share, gain), (cost, _), (item, _) = swap(state.share, 0), swap(state.cost, 1), swap(state.item, 0)
        total = total.at[i // size].add(gain[0]).at[q].add(-gain[0])
        return (Bins(share, cost, item), total), None

    (result, _), _ = jax.lax.scan(step, (state, bin_load(state)), (i, q, temperature, noise))
    return result
