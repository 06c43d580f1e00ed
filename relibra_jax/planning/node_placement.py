"""Which node each expert lives on, and which experts each node keeps a copy of, so that a batch takes least time.

Homes and residents depend on each other: an expert that every node keeps a copy of may live anywhere, and a node needs
no copy of what lives there. So they take turns: residents for the homes as they are, homes for what the residents leave
to cross, and so on. Residents come first, so that homes move only for what residents do not save.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from relibra_jax.planning.residents import choose_residents
from relibra_jax.planning.time_search import HOTTEST, NodeProblem, search_nodes
from relibra_jax.planning.token_bits import TokenBits
from relibra_jax.types import Topology

TURNS: Final = 3
"""Turns of homes and residents, where there are resident slots. A fourth changed nothing on recorded loads."""
LATER: Final = 1e-3
"""Where annealing starts in the second turn and after it."""


class NodePlacement(NamedTuple):
    """Where experts are, on the level of nodes."""

    home_node: Int[jax.Array, "E L"]
    """The node of each expert's home."""
    resident: Bool[jax.Array, "N E L"]
    """Whether a node keeps a copy of an expert."""


def place_on_nodes(
    load: Float[jax.Array, "N E M L"],
    tokens: TokenBits,
    old_node: Int[jax.Array, "E L"],
    start: Int[jax.Array, "E L"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    steps: int,
    hottest: Float[jax.Array, ""] | float = HOTTEST,
    crossing: Float[jax.Array, ""] | float,
    move: Float[jax.Array, ""] | float,
    push: Float[jax.Array, ""] | float,
    top_k: int,
) -> NodePlacement:
    """Choose homes and residents on the level of nodes by modelled time.

    Args:
        load: token copies by the node where they lie.
        tokens: sampled tokens of the same batch.
        old_node: the node of each expert before the batch.
        start: where the search starts from.
        topology: the expert-parallel group.
        key: random key, consumed.
        steps: annealing steps of all turns together.
        hottest: the temperature of the first step of the first turn.
        crossing: the time of moving all tokens of a node across, in units of the balanced compute of a layer's batch,
            as all prices here.
        move: the time of moving one expert to another node.
        push: the time of one resident.
        top_k: K, the experts of a token.

    Returns:
        NodePlacement.
    """
    nodes = topology.num_nodes
    count = topology.ranks_per_node * topology.resident_slots
    share = load * (nodes / jnp.maximum(load.sum((0, 1, 2)), 1))
    copies = share.sum(2) * top_k
    turns = TURNS if count else 1

    def residents(home_node):
        if not count:
            return jnp.zeros(copies.shape, bool)
        return choose_residents(tokens, copies, home_node, crossing=crossing, push=push, count=count)

    def turn(number, home_node):
        resident = residents(home_node)
        bits = tokens.bits
        if count:
            bits = jnp.where(resident.swapaxes(0, 1)[:, None, :, None], 0, bits)
        kept = resident[:, :, None]
        problem = NodeProblem(
            jnp.where(kept, 0, share).sum(0),
            jnp.where(kept, share, 0).sum(1),
            tokens._replace(bits=bits),
            jnp.float32(crossing),
            old_node,
            jnp.float32(move),
        )
        return search_nodes(
            problem,
            home_node,
            jax.random.fold_in(key, number),
            num_nodes=nodes,
            top_k=top_k,
            steps=max(1, steps // turns),
            hottest=jnp.where(number == 0, hottest, jnp.minimum(hottest, LATER)),
        )

    home_node = jax.lax.fori_loop(0, turns, turn, start) if count else turn(0, start)
    return NodePlacement(home_node, residents(home_node))
