"""Inter-batch reordering: which home slot owns each expert for the next batch.

Replicas mend imbalance inside a node, and only there: what is left is the imbalance between nodes. So every
layer is solved twice, experts to nodes and then each node's experts to its ranks; without replica slots nothing
mends a rank, and it is solved once, experts to ranks. Each time the problem is the same: I items with shares
``x[i, m]`` of the mean group load of the batch, in groups of equal size, and

    minimise  sum_m max_g sum_{i in g} x[i, m]  +  sum_g sum_{i in g} cost[g, i].

The first term is the imbalance over the batch. ``cost`` holds, in the same unit, what does not depend on the
other items: the price of moving an expert and of token copies that cross nodes.

The search is simulated annealing over swaps, as in ReLibra (arXiv 2605.08639), in heat-bath form: a step takes
one item, prices its swap with *every* item of one other group, and draws one of them, or none, with probability
proportional to ``exp(-objective / temperature)`` (the Gumbel-max trick). Prices are incremental: only two groups
change. Items are kept in order of position, so that a group is one contiguous block, and the layers ride along
as the last axis, so that a step is a handful of vector operations over all layers at once. Layers share the
random numbers and nothing else: each is a chain of its own, and its result does not depend on the others.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int, PRNGKeyArray

from relibra_jax.planning.packing import pack_evenly
from relibra_jax.types import Array, Topology

METHODS: Final = ("anneal", "descent", "lpt")

HOTTEST: Final = 2e-3
COLDEST: Final = 1e-4
"""Temperatures in units of imbalance: from where the start no longer matters to where hardly any swap is left.
Of 1e-3..2e-2 and 1e-4..5e-4 within 0.001 of the best on recorded, lognormal and Zipf loads for 2 and 4 nodes;
on 64 nodes a start at 1e-3 was 0.7% better."""
REFINING: Final = 3e-4
"""Where annealing starts to refine a placement: any hotter and it forgets what it was given."""
INSIDE: Final = 4
"""How much dearer a move is between ranks of a node than between nodes. Replicas mend what it leaves there: on
recorded loads balance and replicas stayed the same, and 41% (2 nodes) and 20% (4 nodes) of the moves went away."""


class _Groups(NamedTuple):
    """Items in order of position: group g holds positions ``g * size .. (g + 1) * size - 1`` of each row."""

    share: jax.Array
    """[I M rows]"""
    cost: jax.Array
    """[groups I rows], what each item would cost in each group."""
    item: jax.Array
    """[I rows], which item is at each position."""


@functools.partial(
    jax.jit,
    static_argnames=("topology", "method", "steps", "move_cost", "crossing_cost", "smoothing"),
)
def place_experts(
    load: Int[Array, "M L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    method: str = "anneal",
    steps: int = 10_000,
    move_cost: float = 0.02,
    smoothing: float = 0.0,
    source_load: Int[Array, "L N E"] | None = None,
    crossing_cost: float = 0.3,
    refine: Int[Array, "L E"] | None = None,
) -> Int[jax.Array, "L E"]:
    """Choose every expert's home for a batch, so that nodes and then ranks carry even load.

    Source: ReLibra (arXiv 2605.08639), inter-batch expert reordering; the file's docstring has the objective.

    Args:
        load: token copies of each expert, from all ranks together; used as float32 shares.
        previous_home: flat home slots before the batch. An expert that stays on its rank keeps its slot, and one
            that leaves it costs something.
        topology: of the group; ``replica_slots`` only matters in being 0 or not.
        key: the same key gives the same placement.
        method: 'anneal'; 'descent', steepest over all pairs, from LPT; or 'lpt', heaviest expert first to the
            lightest group that has room, blind to costs. The first two never end worse than they start.
        steps: of annealing between nodes, and four times fewer inside them; 40,000 is thorough.
        move_cost: moving all experts of a layer to other nodes must lower its imbalance by this much times the
            square root of N, as the imbalance to be gained also grows with N. 0 is thorough.
        smoothing: softness of the maximum while annealing, as a multiple of the temperature: with
            ``s = smoothing * temperature / M`` the peak of a micro-batch is ``s * log(sum_g exp(load / s))``.
            0 is the maximum itself, equally good in our measurements and more than twice as fast.
        source_load: where the batch's token copies lie; with it, copies that cross nodes have a price.
        crossing_cost: the imbalance worth accepting to have no copy cross nodes. At the default what is free is
            taken; 1 already costs balance on recorded loads.
        refine: a placement to start from instead of ``previous_home``, and to stay close to: found for loads much
            like these, such as those before samples were assigned.

    Returns:
        Flat home slot of each expert, int32; exactly H experts a rank.

    Raises:
        ValueError: an unknown method, no steps, a negative cost, or shapes that disagree with the topology.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[9, 8, 2, 1]], [[7, 9, 2, 2]]])
    >>> home = place_experts(load, jnp.array([[0, 1, 2, 3]]), topology, key=jax.random.key(0))
    >>> (home // topology.home_slots).tolist()
    [[0, 1, 1, 0]]
    """
    _check(load.shape, previous_home.shape, topology, method, steps, move_cost, crossing_cost, smoothing)
    layers, experts = previous_home.shape
    previous = jnp.asarray(previous_home, jnp.int32)
    home = previous if refine is None else jnp.asarray(refine, jnp.int32)
    hottest = HOTTEST if refine is None else REFINING
    load = jnp.asarray(load, jnp.float32)
    crossing = jnp.zeros((layers, experts, topology.num_nodes))  # no price
    if source_load is not None:
        crossing = crossing_cost * _crossing(jnp.asarray(source_load, jnp.float32))

    nodes, locals_ = topology.num_nodes, topology.ranks_per_node
    levels = [(1, nodes, steps, move_cost), (nodes, locals_, max(steps // 4, 1), INSIDE * move_cost)]
    if topology.replica_slots == 0:
        levels = [(1, nodes * locals_, steps, move_cost)]
    for level, (domains, groups, effort, price) in enumerate(levels):
        size = experts // (domains * groups)
        if groups == 1 or (size == 1 and domains == nodes):
            continue  # one group, or one expert on each of a node's ranks: nothing to gain
        start = _arrange(load, previous, home, crossing, domains, groups, price)
        found = _search(start, method, jax.random.fold_in(key, level), effort, smoothing, hottest)
        group = (jnp.argsort(found, axis=0) // size).T.reshape(layers, domains, -1)
        group = (group + groups * jnp.arange(domains)[None, :, None]).reshape(layers, experts)
        group = jnp.take_along_axis(group, home, axis=-1)
        home = jax.vmap(_settle, (0, 0, None))(group, previous, size)
    return home


def _check(load, home, topology, method, steps, move_cost, crossing_cost, smoothing):
    experts = topology.num_experts
    if load[-1] != experts or home != (load[1], experts):
        raise ValueError(
            f"load{list(load)} and previous_home{list(home)} must agree on layers and {experts} experts"
        )
    if method not in METHODS:
        raise ValueError(f"method={method!r} must be one of {METHODS}")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    for name, value in (("move_cost", move_cost), ("crossing_cost", crossing_cost), ("smoothing", smoothing)):
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")


def _crossing(source_load):
    """Copies of each expert that would cross nodes if it lived in each, over all copies of its layer: [L E N]."""
    away = source_load.sum(1, keepdims=True) - source_load
    return away.swapaxes(1, 2) / jnp.maximum(source_load.sum((1, 2)), 1)[:, None, None]


def _arrange(load, previous, home, crossing, domains, groups, move_cost):
    """The problem of placing each domain's experts in its groups; items are slots of ``home``, layer by layer."""
    layers, experts = home.shape
    size = experts // domains
    expert = jnp.argsort(home, axis=-1)
    share = jnp.take_along_axis(load, expert[None], axis=-1).reshape(-1, layers * domains, size)
    share *= groups / jnp.maximum(share.sum((0, 2), keepdims=True), 1)
    group = jnp.take_along_axis(previous, expert, axis=-1) // (size // groups)
    group = group.reshape(layers, domains, size) - groups * jnp.arange(domains)[None, :, None]
    cost = (1 - jax.nn.one_hot(group.reshape(-1, size), groups)) * (move_cost * groups**0.5 / size)
    if domains == 1:  # else its node is decided
        crossing = jnp.take_along_axis(crossing, expert[..., None], axis=1)
        cost += jnp.repeat(crossing, groups // crossing.shape[-1], axis=-1)
    item = jnp.tile(jnp.arange(size)[:, None], (1, layers * domains))
    return _Groups(share.transpose(2, 0, 1), cost.transpose(2, 1, 0), item)


def _settle(group, previous_home, size):
    """Slots of one layer: who stays in its group keeps its slot, the others fill the free slots in order."""
    stays = previous_home // size == group
    free = jnp.argsort(jnp.zeros_like(stays).at[previous_home].set(stays), stable=True)
    movers = jnp.argsort(jnp.where(stays, group.size, group), stable=True)
    return jnp.where(stays, previous_home, jnp.zeros_like(previous_home).at[movers].set(free))


def _group_load(state):
    groups, items, _ = state.cost.shape
    return state.share.reshape(groups, items // groups, *state.share.shape[1:]).sum(1)


def _objective(state):
    groups, _, rows = state.cost.shape
    own = jnp.diagonal(state.cost.reshape(groups, groups, -1, rows))  # [I/groups rows groups]
    return _group_load(state).max(0).sum(0) + own.sum((0, 2))


def _search(start, method, key, steps, smoothing, hottest):
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
    return _Groups(
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
        return (_Groups(share, cost, item), total), None

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
