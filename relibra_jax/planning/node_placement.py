"""Which node each expert lives on, and which experts each node keeps a copy of, so that a batch takes least time.

Homes and residents depend on each other: an expert that every node keeps a copy of may live anywhere, and a node needs
no copy of what lives there. So they take turns: residents for the homes as they are, homes for what the residents leave
to cross, and so on. Residents come first, so that homes move only for what residents do not save.
"""

import math
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from relibra_jax.planning.residents import choose_residents
from relibra_jax.planning.time_search import HOTTEST, NodeProblem, search_nodes
from relibra_jax.planning.token_bits import TokenBits, token_bits
from relibra_jax.types import TokenSample, Topology, UnitTimes

TURNS: Final = 2
"""Turns of homes and residents, where there are resident slots. With one of them recorded loads took 1.4% longer on
four nodes; a third changed nothing."""
LATER: Final = 1e-3
"""Where annealing starts in the second turn and after it."""
CROSSING: Final = 0.5
"""The time in which all tokens of a node cross, in units of its balanced compute, where no cluster is given. On NVLink
nodes with 8 x 400 Gb/s between them it is 0.57 for gpt-oss-20b, 0.54 for Qwen3-235B, 0.40 for DeepSeek-V3 and 1.07 for
Qwen3-30B by the cost model."""


class NodePlacement(NamedTuple):
    """Where experts are, on the level of nodes."""

    home_node: Int[jax.Array, "E L"]
    """The node of each expert's home."""
    resident: Bool[jax.Array, "N E L"]
    """Whether a node keeps a copy of an expert."""


class Prices(NamedTuple):
    """Times in units of the balanced compute of a layer in a batch."""

    crossing: Float[jax.Array, ""] | float
    """All tokens of a node cross, or one copy of each of them on the flat path."""
    move: Float[jax.Array, ""] | float
    """One expert moves to another node."""
    push: Float[jax.Array, ""] | float
    """A node gets one resident and returns its gradient, in all updates of the batch."""


def relative_prices(
    cost: UnitTimes | None,
    copies: Float[jax.Array, ""],
    topology: Topology,
    *,
    num_layers: int,
    top_k: int,
    horizon: float,
    move_cost: float,
) -> Prices:
    """What the search weighs against balanced compute.

    Args:
        cost: the unit times; None for `CROSSING`, ``move_cost``, and residents that cost nothing.
        copies: the token copies of a layer in the batch.
        topology: the expert-parallel group.
        num_layers: L. The busiest rank's transfers are waited for; the fewer layers, the further it is from the mean.
            A quarter of the experts are taken to move.
        top_k: K, the experts of a token.
        horizon: the batches over which the time of a move is spread.
        move_cost: the price of moving all experts, over the square root of N, where there is no ``cost``.
    """
    if cost is None:
        return Prices(CROSSING, move_cost * topology.num_nodes**0.5 / topology.num_experts, 0.0)
    compute = jnp.float32(cost.copy) * jnp.maximum(copies, 1)  # of all ranks together
    moves = _busiest_over_mean(num_layers * topology.home_slots / 4, topology)
    pushes = _busiest_over_mean(float(num_layers * max(topology.resident_slots, 1)), topology)
    return Prices(
        jnp.float32(cost.crossing) / (jnp.float32(cost.copy) * top_k),
        jnp.float32(cost.move * moves) / (compute * horizon),  # by all ranks side by side
        jnp.float32(cost.push * pushes) * topology.num_nodes / compute,  # by the ranks of a node side by side
    )


def _busiest_over_mean(mean: float, topology: Topology) -> float:
    """How much more than the mean of ranks the busiest one sends or receives, over all layers together.

    Transfers fall on ranks as they come, so counts scatter by the square root of their mean, and of P ranks one is
    expected ``sqrt(2 log P)`` of that above.
    """
    return 1 + (2 * math.log(topology.num_ranks) / mean) ** 0.5


def place_on_nodes(
    load: Float[jax.Array, "N E M L"],
    tokens: TokenSample,
    old_node: Int[jax.Array, "E L"],
    start: Int[jax.Array, "E L"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    steps: int,
    hottest: Float[jax.Array, ""] | float = HOTTEST,
    prices: Prices,
    hierarchical: bool = True,
) -> NodePlacement:
    """Choose homes and residents on the level of nodes by modelled time.

    Args:
        load: token copies by the node where they lie.
        tokens: sampled tokens of the same batch.
        old_node: the node of each expert before the batch.
        start: the node of each expert from which the search starts.
        topology: the expert-parallel group.
        key: random key, consumed.
        steps: annealing steps of all turns together.
        hottest: the temperature of the first step of the first turn.
        prices: from `relative_prices`.
        hierarchical: whether a token crosses to a node once; otherwise each of its copies does.

    Returns:
        NodePlacement.
    """
    nodes, top_k = topology.num_nodes, tokens.expert_ids.shape[-1]
    bits, judge = token_bits(tokens, topology, num_micro_batches=load.shape[2], scale=2).halves()
    share = load * (nodes / jnp.maximum(load.sum((0, 1, 2), keepdims=True), 1))
    turns = TURNS if topology.resident_slots else 1
    crossing = prices.crossing
    if not hierarchical:
        # As many copies cross as a visiting token has on a node, if its experts are anywhere.
        crossing *= top_k / (nodes * (1 - (1 - 1 / nodes) ** top_k))

    def residents(home_node):
        return keep_residents(share, bits if hierarchical else None, home_node, topology, prices, top_k=top_k)

    def search(number, home_node, resident):
        kept = resident[:, :, None]

        def wanted(tokens: TokenBits) -> TokenBits:
            """The tokens that want an expert at its home."""
            return tokens._replace(bits=jnp.where(resident.swapaxes(0, 1)[:, None, :, None], 0, tokens.bits))

        problem = NodeProblem(
            jnp.where(kept, 0, share).sum(0),
            jnp.where(kept, share, 0).sum(1),
            wanted(bits),
            jnp.float32(crossing),
            old_node,
            jnp.float32(prices.move),
            wanted(judge),
        )
        return search_nodes(
            problem,
            home_node,
            jax.random.fold_in(key, number),
            num_nodes=nodes,
            top_k=top_k,
            steps=max(1, steps // turns),
            hottest=jnp.where(number == 1, hottest, jnp.minimum(hottest, LATER)),
        )

    if turns == 1:
        nothing = residents(start)
        return NodePlacement(search(1, start, nothing), nothing)

    def turn(number, placement):
        # Residents for the homes at the start, then homes and residents in turns: one loop compiles each of them once.
        home_node = jax.lax.cond(number > 0, search, lambda _, home, resident: home, number, *placement)
        return NodePlacement(home_node, residents(home_node))

    nowhere = jnp.zeros((nodes, *start.shape), bool)
    return jax.lax.fori_loop(0, turns + 1, turn, NodePlacement(start, nowhere))


def keep_residents(
    load: Float[jax.Array, "N E M L"],
    bits: TokenBits | None,
    home_node: Int[jax.Array, "E L"],
    topology: Topology,
    prices: Prices,
    *,
    top_k: int,
) -> Bool[jax.Array, "N E L"]:
    """The residents of every node for given homes; `relibra_jax.planning.residents` chooses them.

    Args:
        load: token copies by the node where they lie, in any unit.
        bits: sampled tokens; None where each copy crosses by itself.
        home_node: the node of each expert's home.
        topology: the expert-parallel group; without resident slots there are no residents.
        prices: from `relative_prices`.
        top_k: K, the experts of a token.
    """
    count = topology.ranks_per_node * topology.resident_slots
    if not count or topology.num_nodes == 1:
        return jnp.zeros((topology.num_nodes, *home_node.shape), bool)
    copies = load.sum(2)
    copies *= topology.num_nodes * top_k / jnp.maximum(copies.sum((0, 1), keepdims=True), 1)
    return choose_residents(bits, copies, home_node, crossing=prices.crossing, push=prices.push, count=count)
