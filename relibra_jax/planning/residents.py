"""Residents: experts that a node keeps a copy of for a whole batch, because its tokens cross for them otherwise.

Weights do not change between two optimizer steps, so one push of an expert to a node serves all micro-batches of an
update. On the hierarchical path a resident saves a token's crossing only where it was the *only* expert of the token on
its home's node; taking it out may make another expert the only one. So residents are chosen one after the other, each
time the expert that saves its node most time, for all nodes side by side.
"""

import functools
import math
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from relibra_jax.plan import inverse_permutation
from relibra_jax.planning.packing import lightest_pack
from relibra_jax.planning.token_bits import TokenBits
from relibra_jax.types import EMPTY, Array, Topology

COPY: Final = 0.3
"""What a copy that stays in its node is worth beside a token that does, which has no other reason to cross. A copy may
become such a token once other experts are resident; on recorded loads it gained 1% to 2% of modelled time."""


PASSES: Final = 4
"""After how many choices a node looks anew at what its residents leave to cross; fewer, if the slots do not divide."""


def choose_residents(
    tokens: TokenBits | None,
    copies: Float[jax.Array, "N E L"],
    home_node: Int[jax.Array, "E L"],
    *,
    crossing: Float[jax.Array, ""] | float,
    push: Float[jax.Array, ""] | float,
    count: int,
) -> Bool[jax.Array, "N E L"]:
    """Choose the experts that each node keeps a copy of.

    Args:
        tokens: sampled tokens; every expert's bits, wherever it is held. None where copies alone decide.
        copies: token copies of each node's tokens for each expert, as multiples of a node's tokens in the batch.
        home_node: the node of each expert's home.
        crossing: the time of moving all tokens of a node across.
        push: the time of one resident. A slot stays empty where every expert saves less.
        count: the resident slots of a node.

    Returns:
        Whether a node keeps a copy; never of an expert whose home it is.
    """
    nodes, experts, layers = copies.shape
    size, passes = experts // nodes, math.gcd(count, PASSES)
    order = jnp.argsort(home_node, axis=0, stable=True)  # by the node of the home
    copies = jnp.take_along_axis(copies, order[None], axis=1)
    index = jnp.arange(nodes)
    own = jnp.arange(experts)[None, :, None] // size == index[:, None, None]
    if tokens is not None:
        tokens = tokens._replace(bits=jnp.take_along_axis(tokens.bits, order[:, None, None, None], axis=0))

    def choose(held: Bool[jax.Array, "N E L"], _):
        saved = copies if tokens is None else _only_reason(tokens, held) + COPY * copies
        worth = crossing * saved > push

        def best(chosen, _):
            left = jnp.where(held | chosen, -1, saved)
            return chosen | (jnp.arange(experts)[None, :, None] == left.argmax(1)[:, None]), None

        chosen, _ = jax.lax.scan(best, jnp.zeros_like(held), length=count // passes)
        return held | (chosen & worth), None

    start = jnp.broadcast_to(own, (nodes, experts, layers))
    held, _ = jax.lax.scan(choose, start, length=passes)
    place = jax.vmap(inverse_permutation, 1, 1)(order.astype(jnp.int32))
    return jnp.take_along_axis(held & ~own, place[None], axis=1)


def nodes_holding(
    home: Int[Array, "L E"], resident: Int[Array, "L N G B"] | None, topology: Topology
) -> Bool[jax.Array, "L N E"]:
    """Whether each node holds an expert, as home or as resident.

    Args:
        home: flat home slot of each expert.
        resident: the expert in each resident slot, EMPTY for none; None for no residents.
        topology: the expert-parallel group.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0, resident_slots=1)
    >>> nodes_holding(jnp.array([[0, 1]]), jnp.array([[[[EMPTY]], [[0]]]]), topology).tolist()
    [[[True, False], [True, True]]]
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    home_node = jnp.asarray(home) // (experts // nodes)
    held = home_node[:, None] == jnp.arange(nodes)[None, :, None]
    if resident is None:
        return held
    copied = resident.reshape(*resident.shape[:2], -1)
    layer, node = jnp.arange(len(home))[:, None, None], jnp.arange(nodes)[None, :, None]
    return held.at[layer, node, jnp.where(copied == EMPTY, experts, copied)].set(True, mode="drop")


def residents_to_ranks(
    resident: Bool[jax.Array, "N E"],
    load: Float[jax.Array, "N E"],
    home: Int[jax.Array, " E"],
    topology: Topology,
) -> Int[jax.Array, "N G B"]:
    """Give every resident of a node to one of its ranks, heaviest first to the lightest that has room, in one layer.

    Args:
        resident: whether a node keeps a copy of an expert, of at most ``G * resident_slots``.
        load: token copies of each expert that each node computes, over the whole batch.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        The logical expert in each resident slot, EMPTY for none.
    """
    ranks, room = topology.ranks_per_node, topology.resident_slots
    rank = home // topology.home_slots

    def one_node(node, resident, load):
        here = jnp.where(rank // ranks == node, rank % ranks, ranks)
        start = jnp.zeros(ranks, jnp.float32).at[here].add(load, mode="drop")
        weight, expert = jax.lax.top_k(jnp.where(resident, load, -1), min(ranks * room, load.size))
        # Those that are no residents come last, and take what room is left.
        pack, position = lightest_pack(jnp.maximum(weight, 0), start, room=room)
        held = jnp.where(weight < 0, EMPTY, expert).astype(jnp.int32)
        return jnp.full((ranks, room), EMPTY, jnp.int32).at[pack, position].set(held)

    return jax.vmap(one_node)(jnp.arange(topology.num_nodes), resident, load)


def residents_on_ranks(
    resident: Bool[jax.Array, "N E L"],
    copies: Float[jax.Array, "N E L"],
    at_home: Float[jax.Array, "E L"],
    home: Int[jax.Array, "L E"],
    topology: Topology,
) -> Int[jax.Array, "L N G B"]:
    """`residents_to_ranks` in all layers.

    Args:
        resident: whether a node keeps a copy of an expert.
        copies: token copies of each expert by the node where they lie, over the whole batch.
        at_home: those that come to the expert's home.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        The logical expert in each resident slot, EMPTY for none.
    """
    nodes, room = topology.num_nodes, topology.resident_slots
    if not room:
        return jnp.full((len(home), nodes, topology.ranks_per_node, 0), EMPTY, jnp.int32)
    lives_there = nodes_holding(home, None, topology).transpose(1, 2, 0)
    load = jnp.where(resident, copies, jnp.where(lives_there, at_home[None], 0))
    to_ranks = functools.partial(residents_to_ranks, topology=topology)
    return jax.vmap(to_ranks, (2, 2, 0))(resident, load, home)


def _only_reason(tokens: TokenBits, held: Bool[jax.Array, "N E L"]) -> Float[jax.Array, "N E L"]:
    """The tokens of each node that cross to an expert's home for that expert alone; experts by the node of the home."""
    nodes = len(held)
    wanted = jnp.where(held.swapaxes(0, 1)[:, None, :, None], 0, tokens.bits)
    wanted = wanted.reshape(nodes, -1, *wanted.shape[1:])
    once, twice = _once_and_twice(wanted.swapaxes(0, 1))
    only = tokens.weigh(wanted & (once & ~twice)[:, None]).sum(2)  # [N, size, N of the tokens, L]
    return only.reshape(-1, *only.shape[2:]).swapaxes(0, 1)


def _once_and_twice(
    bits: UInt32[jax.Array, "size ..."],
) -> tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]]:
    """The tokens that are in one of the sets or more, and those that are in two or more."""

    def add(carry, bits):
        once, twice = carry
        return (once | bits, twice | (once & bits)), None

    nothing = jnp.zeros_like(bits[0])
    return jax.lax.scan(add, (nothing, nothing), bits)[0]
