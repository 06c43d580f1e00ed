"""Inter-batch reordering: choose the home slot of each expert for the next batch.

Replicas even out the ranks of a node, but not the nodes. So every layer is solved in two levels: experts to nodes, then
each node's experts to its ranks. Without replica slots there is one level, experts to ranks. If the search is for time,
`relibra_jax.planning.node_placement` places experts on nodes, and ranks are evened out only if there are no replica
slots. Otherwise every level is the same problem: I items with shares ``x[i, m]`` of the mean bin load of the batch go
into bins of equal size, and we

    minimise  sum_m max_b sum_{i in b} x[i, m]  +  sum_b sum_{i in b} cost[b, i].

The first term is the imbalance over the batch. ``cost`` is, in the same unit, the part that does not depend on the
other items: the price of moving an expert and of token copies that cross nodes. The search itself is in
`relibra_jax.planning.annealing`.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num, PRNGKeyArray

from relibra_jax.contract.types import EMPTY, Array, Price, TokenSample, Topology
from relibra_jax.planning import time_search
from relibra_jax.planning.annealing import HOTTEST, REFINING, Bins, anneal
from relibra_jax.planning.node_placement import Prices, keep_residents, place_on_nodes, relative_prices
from relibra_jax.planning.residents import residents_on_ranks
from relibra_jax.support.limits import check_integer, check_not_negative, check_positive

MOVE_COST_INSIDE: Final = 4
"""The factor by which a move between ranks of a node costs more than a move between nodes. Replicas absorb the
imbalance that remains there: on recorded loads this factor left balance and replicas unchanged and saved 41% (2 nodes)
and 20% (4 nodes) of the moves."""

STATIC_ARGUMENTS: Final = ("topology", "steps", "move_cost", "crossing_cost", "horizon")
"""The arguments of `place_by_search` that are static under jit."""


class Placement(NamedTuple):
    """The homes and residents of a whole batch."""

    home: Int[jax.Array, "L E"]
    """Flat home slot of each expert, int32; exactly H experts per rank."""
    resident: Int[jax.Array, "L N G B"]
    """The logical expert in each resident slot, EMPTY for none; never an expert whose home is on that node."""


type Search = Callable[..., jax.Array]
"""``(start, key, *, steps, hottest) -> item[I rows]``, with the contract of `relibra_jax.planning.annealing.anneal`."""


@functools.partial(jax.jit, static_argnames=STATIC_ARGUMENTS)
def place_experts(
    load: Int[Array, "M L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    steps: int | None = None,
    move_cost: float = 0.02,
    source_load: Num[Array, "M L N E"] | None = None,
    crossing_cost: float = 0.1,
    tokens: TokenSample | None = None,
    cost: Price | None = None,
    horizon: float = 1.0,
    refine: Int[Array, "L E"] | None = None,
) -> Placement:
    """Choose the home of every expert and the residents for a batch so that the batch takes the least time.

    With ``tokens`` the search minimises modelled time: the largest node load and the busiest exchange of every
    micro-batch, weighed by ``cost``, and the time of moving experts and pushing residents
    (`relibra_jax.planning.node_placement`). If there are replica slots, the ranks of a node are then left to replicas.
    Without tokens, or on one node, where nothing crosses, the search minimises imbalance over nodes and inside them,
    with prices for moves and for copies that cross, which ``cost`` gives as well. In every layer the result is at least
    as good as the start, so experts move only if the gain pays for the move.

    Source: ReLibra (arXiv 2605.08639), inter-batch expert reordering; the module docstring states the objective.

    Args:
        load: the number of token copies for each expert, summed over ranks; used as float32 shares.
        previous_home: flat home slot of each expert before the batch. An expert that stays on its rank keeps its slot;
            an expert that moves is charged for the move.
        topology: the expert-parallel group. Of ``replica_slots``, only whether there are any matters.
        key: random key, consumed; the same key gives the same placement.
        steps: the number of annealing steps between nodes; inside nodes it is a quarter. 40,000 is thorough. A search
            for time takes a tenth of these steps, because each of them prices sets of tokens. None takes ten steps per
            pair of experts, at most 10,000, and a quarter of that if placement and assignment alternate (``refine`` is
            given). An explicit number applies to each round.
        move_cost: the price of moving experts between ranks or nodes, in units of imbalance: moving all experts of a
            layer to other nodes must lower its imbalance by this much times the square root of N, because the possible
            gain also grows with N. 0 searches thoroughly. ``cost`` replaces it.
        source_load: the number of token copies by the node that holds them. None assumes the same number on each node.
        crossing_cost: the imbalance worth accepting to avoid all crossings, if there are neither ``tokens`` nor a
            ``cost``. The default takes only savings that cost no balance; 1 costs balance on recorded loads.
        tokens: sampled tokens of the batch. None searches for balance.
        cost: the unit times of the cluster and the model. Without ``tokens``, every copy that leaves its node costs a
            crossing. Without ``cost``, all tokens of a node cross in half the time of its balanced compute
            (`relibra_jax.planning.node_placement.CROSSING`), and moves cost ``move_cost``.
        horizon: the number of batches that a placement is expected to serve. The time of a move is divided by it.
        refine: homes for similar loads, such as those before samples were reassigned. The search starts from them at
            a lower temperature, and so stays close to them. None starts from ``previous_home``. If all entries are
            EMPTY, the search also starts from ``previous_home``, but takes fewer steps by default, because more rounds
            follow.

    Returns:
        The homes and residents of the batch.

    Raises:
        ValueError: if ``steps`` is not an integer of at least 1 that fits int32, if a cost is not in 0..1e9, if
            ``horizon`` is not positive, or if the shapes disagree with the topology.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[9, 8, 2, 1]], [[7, 9, 2, 2]]])
    >>> home = place_experts(load, jnp.array([[0, 1, 2, 3]]), topology, key=jax.random.key(0)).home
    >>> (home // topology.home_slots).tolist()
    [[0, 1, 1, 0]]
    """
    return place_by_search(
        anneal,
        load,
        previous_home,
        topology,
        key=key,
        steps=steps,
        move_cost=move_cost,
        source_load=source_load,
        crossing_cost=crossing_cost,
        tokens=tokens,
        cost=cost,
        horizon=horizon,
        refine=refine,
    )


def place_by_search(
    search: Search,
    load: Int[Array, "M L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    steps: int | None = None,
    move_cost: float = 0.02,
    source_load: Num[Array, "M L N E"] | None = None,
    crossing_cost: float = 0.1,
    tokens: TokenSample | None = None,
    cost: Price | None = None,
    horizon: float = 1.0,
    refine: Int[Array, "L E"] | None = None,
) -> Placement:
    """Run `place_experts` with any search for items in bins.

    Args:
        search: the search that solves each level. With ``tokens``, it does not solve the level of nodes.
        load, previous_home, topology, key, steps, move_cost, source_load, crossing_cost, tokens, cost, horizon, refine:
            the arguments of `place_experts`.

    Returns:
        The homes and residents of the batch.

    Raises:
        ValueError: under the conditions of `place_experts`.
    """
    if steps is None:
        steps = min(10 * topology.num_experts**2, 10_000)
        steps = steps if refine is None else max(steps // 4, 1)
    _check(load.shape, previous_home.shape, topology, steps, move_cost, crossing_cost)
    check_positive("horizon", horizon)
    nodes, locals_ = topology.num_nodes, topology.ranks_per_node
    layers, experts = previous_home.shape
    per_node = experts // nodes
    previous = jnp.asarray(previous_home, jnp.int32)
    refine = jnp.full_like(previous, EMPTY) if refine is None else jnp.asarray(refine, jnp.int32)
    refining = (refine != EMPTY).all()
    home = jnp.where(refining, refine, previous)
    # Layers come last from here on, as in `Bins`.
    load = jnp.asarray(load, jnp.float32).transpose(2, 0, 1)
    if source_load is None:  # the same on every node, so that crossings do not favour any node
        by_source = jnp.broadcast_to(load[None] / nodes, (nodes, *load.shape))
    else:
        by_source = jnp.asarray(source_load, jnp.float32).transpose(2, 3, 0, 1)
    for_nodes, for_ranks = jax.random.split(key)
    # On one node nothing crosses, so only balance counts.
    in_time, replicas = tokens is not None and nodes > 1, topology.replica_slots > 0
    # If tokens are not counted, every copy crosses by itself.
    top_k = tokens.expert_ids.shape[-1] if tokens is not None and in_time else 1
    copies, options = load.sum() / layers, {"horizon": horizon, "move_cost": move_cost}
    prices = relative_prices(cost, copies, topology, num_layers=layers, top_k=top_k, **options)
    level = functools.partial(
        _place_level,
        search,
        previous=previous,
        crossing=(crossing_cost if cost is None else prices.crossing) * _crossing_share(by_source.sum(2)),
        nodes=nodes,
        move=None if cost is None else prices.move,
        hottest=jnp.where(refining, jnp.float32(REFINING), jnp.float32(HOTTEST)),
    )
    if tokens is not None and in_time:
        home_node, resident = place_on_nodes(
            by_source,
            tokens,
            (previous // per_node).T,
            (home // per_node).T,
            topology,
            key=for_nodes,
            steps=max(steps // 10, 1),
            hottest=jnp.where(refining, jnp.float32(REFINING), jnp.float32(time_search.HOTTEST)),
            prices=prices,
            hierarchical=cost is None or cost.hierarchical,
        )
        home = jax.vmap(_keep_slots, (1, 0, None))(home_node, previous, per_node)
    else:
        bins, level_key = (nodes, for_nodes) if replicas else (nodes * locals_, jax.random.split(key, 1)[0])
        home = level(home, load, 1, bins, steps=steps, move_cost=move_cost, key=level_key)
        home_node, by_copies = (home // per_node).T, Prices(1.0, 0.0, 0.0) if cost is None else prices
        resident = keep_residents(by_source, None, home_node, topology, by_copies, top_k=1)
    at_home = jnp.where(resident[:, :, None], 0, by_source).sum(0) if topology.resident_slots else load
    # Replicas even out the ranks of a node, so in a search for time no move inside a node pays. A search for balance
    # evens out the ranks, so that fewer replicas are needed; without replica slots its single level has done that.
    if in_time != replicas:
        factor = MOVE_COST_INSIDE if replicas else 1
        inside = {"move_cost": move_cost * factor, "move": None if cost is None else prices.move * factor}
        home = level(home, at_home, nodes, locals_, steps=max(steps // 4, 1), **inside, key=for_ranks)
    return Placement(home, residents_on_ranks(resident, by_source.sum(2), at_home.sum(1), home, topology))


def _place_level(
    search, home, load, domains, bins, *, previous, crossing, nodes, steps, move_cost, move, hottest, key
):
    """Search the experts of each domain for its bins, and return the new homes.

    The price of one move is ``move``, or that part of ``move_cost`` which is one expert's if ``move`` is None.
    """
    layers, experts = home.shape
    size = experts // (domains * bins)
    if bins == 1 or (size == 1 and domains == nodes):
        return home  # one bin, or one expert per rank of a node: nothing to gain
    if move is None:
        move = move_cost * bins**0.5 / (experts // domains)
    start = _fill_bins(load, previous, home, crossing, domains, bins, move)
    item = search(start, key, steps=steps, hottest=hottest)
    new_bin = (jnp.argsort(item, axis=0) // size).reshape(-1, domains, layers).swapaxes(0, 1)
    new_bin = (new_bin + bins * jnp.arange(domains)[:, None, None]).reshape(experts, layers).T
    new_bin = jnp.take_along_axis(new_bin, home, axis=-1)
    return jax.vmap(_keep_slots, (0, 0, None))(new_bin, previous, size)


def _check(load, home, topology, steps, move_cost, crossing_cost):
    experts = topology.num_experts
    if load[-1] != experts or home != (load[1], experts):
        raise ValueError(
            f"load{list(load)} and previous_home{list(home)} must agree on layers and {experts} experts"
        )
    check_integer("steps", steps, least=1)
    check_not_negative("move_cost", move_cost)
    check_not_negative("crossing_cost", crossing_cost)


def _crossing_share(source_load):
    """Return the share of a layer's token copies that cross if an expert's home is on each node, ``[N E L]``."""
    elsewhere = source_load.sum(0, keepdims=True) - source_load
    return elsewhere / jnp.maximum(source_load.sum((0, 1), keepdims=True), 1)


def _fill_bins(load, previous, home, crossing, domains, bins, move):
    """Make the problem of placing each domain's experts in its bins: items are slots of ``home``, rows are domains."""
    layers, experts = home.shape
    size = experts // domains
    expert = jnp.argsort(home, axis=-1).T

    def rows(array):  # [E ... L] to [size ... rows]
        parts = array.reshape(domains, size, *array.shape[1:])
        return jnp.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], domains * layers)

    share = rows(jnp.take_along_axis(load, expert[:, None], axis=0))
    share *= bins / jnp.maximum(share.sum((0, 1), keepdims=True), 1)
    old_bin = jnp.take_along_axis(previous.T, expert, axis=0) // (size // bins)
    old_bin = rows(old_bin - bins * (jnp.arange(experts)[:, None] // size))
    moves = old_bin[None] != jnp.arange(bins)[:, None, None]
    cost = moves * jnp.float32(move)
    if domains == 1:  # with more domains, the node of each expert is fixed
        crossing = jnp.take_along_axis(crossing, expert[None], axis=1)
        cost += jnp.repeat(crossing, bins // crossing.shape[0], axis=0)
    item = jnp.tile(jnp.arange(size, dtype=jnp.int32)[:, None], (1, domains * layers))
    return Bins(share, cost, item)


def _keep_slots(new_bin, previous_home, size):
    """Choose slots in one layer: an expert that stays in its bin keeps its slot, the others fill the free slots."""
    stays = previous_home // size == new_bin
    free = jnp.argsort(jnp.zeros_like(stays).at[previous_home].set(stays), stable=True).astype(jnp.int32)
    movers = jnp.argsort(jnp.where(stays, new_bin.size, new_bin), stable=True)
    return jnp.where(stays, previous_home, jnp.zeros_like(previous_home).at[movers].set(free))
