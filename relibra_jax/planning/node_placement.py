"""Choose the node of each expert's home and the residents of each node so that a batch takes the least time.

Homes and residents depend on each other: an expert that is resident on every node may have its home anywhere, and a
node needs no resident copy of an expert whose home it has. So the two alternate: choose residents for the current
homes, then homes for the crossings that remain, and so on. Residents come first, so that homes move only for crossings
that residents do not save. A search that does not start from suitable homes places quads of experts first.
"""

import functools
import math
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from relibra_jax.contract.planner import PlacedRoutes
from relibra_jax.contract.types import Price, Topology
from relibra_jax.planning.annealing import REFINING
from relibra_jax.planning.expert_quads import has_quads, search_quads
from relibra_jax.planning.node_search import HOTTEST, NodeProblem, move_times, search_nodes
from relibra_jax.planning.residents import choose_residents
from relibra_jax.planning.token_bits import TokenBits, token_bits

ALTERNATIONS: Final = 2
"""The number of searches for homes, each followed by a choice of residents, if there are resident slots. With one
search the modelled time of recorded loads on four nodes was 1.4% longer; a third search changed nothing."""
HOTTEST_LATER: Final = 1e-3
"""The initial temperature of annealing from the second search on."""


class NodePlacement(NamedTuple):
    """The nodes of homes and residents."""

    home_node: Int[jax.Array, "E L"]
    """The node of each expert's home."""
    resident: Bool[jax.Array, "N E L"]
    """Whether a node keeps a copy of an expert."""


class RelativePrices(NamedTuple):
    """Times of transfers, in units of the balanced compute of a layer in a batch."""

    crossing: Float[jax.Array, ""] | float
    """The time in which all tokens of a node cross, or one copy of each on the flat path."""
    move: Float[jax.Array, ""] | float
    """The time of moving one expert to another rank."""
    push: Float[jax.Array, ""] | float
    """The time of pushing one resident to a node and returning its gradient, in all updates of the batch."""


def relative_prices(
    price: Price, copies: Float[jax.Array, ""], topology: Topology, *, num_layers: int, top_k: int
) -> RelativePrices:
    """Convert a price to units of balanced compute.

    A batch waits for the transfers of the busiest rank, whose number exceeds the mean by more if there are fewer
    layers. The estimate assumes that a quarter of the experts move.

    Args:
        price: the price of the batch.
        copies: the number of token copies of a layer in the batch.
        topology: the expert-parallel group.
        num_layers: L, the number of MoE layers.
        top_k: K, the number of experts of a token.

    Returns:
        The prices of crossings, moves and pushes.
    """
    compute = jnp.float32(price.copy) * jnp.maximum(copies, 1) / price.data_parallel  # of all ranks together
    moves = _busiest_over_mean(num_layers * topology.home_slots / 4, topology)
    pushes = _busiest_over_mean(float(num_layers * max(topology.resident_slots, 1)), topology)
    return RelativePrices(
        jnp.float32(price.crossing) / (jnp.float32(price.copy) * top_k),
        jnp.float32(price.move * moves) / compute,  # by all ranks in parallel
        jnp.float32(price.push * pushes) * topology.num_nodes / compute,  # by the ranks of a node in parallel
    )


def _busiest_over_mean(mean: float, topology: Topology) -> float:
    """Estimate the number of transfers of the busiest rank over all layers, as a multiple of the mean.

    The ranks of transfers are taken as random, so counts deviate from their mean by its square root. The largest of P
    counts is expected to be ``sqrt(2 log P)`` such deviations above the mean.
    """
    return 1 + (2 * math.log(topology.num_ranks) / mean) ** 0.5


def place_on_nodes(
    load: Float[jax.Array, "N E M L"],
    routes: PlacedRoutes,
    old_node: Int[jax.Array, "E L"],
    start: Int[jax.Array, "E L"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    steps: int,
    refining: Bool[jax.Array, ""] | bool,
    prices: RelativePrices,
    hierarchical: bool = True,
) -> NodePlacement:
    """Choose the nodes of homes and residents by modelled time.

    Args:
        load: the number of token copies by the node that holds them.
        routes: the routes of sampled tokens of the same batch.
        old_node: the node of each expert before the batch.
        start: the node of each expert from which the search starts.
        topology: the expert-parallel group.
        key: random key, consumed.
        steps: the number of annealing steps of all searches for single experts together.
        refining: whether the start suits the batch, so that the search stays near it. Otherwise quads of experts are
            placed first (`relibra_jax.planning.expert_quads`), with half the steps of one search.
        prices: the prices of transfers, as `relative_prices` returns them.
        hierarchical: whether a token crosses to a node once. Otherwise each of its copies does.

    Returns:
        The nodes of homes and residents.
    """
    nodes, top_k = topology.num_nodes, routes.expert_ids.shape[-1]
    bits, judge = token_bits(routes, topology, num_micro_batches=load.shape[2], scale=2).halves()
    share = load * (nodes / jnp.maximum(load.sum((0, 1, 2), keepdims=True), 1))
    searches = ALTERNATIONS if topology.resident_slots else 1
    in_quads = has_quads(topology, top_k=top_k, hierarchical=hierarchical)
    crossing = prices.crossing
    if not hierarchical:
        # A visiting token brings as many copies as it has experts on the node, averaged over random experts.
        crossing *= top_k / (nodes * (1 - (1 - 1 / nodes) ** top_k))

    def residents(home_node):
        return keep_residents(share, bits if hierarchical else None, home_node, topology, prices, top_k=top_k)

    def search(number, home_node, resident):
        is_resident = resident[:, :, None]
        held = resident.swapaxes(0, 1)[:, None, :, None]

        def to_home(tokens: TokenBits) -> TokenBits:
            """Leave out the tokens whose node holds the expert as a resident."""
            return tokens._replace(bits=jnp.where(held, 0, tokens.bits))

        problem = NodeProblem(
            jnp.where(is_resident, 0, share).sum(0),
            jnp.where(is_resident, share, 0).sum(1),
            to_home(bits),
            jnp.float32(crossing),
            move_times(old_node, prices.move, num_nodes=nodes),
            to_home(judge),
        )
        steps_each = max(1, steps // searches)
        suits = jnp.broadcast_to(jnp.asarray(refining), start.shape[1:])
        if in_quads:
            by_quads = functools.partial(
                search_quads,
                problem,
                key=jax.random.fold_in(key, 0),
                top_k=top_k,
                steps=max(1, steps_each // 2),
            )
            begins = (number == 1) & ~jnp.asarray(refining)
            placed = jax.lax.cond(begins, by_quads, lambda home_node: home_node, home_node)
            suits, home_node = suits | (placed != home_node).any(0), placed
        hottest = jnp.where(number == 1, jnp.float32(HOTTEST), jnp.float32(HOTTEST_LATER))
        return search_nodes(
            problem,
            home_node,
            jax.random.fold_in(key, number),
            top_k=top_k,
            steps=steps_each,
            hottest=jnp.where(suits, jnp.float32(REFINING), hottest),
        )

    if searches == 1:
        first_residents = residents(start)
        return NodePlacement(search(1, start, first_residents), first_residents)

    def alternate(number, placement):
        # First only residents, for the initial homes; then homes and residents. One loop compiles each search once.
        home_node = jax.lax.cond(number > 0, search, lambda _, home, resident: home, number, *placement)
        return NodePlacement(home_node, residents(home_node))

    no_residents = jnp.zeros((nodes, *start.shape), bool)
    return jax.lax.fori_loop(0, searches + 1, alternate, NodePlacement(start, no_residents))


def keep_residents(
    load: Float[jax.Array, "N E M L"],
    bits: TokenBits | None,
    home_node: Int[jax.Array, "E L"],
    topology: Topology,
    prices: RelativePrices,
    *,
    top_k: int,
) -> Bool[jax.Array, "N E L"]:
    """Choose the residents of every node for given homes, with `relibra_jax.planning.residents.choose_residents`.

    Args:
        load: the number of token copies by the node that holds them, in any unit.
        bits: the sampled tokens that use each expert. None if every copy crosses separately.
        home_node: the node of each expert's home.
        topology: the expert-parallel group. Without resident slots there are no residents.
        prices: the prices of transfers, as `relative_prices` returns them.
        top_k: K, the number of experts of a token.

    Returns:
        Whether each node keeps a copy of each expert.
    """
    count = topology.ranks_per_node * topology.resident_slots
    if not count or topology.num_nodes == 1:
        return jnp.zeros((topology.num_nodes, *home_node.shape), bool)
    copies = load.sum(2)
    copies *= topology.num_nodes * top_k / jnp.maximum(copies.sum((0, 1), keepdims=True), 1)
    return choose_residents(bits, copies, home_node, crossing=prices.crossing, push=prices.push, count=count)
