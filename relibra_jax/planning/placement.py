"""Inter-batch reordering: which home slot owns each expert for the next batch.

Replicas mend imbalance inside a node, and only there: what is left is the imbalance between nodes. So every
layer is solved twice, experts to nodes and then each node's experts to its ranks; without replica slots nothing
mends a rank, and it is solved once, experts to ranks. Where time is planned, experts go to nodes in time
(`relibra_jax.planning.node_placement`), and ranks are made even only if no replicas mend them. Else the problem is the
same each time: I items with shares ``x[i, m]`` of the mean bin load of the batch, in bins of equal size, and

    minimise  sum_m max_b sum_{i in b} x[i, m]  +  sum_b sum_{i in b} cost[b, i].

The first term is the imbalance over the batch. ``cost`` holds, in the same unit, what does not depend on the
other items: the price of moving an expert and of token copies that cross nodes.

The search itself is in `relibra_jax.planning.annealing`.
"""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num, PRNGKeyArray

from relibra_jax.limits import check_integer, check_not_negative, check_positive
from relibra_jax.planning import time_search
from relibra_jax.planning.annealing import HOTTEST, REFINING, Bins, anneal
from relibra_jax.planning.node_placement import Prices, keep_residents, place_on_nodes, relative_prices
from relibra_jax.planning.residents import residents_on_ranks
from relibra_jax.types import EMPTY, Array, TokenSample, Topology, UnitTimes

INSIDE: Final = 4
"""How much dearer a move is between ranks of a node than between nodes. Replicas mend what it leaves there: on
recorded loads balance and replicas stayed the same, and 41% (2 nodes) and 20% (4 nodes) of the moves went away."""

STATIC_ARGUMENTS: Final = ("topology", "steps", "move_cost", "crossing_cost", "horizon")
"""What is static when a placement is compiled."""


class Placement(NamedTuple):
    """Where experts are for a whole batch."""

    home: Int[jax.Array, "L E"]
    """Flat home slot of each expert, int32; exactly H experts a rank."""
    resident: Int[jax.Array, "L N G B"]
    """The logical expert in each resident slot, EMPTY for none; never one that has its home in the node."""


type Search = Callable[..., jax.Array]
"""``(start, key, *, steps, hottest) -> item[I rows]``, as `relibra_jax.planning.annealing.anneal`."""


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
    cost: UnitTimes | None = None,
    horizon: float = 1.0,
    refine: Int[Array, "L E"] | None = None,
) -> Placement:
    """Choose every expert's home for a batch, and its residents, so that the batch takes least time.

    With ``tokens`` time is what is searched: the largest load of a node and the busiest exchange in every micro-batch,
    weighed by ``cost``, and what moving experts and pushing residents takes (`relibra_jax.planning.node_placement`).
    Ranks inside a node are then left to replicas, if there are replica slots. Without tokens, or on one node, where
    nothing crosses, even load over nodes and inside them is, with a price for copies that cross. A search never ends
    worse than it starts, layer by layer, so experts move only where the gain pays for the move.

    Source: ReLibra (arXiv 2605.08639), inter-batch expert reordering; the file's docstring has the objective.

    Args:
        load: token copies of each expert, from all ranks together; used as float32 shares.
        previous_home: flat home slots before the batch. An expert that stays on its rank keeps its slot, and one
            that leaves it costs something.
        topology: the expert-parallel group; of ``replica_slots`` it only matters whether there are any.
        key: random key, consumed; the same key gives the same placement.
        steps: annealing steps between nodes, and four times fewer inside them; 40,000 is thorough. In time, where a
            step prices sets of tokens, they are a tenth. None is ten for each pair of experts, at most 10,000, and a
            quarter of that where placement and assignment take turns (``refine``). Given steps are those of each turn.
        move_cost: moving all experts of a layer to other nodes must lower its imbalance by this much times the
            square root of N, as the imbalance to be gained also grows with N. 0 is thorough. Between nodes ``cost``
            replaces it.
        source_load: the token copies by the node where they lie; None for as many on each node.
        crossing_cost: the imbalance worth accepting to have no copy cross nodes, where there are no ``tokens``. At the
            default what is free is taken; 1 costs balance on recorded loads.
        tokens: some of the batch's tokens.
        cost: the unit times of the cluster and the model. Without them all tokens of a node cross in half the time of
            its balanced compute (`CROSSING`), and moves cost ``move_cost``.
        horizon: how many batches a placement is expected to serve, over which the time of a move is spread.
        refine: a placement to start from instead of ``previous_home``, and to stay close to: found for loads much
            like these, such as those before samples were assigned. None where there is none; EMPTY throughout says
            besides that turns follow, so that fewer steps are taken by default.

    Returns:
        Placement.

    Raises:
        ValueError: if ``steps`` is not an integer of at least 1 that int32 holds, a cost is not in 0..1e9, ``horizon``
            is not positive, or shapes disagree with the topology.

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
    cost: UnitTimes | None = None,
    horizon: float = 1.0,
    refine: Int[Array, "L E"] | None = None,
) -> Placement:
    """`place_experts` with any search for items in bins: the levels, the costs, and what keeps its slot.

    Args:
        search: the search that solves each level; the level of nodes only without ``tokens``.
        load, previous_home, topology, key, steps, move_cost, source_load, crossing_cost, tokens, cost, horizon, refine:
            as in `place_experts`.

    Returns:
        Placement.

    Raises:
        ValueError: as `place_experts` says.
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
    if source_load is None:  # the same everywhere, so that no node is nearer than another
        lies = jnp.broadcast_to(load[None] / nodes, (nodes, *load.shape))
    else:
        lies = jnp.asarray(source_load, jnp.float32).transpose(2, 3, 0, 1)
    level = functools.partial(
        _place_level,
        search,
        previous=previous,
        crossing=crossing_cost * _crossing_share(lies.sum(2)),
        nodes=nodes,
        hottest=jnp.where(refining, jnp.float32(REFINING), jnp.float32(HOTTEST)),
    )
    for_nodes, for_ranks = jax.random.split(key)
    in_time, replicas = (
        tokens is not None and nodes > 1,
        topology.replica_slots > 0,
    )  # on one node nothing crosses
    if tokens is not None and in_time:
        top_k = tokens.expert_ids.shape[-1]
        copies, options = load.sum() / layers, {"horizon": horizon, "move_cost": move_cost}
        home_node, resident = place_on_nodes(
            lies,
            tokens,
            (previous // per_node).T,
            (home // per_node).T,
            topology,
            key=for_nodes,
            steps=max(steps // 10, 1),
            hottest=jnp.where(refining, jnp.float32(REFINING), jnp.float32(time_search.HOTTEST)),
            prices=relative_prices(cost, copies, topology, num_layers=layers, top_k=top_k, **options),
            hierarchical=cost is None or cost.hierarchical,
        )
        home = jax.vmap(_keep_slots, (1, 0, None))(home_node, previous, per_node)
    else:
        bins, chosen = (nodes, for_nodes) if replicas else (nodes * locals_, jax.random.split(key, 1)[0])
        home = level(home, load, 1, bins, steps=steps, move_cost=move_cost, key=chosen)
        home_node, by_copies = (home // per_node).T, Prices(1.0, 0.0, 0.0)
        resident = keep_residents(lies, None, home_node, topology, by_copies, top_k=1)
    at_home = jnp.where(resident[:, :, None], 0, lies).sum(0) if topology.resident_slots else load
    # Replicas mend what a node's ranks carry unevenly, so that in time no move inside a node pays. Where only balance
    # is planned ranks are made even, so that fewer replicas do; without replica slots one level has done that.
    if in_time != replicas:
        inside = move_cost * (INSIDE if replicas else 1)
        home = level(home, at_home, nodes, locals_, steps=max(steps // 4, 1), move_cost=inside, key=for_ranks)
    return Placement(home, residents_on_ranks(resident, lies.sum(2), at_home.sum(1), home, topology))


def _place_level(
    search, home, load, domains, bins, *, previous, crossing, nodes, steps, move_cost, hottest, key
):
    """Homes after a search for the experts of each of ``domains`` in its ``bins``."""
    layers, experts = home.shape
    size = experts // (domains * bins)
    if bins == 1 or (size == 1 and domains == nodes):
        return home  # one bin, or one expert on each of a node's ranks: nothing to gain
    start = _fill_bins(load, previous, home, crossing, domains, bins, move_cost)
    item = search(start, key, steps=steps, hottest=hottest)
    chosen = (jnp.argsort(item, axis=0) // size).reshape(-1, domains, layers).swapaxes(0, 1)
    chosen = (chosen + bins * jnp.arange(domains)[:, None, None]).reshape(experts, layers).T
    chosen = jnp.take_along_axis(chosen, home, axis=-1)
    return jax.vmap(_keep_slots, (0, 0, None))(chosen, previous, size)


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
    """Copies of each expert that would cross nodes if it lived in each, over all copies of its layer: [N E L]."""
    away = source_load.sum(0, keepdims=True) - source_load
    return away / jnp.maximum(source_load.sum((0, 1), keepdims=True), 1)


def _fill_bins(load, previous, home, crossing, domains, bins, move_cost):
    """The problem of placing each domain's experts in its bins; items are slots of ``home``, rows domain by domain."""
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
    moved = old_bin[None] != jnp.arange(bins)[:, None, None]
    cost = moved * jnp.float32(move_cost * bins**0.5 / size)
    if domains == 1:  # else its node is decided
        crossing = jnp.take_along_axis(crossing, expert[None], axis=1)
        cost += jnp.repeat(crossing, bins // crossing.shape[0], axis=0)
    item = jnp.tile(jnp.arange(size, dtype=jnp.int32)[:, None], (1, domains * layers))
    return Bins(share, cost, item)


def _keep_slots(new_bin, previous_home, size):
    """Slots of one layer: who stays in its bin keeps its slot, the others fill the free slots in order."""
    stays = previous_home // size == new_bin
    free = jnp.argsort(jnp.zeros_like(stays).at[previous_home].set(stays), stable=True).astype(jnp.int32)
    movers = jnp.argsort(jnp.where(stays, new_bin.size, new_bin), stable=True)
    return jnp.where(stays, previous_home, jnp.zeros_like(previous_home).at[movers].set(free))
