"""Quads, sets of four experts that tokens choose together, and a search that places whole quads on nodes.

A token crosses to a node once for all of its experts there, so experts that are chosen together belong together. The
search over nodes (`relibra_jax.planning.node_search`) swaps single experts. It cannot bring such a set to another
node, because every expert but the last one adds crossings instead of saving them. So quads are placed first, by the
same search with quads in the place of experts.

Source: multilevel partitioning of graphs (Karypis and Kumar, 1998) makes small graphs from large ones in the same way,
by matching vertices with strongly connected neighbours.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray, UInt32

from relibra_jax.contract.types import Topology
from relibra_jax.planning.node_search import NodeProblem, anneal_nodes, better_nodes, take_experts
from relibra_jax.planning.token_bits import TokenBits

QUAD: Final = 4
"""The number of experts of a quad."""
LEAST_QUADS: Final = 2
"""The fewest quads of a node: of one alone, a node's load could not be changed without changing all of it."""


def has_quads(topology: Topology, *, top_k: int, hierarchical: bool) -> bool:
    """Return whether to place quads first: tokens have several experts, and cross once for those on a node.

    Args:
        topology: the expert-parallel group, whose nodes need `LEAST_QUADS` quads at least.
        top_k: K, the number of experts of a token.
        hierarchical: whether a token crosses to a node once. Otherwise each of its copies does.
    """
    quads, rest = divmod(topology.num_experts // topology.num_nodes, QUAD)
    return hierarchical and top_k > 1 and not rest and quads >= LEAST_QUADS


def order_by_quad(tokens: TokenBits) -> Int[jax.Array, "E L"]:
    """Order experts so that every `QUAD` consecutive ones are a quad.

    Experts, heaviest first, are paired with the expert with which tokens choose them most often together, relative to
    the geometric mean of how often each is chosen, of equal ones with the first; pairs are paired again.

    Args:
        tokens: the sampled tokens that use each of E experts, E a multiple of `QUAD`.

    >>> uses = jnp.array([0b011, 0b100, 0b011, 0b100, 0b100, 0b011, 0b100, 0b011], jnp.uint32)
    >>> order_by_quad(TokenBits(uses[:, None, None, None, None], jnp.ones((1, 1)))).T.tolist()
    [[0, 2, 5, 7, 1, 3, 4, 6]]
    """

    def count_pairs(bits: UInt32[jax.Array, "E groups N words"]) -> Float[jax.Array, "E E"]:
        both = jax.lax.population_count(bits[:, None] & bits[None]).sum(-1, dtype=jnp.uint32)
        return (both.astype(jnp.float32) * tokens.weight[None, None]).sum((2, 3))

    together = jax.lax.map(count_pairs, jnp.moveaxis(tokens.bits, -1, 0))
    return jax.vmap(_order_layer, 0, 1)(together)


def _order_layer(together: Float[jax.Array, "E E"]) -> Int[jax.Array, " E"]:
    """Order the experts of a layer by quad, given the weight of the tokens that choose both of two experts."""
    count, order = together.diagonal(), jnp.arange(len(together), dtype=jnp.int32)[:, None]
    while order.shape[1] < QUAD:
        pair = _pair(together, count)
        together = together[pair].sum(1)[:, pair].sum(2)
        count, order = count[pair].sum(1), order[pair].reshape(len(pair), -1)
    return order.ravel()


def _pair(together: Float[jax.Array, "I I"], count: Float[jax.Array, " I"]) -> Int[jax.Array, "I//2 2"]:
    """Match items, heaviest first, each with the free item with which it is chosen most often together."""
    scale = jax.lax.rsqrt(jnp.maximum(count, 1e-9))
    affinity = together * scale[None] * scale[:, None]

    def match(free, item):
        others = free.at[item].set(False)
        partner = jnp.argmax(jnp.where(others, affinity[item], -1)).astype(jnp.int32)
        is_free = free[item]
        return jnp.where(is_free, others.at[partner].set(False), free), (is_free, partner)

    order = jnp.argsort(-count, stable=True).astype(jnp.int32)
    _, (is_first, partner) = jax.lax.scan(match, jnp.ones(len(count), bool), order)
    first = jnp.argsort(~is_first, stable=True)[: len(count) // 2]
    return jnp.stack([order[first], partner[first]], -1)


def search_quads(
    problem: NodeProblem,
    start: Int[jax.Array, "E L"],
    key: PRNGKeyArray,
    *,
    top_k: int,
    steps: int,
) -> Int[jax.Array, "E L"]:
    """Search for the nodes of whole quads that minimise modelled time; at least as good as the start.

    Args:
        problem: the inputs of the search over nodes.
        start: the node of each expert to which the result is compared, with the same number of experts on each node.
        key: random key, consumed.
        top_k: K, the number of experts of a token.
        steps: the number of annealing steps.

    Returns:
        The node of each expert, in every layer from the better of the search's result and the start.
    """
    quads, order = len(start) // QUAD, order_by_quad(problem.tokens)

    def members(array: jax.Array) -> jax.Array:
        return take_experts(order, array).reshape(quads, QUAD, *array.shape[1:])

    def any_of(tokens: TokenBits) -> TokenBits:
        # A token visits the node of a quad if it uses any of its experts.
        bits = jax.lax.reduce(members(tokens.bits), jnp.uint32(0), jax.lax.bitwise_or, (1,))
        return tokens._replace(bits=bits)

    together = problem._replace(
        share=members(problem.share).sum(1),
        moves=members(problem.moves).sum(1),
        tokens=any_of(problem.tokens),
        judge=None,
    )
    in_turn = jnp.arange(quads, dtype=jnp.int32)[:, None] % problem.num_nodes
    first_node = jnp.broadcast_to(in_turn, (quads, start.shape[1]))
    node = anneal_nodes(together, first_node, key, top_k=top_k, steps=steps)
    layer = jnp.arange(start.shape[1])[None]
    result = jnp.zeros_like(start).at[order, layer].set(jnp.repeat(node, QUAD, axis=0))
    return better_nodes(problem, start, result, top_k=top_k)
