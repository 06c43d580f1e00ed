"""Choose residents: experts of which a node keeps a copy for a whole batch, so that its tokens do not cross for them.

Weights do not change between two optimizer steps, so one push of an expert to a node serves all micro-batches of an
update. On the hierarchical path, a resident saves the crossing of a token only if it was the token's *only* expert on
the node of its home; with the resident, another expert may become the only one. So a crossing that serves one expert
counts whole, one that serves several counts for each of them by a power of `SHARE`. An exchange waits for the pair of
nodes between which most tokens cross, so crossings between other pairs count less. Residents are chosen greedily: each
time the expert that saves the node most time, for all nodes in parallel.
"""

import functools
import itertools
import math
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from relibra_jax.contract.plan import inverse_permutation
from relibra_jax.contract.planner import Placement
from relibra_jax.contract.types import EMPTY, Array, Topology
from relibra_jax.planning.packing import lightest_pack
from relibra_jax.planning.token_bits import TokenBits

MOST_EXPERTS: Final = 3
"""The number of experts of a token on a node beyond which its crossing is divided no further."""
SHARE: Final = 0.25
"""How much less a crossing counts for each further expert that it serves. Equal shares left 20% of the crossings that a
resident per rank saves on synthetic routing of 128 experts on 2 x 8 ranks, and a long search found 1% more."""
PAIR_POWER: Final = 2
"""The power by which a crossing counts less between a pair of nodes with fewer crossings. With 4, shares of the
balanced run's speed on four nodes were the same within 0.1 points, and without it 1 to 3 points lower."""
PASSES: Final = 4
"""The number of passes in which a node chooses its residents; savings are computed again before each pass. If its
slots do not divide evenly over them, there are fewer passes."""


@functools.partial(jax.jit, static_argnames="count")
def choose_residents(
    tokens: TokenBits | None,
    copies: Float[jax.Array, "N E L"],
    home_node: Int[jax.Array, "E L"],
    *,
    crossing: Float[jax.Array, ""] | float,
    push: Float[jax.Array, ""] | float,
    count: int,
) -> Bool[jax.Array, "N E L"]:
    """Choose the experts of which each node keeps a copy.

    Args:
        tokens: the sampled tokens that use each expert, wherever it is held. None chooses by token copies alone.
        copies: the number of token copies of each node's tokens for each expert, as a multiple of the number of tokens
            of a node in the batch.
        home_node: the node of each expert's home.
        crossing: the time in which all tokens of a node cross.
        push: the time that one resident costs. A slot stays empty if every expert saves less, where crossings between
            pairs of nodes with fewer crossings count less.
        count: the number of resident slots of a node.

    Returns:
        Whether a node keeps a copy of an expert; never true for an expert whose home is on the node.
    """
    nodes, experts, layers = copies.shape
    size, passes = experts // nodes, math.gcd(count, PASSES)
    order = jnp.argsort(home_node, axis=0, stable=True)  # by the node of the home
    copies = jnp.take_along_axis(copies, order[None], axis=1)
    index = jnp.arange(nodes)
    at_home = jnp.arange(experts)[None, :, None] // size == index[:, None, None]
    if tokens is not None:
        tokens = tokens._replace(bits=jnp.take_along_axis(tokens.bits, order[:, None, None, None], axis=0))

    def choose(holds: Bool[jax.Array, "N E L"], _):
        if tokens is None:
            saved = jnp.where(holds, 0, copies)
            crossings = saved.reshape(nodes, nodes, size, layers).sum(2)
        else:
            saved, crossings = _crossing_shares(tokens, holds)
        saved *= jnp.repeat(_pair_weights(crossings), size, axis=1)
        pays = crossing * saved > push

        def best(chosen, _):
            remaining = jnp.where(holds | chosen, -1, saved)
            return chosen | (jnp.arange(experts)[None, :, None] == remaining.argmax(1)[:, None]), None

        chosen, _ = jax.lax.scan(best, jnp.zeros_like(holds), length=count // passes)
        return holds | (chosen & pays), None

    start = jnp.broadcast_to(at_home, (nodes, experts, layers))
    holds, _ = jax.lax.scan(choose, start, length=passes)
    position = jax.vmap(inverse_permutation, 1, 1)(order.astype(jnp.int32))
    return jnp.take_along_axis(holds & ~at_home, position[None], axis=1)


def nodes_holding(placement: Placement, topology: Topology) -> Bool[jax.Array, "L N E"]:
    """Return whether each node holds an expert, as home or as resident.

    Args:
        placement: the homes and residents.
        topology: the expert-parallel group.

    Returns:
        Whether node n holds expert e in layer l.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0, resident_slots=1)
    >>> nodes_holding(Placement(jnp.array([[0, 1]]), jnp.array([[[[EMPTY]], [[0]]]])), topology).tolist()
    [[[True, False], [True, True]]]
    """
    holds = homes_on_nodes(placement.home, topology)
    resident = jnp.asarray(placement.resident)
    resident = resident.reshape(*resident.shape[:2], -1)
    layer, node = jnp.arange(len(holds))[:, None, None], jnp.arange(topology.num_nodes)[None, :, None]
    index = jnp.where(resident == EMPTY, topology.num_experts, resident)
    return holds.at[layer, node, index].set(True, mode="drop")


def homes_on_nodes(home: Int[Array, "L E"], topology: Topology) -> Bool[jax.Array, "L N E"]:
    """Return whether the home of each expert is on each node."""
    home_node = jnp.asarray(home) // (topology.num_experts // topology.num_nodes)
    return home_node[:, None] == jnp.arange(topology.num_nodes)[None, :, None]


@functools.partial(jax.jit, static_argnames="topology")
def residents_to_ranks(
    resident: Bool[jax.Array, "N E"],
    load: Float[jax.Array, "N E"],
    home: Int[jax.Array, " E"],
    topology: Topology,
) -> Int[jax.Array, "N G B"]:
    """Give every resident of a node, heaviest first, to its lightest rank that has room, in one layer.

    Args:
        resident: whether a node keeps a copy of an expert; true for at most ``G * resident_slots`` experts per node.
        load: the number of token copies of each expert that each node computes, over the whole batch.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        The logical expert in each resident slot, EMPTY for none.
    """
    ranks, resident_slots = topology.ranks_per_node, topology.resident_slots
    rank = home // topology.home_slots

    def one_node(node, resident, load):
        local_rank = jnp.where(rank // ranks == node, rank % ranks, ranks)
        start = jnp.zeros(ranks, jnp.float32).at[local_rank].add(load, mode="drop")
        weight, expert = jax.lax.top_k(jnp.where(resident, load, -1), min(ranks * resident_slots, load.size))
        # Experts that are not residents come last and take the remaining room, where they are replaced by EMPTY.
        pack, position = lightest_pack(jnp.maximum(weight, 0), start, capacity=resident_slots)
        slot_expert = jnp.where(weight < 0, EMPTY, expert).astype(jnp.int32)
        return jnp.full((ranks, resident_slots), EMPTY, jnp.int32).at[pack, position].set(slot_expert)

    return jax.vmap(one_node)(jnp.arange(topology.num_nodes), resident, load)


@functools.partial(jax.jit, static_argnames="topology")
def residents_on_ranks(
    resident: Bool[jax.Array, "N E L"],
    copies: Float[jax.Array, "N E L"],
    at_home: Float[jax.Array, "E L"],
    home: Int[jax.Array, "L E"],
    topology: Topology,
) -> Int[jax.Array, "L N G B"]:
    """Give residents to ranks in all layers, as `residents_to_ranks` does in one.

    Args:
        resident: whether a node keeps a copy of an expert.
        copies: the number of token copies of each expert by the node that holds them, over the whole batch.
        at_home: the number of token copies that each expert's home computes.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        The logical expert in each resident slot, EMPTY for none.
    """
    nodes, resident_slots = topology.num_nodes, topology.resident_slots
    if not resident_slots:
        return jnp.full((len(home), nodes, topology.ranks_per_node, 0), EMPTY, jnp.int32)
    at_home_node = homes_on_nodes(home, topology).transpose(1, 2, 0)
    load = jnp.where(resident, copies, jnp.where(at_home_node, at_home[None], 0))
    to_ranks = functools.partial(residents_to_ranks, topology=topology)
    return jax.vmap(to_ranks, (2, 2, 0))(resident, load, home)


def _pair_weights(crossings: Float[jax.Array, "N N L"]) -> Float[jax.Array, "N N L"]:
    """Return how much a crossing counts from one node to another: 1 where most tokens cross, and less elsewhere."""
    most = jnp.maximum(crossings.max((0, 1), keepdims=True), jnp.finfo(jnp.float32).tiny)
    return (crossings / most) ** PAIR_POWER


def _crossing_shares(
    tokens: TokenBits, holds: Bool[jax.Array, "N E L"]
) -> tuple[Float[jax.Array, "N E L"], Float[jax.Array, "N N L"]]:
    """Sum what each expert counts of the crossings of each node's tokens; experts are sorted by their homes' node.

    A crossing serves all experts that a token has on a node, and counts for each of them by a power of `SHARE`.

    Returns:
        What each expert counts, and all crossings from each node to each.
    """
    nodes = len(holds)
    remote = jnp.where(holds.swapaxes(0, 1)[:, None, :, None], 0, tokens.bits)
    remote = remote.reshape(nodes, -1, *remote.shape[1:])
    at_least = _at_least(remote.swapaxes(0, 1))
    shares = jnp.zeros((), jnp.float32)
    for others, (enough, more) in enumerate(itertools.pairwise([*at_least, jnp.zeros_like(at_least[0])])):
        exactly = (enough & ~more)[:, None]
        shares += tokens.weigh(remote & exactly).sum(2) * SHARE**others  # [N, size, N of the tokens, L]
    crossings = tokens.weigh(at_least[0]).sum(1).swapaxes(0, 1)
    return shares.reshape(-1, *shares.shape[2:]).swapaxes(0, 1), crossings


def _at_least(bits: UInt32[jax.Array, "size ..."]) -> UInt32[jax.Array, "most ..."]:
    """Return the tokens that are in at least one of the sets, in at least two, and so on up to `MOST_EXPERTS`."""

    def add(sets, bits):
        fewer = jnp.concatenate([jnp.full_like(sets[:1], 0xFFFFFFFF), sets[:-1]])
        return sets | (fewer & bits[None]), None

    return jax.lax.scan(add, jnp.zeros((MOST_EXPERTS, *bits.shape[1:]), bits.dtype), bits)[0]
