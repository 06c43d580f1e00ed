"""Assign the samples of a batch to micro-batches and ranks.

If the loss is a sum over tokens divided by a count of the whole batch, the gradient does not depend on which sample is
in which micro-batch (sample packing, arXiv 2608.12146). The time of a step does depend on it. For given homes, a sample
is a vector of node loads ``v[l, n]``, as shares of its layer's mean, and we

    minimise  mean_l sum_m max_n sum_{samples of m} v[l, n]  +  sum_m max_rank (attention of its samples)
              +  crossing_cost * mean_l sum_m max_rank (tokens that it sends or receives) / mean tokens,

the imbalance of the nodes over the batch, the time of attention, and the crossings between nodes. Attention of a
sample costs as much as the square of its length says, if a price is given, and else ``attention_cost`` for each token.
No micro-batch and no rank exceeds its budget of tokens. The number of crossings of a sample depends only on its node,
so it is computed once, as a table over nodes; with many layers and ranks, one table entry sums neighbouring layers.
Packing by token count (`relibra_jax.planning.sample_packing`) gives the initial assignment, which simulated annealing
then improves (`relibra_jax.planning.sample_search`). Finally the ranks of each micro-batch are exchanged if that
lowers the total number of crossings.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from relibra_jax.contract.types import EMPTY, Array, Assignment, Price, Topology, check_shape
from relibra_jax.cost.step_time import sample_attention
from relibra_jax.planning.packing import lightest_pack
from relibra_jax.planning.sample_crossings import crossings_by_node
from relibra_jax.planning.sample_packing import check_micro_batches, check_room, pack_samples
from relibra_jax.planning.sample_search import HOTTEST, REFINING, SampleProblem, search_samples
from relibra_jax.planning.token_sample import Routes

MAX_COUNTERS: Final = 512
"""The most counters of sent tokens that the search keeps per micro-batch, one for each rank and group of layers. It
keeps the same number for received tokens."""


def assign_in_order(num_samples: int, topology: Topology, *, num_micro_batches: int) -> Assignment:
    """Assign samples in their given order: contiguous runs to micro-batches, and within each of them to flat ranks.

    Args:
        num_samples: B, the number of samples in the batch. The runs differ by at most one sample.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.

    Returns:
        An Assignment of int32; shorter runs end in EMPTY.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1 or above the number of samples.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> assign_in_order(5, topology, num_micro_batches=2).sample.tolist()
    [[[[0, 1], [2, -1]]], [[[3, -1], [4, -1]]]]
    """
    check_micro_batches(num_samples, num_micro_batches)
    ranks = topology.num_ranks
    per_rank = -(-num_samples // (num_micro_batches * ranks))
    sample = np.full((num_micro_batches, ranks, per_rank), EMPTY, np.int32)
    for micro_batch, samples in enumerate(np.array_split(np.arange(num_samples), num_micro_batches)):
        for rank, run in enumerate(np.array_split(samples, ranks)):
            sample[micro_batch, rank, : run.size] = run
    return Assignment(
        sample.reshape(num_micro_batches, topology.num_nodes, topology.ranks_per_node, per_rank)
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "topology",
        "num_micro_batches",
        "token_budget",
        "samples_per_rank",
        "steps",
        "attention_cost",
        "crossing_cost",
    ),
)
def assign_samples(
    sample_load: Int[Array, "B L E"],
    tokens: Int[Array, " B"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    num_micro_batches: int,
    key: PRNGKeyArray,
    token_budget: float = 1.05,
    samples_per_rank: int | None = None,
    steps: int | None = None,
    attention_cost: float = 0.1,
    crossing_cost: float = 0.03,
    routes: Routes | None = None,
    resident: Int[Array, "L N G resident_slots"] | None = None,
    cost: Price | None = None,
    refine: Assignment | None = None,
) -> Assignment:
    """Choose a micro-batch and a rank for every sample so that the load of nodes and ranks is even.

    Source: sample packing (arXiv 2608.12146) and ReLibra's sample locality; the module docstring states the objective.

    The token budget of a micro-batch or a rank is ``token_budget`` times the mean, but at least the longest sample and
    at least what the initial assignment needs. It is never exceeded. The initial assignment needs more than the other
    two only if a rank has few or long samples: two equal ranks cannot share three equal samples evenly.

    Args:
        sample_load: the number of token copies of each sample for each expert.
        tokens: the length of each sample, which determines its time in attention and its memory.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        key: random key; the same key gives the same assignment.
        token_budget: the most tokens of a micro-batch or a rank, as a multiple of the mean; at least 1.
        samples_per_rank: b, the number of sample positions of a rank. None takes the smallest number that holds all
            samples; more positions give the search more freedom to even out tokens.
        steps: the number of annealing steps; 100,000 is thorough. None takes one step per four pairs of samples, at
            most 8,000, and a quarter of that if assignment and placement alternate (``refine`` is given).
        attention_cost: the node imbalance worth accepting to remove one unit of attention imbalance, in tokens.
        crossing_cost: the node imbalance worth accepting to avoid all crossings.
        routes: sampled tokens of the batch, from `relibra_jax.planning.token_sample.sample_routes`. With them and a
            ``cost`` of hierarchical dispatch, crossings are distinct tokens per node; otherwise they are token copies.
        resident: the expert in each resident slot; tokens of its node do not cross for it. None for no residents.
        cost: the unit times of the cluster and the model, which replace ``attention_cost`` and ``crossing_cost``.
        refine: an assignment of all samples for similar homes. The search starts from it at a lower temperature, and so
            stays close to it. None starts from packing. If all entries are EMPTY, the search also starts from packing,
            but takes fewer steps, because more rounds follow.

    Returns:
        An Assignment of int32; the samples of a rank are in ascending order, EMPTY comes last.

    Raises:
        ValueError: if the shapes disagree, if there are fewer samples than micro-batches, if there are fewer positions
            than samples, or if ``token_budget`` or ``steps`` is below 1 or a cost is negative.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> load = jnp.array([[[8, 0]], [[8, 0]], [[0, 8]], [[0, 8]]])
    >>> home, tokens = jnp.array([[0, 1]]), jnp.array([8, 8, 8, 8])
    >>> options = dict(num_micro_batches=2, key=jax.random.key(0), steps=50)
    >>> sample = assign_samples(load, tokens, home, topology, **options).sample
    >>> (sample // 2).tolist()  # one sample of each kind in each micro-batch, on the node of its expert
    [[[[0]], [[1]]], [[[0]], [[1]]]]
    """
    samples, layers, experts = sample_load.shape
    nodes, ranks = topology.num_nodes, topology.num_ranks
    if samples_per_rank is None:
        samples_per_rank = -(-samples // max(num_micro_batches * ranks, 1))
    if tokens.shape != (samples,) or home.shape != (layers, experts) or experts != topology.num_experts:
        raise ValueError(
            f"sample_load{list(sample_load.shape)}, tokens{list(tokens.shape)} and home{list(home.shape)} must agree"
            f" on samples, layers and {topology.num_experts} experts"
        )
    check_micro_batches(samples, num_micro_batches)
    check_room(samples, topology, num_micro_batches, samples_per_rank)
    if refine is not None:
        check_shape(
            "refine",
            refine.sample.shape,
            (num_micro_batches, nodes, topology.ranks_per_node, samples_per_rank),
        )
    if steps is None:
        steps = min(max(samples**2 // 4, 100), 8_000)
        steps = steps if refine is None else max(steps // 4, 100)
    for name, value, least in (
        ("token_budget", token_budget, 1),
        ("steps", steps, 1),
        ("attention_cost", attention_cost, 0),
        ("crossing_cost", crossing_cost, 0),
    ):
        if not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")

    total = jnp.maximum(jnp.asarray(tokens).sum(dtype=jnp.float32), 1)
    numbers = jnp.asarray(tokens, jnp.float32)
    attention, crossing_price = jnp.float32(attention_cost) * numbers, jnp.float32(crossing_cost)
    if cost is not None:
        compute = jnp.float32(cost.copy) * sample_load.sum(dtype=jnp.float32) / (layers * total)  # of a token
        attention, crossing_price = (
            sample_attention(numbers, cost) / compute,
            jnp.float32(cost.crossing) / compute,
        )
    groups = min(layers, max(1, MAX_COUNTERS // ranks))
    crossing = crossings_by_node(
        sample_load, tokens, home, topology, routes=routes, resident=resident, cost=cost, groups=groups
    )
    length = jnp.append(jnp.asarray(tokens, jnp.int32), 0)
    by_length = cost is not None
    sample = _pack_positions(length[:-1], topology, num_micro_batches, samples_per_rank, by_length=by_length)
    hottest = jnp.float32(HOTTEST)
    if refine is not None:
        start = jnp.asarray(refine.sample, jnp.int32).reshape(sample.shape)
        refining = (start != EMPTY).any()
        sample = jnp.where(refining, jnp.where(start == EMPTY, samples, start), sample)
        hottest = jnp.where(refining, jnp.float32(REFINING), hottest)
    problem = SampleProblem(
        jnp.pad(_node_share(sample_load, home, nodes), ((0, 1), (0, 0))),
        length,
        jnp.pad(crossing, ((0, 1), *[(0, 0)] * 3)) * (crossing_price * ranks / total),
        jnp.append(attention, 0) * (ranks / total),
        _budgets(length, sample, ranks, token_budget),
    )
    hierarchical = cost is not None and cost.hierarchical
    sample = search_samples(
        problem, sample, key, topology, hierarchical=hierarchical, steps=steps, hottest=hottest
    )
    sample = sample.reshape(num_micro_batches, ranks, samples_per_rank)
    sample = _exchange_ranks(sample, problem.crossing.sum((2, 3)), topology)
    sample = jnp.where(sample == samples, EMPTY, sample).astype(jnp.int32)
    return Assignment(sample.reshape(num_micro_batches, nodes, topology.ranks_per_node, samples_per_rank))


def _pack_positions(tokens, topology: Topology, num_micro_batches: int, room: int, *, by_length: bool):
    """Pack samples and return them by position, ``[M positions]``; an empty position holds the number of samples.

    With one position for each rank, micro-batches have equal numbers of samples: in the order of their lengths, so that
    no micro-batch waits for a sample that is much longer than its others, or with equal numbers of tokens.
    """
    samples, ranks = len(tokens), topology.num_ranks
    if room > 1:
        options = {"num_micro_batches": num_micro_batches, "samples_per_rank": room}
        sample = jnp.asarray(pack_samples(tokens, topology, **options).sample)
        sample = sample.reshape(num_micro_batches, ranks * room)
        return jnp.where(sample == EMPTY, samples, sample)
    if by_length:
        order = jnp.argsort(-jnp.asarray(tokens), stable=True).astype(jnp.int32)
        place = assign_in_order(samples, topology, num_micro_batches=num_micro_batches).sample
        place = place.reshape(num_micro_batches, ranks)
        return jnp.where(place == EMPTY, samples, order[place])
    micro_batch, rank = lightest_pack(tokens, jnp.zeros(num_micro_batches, jnp.float32), room=ranks)
    no_samples = jnp.full((num_micro_batches, ranks), samples, jnp.int32)
    return no_samples.at[micro_batch, rank].set(jnp.arange(samples, dtype=jnp.int32))


def _node_share(sample_load, home, nodes):
    """Return the load of each sample on each node, ``[B N*L]``; a layer's mean over nodes, summed over B, is 1 / L."""
    samples, layers, experts = sample_load.shape
    on_node = jnp.asarray(home)[:, None] // (experts // nodes) == jnp.arange(nodes)[None, :, None]
    load = jnp.asarray(sample_load, jnp.float32)
    # A matrix product takes a fifth of the time of gathering each node's experts.
    load = jnp.einsum("ble,lne->bnl", load, on_node.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    load *= nodes / layers / jnp.maximum(load.sum((0, 1), keepdims=True), 1)
    return load.reshape(samples, -1)


def _budgets(length, sample, ranks: int, token_budget: float):
    """Return the token budgets of a micro-batch and of a rank, int32, which `assign_samples` describes."""
    rank_tokens = length[sample].reshape(len(sample), ranks, -1).sum(-1, dtype=jnp.int32)
    mean = length.sum(dtype=jnp.float32) / jnp.array([len(sample), rank_tokens.size])
    minimum = jnp.stack([rank_tokens.sum(1).max(), rank_tokens.max(), length.max()])
    return jnp.maximum(jnp.floor(token_budget * mean).astype(jnp.int32), jnp.maximum(minimum[:2], minimum[2]))


def _exchange_ranks(sample, crossing, topology: Topology):
    """Exchange the ranks of a micro-batch if that lowers its crossings, and sort the samples of each rank."""
    room = topology.ranks_per_node
    by_rank = crossing[sample].sum(2)  # [M, rank, node to which it could move]
    node = jax.vmap(_nearest_node, (0, None))(-by_rank, room)
    crossing_after = jnp.take_along_axis(by_rank, node[..., None], axis=-1).sum((1, 2))
    current_node = (jnp.arange(topology.num_ranks) // room)[None]
    crossing_before = jnp.take_along_axis(
        by_rank, jnp.broadcast_to(current_node, node.shape)[..., None], axis=-1
    ).sum((1, 2))
    rank = jnp.argsort(
        jnp.where((crossing_after < crossing_before)[:, None], node, current_node), axis=-1, stable=True
    )
    return jnp.sort(jnp.take_along_axis(sample, rank[..., None], axis=1), axis=-1)


def _nearest_node(affinity, room):
    """Choose the node of each rank of one micro-batch; ranks that lose most without their first choice go first."""
    first, second = jax.lax.top_k(jnp.pad(affinity, ((0, 0), (0, 1)), constant_values=-jnp.inf), 2)[0].T

    def choose(free, rank):
        node = jnp.argmax(jnp.where(free > 0, affinity[rank], -jnp.inf))
        return free.at[node].add(-1), node

    order = jnp.argsort(second - first)
    _, node = jax.lax.scan(choose, jnp.full(affinity.shape[1], room), order)
    return jnp.zeros_like(node).at[order].set(node)
