"""Sampled tokens as bits: which tokens use an expert, 32 of them in a word.

On the hierarchical path a token crosses to a node once, however many of its experts are there, so crossings are counts
of *distinct* tokens. Loads cannot say them, and neither can pairs of experts where a token has more than two. Sets of
tokens can: those that visit a node are the union of the sets of its experts, and a union of bits is an OR, a count a
population count. Tokens are grouped by micro-batch and by the node where they lie, so that each group fills whole words
and the counts come out for every pair of nodes.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt32

from relibra_jax.types import EMPTY, TokenSample, Topology

WORDS: Final = 128
"""Words of a layer, 4,096 tokens, as long as groups are of one word or more: a layer's mean crossings are then known
to about 1%. On the recorded trace a half of it lost 0.3% of modelled time, and four times as many won 0.3%."""
WORDS_A_GROUP: Final = 4
"""Words of a group, 128 tokens, at least; micro-batches are counted together where they would have fewer. With fewer
the search fits the sample: the busiest node of each micro-batch is then mostly noise."""


class TokenBits(NamedTuple):
    """Which of the sampled tokens use each expert. Layers come last, as in `relibra_jax.planning.annealing.Bins`."""

    bits: UInt32[jax.Array, "E groups N words L"]
    """One bit a token; ``groups`` are groups of neighbouring micro-batches, ``N`` the node where tokens lie."""
    weight: Float[jax.Array, "groups N"]
    """What one token stands for, as a multiple of the tokens of a node in the whole batch."""

    def weigh(self, bits: UInt32[jax.Array, "... groups N words L"]) -> Float[jax.Array, "... groups N L"]:
        """What a set of tokens stands for, by group and by the node where they lie."""
        counted = jax.lax.population_count(bits).sum(-2, dtype=jnp.uint32)
        weight = self.weight.reshape(*[1] * (counted.ndim - 3), *self.weight.shape, 1)
        return counted.astype(jnp.float32) * weight

    def halves(self) -> "tuple[TokenBits, TokenBits]":
        """Two sets of tokens, each of every other word, that stand for as much as all."""
        weight = 2 * self.weight
        return TokenBits(self.bits[..., ::2, :], weight), TokenBits(self.bits[..., 1::2, :], weight)


def token_bits(
    tokens: TokenSample, topology: Topology, *, num_micro_batches: int, scale: int = 1
) -> TokenBits:
    """The bits of a sample of tokens.

    Each group takes as many tokens as it has bits, evenly from those of the sample; a group with fewer takes some
    repeatedly, and one with none stays empty.

    Args:
        tokens: the sample, in any order; those whose micro-batch is EMPTY are left out.
        topology: the expert-parallel group.
        num_micro_batches: M.
        scale: how many times as many words as `WORDS`.

    Returns:
        TokenBits.

    >>> import numpy as np
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> tokens = TokenSample(np.array([[[0, 3]], [[1, 3]]]), np.array([0, 0]), np.array([0, 1]))
    >>> bits, weight = token_bits(tokens, topology, num_micro_batches=1)
    >>> (bits[:, 0, :, 0, 0] > 0).astype(int).tolist()  # for each expert, which nodes have tokens that use it
    [[1, 0], [0, 1], [0, 0], [1, 1]]
    """
    nodes, experts = topology.num_nodes, topology.num_experts
    groups = num_groups(num_micro_batches, nodes)
    words = scale * max(WORDS_A_GROUP, WORDS // (groups * nodes))
    micro_batch = jnp.asarray(tokens.micro_batch, jnp.int32)
    node = jnp.asarray(tokens.rank, jnp.int32) // topology.ranks_per_node
    group = micro_batch * groups // num_micro_batches * nodes + node
    group = jnp.where(micro_batch == EMPTY, groups * nodes, group)
    size = jnp.zeros(groups * nodes, jnp.int32).at[group].add(1, mode="drop")
    first = jnp.cumsum(size, dtype=jnp.int32) - size
    room = 32 * words
    number, whole, rest = jnp.arange(room, dtype=jnp.int32)[None], size[:, None] // room, size[:, None] % room
    chosen = first[:, None] + number * whole + number * rest // room  # so that int32 holds it
    chosen = jnp.argsort(group, stable=True)[jnp.minimum(chosen, group.size - 1)]
    ids = jnp.asarray(tokens.expert_ids)[chosen].astype(jnp.int32)  # [groups x N, room, L, K]
    ids = jnp.where(size[:, None, None, None] > 0, ids, experts)
    layers = ids.shape[2]
    word = (jnp.arange(groups * nodes)[:, None] * words + jnp.arange(room)[None] // 32)[:, :, None, None]
    bit = (jnp.uint32(1) << (jnp.arange(room, dtype=jnp.uint32) % 32))[None, :, None, None]
    bits = jnp.zeros((experts, groups * nodes * words, layers), jnp.uint32)
    # A token has different experts, so every bit is added once.
    bits = bits.at[ids, word, jnp.arange(layers)[None, None, :, None]].add(bit, mode="drop")
    weight = size.reshape(groups, nodes) * (
        jnp.float32(nodes / room) / jnp.maximum(size.sum(dtype=jnp.int32), 1)
    )
    return TokenBits(bits.reshape(experts, groups, nodes, words, layers), weight)


def num_groups(num_micro_batches: int, num_nodes: int) -> int:
    """Into how many groups micro-batches go: as many as leave `WORDS_A_GROUP` words to a group, in equal parts.

    >>> num_groups(8, 4), num_groups(32, 4), num_groups(32, 64), num_groups(7, 4)
    (8, 8, 1, 7)
    """
    most = max(1, WORDS // (WORDS_A_GROUP * num_nodes))
    return max(d for d in range(1, most + 1) if num_micro_batches % d == 0)
