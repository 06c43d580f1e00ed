"""Sampled tokens as bit sets: which tokens use each expert, 32 tokens per word.

On the hierarchical path a token crosses to a node once, however many of its experts are there, so crossings are counts
of *distinct* tokens. Loads do not determine these counts, and neither do counts of expert pairs if a token has more
than two experts. Sets of tokens do: the tokens that visit a node are the union of the sets of its experts. The union is
a bitwise OR and its size is a population count. Tokens are grouped by micro-batch and by the node that holds them. Each
group fills whole words, so the counts are available for every pair of nodes.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt32

from relibra_jax.contract.planner import PlacedRoutes
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.planning.routes import spread

WORDS: Final = 128
"""The number of words of a layer: 4,096 tokens, which estimate a layer's mean crossings to about 1%. It is larger if
the groups need more words. On the recorded trace, half as many words cost 0.3% of modelled time, and four times as many
gained 0.3%."""
WORDS_A_GROUP: Final = 4
"""The fewest words of a group, 128 tokens. Micro-batches that would have fewer are counted together. With fewer words
the search overfits the sample, because the pair of nodes with the most tokens of a micro-batch is then mostly noise."""


class TokenBits(NamedTuple):
    """The sampled tokens that use each expert, as bits; layers are the last axis."""

    bits: UInt32[jax.Array, "E groups N words L"]
    """One bit per token. ``groups`` are groups of neighbouring micro-batches, ``N`` is the node of the tokens."""
    weight: Float[jax.Array, "groups N"]
    """The weight of one sampled token, as a multiple of the number of tokens of a node in the whole batch."""

    def weigh(self, bits: UInt32[jax.Array, "... groups N words L"]) -> Float[jax.Array, "... groups N L"]:
        """Return the weight of a set of tokens, by group and by the node that holds them."""
        count = jax.lax.population_count(bits).sum(-2, dtype=jnp.uint32)
        weight = self.weight.reshape(*[1] * (count.ndim - 3), *self.weight.shape, 1)
        return count.astype(jnp.float32) * weight

    def halves(self) -> "tuple[TokenBits, TokenBits]":
        """Split the tokens into two sets, each of every other word and with the total weight of all tokens."""
        weight = 2 * self.weight
        return TokenBits(self.bits[..., ::2, :], weight), TokenBits(self.bits[..., 1::2, :], weight)


@functools.partial(jax.jit, static_argnames=("topology", "num_micro_batches", "scale"))
def token_bits(
    routes: PlacedRoutes, topology: Topology, *, num_micro_batches: int, scale: int = 1
) -> TokenBits:
    """Convert the routes of sampled tokens to bits.

    Each group takes as many tokens as it has bits, spread over its tokens in the sample. A group with fewer
    tokens repeats some of them, and a group without tokens stays empty.

    Args:
        routes: the routes of the sample, in any order. Tokens whose micro-batch is EMPTY are left out.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        scale: the number of words, as a multiple of `WORDS`.

    Returns:
        The tokens that use each expert, as bits.

    >>> import numpy as np
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> routes = PlacedRoutes(np.array([[[0, 3]], [[1, 3]]]), np.array([0, 0]), np.array([0, 1]))
    >>> bits, weight = token_bits(routes, topology, num_micro_batches=1)
    >>> (bits[:, 0, :, 0, 0] > 0).astype(int).tolist()  # for each expert, the nodes that have tokens that use it
    [[1, 0], [0, 1], [0, 0], [1, 1]]
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    groups = num_groups(num_micro_batches, nodes)
    words = scale * max(WORDS_A_GROUP, WORDS // (groups * nodes))
    micro_batch = jnp.asarray(routes.micro_batch, jnp.int32)
    node = jnp.asarray(routes.rank, jnp.int32) // topology.ranks_per_node
    group = micro_batch * groups // num_micro_batches * nodes + node
    group = jnp.where(micro_batch == EMPTY, groups * nodes, group)
    size = jnp.zeros(groups * nodes, jnp.int32).at[group].add(1, mode="drop")
    first = jnp.cumsum(size, dtype=jnp.int32) - size
    most_tokens = 32 * words
    token = first[:, None] + spread(size, most_tokens)
    token = jnp.argsort(group, stable=True)[jnp.minimum(token, group.size - 1)]
    ids = jnp.asarray(routes.expert_ids)[token].astype(jnp.int32)  # [groups x N, most_tokens, L, K]
    ids = jnp.where(size[:, None, None, None] > 0, ids, experts)
    layers = ids.shape[2]
    word = (jnp.arange(groups * nodes)[:, None] * words + jnp.arange(most_tokens)[None] // 32)[
        :, :, None, None
    ]
    bit = (jnp.uint32(1) << (jnp.arange(most_tokens, dtype=jnp.uint32) % 32))[None, :, None, None]
    bits = jnp.zeros((experts, groups * nodes * words, layers), jnp.uint32)
    # The experts of a token are distinct, so every bit is added once.
    bits = bits.at[ids, word, jnp.arange(layers)[None, None, :, None]].add(bit, mode="drop")
    weight = size.reshape(groups, nodes) * (
        jnp.float32(nodes / most_tokens) / jnp.maximum(size.sum(dtype=jnp.int32), 1)
    )
    return TokenBits(bits.reshape(experts, groups, nodes, words, layers), weight)


def num_groups(num_micro_batches: int, num_nodes: int) -> int:
    """Return the largest number of equal groups of micro-batches that leaves `WORDS_A_GROUP` words to each group.

    Args:
        num_micro_batches: M, the number of micro-batches.
        num_nodes: N, the number of nodes.

    Returns:
        The number of groups, a divisor of M.

    >>> num_groups(8, 4), num_groups(32, 4), num_groups(32, 64), num_groups(7, 4)
    (8, 8, 1, 7)
    """
    most = max(1, WORDS // (WORDS_A_GROUP * num_nodes))
    return max(d for d in range(1, most + 1) if num_micro_batches % d == 0)
