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

from relibra_jax.planning.draws import draw_bits, gumbel, integers

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


AXES: Final = (0, 1, 0)
"""The axis of positions in each array of `Bins`."""


def anneal(
    start: Bins, key: PRNGKeyArray, *, steps: int, hottest: Float[jax.Array, ""] | float = HOTTEST
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
    return keep_better(start, _anneal(start, key, steps, hottest))


def keep_better(start: Bins, result: Bins) -> Int[jax.Array, "I rows"]:
    """The item at each position: rows of ``result``, bins relabelled, where they are better than those of ``start``."""
    item, cost = relabel_bins(result)
    better = _peaks(result) + cost < _peaks(start) + jnp.trace(_price_labels(start))
    return jnp.where(better[None], item, start.item)


def bin_load(state: Bins) -> Float[jax.Array, "bins M rows"]:
    """What each bin weighs in each micro-batch."""
    bins, items, _ = state.cost.shape
    return state.share.reshape(bins, items // bins, *state.share.shape[1:]).sum(1)


def _peaks(state: Bins) -> Float[jax.Array, " rows"]:
    return bin_load(state).max(0).sum(0)


def _price_labels(state: Bins) -> Float[jax.Array, "bins bins rows"]:
    """What the items of each bin cost under each label, that is, in the bin of that name."""
    bins, _, rows = state.cost.shape
    return state.cost.reshape(bins, bins, -1, rows).sum(2).swapaxes(0, 1)


def reorder_items(state: Bins, order: Int[jax.Array, "I rows"]) -> Bins:
    """Bring to each position the item that is at position ``order``."""
    return Bins(
        jnp.take_along_axis(state.share, order[:, None], axis=0),
        jnp.take_along_axis(state.cost, order[None], axis=1),
        jnp.take_along_axis(state.item, order, axis=0),
    )


def relabel_bins(state: Bins) -> tuple[Int[jax.Array, "I rows"], Float[jax.Array, " rows"]]:
    """Exchange whole bins while that lowers the cost: balance does not care which bin is called which.

    Args:
        state: the items in their bins.

    Returns:
        The item at each position after the exchanges, and what all items together then cost.
    """
    bins, items, rows = state.cost.shape
    price, index = _price_labels(state), jnp.arange(bins)[:, None]

    def exchange(carry):
        label, _ = carry
        cost = jnp.take_along_axis(price, label[None], axis=1)  # [bin, by the present label of a bin, row]
        own = (cost * jnp.eye(bins, dtype=jnp.float32)[:, :, None]).sum(1)
        gain = own[:, None] + own[None] - cost - cost.swapaxes(0, 1)  # of exchanging the labels of two bins
        gain = gain.reshape(bins * bins, rows)
        best, pair = gain.max(0), gain.argmax(0)
        a, b = pair[None] // bins, pair[None] % bins  # the same bin where nothing is to be gained
        partner = jnp.where(index == a, b, jnp.where(index == b, a, index))
        return jnp.take_along_axis(label, partner, axis=0), best.max()

    label = jnp.tile(index, (1, rows))
    label, _ = jax.lax.while_loop(lambda carry: carry[1] > 1e-6, exchange, (label, jnp.float32(jnp.inf)))
    block = jnp.argsort(label, axis=0) * (items // bins)  # where each label's items are
    order = (block[:, None] + jnp.arange(items // bins)[None, :, None]).reshape(items, rows)
    cost = jnp.take_along_axis(price, label[:, None], axis=1).sum((0, 1))
    return jnp.take_along_axis(state.item, order, axis=0), cost


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
    mine, theirs = _at(state, i, 1), _at(state, q * _bin_size(state), _bin_size(state))
    return _price(mine, theirs, total, i // _bin_size(state), q)


def cooling(hottest: Float[jax.Array, ""] | float, coldest: float, steps: int) -> Float[jax.Array, " steps"]:
    """The temperature of every step of an annealing: geometric, and 0 in the last tenth, which only takes improvements.

    >>> [round(value, 3) for value in cooling(1.0, 0.1, 11).tolist()]
    [1.0, 0.794, 0.631, 0.501, 0.398, 0.316, 0.251, 0.2, 0.158, 0.126, 0.0]
    """
    temperature = jnp.geomspace(jnp.float32(hottest), jnp.float32(coldest), steps, dtype=jnp.float32)
    return jnp.where(jnp.arange(steps) < 0.9 * steps, temperature, 0)


def _bin_size(state: Bins) -> int:
    return state.cost.shape[1] // state.cost.shape[0]


def _at(state: Bins, first: Int[jax.Array, ""], size: int) -> Bins:
    """The items at ``size`` positions from ``first``."""
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


def _price(mine: Bins, theirs: Bins, total, p, q):
    """`price_swaps` of one item of bin ``p`` with the items of bin ``q``."""
    index = jnp.arange(total.shape[0])[:, None, None]
    others = jnp.where((index == p) | (index == q), -jnp.inf, total)
    rest = jnp.maximum(others.max(0, keepdims=True), 0)

    def peak(here, there):
        return jnp.maximum(jnp.maximum(here, there), rest)

    gain = theirs.share - mine.share
    # The barrier keeps the sum over micro-batches out of the fusion, where XLA:CPU would not vectorise it.
    after = jax.lax.optimization_barrier(peak(total[p][None] + gain, total[q][None] - gain)).sum(1)
    after += (theirs.cost[p] - theirs.cost[q]) - (mine.cost[p] - mine.cost[q])
    return peak(total[p][None], total[q][None]).sum(1), after


class Draws(NamedTuple):
    """What every step of a search draws; all rows share it."""

    i: Int[jax.Array, " steps"]
    """The position of the one item."""
    q: Int[jax.Array, " steps"]
    """The other bin, in which the item is not."""
    noise: Float[jax.Array, "steps size+1"]
    """Gumbel noise times the temperature of the step: of staying, and of the swap with each item of the other bin."""


def draw_steps(
    key: PRNGKeyArray, *, steps: int, bins: int, items: int, hottest: Float[jax.Array, ""] | float
) -> Draws:
    """Draw the random numbers of all steps of a search before the first.

    Args:
        key: random key, consumed.
        steps: the number of annealing steps.
        bins: the number of bins.
        items: the number of items, a multiple of ``bins``.
        hottest: the temperature of the first step, in units of imbalance.

    Returns:
        Draws.
    """
    size = items // bins
    bits = draw_bits(key, (2, steps), (steps, size + 1))
    i = integers(bits[0][0], items)
    q = (i // size + 1 + integers(bits[0][1], bins - 1)) % bins
    return Draws(i, q, gumbel(bits[1]) * cooling(hottest, COLDEST, steps)[:, None])


def _anneal(state: Bins, key: PRNGKeyArray, steps: int, hottest: Float[jax.Array, ""] | float) -> Bins:
    bins, items, _ = state.cost.shape
    size = _bin_size(state)
    draws = draw_steps(key, steps=steps, bins=bins, items=items, hottest=hottest)

    def step(carry, draw):
        state, total = carry
        i, q, noise = draw
        # All that is read is read before anything is written: XLA:CPU would copy the whole carry otherwise.
        mine, theirs = jax.lax.optimization_barrier((_at(state, i, 1), _at(state, q * size, size)))
        now, after = _price(mine, theirs, total, i // size, q)
        choice = jnp.argmin(jnp.concatenate([now, after]) - noise[:, None], axis=0) - 1

        def swap(mine, theirs, axis):
            row = [1] * (mine.ndim - 1) + [-1]
            column = [size if d == axis else 1 for d in range(mine.ndim - 1)] + [1]
            picked = jnp.take_along_axis(theirs, jnp.maximum(choice, 0).reshape(row), axis)
            got = jnp.where(choice.reshape(row) < 0, mine, picked)
            here = choice.reshape(row) == jnp.arange(size).reshape(column)
            return got, jnp.where(here, mine, theirs)

        got, left = (Bins(*parts) for parts in zip(*map(swap, mine, theirs, AXES), strict=True))
        gain = got.share[0] - mine.share[0]
        total = total.at[i // size].add(gain).at[q].add(-gain)
        return (_put(_put(state, left, q * size), got, i), total), None

    (result, _), _ = jax.lax.scan(step, (state, bin_load(state)), draws)
    return result
