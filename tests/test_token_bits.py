"""Tokens as bits: counts from bits equal counts token by token."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import random_ids

from relibra_jax.contract.planner import PlacedRoutes
from relibra_jax.contract.types import EMPTY, RoutingReplay, Topology
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.routes import place_routes, sample_routes
from relibra_jax.planning.token_bits import num_groups, token_bits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
LAYERS = 3


def sample_of(rng, sizes, *, top_k=2, topology=TOPOLOGY):
    """Make shuffled tokens, ``sizes[m][n]`` of them in micro-batch m on the ranks of node n."""
    sizes = np.asarray(sizes)
    group = np.repeat(np.arange(sizes.size), sizes.ravel())
    rng.shuffle(group)
    rank = group % topology.num_nodes * topology.ranks_per_node
    rank += rng.integers(topology.ranks_per_node, size=len(group))
    ids = random_ids(rng, (len(group), LAYERS), topology.num_experts, top_k, padding=0)
    return PlacedRoutes(ids.astype(np.uint8), group // topology.num_nodes, rank)


def count_bits(bits):
    """Count the bits that are set, ``[E groups N L]``."""
    return np.bitwise_count(np.asarray(bits)).sum(3)


def visits_by_bits(tokens, home_node, nodes):
    """Return the weight of the tokens that visit each node from each node, ``[visited groups N L]``."""
    visits = []
    for node in range(nodes):
        here = np.asarray(home_node == node).T[:, None, None, None]  # [E 1 1 1 L]
        union = np.bitwise_or.reduce(np.where(here, tokens.bits, np.uint32(0)), axis=0)
        visits.append(tokens.weigh(jnp.asarray(union)))
    return np.stack(visits)


def visits_one_by_one(sample, home_node, nodes, micro_batches, local):
    """Count the tokens that visit each node token by token, ``[visited M N L]``."""
    visits = np.zeros((nodes, micro_batches, nodes, LAYERS))
    for ids, m, rank in zip(sample.expert_ids, sample.micro_batch, sample.rank, strict=True):
        for layer in range(LAYERS):
            for node in {int(home_node[layer, e]) for e in ids[layer]}:
                visits[node, m, rank // local, layer] += 1
    return visits


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_token_bits_hold_each_token_once(micro_batches):
    """If every group has as many tokens as bits, each token occurs once."""
    room = 32 * 128 // (2 * micro_batches)
    sample = sample_of(np.random.default_rng(0), np.full((micro_batches, 2), room))
    tokens = token_bits(sample, TOPOLOGY, num_micro_batches=micro_batches)
    expected = np.zeros((8, micro_batches, 2, LAYERS), int)
    for layer, k in np.ndindex(LAYERS, 2):
        at = (sample.expert_ids[:, layer, k], sample.micro_batch, sample.rank // 2)
        np.add.at(expected[..., layer], at, 1)
    np.testing.assert_array_equal(count_bits(tokens.bits), expected)


@pytest.mark.parametrize(
    "sizes",
    [
        [[1024, 1024], [1024, 1024]],
        [[16, 128], [2048, 0]],  # tokens repeated, some left out, and an empty group
    ],
)
def test_token_bits_give_the_crossings_of_the_tokens_taken(sizes):
    """Counts are exact if groups hold all tokens equally often, otherwise within the error of half of the tokens."""
    rng = np.random.default_rng(1)
    sample = sample_of(rng, sizes)
    home_node = np.stack([rng.permutation(8) // 4 for _ in range(LAYERS)])
    tokens = token_bits(sample, TOPOLOGY, num_micro_batches=2)
    result = visits_by_bits(tokens, home_node, 2) * len(sample.rank) / 2
    expected = visits_one_by_one(sample, home_node, 2, 2, 2)
    whole = np.asarray(sizes) <= 1024
    np.testing.assert_allclose(result[:, whole], expected[:, whole], rtol=1e-6)
    np.testing.assert_allclose(result, expected, rtol=0.05)


def test_token_bits_weights_sum_to_the_part_of_each_node():
    """The weights of a node sum to its part of the batch, for groups of few and of many tokens."""
    sizes = np.array([[5, 700], [0, 37], [3000, 1]])
    sample = sample_of(np.random.default_rng(2), sizes)
    bits, weight = token_bits(sample, TOPOLOGY, num_micro_batches=3)
    room = 32 * bits.shape[3]
    np.testing.assert_allclose(np.asarray(weight) * room, 2 * sizes / sizes.sum(), rtol=1e-6)
    # All bits of a group with tokens are set for K experts each; an empty group has no bits set.
    expected = np.where(sizes > 0, 2 * room, 0)[..., None]
    np.testing.assert_array_equal(count_bits(bits).sum(0), np.broadcast_to(expected, (3, 2, LAYERS)))


def test_token_bits_leave_out_unplaced_tokens():
    rng = np.random.default_rng(3)
    sample = sample_of(rng, [[40, 8], [16, 100]])
    lost = PlacedRoutes(sample.expert_ids[:50], np.full(50, EMPTY), np.full(50, EMPTY))
    mixed = PlacedRoutes(*(np.concatenate(both) for both in zip(lost, sample, strict=True)))
    expected, result = (token_bits(tokens, TOPOLOGY, num_micro_batches=2) for tokens in (sample, mixed))
    np.testing.assert_array_equal(result.bits, expected.bits)
    np.testing.assert_allclose(result.weight, expected.weight, rtol=1e-6)


def test_token_bits_are_zero_for_a_batch_without_tokens():
    nothing = PlacedRoutes(np.zeros((3, LAYERS, 2), np.uint8), np.full(3, EMPTY), np.full(3, EMPTY))
    bits, weight = token_bits(nothing, TOPOLOGY, num_micro_batches=2)
    assert not np.asarray(bits).any()
    assert not np.asarray(weight).any()


def test_token_bits_take_many_tokens_of_one_group_evenly():
    """Tokens are taken evenly even if their number times the bits of a group exceeds int32."""
    count = 2**20 + 2**12
    half = np.arange(count) * 2 // count
    nothing = np.zeros(count, np.int32)
    bits, _ = token_bits(
        PlacedRoutes(half[:, None, None].astype(np.uint8), nothing, nothing), TOPOLOGY, num_micro_batches=1
    )
    assert count_bits(bits)[:2, 0, 0, 0].tolist() == [1024, 1024]


@pytest.mark.parametrize(("micro_batches", "nodes"), [(7, 8), (12, 4), (3, 64)])
def test_token_bits_group_micro_batches_in_order_and_in_equal_parts(micro_batches, nodes):
    groups = num_groups(micro_batches, nodes)
    assert micro_batches % groups == 0
    topology = Topology(num_nodes=nodes, ranks_per_node=1, num_experts=nodes, replica_slots=0)
    # The expert of a token is its micro-batch, so the experts of a group are the micro-batches in it.
    m = np.arange(micro_batches) % nodes
    sample = PlacedRoutes(
        m[:, None, None].astype(np.uint8), np.arange(micro_batches), np.zeros(micro_batches, int)
    )
    bits, _ = token_bits(sample, topology, num_micro_batches=micro_batches)
    assert bits.shape[1:3] == (groups, nodes)
    assert bits.shape[3] >= 4, "a group has 128 tokens at least"
    expected = np.zeros((nodes, groups), bool)
    expected[m, np.repeat(np.arange(groups), micro_batches // groups)] = True
    np.testing.assert_array_equal(count_bits(bits)[:, :, 0, 0] > 0, expected)


def test_token_bits_know_crossings_to_three_percent_by_default(shared):
    """Estimate the mean crossings of each layer of the recorded trace; the mean error over layers is below 1%."""
    trace = np.load(shared / "traces" / "gptoss20b_rollouts.npz")
    lengths, routed = trace["lengths"], trace["routed_experts"]
    nodes, micro_batches = 4, 8
    topology = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=0)
    replay = padded(routed, lengths)
    assignment = assign_in_order(len(lengths), topology, num_micro_batches=micro_batches)
    sample = place_routes(sample_routes(replay), assignment)
    tokens = token_bits(sample, topology, num_micro_batches=micro_batches)
    layers = routed.shape[1]
    home_node = np.tile(np.arange(32) // 8, (layers, 1))
    result = off_node(visits_by_bits(tokens, home_node, nodes)) / nodes

    token_node = np.zeros(len(lengths), int)
    m, n, g, b = np.nonzero(np.asarray(assignment.sample) != EMPTY)
    token_node[np.asarray(assignment.sample)[m, n, g, b]] = n
    token_node = np.repeat(token_node, lengths)
    visits = [(routed // 8 == node).any(-1) & (token_node != node)[:, None] for node in range(nodes)]
    expected = np.sum(visits, 0).mean(0)
    error = np.abs(result / expected - 1)
    print(f"crossings from bits: {error.mean():.2%} off on average, {error.max():.2%} in the worst layer")
    assert error.max() < 0.03
    assert error.mean() < 0.01


def padded(routed, lengths):
    """Make the replay of samples that a trace stores one after the other."""
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros((*mask.shape, *routed.shape[1:]), np.uint8)
    ids[mask] = routed
    return RoutingReplay(ids, mask)


def off_node(visits):
    """Return the number of tokens that visit other nodes, by layer."""
    nodes = len(visits)
    other = ~np.eye(nodes, dtype=bool)[:, None, :, None]
    return np.where(other, visits, 0).sum((0, 1, 2))
