"""Inter-batch reordering: choose the home slot of each expert for the next batch.

Replicas even out the ranks of a node, but not the nodes. So every layer is solved in two levels: experts to nodes, then
each node's experts to its ranks. Without replica slots there is one level, experts to ranks. If the search is for time,
`relibra_jax.planning.node_placement` places experts on nodes, and ranks are evened out only if there are no replica
slots. Otherwise every level is the same problem: I items with shares ``x[i, m]`` of the mean bin load of the batch go
into bins of equal size, and we

    minimise  sum_m max_b sum_{i in b} x[i, m]  +  sum_b sum_{i in b} cost[b, i].

The first term is the imbalance over the batch. ``cost`` is, in the same unit, the part that does not depend on the
other items: the price of moving an expert and of token copies that cross nodes. The search itself is in
`relibra_jax.planning.bin_search`.
"""

import dataclasses
import functools
from typing import Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Topology, visited_ranks
from relibra_jax.planning import bin_search
from relibra_jax.planning.annealing import REFINING
from relibra_jax.planning.bin_search import Bins, search_bins
from relibra_jax.planning.node_placement import (
    RelativePrices,
    keep_residents,
    place_on_nodes,
    relative_prices,
)
from relibra_jax.planning.portfolio import keep_slots
from relibra_jax.planning.residents import residents_on_ranks
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import INT32_MAX, check_integer

OVER_LOAD: Final = 64.0
"""How much more visits and moves count than the load of ranks on a single node with replica slots, because replicas
even out most of the load. With 8, visits of synthetic routing to 128 experts on 8 ranks fall less; on recorded routing
both are level."""
MORE_STEPS: Final = 4
"""The number of steps on a single node, as a multiple of those of several nodes, because there are more bins."""


@runtime_checkable
class BinSearch(Protocol):
    """Put items into bins, as `relibra_jax.planning.bin_search.search_bins` does."""

    def __call__(
        self, start: Bins, key: PRNGKeyArray, *, steps: int, hottest: Float[jax.Array, ""] | float
    ) -> Int[jax.Array, "I rows"]: ...


@checks_arguments
@functools.partial(jax.jit, static_argnames=("topology", "steps", "search"))
def place_experts(
    request: PlanRequest,
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    steps: int | None = None,
    search: BinSearch = search_bins,
) -> Placement:
    """Choose the home of every expert and the residents for a batch so that the batch takes the least time.

    With ``request.routes`` the search minimises modelled time: the largest node load and the exchange between pairs of
    nodes of every micro-batch, and the time of moving experts and pushing residents
    (`relibra_jax.planning.node_placement`). Experts that tokens choose together are placed together first
    (`relibra_jax.planning.expert_quads`), unless the search starts from homes of an earlier round. If there are replica
    slots, the ranks of a node are then left to replicas.
    Without routes the search minimises imbalance over nodes and inside them, with prices for moves and for copies that
    cross. On a single node, where nothing crosses, ranks take the place of nodes if tokens are sent to a rank once
    (`relibra_jax.contract.types.Topology.visited`); otherwise the search minimises imbalance.
    In every layer the result is at least as good as the start, so experts move only if the gain pays for the move.

    Source: ReLibra (arXiv 2605.08639), inter-batch expert reordering; the module docstring states the objective.

    Args:
        request: the load of the batch, the routes of sampled tokens, the price, and the homes to start from. Without a
            start, the search starts from ``previous_home``. With one, it starts at a lower temperature, and so stays
            close to it; if all its entries are EMPTY, it starts from ``previous_home`` too, but takes fewer steps by
            default, because more rounds follow. Without routes, every copy that leaves its node pays for a crossing.
        previous_home: flat home slot of each expert before the batch. An expert that stays on its rank keeps its slot;
            an expert that moves pays for the move.
        topology: the expert-parallel group. Of ``replica_slots``, only whether there are any matters.
        key: random key, consumed; the same key gives the same placement.
        steps: the number of annealing steps between nodes; inside nodes it is a quarter. 40,000 is thorough. A search
            for time takes a tenth of these steps, because each of them prices sets of tokens, and up to half as many
            for quads. None takes ten steps per pair of experts, at most 10,000, and a quarter of that if the request
            has a start. An explicit number applies to each round.
        search: the search that puts experts into nodes and ranks. With routes, it does not solve the level of nodes.

    Returns:
        The homes and residents of the batch.

    Raises:
        ValueError: if ``steps`` is below 1 or does not fit int32, or if the shapes disagree with the topology.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[9, 8, 2, 1]], [[0, 0, 0, 0]]]], [[[[7, 9, 2, 2]], [[0, 0, 0, 0]]]]])
    >>> home = place_experts(PlanRequest(load), jnp.array([[0, 1, 2, 3]]), topology, key=jax.random.key(0)).home
    >>> (home // topology.home_slots).tolist()
    [[0, 1, 1, 0]]
    """
    if steps is None:
        steps = min(10 * topology.num_experts**2, 10_000)
        steps = steps if request.start is None else max(steps // 4, 1)
    _check(request.load.shape, previous_home.shape, topology, steps)
    if (
        request.routes is not None
        and request.price.hierarchical
        and topology.num_nodes == 1 < topology.num_ranks
    ):
        at_ranks = _at_ranks(request, topology)
        ranks = dataclasses.replace(topology.visited, resident_slots=0)
        steps = min(MORE_STEPS * steps, INT32_MAX)
        placed = place_experts(at_ranks, previous_home, ranks, key=key, steps=steps, search=search)
        return Placement.without_residents(placed.home, topology)
    view = _view(request, previous_home, topology)
    for_nodes, for_ranks = jax.random.split(key)
    level = functools.partial(_place_level, search, view, nodes=topology.num_nodes)
    # On one node nothing crosses, so only balance counts.
    in_time, replicas = request.routes is not None and topology.num_nodes > 1, topology.replica_slots > 0
    if in_time:
        home, resident = _place_nodes_in_time(
            request, view, topology, key=for_nodes, steps=max(steps // 10, 1)
        )
    else:
        bins = topology.num_nodes if replicas else topology.num_ranks
        home = level(view.home, view.load, 1, bins, steps=steps, key=for_nodes)
        home_node = (home // (topology.num_experts // topology.num_nodes)).T
        resident = keep_residents(view.by_source, None, home_node, topology, view.prices, top_k=1)
    at_home = (
        jnp.where(resident[:, :, None], 0, view.by_source).sum(0) if topology.resident_slots else view.load
    )
    # Replicas even out the ranks of a node, so in a search for time no move inside a node pays. A search for balance
    # evens out the ranks, so that fewer replicas are needed; without replica slots its single level has done that.
    if in_time != replicas:
        inside = (topology.num_nodes, topology.ranks_per_node)
        home = level(home, at_home, *inside, steps=max(steps // 4, 1), key=for_ranks)
    copies, home_copies = view.by_source.sum(2), at_home.sum(1)
    return Placement(home, residents_on_ranks(resident, copies, home_copies, home, topology))


def _at_ranks(request: PlanRequest, topology: Topology) -> PlanRequest:
    """Return the request for `Topology.visited` of a single node, whose ranks take the place of nodes."""
    price, weight = request.price, OVER_LOAD if topology.replica_slots else 1.0
    price = dataclasses.replace(price, crossing=weight * price.visit(topology), move=weight * price.move)
    tokens = None if request.tokens is None else visited_ranks(request.tokens, topology, axis=-2)
    return request._replace(load=visited_ranks(request.load, topology), price=price, tokens=tokens)


class _View(NamedTuple):
    """The inputs of the searches. Layers are the last axis of loads, as in `Bins`."""

    load: Float[jax.Array, "E M L"]
    by_source: Float[jax.Array, "N E M L"]
    """The load by the node that holds the tokens."""
    previous: Int[jax.Array, "L E"]
    """Flat home slot of each expert before the batch."""
    home: Int[jax.Array, "L E"]
    """The homes at which the search starts."""
    refining: Bool[jax.Array, ""]
    """Whether the search starts from homes that were found for the same batch."""
    prices: RelativePrices


def _view(request: PlanRequest, previous_home: Int[Array, "L E"], topology: Topology) -> _View:
    previous = jnp.asarray(previous_home, jnp.int32)
    start = jnp.full_like(previous, EMPTY) if request.start is None else jnp.asarray(request.start, jnp.int32)
    refining = (start != EMPTY).all()
    load = jnp.asarray(request.by_expert, jnp.float32).transpose(2, 0, 1)
    by_source = jnp.asarray(request.by_node, jnp.float32).transpose(2, 3, 0, 1)
    in_time = request.routes is not None and topology.num_nodes > 1
    # If tokens are not counted, every copy crosses by itself.
    top_k = request.routes.expert_ids.shape[-1] if request.routes is not None and in_time else 1
    layers = len(previous)
    prices = relative_prices(request.price, load.sum() / layers, topology, num_layers=layers, top_k=top_k)
    return _View(load, by_source, previous, jnp.where(refining, start, previous), refining, prices)


def _place_nodes_in_time(
    request: PlanRequest, view: _View, topology: Topology, *, key: PRNGKeyArray, steps: int
) -> tuple[Int[jax.Array, "L E"], jax.Array]:
    """Place experts on nodes for time, and return the homes, and whether each node has a resident, ``[N E L]``."""
    assert request.routes is not None
    per_node = topology.num_experts // topology.num_nodes
    home_node, resident = place_on_nodes(
        view.by_source,
        request.routes,
        (view.previous // per_node).T,
        (view.home // per_node).T,
        topology,
        key=key,
        steps=steps,
        refining=view.refining,
        prices=view.prices,
        hierarchical=request.price.hierarchical,
    )
    return jax.vmap(keep_slots, (1, 0, None))(home_node, view.previous, per_node), resident


def _place_level(
    search: BinSearch,
    view: _View,
    home,
    load,
    domains: int,
    bins: int,
    *,
    nodes: int,
    steps: int,
    key: PRNGKeyArray,
) -> Int[jax.Array, "L E"]:
    """Search for the bin of each expert in every domain, and return the new homes."""
    layers, experts = home.shape
    size = experts // (domains * bins)
    if bins == 1 or (size == 1 and domains == nodes):
        return home  # one bin, or one expert per rank of a node: nothing to gain
    crossing = view.prices.crossing * _crossing_share(view.by_source.sum(2))
    start = _fill_bins(load, view.previous, home, crossing, domains, bins, view.prices.move)
    hottest = jnp.where(view.refining, jnp.float32(REFINING), jnp.float32(bin_search.HOTTEST))
    item = search(start, key, steps=steps, hottest=hottest)
    new_bin = (jnp.argsort(item, axis=0) // size).reshape(-1, domains, layers).swapaxes(0, 1)
    new_bin = (new_bin + bins * jnp.arange(domains)[:, None, None]).reshape(experts, layers).T
    new_bin = jnp.take_along_axis(new_bin, home, axis=-1)
    return jax.vmap(keep_slots, (0, 0, None))(new_bin, view.previous, size)


def _check(load, home, topology: Topology, steps: int) -> None:
    grid, experts = (topology.num_nodes, topology.ranks_per_node), topology.num_experts
    if load[2:] != (*grid, experts) or home != (load[1], experts):
        raise ValueError(
            f"load{list(load)} and previous_home{list(home)} must agree on layers, {grid[0]} nodes x {grid[1]} ranks"
            f" and {experts} experts"
        )
    check_integer("steps", steps, least=1)


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
