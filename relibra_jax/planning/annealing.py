"""Items into groups of equal size, so that the largest group load over micro-batches is least: the search.

The search is simulated annealing over swaps, as in ReLibra (arXiv 2605.08639), in heat-bath form: a step takes
one item, prices its swap with *every* item of one other group, and draws one of them, or none, with probability
proportional to ``exp(-objective / temperature)`` (the Gumbel-max trick). Prices are incremental: only two groups
change. Items are kept in order of position, so that a group is one contiguous block, and the layers ride along
as the last axis, so that a step is a handful of vector operations over all layers at once. Layers share the
random numbers and nothing else: each is a chain of its own, and its result does not depend on the others.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from relibra_jax.planning.packing import pack_evenly

METHODS: Final = ("anneal", "descent", "lpt")

HOTTEST: Final = 2e-3
COLDEST: Final = 1e-4
"""Temperatures in units of imbalance: from where the start no longer matters to where hardly any swap is left.
Of 1e-3..2e-2 and 1e-4..5e-4 within 0.001 of the best on recorded, lognormal and Zipf loads for 2 and 4 nodes;
on 64 nodes a start at 1e-3 was 0.7% better."""
REFINING: Final = 3e-4
"""Where annealing starts to refine a placement: any hotter and it forgets what it was given."""


class Groups(NamedTuple):
    """Items in order of position: group g holds positions ``g * size .. (g + 1) * size - 1`` of each row."""

    share: jax.Array
    """[I M rows]"""
    cost: jax.Array
    """[groups I rows], what each item would cost in each group."""
    item: jax.Array
    """[I rows], which item is at each position."""


def _group_load(state):
    groups, items, _ = state.cost.shape
    return state.share.reshape(groups, items // groups, *state.share.shape[1:]).sum(1)


def _objective(state):
    groups, _, rows = state.cost.shape
    own = jnp.diagonal(state.cost.reshape(groups, groups, -1, rows))  # [I/groups rows groups]
    return _group_load(state).max(0).sum(0) + own.sum((0, 2))


def search_groups(start, method, key, steps, smoothing, hottest):
    """The item at each position [I rows], by one of the methods."""
    if method == "lpt":
        return _relabel(_longest_first(start)).item
    if method == "descent":
        found = _relabel(_descend(_longest_first(start)))
    else:
        found = _relabel(_anneal(start, key, steps, smoothing, hottest))
    better = _objective(found) < _objective(start)
    return jnp.where(better[None], found.item, start.item)


def _reorder(state, order):
    """Bring to each position the item at position ``order[I rows]``."""
    return Groups(
        jnp.take_along_axis(state.share, order[:, None], axis=0),
        jnp.take_along_axis(state.cost, order[None], axis=1),
        jnp.take_along_axis(state.item, order, axis=0),
    )


def _longest_first(state):
    pack = jax.vmap(lambda load: pack_evenly(load, state.cost.shape[0])[0], 1, 1)
    return _reorder(state, jnp.argsort(pack(state.share.sum(1)), axis=0))


def _relabel(state):
    """Exchange whole groups while that lowers the cost: balance does not care which group is called which."""
    groups, items, rows = state.cost.shape
    column = jnp.arange(rows)

    def gains(label):  # [groups groups rows], of exchanging the labels of two groups
        cost = jnp.take_along_axis(
            price, label[None], axis=1
        )  # [group, by the present label of a group, row]
        own = jnp.diagonal(cost).T
        return own[:, None] + own[None] - cost - cost.swapaxes(0, 1)

    def exchange(carry):
        label, gain = carry
        a, b = jnp.divmod(gain.reshape(groups * groups, rows).argmax(0), groups)
        label = label.at[a, column].set(label[b, column]).at[b, column].set(label[a, column])
        return label, gains(label)

    price = state.cost.reshape(groups, groups, -1, rows).sum(2).swapaxes(0, 1)  # of group a under label b
    label = jnp.tile(jnp.arange(groups)[:, None], (1, rows))
    label, _ = jax.lax.while_loop(lambda carry: carry[1].max() > 1e-6, exchange, (label, gains(label)))
    block = jnp.argsort(label, axis=0) * (items // groups)  # where each label's items are
    order = block[:, None] + jnp.arange(items // groups)[None, :, None]
    return _reorder(state, order.reshape(items, rows))


def _price_swaps(state, total, i, q, softness=None):
    """Objective now [1 rows], and after each swap of position ``i`` with group ``q`` [I/groups rows].

    Only what depends on the swap is counted.
    """
    groups, items, _ = state.cost.shape
    size = items // groups
    p, first = i // size, q * size
    gain = jax.lax.dynamic_slice_in_dim(state.share, first, size) - state.share[i][None]
    index = jnp.arange(groups)[:, None, None]
    others = jnp.where((index == p) | (index == q), -jnp.inf, total)
    rest = jnp.maximum(others.max(0, keepdims=True), 0)
    if softness is not None:
        rest += softness * jnp.log(
            jnp.maximum(jnp.exp((others - rest) / softness).sum(0, keepdims=True), 1e-30)
        )

    def peak(mine, theirs):
        top = jnp.maximum(jnp.maximum(mine, theirs), rest)
        if softness is None:
            return top
        return top + softness * jnp.log(sum(jnp.exp((x - top) / softness) for x in (mine, theirs, rest)))

    mine, theirs = total[p][None], total[q][None]
    # The barrier keeps the sum over micro-batches out of the fusion, where XLA:CPU would not vectorise it.
    after = jax.lax.optimization_barrier(peak(mine + gain, theirs - gain)).sum(1)
    toll = state.cost[p] - state.cost[q]
    after += jax.lax.dynamic_slice_in_dim(toll, first, size) - toll[i][None]
    return peak(mine, theirs).sum(1), after


def _anneal(state, key, steps, smoothing, hottest):
    groups, items, _ = state.cost.shape
    size = items // groups
    keys = jax.random.split(key, 3)
    i = jax.random.randint(keys[0], (steps,), 0, items)
    q = (i // size + jax.random.randint(keys[1], (steps,), 1, groups)) % groups
    noise = jax.random.gumbel(keys[2], (steps, size + 1, 1))
    temperature = jnp.geomspace(hottest, COLDEST, steps)
    # The last tenth only takes improvements.
    temperature = jnp.where(jnp.arange(steps) < 0.9 * steps, temperature, 0)

    def step(carry, draw):
        state, total = carry
        i, q, temperature, noise = draw
        softness = smoothing * jnp.maximum(temperature, COLDEST) / total.shape[1] if smoothing else None
        now, after = _price_swaps(state, total, i, q, softness)
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
        return (Groups(share, cost, item), total), None

    (found, _), _ = jax.lax.scan(step, (state, _group_load(state)), (i, q, temperature, noise))
    return found


def _descend(state):
    """Make the best of all swaps in every row, again and again, until none improves any row."""
    groups, items, rows = state.cost.shape
    size = items // groups
    column = jnp.arange(rows)
    i, q = jnp.nonzero(
        jnp.arange(items)[:, None] // size < jnp.arange(groups)[None], size=items * (groups - 1) // 2
    )

    def sweep(state):
        total = _group_load(state)

        def look(best, pair):
            now, after = _price_swaps(state, total, *pair)
            gain, j = (now - after).max(0), jnp.argmin(after, axis=0) + pair[1] * size
            wins = gain > best[0]
            return jax.tree.map(
                lambda a, b: jnp.where(wins, a, b), (gain, jnp.full_like(j, pair[0]), j), best
            ), None

        nothing = jnp.zeros(rows, jnp.int32)
        # Gains below float32's rounding would let it turn in circles.
        return jax.lax.scan(look, (jnp.full(rows, 1e-6), nothing, nothing), (i, q))[0]

    def swap(carry):
        state, (_, i, j) = carry
        order = jnp.tile(jnp.arange(items)[:, None], (1, rows)).at[i, column].set(j).at[j, column].set(i)
        state = _reorder(state, order)
        return state, sweep(state)

    carry = (state, sweep(state))
    return jax.lax.while_loop(lambda carry: (carry[1][0] > 1e-6).any(), swap, carry)[0]
