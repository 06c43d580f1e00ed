"""Simulated annealing that puts items into bins of equal size to minimise the fullest bin of every micro-batch.

The search swaps items by annealing (`relibra_jax.planning.annealing`), as in ReLibra (arXiv 2605.08639). A step takes
one item and prices its swap with *every* item of one other bin. Prices are incremental, because only two bins change.
Items are kept in order of position, so a bin is one contiguous block. Layers are the last axis, so a step is a few
vector operations over all layers. Layers share only the random numbers: the result of a layer does not depend on the
others.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.planning.annealing import anneal, cooling, draw_bits, integers, scaled_noise

HOTTEST: Final = 2e-3
COLDEST: Final = 1e-4
"""The initial and final temperature, in units of imbalance. At the first the start hardly matters; at the last hardly
any swap happens. Among 1e-3..2e-2 and 1e-4..5e-4 they are within 0.001 of the best on recorded, lognormal and Zipf
loads for 2 and 4 nodes; on 64 nodes an initial temperature of 1e-3 was 0.7% better."""


class Bins(NamedTuple):
    """Items in order of position, for every row; bin ``b`` is positions ``b * size`` to ``(b + 1) * size - 1``."""

    share: Float[jax.Array, "I M rows"]
    """The load of each item in each micro-batch, as a multiple of the mean bin's load over the batch."""
    cost: Float[jax.Array, "bins I rows"]
    """The cost of each item in each bin."""
    item: Int[jax.Array, "I rows"]
    """The item at each position."""


AXES: Final = (0, 1, 0)
"""The axis of positions in each array of `Bins`."""


def search_bins(
    start: Bins, key: PRNGKeyArray, *, steps: int, hottest: Float[jax.Array, ""] | float = HOTTEST
) -> Int[jax.Array, "I rows"]:
    """Minimise the peaks and costs of bins by simulated annealing; the result is at least as good as the start.

    Source: ReLibra (arXiv 2605.08639); the module docstring describes the method.

    Args:
        start: the items in the order from which the search starts.
        key: random key, consumed; the same key gives the same result.
        steps: the number of annealing steps. The last tenth accepts only improvements.
        hottest: the temperature of the first step, in units of imbalance.

    Returns:
        The item at each position.
    """
    return keep_better(start, _anneal(start, key, steps, hottest))


def keep_better(start: Bins, result: Bins) -> Int[jax.Array, "I rows"]:
    """Take the better of two results in every row, after relabelling the bins of ``result``.

    Args:
        start: the items in their bins at the start of a search.
        result: the items in their bins at the end of the search.

    Returns:
        The item at each position.
    """
    item, cost = relabel_bins(result)
    better = _peaks(result) + cost < _peaks(start) + jnp.trace(_price_labels(start))
    return jnp.where(better[None], item, start.item)


def bin_load(state: Bins) -> Float[jax.Array, "bins M rows"]:
    """Return the load of each bin in each micro-batch."""
    bins, items, _ = state.cost.shape
    return state.share.reshape(bins, items // bins, *state.share.shape[1:]).sum(1)


def _peaks(state: Bins) -> Float[jax.Array, " rows"]:
    return bin_load(state).max(0).sum(0)


def _price_labels(state: Bins) -> Float[jax.Array, "bins bins rows"]:
    """Return the cost of the items of each bin if the bin had each label."""
    bins, _, rows = state.cost.shape
    return state.cost.reshape(bins, bins, -1, rows).sum(2).swapaxes(0, 1)


def reorder_items(state: Bins, order: Int[jax.Array, "I rows"]) -> Bins:
    """Reorder items: position ``p`` receives the item at position ``order[p]``."""
    return Bins(
        jnp.take_along_axis(state.share, order[:, None], axis=0),
        jnp.take_along_axis(state.cost, order[None], axis=1),
        jnp.take_along_axis(state.item, order, axis=0),
    )


def relabel_bins(state: Bins) -> tuple[Int[jax.Array, "I rows"], Float[jax.Array, " rows"]]:
    """Exchange whole bins as long as that lowers the cost; balance does not depend on the labels of bins.

    Args:
        state: the items in their bins.

    Returns:
        The item at each position after the exchanges, and the total cost of all items then.
    """
    bins, items, rows = state.cost.shape
    price, index = _price_labels(state), jnp.arange(bins)[:, None]

    def exchange(carry):
        label, _ = carry
        cost = jnp.take_along_axis(price, label[None], axis=1)  # [bin, current label of a bin, row]
        own_cost = (cost * jnp.eye(bins, dtype=jnp.float32)[:, :, None]).sum(1)
        gain = (
            own_cost[:, None] + own_cost[None] - cost - cost.swapaxes(0, 1)
        )  # from exchanging the labels of two bins
        gain = gain.reshape(bins * bins, rows)
        best, pair = gain.max(0), gain.argmax(0)
        a, b = pair[None] // bins, pair[None] % bins  # the same bin if nothing is gained
        partner = jnp.where(index == a, b, jnp.where(index == b, a, index))
        return jnp.take_along_axis(label, partner, axis=0), best.max()

    label = jnp.tile(index, (1, rows))
    label, _ = jax.lax.while_loop(lambda carry: carry[1] > 1e-6, exchange, (label, jnp.float32(jnp.inf)))
    block = jnp.argsort(label, axis=0) * (items // bins)  # the first position of each label's items
    order = (block[:, None] + jnp.arange(items // bins)[None, :, None]).reshape(items, rows)
    cost = jnp.take_along_axis(price, label[:, None], axis=1).sum((0, 1))
    return jnp.take_along_axis(state.item, order, axis=0), cost


def price_swaps(
    state: Bins, total: Float[jax.Array, "bins M rows"], i: Int[jax.Array, ""], q: Int[jax.Array, ""]
) -> tuple[Float[jax.Array, "1 rows"], Float[jax.Array, "size rows"]]:
    """Return the objective now and after swapping one item with each item of another bin, without the common part.

    Args:
        state: the items in their bins.
        total: the load of the bins, as `bin_load` returns it.
        i: the position of the item.
        q: the other bin, which does not hold the item.

    Returns:
        The current objective, and the objective after each of the swaps.
    """
    item, others = _at(state, i, 1), _at(state, q * _bin_size(state), _bin_size(state))
    return _price(item, others, total, i // _bin_size(state), q)


def _bin_size(state: Bins) -> int:
    return state.cost.shape[1] // state.cost.shape[0]


def _at(state: Bins, first: Int[jax.Array, ""], size: int) -> Bins:
    """Return the items at ``size`` positions from ``first``."""
    return Bins(
        *(jax.lax.dynamic_slice_in_dim(x, first, size, axis) for x, axis in zip(state, AXES, strict=True))
    )


def _put(state: Bins, items: Bins, first: Int[jax.Array, ""]) -> Bins:
    """Put items at the positions from ``first``."""
    return Bins(
        *(
            jax.lax.dynamic_update_slice_in_dim(x, part, first, axis)
            for x, part, axis in zip(state, items, AXES, strict=True)
        )
    )


def _price(item: Bins, candidates: Bins, total, p, q):
    """Price swaps of one item of bin ``p`` with the items of bin ``q``, as `price_swaps` does."""
    index = jnp.arange(total.shape[0])[:, None, None]
    others = jnp.where((index == p) | (index == q), -jnp.inf, total)
    rest = jnp.maximum(others.max(0, keepdims=True), 0)

    def peak(load_p, load_q):
        return jnp.maximum(jnp.maximum(load_p, load_q), rest)

    gain = candidates.share - item.share
    # The barrier keeps the sum over micro-batches out of the fusion, where XLA:CPU would not vectorise it.
    swap_prices = jax.lax.optimization_barrier(peak(total[p][None] + gain, total[q][None] - gain)).sum(1)
    swap_prices += (candidates.cost[p] - candidates.cost[q]) - (item.cost[p] - item.cost[q])
    return peak(total[p][None], total[q][None]).sum(1), swap_prices


class _State(NamedTuple):
    """The items in their bins, and the load of each bin in each micro-batch."""

    bins: Bins
    total: Float[jax.Array, "bins M rows"]


def _anneal(bins: Bins, key: PRNGKeyArray, steps: int, hottest: Float[jax.Array, ""] | float) -> Bins:
    number, items, _ = bins.cost.shape
    size = items // number
    bits = draw_bits(key, (2, steps), (steps, size + 1))
    first = integers(bits[0][0], items)
    other = (
        first // size + 1 + integers(bits[0][1], number - 1)
    ) % number  # a bin that does not hold the item
    noise = scaled_noise(bits[1], cooling(hottest, COLDEST, steps))[:, :, None]
    state = _State(bins, bin_load(bins))
    return anneal(state, (first, other), noise, propose=_propose, apply=_apply).bins


def _propose(state: _State, draw):
    """Price the swaps of one item with every item of another bin."""
    i, q = draw
    size = _bin_size(state.bins)
    # The barrier makes all reads come before the writes. Otherwise XLA:CPU would copy the whole state.
    item, candidates = jax.lax.optimization_barrier((_at(state.bins, i, 1), _at(state.bins, q * size, size)))
    return jnp.concatenate(_price(item, candidates, state.total, i // size, q)), (item, candidates)


def _apply(state: _State, draw, swap, choice: Int[jax.Array, " rows"]) -> _State:
    i, q = draw
    item, candidates = swap
    size = _bin_size(state.bins)

    def exchange(item, candidates, axis):
        row = [1] * (item.ndim - 1) + [-1]
        column = [size if d == axis else 1 for d in range(item.ndim - 1)] + [1]
        partner = jnp.take_along_axis(candidates, jnp.maximum(choice, 0).reshape(row), axis)
        new_item = jnp.where(choice.reshape(row) < 0, item, partner)
        is_chosen = choice.reshape(row) == jnp.arange(size).reshape(column)
        return new_item, jnp.where(is_chosen, item, candidates)

    exchanged = zip(*map(exchange, item, candidates, AXES), strict=True)
    new_item, new_candidates = (Bins(*parts) for parts in exchanged)
    gain = new_item.share[0] - item.share[0]
    total = state.total.at[i // size].add(gain).at[q].add(-gain)
    return _State(_put(_put(state.bins, new_candidates, q * size), new_item, i), total)
